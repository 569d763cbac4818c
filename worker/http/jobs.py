"""The samples of a request, for as long as its client is there, and its reply with the faults that it can have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from worker.engine.engine import NOTHING, EmbeddedEngine, EngineJob, JobProgress
from worker.engine.records import GenerationRecord, WorkerLog
from worker.engine.sample import ReplyRequest
from worker.engine.script import Fault
from worker.http.exchange import DONE, EVENTS, JSON, HttpExchange, event
from worker.models.vocabulary import EngineVocabulary
from worker.options import WorkerOptions

W = TypeVar("W")

Reset = Callable[[tuple[Any, ...]], None]
"""Cuts the connection of the client at an address, which no application can do."""
Made = Callable[[int, EngineJob, JobProgress, JobProgress], Any]
"""Returns the payload of an event, for a sample by its number, from one progress to the next; None for no event."""


class Generating(Generic[W]):
    """What runs the generations that a request asks for, whatever their JSON is. `wire` writes this."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        wire: W,
        journal: WorkerLog,
        vocabulary: EngineVocabulary,
        options: WorkerOptions,
        reset: Reset,
    ) -> None:
        self._engine = engine
        self._wire = wire
        self._journal = journal
        self._vocabulary = vocabulary
        self._context_length = options.context_length
        self._reset = reset

    def _start(
        self, exchange: HttpExchange, body: dict[str, Any], replies: Sequence[ReplyRequest], from_text: bool
    ) -> tuple[list[EngineJob], Fault | None]:
        """Put the replies of a request in flight, each with its record; return them, and the first fault among them."""
        records = [
            GenerationRecord(one.rid, body, exchange.raw, exchange.headers, number, one.input_ids, from_text)
            for number, one in enumerate(replies)
        ]
        self._journal.add_generations(records)
        jobs = [self._engine.start(one, record) for one, record in zip(replies, records, strict=True)]
        self._engine.changed()
        return jobs, next((job.fault for job in jobs if job.fault), None)


async def until_left(
    exchange: HttpExchange, engine: EmbeddedEngine, jobs: list[EngineJob], work: Coroutine[Any, Any, None]
) -> None:
    """Answer a request with `work`, unless its client leaves before; its jobs are out of flight then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(exchange.disconnected())
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        else:
            for job in jobs:
                job.record.disconnected = True
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
        for job in jobs:
            engine.retire(job)


async def run_to_end(engine: EmbeddedEngine, job: EngineJob) -> JobProgress:
    """Sample until a reply is complete; return all of it."""
    last = NOTHING
    async for progress in engine.run(job, stream=False):
        last = progress
    engine.retire(job)
    return last


async def answer_whole(exchange: HttpExchange, content: bytes, fault: Fault | None, reset: Reset) -> None:
    """Answer with a reply in one piece; some faults cut it, or put something else in its place."""
    match fault:
        case "not_json":
            await exchange.answer(200, b"<html>this is not JSON</html>", JSON)
        case "no_done":
            await exchange.answer(200, content[: len(content) // 2])
        case "dies":
            await exchange.start(200, JSON)
            await exchange.part(content[: len(content) // 2])
            reset(exchange.client)
        case _:
            await exchange.answer(200, content)


async def answer_stream(
    exchange: HttpExchange,
    engine: EmbeddedEngine,
    jobs: Sequence[EngineJob],
    fault: Fault | None,
    reset: Reset,
    made: Made,
    *,
    failed: Any,
    last: Callable[[], bytes] = bytes,
) -> None:
    """Answer with a stream; some faults end it early.

    `failed`: the payload that says that the engine gave up. `last`: returns what stands before the stream's end.
    """
    await exchange.start(200, EVENTS)
    events: asyncio.Queue[Any] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        for number, job in enumerate(jobs):
            group.create_task(_run_stream(engine, job, number, made, events))
        going = len(jobs)
        while going:
            payload = await events.get()
            if payload is None:
                going -= 1
                continue
            await exchange.part(event(payload))
            if fault == "not_json":
                await exchange.part(b"data: {this is not JSON\n\n")
            elif fault == "error_event":
                await exchange.part(event(failed))
            elif fault == "dies":
                reset(exchange.client)
            if fault in ("error_event", "dies", "no_done", "abort_503"):
                engine.give_up(jobs)
                break
    if fault == "no_done":
        await exchange.part(b"", last=True)
    elif fault != "dies":
        await exchange.part(last() + DONE, last=True)


async def _run_stream(
    engine: EmbeddedEngine, job: EngineJob, number: int, made: Made, events: asyncio.Queue[Any]
) -> None:
    since = NOTHING
    async for progress in engine.run(job, stream=True):
        if progress.finish is not None:
            engine.retire(job)
        payload = made(number, job, since, progress)
        if payload is not None:
            events.put_nowait(payload)
            since = progress
    events.put_nowait(None)
