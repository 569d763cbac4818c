"""Answers of a router, compared with the description of its routes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from scripts.make_openapi import description, is_long


class _Path(NamedTuple):
    fits: re.Pattern[str]
    methods: Mapping[str, Any]


class DescribedRoutes:
    """The routes of `docs/openapi.json`."""

    def __init__(self) -> None:
        self._paths = [_Path(_pattern(path), methods) for path, methods in description()["paths"].items()]

    def complaint(self, method: str, path: str, status: int, *, workers: bool) -> str | None:
        """Say what is wrong with the status of an answer; None if it is described, or the route is not.

        Args:
            method: of the request. HEAD is served as GET is.
            path: decoded, without a query.
            workers: whether a worker gave the status.
        """
        for operation in self._operations("get" if method == "HEAD" else method.lower(), path):
            told = operation["responses"]
            if str(status) not in told and not (workers and "default" in told):
                return f"{status} is not described for {operation['operationId']}"
        return None

    def _operations(self, method: str, path: str) -> Iterator[Any]:
        for one in self._paths:
            if method in one.methods and one.fits.fullmatch(path):
                yield one.methods[method]


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", path)
    for at in range(1, len(parts), 2):
        parts[at] = ".+" if is_long(path, parts[at]) else "[^/]+"
    parts[::2] = map(re.escape, parts[::2])
    return re.compile("".join(parts), re.DOTALL)
