"""POST /generate: replies and streams, and the faults that they can have."""

from __future__ import annotations

import asyncio
from typing import Any

from router.embedded.engine.engine import Engine, EngineJob, Progress
from router.embedded.engine.faults import BUSY, GAVE_UP
from router.embedded.engine.records import GenerationRecord, Journal
from router.embedded.http.admission import admit
from router.embedded.http.errors import Refused
from router.embedded.http.exchange import DONE, EVENTS, PLAIN, HttpExchange, event
from router.embedded.http.jobs import Reset, answer_stream, answer_whole, run_to_end, until_left
from router.embedded.http.wire import Wire
from router.embedded.models.vocabulary import EngineVocabulary
from router.embedded.options import WorkerOptions


class GenerateHandler:
    """Runs the generations that a request asks for, until they end or the client leaves."""

    def __init__(
        self,
        engine: Engine,
        wire: Wire,
        journal: Journal,
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
        work = self._stream(exchange, jobs, listed) if stream else self._reply(exchange, jobs, listed)
        await until_left(exchange, self._engine, jobs, work)

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
        await answer_whole(exchange, content, fault, self._reset)

    async def _run(self, job: EngineJob) -> bytes:
        last = await run_to_end(self._engine, job)
        return self._wire.payload(job, last, self._engine.weight_version)

    async def _stream(self, exchange: HttpExchange, jobs: list[EngineJob], listed: bool) -> None:
        fault = next((job.fault for job in jobs if job.fault), None)
        if fault == "no_answer":
            await asyncio.Event().wait()
        if fault in ("http_500", "http_503"):
            await exchange.answer(int(fault[-3:]), BUSY)
            return

        def made(number: int, job: EngineJob, since: Progress, progress: Progress) -> bytes:
            index, version = number if listed else None, self._engine.weight_version
            return self._wire.payload(job, progress, version, since=since, index=index, busy=fault == "abort_503")

        await answer_stream(exchange, self._engine, jobs, fault, self._reset, made, failed=GAVE_UP)
