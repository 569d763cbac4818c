"""What must hold of every answer, whatever was asked."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.fuzz.case import Case
from tests.fuzz.exchange import Answer
from tests.support.openapi import DescribedRoutes

DOCUMENTED = frozenset({502, 503, 504, 508})
"""5xx that the router may answer with; which of them a good worker leaves no reason for is looked at, too."""


NAMED = ("context_length_exceeded", "unsupported_content", "multimodal_unsupported")
"""Codes that are words: clients' libraries look for them."""


def complaint(case: Case, answer: Answer, *, good_workers: bool, of_vllm: bool = False) -> str | None:
    """What is wrong with an answer; None if nothing is.

    `of_vllm`: vLLM workers lack some calls that go to all workers, or fail them, and the answer has their status.
    """
    if answer.faults:
        return "; ".join(answer.faults)
    if isinstance(answer.error, TimeoutError):
        return f"no answer within {answer.seconds:.0f} s"
    if case.leaves:
        return None
    if answer.error is not None:
        return None if not good_workers and answer.status is not None else f"it broke off: {answer.error!r}"
    if answer.status is None or not answer.whole:
        return "no answer, or no end of it"
    if b"internal error" in answer.headers.get(b"x-radix-recorded", b""):
        return f"an error was hidden: {answer.headers[b'x-radix-recorded']!r}"
    if of_vllm and answer.status in (500, 501) and _of_all_workers(_decoded(answer)):
        return None
    if of_vllm and answer.status == 501 and b"x-router-worker" in answer.headers:
        return None  # a call that only SGLang has, at a path that is not quite its own
    if answer.status >= 500 and (answer.status not in DOCUMENTED or (good_workers and answer.status == 502)):
        whose = "a worker's" if b"x-router-worker" in answer.headers else "the router's own"
        return f"{answer.status}, {whose}: {bytes(answer.body[:500])!r}"
    if answer.status >= 400 and b"x-router-worker" not in answer.headers and case.method != "HEAD":
        return _shape(answer)
    return None


def undescribed(case: Case, answer: Answer, routes: DescribedRoutes) -> str | None:
    """What is wrong with the status of an answer, by the description of the routes; None if nothing is."""
    if case.leaves or answer.status is None:
        return None
    workers = b"x-router-worker" in answer.headers or _of_all_workers(_decoded(answer))
    return routes.complaint(case.method, case.scope()["path"], answer.status, workers=workers)


def _shape(answer: Answer) -> str | None:
    """An error of the router's own, or the answers of all workers together."""
    body = _decoded(answer)
    if _of_all_workers(body):
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and body.get("type") == "error" and {"type", "message"} <= error.keys():
        return None  # as Anthropic's clients want it
    if not isinstance(error, dict) or error.get("code") not in (answer.status, *NAMED):
        return f"{answer.status} of another shape: {bytes(answer.body[:300])!r}"
    kind = "status" if "details" in error else "type"  # the first is Google's
    if not error.get("message") or not isinstance(error.get(kind), str):
        return f"an error without words: {error!r}"
    return None


def _decoded(answer: Answer) -> Any:
    """The JSON of an answer; None if it has none."""
    try:
        return msgspec.json.decode(bytes(answer.body))
    except (ValueError, RecursionError):
        return None


def _of_all_workers(body: Any) -> bool:
    """Whether an answer has those of all workers in it: its status is theirs."""
    return isinstance(body, dict) and {"success", "message", "workers"} <= body.keys()
