"""The JSON of `sampling_params`: its fields, and SGLang's refusals."""

from __future__ import annotations

import json
import math
import re
import warnings
from typing import Any

import msgspec

from router.embedded.engine.sampling import AS_MANY, SamplingParams
from router.embedded.http.errors import OutOfRange, Refused

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


def parse_sampling(params: Any, vocabulary_size: int) -> SamplingParams:
    """Read the JSON of a request, with SGLang's refusals in its order and its words.

    Null means the default, except for `max_new_tokens`, where it means as many as there is room for.

    Raises:
        Refused: an unknown field or a wrong type (by the contract), or a wrong value (by `SamplingParams.verify`).
        OutOfRange: `n` is null.
    """
    if not isinstance(params, dict):
        raise Refused(f"invalid type: {_kind(params)}, expected a map", "error")
    if "n" in params and params["n"] is None:
        raise OutOfRange("n is null")
    for key, value in params.items():
        if key not in _FIELDS:
            names = ", ".join(f"`{name}`" for name in _FIELDS)
            raise Refused(f"unknown field `{key}`, expected one of {names}", "error")
        expected = _FIELDS[key]
        if expected is not None and not is_a(value, _TYPES[expected]):
            raise Refused(f"invalid type: {_kind(value)}, expected {expected}", "error")
    if sum(bool(params.get(name)) for name in _GRAMMARS) > 1:
        raise Refused("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    sampling = _sampling(params)
    if (wrong := _wrong(sampling, vocabulary_size)) is not None:
        raise Refused(wrong)
    return sampling


def is_a(value: Any, kind: Any) -> bool:
    """Return whether a JSON value, with everything in it, is of a type. Null is of every type."""
    try:
        msgspec.convert(value, kind | None)
    except msgspec.ValidationError:
        return False
    return True


def _kind(value: Any) -> str:
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
            raise OutOfRange("a stop_regex that is no pattern") from None


def _wrong(sampling: SamplingParams, size: int) -> str | None:
    low, high = sampling.min_new_tokens, sampling.max_new_tokens
    # In the order of `SamplingParams.verify`, which raises at the first.
    rules = (
        (
            "temperature",
            math.isfinite(sampling.temperature) and sampling.temperature >= 0,
            "a non-negative finite number",
        ),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("top_k", sampling.top_k >= 1 or sampling.top_k == -1, "-1 (disable) or at least 1"),
        ("frequency_penalty", -2 <= sampling.frequency_penalty <= 2, "in [-2, 2]"),
        ("presence_penalty", -2 <= sampling.presence_penalty <= 2, "in [-2, 2]"),
        ("repetition_penalty", 0 < sampling.repetition_penalty <= 2, "in (0, 2] (1.0 = no penalty)"),
        ("min_new_tokens", low >= 0, "in [0, max_new_tokens]"),
        ("max_new_tokens", high >= 0, "at least 0"),
        ("min_new_tokens", low <= high, f"in [0, max_new_tokens({high})]"),
    )
    for name, holds, expected in rules:
        if not holds:
            return f"{name} must be {expected}, got {getattr(sampling, name)}."
    outside = [token for token in sampling.logit_bias if not 0 <= token < size]
    return f"logit_bias must has keys in [0, {size - 1}], got {outside[0]}." if outside else None
