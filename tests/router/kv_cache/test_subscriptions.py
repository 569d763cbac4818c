"""Subscriptions over real ZeroMQ sockets, to a publisher that acts like SGLang's and can lose batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio

from router.engines.form.kv_events import KvSource
from router.kv_cache import subscriptions
from router.kv_cache.index import KvIndex
from router.kv_cache.subscriptions import KvSubscriptions
from router.workers.worker import KvFollowing, KvState
from tests.router.kv_cache.recount import check

URL = "http://127.0.0.1:30001"
END = (-1).to_bytes(8, "big", signed=True)


def stored(own: int, *ids: int, parent: int | None = None) -> dict[str, Any]:
    """Return an event with a block for every two ids."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(own, own + len(ids) // 2)),
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
    }


def removed(*owns: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": owns, "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """A worker's two sockets, with a clock of its own, so that no two batches have the same time."""

    def __init__(
        self,
        port: int = 0,
        replay_port: int | None = 0,
        *,
        topic: str = "",
        now: float = 1_000.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self._context = zmq.asyncio.Context()
        self.topic = topic.encode()
        self.now = now
        # An XPUB is a PUB that reports its subscribers.
        self._pub = self._context.socket(zmq.XPUB)
        try:
            self._pub.ipv6 = "[" in host
            self._pub.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.port = _port(self._pub)
        self.replay_port: int | None = None
        self._router: zmq.asyncio.Socket | None = None
        if replay_port is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.ipv6 = "[" in host
            self._router.bind(f"tcp://{host}:{replay_port or '*'}")
            self.replay_port = _port(self._router)
        self.buffer: list[tuple[int, bytes]] = []
        self.numbers = 0
        self.asked: list[int] = []
        self.with_topic = True
        """Whether a replay contains the topic, as in today's SGLang."""
        self.answers = True
        self.dropped: set[int] = set()
        """Numbers of batches that their first replay loses."""
        self._task = asyncio.create_task(self._serve())

    def source(self, **more: Any) -> KvSource:
        return KvSource(self.host, self.port, replay_port=self.replay_port, **more)

    async def subscribed(self, topic: bytes = b"") -> None:
        assert await self._pub.recv() == b"\x01" + topic

    async def publish(self, *events: Any, kept: bool = True, sent: bool = True, payload: bytes | None = None) -> int:
        """Make the next batch; keep it for replays and send it, if so requested."""
        number, self.numbers, self.now = self.numbers, self.numbers + 1, self.now + 1.0
        if payload is None:
            payload = msgspec.msgpack.encode([self.now, events, 0])
        if kept:
            self.buffer.append((number, payload))
        if sent:
            await self._pub.send_multipart([self.topic, number.to_bytes(8, "big"), payload])
        return number

    async def repeat(self, number: int) -> None:
        """Send a kept batch again."""
        await self._pub.send_multipart([self.topic, number.to_bytes(8, "big"), dict(self.buffer)[number]])

    async def _serve(self) -> None:
        while self._router is not None:
            who, empty, start = await self._router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            topic = [self.topic] if self.with_topic else []
            for number, payload in self.buffer:
                if number < self.asked[-1]:
                    continue
                if number in self.dropped:
                    self.dropped.discard(number)
                    continue
                await self._router.send_multipart([who, b"", *topic, number.to_bytes(8, "big"), payload])
            if self.answers:
                await self._router.send_multipart([who, b"", *(b"" for _ in topic), END, b""])

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._context.destroy(linger=0)


def _port(socket: zmq.asyncio.Socket) -> int:
    return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


class Following:
    """The subscriptions under test and their index."""

    def __init__(self) -> None:
        self.index = KvIndex()
        self.subscriptions = KvSubscriptions(self.index, replay_seconds=20)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.subscriptions.counts)

    def overlap(self, *ids: int, url: str = URL) -> int:
        return self.index.overlaps(ids).get(url, 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - an index has no notification of changes
            await asyncio.sleep(0)
        check(self.index)

    async def batches(self, count: int) -> None:
        await self.until(lambda: self.subscriptions.counts["batches"] == count)
        await self.settled()

    async def settled(self) -> None:
        """Wait until no subscription is in the middle of a batch."""
        for _ in range(20):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def following(*sources: tuple[str, KvSource]) -> AsyncIterator[Following]:
    made = Following()
    try:
        async with asyncio.timeout(30):  # so that a hanging test fails
            for url, source in sources:
                made.subscriptions.start(url, source)
            yield made
    finally:
        await made.subscriptions.close()


@contextlib.asynccontextmanager
async def publishing(*args: Any, **more: Any) -> AsyncIterator[Publisher]:
    async with contextlib.aclosing(Publisher(*args, **more)) as publisher:
        yield publisher


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_published_events_reach_the_index(runner: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish(stored(10, 1, 2, 3, 4))
            await worker.publish(stored(20, 5, 6, parent=11), stored(30, 7, 8))
            await router.batches(2)
            assert router.overlap(1, 2, 3, 4, 5, 6) == 3
            assert router.overlap(7, 8) == 1
            await worker.publish(removed(11))
            await router.batches(3)
            assert router.overlap(1, 2, 3, 4, 5, 6) == 1
            await worker.publish(CLEARED)
            await router.batches(4)
            assert router.overlap(1, 2) == 0
            assert router.index.tracked(URL)

    runner(scenario())


def test_requests_get_their_turn_during_a_long_event() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            ids = list(range(100_000))
            await worker.publish(stored(0, *ids))
            seen: set[int] = set()
            while 50_000 not in seen:
                seen.add(router.index.tree_size(URL))
                await asyncio.sleep(0)
            assert len(seen) >= 50
            assert router.overlap(*ids) == 50_000
            assert router.index.tracked(URL)

    run(scenario)


def test_requests_get_their_turn_during_many_events() -> None:
    """A worker of SGLang has an event for each page: by default, for each token."""

    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish(*(stored(number, number, number) for number in range(10_000)))
            seen: set[int] = set()
            while 10_000 not in seen:
                seen.add(router.index.tree_size(URL))
                await asyncio.sleep(0)
            assert len(seen) >= 50

    run(scenario)


def test_requests_get_their_turn_during_a_long_removal() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish(stored(0, *range(100_000)))
            await router.batches(1)
            await router.until(lambda: router.index.tree_size(URL) == 50_000)
            await worker.publish(removed(*range(50_000)))
            seen: set[int] = set()
            while 0 not in seen:
                seen.add(router.index.tree_size(URL))
                await asyncio.sleep(0)
            assert len(seen) >= 50

    run(scenario)


def test_requests_get_their_turn_during_a_long_replay() -> None:
    """Of a worker whose batches have nothing in them: receiving from a socket that has more does not suspend."""

    async def scenario() -> None:
        async with publishing() as worker:
            for _ in range(3_000):
                await worker.publish(sent=False)
            turns = 0
            async with following((URL, worker.source())) as router:
                await router.until(lambda: router.subscriptions.counts["batches"] > 0)
                while router.subscriptions.counts["batches"] < 3_000:
                    turns += 1
                    await asyncio.sleep(0)
            assert turns >= 2_900

    run(scenario)


def test_a_hash_is_signed() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish({**stored(0, 1, 2), "block_hashes": [-(2**63)]})
            await worker.publish({**stored(0, 3, 4), "block_hashes": [-1], "parent_block_hash": -(2**63)})
            await router.batches(2)
            assert router.overlap(1, 2, 3, 4) == 2
            await worker.publish(removed(-1))
            await router.batches(3)
            assert router.overlap(1, 2, 3, 4) == 1

    run(scenario)


def test_older_workers_write_events_as_arrays() -> None:
    async def scenario() -> None:
        async with publishing(replay_port=None) as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish(["BlockStored", [10, 11], None, [1, 2, 3, 4], 2, None], ["BlockRemoved", [11]])
            await router.batches(1)
            assert router.overlap(1, 2, 3, 4) == 1
            await worker.publish(["AllBlocksCleared"])
            await router.batches(2)
            assert router.overlap(1, 2) == 0

    run(scenario)


def test_events_from_before_the_router_started_are_replayed() -> None:
    """A restarted router knows the caches of workers that publish nothing new."""

    async def scenario() -> None:
        async with publishing() as worker:
            await worker.publish(stored(10, 1, 2))
            await worker.publish(stored(11, 3, 4, parent=10))
            async with following((URL, worker.source())) as router:
                await router.batches(2)
                assert router.overlap(1, 2, 3, 4) == 2
                assert router.index.tracked(URL)
                assert router.counts == {"replays": 1, "batches": 2}

    run(scenario)


def test_a_worker_without_events_has_an_empty_cache() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            assert not router.index.tracked(URL)
            await router.until(lambda: router.index.tracked(URL))
            assert router.counts == {"replays": 1}

    run(scenario)


@pytest.mark.parametrize("with_topic", [True, False])
def test_a_gap_is_replayed(with_topic: bool) -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            worker.with_topic = with_topic
            await worker.subscribed()
            await router.until(lambda: router.index.tracked(URL))
            await worker.publish(stored(10, 1, 2))
            await worker.publish(stored(11, 3, 4, parent=10), sent=False)
            await worker.publish(removed(10), sent=False)
            await worker.publish(stored(20, 5, 6))
            await router.batches(4)
            assert worker.asked == [0, 1]
            assert router.counts == {"replays": 2, "gaps": 1, "batches": 4}
            assert (router.overlap(1, 2, 3, 4), router.overlap(5, 6)) == (0, 1)
            assert router.index.tracked(URL)
            await worker.publish(stored(10, 1, 2))
            await router.batches(5)
            assert router.overlap(1, 2, 3, 4) == 2

    run(scenario)


def test_without_replays_a_gap_empties_the_cache() -> None:
    """A block that was stored before the gap may be gone, so it must not count."""

    async def scenario() -> None:
        async with publishing(replay_port=None) as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish(stored(10, 1, 2))
            await worker.publish(removed(10), sent=False)
            await worker.publish(stored(20, 5, 6))
            await router.batches(2)
            assert (router.overlap(1, 2), router.overlap(5, 6)) == (0, 1)
            assert router.counts == {"gaps": 1, "lost": 1, "batches": 2}
            assert not router.index.tracked(URL)
            await worker.publish(CLEARED)
            await router.batches(3)
            assert router.index.tracked(URL)

    run(scenario)


def test_a_replay_that_starts_too_late_empties_the_cache() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await router.until(lambda: router.index.tracked(URL))
            await worker.publish(stored(10, 1, 2))
            await router.batches(1)
            await worker.publish(removed(10), sent=False, kept=False)
            await worker.publish(stored(20, 5, 6), sent=False)
            await worker.publish(stored(30, 7, 8))
            await router.batches(3)
            assert (router.overlap(1, 2), router.overlap(5, 6), router.overlap(7, 8)) == (0, 1, 1)
            assert router.counts == {"replays": 2, "gaps": 1, "lost": 1, "batches": 3}
            assert not router.index.tracked(URL)

    run(scenario)


def test_batches_lost_in_a_replay_are_requested_again() -> None:
    """A ROUTER socket drops what does not fit into its queue."""

    async def scenario() -> None:
        async with publishing() as worker:
            for number in range(50):
                await worker.publish(stored(number, number, number))
            worker.dropped = {7, 8}
            async with following((URL, worker.source())) as router:
                await router.batches(50)
                assert all(router.overlap(number, number) == 1 for number in range(50))
                assert router.index.tracked(URL)
                assert worker.asked == [0, 7]

    run(scenario)


def test_a_repeated_batch_counts_once() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await router.until(lambda: router.index.tracked(URL))
            await worker.publish(stored(10, 1, 2))
            await worker.publish(removed(10))
            await worker.repeat(0)
            await worker.publish(stored(20, 5, 6))
            await router.batches(3)
            assert router.overlap(1, 2) == 0
            assert router.counts == {"replays": 1, "batches": 3}

    run(scenario)


def test_restarted_numbers_mean_another_process() -> None:
    async def scenario() -> None:
        async with publishing(replay_port=None) as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            for number in range(3):
                await worker.publish(stored(number, number, number))
            await router.batches(3)
            worker.numbers = 0
            await worker.publish(stored(20, 5, 6))
            await router.batches(4)
            assert (router.overlap(0, 0), router.overlap(5, 6)) == (0, 1)
            assert router.counts == {"batches": 4, "restarts": 1}
            assert router.index.tracked(URL)

    run(scenario)


@pytest.mark.parametrize("replays", [True, False])
def test_a_restarted_worker_is_followed(replays: bool) -> None:
    async def scenario() -> None:
        async with publishing(replay_port=0 if replays else None) as worker:
            source = worker.source()
            async with following((URL, source)) as router:
                await worker.subscribed()
                for number in range(3):
                    await worker.publish(stored(number, number, number))
                await router.batches(3)
                await worker.aclose()
                await router.until(lambda: router.counts.get("disconnects", 0) == 1)
                assert router.overlap(1, 1) == 0
                assert not router.index.tracked(URL)
                async with publishing(source.port, source.replay_port, now=9_000.0) as again:
                    # Three batches were published before: without a replay, the next number would seem to follow.
                    for number in range(3):
                        await again.publish(stored(10 + number, 70 + number, 70), sent=False)
                    await again.subscribed()
                    await again.publish(stored(20, 5, 6))
                    await router.until(lambda: router.overlap(5, 6) == 1)
                    assert router.overlap(1, 1) == 0
                    assert router.overlap(71, 70) == (1 if replays else 0)
                    assert router.index.tracked(URL) is replays

    run(scenario)


def test_an_unanswered_replay_times_out() -> None:
    async def scenario() -> None:
        async with publishing() as worker:
            worker.answers = False
            router = Following()
            router.subscriptions = KvSubscriptions(router.index, replay_seconds=0.01)
            try:
                router.subscriptions.start(URL, worker.source())
                await worker.subscribed()
                await router.until(lambda: router.counts.get("replay_timeouts", 0) == 1)
                assert not router.index.tracked(URL)
                await worker.publish(stored(10, 1, 2))
                await router.batches(1)
                assert router.overlap(1, 2) == 1
                assert router.index.tracked(URL)
            finally:
                await router.subscriptions.close()

    run(scenario)


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [{"type": "?"}], 0])]
)
def test_an_unreadable_batch_empties_the_cache(payload: bytes) -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await router.until(lambda: router.index.tracked(URL))
            await worker.publish(stored(10, 1, 2))
            await worker.publish(payload=payload)
            await worker.publish(stored(20, 5, 6))
            await router.batches(2)
            assert (router.overlap(1, 2), router.overlap(5, 6)) == (0, 1)
            assert router.counts["unreadable"] == 1
            assert not router.index.tracked(URL)

    run(scenario)


