"""Takes samples of the router from outside: from the operating system, and from its /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

_LAG = "tito_router_event_loop_lag_seconds_bucket"


@dataclass(frozen=True)
class Sample:
    """One sample: seconds since the start, MB, milliseconds. Rates and lags are those since the previous sample."""

    at: float
    rss: float
    cpu: float
    fds: int
    threads: int
    inflight: int
    tree_tokens: int
    tree_nodes: int
    tree_mb: float
    evicted: int
    per_second: float
    lag_p50: float
    lag_p99: float


class Scrape:
    """A parsed answer of /metrics."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                self._values.setdefault(sample.name, {})[labels] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all series with these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self._values.get(name, {}).items() if wanted <= set(key))

    def by(self, name: str, label: str, **others: str) -> dict[str, float]:
        """Return the values of a counter by one of its labels, over the series with the other labels."""
        found: dict[str, float] = {}
        for key, value in self._values.get(name, {}).items():
            if set(others.items()) <= set(key):
                found[dict(key)[label]] = found.get(dict(key)[label], 0.0) + value
        return found

    @property
    def lag(self) -> dict[float, float]:
        """The cumulative histogram of the event loop's lag: counts by upper bound in seconds."""
        return {float(bound): count for bound, count in self.by(_LAG, "le").items()}


class Watch:
    """Takes samples of a router.

    Attributes:
        samples: all samples.
        scrape: the last answer of /metrics.
    """

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.samples: list[Sample] = []
        self._url = url
        self._process = process
        self.scrape: Scrape

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """Start the clock."""
        self.scrape = self.first = await self._ask(session)
        self.begun = self._last = asyncio.get_running_loop().time()
        self._process.cpu_percent()

    async def look(self, session: aiohttp.ClientSession) -> Sample:
        """Take a sample."""
        before, self.scrape = self.scrape, await self._ask(session)
        now = asyncio.get_running_loop().time()
        passed, self._last = now - self._last, now
        new = self.scrape
        requests = new.total("tito_router_requests_total") - before.total("tito_router_requests_total")
        lag = {bound: count - before.lag[bound] for bound, count in new.lag.items()}
        with self._process.oneshot():
            sample = Sample(
                at=round(now - self.begun, 1),
                rss=round(self._process.memory_info().rss / 1e6, 2),
                cpu=self._process.cpu_percent(),
                fds=self._process.num_fds(),
                threads=self._process.num_threads(),
                inflight=int(new.total("tito_router_worker_inflight")),
                tree_tokens=int(new.total("tito_radix_held_tokens")),
                tree_nodes=int(new.total("tito_radix_nodes")),
                tree_mb=round(new.total("tito_radix_bytes") / 1e6, 2),
                evicted=int(sum(new.total("tito_radix_evictions_total", reason=r) for r in _REASONS)),
                per_second=round(requests / passed, 1),
                lag_p50=quantile(lag, 0.5),
                lag_p99=quantile(lag, 0.99),
            )
        self.samples.append(sample)
        return sample

    async def _ask(self, session: aiohttp.ClientSession) -> Scrape:
        async with session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        return await asyncio.to_thread(Scrape, text)


_REASONS = ("version", "least_recently_hit")


def quantile(at_most: Mapping[float, float], share: float) -> float:
    """Return a quantile in milliseconds, interpolated within its bucket; for the last bucket, its lower bound."""
    bounds = sorted(at_most)
    wanted = share * at_most[bounds[-1]]
    low = below = 0.0
    for bound in bounds:
        if at_most[bound] >= wanted and at_most[bound] > below:
            high = bound if bound != float("inf") else low
            return round(1000 * (low + (high - low) * (wanted - below) / (at_most[bound] - below)), 3)
        low, below = bound, at_most[bound]
    return 0.0


def slope(samples: Sequence[Sample]) -> float:
    """Return the growth of memory in MB an hour, by a least-squares line."""
    count = len(samples)
    times, sizes = [one.at for one in samples], [one.rss for one in samples]
    mean_time, mean_size = sum(times) / count, sum(sizes) / count
    spread = sum((at - mean_time) ** 2 for at in times)
    if not spread:
        return 0.0
    return 3600 * sum((at - mean_time) * (size - mean_size) for at, size in zip(times, sizes, strict=True)) / spread
