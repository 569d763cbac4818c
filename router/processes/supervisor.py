"""The parent of several processes: it binds the address, starts, watches and drains them, and joins their output.

It serves no request itself. Its processes are routers like any other, which share a store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics

from router.config import RouterConfig
from router.errors import BadRequestError
from router.observability.logs import configure_logging
from router.policies.homes import ConversationHomes
from router.processes.child_process import ChildProcess, ChildState, LineWriter
from router.processes.joint_metrics import PARENT, JointMetrics, families_of
from router.processes.messages import Message, ProcessQuery, QueryResults, Scrape, Scraped
from router.processes.shares import Setup, config_of
from router.serving.listener import ABSENT, ConnectionBoard, listen, reserve, url_of
from router.serving.signals import is_hangup, stop_signals

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""How long a process may take to answer the query of another process; later, the joint answer does without it."""

BEAT_SECONDS = 5.0
"""Longest time between two heartbeats, which is also how much a process may have counted that its death takes away."""

FEWEST_BEATS = 12
"""Least number of heartbeats in `--hang-timeout-secs`: a single late one is no reason to kill a process."""

LATE_SECONDS = 30.0
"""How long a process may take beyond `--shutdown-grace`, to write its state down."""

AT_ONCE_SECONDS = 5.0
"""How long a process may take to end after the second signal."""

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0

WELL_SECONDS = 60.0
"""A process that lived this long did not die of its start."""


