"""Replies and stream events in the shapes of SGLang 0.5.23 (`TokenizerManager._handle_batch_output`), and their faults."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from worker.engine.engine import EngineJob, JobProgress
from worker.engine.script import Fault
from worker.engine.source import Scored
from worker.options import StreamStyle, WorkerOptions
from worker.vocabulary import EngineVocabulary

_LATENCY = 0.01  # seconds, of every reply


class Wire:
    """Makes JSON of jobs. Stream style and version spans may change while it is used."""

    def __init__(self, vocabulary: EngineVocabulary, options: WorkerOptions) -> None:
        self.stream_style: StreamStyle = options.stream_style
        self.version_spans = options.version_spans
        self._ranks = options.dp_size
        self._vocabulary = vocabulary

    def payload(
        self,
        job: EngineJob,
        now: JobProgress,
        current: str,
        *,
        since: JobProgress | None = None,
        index: int | None = None,
        busy: bool = False,
    ) -> bytes:
        """Return a reply, or an event of a stream.

        Args:
            job: the sample.
            now: how far it has been decoded.
            current: the current weight version.
            since: of a stream, the progress at the previous event; `engine.NOTHING` for the first. None for a reply.
            index: the reply's place in a streamed batch.
            busy: replace the finish reason by an abort with a status code.
        """
        sample, count, style = job.sample, now.count, self.stream_style
        ids_from = rest_from = text_from = 0
        if since is not None and now.dequeued:
            # The event that ends an incremental stream here repeats the last id, and all the rest.
            ids_from = max(0, count - 1) if style == "incremental" else 0
        elif since is not None:
            ids_from = 0 if style == "cumulative" else since.count
            rest_from, text_from = (since.count, len(since.text)) if style == "incremental" else (0, 0)
        logprobs = self._logprobs(job, rest_from, count) if sample.request.returns.logprobs else {}
        meta: dict[str, Any] = {"id": job.record.rid, "finish_reason": now.finish}
        if now.dequeued:
            meta |= {"weight_version": current, "e2e_latency": _LATENCY}
            self._add_versions(meta, job, current, count)
            meta |= {**logprobs, "completion_tokens": count}
        else:
            meta |= {
                "prompt_tokens": len(sample.request.input_ids),
                "weight_version": current,
                "num_retractions": 0,
                **logprobs,
                "reasoning_tokens": 0,
                "completion_tokens": count,
                "cached_tokens": job.cached,
            }
            if now.finish is not None:
                self._add_versions(meta, job, current, count)
            meta["cached_tokens_details"] = None
            if sample.request.images:
                meta["image_tokens"] = sum(image.length for image in sample.request.images)
            meta["dp_rank"] = job.rank if self._ranks > 1 else None
            if now.finish is not None:
                meta["e2e_latency"] = _LATENCY
        if since is None or since.count == 0:
            meta["response_sent_to_client_ts"] = time.time()  # once per reply: of a stream, in its first event
        payload: dict[str, Any] = {
            "text": now.text[text_from:],
            "output_ids": sample.output_ids[ids_from:count],
            "meta_info": meta,
        }
        if sample.request.returns.prompt_ids:
            payload["prompt_token_ids"] = sample.request.input_ids
        if index is not None:
            payload["index"] = index
        payload.update(sample.request.script.extra)
        meta.update(sample.request.script.extra_meta)
        if busy:
            meta["finish_reason"] = BUSY_REASON
        if job.fault is not None:
            spoil(payload, job.fault)
        if job.fault == "nan_logprob":
            return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()  # msgspec writes null
        return msgspec.json.encode(payload)

    def _add_versions(self, meta: dict[str, Any], job: EngineJob, current: str, count: int) -> None:
        if self.version_spans:
            meta["weight_versions"] = job.sample.versions.spans(current, count)
            meta["weight_version"] = meta["weight_versions"][-1]["version"]

    def _logprobs(self, job: EngineJob, start: int, end: int) -> dict[str, Any]:
        """Return the logprobs of the whole prompt and of a part of the reply."""
        sample, returns, details = job.sample, job.sample.request.returns, job.sample.details
        # SGLang's decode workers have none of the prompt, which the prefill workers compute.
        decodes = job.leg is not None and not job.leg.prefill
        outputs: list[Any] = sample.entries(start, end)
        found: dict[str, Any] = {
            "input_token_logprobs": [] if decodes else self._entries(details.prompt, texts=returns.texts),
            "output_token_logprobs": outputs
            if not returns.texts
            else [(logprob, token, self._text(token)) for logprob, token, _ in outputs],
            "output_token_logprobs_length": end,
        }
        for key, asked_for, inputs, output in (
            ("top_logprobs", returns.top, details.prompt_top, details.output_top),
            ("token_ids_logprobs", returns.chosen, details.prompt_chosen, details.output_chosen),
        ):
            if asked_for:
                prompt = [] if decodes else [one and self._entries(one, texts=returns.texts) for one in inputs]
                found[f"input_{key}"] = prompt
                found[f"output_{key}"] = [self._entries(one, texts=returns.texts) for one in output[start:end]]
        return found

    def _entries(self, scored: Sequence[Scored], *, texts: bool) -> list[tuple[float | None, int, str | None]]:
        return [(logprob, token, self._text(token) if texts else None) for logprob, token in scored]

    def _text(self, token: int) -> str:
        return self._vocabulary.decode([token], skip_special_tokens=False)


BUSY: dict[str, Any] = {
    "object": "error",
    "message": "The request queue is full.",
    "type": "503",
    "param": None,
    "code": 503,
}


def failed(why: str) -> dict[str, Any]:
    """Return the body of a 500 with this reason."""
    return {"object": "error", "message": why, "type": "500", "param": None, "code": 500}


BUSY_REASON: dict[str, Any] = {
    "type": "abort",
    "message": "The request queue is full.",
    "status_code": 503,
    "err_type": None,
}
GAVE_UP: dict[str, Any] = {
    "error": {"message": "the engine gave up", "type": "internal_error", "code": 500, "retryable": False}
}


def spoil(payload: dict[str, Any], fault: Fault) -> None:
    """Make a reply or an event wrong. Its lists are changed in place, so nothing else may hold them."""
    meta = payload["meta_info"]
    logprobs = meta.get("output_token_logprobs")
    match fault:
        case "late_count" if meta["finish_reason"] is None:
            meta["completion_tokens"] = (meta["completion_tokens"] + 1) // 2
        case "wrong_completion_tokens":
            meta["completion_tokens"] += 1
        case "wrong_prompt_tokens":
            meta["prompt_tokens"] = meta.get("prompt_tokens", 0) + 1
        case "wrong_text":
            payload["text"] = "What these ids do not say. " + payload["text"]
        case "wrong_logprob_ids" if logprobs:
            logprobs[-1] = (logprobs[-1][0], logprobs[-1][1] ^ 1, logprobs[-1][2])
        case "nan_logprob" if logprobs:
            logprobs[-1] = (float("nan"), *logprobs[-1][1:])
        case "null_logprob" if logprobs:
            logprobs[-1] = (None, *logprobs[-1][1:])
        case "missing_last_logprob" if logprobs and meta["finish_reason"] is not None:
            logprobs.pop()
        case "missing_logprob" if logprobs:
            logprobs.pop()
            meta["output_token_logprobs_length"] = len(logprobs)
        case "no_logprobs":
            for key in [key for key in meta if "logprobs" in key]:
                del meta[key]
