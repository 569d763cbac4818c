"""A TCP proxy that does to connections what networks do: cuts them, delays them, and swallows what should come back.

Each router has a wire of its own to the store, in one thread. The most dangerous fault is `deaf`: the store hears a command and
does it, and its answer is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

from worker.http.serve import stop_listening
from worker.worker import LoopThread

State = Literal["whole", "slow", "silent", "deaf", "cut"]
SLOW_SECONDS = 0.15


class Wire:
    """One listening port, whose connections go on to another one.

    States: `whole`; `slow` adds `SLOW_SECONDS` to every piece; `silent` holds back both directions; `deaf` drops what comes
    back, and then the connection; `cut` refuses new connections.
    """

    def __init__(self, thread: LoopThread, port: int, host: str = "127.0.0.1") -> None:
        """`port`: of the store, on the machine, or in the namespace, where the thread is; `host`: where to listen."""
        self._thread, self._target, self.host = thread, port, host
        self._state: State = "whole"
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = thread.call(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def set(self, state: State) -> None:
        """Change the state; `cut` and `deaf` end connections, `deaf` those on which something was to come back."""
        self._thread.call(self._set(state))

    def close(self) -> None:
        """Close the wire with all its connections."""
        self._thread.call(self._close())

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, self.host, 0)

    async def _set(self, state: State) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if state == "cut":
            self._cut()

    async def _close(self) -> None:
        await stop_listening(self._server)
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there = None
        try:
            if self._state == "cut":
                return
            back, there = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers |= {writer, there}
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, there, back=False))
                both.create_task(self._pump(back, writer, back=True))
        except (OSError, asyncio.CancelledError, BaseExceptionGroup):
            pass  # one side is gone, so the other goes too
        finally:
            self._tasks.discard(task)
            for one in (writer, there):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        while piece := await reader.read(1 << 16):
            if self._state == "slow":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), SLOW_SECONDS)
            while self._state == "silent":
                await self._changed.wait()
            if back and self._state == "deaf":
                break
            writer.write(piece)
            await writer.drain()
        raise ConnectionResetError("one side is at its end")