def test_of_many_unreadable_batches_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            for _ in range(100):
                await worker.publish(payload=b"?")
            await router.until(lambda: router.counts.get("unreadable", 0) == 100)
            found = router.subscriptions.following(URL)
            assert found is not None
            assert "no batch of KV events" in str(found.error)
            await worker.publish(stored(10, 1, 2))
            await router.until(lambda: router.subscriptions.following(URL) == KvFollowing(KvState.CONNECTED))

    run(scenario)
    assert len([one for one in caplog.records if "no batch of KV events" in one.message]) == 1


def test_an_unreadable_batch_in_a_replay_empties_the_cache() -> None:
    async def scenario() -> None:
        async with publishing() as worker:
            await worker.publish(stored(10, 1, 2))
            await worker.publish(payload=b"\xff")
            await worker.publish(stored(20, 5, 6))
            async with following((URL, worker.source())) as router:
                await router.batches(2)
                assert (router.overlap(1, 2), router.overlap(5, 6)) == (0, 1)
                assert not router.index.tracked(URL)

    run(scenario)


def test_only_the_workers_topic_counts() -> None:
    async def scenario() -> None:
        async with publishing(topic="kv") as worker, following((URL, worker.source(topic="kv"))) as router:
            await worker.subscribed(b"kv")
            worker.topic = b"load"
            await worker.publish(payload=b"something else")
            worker.topic, worker.numbers, worker.buffer = b"kv", 0, []
            await worker.publish(stored(10, 1, 2))
            await router.batches(1)
            assert router.overlap(1, 2) == 1
            assert "unreadable" not in router.counts

    run(scenario)


