"""The client's side of an exchange: leaving, being cancelled, and both at once."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from router.errors import ClientDisconnectedError
from router.http.disconnect import ClientConnection


class Client:
    """Sends what it is told to."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


def test_leaving_ends_the_work() -> None:
    async def main() -> None:
        client = Client()
        client.leave()
        with pytest.raises(ClientDisconnectedError):
            async with ClientConnection(client.messages.get):
                await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(main())


def test_leaving_in_the_moment_in_which_the_work_ends_disturbs_nothing_behind_it() -> None:
    """The watcher has seen it, and has not told it yet."""

    async def main() -> None:
        client = Client()
        async with ClientConnection(client.messages.get):
            await asyncio.sleep(0)
            client.leave()
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize("also_leaves", [False, True])
def test_cancellation_from_outside_stays_one(also_leaves: bool) -> None:
    async def main() -> None:
        client = Client()
        inside = asyncio.Event()
        held = asyncio.Event()

        async def work() -> None:
            async with ClientConnection(client.messages.get):
                inside.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await held.wait()

        task = asyncio.create_task(work())
        await inside.wait()
        if also_leaves:
            client.leave()
            while not task.cancelling():  # noqa: ASYNC110 - a task does not tell that it was asked to end
                await asyncio.sleep(0)
        task.cancel()
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


def test_leaving_after_the_end_is_no_matter() -> None:
    async def main() -> None:
        client = Client()
        async with ClientConnection(client.messages.get) as connection:
            connection.stop_watching()
            client.leave()
            for _ in range(5):
                await asyncio.sleep(0)

    asyncio.run(main())


def test_an_error_of_receive_ends_the_work_too() -> None:
    async def broken() -> Message:
        raise ValueError("a middleware's own")

    async def main() -> None:
        with pytest.raises(ValueError, match="own"):
            async with ClientConnection(broken):
                await asyncio.Event().wait()

    asyncio.run(main())
