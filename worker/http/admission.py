"""POST /generate, from its JSON to the replies to sample: checked in SGLang's order, with its refusals."""

from __future__ import annotations

import json
import math
import re
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from worker.engine.prompt_images import expanded
from worker.engine.sample import ReplyRequest, ReturnOptions
from worker.engine.script import FREE, ReplyScript
from worker.engine.source import AS_MANY, SamplingParams
from worker.engine.transfer import Bootstrap
from worker.http.exchange import OutOfRange, Refused
from worker.http.image_data import image_digests
from worker.options import Role
from worker.vocabulary import EngineVocabulary

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
_RESERVED = 6  # tokens of the context that a prompt may not have
_KEPT_FREE = 2  # tokens of the context that no reply reaches
_LARGEST = 2**31 - 1
_KINDS: dict[str, Any] = {
    "sampling_params": dict | list,
    "rid": str | list[str],
    "stream": bool | int,
    "return_logprob": bool | list[bool],
    "logprob_start_len": int | list[int],
    "top_logprobs_num": int | list[int],
    "token_ids_logprob": list,
    "return_text_in_logprobs": bool,
    "return_prompt_token_ids": bool,
    "routed_dp_rank": int,
    "data_parallel_rank": int,
    "disagg_prefill_dp_rank": int,
    "bootstrap_host": str | list[str],
    "bootstrap_port": int | list[int],
    "bootstrap_room": int | list[int],
}


@dataclass(frozen=True)
class Admitted:
    """A valid request."""

    replies: list[ReplyRequest]  # prompt-major
    listed: bool  # whether the reply is a list
    from_text: bool  # whether the worker had to encode a text itself


def admit(
    body: Mapping[str, Any],
    vocabulary: EngineVocabulary,
    *,
    context_length: int,
    in_flight: Mapping[str, object],
    role: Role = "null",
    ranks: int = 1,
) -> Admitted:
    """Check the JSON of a request, whose request ids must not be in flight.

    Raises:
        Refused: as SGLang would refuse it.
        OutOfRange: it is outside of the valid range.
    """
    for name, kinds in _KINDS.items():
        if not is_a(body.get(name), kinds):
            raise Refused(f"body.{name}: input should be a valid {kinds}", "object")
    if not _is_ids(body.get("token_ids_logprob") or []):
        raise Refused("body.token_ids_logprob: input should be a valid list of integers", "object")
    rank = _rank(body, ranks)
    prompts, batch, from_text = _prompts(body, vocabulary)
    params: Any = body.get("sampling_params")
    if isinstance(params, list) and not all(isinstance(one, dict) for one in params):
        raise Refused("body.sampling_params: input should be a valid dictionary", "object")
    each = _each({} if params is None else params, len(prompts), batch)
    samplings = [parse_sampling(one, vocabulary.size) for one in (each if isinstance(params, list) else each[:1])]
    samplings *= 1 if isinstance(params, list) else len(prompts)
    rids = _rids(body.get("rid"), len(prompts), batch)
    images = image_digests(body, len(prompts), batch=batch) if vocabulary.image_id is not None else [[]] * len(prompts)
    salts = [_salts(body, name, len(prompts), batch) for name in ("extra_key", "cache_salt")]
    found: list[ReplyRequest] = []
    for number, sent in enumerate(prompts):
        prompt, seen = expanded(sent, images[number], vocabulary.image_id)
        sampling = _fitting(samplings[number], prompt, vocabulary, context_length)
        rid = rids[number]
        if rid in in_flight:
            raise Refused(f"Duplicate request ID detected: {rid}")
        custom = each[number].get("custom_params")
        own = custom.get("script") if isinstance(custom, dict) else None
        script = ReplyScript.parse(own, vocabulary.encode_bare) if own is not None else FREE
        returns = _returns(body, number, len(prompts), batch)
        _check_returns(returns, prompt, vocabulary)
        # With several samples each has an id of its own, and the client's is lost.
        names = [rid] if sampling.n == 1 else [uuid.uuid4().hex for _ in range(sampling.n)]
        bootstrap = None if role == "null" else _bootstrap(body, number, rid, batch=batch)
        if bootstrap is not None and sampling.n > 1:
            raise OutOfRange("several samples of one prompt, which would share a bootstrap room")
        salt = tuple(one[number] for one in salts) if any(one[number] for one in salts) else ()
        first = ReplyRequest(names[0], prompt, sampling, returns, script, rank, seen, bootstrap=bootstrap, salt=salt)
        found += [replace(first, rid=name) for name in names]
    return Admitted(found, batch or len(found) > 1, from_text)


