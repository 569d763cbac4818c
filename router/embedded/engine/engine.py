"""What runs: samples, from their admission to their end. No HTTP.

A request passes two places, and both can be closed:

    app -> [front: SGLang's tokenizer manager] -> [scheduler: queued -> running] -> done

The front is closed while the engine is paused, in any mode. What waits there cannot be aborted: SGLang sends the abort to a
scheduler that has not heard of the request, and so it runs once the pause is over. The scheduler is closed by a pause with
mode `in_place` or `retract` (and by `hold`, which is not SGLang's). What is queued there ends at once if it is aborted; what
is running ends at its next token, which in a pause is after the pause. `retract` puts what is running back into the queue.

All state belongs to one event loop. Between two tokens, or some of them, others are let run; nobody sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from router.embedded.engine.admission import Wanted
from router.embedded.engine.condition import Bell
from router.embedded.engine.faults import Fault
from router.embedded.engine.records import Record
from router.embedded.engine.sample import Sample, SampledReply, abort
from router.embedded.engine.script import FREE, Script
from router.embedded.engine.source import Source
from router.embedded.engine.stopping import DEQUEUED, FinishReason
from router.embedded.models.pool import Pool, PooledReply
from router.embedded.models.vocabulary import Vocabulary

PauseMode = Literal["abort", "in_place", "retract"]

logger = logging.getLogger(__name__)

_CATCH_UP = 0.1  # seconds: so much of a delay that came too late is made up for


class Stage(Enum):
    """Where a job is."""

    FRONT = "front"
    QUEUED = "queued"
    RUNNING = "running"


@dataclass(eq=False)
class Job:
    """A sample on its way."""

    sample: Sample
    record: Record
    fault: Fault | None
    stage: Stage = Stage.FRONT
    aborted: bool = False
    dropped: bool = False  # nobody wants it any more, wherever it is
    waiting: bool = False  # at a place that is closed
    released: bool = False  # `hold` is nothing to it any more
    clock: float = 0.0  # when its next token is due, if tokens take time


@dataclass(frozen=True)
class Progress:
    """A sample as far as it has been decoded: all of its text, and how many tokens that is."""

    text: str
    count: int
    finish: FinishReason | None = None  # of the last one
    dequeued: bool = False  # an abort took it out of the queue


NOTHING = Progress("", 0)


class Engine:
    """The jobs, and what moves them.

    Args:
        vocabulary: of everything that is sampled.
        source: what it is sampled from; a pool replaces sampling.
        seed: of all chance; the k-th sample of an engine is the same in every run.
        weight_version: the first one.
        stream_interval: tokens per event of a stream that does not say so itself.
        token_delay: seconds per token.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        source: Source | Pool,
        *,
        seed: int,
        weight_version: str,
        stream_interval: int,
        token_delay: float,
    ) -> None:
        self.weight_version = weight_version
        self.jobs: dict[str, Job] = {}
        self.scripts: deque[Script] = deque()
        self.faults: deque[Fault] = deque()
        self.watchers = Bell()  # who wants to hear of every token
        self._gates = Bell()
        self._vocabulary = vocabulary
        self._source = source
        self._seed = seed
        self._count = 0
        self._stream_interval = stream_interval
        self._token_delay = token_delay
        self._hold: int | None = None
        self._front_closed = False
        self._scheduler_closed = False

    @property
    def paused(self) -> bool:
        """In any mode."""
        return self._front_closed

    def changed(self) -> None:
        """Tell those who wait for something."""
        self._gates.ring()
        self.watchers.ring()

    # -- what comes ----------------------------------------------------------------------------------------------------

    def start(self, wanted: Wanted, record: Record) -> Job:
        """From now on it is in flight."""
        script = wanted.script or (self.scripts.popleft() if self.scripts else FREE)
        fault = self.faults.popleft() if self.faults else script.fault
        job = self.jobs[wanted.rid] = Job(self._sample(wanted, script), record, fault)
        return job

    def _sample(self, wanted: Wanted, script: Script) -> Sample:
        ids, sampling, asked = wanted.input_ids, wanted.sampling, wanted.asked
        if isinstance(self._source, Pool):
            return PooledReply(self._source, ids, sampling, asked)
        seed = f"{self._seed}/{self._count}"
        self._count += 1
        return SampledReply(self._vocabulary, self._source, ids, sampling, script, asked, seed)

    def retire(self, job: Job) -> None:
        """It is over, one way or the other; done twice, the second time does nothing."""
        if self.jobs.get(job.record.rid) is not job:
            return
        del self.jobs[job.record.rid]
        sample, record = job.sample, job.record
        if sample.finish is None:
            abort(sample)
        record.output_ids = sample.output_ids
        record.logprobs = sample.logprobs
        record.versions = sample.versions.per_token()
        record.finish_reason = sample.finish
        logger.debug(
            "%s: %d read, %d sampled, %s", record.rid, len(record.input_ids), len(record.output_ids), sample.finish
        )
        self.changed()

    # -- running -------------------------------------------------------------------------------------------------------

    async def run(self, job: Job, *, stream: bool) -> AsyncIterator[Progress]:
        """Run a sample, and yield what SGLang's scheduler would pass on, the last time with the finish reason."""
        sample, record = job.sample, job.record
        interval = (sample.sampling.stream_interval or self._stream_interval) if stream else sample.plain_interval
        passed_on = NOTHING
        await self._pass(job, lambda: job.dropped or not self._front_closed)
        job.stage = Stage.QUEUED
        while True:
            if sample.finish is None:
                await self._pass(job, lambda: self._may_run(job))
                if job.aborted and job.stage is Stage.QUEUED:
                    sample.finish = dict(DEQUEUED)
                    yield replace(passed_on, finish=sample.finish, dequeued=True)
                    return
                job.stage = Stage.RUNNING
                if job.aborted or job.dropped:
                    abort(sample)
                else:
                    await self._advance(job, self._due(passed_on.count, interval, stream=stream))
            count = len(sample.output_ids)
            due = count >= self._due(passed_on.count, interval, stream=stream)
            if sample.finish is not None or (due and not (stream and sample.holds_back())):
                record.text = sample.text()
                passed_on = Progress(record.text, count, sample.finish)
                yield passed_on
            if sample.finish is not None:
                return

    def _due(self, passed_on: int, interval: int, *, stream: bool) -> int:
        """At how many tokens a reply is decoded next: of a stream the first one at once."""
        return 1 if stream and not passed_on else passed_on + interval

    async def _advance(self, job: Job, due: int) -> None:
        """Sample up to `due` tokens: one by one if somebody looks on, else in a burst."""
        sample, count = job.sample, len(job.sample.output_ids)
        burst = 1 if self._token_delay or self.watchers.waited_for else max(1, min(sample.burst, due - count))
        if self._hold is not None and not job.released:
            burst = min(burst, self._hold - count)
        sample.advance(burst, self.weight_version)
        await asyncio.sleep(self._wait(job) if self._token_delay else 0)
        self.watchers.ring()

    def _wait(self, job: Job) -> float:
        now = asyncio.get_running_loop().time()
        job.clock = max(job.clock, now - _CATCH_UP) + self._token_delay if job.clock else now + self._token_delay
        return max(0.0, job.clock - now)

    def _may_run(self, job: Job) -> bool:
        if job.dropped:
            return True
        if job.aborted:
            return job.stage is Stage.QUEUED or not self._scheduler_closed
        held = self._hold is not None and len(job.sample.output_ids) >= self._hold and not job.released
        return not (held or self._scheduler_closed)

    async def _pass(self, job: Job, may: Callable[[], bool]) -> None:
        if may():
            return
        job.waiting = True
        self.watchers.ring()
        await self._gates.wait_for(may)
        job.waiting = False

    def give_up(self, jobs: Iterable[Job]) -> None:
        """End these at once."""
        for job in jobs:
            job.dropped = True
        self.changed()

    # -- what stops it -------------------------------------------------------------------------------------------------

    def hold(self, after: int) -> None:
        """Stop every sample that has `after` tokens; 0 keeps them queued."""
        self._hold = after
        self.changed()

    def release(self, count: int | None) -> None:
        """Open the gate, or let only the first `count` of those who wait there go on."""
        if count is None:
            self._hold = None
        else:
            for job in [job for job in self.jobs.values() if job.waiting and not job.released][:count]:
                job.released = True
        self.changed()

    def abort(self, rid: str) -> None:
        """The front wants to know the id; the scheduler then takes all that begin with it."""
        if rid in self.jobs:
            self._abort(lambda name: name.startswith(rid))

    def abort_all(self) -> None:
        """Whatever the scheduler has."""
        self._abort(lambda _name: True)

    def _abort(self, matches: Callable[[str], bool]) -> None:
        for name, job in self.jobs.items():
            if matches(name) and job.stage is not Stage.FRONT:
                job.aborted = True
        self.changed()

    async def pause(self, mode: PauseMode) -> None:
        """Close the front, and the scheduler; or, with `abort`, wait until the scheduler has nothing left."""
        logger.info("paused: %s", mode)
        self._front_closed = True
        if mode == "abort":
            self.abort_all()
            await self.watchers.wait_for(lambda: all(job.stage is Stage.FRONT for job in self.jobs.values()))
            return
        self._scheduler_closed = True
        if mode == "retract":
            for job in self.jobs.values():
                if job.stage is Stage.RUNNING:
                    job.stage = Stage.QUEUED
        self.changed()

    def resume(self) -> None:
        """Open both."""
        logger.info("continued")
        self._front_closed = self._scheduler_closed = False
        self.changed()

    async def update_weights(self, version: str | None) -> None:
        """New weights. If nothing is paused, they wait for what is running: the engine's writer lock."""
        if not self._front_closed:
            await self.watchers.wait_for(lambda: not self.jobs)
        if version is not None:
            self.weight_version = version
        logger.info("new weights, version %s", self.weight_version)
        self.changed()

    def idle(self) -> bool:
        """Whether the cache may be flushed: nothing runs, and nothing waits for anything but the end of a pause."""
        return not any(
            job.stage is Stage.RUNNING or (job.stage is Stage.QUEUED and not self._scheduler_closed)
            for job in self.jobs.values()
        )

    def drop(self) -> None:
        """The process has died: everything ends, and when it comes back nothing is paused."""
        self._front_closed = self._scheduler_closed = False
        self.give_up(self.jobs.values())
