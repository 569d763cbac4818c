"""`sampling_params`: their names, their refusals, and their meaning."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.embedded.engine.errors import Broken, Refused

# Each with the type that the contract names in its refusal; None takes anything.
_FIELDS: dict[str, str | None] = {
    "max_new_tokens": "i64",
    "stop": "a value or an array of values for StringOrList",
    "stop_token_ids": "a sequence",
    "stop_regex": "a value or an array of values for StringOrList",
    "temperature": "f64",
    "top_p": "f64",
    "top_k": "i64",
    "min_p": "f64",
    "frequency_penalty": "f64",
    "presence_penalty": "f64",
    "repetition_penalty": "f64",
    "min_new_tokens": "i64",
    "n": "i64",
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "ignore_eos": "a boolean",
    "skip_special_tokens": "a boolean",
    "spaces_between_special_tokens": "a boolean",
    "no_stop_trim": "a boolean",
    "stream_interval": "i64",
    "logit_bias": "a map",
    "sampling_seed": "i64",
    "custom_params": None,
    "beam_width": "i64",
    "watermark": None,
    "choice": None,
}
_TYPES: dict[str, Any] = {
    "i64": int,
    "f64": float,
    "a boolean": bool,
    "a sequence": list[int],
    "a map": dict[str, float],
    "a value or an array of values for StringOrList": str | list[str],
}
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_MOST_STOPS, _LONGEST_PATTERN = 32, 256
AS_MANY = 1 << 30  # tokens: as many as there is room for
_GREEDY_BELOW = 1e-6  # _SAMPLING_EPS


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one reply; the defaults are SGLang's."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    stream_interval: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken. Its logprob is that of temperature 1."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1


def parse_sampling(params: Any, vocabulary_size: int) -> SamplingParams:
    """Read the JSON of a request, with SGLang's refusals in its order and its words.

    Null means the default, except for `max_new_tokens`, where it means as many as there is room for.

    Raises:
        Refused: an unknown field or a wrong type (by the contract), or a wrong value (by `SamplingParams.verify`).
        Broken: `n` is null.
    """
    if not isinstance(params, dict):
        raise Refused(f"invalid type: {kind(params)}, expected a map", "error")
    if "n" in params and params["n"] is None:
        raise Broken("n is null")
    for key, value in params.items():
        if key not in _FIELDS:
            names = ", ".join(f"`{name}`" for name in _FIELDS)
            raise Refused(f"unknown field `{key}`, expected one of {names}", "error")
        expected = _FIELDS[key]
        if expected is not None and not is_a(value, _TYPES[expected]):
            raise Refused(f"invalid type: {kind(value)}, expected {expected}", "error")
    if sum(bool(params.get(name)) for name in _GRAMMARS) > 1:
        raise Refused("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    sampling = _sampling(params)
    wrong = _wrong(sampling, vocabulary_size)
    if wrong is not None:
        raise Refused(wrong)
    return sampling


def is_a(value: Any, kind: Any) -> bool:
    """Whether a JSON value, with everything in it, is of a type. Null is of every type."""
    try:
        msgspec.convert(value, kind | None)
    except msgspec.ValidationError:
        return False
    return True


def kind(value: Any) -> str:
    """Return how the contract's messages name a JSON value."""
    return f"string {json.dumps(value)}" if isinstance(value, str) else type(value).__name__


def _sampling(params: dict[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {
        key: value for key, value in params.items() if value is not None and key in SamplingParams.__match_args__
    }
    for key in ("stop", "stop_regex"):
        if key in given:
            given[key] = (given[key],) if isinstance(given[key], str) else tuple(given[key])
    if "stop_token_ids" in given:
        given["stop_token_ids"] = frozenset(given["stop_token_ids"])
    _check_stops(given)
    try:
        given["logit_bias"] = {int(token): float(bias) for token, bias in given.get("logit_bias", {}).items()}
    except ValueError as error:
        raise Refused(str(error)) from None
    if "max_new_tokens" in params and params["max_new_tokens"] is None:
        given["max_new_tokens"] = AS_MANY
    given["n"] = max(1, given.get("n", 1))
    return SamplingParams(**given)


def _check_stops(given: dict[str, Any]) -> None:
    for key, name in (("stop", "stop strings"), ("stop_regex", "stop_regex patterns")):
        if len(given.get(key, ())) > _MOST_STOPS:
            raise Refused(f"at most {_MOST_STOPS} {name} are allowed, got {len(given[key])}")
    for pattern in given.get("stop_regex", ()):
        if (length := len(pattern.encode())) > _LONGEST_PATTERN:
            raise Refused(f"stop_regex is {length} bytes, over the {_LONGEST_PATTERN}-byte limit")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            raise Broken("a stop_regex that is no pattern") from None


def _wrong(s: SamplingParams, size: int) -> str | None:
    low, high = s.min_new_tokens, s.max_new_tokens
    # In the order of `SamplingParams.verify`, which raises at the first.
    rules = (
        (
            math.isfinite(s.temperature) and s.temperature >= 0,
            f"temperature must be a non-negative finite number, got {s.temperature}.",
        ),
        (0 < s.top_p <= 1, f"top_p must be in (0, 1], got {s.top_p}."),
        (0 <= s.min_p <= 1, f"min_p must be in [0, 1], got {s.min_p}."),
        (s.top_k >= 1 or s.top_k == -1, f"top_k must be -1 (disable) or at least 1, got {s.top_k}."),
        (-2 <= s.frequency_penalty <= 2, f"frequency_penalty must be in [-2, 2], got {s.frequency_penalty}."),
        (-2 <= s.presence_penalty <= 2, f"presence_penalty must be in [-2, 2], got {s.presence_penalty}."),
        (
            0 < s.repetition_penalty <= 2,
            f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {s.repetition_penalty}.",
        ),
        (low >= 0, f"min_new_tokens must be in [0, max_new_tokens], got {low}."),
        (high >= 0, f"max_new_tokens must be at least 0, got {high}."),
        (low <= high, f"min_new_tokens must be in [0, max_new_tokens({high})], got {low}."),
    )
    for holds, message in rules:
        if not holds:
            return message
    outside = [token for token in s.logit_bias if not 0 <= token < size]
    return f"logit_bias must has keys in [0, {size - 1}], got {outside[0]}." if outside else None
