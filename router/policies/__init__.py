"""The routing policies by the names that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.config import CacheAwareConfig
from router.errors import BadRequestError
from router.policies.base import Policy
from router.policies.cache_aware import CacheAware
from router.policies.consistent_hashing import ConsistentHashing
from router.policies.least_inflight import LeastInflight
from router.policies.manual import Manual
from router.policies.power_of_two import PowerOfTwo
from router.policies.random_choice import RandomChoice
from router.policies.round_robin import RoundRobin

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "least_inflight": LeastInflight,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
    "consistent_hashing": ConsistentHashing,
    "manual": Manual,
    "cache_aware": CacheAware,
}


def create_policy(name: str, cache_aware: CacheAwareConfig | None = None, max_idle: float | None = None) -> Policy:
    """A new policy of this name. BadRequestError lists the names that there are.

    `cache_aware`, `max_idle`: the parameters of `cache_aware` and of `manual`.
    """
    if name == "cache_aware":
        return CacheAware(cache_aware)
    if name == "manual" and max_idle is not None:
        return Manual(max_idle)
    try:
        return POLICIES[name]()
    except KeyError:
        raise BadRequestError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}") from None
