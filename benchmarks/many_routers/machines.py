"""The machines: workers in this process; routers, a balancer and a store as processes of their own, which may be hurt."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.many_routers.clock import Clock, NoClockError, sweep
from benchmarks.many_routers.disk import Disk, NoDiskError
from benchmarks.many_routers.network import Network, NoNetworkError
from benchmarks.many_routers.wire import Wire
from tests.support import debian, templates
from tests.support.client import call
from tests.support.engine_server import free_port
from tests.support.image_vocabularies import image_vocabulary
from tests.support.programs import Process, Program
from tests.support.vocabularies import vocabulary
from worker.options import Role, StreamStyle
from worker.worker import EmbeddedWorker, LoopThread

TENANTS = {"alpha": "key-of-alpha", "beta": "key-of-beta"}
ADMIN = "key-of-admin"
FSYNCS = ("always", "everysec")

_PARTS = """\
{%- macro said(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- else -%}{%- for part in content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<|vision_start|><|image_pad|><|vision_end|>{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
"""How the model's template writes a message: without blanks at its ends, and with a placeholder for each picture."""
_BALANCER = """
global
  maxconn 2000
defaults
  mode http
  timeout connect 2s
  timeout client 120s
  timeout server 120s
  timeout check 500ms
  retries 3
  option redispatch 1
frontend all
  bind 127.0.0.1:{port}
  default_backend routers
backend routers
  balance random
  option httpchk GET /readiness
  default-server check inter 300ms fall 2 rise 1
  http-response set-header x-served-by %s
{servers}
"""


class Machines:
    """All machines, with their logs and files in `folder`. Entering starts them.

    Attributes:
        url: of the balancer.
        workers: those whose replies clients get; `prefills`: beside them, those that prefill.
        routers, redis: processes; redis is None with a store of another kind.
        wires: from each router to Redis, in the store's namespace if there is one.
        network: the links from each router to the store's namespace; None with a store that is a file, or where this user
            may make none.
        disk: of the store's files; None where this user may mount nothing.
        clocks: of each router; one for all with a store that is a file, as its routers are on one machine. None where no
            process can have one.
        absent: what this machine or this user does not allow, in words.
    """

    def __init__(
        self,
        store: str,
        folder: Path,
        routers: int = 3,
        fsync: str = "everysec",
        flags: Sequence[str] = (),
        *,
        apart: bool = False,
        ranks: int = 1,
        images: bool = False,
    ) -> None:
        """Make them.

        Args:
            store: `sqlite` or `redis`.
            apart: the workers only decode, and there are as many that prefill.
            ranks: data-parallel ranks of each worker.
            images: the model sees.
        """
        self._model = image_vocabulary("qwen") if images else vocabulary("qwen")
        self._entered = contextlib.ExitStack()
        self._folder, self._flags = folder, flags

        def workers(role: Role) -> list[EmbeddedWorker]:
            styles: tuple[StreamStyle, ...] = ("cumulative", "incremental")
            given: dict[str, Any] = {"token_delay": 0.002, "disaggregation_mode": role, "dp_size": ranks}
            return [
                EmbeddedWorker(self._model, stream_style=style, seed=number, **given)
                for number, style in enumerate(styles)
            ]

        self.workers = workers("decode" if apart else "null")
        self.prefills = workers("prefill") if apart else []
        self._kind, self._fsync = store, fsync
        self.redis: Process | None = None
        self.redis_port = free_port()
        self.network: Network | None = None
        self.disk: Disk | None = None
        self.clocks: list[Clock] | None = None
        self.absent: list[str] = []
        self.store = f"redis://127.0.0.1:{self.redis_port}/0" if store == "redis" else f"sqlite:{folder / 'store'}/"
        self.count = routers
        self.wires: list[Wire] = []
        self.routers: list[Program] = []

    def _redis(self) -> list[str]:
        """Return the command of Redis. A group is acknowledged once it is in the file; `fsync`: what a power cut may take."""
        inside = () if self.network is None else self.network.inside
        own = () if self.network is None else (self.network.address(self.count),)
        flags = {
            "port": self.redis_port,
            "bind": " ".join(("127.0.0.1", *own)),
            "protected-mode": "no",
            "dir": self._folder / "store",
            "save": "",
            "appendonly": "yes",
        }
        flags |= {"appendfsync": self._fsync, "maxmemory-policy": "noeviction", "aof-load-truncated": "yes"}
        return [
            *inside,
            str(debian.program("redis-server")),
            *(str(word) for name, value in flags.items() for word in (f"--{name}", value)),
        ]

    def __enter__(self) -> Machines:
        with contextlib.ExitStack() as stack:
            for worker in (*self.prefills, *self.workers):
                stack.enter_context(worker)
            self._given(stack)
            if self._kind == "redis":
                self._wired(stack)
            self.routers = [self.router(f"router-{number}", number) for number in range(self.count)]
            for router in self.routers:
                stack.enter_context(router)
            for router in self.routers:
                router.wait_until_up()
            port = free_port()
            servers = "\n".join(f"  server {number} 127.0.0.1:{one.port}" for number, one in enumerate(self.routers))
            config = self._folder / "haproxy.cfg"
            config.write_text(_BALANCER.format(port=port, servers=servers))
            command = [str(debian.program("haproxy")), "-db", "-V", "-f", str(config)]
            balancer = Process("haproxy", *command, folder=self._folder, up="")
            stack.enter_context(balancer)
            self.url = f"http://127.0.0.1:{port}"
            _wait_for(self.url)
            self._entered = stack.pop_all()
        return self

    def _given(self, stack: contextlib.ExitStack) -> None:
        """Take what this machine and this user allow: a disk, links, and clocks."""
        (self._folder / "store").mkdir()
        try:
            self.disk = Disk(self._folder / "store")
            stack.callback(self.disk.close)
            if not self.disk.hangs:
                self.absent.append("no slow disk: it cannot be mounted out of a file")
        except NoDiskError as error:
            self.absent.append(f"no full or slow disk: {error}")
        try:
            if self._kind == "redis":
                self.network = Network(self.count + 1)
                stack.callback(self.network.close)
        except NoNetworkError as error:
            self.absent.append(f"no partitions of the network, only cut connections: {error}")
        try:
            count = self.count if self._kind == "redis" else 1
            self.clocks = [Clock(self._folder / f"clock-{number}") for number in range(count)]
            stack.callback(sweep)
        except NoClockError as error:
            self.absent.append(f"no steps of the clock: {error}")

    def _wired(self, stack: contextlib.ExitStack) -> None:
        """Start Redis, and a wire from each router to it."""
        self.redis = Process("redis", *self._redis(), folder=self._folder, up="Ready to accept connections")
        stack.enter_context(self.redis).wait_until_up()
        thread = LoopThread("wires", self.workers[0]._options.new_loop)
        stack.callback(thread.stop)
        hosts = ["127.0.0.1"] * self.count
        if self.network is not None:
            self.network.enter(thread)
            hosts = [self.network.address(number) for number in range(self.count)]
            self.store = f"redis://{self.network.address(self.count)}:{self.redis_port}/0"
        self.wires = [Wire(thread, self.redis_port, host) for host in hosts]
        for wire in self.wires:
            stack.callback(wire.close)

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def router(self, name: str, number: int | None = None) -> Program:
        """Return a router that was not started: behind wire `number`, or one that asks the store itself."""
        store = self.store
        if number is not None and self.wires:
            store = f"redis://{self.wires[number].host}:{self.wires[number].port}/0"
        # Replies often begin with a blank, so their texts alone do not bring their tokens back.
        template = self._folder / "trims.jinja"
        template.write_text(_PARTS + templates.source("qwen2_5").replace("message.content", "said(message.content)"))
        flags = ["--tokenizer-path", str(self._model), "--chat-template", str(template), "--store", store]
        flags += [word for tenant, key in TENANTS.items() for word in ("--api-key", f"{tenant}:{key}")]
        flags += ["--admin-key", ADMIN, "--verify-rate", "0", "--abort-retry-wait", "0.2"]
        flags += ["--radix-max-tokens", "40000", "--shutdown-grace", "10"]
        flags += ["--store-spool", str(self._folder / "spool"), *self._flags]
        flags += ["--worker-urls", *(one.url for one in (*self.prefills, *self.workers))]
        clock: tuple[str, ...] = ()
        if self.clocks is not None and (number is not None or len(self.clocks) == 1):
            clock = self.clocks[(number or 0) % len(self.clocks)].command
        return Program(name, *flags, folder=self._folder, starter=clock)

    def heal(self) -> None:
        """Let all machines run, and wait until everything that waits for the store is in it.

        Raises TimeoutError if it gets no less for a minute.
        """
        for wire in self.wires:
            wire.set("whole")
        if self.network is not None:
            for number in range(self.count):
                self.network.set(number, "none")
        if self.disk is not None:
            self.disk.go_on()
            self.disk.empty()
        for process in (*self.routers, *([self.redis] if self.redis else [])):
            if process.alive:
                process.thaw()
            else:
                process.start()
        if self.redis is not None:
            self.redis.wait_until_up()
        for router in self.routers:
            router.wait_until_up()
        left, deadline = math.inf, 0.0
        while waiting := [count for router in self.routers if (count := unwritten(router.url))]:
            if sum(waiting) < left:  # on a busy machine it takes its time
                left, deadline = sum(waiting), time.monotonic() + 60
            if time.monotonic() > deadline:
                raise TimeoutError(f"the store is there, but is not handed all that waits: {waiting}")
            time.sleep(0.2)


def unwritten(url: str) -> int:
    """Return how much of what a router recorded waits for the store."""
    found = call(f"{url}/radix_tree/stats", headers={"authorization": f"Bearer {ADMIN}"}).json()["store"]
    return int(found["waiting"])


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            if call(f"{url}/liveness", timeout=2).status == 200:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} does not answer")
        time.sleep(0.05)
