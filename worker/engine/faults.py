"""The faults that a test can inject into a worker."""

from __future__ import annotations

from typing import Any

from worker.engine.script import Fault

BUSY: dict[str, Any] = {
    "object": "error",
    "message": "The request queue is full.",
    "type": "503",
    "param": None,
    "code": 503,
}
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
