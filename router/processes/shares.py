"""The configuration of each of several processes, above all its share of the limits that the flags set for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from router.config import RouterConfig
from router.errors import BadRequestError

Limit = TypeVar("Limit", int, "int | None")


@dataclass(frozen=True)
class Setup:
    """What a process needs to begin; the parent pickles it and sends it first.

    Attributes:
        config: that of this process.
        number: of this process, from 1.
        instance: the mark of probes, by which each of the processes knows those of the others.
        listener, board: inherited file descriptors, of the listening socket and of the `ConnectionBoard`.
    """

    config: RouterConfig
    number: int
    instance: bytes
    listener: int
    board: int


def config_of(config: RouterConfig, number: int) -> RouterConfig:
    """Return the configuration of one process; `number` counts from 1.

    Limits on requests, connections and memory are divided, so that all processes together keep within them. Everything that
    belongs to a single request, or to a worker as each process sees it (probes, breakers), stays as it is.

    Raises:
        BadRequestError: a limit is smaller than the number of processes.
    """
    count = config.server.processes

    def share(flag: str, limit: Limit, least: int = 1) -> Limit:
        if limit is None:
            return limit
        if limit < least * count:
            raise BadRequestError(f"{flag} {limit} is divided among --processes {count}: it must be at least {count}")
        return limit // count + (number <= limit % count)

    workers, queue, cache = config.workers, config.workers.queue, config.workers.cache_aware
    queue = replace(
        queue,
        max_inflight=share("--max-inflight", queue.max_inflight),
        max_inflight_per_worker=share("--max-inflight-per-worker", queue.max_inflight_per_worker),
        size=share("--queue-size", queue.size, least=0),
    )
    cache = replace(
        cache,
        max_tree_size=share("--max-tree-size", cache.max_tree_size),
        snapshot=None if cache.snapshot is None else _own_file(cache.snapshot, number),
    )
    server = replace(
        config.server,
        router_id=None if config.server.router_id is None else f"{config.server.router_id}-{number}",
        max_connections=share("--max-connections", config.server.max_connections),
    )
    return replace(
        config,
        server=server,
        workers=replace(workers, queue=queue, cache_aware=cache),
        radix=replace(config.radix, max_tokens=share("--radix-max-tokens", config.radix.token_budget)),
        store=replace(config.store, spool_max_bytes=share("--store-spool-max-bytes", config.store.spool_max_bytes)),
        sessions=replace(config.sessions, max_tokens=share("--session-max-tokens", config.sessions.token_budget)),
    )


def _own_file(path: Path, number: int) -> Path:
    """Return a file of one process: the first one has the file that a single process would have."""
    return path if number == 1 else path.with_name(f"{path.name}.{number}")
