"""POST /generate: replies and streams for as long as their client is there, and the faults that they can have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from worker.engine.engine import NOTHING, EmbeddedEngine, EngineJob, JobProgress
from worker.engine.records import GenerationRecord, WorkerLog
from worker.engine.sample import ReplyRequest
from worker.engine.script import Fault
from worker.engine.transfer import Handover, Leg
from worker.http.admission import admit
from worker.http.exchange import DONE, EVENTS, JSON, PLAIN, HttpExchange, Refused, event
from worker.http.peer import PeerError, ask
from worker.http.rooms import ROOMS
from worker.http.wire import BUSY, GAVE_UP, Wire, failed
from worker.options import WorkerOptions
from worker.vocabulary import EngineVocabulary

W = TypeVar("W")

Reset = Callable[[tuple[Any, ...]], None]
"""Cuts the connection of the client at an address, which no application can do."""
Made = Callable[[int, EngineJob, JobProgress, JobProgress], Any]
"""Returns the payload of an event, for a sample by its number, from one progress to the next; None for no event."""


class Generating(Generic[W]):
    """Runs the generations that a request asks for, whatever their JSON is, and answers with the faults they can have.

    `wire` writes the JSON.
    """

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
        self._bootstrap_timeout = options.bootstrap_timeout
        self._reset = reset

    def _start(
        self, exchange: HttpExchange, body: dict[str, Any], replies: Sequence[ReplyRequest], from_text: bool
    ) -> tuple[list[EngineJob], Fault | None]:
        """Put the replies of a request in flight, each with its record; return them, and the first fault among them."""
        records = [
            GenerationRecord(
                *(one.rid, body, exchange.raw, exchange.headers, number, one.input_ids, from_text),
                images=tuple(image.digest for image in one.images),
            )
            for number, one in enumerate(replies)
        ]
        self._journal.add_generations(records)
        jobs = [self._engine.start(one, record) for one, record in zip(replies, records, strict=True)]
        self._engine.changed()
        return jobs, next((job.fault for job in jobs if job.fault), None)

    async def _until_left(self, exchange: HttpExchange, jobs: list[EngineJob], work: Coroutine[Any, Any, None]) -> None:
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
                self._engine.retire(job)

    async def _run_to_end(self, job: EngineJob) -> JobProgress:
        """Sample until a reply is complete; return all of it."""
        last = NOTHING
        async for progress in self._engine.run(job, stream=False):
            last = progress
        self._engine.retire(job)
        return last

    async def _answer_whole(self, exchange: HttpExchange, content: bytes, fault: Fault | None) -> None:
        """Answer with a reply in one piece; some faults cut it, or put something else in its place."""
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

    async def _answer_stream(
        self,
        exchange: HttpExchange,
        jobs: Sequence[EngineJob],
        fault: Fault | None,
        made: Made,
        *,
        failed: Any,
        last: Callable[[], bytes] = bytes,
    ) -> None:
        """Answer with a stream; some faults end it early.

        `failed`: the payload that says that the engine gave up. `last`: returns the bytes before the stream's end.
        """
        await exchange.start(200, EVENTS)
        events: asyncio.Queue[Any] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(jobs):
                group.create_task(self._run_stream(job, number, made, events))
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
                    self._reset(exchange.client)
                if fault in ("error_event", "dies", "no_done", "abort_503"):
                    self._engine.give_up(jobs)
                    break
        if fault == "no_done":
            await exchange.part(b"", last=True)
        elif fault != "dies":
            await exchange.part(last() + DONE, last=True)

    async def _run_stream(self, job: EngineJob, number: int, made: Made, events: asyncio.Queue[Any]) -> None:
        since = NOTHING
        async for progress in self._engine.run(job, stream=True):
            if progress.finish is not None:
                self._engine.retire(job)
            payload = made(number, job, since, progress)
            if payload is not None:
                events.put_nowait(payload)
                since = progress
        events.put_nowait(None)


def prefill_again(job: EngineJob) -> dict[str, Any]:
    """Return the request by which a decode worker has its prefill worker compute a cache again. It has no images."""
    request, body, place = job.sample.request, job.record.body, job.sample.request.bootstrap
    assert place is not None

    def own(name: str) -> Any:
        value = body.get(name)
        return value[job.record.index] if isinstance(value, list) else value

    return {
        "input_ids": [*request.input_ids, *job.sample.output_ids[:-1]],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": False,
        "stream": False,
        "rid": request.rid,
        "bootstrap_host": place.host,
        "bootstrap_port": place.port,
        "bootstrap_room": place.room,
        "extra_key": own("extra_key"),
        "cache_salt": own("cache_salt"),
        "routed_dp_rank": place.prefill_rank,
        "disagg_prefill_dp_rank": place.prefill_rank,
    }


class GenerateHandler(Generating[Wire]):
    """SGLang's `/generate`."""

    async def __call__(self, exchange: HttpExchange) -> None:
        body = exchange.json_object()
        stream = bool(body.get("stream"))
        try:
            admitted = admit(
                body,
                self._vocabulary,
                context_length=self._context_length,
                in_flight=self._engine.jobs,
                role=self._engine.role,
                ranks=self._engine.ranks,
            )
        except Refused as refused:
            if not stream or refused.shape != "message":
                raise
            error = {"message": refused.message, "type": "invalid_request_error", "code": 400, "retryable": False}
            await exchange.start(200, EVENTS)
            await exchange.part(event({"error": error}) + DONE, last=True)
            return
        jobs, fault = self._start(exchange, body, admitted.replies, admitted.from_text)
        answer = self._stream if stream else self._reply
        meeting = [asyncio.create_task(self._meet(job, job.leg)) for job in jobs if job.leg is not None]
        try:
            await self._until_left(exchange, jobs, answer(exchange, jobs, admitted.listed, fault))
        finally:
            for task in meeting:
                task.cancel()

    async def _meet(self, job: EngineJob, leg: Leg) -> None:
        """Wait for the other leg. A decode leg asks for its room and gets what the prefill leg hands over."""
        seconds, bootstrap = self._bootstrap_timeout, job.sample.request.bootstrap
        assert bootstrap is not None
        if leg.prefill:
            await asyncio.sleep(seconds)
            if not leg.ready:
                leg.fail(f"no decode worker has asked for bootstrap room {leg.room} within {seconds:g} s")
            return
        asked = {"room": leg.room, "rank": bootstrap.prefill_rank}
        try:
            given = await ask(bootstrap.host, bootstrap.port, ROOMS, asked, seconds)
            leg.give(Handover.parse(given))
            leg.taken()
        except PeerError as error:
            leg.fail(f"Decode handshake failed for bootstrap room {leg.room}: {error}")
            return
        while leg.failure is None:
            await self._engine.until_lost(leg)
            leg.lost = False
            body = prefill_again(job)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(ask(bootstrap.host, bootstrap.port, "/generate", body, seconds))
                    group.create_task(ask(bootstrap.host, bootstrap.port, ROOMS, asked, seconds))
            except* PeerError as errors:
                leg.fail(f"Decode transfer failed for bootstrap room {leg.room}: {errors.exceptions[0]}")
            else:
                leg.begin()
                leg.taken()

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
        ends = [job.record.finish_reason or {} for job in jobs if job.leg is not None]
        if (end := next((end for end in ends if end.get("status_code")), None)) is not None:
            await exchange.answer(end["status_code"], failed(end["message"]))
            return
        content = b"[%b]" % b",".join(payloads) if listed else payloads[0]
        await self._answer_whole(exchange, content, fault)

    async def _run(self, job: EngineJob) -> bytes:
        last = await self._run_to_end(job)
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

        await self._answer_stream(exchange, jobs, fault, made, failed=GAVE_UP)
