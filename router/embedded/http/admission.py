"""POST /generate, from its JSON to what is to be sampled: checked in SGLang's order, with its refusals."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from router.embedded.engine.sample import ReplyRequest, ReturnOptions
from router.embedded.engine.sampling import AS_MANY, SamplingParams
from router.embedded.engine.script import FREE, Script
from router.embedded.http.errors import OutOfRange, Refused
from router.embedded.http.sampling_json import is_a, parse_sampling
from router.embedded.models.vocabulary import EngineVocabulary

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
}


@dataclass(frozen=True)
class Admitted:
    """A valid request."""

    replies: list[ReplyRequest]  # prompt-major
    listed: bool  # whether the reply is a list
    from_text: bool  # whether the worker had to encode a text itself


def admit(
    body: Mapping[str, Any], vocabulary: EngineVocabulary, *, context_length: int, in_flight: Mapping[str, object]
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
    prompts, batch, from_text = _prompts(body, vocabulary)
    params: Any = body.get("sampling_params")
    if isinstance(params, list) and not all(isinstance(one, dict) for one in params):
        raise Refused("body.sampling_params: input should be a valid dictionary", "object")
    each = _each({} if params is None else params, len(prompts), batch)
    samplings = [parse_sampling(one, vocabulary.size) for one in (each if isinstance(params, list) else each[:1])]
    samplings *= 1 if isinstance(params, list) else len(prompts)
    rids = _rids(body.get("rid"), len(prompts), batch)
    found: list[ReplyRequest] = []
    for number, prompt in enumerate(prompts):
        sampling = _fitting(samplings[number], prompt, vocabulary, context_length)
        rid = rids[number]
        if rid in in_flight:
            raise Refused(f"Duplicate request ID detected: {rid}")
        custom = each[number].get("custom_params")
        own = custom.get("script") if isinstance(custom, dict) else None
        script = Script.parse(own) if own is not None else FREE
        returns = _returns(body, number, len(prompts), batch)
        _check_returns(returns, prompt, vocabulary)
        # With several samples each has an id of its own, and the client's is lost.
        names = [rid] if sampling.n == 1 else [uuid.uuid4().hex for _ in range(sampling.n)]
        found += [ReplyRequest(name, prompt, sampling, returns, script) for name in names]
    return Admitted(found, batch or len(found) > 1, from_text)


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
    """Return one request id per prompt: those of a list, or for a batch the string with the item's number."""
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
