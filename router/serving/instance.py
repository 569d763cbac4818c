"""Detects a router that is among its own workers, before a request goes round in circles.

A new worker is probed with the id of this process in a header. If the probe comes back to this process, by any way, the
"worker" is this router. Names and addresses do not show that: one host has too many of them.
"""

from __future__ import annotations

import secrets

from starlette.types import Scope

from router.errors import LoopError
from router.http.headers import HeaderList

INSTANCE = b"x-tito-router-instance"


class Instance:
    """The id of this router, which goes along with probes. Processes that share a port share it, too.

    Attributes:
        headers: for a probe of a worker.
    """

    def __init__(self, name: bytes | None = None) -> None:
        self._mark = INSTANCE, secrets.token_hex(16).encode() if name is None else name
        self.headers: HeaderList = [self._mark]

    def check(self, scope: Scope) -> None:
        """Refuse a probe of this process, before the check of keys, because probes carry none. Raises LoopError."""
        if self._mark in scope["headers"]:
            raise LoopError("this is the router that asks")
