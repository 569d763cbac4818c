"""The script of one reply: its tokens, its end and its faults, set beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["eos", "length", "abort"]
Fault = Literal[
    "not_json",  # HTTP 200 and no JSON
    "no_done",  # a stream that ends well, without [DONE]; a reply without its second half
    "dies",  # the connection is reset in the middle of the reply
    "no_answer",  # not a byte until the client leaves
    "http_500",
    "http_503",
    "error_event",  # in a stream: the error after the first event; otherwise HTTP 503
    "abort_503",  # an abort with a status code: HTTP 503, and in a stream an abort event
    "late_count",  # SGLang does this when it is busy: a cumulative event has more tokens than it counts
    "wrong_completion_tokens",
    "wrong_prompt_tokens",
    "wrong_text",
    "wrong_logprob_ids",
    "nan_logprob",  # the literal NaN, which Python's json reads
    "null_logprob",  # how orjson, and so SGLang, prints a NaN
    "missing_logprob",
    "missing_last_logprob",  # of a stream, only in its last event
    "no_logprobs",
]


@dataclass(frozen=True)
class ReplyScript:
    """How one reply begins and ends."""

    ids: tuple[int, ...] = ()  # sampled first
    finish: Finish | None = None  # how the reply ends after them; None goes on with tokens of the worker's source
    logprobs: tuple[float, ...] = ()  # of the first tokens, in place of the source's
    fault: Fault | None = None  # how the reply misbehaves
    extra: dict[str, Any] = field(default_factory=dict)  # further keys at the top level of the reply
    extra_meta: dict[str, Any] = field(default_factory=dict)  # further keys in its `meta_info`

    @classmethod
    def parse(cls, given: dict[str, Any], encode: Callable[[str], Sequence[int]]) -> ReplyScript:
        """Read the JSON of `sampling_params.custom_params["script"]`. `text`, in place of ids, is encoded."""
        found: dict[str, Any] = {"finish": "eos", **given}
        text = found.pop("text", None)
        ids = found.get("ids", ()) if text is None else encode(str(text))
        return cls(**{**found, "ids": tuple(ids), "logprobs": tuple(found.get("logprobs", ()))})


FREE = ReplyScript()  # decides nothing
