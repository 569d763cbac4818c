"""A process's connection to its parent, and through it to the other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from router.processes.channel import Channel
from router.processes.joint_routes import Answers
from router.processes.messages import Beat, Go, Look, Message, Pulse, Ready, Scrape, Scraped, Seen, SeenByAll
from router.serving.shared_listener import SharedListener

PARENT_SECONDS = 3.0
"""How long to wait for the parent, which itself waits `supervisor.ANSWER_SECONDS` for the other processes."""


class ParentLink:
    """The source of this process's connections, and its `OtherProcesses`."""

    def __init__(self, connection: socket.socket, listener: SharedListener, number: int, instance: bytes) -> None:
        """`instance` marks the probes of all processes."""
        self.number = number
        self.instance = instance
        self._listener = listener
        self._channel = Channel(connection, self._heard)
        self._answers: Answers | None = None
        self._connect: Callable[[], asyncio.Protocol] | None = None
        self._living: asyncio.Task[None] | None = None

    def answer_with(self, answers: Answers) -> None:
        self._answers = answers

    async def scrape(self) -> bytes | None:
        answer = await self._channel.ask(Scrape(), PARENT_SECONDS)
        return answer.text if isinstance(answer, Scraped) else None

    async def look(self, path: str, query: bytes) -> list[Seen]:
        answer = await self._channel.ask(Look(path, query), PARENT_SECONDS)
        return answer.answers if isinstance(answer, SeenByAll) else []

    # The source of connections ---------------------------------------------------------------------------------------

    def count(self, connections: int) -> None:
        self._listener.count(connections)

    def begin(self, connect: Callable[[], asyncio.Protocol]) -> None:
        """Tell the parent that this process is ready; it says when to accept connections."""
        self._connect = connect
        self._living = asyncio.get_running_loop().create_task(self._live())

    async def end(self) -> None:
        self._connect = None
        await self._listener.end()

    async def _live(self) -> None:
        await self._channel.open()
        self._channel.tell(Ready())
        await self._channel.run()
        os.kill(os.getpid(), signal.SIGKILL)  # the parent is gone, and nothing else would end this process

    async def _heard(self, message: Message) -> Message | None:
        answers = self._answers
        if isinstance(message, Go):
            if self._connect is not None:
                self._listener.begin(self._connect)
            return Ready()
        elif isinstance(message, Beat):
            return Pulse([] if answers is None else answers.families())
        elif isinstance(message, Look) and answers is not None:
            status, body = await answers.look(message.path, message.query)
            return Seen(self.number, status, body)
        return None
