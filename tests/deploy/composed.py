"""What deploy/compose.yaml describes, started by hand on this machine: the same arguments, files and order, no containers."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.support.debian import program
from tests.support.engine_server import free_port
from tests.support.programs import Program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
START_SECONDS = 60
WORKERS = "workers:30001"
"""The name whose addresses are the workers."""
IN_IMAGE = "/opt/tito/lib/python3.11/site-packages/"


def compose() -> dict[str, Any]:
    """The file, with the variables at their defaults."""
    text = re.sub(r"\$\{\w+:\+[^{}]*\$\{\w+\}\}", "", (DEPLOY / "compose.yaml").read_text())
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def command_of(service: dict[str, Any]) -> list[str]:
    given = service.get("command", [])
    return shlex.split(given) if isinstance(given, str) else list(given)


@dataclass
class Composed:
    """All services but Grafana.

    Attributes:
        places: what stands for an address of the file: `router-1:30000`.
    """

    folder: Path
    places: dict[str, str] = field(default_factory=dict)
    routers: list[Program] = field(default_factory=list)
    workers: list[Program] = field(default_factory=list)

    @property
    def front(self) -> str:
        """The load balancer."""
        return f"http://{self.places['haproxy:30000']}"

    def here(self, text: str) -> str:
        """A text of the file, with addresses and folders of this machine."""
        for name, place in self.places.items():
            text = text.replace(name, place)
        return text.replace(IN_IMAGE, f"{ROOT}/").replace("0.0.0.0", "127.0.0.1")

    def query(self, expression: str) -> list[Any]:
        """What Prometheus answers. AssertionError with its words for a query that is none."""
        url = f"http://{self.places['prometheus:9090']}/api/v1/query?{urlencode({'query': expression})}"
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=60) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found
        raise AssertionError(f"Prometheus does not understand {expression}")


@contextlib.contextmanager
def composed(folder: Path) -> Iterator[Composed]:
    """Start it all, in the order in which it depends on each other."""
    services = compose()["services"]
    made = Composed(folder)
    for name in ("valkey:6379", "haproxy:30000", "haproxy:8405", "prometheus:9090"):
        made.places[name] = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_valkey(made, command_of(services["valkey"])))
        for group, names, port in (
            (made.workers, ("worker-1", "worker-2"), 30001),
            (made.routers, ("router-1", "router-2"), 30000),
        ):
            for name in names:
                group.append(_program(made, name, command_of(services[name]), port))
                stack.enter_context(group[-1])
            for one in group:
                one.wait_until_up()
        stack.enter_context(_haproxy(made))
        stack.enter_context(_prometheus(made, command_of(services["prometheus"])))
        yield made


def _program(made: Composed, name: str, command: list[str], port: int) -> Program:
    given = shlex.split(shlex.join(command).replace(f"--port={port}", "").replace(f"--port {port}", ""))
    home = made.folder / name
    home.mkdir()
    arguments = [made.here(word).replace("/var/lib/tito", str(home)) for word in given]
    if WORKERS in arguments:  # on this machine, each of them has a port of its own, and so a name
        at = arguments.index(WORKERS)
        arguments[at - 1 : at + 1] = [
            word for one in made.workers for word in ("--worker-dns", f"127.0.0.1:{one.port}")
        ]
    one = Program(name, *arguments, folder=made.folder)
    made.places[f"{name}:{port}"] = f"127.0.0.1:{one.port}"
    return one


@contextlib.contextmanager
def _running(made: Composed, name: str, command: list[str], ready: str) -> Iterator[None]:
    """A program that is up when something answers at this URL."""
    log = made.folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=made.folder)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(ready):
            alive = time.monotonic() < deadline and process.poll() is None
            assert alive, f"{name}: {log.read_text(errors='replace')[-3000:]}"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    host, _, port = url.removeprefix("tcp://").partition(":")
    if url.startswith("tcp://"):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


def _valkey(made: Composed, command: list[str]) -> contextlib.AbstractContextManager[None]:
    """Redis, which understands the same arguments."""
    assert command[0] == "valkey-server"
    place = made.places["valkey:6379"]
    arguments = [*command[1:], "--port", place.partition(":")[2], "--bind", "127.0.0.1", "--dir", str(made.folder)]
    return _running(made, "valkey", [program("redis-server"), *arguments], f"tcp://{place}")


def _haproxy(made: Composed) -> contextlib.AbstractContextManager[None]:
    text = made.here((DEPLOY / "haproxy.cfg").read_text())
    for port in ("30000", "8405"):
        text = text.replace(f"bind :{port}", f"bind {made.places[f'haproxy:{port}']}")
    file = made.folder / "haproxy.cfg"
    file.write_text(text)
    return _running(made, "haproxy", [program("haproxy"), "-f", str(file), "-db"], f"{made.front}/readiness")


def _prometheus(made: Composed, command: list[str]) -> contextlib.AbstractContextManager[None]:
    """Prometheus, which scrapes ten times as often."""
    text = (DEPLOY / "prometheus.yml").read_text().replace("interval: 10s", "interval: 1s")
    (made.folder / "prometheus.yml").write_text(made.here(text))
    (made.folder / "alerts.yml").write_text((DEPLOY / "helm" / "tito-router" / "alerts.yml").read_text())
    data = made.folder / "prometheus"
    arguments = [
        word.replace("=/prometheus", f"={data}").replace("/etc/prometheus", str(made.folder)) for word in command
    ]
    place = made.places["prometheus:9090"]
    whole = [program("prometheus"), *arguments, f"--web.listen-address={place}"]
    return _running(made, "prometheus", whole, f"http://{place}/-/ready")
