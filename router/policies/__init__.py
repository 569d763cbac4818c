"""The routing policies, by the names that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.config.workers import CacheAwareConfig
from router.errors import BadRequestError
from router.policies.cache_aware import CacheAware
from router.policies.consistent_hashing import ConsistentHashing
from router.policies.least_inflight import LeastInflight
from router.policies.manual import Manual
from router.policies.power_of_two import PowerOfTwo
from router.policies.random_choice import RandomChoice
from router.policies.round_robin import RoundRobin
from router.workers.policy import Policy

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
    """Return a new policy.

    Args:
        name: a key of `POLICIES`.
        cache_aware: the parameters of `cache_aware`; other policies ignore them.
        max_idle: the parameter of `manual`, in seconds; other policies ignore it.

    Raises:
        BadRequestError: no policy has this name; the message lists those that exist.
    """
    if name == "cache_aware":
        return CacheAware(cache_aware)
    if name == "manual" and max_idle is not None:
        return Manual(max_idle)
    if name not in POLICIES:
        raise BadRequestError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
