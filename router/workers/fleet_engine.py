"""The engine of the fleet: all workers run the same one.

A generation may be tried at any worker, and a call goes to all of them. Engines tokenize, stop and report differently. So the
router refuses a worker of another engine. With `--engine auto`, the present workers decide the engine; after the last of them
has left, the next worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.engines.engine import Engine, KnownWorker
from router.engines.sglang.engine import SGLANG
from router.errors import NotFoundError
from router.workers.pool import WorkerPool
from router.workers.worker import ProbeResult

AUTO = "auto"


class FleetEngine:
    """Knows which engine the workers of a pool run.

    Attributes:
        spoken: the engine whose words the workers get.
    """

    def __init__(
        self, pool: WorkerPool, asked: str, table: Mapping[str, Engine], speak: Callable[[Engine], None]
    ) -> None:
        """`asked`: `--engine`. `speak` is called with the engine to speak, SGLang at first if none is asked for."""
        self._pool = pool
        self._asked = asked
        self._table = table
        self._on_speak = speak
        pool.on_engine = self._speak
        self._speak(SGLANG.name if asked == AUTO else asked)

    def _speak(self, name: str) -> None:
        self.spoken = self._table[name]
        self._on_speak(self.spoken)

    def checked(self, url: str, found: ProbeResult) -> ProbeResult:
        """Return the result of a probe, as a refusal if the worker runs another engine than the fleet."""
        if found.engine is None or found.refusal is not None:
            return found
        if self._asked not in (AUTO, found.engine):
            return replace(
                found,
                refusal=f"worker {url} runs {found.engine}, and this router was started with --engine {self._asked}",
            )
        for other in self._pool.list():
            if other.url != url and other.engine not in (None, found.engine):
                return replace(
                    found,
                    refusal=f"worker {url} runs {found.engine}, and {other.url} runs {other.engine}: a fleet has one"
                    " engine. Remove the workers of the other engine first, or start another router for this one",
                )
        return found


def known_worker(pool: WorkerPool, url: str) -> KnownWorker:
    """Return the facts about the worker at a URL that an adapter needs."""
    try:
        worker = pool.get(url)
    except NotFoundError:
        draining = pool.elsewhere().get(url)
        if draining is None:
            return KnownWorker()
        worker = draining
    return KnownWorker(worker.abilities, lambda: worker.version, worker.images)
