"""The routing policies, by the names that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.config.flag import Section
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


def parameters_of(policy: str, given: Section | None) -> PolicyParameters | None:
    """Return the parameters of a policy, its defaults if these are of another one; None if it has none."""
    kind = parameters_class(policy)
    if kind is None:
        return None
    return given if isinstance(given, kind) else kind()


def policies_of(workers: WorkersConfig) -> tuple[Policy, Policy]:
    """Return a new policy for the workers that decode, or do all, and one for those that prefill. Raises BadRequestError."""
    decode, prefill = workers.decode_policy or workers.policy, workers.prefill_policy or workers.policy
    return (
        create_policy(decode, parameters_of(decode, workers.decode_parameters or workers.parameters)),
        create_policy(prefill, parameters_of(prefill, workers.prefill_parameters or workers.parameters)),
    )


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
