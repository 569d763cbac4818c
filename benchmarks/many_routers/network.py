"""A network namespace in which the store is, and from each router a link to it that loses what networks lose.

    router 0 --- tito7h0 | tito7s0 ---+
    router 1 --- tito7h1 | tito7s1 ---+--- the store
    router 2 --- tito7h2 | tito7s2 ---+
         the machine     |  the namespace

Packets are dropped in the namespace, by nftables, so both kernels send them again, and connections stay half open. That takes
root, `ip`, and nftables (fetched if it is not installed).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Literal

from tests.support import debian
from worker.worker import LoopThread

Loss = Literal["none", "parted", "questions", "answers", "some", "delayed", "unplugged"]
LOSSES: tuple[Loss, ...] = ("parted", "questions", "answers", "some", "delayed", "unplugged")
"""What a link loses.

`parted`: all packets. `questions`: those to the store. `answers`: those from it. `some`: three of ten. `unplugged`: the link is
down. `delayed`: none, but they are late; if the kernel has no netem, eight kilobytes a second pass, and what waits too long is
lost.
"""
_MOST = 256
_CLONE_NEWNET = 0x40000000
_RULES = {"parted": "drop", "some": "numgen random mod 10 < 3 drop"}
_DELAYS = (("netem", "delay", "150ms", "50ms"), ("tbf", "rate", "64kbit", "burst", "4kb", "latency", "400ms"))


class NoNetworkError(Exception):
    """This machine or this user may make no network namespace; the message says why."""


class Network:
    """The namespace and its links, of which the last one is never hurt: the count asks over it."""

    def __init__(self, links: int) -> None:
        """Make them. Raises NoNetworkError."""
        if os.geteuid() != 0:
            raise NoNetworkError("it takes root")
        try:
            self._ip, self._tc = str(debian.program("ip", "iproute2")), str(debian.program("tc", "iproute2"))
            self._nft = str(debian.program("nft", "nftables"))
        except RuntimeError as error:
            raise NoNetworkError(str(error)) from error
        self._number = self._named()
        self.name = f"tito{self._number}"
        self.inside = (self._ip, "netns", "exec", self.name)
        self._losses: dict[int, Loss] = {}
        self._links = links
        # Without it, what has no link takes the machine's way to the rest of the world.
        self._nowhere = ("route", "add", "unreachable", f"198.18.{self._number}.0/24")
        try:
            _run(self._ip, *self._nowhere)
            _run(*self.inside, self._ip, "link", "set", "lo", "up")
            for link in range(links):
                here, there = f"{self.name}h{link}", f"{self.name}s{link}"
                _run(self._ip, "link", "add", here, "type", "veth", "peer", "name", there, "netns", self.name)
                _run(self._ip, "address", "add", f"{self._address(link, 1)}/30", "dev", here)
                _run(*self.inside, self._ip, "address", "add", f"{self.address(link)}/30", "dev", there)
                _run(*self.inside, self._ip, "link", "set", there, "up")
                _run(self._ip, "link", "set", here, "up")
            self._lose()
        except NoNetworkError:
            self.close()
            raise

    def _named(self) -> int:
        """Make the namespace under the first number that is free, and return the number."""
        for number in range(_MOST):
            try:
                _run(self._ip, "netns", "add", f"tito{number}")
            except NoNetworkError as error:
                if "File exists" not in str(error):
                    raise
            else:
                return number
        raise NoNetworkError(f"{_MOST} namespaces are there")

    def address(self, link: int) -> str:
        """Return the store's address on a link."""
        return self._address(link, 2)

    def _address(self, link: int, host: int) -> str:
        return f"198.18.{self._number}.{4 * link + host}"  # a network that RFC 2544 keeps for benchmarks

    def set(self, link: int, loss: Loss) -> None:
        """Let a link lose packets, or `none` any more."""
        here = f"{self.name}h{link}"
        before = self._losses.get(link, "none")
        self._losses[link] = loss
        if "unplugged" in (before, loss):
            _run(self._ip, "link", "set", here, "down" if loss == "unplugged" else "up")
        if before == "delayed":
            _run(self._tc, "qdisc", "del", "dev", here, "root")
        if loss == "delayed":
            self._delay(here)
        self._lose()

    def _delay(self, device: str) -> None:
        for discipline in _DELAYS:
            try:
                _run(self._tc, "qdisc", "add", "dev", device, "root", *discipline)
            except NoNetworkError:  # this kernel has no netem
                continue
            return

    def _lose(self) -> None:
        """Say which packets are dropped, in one step."""
        rules = ["add table inet losses", "delete table inet losses", "add table inet losses"]
        for hook, name, one_way in (("input", "iifname", "questions"), ("output", "oifname", "answers")):
            rules.append(f"add chain inet losses {hook} {{ type filter hook {hook} priority 0; }}")
            for link, loss in self._losses.items():
                rule = "drop" if loss == one_way else _RULES.get(loss)
                if rule:
                    rules.append(f'add rule inet losses {hook} {name} "{self.name}s{link}" {rule}')
        _run(*self.inside, self._nft, "-f", "-", given="\n".join(rules))

    def enter(self, thread: LoopThread) -> None:
        """Put a thread into the namespace: what it listens on and connects to is there."""

        async def enter(namespace: int) -> None:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        with Path("/run/netns", self.name).open() as file:
            thread.call(enter(file.fileno()))

    def close(self) -> None:
        """Take all of it away. Processes in the namespace must have ended."""
        made = [("link", "del", f"{self.name}h{link}") for link in range(self._links)]
        for what in (*made, ("route", "del", *self._nowhere[2:]), ("netns", "del", self.name)):
            subprocess.run([self._ip, *what], capture_output=True, check=False, timeout=60)


def _run(*command: str, given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise NoNetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
