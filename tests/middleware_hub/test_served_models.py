"""Which adapter a request's `model` names: requests that ask a worker at the same time."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from middleware_hub.served_models import ServedModels

LISTED = json.dumps({"data": [{"id": "base", "owned_by": "vllm"}, {"id": "late", "parent": "base"}]}).encode()


class Listing:
    """What a worker answers, all of it at once."""

    status = 200
    body = LISTED

    async def gather(self) -> None:
        pass

    def close(self) -> None:
        pass


class Worker:
    """Answers when `go` is set."""

    def __init__(self) -> None:
        self.arrived, self.go = asyncio.Event(), asyncio.Event()
        self.asked = 0

    async def get(self, *_: Any) -> Listing:
        self.asked += 1
        self.arrived.set()
        await self.go.wait()
        return Listing()


@pytest.mark.timeout(60)
def test_a_request_that_comes_just_as_a_worker_has_answered() -> None:
    """In the same pass of the event loop: it asks anew, and no request is held up."""

    async def scenario() -> None:
        worker = Worker()
        hub: Any = SimpleNamespace(backend=worker)
        models = ServedModels(hub)

        async def comes_with_the_answer() -> None:
            await worker.go.wait()
            await models.ask({"headers": []}, "other")

        first = asyncio.create_task(models.ask({"headers": []}, "late"))
        await worker.arrived.wait()
        second = asyncio.create_task(comes_with_the_answer())
        await asyncio.sleep(0)
        worker.go.set()
        await asyncio.gather(first, second)
        assert models.adapter_of("late") == "late"
        assert worker.asked == 2
        assert not models.must_ask("late", "other")

    asyncio.run(scenario())
