"""One of several processes: a router like any other, whose connections come through a socket that it inherits.

The parent starts it as `python -m router.processes.child DESCRIPTOR`, the number of one end of a socket pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable

from router.errors import RouterError
from router.policies.homes import ConversationHomes
from router.processes.joint_routes import JointRoutes
from router.processes.messages import (
    Failed,
    Heartbeat,
    HeartbeatReply,
    Message,
    MessageChannel,
    ProcessQuery,
    QueryResult,
    QueryResults,
    Ready,
    Scrape,
    Scraped,
    Start,
    receive_first,
    send_last,
)
from router.processes.shares import Setup
from router.serving.listener import ConnectionBoard, SharedListener
from router.serving.server import CANNOT_START, serve_from

PARENT_SECONDS = 3.0
"""How long to wait for the parent, which itself waits `supervisor.ANSWER_SECONDS` for the other processes."""
STACKS = signal.SIGUSR1
"""Makes a process write to stderr what each of its threads does: the parent sends it before it kills one that hangs."""

ROUTER = "router.app"
"""Imported only when the parent's death would be noticed: it takes half a second."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent ends it, or is gone. Exits as `router.cli.main` does."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _end_with_the_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent's to pass on
    faulthandler.register(STACKS)
    setup: Setup = pickle.loads(receive_first(connection))
    try:
        sys.exit(_serve(setup, connection))
    except RouterError as error:
        with contextlib.suppress(OSError):
            send_last(connection, Failed(error.message))
        sys.exit(CANNOT_START)


def _serve(setup: Setup, connection: socket.socket) -> int:
    gc.disable()  # as the command line does: the server switches it on
    config, number = setup.config, setup.number
    router = importlib.import_module(ROUTER)
    router.prepare_process(config.server, number)
    board = ConnectionBoard(setup.board, config.server.processes)
    listener = SharedListener(socket.socket(fileno=setup.listener), board, number)
    link = ParentLink(connection, listener, number, setup.instance, ConversationHomes(setup.homes))
    return serve_from(link, router.create_app(config, others=link), config.server)


def _end_with_the_parent() -> None:
    """Let Linux kill this process, stopped or not, as soon as the parent is gone. Elsewhere the channel notices."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ParentLink:
    """The source of this process's connections, and its `OtherProcesses`."""

    def __init__(
        self,
        connection: socket.socket,
        listener: SharedListener,
        number: int,
        instance: bytes,
        homes: ConversationHomes,
    ) -> None:
        """`instance` marks the probes of all processes."""
        self.number = number
        self.instance = instance
        self.homes = homes
        self._listener = listener
        self._channel = MessageChannel(connection, self._heard)
        self._answers: JointRoutes | None = None
        self._connect: Callable[[], asyncio.Protocol] | None = None
        self._living: asyncio.Task[None] | None = None

    def answer_with(self, answers: JointRoutes) -> None:
        self._answers = answers

    async def scrape(self) -> bytes | None:
        answer = await self._channel.ask(Scrape(), PARENT_SECONDS)
        return answer.text if isinstance(answer, Scraped) else None

    async def look(self, path: str, query: bytes) -> list[QueryResult]:
        answer = await self._channel.ask(ProcessQuery(path, query), PARENT_SECONDS)
        return answer.answers if isinstance(answer, QueryResults) else []

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
        if isinstance(message, Start):
            if self._connect is not None:
                self._listener.begin(self._connect)
            return Ready()
        elif isinstance(message, Heartbeat):
            return HeartbeatReply([] if answers is None else answers.families())
        elif isinstance(message, ProcessQuery) and answers is not None:
            status, body = await answers.look(message.path, message.query)
            return QueryResult(self.number, status, body)
        return None


if __name__ == "__main__":
    main()
