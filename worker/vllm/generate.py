"""POST /v1/completions and /inference/v1/generate: replies and streams, and the faults that they can have."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec

from worker.engine.engine import EngineJob, JobProgress
from worker.engine.script import Fault
from worker.http.exchange import HttpExchange, OutOfRange, event
from worker.http.generate import Generating
from worker.http.peer import PeerError
from worker.vllm.content_parts import ImageMemory
from worker.vllm.kept_caches import KeptCaches
from worker.vllm.rejected import Rejected
from worker.vllm.request import VllmRequest, read_request
from worker.vllm.wire import VllmWire

_FULL = {"error": {"message": "The engine is full.", "type": "ServiceUnavailableError", "param": None, "code": 503}}
_FAILED = {"error": {"message": "the engine gave up", "type": "InternalServerError", "param": None, "code": 500}}


class VllmGenerateHandler(Generating[VllmWire]):
    """vLLM's two paths that generate."""

    def __init__(self, *arguments: Any, memory: ImageMemory, kept: KeptCaches) -> None:
        super().__init__(*arguments)
        self._memory = memory
        self._kept = kept

    async def __call__(self, exchange: HttpExchange) -> None:
        name = exchange.headers.get("x-request-id")
        try:
            request = read_request(
                exchange.path, exchange.raw, name, self._vocabulary, self._context_length, self._memory
            )
            rank = _rank(exchange.headers.get("x-data-parallel-rank"), self._engine.ranks)
            request = replace(request, replies=[replace(one, rank=rank) for one in request.replies])
        except OutOfRange as outside:
            self._journal.add_out_of_range(str(outside))
            await exchange.answer(400, Rejected(str(outside)).error)
            return
        except Rejected as rejected:
            await exchange.answer(rejected.status, rejected.error)
            return
        try:
            await self._kept.read(request.transfer)
        except PeerError as error:
            message = f"the cache of the prompt could not be loaded: {error}"
            await exchange.answer(500, Rejected(message, status=500).error)
            return
        jobs, fault = self._start(exchange, msgspec.json.decode(exchange.raw), request.replies, request.from_text)
        answer = self._stream if request.stream else self._reply
        await self._until_left(exchange, jobs, answer(exchange, request, jobs, fault))

    async def _reply(
        self, exchange: HttpExchange, request: VllmRequest, jobs: list[EngineJob], fault: Fault | None
    ) -> None:
        if await self._failed(exchange, fault, stream=False):
            return
        ends = await asyncio.gather(*[self._run_to_end(job) for job in jobs])
        over = all(end.finish is not None and end.finish["type"] != "abort" for end in ends)
        kept = self._kept.keep(request.name, request.transfer, exchange) if over else None
        whole = self._wire.whole(request, jobs, ends, kept)
        _spoil(whole, fault)
        content = msgspec.json.encode(whole)
        await self._answer_whole(exchange, content, fault)

    async def _failed(self, exchange: HttpExchange, fault: Fault | None, *, stream: bool) -> bool:
        """Answer with an error, if the fault is one."""
        if fault == "no_answer":
            await asyncio.Event().wait()
        if fault in ("http_503", "abort_503"):
            await exchange.answer(503, _FULL)
        elif fault == "http_500" or (fault == "error_event" and not stream):
            await exchange.answer(500, _FAILED)
        else:
            return False
        return True

    async def _stream(
        self, exchange: HttpExchange, request: VllmRequest, jobs: list[EngineJob], fault: Fault | None
    ) -> None:
        if await self._failed(exchange, fault, stream=True):
            return

        def made(number: int, job: EngineJob, since: JobProgress, progress: JobProgress) -> dict[str, Any] | None:
            payload = self._wire.event(request, job, number, since, progress)
            if payload is not None:
                _spoil(payload, fault)
            return payload

        def usage() -> bytes:
            return event(self._wire.usage(request, jobs)) if request.usage and fault is None else b""

        await self._answer_stream(exchange, jobs, fault, made, failed=_FAILED, last=usage)


def _rank(asked: str | None, ranks: int) -> int | None:
    """Return the data-parallel rank that a header names; None if it is no number, as vLLM has it."""
    try:
        rank = None if asked is None else int(asked)
    except ValueError:
        return None
    if rank is not None and not 0 <= rank < ranks:
        raise Rejected(f"data_parallel_rank {rank} is out of range [0, {ranks}).")
    return rank


def _spoil(payload: dict[str, Any], fault: Fault | None) -> None:
    """Make a reply or an event wrong."""
    usage = payload.get("usage")
    for choice in payload["choices"]:
        logprobs = choice["logprobs"]
        listed = [] if logprobs is None else logprobs.get("content", logprobs.get("token_logprobs"))
        match fault:
            case "wrong_completion_tokens" if usage:
                usage["completion_tokens"] += 1
            case "wrong_prompt_tokens" if usage:
                usage["prompt_tokens"] += 1
            case "wrong_text" if "text" in choice:
                choice["text"] = "What these ids do not say. " + choice["text"]
            case "wrong_logprob_ids" if choice["token_ids"]:
                choice["token_ids"] = [*choice["token_ids"][:-1], choice["token_ids"][-1] ^ 1]
            case "missing_logprob" if listed:
                listed.pop()
            case "null_logprob" | "nan_logprob" if listed:
                if isinstance(listed[-1], dict):
                    listed[-1]["logprob"] = None
                else:
                    listed[-1] = None
            case "no_logprobs":
                choice["logprobs"] = None
