"""The configuration of each of several processes, above all its share of the limits that the flags set for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from router.config import RouterConfig, flag
from router.config.flag import Section
from router.policies import parameters_of
from router.policies.base import PolicyParameters

Limit = TypeVar("Limit", int, "int | None")


@dataclass(frozen=True)
class Setup:
    """The first thing that the parent sends to a process, pickled: it needs this to begin.

    Attributes:
        config: that of this process.
        number: of this process, from 1.
        instance: the mark of probes, by which each process knows the probes of the others.
        listener, board, homes: inherited file descriptors, of the listening socket, the `ConnectionBoard` and the
            `ConversationHomes`.
    """

    config: RouterConfig
    number: int
    instance: bytes
    listener: int
    board: int
    homes: int


def config_of(config: RouterConfig, number: int) -> RouterConfig:
    """Return the configuration of one process; `number` counts from 1.

    Limits on requests, connections and memory are divided, so that all processes together keep within them. Everything that
    belongs to a single request, or to a worker as each process sees it (probes, breakers), stays as it is.

    Raises:
        BadRequestError: a limit is smaller than the number of processes.
    """
    count = config.server.processes

    def share(name: str, limit: Limit, least: int = 1) -> Limit:
        return limit if limit is None else flag.share(name, limit, number, count, least)

    workers, queue = config.workers, config.workers.queue
    queue = replace(
        queue,
        max_inflight=share("--max-inflight", queue.max_inflight),
        max_inflight_per_worker=share("--max-inflight-per-worker", queue.max_inflight_per_worker),
        size=share("--queue-size", queue.size, least=0),
    )

    def own(policy: str | None, given: Section | None) -> PolicyParameters | None:
        parameters = parameters_of(policy or workers.policy, given)
        return parameters and parameters.of_process(number, count)

    workers = replace(
        workers,
        queue=queue,
        parameters=own(workers.policy, workers.parameters),
        prefill_parameters=own(workers.prefill_policy, workers.prefill_parameters),
        decode_parameters=own(workers.decode_policy, workers.decode_parameters),
    )
    server = replace(
        config.server,
        router_id=None if config.server.router_id is None else f"{config.server.router_id}-{number}",
        max_connections=share("--max-connections", config.server.max_connections),
    )
    return replace(
        config,
        server=server,
        workers=workers,
        radix=replace(config.radix, max_tokens=share("--radix-max-tokens", config.radix.token_budget)),
        store=replace(config.store, spool_max_bytes=share("--store-spool-max-bytes", config.store.spool_max_bytes)),
        media=replace(config.media, max_bytes=share("--media-max-bytes", config.media.budget)),
        sessions=replace(config.sessions, max_tokens=share("--session-max-tokens", config.sessions.token_budget)),
    )
