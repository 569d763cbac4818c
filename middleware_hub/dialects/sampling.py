"""`sampling_params` for SGLang's `/generate`, from the fields that all dialects share: OpenAI's and SGLang's own.

The limits are those of SGLang 0.5.23, checked here so that the error comes in the client's dialect, before anything is
tokenized. Limits that depend on the vocabulary are checked where it is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.messages import GRAMMARS, REPLY_FORMS
from middleware_hub.dialects.fields import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    STRINGS,
    Fields,
    Kind,
    check_depth,
    wrong,
)
from router.engines.form.request_checks import check_stops, pattern_fault
from router.errors import BadRequestError

LARGEST = 2**31 - 1
_MOST_STOPS = 32
_LONGEST_PATTERN = 256

STOP: Kind[str | list[str]] = Kind(str | list[str], "a string, or a list of strings")
_IDS: Kind[list[int]] = Kind(list[int], "a list of token ids", whole=True)
_BIASES: Kind[dict[str, float]] = Kind(dict[str, float], "an object of token ids and numbers")


class _Parameter(NamedTuple):
    """A field: its name among the `sampling_params`, its type, and its limits.

    Those of a list are the limits of each entry, those of an object the limits of each name.
    """

    name: str
    kind: Kind[Any]
    limits: str = ""
    fits: Callable[[Any], bool] | None = None


_SEED = _Parameter("sampling_seed", INTEGER, "an int64", lambda v: -(2**63) <= v < 2**63)
_LEAST = _Parameter("min_new_tokens", INTEGER, f"from 0 to {LARGEST}", lambda v: 0 <= v <= LARGEST)
_PARAMETERS = {
    "temperature": _Parameter("temperature", NUMBER, "at least 0", lambda v: v >= 0),
    "top_p": _Parameter("top_p", NUMBER, "above 0, and at most 1", lambda v: 0 < v <= 1),
    "top_k": _Parameter("top_k", INTEGER, f"-1 or 0 (all), or 1 to {LARGEST}", lambda v: -1 <= v <= LARGEST),
    "min_p": _Parameter("min_p", NUMBER, "from 0 to 1", lambda v: 0 <= v <= 1),
    "frequency_penalty": _Parameter("frequency_penalty", NUMBER, "from -2 to 2", lambda v: -2 <= v <= 2),
    "presence_penalty": _Parameter("presence_penalty", NUMBER, "from -2 to 2", lambda v: -2 <= v <= 2),
    "repetition_penalty": _Parameter("repetition_penalty", NUMBER, "above 0, and at most 2", lambda v: 0 < v <= 2),
    "seed": _SEED,
    "sampling_seed": _SEED,  # SGLang's name for it
    "min_tokens": _LEAST,
    "min_new_tokens": _LEAST,
    "max_new_tokens": _Parameter("max_new_tokens", INTEGER, f"from 1 to {LARGEST}", lambda v: 1 <= v <= LARGEST),
    "stop_token_ids": _Parameter("stop_token_ids", _IDS, f"token ids from 0 to {LARGEST}", lambda v: 0 <= v <= LARGEST),
    "ignore_eos": _Parameter("ignore_eos", BOOLEAN),
    "skip_special_tokens": _Parameter("skip_special_tokens", BOOLEAN),
    "spaces_between_special_tokens": _Parameter("spaces_between_special_tokens", BOOLEAN),
    "no_stop_trim": _Parameter("no_stop_trim", BOOLEAN),
    "include_stop_str_in_output": _Parameter("no_stop_trim", BOOLEAN),  # vLLM's name for it
    "logit_bias": _Parameter("logit_bias", _BIASES, "an object whose keys are token ids", lambda v: _is_id(v)),
    "regex": _Parameter("regex", STRING),
    "ebnf": _Parameter("ebnf", STRING),
    "custom_params": _Parameter("custom_params", OBJECT),
    "watermark": _Parameter("watermark", OBJECT),
    # vLLM's own: an SGLang worker refuses them by name.
    "allowed_token_ids": _Parameter("allowed_token_ids", _IDS),
    "bad_words": _Parameter("bad_words", STRINGS),
    "structured_outputs": _Parameter("structured_outputs", OBJECT),
    "repetition_detection": _Parameter("repetition_detection", OBJECT),
    "thinking_token_budget": _Parameter("thinking_token_budget", INTEGER),
    "vllm_xargs": _Parameter("vllm_xargs", OBJECT),
}

_REFUSED = {
    "guided_json": "`response_format` takes a schema",
    "guided_regex": "`regex` takes a pattern",
    "guided_choice": "`regex` takes alternatives",
    "guided_grammar": "`ebnf` takes a grammar",
    "use_beam_search": "a beam has no sampled tokens",
    "truncate_prompt_tokens": "a prompt is never cut here",
    "prompt_logprobs": "those are /generate's, with `logprob_start_len`",
    "logprob_token_ids": "those are /generate's, with `token_ids_logprob`",
    "prompt_embeds": "a prompt is text or token ids",
}
"""vLLM's fields that are not supported here. Dropping them silently would surprise the client."""


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit()


