"""A process as its parent sees it: its end of the channel, its log, and its state.

loading --- it reports that it could serve ---> ready --- it is told to ---> serving --- it is silent ---> hung
   |                                              |                            |                            |
   +-------------------------------------------> ended <-----------------------+                          killed
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import pickle
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

from router.processes.messages import (
    Failed,
    Heartbeat,
    HeartbeatReply,
    Message,
    MessageChannel,
    ProcessQuery,
    QueryResult,
    Ready,
    Start,
)
from router.processes.shares import Setup
from router.serving.signals import HURRY

PROGRAM = "router.processes.child"

STACKS_SECONDS = 0.3
"""How long a process that hangs may take to write down what its threads do."""

LONGEST_LINE = 1 << 20
"""Bytes after which a line is written in pieces: a process that never ends its line must not fill the parent's memory."""


class LineWriter:
    """Makes one log of several: writes whole lines of processes to stderr, each with the number of its process.

    Those of process 2 follow `2| `; lines of JSON hold the number themselves.
    """

    def __init__(self, *, numbered: bool) -> None:
        self._numbered = numbered
        self._rest: defaultdict[int, bytes] = defaultdict(bytes)

    def write(self, number: int, data: bytes) -> None:
        """Take the output of a process, and write the lines that are complete."""
        whole, newline, rest = (self._rest[number] + data).rpartition(b"\n")
        if len(rest) > LONGEST_LINE:
            whole, newline, rest = whole + newline + rest, b"\n", b""
        self._rest[number] = rest
        if newline:
            self._out(number, whole)

    def end(self, number: int) -> None:
        """Write the rest of the output of a process that has ended."""
        if rest := self._rest.pop(number, b""):
            self._out(number, rest)

    def _out(self, number: int, lines: bytes) -> None:
        if self._numbered:
            mark = b"%d| " % number
            lines = mark + lines.replace(b"\n", b"\n" + mark)
        with contextlib.suppress(OSError):  # as logging does: stderr has no reader any more
            sys.stderr.flush()
            sys.stderr.buffer.write(lines + b"\n")
            sys.stderr.buffer.flush()


class ChildState(enum.Enum):
    """See the top of this file."""

    LOADING = "loading"
    READY = "ready"
    SERVING = "serving"
    HUNG = "hung"
    ENDED = "ended"
    KILLED = "killed"


TRANSITIONS: Mapping[ChildState, frozenset[ChildState]] = {
    ChildState.LOADING: frozenset({ChildState.READY, ChildState.ENDED}),
    ChildState.READY: frozenset({ChildState.SERVING, ChildState.ENDED}),
    ChildState.SERVING: frozenset({ChildState.HUNG, ChildState.ENDED}),
    ChildState.HUNG: frozenset({ChildState.KILLED}),
    ChildState.ENDED: frozenset(),
    ChildState.KILLED: frozenset(),
}


class ChildProcess:
    """One process, from its start to its end.

    Attributes:
        number: its place among the processes, which the one that replaces it gets, too.
        state: see the top of this file.
        failure: why it could not start, if it said so.
        silent: heartbeats in a row that it has not answered.
    """

    def __init__(
        self,
        setup: Setup,
        log: LineWriter,
        answer: Callable[[ChildProcess, Message], Awaitable[Message | None]],
    ) -> None:
        self.number = setup.number
        self.state = ChildState.LOADING
        self.failure: str | None = None
        self.silent = 0
        self.begun = time.monotonic()
        self._setup = setup
        self._log = log
        self._answer = answer
        self._draining = False
        self._ready = asyncio.Event()
        self._channel: MessageChannel
        self._process: Process
        self._ended: asyncio.Task[int]

    async def start(self) -> None:
        """Start the process, and return while it loads. Only the main thread may: it ends with the thread that started it."""
        ours, theirs = socket.socketpair()
        with theirs:
            setup = self._setup
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=PIPE,
                pass_fds=(theirs.fileno(), setup.listener, setup.board, setup.homes),
                process_group=0,  # a Ctrl-C is the parent's to pass on, once
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            )
        self._channel = MessageChannel(ours, self._heard)
        await self._channel.open()
        self._channel.tell_first(pickle.dumps(setup))
        self._ended = asyncio.create_task(self._live())

    async def ready(self) -> bool:
        """Wait until the process could serve, and return True; False if it ends before that."""
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait((waiting, self._ended), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self.state is ChildState.READY

    async def go(self, seconds: float) -> None:
        """Let the process accept connections, and return when it does; if it ends or hangs instead, heartbeats show that."""
        if self.state is ChildState.READY:  # it may have ended meanwhile
            self._move_to(ChildState.SERVING)
        await self._channel.ask(Start(), seconds)

    async def ended(self) -> int:
        """Return the exit code once the process has ended and its whole log is written; negative: the signal that killed it."""
        return await asyncio.shield(self._ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        """How long ago the process was started."""
        return time.monotonic() - self.begun

    @property
    def serves(self) -> bool:
        """Whether it was told to accept connections, and has not ended."""
        return self.state in (ChildState.SERVING, ChildState.HUNG)

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    def drain(self) -> None:
        """Let the process finish the requests in flight. A second call does nothing."""
        if not self._draining:
            self._draining = True
            self._signal(signal.SIGTERM)

    def hurry(self) -> None:
        """Let the process end at once."""
        if HURRY is not None:
            self._signal(HURRY)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def kill_hung(self) -> None:
        """Kill the process; before that, let it log what its threads do, if it can."""
        if self.state is ChildState.SERVING:
            self._move_to(ChildState.HUNG)
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(STACKS_SECONDS)
        self.kill()

    async def pulse(self, seconds: float) -> HeartbeatReply | None:
        """Return a sign of life, None if there is none in time."""
        answer = await self._channel.ask(Heartbeat(), seconds)
        if isinstance(answer, HeartbeatReply):
            self.silent = 0
            return answer
        return None

    async def look(self, question: ProcessQuery, seconds: float) -> QueryResult | None:
        """Return the process's answer to a GET, None if there is none in time."""
        answer = await self._channel.ask(question, seconds)
        return answer if isinstance(answer, QueryResult) else None

    def _move_to(self, state: ChildState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _live(self) -> int:
        heard = asyncio.create_task(self._channel.run())
        stderr = self._process.stderr
        assert stderr is not None
        while data := await stderr.read(1 << 16):
            self._log.write(self.number, data)
        self._log.end(self.number)
        code = await self._process.wait()
        await heard
        self._move_to(ChildState.KILLED if self.state is ChildState.HUNG else ChildState.ENDED)
        return code

    async def _heard(self, message: Message) -> Message | None:
        if isinstance(message, Ready):
            self._move_to(ChildState.READY)
            self._ready.set()
        elif isinstance(message, Failed):
            self.failure = message.message
        else:
            return await self._answer(self, message)
        return None
