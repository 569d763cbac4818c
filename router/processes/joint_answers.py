"""The answers of all processes to one GET, as that of one router. Each function gets JSON objects, its own process's first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.workers.worker import KvState

Json = dict[str, Any]
Join = Callable[[Sequence[Json]], Json]

_BREAKERS = ("closed", "half_open", "open")
_KV_STATES = [state.value for state in KvState]
"""The worst one first."""

_ALIKE = frozenset({"weight_version", "weight_versions", "records", "roots", "logs", "error"})
"""What is the same for all processes: the fleet's versions, and the size of their store."""


def join_for(path: str) -> Join | None:
    """Return how answers to a GET of this path are joined; None for a path that any process answers alone."""
    if path.startswith("/workers/"):
        return worker
    return _JOINS.get(path)


def worker(answers: Sequence[Json]) -> Json:
    """Describe one worker: its load at all processes, and otherwise the worst of the processes' descriptions."""
    least = min(answers, key=lambda one: bool(one["is_healthy"]))
    breaker = max((one["circuit_breaker"] for one in answers), key=_BREAKERS.index)
    found = {**least, "load": sum(one["load"] for one in answers), "circuit_breaker": breaker}
    followed = [one["kv_events"] for one in answers if one.get("kv_events") is not None]
    if followed:
        found["kv_events"] = min(followed, key=lambda one: _KV_STATES.index(one["state"]))
    return found


def workers(answers: Sequence[Json]) -> Json:
    found: dict[str, list[Json]] = {}
    for answer in answers:
        for one in answer["workers"]:
            found.setdefault(one["id"], []).append(one)
    return {**answers[0], "workers": [worker(same) for same in found.values()], "total": len(found)}


def health(answers: Sequence[Json]) -> Json:
    """Answer with the fewest workers that a process sees: it may be the one that gets the next request."""
    return {**answers[0], "workers": min(answer["workers"] for answer in answers)}


def requests(answers: Sequence[Json]) -> Json:
    found = [one for answer in answers for one in answer["requests"]]
    found.sort(key=lambda one: str(one["begun_at"]))
    return {**answers[0], "requests": found, "total": len(found)}


def tree_stats(answers: Sequence[Json]) -> Json:
    """Add up what each process holds and has counted; a conversation that several hold counts for each."""
    joined = _summed(answers)
    stores = [answer["store"] for answer in answers if "store" in answer]
    if stores:
        sizes = [store["bytes"] for store in stores if "bytes" in store]
        joined["store"] = {**_summed(stores), **({"bytes": max(sizes)} if sizes else {})}
    return joined


def _summed(answers: Sequence[Json]) -> Json:
    """Add up all numbers, and those in dictionaries by their names.

    What is true of one is true of all; everything else is taken from the first that has it.
    """
    found: Json = {}
    for answer in answers:
        for name, value in answer.items():
            known = found.get(name)
            if known is None or name in _ALIKE:
                found.setdefault(name, value)
            elif isinstance(value, dict):
                found[name] = _summed([known, value])
            elif isinstance(value, bool):
                found[name] = known or value
            elif isinstance(value, int | float):
                found[name] = known + value
    return found


_JOINS: dict[str, Join] = {
    "/workers": workers,
    "/health": health,
    "/debug/requests": requests,
    "/radix_tree/stats": tree_stats,
}