class Backoff:
    """How long to wait before a process is started again."""

    def __init__(self) -> None:
        self._wait = 0.0

    def after(self, lived: float) -> float:
        """Return the seconds to wait after a process that lived this many: none at first, more each time one dies early."""
        wait = 0.0 if lived >= WELL_SECONDS else self._wait
        self._wait = min(max(2 * wait, FIRST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
        return wait


def supervise(config: RouterConfig) -> int:
    """Serve with `--processes` processes until SIGTERM, SIGINT or SIGHUP, and return the exit code.

    Raises BadRequestError as `router.app.run` does; what a process cannot start for is raised here, once.
    """
    if os.name != "posix":
        raise BadRequestError("--processes is not for this system: it needs sockets that processes can inherit")
    configure_logging(config.server.log_level, config.server.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it without types
    configs = [config_of(config, number) for number in range(1, config.server.processes + 1)]
    with reserve(config.server) as listener:
        return asyncio.run(Supervisor(config, configs, listener).run())


class Supervisor:
    """Starts, watches and drains the processes, and answers them."""

    def __init__(self, config: RouterConfig, configs: list[RouterConfig], listener: socket.socket) -> None:
        self._server = config.server
        self._listener = listener
        board = ConnectionBoard.create(len(configs))
        self._board = ConnectionBoard(board, len(configs))
        homes = ConversationHomes.create()
        self._log = LineWriter(numbered=config.server.log_format == "text")
        instance = secrets.token_hex(16).encode()
        port = listener.getsockname()[1]  # with `--port 0` the same one for all
        self._setups = [
            Setup(
                replace(each, server=replace(each.server, port=port)), number, instance, listener.fileno(), board, homes
            )
            for number, each in enumerate(configs, 1)
        ]
        self._children: dict[int, ChildProcess] = {}
        self._signals = 0
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._metrics = JointMetrics()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._own = ParentMetrics(self._registry, lambda: sum(child.serves for child in self._children.values()))

    async def run(self) -> int:
        """Return the exit code: 0 after draining, 1 when stopped at once, or that of a process that could not start."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._stop, number)
        beating = asyncio.create_task(self._beat())
        try:
            code = await self._begin()
            if code is None:
                code = await self._keep_all()
            return code
        finally:
            beating.cancel()
            for child in self._children.values():
                child.kill()

    # Start ------------------------------------------------------------------------------------------------------------

    async def _begin(self) -> int | None:
        """Start all processes. Return the exit code if one cannot start, or a signal comes; None if all serve."""
        # The first process starts alone: an error that keeps it from starting keeps all of them, and is to be reported once.
        for numbers in ([1], range(2, len(self._setups) + 1)):
            children = [await self._start(number) for number in numbers]
            for child in children:
                if not await child.ready():
                    return await self._cannot_start(child)
        if self._stopping.is_set():
            return await self._drained()
        listen(self._listener, self._server)
        await asyncio.gather(*(child.go(ANSWER_SECONDS) for child in self._children.values()))
        logger.info("listening on %s with %d processes", url_of(self._listener), len(self._children))
        return None

    async def _start(self, number: int) -> ChildProcess:
        child = ChildProcess(self._setups[number - 1], self._log, self._asked)
        await child.start()
        self._children[number] = child
        if self._stopping.is_set():
            child.drain()
        return child

    async def _cannot_start(self, child: ChildProcess) -> int:
        code = await child.ended()
        if self._stopping.is_set():
            return await self._drained()
        if child.failure is not None:
            raise BadRequestError(child.failure)
        logger.error("process %d could not start: %s", child.number, _how(code))
        return code if code > 0 else 1

    # Life -------------------------------------------------------------------------------------------------------------

    async def _keep_all(self) -> int:
        """Start processes that end again, until it is time to stop."""
        keeping = [asyncio.create_task(self._keep(child)) for child in self._children.values()]
        await self._stopping.wait()
        self._listener.close()  # the processes close theirs
        code = await self._drained()
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        return code

    async def _keep(self, child: ChildProcess) -> None:
        number, backoff = child.number, Backoff()
        while True:
            code = await child.ended()
            self._board.put(number, ABSENT)
            self._metrics.gone(number)
            if self._stopping.is_set():
                return
            logger.error("process %d (pid %d) is gone: %s", number, child.pid, child.failure or _how(code))
            again = await self._start_again(number, backoff, child.seconds)
            if again is None:
                return
            self._own.restarted(hung=child.state is ChildState.KILLED)
            child = again
            if await child.ready() and not self._stopping.is_set():
                await child.go(ANSWER_SECONDS)
                logger.info("process %d (pid %d) serves again", number, child.pid)

    async def _start_again(self, number: int, backoff: Backoff, lived: float) -> ChildProcess | None:
        """Return a new process in place of one that lived this many seconds, None if it is time to stop."""
        while True:
            wait = backoff.after(lived)
            if wait:
                logger.info("process %d is started again in %g s", number, wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
                return None
            try:
                return await self._start(number)
            except OSError as error:  # too many processes or open files, or no memory: for now
                logger.error("process %d cannot be started: %s", number, error)
                lived = 0.0

    async def _beat(self) -> None:
        """Ask for signs of life.

        Time is counted in beats of this loop: where the machine stood still, or is so busy that the parent itself is late, no
        process is to blame.
        """
        seconds = min(BEAT_SECONDS, self._server.hang_timeout / FEWEST_BEATS)
        most = round(self._server.hang_timeout / seconds)
        pulses: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(seconds)
            for child in self._children.values():
                if not child.serves:
                    continue
                child.silent += 1
                if child.silent == most:
                    logger.error(
                        "process %d (pid %d) has not answered for %g s: it is killed, and what its threads do is below",
                        child.number,
                        child.pid,
                        self._server.hang_timeout,
                    )
                    task = asyncio.create_task(child.kill_hung())
                else:
                    task = asyncio.create_task(self._pulse(child, self._server.hang_timeout))
                pulses.add(task)
                task.add_done_callback(pulses.discard)

    async def _pulse(self, child: ChildProcess, seconds: float) -> None:
        pulse = await child.pulse(seconds)
        if pulse is not None and child.serves:
            self._metrics.heard(child.number, pulse.families)

    # End --------------------------------------------------------------------------------------------------------------

    def _stop(self, number: int) -> None:
        if is_hangup(number) and self._signals:
            return
        self._signals += 1
        self._stopping.set()
        for child in self._children.values():
            child.drain() if self._signals == 1 else child.hurry()
        if self._signals > 1:
            self._hurry.set()

    async def _drained(self) -> int:
        """Wait for the end of all processes, and return the exit code."""
        children = [child for child in self._children.values() if child.alive]
        hurry = asyncio.create_task(self._hurry.wait())
        ended = asyncio.gather(*(child.ended() for child in children))
        await asyncio.wait(
            (hurry, ended), timeout=self._server.shutdown_grace + LATE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()
        if not ended.done():
            await asyncio.wait((ended,), timeout=AT_ONCE_SECONDS)
        for child in children:
            child.kill()
        codes = await ended
        if self._hurry.is_set():
            return 1
        # One that had not served yet has died of the signal itself.
        failed = [each for each in zip(children, codes, strict=True) if each[1] not in (0, -signal.SIGTERM)]
        for child, code in failed:
            logger.error("process %d (pid %d) did not finish what it had: %s", child.number, child.pid, _how(code))
        return 1 if failed else 0

    # Queries of processes ---------------------------------------------------------------------------------------------

    async def _asked(self, child: ChildProcess, message: Message) -> Message | None:
        serving = [each for each in self._children.values() if each.serves]
        if isinstance(message, Scrape):
            # Each is asked, the asking one too: a count that was served must be known here when its process dies.
            awake = [each for each in serving if each.silent <= 1]
            await asyncio.gather(*(self._pulse(each, ANSWER_SECONDS) for each in awake))
            self._metrics.heard(PARENT, families_of(self._registry))
            return Scraped(self._metrics.text())
        if isinstance(message, ProcessQuery):
            found = await asyncio.gather(
                *(each.look(message, ANSWER_SECONDS) for each in serving if each is not child and each.silent <= 1)
            )
            return QueryResults([seen for seen in found if seen is not None])
        return None


def _how(code: int) -> str:
    """Return in words how a process ended."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class ParentMetrics:
    """Two metrics that only a router of several processes has."""

    def __init__(self, registry: CollectorRegistry, serving: Callable[[], int]) -> None:
        """`serving` returns how many processes accept connections."""
        Gauge(
            "tito_router_processes",
            "With --processes: those that accept connections. One that hangs counts until it is killed.",
            registry=registry,
        ).set_function(serving)
        self._restarts = Counter(
            "tito_router_process_restarts",
            "With --processes: those that were started again, by why: ended (by itself, or killed from outside), hung"
            " (--hang-timeout-secs).",
            ("reason",),
            registry=registry,
        )
        for reason in ("ended", "hung"):
            self._restarts.labels(reason)

    def restarted(self, *, hung: bool) -> None:
        self._restarts.labels("hung" if hung else "ended").inc()