async def neighbours() -> tuple[Publisher, Publisher]:
    """Return two publishers on consecutive ports."""
    while True:
        first = Publisher(replay_port=None)
        try:
            return first, Publisher(first.port + 1, None)
        except zmq.ZMQError:  # the port is taken
            await first.aclose()


def test_each_rank_is_followed_on_its_own_port() -> None:
    async def scenario() -> None:
        first, second = await neighbours()
        async with (
            contextlib.aclosing(first),
            contextlib.aclosing(second),
            following((URL, first.source(ranks=2))) as router,
        ):
            await first.subscribed()
            await second.subscribed()
            await first.publish(stored(10, 1, 2))
            await router.batches(1)
            assert not router.index.tracked(URL)
            await second.publish(stored(10, 1, 2, 3, 4))
            await router.batches(2)
            assert router.overlap(1, 2, 3, 4) == 2
            assert router.index.tracked(URL)

    run(scenario)


def test_a_worker_that_turns_out_to_be_several_targets_is_followed_anew() -> None:
    """Each target has a cache then; where their number is another one, all caches are of one target."""

    async def scenario() -> None:
        first, second = await neighbours()
        async with (
            contextlib.aclosing(first),
            contextlib.aclosing(second),
            following((URL, first.source(ranks=2))) as router,
        ):
            router.subscriptions.start(URL, first.source(ranks=2), 2)
            router.subscriptions.start(URL, first.source(ranks=2), 2)  # is no news
            await first.subscribed()
            await second.subscribed()
            await first.publish(stored(10, 1, 2))
            await second.publish(stored(10, 1, 2, 3, 4))
            await router.batches(2)
            assert router.index.overlaps([1, 2, 3, 4]) == {URL: 1, f"{URL}@1": 2}
            router.subscriptions.start(URL, first.source(ranks=2), 3)
            assert not router.index.is_separate(URL)
            assert URL in router.subscriptions.urls

    run(scenario)


