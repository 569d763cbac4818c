"""POST /generate: replies and streams, and the faults that they can have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.embedded.engine.engine import NOTHING, Engine, EngineJob
from router.embedded.engine.faults import BUSY, GAVE_UP
from router.embedded.engine.records import GenerationRecord, Journal
from router.embedded.http.admission import admit
from router.embedded.http.errors import Refused
from router.embedded.http.exchange import DONE, EVENTS, JSON, PLAIN, HttpExchange, event
from router.embedded.http.wire import Wire
from router.embedded.models.vocabulary import EngineVocabulary
from router.embedded.options import WorkerOptions


class GenerateHandler:
    """Runs the generations that a request asks for, until they end or the client leaves.

    `reset` is called with the address of the client whose connection is to be cut, which no application can do.
    """

    def __init__(
        self,
        engine: Engine,
        wire: Wire,
        journal: Journal,
        vocabulary: EngineVocabulary,
        options: WorkerOptions,
        reset: Callable[[tuple[Any, ...]], None],
    ) -> None:
        self._engine = engine
        self._wire = wire
        self._journal = journal
        self._vocabulary = vocabulary
        self._context_length = options.context_length
        self._reset = reset

    async def __call__(self, exchange: HttpExchange) -> None:
        body = exchange.json_object()
        stream = bool(body.get("stream"))
        try:
            jobs, listed = self._admit(exchange, body)
        except Refused as refused:
            if not stream or refused.shape != "message":
                raise
            error = {"message": refused.message, "type": "invalid_request_error", "code": 400, "retryable": False}
            await exchange.start(200, EVENTS)
            await exchange.part(event({"error": error}) + DONE, last=True)
            return
        self._engine.changed()
        work = asyncio.ensure_future(
            self._stream(exchange, jobs, listed) if stream else self._reply(exchange, jobs, listed)
        )
        gone = asyncio.ensure_future(exchange.disconnected())
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                for job in jobs:
                    job.record.disconnected = True
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            for job in jobs:
                self._engine.retire(job)

    def _admit(self, exchange: HttpExchange, body: dict[str, Any]) -> tuple[list[EngineJob], bool]:
        """Return a request's jobs, prompt-major, and whether the reply is a list."""
        engine = self._engine
        admitted = admit(body, self._vocabulary, context_length=self._context_length, in_flight=engine.jobs)
        records = [
            GenerationRecord(one.rid, body, exchange.raw, exchange.headers, number, one.input_ids, admitted.from_text)
            for number, one in enumerate(admitted.replies)
        ]
        self._journal.add_generations(records)
        jobs = [engine.start(one, record) for one, record in zip(admitted.replies, records, strict=True)]
        return jobs, admitted.listed

    async def _reply(self, exchange: HttpExchange, jobs: list[EngineJob], listed: bool) -> None:
        fault = next((job.fault for job in jobs if job.fault), None)
        match fault:
            case "no_answer":
                await asyncio.Event().wait()
            case "http_503" | "error_event" | "abort_503":
                await exchange.answer(503, BUSY)
                return
            case "http_500":
                await exchange.answer(500, b"Internal Server Error", PLAIN)
                return
        payloads = [await self._run(jobs[0])] if len(jobs) == 1 else await asyncio.gather(*map(self._run, jobs))
        content = b"[%b]" % b",".join(payloads) if listed else payloads[0]
        match fault:
            case "not_json":
                await exchange.answer(200, b"<html>this is not JSON</html>", JSON)
            case "no_done":
                await exchange.answer(200, content[: len(content) // 2])
            case "dies":
                await exchange.start(200, JSON)
                await exchange.part(content[: len(content) // 2])
                self._reset(exchange.client)
            case _:
                await exchange.answer(200, content)

    async def _run(self, job: EngineJob) -> bytes:
        last = NOTHING
        async for progress in self._engine.run(job, stream=False):
            last = progress
        self._engine.retire(job)
        return self._wire.payload(job, last, self._engine.weight_version)

    async def _stream(self, exchange: HttpExchange, jobs: list[EngineJob], listed: bool) -> None:
        fault = next((job.fault for job in jobs if job.fault), None)
        if fault == "no_answer":
            await asyncio.Event().wait()
        if fault in ("http_500", "http_503"):
            await exchange.answer(int(fault[-3:]), BUSY)
            return
        await exchange.start(200, EVENTS)
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(jobs):
                group.create_task(self._run_stream(job, number if listed else None, events, busy=fault == "abort_503"))
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
                    await exchange.part(event(GAVE_UP))
                elif fault == "dies":
                    self._reset(exchange.client)
                if fault in ("error_event", "dies", "no_done", "abort_503"):
                    self._engine.give_up(jobs)
                    break
        if fault == "no_done":
            await exchange.part(b"", last=True)
        elif fault != "dies":
            await exchange.part(DONE, last=True)

    async def _run_stream(
        self, job: EngineJob, index: int | None, events: asyncio.Queue[bytes | None], *, busy: bool
    ) -> None:
        since = NOTHING
        async for progress in self._engine.run(job, stream=True):
            if progress.finish is not None:
                self._engine.retire(job)
            events.put_nowait(
                self._wire.payload(job, progress, self._engine.weight_version, since=since, index=index, busy=busy)
            )
            since = progress
        events.put_nowait(None)
