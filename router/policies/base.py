"""The things that a policy may bring beside its choices (`router/workers/policy.py`): flags, an index of caches, metrics.

The application finds it out by `isinstance`, and the flags by the policy's class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from router.config.flag import Section
from router.kv_cache.index import KvIndex
from router.policies.homes import ConversationHomes

if TYPE_CHECKING:  # slow to import: not for --help
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class PolicyParameters(Section):
    """The parameters of one policy, which flags set. The policy's class names its subclass as `PARAMETERS`, and takes one.

    Each field is a `flag` (`router/config/flag.py`). A flag that switches something on, because its default is nothing, is
    refused where another policy is chosen. Other flags are ignored there.
    """

    def of_process(self, number: int, count: int) -> PolicyParameters:
        """Return the parameters of one of `count` processes, counted from 1: its share of a limit, and a file of its own."""
        return self


@runtime_checkable
class FollowsCaches(Protocol):
    """A policy that uses the workers' own reports of their caches. The router keeps its index up to date.

    Attributes:
        index: None if the workers are not to be asked.
    """

    index: KvIndex | None


@runtime_checkable
class SharesHomes(Protocol):
    """A policy that keeps conversations at their workers also where several processes route their turns.

    Attributes:
        homes: the workers of conversations; None in a process that is alone.
    """

    homes: ConversationHomes | None


@runtime_checkable
class HasMetrics(Protocol):
    """A policy with metrics of its own."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, with their values now, for `GET /metrics`."""
