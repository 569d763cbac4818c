"""Checks that concern only requests with certain headers. Most requests have none of these, and pass without a call."""

from __future__ import annotations

from typing import ClassVar, Protocol

from starlette.types import Scope


class HeaderCheck(Protocol):
    """A check of requests that have one of the headers it reads."""

    reads: ClassVar[frozenset[bytes]]

    def __call__(self, scope: Scope) -> None:
        """Check one request, as a `Check` of the entrance does."""


class HeaderChecks:
    """Runs checks, in their order, where a request has one of their headers."""

    def __init__(self, *checks: HeaderCheck) -> None:
        self._checks = checks
        self._reads = frozenset[bytes]().union(*(check.reads for check in checks))

    def __call__(self, scope: Scope) -> None:
        present = dict(scope["headers"])
        if self._reads.isdisjoint(present):
            return
        for check in self._checks:
            if not check.reads.isdisjoint(present):
                check(scope)
