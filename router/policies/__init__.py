"""The routing policies, by the names that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.config.workers import WorkersConfig
from router.errors import BadRequestError
from router.policies.base import PolicyParameters
from router.policies.cache_aware import CacheAware
from router.policies.consistent_hashing import ConsistentHashing
from router.policies.least_inflight import LeastInflight
from router.policies.manual import Manual
from router.policies.power_of_two import PowerOfTwo
from router.policies.random_choice import RandomChoice
from router.policies.round_robin import RoundRobin
from router.workers.policy import Policy

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "least_inflight": LeastInflight,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
    "consistent_hashing": ConsistentHashing,
    "manual": Manual,
    "cache_aware": CacheAware,
}


def parameters_class(name: str) -> type[PolicyParameters] | None:
    """Return the class of a policy's parameters; None if it has none, or does not exist."""
    return getattr(POLICIES.get(name), "PARAMETERS", None)


def parameters_of(workers: WorkersConfig) -> PolicyParameters | None:
    """Return the parameters of the configured policy; None if it has none. Those of another policy are ignored."""
    kind = parameters_class(workers.policy)
    if kind is None:
        return None
    return workers.parameters if isinstance(workers.parameters, kind) else kind()


def create_policy(name: str, parameters: PolicyParameters | None = None) -> Policy:
    """Return a new policy.

    Args:
        name: a key of `POLICIES`.
        parameters: of its `PARAMETERS`; None for their defaults, and for a policy that has none.

    Raises:
        BadRequestError: no policy has this name; the message lists all policies.
    """
    if name not in POLICIES:
        raise BadRequestError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]() if parameters is None else POLICIES[name](parameters)