def test_a_stopped_worker_is_forgotten_at_once() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish(stored(10, 1, 2))
            await router.batches(1)
            assert URL in router.subscriptions.urls
            router.subscriptions.stop(URL)
            assert not router.subscriptions.urls
            assert router.overlap(1, 2) == 0
            await worker.publish(stored(20, 5, 6))
            await router.settled()
            assert router.overlap(5, 6) == 0
            router.subscriptions.stop(URL)
            router.subscriptions.start(URL, worker.source())
            await router.batches(3)
            assert router.overlap(5, 6) == 1

    run(scenario)


def test_starting_again_only_matters_with_another_source() -> None:
    async def scenario() -> None:
        async with publishing() as worker, publishing() as other, following((URL, worker.source())) as router:
            await worker.publish(stored(10, 1, 2))
            await router.batches(1)
            router.subscriptions.start(URL, worker.source())
            assert router.overlap(1, 2) == 1
            router.subscriptions.start(URL, other.source())
            assert router.overlap(1, 2) == 0
            await other.publish(stored(20, 5, 6))
            await router.batches(2)
            assert router.overlap(5, 6) == 1

    run(scenario)


def test_a_worker_may_start_after_its_subscription() -> None:
    async def scenario() -> None:
        async with publishing() as worker:
            source = worker.source()
        async with following((URL, source)) as router:
            await router.settled()
            assert router.counts == {}
            async with publishing(source.port, source.replay_port) as late:
                await late.publish(stored(10, 1, 2))
                await router.batches(1)
                assert router.overlap(1, 2) == 1

    run(scenario)