def sampling_names() -> list[str]:
    return [*_PARAMETERS, "stop", "stop_regex", "response_format"]


def read_sampling(fields: Fields) -> dict[str, Any]:
    """Read everything but a dialect's own limit on new tokens. Raises BadRequestError."""
    for key in fields.present(_REFUSED):
        asked = fields.take(key, ANYTHING)
        if asked or (key == "prompt_logprobs" and asked == 0):  # which asks for the logprobs of the tokens alone
            raise BadRequestError(f"`{key}` is not supported: {_REFUSED[key]}", param=key)
    sampling: dict[str, Any] = {}
    for key in fields.present(_PARAMETERS):
        parameter = _PARAMETERS[key]
        value = fields.take(key, parameter.kind)
        if value is None:
            continue
        for one in value if isinstance(value, dict | list) else (value,):
            if parameter.fits is not None and not parameter.fits(one):
                raise wrong(key, one, parameter.limits)
        if type(value) is dict:
            check_depth(key, value)
        sampling[parameter.name] = value
    add_stops(sampling, "stop", fields.take("stop", STOP))
    _add_patterns(sampling, fields.take("stop_regex", STOP))
    add_format(sampling, "response_format", fields.take("response_format", OBJECT))
    return sampling


def add_stops(sampling: dict[str, Any], key: str, stops: str | list[str] | None) -> None:
    """Add stop strings as a list, so that more can be added. Raises BadRequestError."""
    listed = [stops] if isinstance(stops, str) else stops
    if not listed:
        return
    if len(listed) > _MOST_STOPS:
        raise BadRequestError(f"`{key}` has {len(listed)} strings: at most {_MOST_STOPS} can be watched for", param=key)
    if not all(listed):
        raise BadRequestError(f"`{key}` has an empty string in it: every text ends with one", param=key)
    check_stops(key, listed)
    sampling["stop"] = listed


def finish(sampling: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Add the limit on new tokens, and check fields against each other. Raises BadRequestError.

    A dialect's own `limit` counts before SGLang's `max_new_tokens`.
    """
    if limit is None:
        limit = sampling.get("max_new_tokens")
    for name in GRAMMARS:
        if sampling.get(name) == "":
            del sampling[name]
    grammars = [name for name in GRAMMARS if name in sampling]
    if len(grammars) > 1:
        raise BadRequestError(f"only one of {', '.join(grammars)} can hold for a reply (`response_format` is one, too)")
    if limit is not None:
        least = sampling.get("min_new_tokens", 0)
        if least > limit:
            raise BadRequestError(
                f"`min_tokens` is {least}, and at most {limit} tokens are asked for", param="min_tokens"
            )
        sampling["max_new_tokens"] = limit
    return sampling


def form_field(sampling: dict[str, Any]) -> str | None:
    """Return the client's name of the field that sets the form of a reply; None if there is none."""
    name = next((name for name in REPLY_FORMS if sampling.get(name)), None)
    return "response_format" if name in ("json_schema", "structural_tag") else name


def schema_text(place: str, schema: Any) -> str:
    """Return a JSON schema in SGLang's form. Raises BadRequestError if it is not a schema."""
    if type(schema) is not dict:
        raise wrong(place, schema, "a JSON schema, an object")
    check_depth(place, schema)
    return msgspec.json.encode(schema).decode()


def _add_patterns(sampling: dict[str, Any], found: str | list[str] | None) -> None:
    listed = [found] if isinstance(found, str) else found
    if not listed:
        return
    if len(listed) > _MOST_STOPS or any(len(pattern.encode()) > _LONGEST_PATTERN for pattern in listed):
        limits = f"at most {_MOST_STOPS} patterns of at most {_LONGEST_PATTERN} bytes each"
        raise BadRequestError(f"`stop_regex` must be {limits}", param="stop_regex")
    for pattern in listed:
        fault = pattern_fault(pattern)
        if fault is not None:
            raise BadRequestError(f"`stop_regex` {pattern!r} is no regular expression: {fault}", param="stop_regex")
    sampling["stop_regex"] = listed


def add_format(sampling: dict[str, Any], place: str, wanted: Any) -> None:
    """Add the form of a reply, which the field at `place` asks for. Raises BadRequestError."""
    if wanted is None:
        return
    kind = wanted.get("type") if type(wanted) is dict else None
    if kind == "json_object":
        sampling["json_schema"] = '{"type": "object"}'
    elif kind == "json_schema":
        if type(wanted.get("json_schema")) is dict:  # as in chat completions
            place, wanted = f"{place}.json_schema", wanted["json_schema"]
        sampling["json_schema"] = schema_text(f"{place}.schema", wanted.get("schema"))
    elif kind == "structural_tag":
        sampling["structural_tag"] = schema_text(place, wanted)
    elif kind != "text":
        raise wrong(f"{place}.type", kind, '"text", "json_object", "json_schema" or "structural_tag"')
