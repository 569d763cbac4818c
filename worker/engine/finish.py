"""Why a reply ended: `meta_info.finish_reason`, as SGLang reports it."""

from __future__ import annotations

from typing import Any

FinishReason = dict[str, Any]

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
DEQUEUED: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


def stop(matched: int | str) -> FinishReason:
    return {"type": "stop", "matched": matched}


def length(count: int) -> FinishReason:
    return {"type": "length", "length": count}
