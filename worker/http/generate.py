"""POST /generate: replies and streams, and the faults that they can have."""

from __future__ import annotations

import asyncio

from worker.engine.engine import EngineJob, JobProgress
from worker.engine.script import Fault
from worker.http.admission import admit
from worker.http.exchange import DONE, EVENTS, PLAIN, HttpExchange, Refused, event
from worker.http.jobs import Generating, answer_stream, answer_whole, run_to_end, until_left
from worker.http.wire import BUSY, GAVE_UP, Wire


class GenerateHandler(Generating[Wire]):
    """Runs the generations that a request asks for, until they end or the client leaves."""

    async def __call__(self, exchange: HttpExchange) -> None:
        body = exchange.json_object()
        stream = bool(body.get("stream"))
        try:
            admitted = admit(body, self._vocabulary, context_length=self._context_length, in_flight=self._engine.jobs)
        except Refused as refused:
            if not stream or refused.shape != "message":
                raise
            error = {"message": refused.message, "type": "invalid_request_error", "code": 400, "retryable": False}
            await exchange.start(200, EVENTS)
            await exchange.part(event({"error": error}) + DONE, last=True)
            return
        jobs, fault = self._start(exchange, body, admitted.replies, admitted.from_text)
        answer = self._stream if stream else self._reply
        await until_left(exchange, self._engine, jobs, answer(exchange, jobs, admitted.listed, fault))

    async def _reply(self, exchange: HttpExchange, jobs: list[EngineJob], listed: bool, fault: Fault | None) -> None:
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

    async def _stream(self, exchange: HttpExchange, jobs: list[EngineJob], listed: bool, fault: Fault | None) -> None:
        if fault == "no_answer":
            await asyncio.Event().wait()
        if fault in ("http_500", "http_503"):
            await exchange.answer(int(fault[-3:]), BUSY)
            return

        def made(number: int, job: EngineJob, since: JobProgress, progress: JobProgress) -> bytes:
            index, version = number if listed else None, self._engine.weight_version
            return self._wire.payload(job, progress, version, since=since, index=index, busy=fault == "abort_503")

        await answer_stream(exchange, self._engine, jobs, fault, self._reset, made, failed=GAVE_UP)