def _rank(body: Mapping[str, Any], ranks: int) -> int | None:
    """Return the data-parallel rank that a request names, by either of two names."""
    rank: int | None = body.get("routed_dp_rank")
    rank = body.get("data_parallel_rank") if rank is None else rank
    if rank is not None and not 0 <= rank < ranks:
        raise Refused(f"routed_dp_rank={rank} out of range [0, {ranks})")
    return rank


def _bootstrap(body: Mapping[str, Any], number: int, rid: str, *, batch: bool) -> Bootstrap:
    """Return where the legs of a prompt meet. In a batch, an integer is the room of its first prompt."""

    def own(name: str, step: int = 0) -> Any:
        value: Any = body.get(name)
        if isinstance(value, list):
            if not batch or number >= len(value):
                raise OutOfRange(f"a list as {name} that does not fit")
            return value[number]
        return value + step if step and value is not None else value

    room = own("bootstrap_room", number)
    if room is None:
        raise Refused(f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={rid!r}")
    host, port = own("bootstrap_host"), own("bootstrap_port")
    if host is None or port is None or not 0 <= room < 1 << 63:
        raise OutOfRange("a disaggregated request without a place to meet")
    return Bootstrap(host, port, room, body.get("disagg_prefill_dp_rank"))


def _fitting(
    sampling: SamplingParams, prompt: list[int], vocabulary: EngineVocabulary, context_length: int
) -> SamplingParams:
    """Return the parameters, with `max_new_tokens` cut to the room that this prompt leaves."""
    if not prompt:
        raise OutOfRange("an empty prompt")
    if min(prompt) < 0 or max(prompt) >= vocabulary.size:
        raise OutOfRange("an id outside of the vocabulary")
    if sampling.top_k > _LARGEST:
        raise OutOfRange("a top_k that is no int32")
    if sampling.min_new_tokens and any(not 0 <= token < vocabulary.size for token in sampling.stop_token_ids):
        raise OutOfRange("a stop token outside of the vocabulary, with min_new_tokens")
    count, wanted = len(prompt), sampling.max_new_tokens
    if count >= context_length:
        raise Refused(
            f"The input ({count} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    if wanted != AS_MANY and count + wanted > context_length:
        raise Refused(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens."
            f" You requested a total of {count + wanted} tokens: {count} tokens from the input messages"
            f" and {wanted} tokens for the completion."
        )
    if count > context_length - _RESERVED:
        most = context_length - _RESERVED
        raise Refused(f"Input length ({count} tokens) exceeds the maximum allowed length ({most} tokens).")
    room = context_length - count - _KEPT_FREE
    return sampling if wanted <= room else replace(sampling, max_new_tokens=room)


def _each(value: Any, count: int, batch: bool) -> list[Any]:
    """Return one value per prompt. Only a batch may give a list, of one value per prompt."""
    if not isinstance(value, list):
        return [value] * count
    if not batch or len(value) < count:
        raise OutOfRange("a list that does not fit its batch")
    return value


def _prompts(body: Mapping[str, Any], vocabulary: EngineVocabulary) -> tuple[list[list[int]], bool, bool]:
    text: Any = body.get("text")
    ids: Any = body.get("input_ids")
    if not is_a(text, str | list[str]):
        raise Refused("Input should be a valid string", "object")
    if ids is not None and not _is_ids(ids):
        raise Refused("Value error, elements must be int or list", "object")
    if text is None and ids is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if text is not None and body.get("image_data") and vocabulary.image_id is not None:
        ids = None  # with images SGLang's processor reads the text
    # SGLang takes the ids if there are any, but looks at `text` to decide whether it is a batch.
    batch = isinstance(text, list) if text is not None else bool(ids) and isinstance(ids[0], list)
    if ids is not None:
        if batch != (bool(ids) and isinstance(ids[0], list)):
            raise OutOfRange("text and input_ids differ in being a batch")
        if not ids:
            raise Refused("input_ids cannot be empty.")
        return (ids if batch else [ids]), batch, False
    texts = text if isinstance(text, list) else [text]
    return [vocabulary.encode(one) for one in texts], batch, True


def _is_ids(ids: Any) -> bool:
    if not isinstance(ids, list):
        return False
    kinds = set(map(type, ids))
    if kinds == {list}:
        return all(set(map(type, one)) <= {int} for one in ids)
    return kinds <= {int}


def _rids(rid: Any, count: int, batch: bool) -> list[str]:
    """Return one request id per prompt: the ids of a list, or for a batch the string with the item's number."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{number}" for number in range(count)] if batch else [rid]
    if not batch:
        raise OutOfRange("a list of names for one prompt")
    if len(rid) != count:
        raise Refused("The specified rids length mismatch with the batch_size for batch processing.")
    if len(set(rid)) != count:
        raise Refused(f"Duplicate request IDs detected within the request: {rid}")
    return list(rid)


def _salts(body: Mapping[str, Any], name: str, count: int, batch: bool) -> list[str]:
    """Return a field that keeps replies apart in the cache, for each prompt; empty for none."""
    given = body.get(name)
    if given is None or isinstance(given, str):
        return [given or ""] * count
    if not batch:
        raise Refused(f"{name} should be a string for a single request.")
    if not isinstance(given, list):
        raise Refused(f"{name} should be a list or a string.")
    if len(given) != count:
        raise Refused(f"The length of {name} should be equal to the batch size.")
    if not all(isinstance(one, str) for one in given):
        raise Refused(f"Every {name} should be a string.")
    return given


def _returns(body: Mapping[str, Any], number: int, count: int, batch: bool) -> ReturnOptions:
    prompt_ids = bool(body.get("return_prompt_token_ids"))
    if not body.get("return_logprob"):
        return ReturnOptions(prompt_ids=prompt_ids)

    def item(name: str, default: Any) -> Any:
        value: Any = body.get(name)
        if name == "token_ids_logprob" and not (value and isinstance(value[0], list)):
            return value or default
        if isinstance(value, list) and batch:
            value = _each(value, count, batch)[number]
        elif isinstance(value, list) and name in ("logprob_start_len", "top_logprobs_num"):
            raise OutOfRange(f"a list as {name} of one prompt")
        return default if value is None else value

    return ReturnOptions(
        logprobs=bool(item("return_logprob", False)),
        start=item("logprob_start_len", -1),
        top=max(0, item("top_logprobs_num", 0)),
        chosen=tuple(item("token_ids_logprob", ())),
        texts=bool(body.get("return_text_in_logprobs")),
        prompt_ids=prompt_ids,
    )


def _check_returns(returns: ReturnOptions, prompt: list[int], vocabulary: EngineVocabulary) -> None:
    if returns.start > len(prompt):
        raise Refused(
            f"req.logprob_start_len={returns.start} is higher than the number of input tokens"
            f" len(req.origin_input_ids)={len(prompt)}. Please use a smaller logprob_start_len."
        )
    if returns.start < -1:
        raise OutOfRange("a logprob_start_len below -1")
    if returns.top > vocabulary.size:
        raise OutOfRange("more top logprobs than tokens")
    for token in returns.chosen:
        if isinstance(token, list):
            raise Refused("token_ids_logprob must be a flat list of integers.")
        if not 0 <= token < vocabulary.size:
            limit = f"valid range is [0, {vocabulary.size})."
            raise Refused(f"token_ids_logprob contains out-of-vocabulary token id {token}; {limit}")


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
