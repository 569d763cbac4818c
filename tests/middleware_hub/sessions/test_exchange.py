"""The same request sent again at every moment of the first one's life; what is kept of it, and for how long."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from middleware_hub.sessions.chats import PIECES_AT_ONCE, PING_SECONDS
from middleware_hub.sessions.exchange import KEPT_SECONDS, Exchange, RequestKey
from middleware_hub.sessions.turn.generation import TurnGeneration
from tests.middleware_hub.sessions.in_process import Client, Room, gated, until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}


def kept(room: Room) -> int:
    return len(room.session._exchanges)


async def undelivered(room: Room, **headers: str) -> None:
    """A reply that is whole, and whose client left before."""
    says = room.engine.says("one two three", hold=2)
    client = room.ask(BODY, **headers)
    await room.engine.arrived()
    await client.leave()
    says.go.set()
    await until(lambda: room.session._exchanges[-1].over)


class TestWhileItIsComposed:
    """The prompt is being encoded, and no worker knows of it yet."""

    @pytest.mark.parametrize("header", [{"again": "1"}, {"key": "k"}])
    def test_a_request_that_is_sent_again_is_the_same_one(self, header: dict[str, str]) -> None:
        async def work() -> None:
            room, slow = gated()
            await room.open()
            first = room.ask(BODY, **({"key": "k"} if "key" in header else {}))
            await until(lambda: slow.waiting)
            await first.leave()
            again = room.ask(BODY, **header)
            slow.gate.set()
            status, _ = await again.answer()
            assert status == 200
            assert (room.session.samples, len(room.engine.log)) == (1, 1)
            assert room.metric("tito_session_resent_requests_total", kind="adopted") == 1

        asyncio.run(work())

    def test_a_client_that_left_before_its_turn_was_begun_has_none(self) -> None:
        """Both requests wait for the start of the router, or for a store: the first one must not make a second sample."""

        async def work() -> None:
            room = Room()
            await room.open()
            chats, ready = room.app._chats, asyncio.Event()
            assert chats is not None
            chats._warming = asyncio.ensure_future(ready.wait())  # type: ignore[assignment]
            first = room.ask(BODY)
            again = room.ask(BODY, again="1")
            await until(lambda: not first._content and not again._content)
            leaving = asyncio.create_task(first.leave())
            await asyncio.sleep(0)
            ready.set()
            await leaving
            assert (await again.answer())[0] == 200
            assert (room.session.samples, len(room.engine.log), room.session.trie.in_flight) == (1, 1, 0)

        asyncio.run(work())

    def test_an_orphan_that_no_client_asks_for_leaves_nothing_behind(self) -> None:
        async def work() -> None:
            room, slow = gated(orphan_grace=0.0)
            await room.open()
            first = room.ask(BODY)
            await until(lambda: slow.waiting)
            await first.leave()
            await until(lambda: not kept(room))
            assert (room.session.trie.nodes, room.session.trie.in_flight, len(room.engine.log)) == (0, 0, 0)

        asyncio.run(work())

    @pytest.mark.parametrize("path", ["/sessions/s/finalize", "/sessions/s"])
    def test_the_end_of_the_session_ends_it(self, path: str) -> None:
        async def work() -> None:
            room, slow = gated()
            session = await room.open()
            first = room.ask(BODY)
            await until(lambda: slow.waiting)
            await room.call("POST" if path.endswith("finalize") else "DELETE", path)
            status, reply = await first.answer()
            assert (status, reply["error"]["type"]) == (409, "session_over")
            assert not session._exchanges
            assert not room.engine.log

        asyncio.run(work())


def test_an_exchange_cancelled_before_it_began_is_over() -> None:
    """Its task has not had a step, so nothing of it runs, and whoever waits is told all the same."""

    async def work() -> None:
        over: list[Exchange] = []

        async def compose(_: Exchange) -> list[TurnGeneration]:
            raise AssertionError("it runs")

        one = Exchange(RequestKey(None, b""), compose, grace=1.0, on_over=over.append)
        await one.cancel()
        assert one.over
        await one.all_over()
        await one.cancel()
        assert (one.over, over, one.failure.status, repr(one)) == (True, [one], 409, "<Exchange of 0: over>")

    asyncio.run(work())


class TestWhatIsTheSame:
    def test_another_parent_is_another_request(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            await undelivered(room, key="k", parent="a")
            status, _ = await room.ask(BODY, key="k", parent="b").answer()
            assert (status, room.session.samples) == (200, 2)
            status, _ = await room.ask(BODY, key="k", parent="a").answer()
            assert (status, room.session.samples) == (200, 2)

        asyncio.run(work())

    def test_another_dialect_is_another_request(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            await undelivered(room)
            status, reply = await room.ask(BODY, "/sessions/s/v1/messages", again="1").answer()
            assert (status, reply["type"], room.session.samples) == (200, "message", 2)

        asyncio.run(work())

    @pytest.mark.parametrize("header", [{"key": "k"}, {"again": "1"}])
    @pytest.mark.parametrize("running", [True, False], ids=["in flight", "over"])
    def test_another_body_is_another_request(self, header: dict[str, str], running: bool) -> None:
        """Also under the same `Idempotency-Key`: an orphan is no answer to what was not asked of it."""

        async def work() -> None:
            room = Room()
            await room.open()
            first = {"key": "k"} if "key" in header else {}
            says = room.engine.says("one two three", hold=2)
            client = room.ask(BODY, **first)
            await room.engine.arrived()
            await client.leave()
            if not running:
                says.go.set()
                await until(lambda: room.session._exchanges[-1].over)
            room.engine.says("four")
            other = {**BODY, "max_tokens": 19}
            status, reply = await room.ask(other, **header).answer()
            assert (status, reply["choices"][0]["message"]["content"]) == (200, "four")
            says.go.set()
            status, reply = await room.ask(BODY, **header).answer()
            assert (status, reply["choices"][0]["message"]["content"]) == (200, "one two three")
            assert (room.session.samples, len(room.engine.log)) == (2, 2)

        asyncio.run(asyncio.wait_for(work(), 60))  # a wrong adoption would wait for ever

    def test_a_key_is_all_of_it(self) -> None:
        assert RequestKey("k", b"x", "OpenAI", "a") != RequestKey("k", b"x", "OpenAI", None)


class TestWhatIsKept:
    """Of replies that never reached their client."""

    def test_it_is_kept_for_a_while(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            await undelivered(room)
            now = time.monotonic()
            room.app.registry.sweep(now + KEPT_SECONDS - 1)
            assert kept(room) == 1
            room.app.registry.sweep(now + KEPT_SECONDS + 1)
            assert kept(room) == 0
            turn = room.session.trie.newest
            assert turn is not None
            turn.time -= KEPT_SECONDS + 1
            status, _ = await room.ask(BODY, again="1").answer()
            assert (status, room.session.samples) == (200, 2)

        asyncio.run(work())

    def test_what_runs_or_has_a_client_is_not_swept(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            says = [room.engine.says("one two", hold=1), room.engine.says("one two", hold=1)]
            orphan, reader = room.ask(BODY), room.ask(BODY)
            await room.engine.arrived(2)
            await orphan.leave()
            room.app.registry.sweep(time.monotonic() + 10 * KEPT_SECONDS)
            assert kept(room) == 2
            for one in says:
                one.go.set()
            assert (await reader.answer())[0] == 200
            assert (await room.ask(BODY, again="1").answer())[0] == 200
            assert (kept(room), room.session.samples) == (0, 2)

        asyncio.run(work())

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_was_given_up_is_forgotten_at_once(self, stream: bool) -> None:
        async def work() -> None:
            room = Room(orphan_grace=0.0)
            await room.open()
            room.engine.says("one two three", hold=2)
            client = room.ask({**BODY, "stream": stream})
            await room.engine.arrived()
            await client.leave()
            await until(lambda: room.session.samples)
            await until(lambda: not kept(room))
            (sample,) = room.session.trie.checkpoints()
            assert (sample.finish, len(sample.span)) == ("abort", 2)

        asyncio.run(work())

    def test_an_orphan_that_failed_is_forgotten_at_once(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            says = room.engine.says("one two three", hold=1, breaks=2)
            client = room.ask({**BODY, "stream": True})
            await room.engine.arrived()
            await client.leave()
            assert kept(room) == 1
            says.go.set()
            await until(lambda: not kept(room))
            assert room.session.trie.nodes == 0

        asyncio.run(work())

    @pytest.mark.parametrize("path", ["/sessions/s/finalize", "/sessions/s"])
    def test_the_end_of_a_session_forgets_all(self, path: str) -> None:
        async def work() -> None:
            room = Room()
            session = await room.open()
            await undelivered(room)
            says = [room.engine.says("one two", hold=1), room.engine.says("one two", hold=1, deaf=True)]
            clients: list[Client] = [room.ask({**BODY, "seed": seed}) for seed in (1, 2)]
            await room.engine.arrived(2)
            await clients[0].leave()
            assert len(session._exchanges) == 3
            ending = asyncio.create_task(room.call("POST" if path.endswith("finalize") else "DELETE", path))
            await until(lambda: session.trie.closed)
            says[1].go.set()
            assert (await ending)[0] == 200
            assert (await clients[1].answer())[0] == 409
            assert not session._exchanges
            recorded = room.metric("tito_session_replies_total", recorded="exact", reason="")
            assert recorded == 1, "what came after the end is not kept"

        asyncio.run(work())


class TestNews:
    """A client that reads along is told at once, and its task wakes only for what it has to await."""

    @staticmethod
    def exchange() -> Exchange[TurnGeneration]:
        async def compose(_: Exchange[TurnGeneration]) -> list[TurnGeneration]:
            await asyncio.Event().wait()
            return []

        return Exchange(RequestKey(None, b""), compose, grace=1.0, on_over=lambda _: None)

    def test_what_the_reader_deals_with_wakes_nobody(self) -> None:
        async def work() -> None:
            exchange, answers, called = self.exchange(), [True, True, False], list[bool]()

            def reader() -> bool:
                called.append(answers[len(called)])
                return called[-1]

            waiting = asyncio.create_task(exchange.news(reader))
            await asyncio.sleep(0)
            for _ in range(2):
                exchange.notify()
                await asyncio.sleep(0)
                assert not waiting.done()
            exchange.notify()
            await waiting
            assert called == [True, True, False]
            exchange.notify()  # nobody waits now, so the reader is not called
            assert called == [True, True, False]
            await exchange.news()

        asyncio.run(work())

    def test_what_the_reader_raises_is_its_clients_fault_and_not_the_generations(self) -> None:
        async def work() -> None:
            exchange = self.exchange()

            def reader() -> bool:
                raise ZeroDivisionError

            waiting = asyncio.create_task(exchange.news(reader))
            await asyncio.sleep(0)
            exchange.notify()
            with pytest.raises(ZeroDivisionError):
                await waiting
            exchange.notify()
            await exchange.news()

        asyncio.run(work())

    def test_a_client_that_leaves_is_told_nothing_more(self) -> None:
        async def work() -> None:
            exchange, called = self.exchange(), list[int]()
            waiting = asyncio.create_task(exchange.news(lambda: bool(called.append(1))))  # type: ignore[func-returns-value]
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            exchange.notify()
            assert called == []

        asyncio.run(work())

    def test_a_sample_that_has_ended_is_told_of_while_another_goes_on(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            room.engine.says("one two three")
            other = room.engine.says("four five six", hold=1)
            client = room.ask({**BODY, "stream": True, "n": 2})
            await room.engine.arrived()
            await client.heard(b'"finish_reason":"stop"')
            other.go.set()
            status, events = await client.answer()
            assert status == 200
            ends = [one["finish_reason"] for event in events[:-1] for one in event["choices"]]
            assert [end for end in ends if end] == ["stop", "stop"]

        asyncio.run(asyncio.wait_for(work(), 60))

    def test_a_heap_of_events_is_told_of_before_the_next_one_comes(self) -> None:
        """Of so many, not all are written in the call in which they come, and the worker may be silent for a long time."""

        async def work() -> None:
            room = Room()
            await room.open()
            heap = 3 * PIECES_AT_ONCE
            says = room.engine.says("one " * (heap + 20), hold=1, heap=heap)
            client = room.ask({**BODY, "stream": True, "max_tokens": 5000})
            await room.engine.arrived()
            await client.heard(b'"one')
            says.go.set()
            async with asyncio.timeout(PING_SECONDS / 3):  # a ping would push the rest
                await until(lambda: client.content.count(b'" one') >= heap)
            assert client.content.count(b'" one') == heap
            says.more.set()
            status, events = await client.answer()
            assert status == 200
            texts = [choice["delta"].get("content") or "" for event in events[:-1] for choice in event["choices"]]
            assert "".join(texts) == says.text

        asyncio.run(asyncio.wait_for(work(), 60))