def test_a_worker_may_have_an_ipv6_address() -> None:
    async def scenario() -> None:
        async with publishing(host="[::1]") as worker, following((URL, worker.source())) as router:
            await worker.publish(stored(10, 1, 2), sent=False)
            await router.batches(1)
            assert router.overlap(1, 2) == 1, "replayed"
            await worker.publish(stored(20, 5, 6))
            await router.batches(2)
            assert router.overlap(5, 6) == 1

    run(scenario)


async def fails(router: Following, worker: Publisher, times: int) -> None:
    """Let something else publish at the port: the numbers of its batches are too large to ask for."""
    for number in (b"\xfe" * 9, b"\xff" * 9):
        await worker._pub.send_multipart([b"", number, dict(worker.buffer)[0]])
    await router.until(lambda: router.subscriptions.counts["failed"] == times)


def test_a_subscription_that_fails_is_told_and_its_cache_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.subscribed()
            await worker.publish(stored(10, 1, 2))
            await router.batches(1)
            assert router.index.tracked(URL)
            await fails(router, worker, 1)
            assert not router.index.tracked(URL)
            assert router.overlap(1, 2) == 0
            assert router.subscriptions.following(URL) == KvFollowing(
                KvState.FAILED, "OverflowError: int too big to convert"
            )

    run(scenario)
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        f"the KV events of {URL}, rank 0, could not be followed; next attempt in 0.5 s"
    ]


