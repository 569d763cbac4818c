"""Requests that SGLang 0.5.23 does not refuse, and dies of or answers with a 500: each of them was tried.

Here they are refused. What it refuses by itself is left to it, and to its words. What takes the vocabulary to tell is not here.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from router.engines.sglang import patterns
from router.engines.sglang.json import typed
from router.errors import BadRequestError

_LIST = re.compile(rb"\s*\[")
_NESTED = re.compile(rb"\s*\[\s*\[")
_EMPTY = re.compile(rb"\s*\[\s*(\[\s*)?\]")
_LARGEST = 2**31 - 1
_LONGEST_PATTERN, _MOST_PATTERNS = 256, 32
"""More, or longer ones (in bytes), are refused by the worker."""

_ONE_EACH = frozenset(
    {
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "lora_path",
        "custom_logit_processor",
        "video_data",
        "audio_data",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
    }
)
"""Fields of a batch that may be a list, with one entry for each prompt."""


class Asked(msgspec.Struct, frozen=True):
    """What is known of a body of `/generate`.

    Attributes:
        fields: its top level.
        sampling: its `sampling_params`, one entry or as many as there are in a list.
        prompts: how many there are; None if they are embeddings.
        batch: whether they came as a list.
        logprobs: whether any are asked for.
    """

    fields: dict[str, Raw]
    sampling: list[dict[str, Raw]]
    prompts: int | None
    batch: bool
    logprobs: bool


def check(asked: Asked) -> None:
    """Raises BadRequestError."""
    fields = asked.fields
    if asked.prompts is None:
        if _EMPTY.match(fields["input_embeds"]):
            raise BadRequestError("`input_embeds` is empty: give the embedding of at least one token")
    elif asked.batch:
        _check_batch(fields, len(asked.sampling), asked.prompts)
    else:
        _check_single(fields, len(asked.sampling), logprobs=asked.logprobs)
    if "logprob_start_len" in fields and any(value < -1 for value in integers(fields, "logprob_start_len")):
        raise BadRequestError("`logprob_start_len` must be at least -1: anything lower ends the worker's process")
    for one in asked.sampling:
        if "top_k" in one and any(value > _LARGEST for value in integers(one, "top_k")):
            raise BadRequestError(f"`top_k` must be at most {_LARGEST}: anything higher ends the worker's process")
        if "stop_regex" in one:
            _check_patterns(one)


def integers(fields: dict[str, Raw], key: str) -> list[int]:
    """The integers of a field that is one, or a list of them; other types are for the worker to refuse."""
    return [one for one in _values(fields, key) if isinstance(one, int)]


def held_back(sampling: list[dict[str, Raw]]) -> list[int]:
    """The `stop_token_ids` that must not be sampled for the first `min_new_tokens`: ids that there are not end the worker."""
    waiting = [one for one in sampling if "stop_token_ids" in one and any(integers(one, "min_new_tokens"))]
    return [token for one in waiting for token in integers(one, "stop_token_ids")]


def _values(fields: dict[str, Raw], key: str) -> list[Any]:
    value = typed(fields, key, Any, "JSON")
    return value if isinstance(value, list) else [value]


def _check_batch(fields: dict[str, Raw], params: int, prompts: int) -> None:
    if _is_list(fields, "sampling_params") and params < prompts:
        raise BadRequestError(
            f"`sampling_params` is a list of {params}: give a list of {prompts}, or one object for all"
        )
    for key in fields.keys() & _ONE_EACH:
        # Of ids there is a list for each prompt, or one list for all.
        if not (_NESTED.match(fields[key]) if key == "token_ids_logprob" else _is_list(fields, key)):
            continue
        entries = len(typed(fields, key, list[Raw], "a list"))
        if entries < prompts:
            raise BadRequestError(
                f"`{key}` is a list of {entries}: give one for each of {prompts} prompts, or one for all"
            )


def _check_single(fields: dict[str, Raw], params: int, *, logprobs: bool) -> None:
    if _is_list(fields, "sampling_params"):
        raise BadRequestError(f"`sampling_params` is a list of {params}: give one object, for there is one prompt")
    if _is_list(fields, "rid"):
        raise BadRequestError("`rid` is a list: give one string, for there is one prompt")
    for key in ("logprob_start_len", "top_logprobs_num") if logprobs else ():
        if _is_list(fields, key):
            raise BadRequestError(f"`{key}` is a list, and there is one prompt: that ends the worker's process")


def _check_patterns(sampling: dict[str, Raw]) -> None:
    for pattern in _values(sampling, "stop_regex")[:_MOST_PATTERNS]:
        if isinstance(pattern, str) and len(pattern) <= _LONGEST_PATTERN:
            wrong = patterns.fault(pattern)
            if wrong is not None:
                raise BadRequestError(f"`stop_regex` {pattern!r} is no regular expression: {wrong}")


def _is_list(fields: dict[str, Raw], key: str) -> bool:
    return key in fields and _LIST.match(fields[key]) is not None
