"""The engine: runs samples from their admission to their end. No HTTP.

A request passes two places, and both can be closed:

    app -> [front: SGLang's tokenizer manager] -> [scheduler: queued -> running] -> done

The front is closed while the engine is paused, in any mode, and while new weights wait for what is in flight. A request that
waits there cannot be aborted: SGLang sends the abort to a scheduler that does not know the request yet, so the request runs
once the front is open. A pause with mode `in_place` or `retract` closes the scheduler (so does `hold`, which SGLang does not
have). An aborted sample ends at once if it is queued; if it is running it ends at its next token, which in a pause comes after
the pause. `retract` puts running samples back into the queue.

All state belongs to one event loop. After each burst of tokens a sample lets the others run; nothing sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from worker.engine.prefix_cache import PrefixCache
from worker.engine.records import ABORTED, DEQUEUED, FinishReason, GenerationRecord, length
from worker.engine.sample import ReplyRequest, WorkerSample
from worker.engine.script import FREE, Fault, ReplyScript
from worker.engine.transfer import Handover, Leg, Rooms
from worker.options import Role, WorkerOptions


class Condition:
    """Wakes the waiters whose predicate holds. Call `notify` after every change that can make one true."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiting)

    def notify(self) -> None:
        """Evaluate all predicates."""
        for future, predicate in list(self._waiting.items()):
            if future.done():
                continue
            try:
                if predicate():
                    future.set_result(None)
            except Exception as error:  # noqa: BLE001 - it is the waiter's predicate, and so the waiter's error
                future.set_exception(error)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when `predicate` holds, now or at a later `notify`."""
        if predicate():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = predicate
        try:
            await future
        finally:
            del self._waiting[future]


PauseMode = Literal["abort", "in_place", "retract", "wait"]  # the last is vLLM's

logger = logging.getLogger(__name__)

_CATCH_UP = 0.1  # seconds: a sample that is later than this does not catch up


class JobStage(Enum):
    """The place that a job has reached."""

    FRONT = "front"
    QUEUED = "queued"
    RUNNING = "running"


@dataclass(eq=False)
class EngineJob:
    """A sample in flight."""

    sample: WorkerSample
    record: GenerationRecord
    fault: Fault | None
    leg: Leg | None = None  # of a request that is prefilled at one worker and decoded at another one
    rank: int = 0  # the data-parallel rank that has it
    cached: int = 0  # tokens of its prompt that the cache of its rank had
    stage: JobStage = JobStage.FRONT
    aborted: bool = False
    dropped: bool = False  # its client has left: it ends, whatever is closed
    waiting: bool = False  # at a closed place
    released: bool = False  # `hold` no longer stops it
    clock: float = 0.0  # when its next token is due, by the loop's clock, if tokens take time

    @property
    def held_at_front(self) -> bool:
        return self.stage is JobStage.FRONT and self.waiting and not self.dropped


@dataclass(frozen=True)
class JobProgress:
    """How far a sample has been decoded: all of its text, and the number of its tokens."""

    text: str
    count: int
    finish: FinishReason | None = None  # with the last progress of a sample
    dequeued: bool = False  # an abort took it out of the queue


NOTHING = JobProgress("", 0)


class EmbeddedEngine:
    """Runs jobs, and pauses, aborts and holds them. `new_sample` begins the sample of a request."""

    def __init__(
        self,
        new_sample: Callable[[ReplyRequest], WorkerSample],
        options: WorkerOptions,
        caches: Sequence[PrefixCache],
    ) -> None:
        """`caches`: one for each data-parallel rank."""
        self.weight_version = options.weight_version
        self.role: Role = options.disaggregation_mode
        self.rooms = Rooms()
        self.jobs: dict[str, EngineJob] = {}
        self.scripts: deque[ReplyScript] = deque()
        self.faults: deque[Fault] = deque()
        self.progress = Condition()  # notified after every token and every request
        self._gates = Condition()  # notified when a closed place may have opened
        self._new_sample = new_sample
        self._caches = caches
        self._turn = 0
        self._stream_interval = options.stream_interval
        self._token_delay = options.token_delay
        self._hold: int | None = None
        self._held_rank: int | None = None
        self._front_closed = False
        self._scheduler_closed = False
        self._updates = 0  # that wait for what is in flight

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, in any mode."""
        return self._front_closed

    def changed(self) -> None:
        """Wake the tasks that wait for something that may have changed."""
        self._gates.notify()
        self.progress.notify()

    # -- admission -----------------------------------------------------------------------------------------------------

    def start(self, request: ReplyRequest, record: GenerationRecord) -> EngineJob:
        """Put a request in flight. Without a script of its own it takes the next one of the queue."""
        if request.script is FREE and self.scripts:
            request = replace(request, script=self.scripts.popleft())
        fault = self.faults.popleft() if self.faults else request.script.fault
        record.rank = rank = self._rank(request)
        cached = self._caches[rank].match(request.cached_ids, request.salt)
        if request.returns.logprobs and request.returns.start >= 0:
            cached = min(cached, request.returns.start)  # what has logprobs is computed again
        job = self.jobs[request.rid] = EngineJob(self._new_sample(request), record, fault, rank=rank, cached=cached)
        if request.bootstrap is not None:
            job.leg = Leg(request.bootstrap.room, self.changed, prefill=self.role == "prefill")
            if job.leg.prefill:
                self.rooms.enter(job.leg)
                if (implied := job.leg.room % self.ranks) != rank:
                    job.leg.fail(
                        f"follow_bootstrap_room conflict: dispatched to dp_rank {rank} but bootstrap_room {job.leg.room}"
                        f" implies dp_rank {implied}"
                    )
        return job

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks."""
        return len(self._caches)

    def loads(self) -> list[tuple[int, int]]:
        """Return for each rank how many jobs run there, and how many wait."""
        running = Counter(job.rank for job in self.jobs.values() if job.stage is JobStage.RUNNING)
        all_jobs = Counter(job.rank for job in self.jobs.values())
        return [(running[rank], all_jobs[rank] - running[rank]) for rank in range(self.ranks)]

    def _rank(self, request: ReplyRequest) -> int:
        """Return the rank that serves a request: the one that it names, else each in turn, as SGLang does."""
        if request.rank is not None:
            return request.rank
        if request.bootstrap is not None and self.role == "prefill":
            return request.bootstrap.room % self.ranks
        self._turn = (self._turn + 1) % self.ranks
        return self._turn

    def _clear(self) -> None:
        for cache in self._caches:
            cache.clear()

    def retire(self, job: EngineJob) -> None:
        """Take a job out of flight and complete its record. A second call does nothing."""
        if self.jobs.get(job.record.rid) is not job:
            return
        del self.jobs[job.record.rid]
        sample, record = job.sample, job.record
        if job.leg is not None:
            job.leg.fail(f"the other leg of bootstrap room {job.leg.room} has ended")
            self.rooms.leave(job.leg)
        if sample.finish is None:
            sample.finish = dict(ABORTED)
        if sample.output_ids:  # the last of them is sampled and not computed yet
            self._caches[job.rank].add([*sample.request.cached_ids, *sample.output_ids[:-1]], sample.request.salt)
        record.output_ids = sample.output_ids
        record.logprobs = sample.logprobs
        record.versions = sample.versions.per_token()
        record.finish_reason = sample.finish
        logger.debug(
            "%s: %d read, %d sampled, %s", record.rid, len(record.input_ids), len(record.output_ids), sample.finish
        )
        self.changed()

    # -- running -------------------------------------------------------------------------------------------------------

    async def run(self, job: EngineJob, *, stream: bool) -> AsyncIterator[JobProgress]:
        """Run a sample; yield the progress that SGLang's scheduler passes on, the last time with the finish reason."""
        sample, record = job.sample, job.record
        interval = (
            (sample.request.sampling.stream_interval or self._stream_interval) if stream else sample.plain_interval
        )
        passed_on = NOTHING
        while not self._passes_front(job):
            await self._pass(job, lambda: self._passes_front(job))
        job.stage = JobStage.QUEUED
        while True:
            if sample.finish is None:
                await self._pass(job, lambda: self._may_run(job))
                if job.aborted and job.stage is JobStage.QUEUED:
                    sample.finish = dict(DEQUEUED)
                    yield replace(passed_on, finish=sample.finish, dequeued=True)
                    return
                if job.stage is JobStage.QUEUED:
                    sample = self._joined(job)
                job.stage = JobStage.RUNNING
                if job.aborted or job.dropped:
                    sample.finish = dict(ABORTED)
                elif job.leg is not None and job.leg.failure is not None:
                    sample.finish = job.leg.reason()
                else:
                    await self._advance(job, self._due(passed_on.count, interval, stream=stream))
                    if job.leg is not None and job.leg.prefill:
                        await self._hand_over(job, job.leg)
            count = len(sample.output_ids)
            due = count >= self._due(passed_on.count, interval, stream=stream)
            if sample.finish is not None or (due and not (stream and sample.holds_back())):
                record.text = sample.text()
                passed_on = JobProgress(record.text, count, sample.finish)
                yield passed_on
            if sample.finish is not None:
                return

    def _joined(self, job: EngineJob) -> WorkerSample:
        """Return the sample of a job that may run: that of a decode leg begins with what its prefill leg has sampled."""
        if job.leg is not None and job.leg.handover is not None and job.sample.request.handover is None:
            job.sample = self._new_sample(replace(job.sample.request, handover=job.leg.handover))
        return job.sample

    async def _hand_over(self, job: EngineJob, leg: Leg) -> None:
        """Hand over to the decode leg. The prefill leg ends, with the one token that it has sampled."""
        sample = job.sample
        first = (sample.output_ids[0], sample.logprobs[0]) if sample.output_ids else None
        leg.give(Handover(sample.seed, first))
        await self._pass(job, lambda: leg.done or leg.failure is not None or job.aborted or job.dropped)
        sample.finish = length(0) if leg.done else leg.reason() if leg.failure is not None else dict(ABORTED)

    def _due(self, passed_on: int, interval: int, *, stream: bool) -> int:
        """Return the number of tokens at which a reply is decoded next; a stream has its first token at once."""
        return 1 if stream and not passed_on else passed_on + interval

    async def _advance(self, job: EngineJob, due: int) -> None:
        """Sample up to `due` tokens: one by one if something waits for progress, else in a burst."""
        sample, count = job.sample, len(job.sample.output_ids)
        burst = 1 if self._token_delay or self.progress.has_waiters else max(1, min(sample.burst, due - count))
        if job.leg is not None and job.leg.prefill:
            burst = 1
        if self._hold is not None and not job.released and self._held_rank in (None, job.rank):
            burst = min(burst, self._hold - count)
        sample.advance(burst, self.weight_version)
        await asyncio.sleep(self._wait(job) if self._token_delay else 0)
        self.progress.notify()

    def _passes_front(self, job: EngineJob) -> bool:
        return job.dropped or not (self._front_closed or self._updates)

    def _wait(self, job: EngineJob) -> float:
        now = asyncio.get_running_loop().time()
        job.clock = max(job.clock, now - _CATCH_UP) + self._token_delay if job.clock else now + self._token_delay
        return max(0.0, job.clock - now)

    def _may_run(self, job: EngineJob) -> bool:
        if job.dropped:
            return True
        if job.aborted:
            return job.stage is JobStage.QUEUED or not self._scheduler_closed
        if job.leg is not None and not job.leg.ready:
            return job.leg.failure is not None
        held = self._hold is not None and len(job.sample.output_ids) >= self._hold and not job.released
        held = held and self._held_rank in (None, job.rank)
        return not (held or self._scheduler_closed)

    async def _pass(self, job: EngineJob, may: Callable[[], bool]) -> None:
        if may():
            return
        job.waiting = True
        self.progress.notify()
        await self._gates.wait_for(may)
        job.waiting = False

    def give_up(self, jobs: Iterable[EngineJob]) -> None:
        """End these jobs at once, even at a closed place."""
        for job in jobs:
            job.dropped = True
        self.changed()

    # -- control ------------------------------------------------------------------------------------------------------

    def hold(self, after: int, rank: int | None = None) -> None:
        """Stop every sample (of a rank, if one is given) that has `after` tokens; 0 keeps them queued."""
        self._hold, self._held_rank = after, rank
        self.changed()

    def release(self, count: int | None) -> None:
        """Open the gate, or let only the first `count` jobs that wait there go on."""
        if count is None:
            self._hold = None
        else:
            for job in [job for job in self.jobs.values() if job.waiting and not job.released][:count]:
                job.released = True
        self.changed()

    def abort(self, rid: str) -> None:
        """Abort a request. The front ignores an unknown id; the scheduler aborts all whose id begins with a known one."""
        if rid in self.jobs:
            self._abort(lambda name: name.startswith(rid))

    def abort_all(self) -> None:
        """Abort everything that has reached the scheduler."""
        self._abort(lambda _name: True)

    def _abort(self, matches: Callable[[str], bool]) -> None:
        for name, job in self.jobs.items():
            if matches(name) and job.stage is not JobStage.FRONT:
                job.aborted = True
        self.changed()

    async def pause(self, mode: PauseMode) -> None:
        """Close the front, and the scheduler; with mode `abort` or `wait`, instead wait until the scheduler is empty."""
        logger.info("paused: %s", mode)
        self._front_closed = True
        if mode in ("abort", "wait"):
            if mode == "abort":
                self.abort_all()
            await self.progress.wait_for(lambda: all(job.stage is JobStage.FRONT for job in self.jobs.values()))
            return
        self._scheduler_closed = True
        if mode == "retract":
            for job in self.jobs.values():
                if job.stage is JobStage.RUNNING:
                    job.stage = JobStage.QUEUED
                    if job.leg is not None and not job.leg.prefill:
                        job.leg.lose()
        self.changed()

    async def until_lost(self, leg: Leg) -> None:
        """Wait until the engine goes on with a decode leg whose cache a pause has taken back."""
        await self._gates.wait_for(lambda: leg.lost and not self._scheduler_closed)

    def resume(self) -> None:
        logger.info("continued")
        self._front_closed = self._scheduler_closed = False
        self.changed()

    async def update_weights(self, version: str | None, *, flush: bool = True) -> None:
        """Change the weights, and empty the cache if `flush` says so.

        Without a pause they wait for all jobs in flight, and later jobs wait for them: SGLang takes a writer lock, which no
        reader overtakes.
        """
        self._updates += 1
        try:
            if not self._front_closed:
                await self.progress.wait_for(lambda: all(job.held_at_front for job in self.jobs.values()))
            if version is not None:
                self.weight_version = version
            if flush:
                self._clear()
            logger.info("new weights, version %s", self.weight_version)
        finally:
            self._updates -= 1
            self.changed()

    def idle(self) -> bool:
        """Return whether the cache may be flushed: nothing runs, and jobs wait for the end of a pause only."""
        return not any(
            job.stage is JobStage.RUNNING or (job.stage is JobStage.QUEUED and not self._scheduler_closed)
            for job in self.jobs.values()
        )

    def flush(self) -> bool:
        """Empty the cache, if the engine is idle; return whether it is."""
        idle = self.idle()
        if idle:
            self._clear()
        return idle

    def drop(self) -> None:
        """End everything and forget a pause and the cache, as the death of a process does."""
        self._front_closed = self._scheduler_closed = False
        self._clear()
        self.give_up(self.jobs.values())