def test_a_subscription_that_failed_is_tried_again_after_longer_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscriptions, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(subscriptions, "LONGEST_WAIT_SECONDS", 0.03)

    async def scenario() -> None:
        async with publishing() as worker, following((URL, worker.source())) as router:
            await worker.publish(stored(10, 1, 2))
            for times in range(1, 5):
                await worker.subscribed()
                await router.until(lambda: router.subscriptions.following(URL) == KvFollowing(KvState.CONNECTED))
                assert router.index.tracked(URL), "all of it was replayed"
                assert router.overlap(1, 2) == 1
                await fails(router, worker, times)
                assert await worker._pub.recv() == b"\x00", "its socket is closed"
            await router.until(lambda: router.overlap(1, 2) == 1)

    run(scenario)
    waits = [one.args[2] for one in caplog.records if one.levelname == "ERROR" and isinstance(one.args, tuple)]
    assert waits[:3] == [0.01, 0.02, 0.03]


def test_how_far_it_is_with_a_worker() -> None:
    async def scenario() -> None:
        async with publishing() as worker, following() as router:
            assert router.subscriptions.following(URL) is None
            port = worker.port
            await worker.aclose()
            router.subscriptions.start(URL, KvSource("127.0.0.1", port))
            await router.settled()
            assert router.subscriptions.following(URL) == KvFollowing(KvState.CONNECTING)
            async with publishing(port, None):
                await router.until(lambda: router.subscriptions.following(URL) == KvFollowing(KvState.CONNECTED))
            await router.until(lambda: router.subscriptions.following(URL) == KvFollowing(KvState.CONNECTING))
            router.subscriptions.stop(URL)
            assert router.subscriptions.following(URL) is None

    run(scenario)


def test_many_workers_fit() -> None:
    """ZeroMQ's default limit is 1,023 sockets, and a subscription takes three."""

    async def scenario() -> None:
        async with publishing() as worker:
            await worker.publish(stored(10, 1, 2))
            urls = [f"http://127.0.0.1:{30000 + number}" for number in range(400)]
            async with following(*((url, worker.source()) for url in urls)) as router:
                await router.batches(len(urls))
                assert len(router.index.overlaps([1, 2])) == len(urls)

    run(scenario)


def test_closing_without_a_start_is_no_error() -> None:
    run(lambda: KvSubscriptions(KvIndex()).close())
