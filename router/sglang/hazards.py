"""Requests that SGLang 0.5.23 does not refuse, and dies of or answers with a 500: each of them was tried.

Here they are refused. What it refuses by itself is left to it, and to its words. What takes the vocabulary to tell is not here.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Raw

from router.errors import BadRequestError
from router.sglang import patterns
from router.sglang.json import typed

_LIST = re.compile(rb"\s*\[")
_NESTED = re.compile(rb"\s*\[\s*\[")
_LARGEST = 2**31 - 1
_LONGEST_PATTERN, _MOST_PATTERNS = 256, 32
"""More, or longer ones (in bytes), are refused by the worker."""

_DEADLY_FOR_ONE = frozenset({"logprob_start_len", "top_logprobs_num"})
_ONE_EACH = _DEADLY_FOR_ONE | {
    "return_logprob",
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
"""Fields that may be a list, with one entry for each prompt of a batch."""


def check(fields: dict[str, Raw], sampling: list[dict[str, Raw]], prompts: int | None, *, batch: bool) -> None:
    """Look at a body of `/generate`. Raises BadRequestError.

    Args:
        fields: its top level.
        sampling: its `sampling_params`, one entry or as many as there are in a list.
        prompts: how many there are; None if nobody here can tell.
        batch: whether they came as a list.
    """
    if prompts is not None:
        _check_sampling(fields, len(sampling), prompts, batch=batch)
        for key in fields.keys() & _ONE_EACH:
            _check_list(fields, key, prompts, batch=batch)
    if any(value < -1 for value in integers(fields, "logprob_start_len")):
        raise BadRequestError("`logprob_start_len` must be at least -1: anything lower ends the worker's process")
    for one in sampling:
        if any(value > _LARGEST for value in integers(one, "top_k")):
            raise BadRequestError(f"`top_k` must be at most {_LARGEST}: anything higher ends the worker's process")
        if "stop_regex" in one:
            _check_patterns(one)


def integers(fields: dict[str, Raw], key: str) -> list[int]:
    """The integers of a field that is one, or a list of them; other types are for the worker to refuse."""
    return [one for one in _values(fields, key) if isinstance(one, int)]


def held_back(sampling: list[dict[str, Raw]]) -> list[int]:
    """The `stop_token_ids` that must not be sampled for the first `min_new_tokens`: ids that there are not end the worker."""
    waiting = [
        one for one in sampling if "stop_token_ids" in one and max(integers(one, "min_new_tokens"), default=0) > 0
    ]
    return [token for one in waiting for token in integers(one, "stop_token_ids")]


def _values(fields: dict[str, Raw], key: str) -> list[Any]:
    value = typed(fields, key, Any, "JSON")
    return value if isinstance(value, list) else [value]


def _check_sampling(fields: dict[str, Raw], entries: int, prompts: int, *, batch: bool) -> None:
    if _LIST.match(fields.get("sampling_params", b"")) and (not batch or entries < prompts):
        expected = f"a list of {prompts}, or one object for all" if batch else "one object, for there is one prompt"
        raise BadRequestError(f"`sampling_params` is a list of {entries}: give {expected}")


def _check_list(fields: dict[str, Raw], key: str, prompts: int, *, batch: bool) -> None:
    # Of ids there is a list for each prompt, or one list for all.
    if not (_NESTED if key == "token_ids_logprob" else _LIST).match(fields[key]):
        return
    if not batch and key in _DEADLY_FOR_ONE:
        raise BadRequestError(f"`{key}` is a list, and there is one prompt: that ends the worker's process")
    entries = len(typed(fields, key, list[Raw], "a list"))
    if batch and entries < prompts:
        raise BadRequestError(f"`{key}` is a list of {entries}: give one for each of {prompts} prompts, or one for all")


def _check_patterns(sampling: dict[str, Raw]) -> None:
    given = _values(sampling, "stop_regex")
    for pattern in given[:_MOST_PATTERNS]:
        if isinstance(pattern, str) and len(pattern) <= _LONGEST_PATTERN:
            wrong = patterns.fault(pattern)
            if wrong is not None:
                raise BadRequestError(f"`stop_regex` {pattern!r} is no regular expression: {wrong}")
