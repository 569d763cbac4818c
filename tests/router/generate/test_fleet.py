"""Calls to all workers, over real sockets: what is made of their answers, two calls at once, and a client that leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from router.config import HealthConfig
from router.generate import fleet_calls
from router.generate.fleet import Fleet
from router.generate.fleet_calls import CallSender
from router.http.upstream import AiohttpUpstream
from router.policies.least_inflight import LeastInflight
from router.proxy.in_flight import InFlight
from router.workers.pool import WorkerPool
from router.workers.probe import Prober
from router.workers.worker import WorkerState
from tests.router.conftest import PROBED, Running, answer, running
from tests.support.serving import dead_url, serving, serving_socket

UPDATE = "/update_weight_version"
GATED = {"health": HealthConfig(version_gate=True)}


class Engine:
    """Notes what it is told, and answers updates when its gate is open."""

    def __init__(self, said: Any = None, status: int = 200) -> None:
        self.said = {"success": True} if said is None else said
        self.status = status
        self.version = "1"
        self.told: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.changed = asyncio.Condition()

    async def until_told(self, count: int) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(self.told) >= count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in PROBED:
            await answer(send, 200, msgspec.json.encode({"weight_version": self.version}))
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        async with self.changed:
            self.told.append(msgspec.json.decode(body or b"null"))
            self.changed.notify_all()
        if scope["path"].startswith("/update"):
            await self.gate.wait()
        await answer(send, self.status, self.said if isinstance(self.said, bytes) else msgspec.json.encode(self.said))


@contextlib.asynccontextmanager
async def fleet(*engines: Engine, **workers: Any) -> AsyncIterator[Running]:
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(engine)) for engine in engines]
        yield await stack.enter_async_context(running(urls, **workers))


async def tell(router: Running, path: str = UPDATE, **body: Any) -> tuple[int, Any]:
    async with router.client.post(path, json=body) as reply:
        return reply.status, await reply.json()


def versions(router: Running) -> list[str | None]:
    return [worker.version for worker in router.app.pool.list()]


FAILED = {"success": False, "message": "no such model"}


@pytest.mark.parametrize(
    ("said", "status", "fleet_version"),
    [
        ([FAILED, FAILED], 502, None),
        ([FAILED, {"success": True}], 207, "2"),
        ([[{"success": True}, FAILED], {"success": True}], 207, "2"),
        ([b"<html>Welcome</html>", b"<html>Welcome</html>"], 502, None),
        ([{"success": True}, {}], 200, "2"),
    ],
    ids=["none", "one of two", "a part of one", "a web page", "all"],
)
def test_a_200_without_success_is_a_failure_and_moves_no_version(
    said: list[Any], status: int, fleet_version: str | None
) -> None:
    async def main() -> None:
        engines = [Engine(one) for one in said]
        async with fleet(*engines) as router:
            got, found = await tell(router, new_version="2")
            assert (got, found["success"]) == (status, status == 200)
            assert [one["status"] for one in found["workers"]] == [200, 200]
            assert router.app.pool.version == fleet_version
            done = [one == {"success": True} or one == {} for one in said]
            assert versions(router) == ["2" if one else "1" for one in done]
            assert found["message"].startswith(f"{sum(done)} of 2 workers did it")
            for worker, did in zip(router.app.pool.list(), done, strict=True):
                assert (worker.url in found["message"]) is not did, "who did not is named"

    asyncio.run(main())


def test_a_worker_that_does_not_answer_is_named_and_the_others_have_the_version() -> None:
    """It may have the new weights or the old ones: behind the gate it gets nothing until it has told."""

    async def main() -> None:
        well, hung = Engine(), Engine()
        hung.gate.clear()
        async with fleet(well, hung, fleet_timeout=0.2, **GATED) as router:
            status, found = await tell(router, new_version="2")
            assert (status, found["success"]) == (207, False)
            assert [one["status"] for one in found["workers"]] == [200, None]
            assert found["workers"][1]["error"] == "no answer within 0.2 s"
            first, second = router.app.pool.list()
            assert versions(router) == ["2", None]
            assert router.app.pool.routable == (first,)
            hung.gate.set()  # its answer comes too late to count
            assert router.app.pool.version == "2"
            assert (second.version, second.routable) == (None, False)

    asyncio.run(main())


def test_a_version_that_no_worker_is_known_to_have_is_not_the_fleets() -> None:
    async def main() -> None:
        hung = Engine()
        hung.gate.clear()
        async with fleet(hung, fleet_timeout=0.2) as router:
            status, found = await tell(router, new_version="2")
            assert (status, found["success"], router.app.pool.version) == (502, False, None)

    asyncio.run(main())


def test_of_two_updates_at_once_all_workers_end_with_the_same_one() -> None:
    """The second one begins when the first one is over, however long one of the workers takes."""

    async def main() -> None:
        quick, slow = Engine(), Engine()
        slow.gate.clear()
        async with fleet(quick, slow) as router:
            first = asyncio.create_task(tell(router, new_version="2"))
            await slow.until_told(1)
            second = asyncio.create_task(tell(router, "/update_weights_from_disk", model_path="x", weight_version="3"))
            assert (await tell(router, "/continue_generation"))[0] == 200, "other calls do not wait for it"
            assert len(quick.told) == len(slow.told) == 2
            slow.gate.set()
            assert [(await one)[0] for one in (first, second)] == [200, 200]
            for engine in (quick, slow):
                assert [told.get("new_version") or told.get("weight_version") for told in engine.told] == [
                    "2",
                    None,
                    "3",
                ]
            assert (router.app.pool.version, versions(router)) == ("3", ["3", "3"])

    asyncio.run(main())


def test_a_worker_that_was_restarted_while_others_were_waited_for_does_not_count_as_updated() -> None:
    """It took the update, died, and came back with the weights of its disk."""

    async def main() -> None:
        quick, slow = Engine(), Engine()
        slow.gate.clear()
        async with fleet(quick, slow, **GATED) as router:
            call = asyncio.create_task(tell(router, new_version="2"))
            await asyncio.gather(quick.until_told(1), slow.until_told(1))
            await tell(router, "/continue_generation")  # behind it, the first answer of the quick one is there
            first, second = router.app.pool.list()
            router.app.pool.probed(first, "connection refused", absent=True)
            router.app.pool.probed(first, None, "1")
            slow.gate.set()
            assert (await call)[0] == 200
            assert versions(router) == [None, "2"]
            assert router.app.pool.routable == (second,)

    asyncio.run(main())


def test_an_update_goes_on_when_its_client_leaves() -> None:
    """Half of an update is worse than one that nobody waits for."""

    async def main() -> None:
        engines = [Engine(), Engine()]
        engines[1].gate.clear()
        async with fleet(*engines) as router:
            leaving = asyncio.create_task(tell(router, new_version="2"))
            await engines[1].until_told(1)
            leaving.cancel()
            await asyncio.wait((leaving,))
            engines[1].gate.set()
            async with asyncio.timeout(30):
                while router.app.pool.version is None:  # noqa: ASYNC110 - a pool tells nobody of its changes
                    await asyncio.sleep(0.001)
            assert versions(router) == ["2", "2"]

    asyncio.run(main())


def test_a_generation_that_begins_while_only_a_quarantined_worker_is_waited_for_is_not_to_end() -> None:
    """An update that aborts ends what is there, not what comes while one worker hangs."""

    async def main() -> None:
        well, hung = Engine(), Engine()
        hung.gate.clear()
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async with serving(well) as one, serving(hung) as two, AiohttpUpstream(connect_timeout=1) as upstream:
            pool = WorkerPool(LeastInflight(), health=HealthConfig(failure_threshold=1))
            for url, complaint in ((one, None), (two, "no answer within 5 s")):
                pool.probed(pool.add(url), None)
                pool.probed(pool.get(url), complaint)
            sender = CallSender(upstream, Prober(upstream, seconds=10), seconds=3600)
            fleet = Fleet(pool, sender, max_body_bytes=100, forward_authorization=False)
            scope = {"method": "POST", "path": UPDATE, "raw_path": UPDATE.encode(), "query_string": b"", "headers": []}
            before, during = InFlight(["a"]), InFlight(["b"])
            fleet.in_flight.begin(before)
            well.gate.clear()
            call = asyncio.create_task(fleet.everywhere(scope, send, b'{"new_version": "2"}', aborts=True))
            await asyncio.gather(well.until_told(1), hung.until_told(1))
            fleet.in_flight.begin(during)
            after = during
            well.gate.set()
            async with asyncio.timeout(30):
                while after.unwanted:  # until the call has heard of the well one
                    await asyncio.sleep(0.001)
                    after = InFlight(["c"])
                    fleet.in_flight.begin(after)
            hung.gate.set()
            await call
            assert sent[0]["status"] == 200
            assert [one.unwanted for one in (before, during, after)] == [True, True, False]

    asyncio.run(main())


@pytest.mark.parametrize("path", [UPDATE, "/update_weights_from_disk", "/flush_cache"])
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_a_worker_that_is_known_to_hang_does_not_get_the_whole_time(
    monkeypatch: pytest.MonkeyPatch, path: str, leaves: bool
) -> None:
    """Also where it was removed and still has a request. It is told nothing at some later time."""
    monkeypatch.setattr(fleet_calls, "QUARANTINED_SECONDS", 0.2)

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> None:
        async with serving_socket(silent) as url, AiohttpUpstream(connect_timeout=1) as upstream:
            pool = WorkerPool(LeastInflight(), health=HealthConfig(failure_threshold=1))
            for complaint in (None, "no answer within 5 s"):
                pool.probed(pool.add(url), complaint)
            worker = pool.get(url)
            assert worker.state is WorkerState.QUARANTINED
            if leaves:
                worker.move_to(WorkerState.DRAINING)
            sender = CallSender(upstream, Prober(upstream, seconds=10), seconds=3600)
            call = fleet_calls.FleetCall("POST", path, [], b"{}", transfer="weights" in path, updates=True)
            async with asyncio.timeout(30):
                answer = await sender.send(worker, call)
            assert (answer.status, answer.unsure) == (None, False)
            assert answer.error == (
                f"it is {worker.state.value} (no answer within 5 s) and was not told: no answer within 0.2 s to the question"
                " how it is"
            )

    asyncio.run(main())


def test_dead_and_refusing_workers_are_told_apart() -> None:
    async def main() -> None:
        async with serving(Engine({"detail": "no"}, 400)) as refusing, running([refusing, dead_url()]) as router:
            status, found = await tell(router, "/flush_cache")
            assert (status, [one["status"] for one in found["workers"]]) == (207, [400, None])
        async with fleet(Engine({"detail": "no"}, 400), Engine({"detail": "no"}, 400)) as router:
            assert (await tell(router, "/flush_cache"))[0] == 400

    asyncio.run(main())


def test_an_answer_nested_as_deeply_as_can_be_read_is_no_error_here() -> None:
    """Some depths can be read, and not be printed inside of the answer to the client."""

    async def main() -> None:
        engine = Engine()
        async with fleet(engine) as router:
            for depth in range(1, 1100, 4):
                engine.said = b"[" * depth + b"]" * depth
                status, found = await tell(router, "/flush_cache")
                assert (status, found["success"]) == (200, True)

    asyncio.run(main())
