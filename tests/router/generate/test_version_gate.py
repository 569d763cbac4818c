"""`--version-gate`: a worker that did not take the fleet's new weights gets no requests until it has them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from router.config import HealthConfig
from tests.router.conftest import Running, answer, running
from tests.support.serving import serving

GATED = HealthConfig(version_gate=True, interval=3600.0)
UPDATES: list[tuple[str, dict[str, Any]]] = [
    ("/update_weights_from_disk", {"model_path": "x", "weight_version": "2"}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [], "weight_version": "2"}),
    ("/update_weights_from_distributed", {"names": [], "weight_version": "2"}),
    ("/update_weight_version", {"new_version": "2"}),
]
REFUSALS: list[tuple[int, Any]] = [
    (200, {"success": False, "message": "the shapes differ"}),
    (400, {"success": False, "message": "no such file"}),
    (500, "Internal Server Error"),
]


class WeightWorker:
    """Tells its weight version, generates, and takes new weights or refuses them with `refusal`."""

    def __init__(self, refusal: tuple[int, Any] | None = None) -> None:
        self.version = "1"
        self.refusal = refusal
        self.generated = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        path: str = scope["path"]
        if path == "/ping":
            await answer(send, 200, b"")
        elif path in ("/server_info", "/model_info"):
            await answer(send, 200, msgspec.json.encode({"weight_version": self.version}))
        elif path == "/generate":
            self.generated += 1
            await answer(send, 200, msgspec.json.encode({"text": "", "output_ids": [], "meta_info": {"id": "x"}}))
        elif path.startswith("/update") and self.refusal is None:
            fields = msgspec.json.decode(body)
            self.version = fields.get("weight_version") or fields["new_version"]
            await answer(send, 200, b'{"success":true}')
        elif path.startswith("/update") and self.refusal is not None:
            await answer(send, self.refusal[0], msgspec.json.encode(self.refusal[1]))
        else:
            await answer(send, 404, b"{}")


async def served_by(router: Running, count: int = 6) -> list[int]:
    """The statuses of so many generations."""
    found = []
    for number in range(count):
        async with router.client.post("/generate", json={"text": f"a{number}"}) as reply:
            await reply.read()
            found.append(reply.status)
    return found


async def update(router: Running, path: str, body: dict[str, Any]) -> list[int]:
    async with router.client.post(path, json=body) as reply:
        return [one["status"] for one in (await reply.json())["workers"]]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["200 without success", "400", "500"])
@pytest.mark.parametrize(("path", "body"), UPDATES, ids=[path for path, _ in UPDATES])
def test_a_worker_that_refused_the_new_weights_gets_nothing(
    path: str, body: dict[str, Any], refusal: tuple[int, Any]
) -> None:
    """Whatever its status: a 200 that says `"success": false` is a refusal. It is back when it has taken them."""

    async def work() -> None:
        good, bad = WeightWorker(), WeightWorker(refusal)
        async with serving(good) as one, serving(bad) as other, running((one, other), health=GATED) as router:
            assert await served_by(router) == [200] * 6
            assert (good.generated, bad.generated) == (3, 3), "nobody has set a version yet"
            assert await update(router, path, body) == [200, refusal[0]]
            assert await served_by(router) == [200] * 6
            assert (good.generated, bad.generated) == (9, 3)
            bad.refusal = None
            assert await update(router, path, body) == [200, 200]
            assert await served_by(router) == [200] * 6
            assert (good.generated, bad.generated) == (12, 6)

    asyncio.run(work())


@pytest.mark.parametrize("refusal", REFUSALS, ids=["200 without success", "400", "500"])
def test_weights_that_nobody_took_shut_nobody_out(refusal: tuple[int, Any]) -> None:
    """The fleet is where it was: there is no worker at the new version that could serve."""

    async def work() -> None:
        workers = [WeightWorker(refusal), WeightWorker(refusal)]
        async with (
            serving(workers[0]) as one,
            serving(workers[1]) as other,
            running((one, other), health=GATED) as router,
        ):
            await update(router, *UPDATES[0])
            assert router.app.pool.version is None
            assert await served_by(router) == [200] * 6
            assert [worker.generated for worker in workers] == [3, 3]

    asyncio.run(work())


def test_without_the_gate_a_refusal_shuts_nobody_out() -> None:
    async def work() -> None:
        good, bad = WeightWorker(), WeightWorker(REFUSALS[0])
        ungated = HealthConfig(interval=3600.0)
        async with serving(good) as one, serving(bad) as other, running((one, other), health=ungated) as router:
            await update(router, *UPDATES[0])
            assert await served_by(router) == [200] * 6
            assert (good.generated, bad.generated) == (3, 3)

    asyncio.run(work())


def test_an_update_without_a_version_moves_no_gate() -> None:
    """Weights that have no name: nothing is known to have another one."""

    async def work() -> None:
        good, bad = WeightWorker(), WeightWorker(REFUSALS[1])
        async with serving(good) as one, serving(bad) as other, running((one, other), health=GATED) as router:
            good.refusal = (200, {"success": True})
            await update(router, "/update_weights_from_disk", {"model_path": "x"})
            assert router.app.pool.version is None
            assert await served_by(router) == [200] * 6
            assert (good.generated, bad.generated) == (3, 3)

    asyncio.run(work())


def test_a_worker_that_joins_at_other_weights_waits_for_its_own() -> None:
    """It is healthy, and has the weights of its disk."""

    async def work() -> None:
        first, late = WeightWorker(), WeightWorker()
        late.version = "default"
        async with serving(first) as one, serving(late) as other, running((one,), health=GATED) as router:
            await update(router, *UPDATES[0])
            async with router.client.post("/add_worker", json={"url": other}) as reply:
                assert reply.status == 200
            assert await served_by(router) == [200] * 6
            assert (first.generated, late.generated) == (6, 0)
            await update(router, *UPDATES[0])
            assert await served_by(router) == [200] * 6
            assert (first.generated, late.generated) == (9, 3)

    asyncio.run(work())
