"""Refuses requests outside of the valid range of SGLang 0.5.23.

What SGLang refuses by itself passes: it answers in its own words.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Raw

from router.engines.form.fields import typed
from router.engines.form.limits import LONGEST_STOP
from router.engines.json import is_list, is_nested
from router.errors import BadRequestError

_EMPTY = re.compile(rb"\s*\[\s*(\[\s*)?\]")
_LARGEST = 2**31 - 1
_LONGEST_PATTERN, _MOST_PATTERNS = 256, 32
"""The worker itself refuses more patterns, or longer ones."""

_ONE_EACH = frozenset(
    (
        "return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask "
        "sampling_logprobs_mode lora_path custom_logit_processor video_data audio_data bootstrap_host "
        "bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size"
    ).split()
)
"""Fields of a batch that may be a list with one entry per prompt."""

_parser: Any = re._parser  # type: ignore[attr-defined]  # `re.compile` without the compiler: there is no public name for it


def check(
    fields: dict[str, Raw],
    sampling: list[dict[str, Raw]],
    prompts: int | None,
    *,
    batch: bool,
    logprobs: bool,
    vocabulary: int | None = None,
) -> None:
    """Raise BadRequestError for a body of `/generate` that is outside of the valid range.

    Args:
        fields: its top level.
        sampling: its `sampling_params`: one entry, or one per prompt.
        prompts: the number of prompts; None for embeddings.
        batch: whether the prompts came as a list.
        logprobs: whether any prompt asks for logprobs.
        vocabulary: the number of the model's ids; None if it is not known.
    """
    if prompts is None:
        if _EMPTY.match(fields["input_embeds"]):
            raise BadRequestError("`input_embeds` is empty: give the embedding of at least one token")
    elif batch:
        _check_batch(fields, len(sampling), prompts)
    else:
        _check_single(fields, logprobs=logprobs)
    if "logprob_start_len" in fields and any(value < -1 for value in integers(fields, "logprob_start_len")):
        raise BadRequestError("`logprob_start_len` must be at least -1")
    if vocabulary is not None and logprobs and "top_logprobs_num" in fields:
        most = max(integers(fields, "top_logprobs_num"), default=0)
        if most > vocabulary:
            raise BadRequestError(f"`top_logprobs_num` is {most}, and the vocabulary has {vocabulary} tokens")
    for params in sampling:
        if "top_k" in params and any(value > _LARGEST for value in integers(params, "top_k")):
            raise BadRequestError(f"`top_k` must be at most {_LARGEST}")
        if "stop" in params and len(memoryview(params["stop"])) > LONGEST_STOP:
            check_stops("stop", _values(params, "stop"))
        if "stop_regex" in params:
            _check_patterns(params)
        if vocabulary is not None and "stop_token_ids" in params and "min_new_tokens" in params:
            _check_held_back(params, vocabulary)


def integers(fields: dict[str, Raw], key: str) -> list[int]:
    """Return the integers of a field that is an integer or a list of them; the worker refuses other types."""
    return [one for one in _values(fields, key) if isinstance(one, int)]


def _values(fields: dict[str, Raw], key: str) -> list[Any]:
    value = typed(fields, key, Any, "JSON")
    return value if isinstance(value, list) else [value]


def _check_batch(fields: dict[str, Raw], params: int, prompts: int) -> None:
    if is_list(fields.get("sampling_params")) and params < prompts:
        raise BadRequestError(
            f"`sampling_params` is a list of {params}: give a list of {prompts}, or one object for all"
        )
    for key in fields.keys() & _ONE_EACH:
        # `token_ids_logprob` is a list per prompt, or one list for all prompts.
        if not (is_nested(fields[key]) if key == "token_ids_logprob" else is_list(fields[key])):
            continue
        entries = len(typed(fields, key, list[Raw], "a list"))
        if entries < prompts:
            raise BadRequestError(
                f"`{key}` is a list of {entries}: give one for each of {prompts} prompts, or one for all"
            )


def _check_single(fields: dict[str, Raw], *, logprobs: bool) -> None:
    if "rid" in fields and is_list(fields["rid"]):
        raise BadRequestError("`rid` is a list: give one string, for there is one prompt")
    for key in ("logprob_start_len", "top_logprobs_num") if logprobs else ():
        if is_list(fields.get(key)):
            raise BadRequestError(f"`{key}` is a list: give one integer, for there is one prompt")


def _check_held_back(sampling: dict[str, Raw], vocabulary: int) -> None:
    """Check the `stop_token_ids` that `min_new_tokens` holds back: these have to be in the vocabulary."""
    if any(integers(sampling, "min_new_tokens")):
        for token in integers(sampling, "stop_token_ids"):
            if not 0 <= token < vocabulary:
                raise BadRequestError(
                    f"`stop_token_ids` has {token} in it, and the vocabulary is 0 to {vocabulary - 1}"
                )


def check_stops(key: str, stops: Iterable[Any]) -> None:
    """Raise BadRequestError for a stop string that is too long."""
    if any(isinstance(one, str) and len(one) > LONGEST_STOP for one in stops):
        raise BadRequestError(f"`{key}` has a string of more than {LONGEST_STOP} characters", param=key)


def _check_patterns(sampling: dict[str, Raw]) -> None:
    for pattern in _values(sampling, "stop_regex")[:_MOST_PATTERNS]:
        if isinstance(pattern, str) and len(pattern) <= _LONGEST_PATTERN:
            wrong = pattern_fault(pattern)
            if wrong is not None:
                raise BadRequestError(f"`stop_regex` {pattern!r} is no regular expression: {wrong}")


def pattern_fault(pattern: str) -> str | None:
    """Return the fault of a regular expression; None if it has none.

    It is parsed, but not compiled: that can take a second and would block the event loop.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that may change its meaning
            parsed = _parser.parse(pattern)
        for lookbehind in _lookbehinds(parsed):
            low, high = lookbehind.getwidth()
            if low != high:
                return "look-behind requires fixed-width pattern"
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "it is nested too deeply"
    return None


def _lookbehinds(part: Any) -> Iterator[Any]:
    """Yield the look-behinds of a parsed pattern: nested pairs of an operation and its arguments."""
    if not isinstance(part, list | tuple | _parser.SubPattern):
        return
    # `is`, because an operation is an int that equals others.
    if len(part) == 2 and (part[0] is _parser.ASSERT or part[0] is _parser.ASSERT_NOT) and part[1][0] < 0:
        yield part[1][1]
    for inner in part:
        yield from _lookbehinds(inner)
