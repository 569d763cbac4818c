"""Requests to generate in vLLM's two forms, `/v1/completions` and `/inference/v1/generate`, as replies to sample."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from worker.engine.prompt_images import expanded
from worker.engine.sample import ReplyRequest, ReturnOptions
from worker.engine.source import SamplingParams
from worker.vllm.content_parts import ImageMemory
from worker.vllm.rejected import Rejected
from worker.vocabulary import EngineVocabulary

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"

_NAMES = {
    **{name: name for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")},
    **{name: name for name in ("repetition_penalty", "ignore_eos", "skip_special_tokens", "n")},
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}
_DEFAULT_LENGTH = 16
_MOST_LOGPROBS = 20
_GREEDY_BELOW = 1e-5
_LONGEST_SALT, _NOT_IN_A_SALT = 128, frozenset("@/\\\0")
_LIMITS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 2, "in [0, 2]"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "top_k": (lambda value: value >= -1, "0 (disable), or at least 1"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda value: value > 0, "greater than zero"),
    "min_tokens": (lambda value: value >= 0, "greater than or equal to 0"),
    "logprobs": (lambda value: value <= _MOST_LOGPROBS, f"at most {_MOST_LOGPROBS}"),
}
"""Parameters that are numbers, and the values that vLLM takes."""


class _Parameters(msgspec.Struct, omit_defaults=True):
    """The types of the parameters; as pydantic does, vLLM takes a number in a string for a number."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logprobs: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None


@dataclass(frozen=True)
class VllmRequest:
    """A valid request.

    Attributes:
        name: of the reply; its generations are called so, in `/v1/completions` with the number of their prompt.
        replies: prompt-major.
        texts: whether a reply has its text.
        top: logprobs at each place besides that of the sampled token; None for no logprobs.
        ids: whether the ids of the prompt are returned, and in `/v1/completions` the sampled ids.
        transfer: its `kv_transfer_params`, by which a cache comes from another worker or is kept for one.
        placeholders: whether tokens are named by their ids in the logprobs of `/v1/completions`.
    """

    native: bool
    name: str
    replies: list[ReplyRequest]
    stream: bool
    texts: bool
    top: int | None
    ids: bool
    placeholders: bool
    usage: bool
    from_text: bool
    transfer: Mapping[str, Any] | None = None


def read_request(
    path: str, raw: bytes, name: str | None, vocabulary: EngineVocabulary, context: int, memory: ImageMemory
) -> VllmRequest:
    """Read a request's JSON. `name`: of its header, which wins. Raise Rejected, or OutOfRange for an image to be opened."""
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"1 validation error:\n  {error}", "body") from None
    if not isinstance(body, dict):
        raise Rejected("1 validation error:\n  'msg': 'Input should be a valid dictionary'", "body")
    native = path == GENERATE
    mode = body.get("output_mode", "tokens") if native else "text"
    if mode not in ("tokens", "text"):
        raise Rejected(
            "1 validation error:\n  'loc': 'body.output_mode', 'msg': \"Input should be 'tokens' or 'text'\""
        )
    params = body.get("sampling_params") if native else body
    if not isinstance(params, dict):
        raise Rejected("1 validation error:\n  'loc': 'body.sampling_params', 'msg': 'Field required'")
    try:
        params = msgspec.to_builtins(msgspec.convert(params, _Parameters, strict=False))
    except msgspec.ValidationError as error:
        raise Rejected(f"1 validation error:\n  {error}") from None
    _check(params, vocabulary.size)
    prompts, from_text = _prompts(body, native, vocabulary)
    rid = name or body.get("request_id") or uuid.uuid4().hex
    name = f"{'generate-tokens' if native else 'cmpl'}-{rid}"
    top = params.get("logprobs")
    returns = ReturnOptions(
        logprobs=top is not None, top=max(0, top or 0), prompt_ids=bool(body.get("return_token_ids"))
    )
    salt = _salt(body)
    found: list[ReplyRequest] = []
    shown = memory.images(body.get("content_parts")) if native else []
    if shown and vocabulary.image_id is None:
        raise Rejected("At most 0 image(s) may be provided in one prompt.")
    digests, names = [digest for digest, _ in shown], [name for _, name in shown]
    if any(len(digests) > prompt.count(vocabulary.image_id or 0) for prompt in prompts if digests):
        raise Rejected("Failed to apply prompt replacement: there are more images than placeholders", status=500)
    for number, sent in enumerate(prompts):
        prompt, images = expanded(sent, digests, vocabulary.image_id)
        sampling = _sampling(params, prompt, context, native=native)
        for sample in range(sampling.n):
            own = name if native else f"{name}-{number}"
            called = f"{own}#{uuid.uuid4().hex[:8]}.{sample}"
            found.append(
                ReplyRequest(called, prompt, sampling, returns, images=images, image_names=tuple(names), salt=salt)
            )
    options, transfer = body.get("stream_options"), body.get("kv_transfer_params")
    if not isinstance(transfer, dict | None):
        raise Rejected("1 validation error:\n  'msg': 'Input should be a valid dictionary'", "body.kv_transfer_params")
    return VllmRequest(
        native=native,
        name=name,
        replies=found,
        stream=bool(body.get("stream")),
        texts=mode == "text",
        top=top,
        ids=returns.prompt_ids,
        placeholders=bool(body.get("return_tokens_as_token_ids")),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        from_text=from_text,
        transfer=transfer,
    )


def _salt(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what keeps a request's replies apart in the cache."""
    given = body.get("cache_salt")
    if given is None:
        return ()
    if not isinstance(given, str) or not given:
        raise Rejected("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(given) > _LONGEST_SALT or not _NOT_IN_A_SALT.isdisjoint(given):
        raise Rejected(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )
    return (given,)


def _prompts(body: Mapping[str, Any], native: bool, vocabulary: EngineVocabulary) -> tuple[list[list[int]], bool]:
    given = body.get("token_ids" if native else "prompt")
    from_text = False
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], str) and not native):
        given = [vocabulary.encode(text) for text in ([given] if isinstance(given, str) else given)]
        from_text = True
    elif isinstance(given, list) and (native or not given or isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not all(isinstance(prompt, list) and prompt for prompt in given):
        raise Rejected("1 validation error:\n  'msg': 'List should have at least 1 item after validation, not 0'")
    for prompt in given:
        for token in prompt:
            if not isinstance(token, int) or token < 0:
                raise Rejected("1 validation error:\n  'msg': 'Input should be greater than or equal to 0'")
            if token >= vocabulary.size:
                raise Rejected(f"Token id {token} is out of vocabulary")
    return given, from_text


def _sampling(params: Mapping[str, Any], prompt: list[int], context: int, *, native: bool) -> SamplingParams:
    if len(prompt) >= context:
        raise Rejected(
            f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of {context}."
        )
    given = {ours: params[theirs] for theirs, ours in _NAMES.items() if params.get(theirs) is not None}
    if not native and given.get("max_new_tokens", 0) > context:
        raise Rejected(
            f"max_tokens={given['max_new_tokens']} cannot be greater than max_model_len={context}."
            " Please request fewer output tokens.",
            "max_tokens",
        )
    room = context - len(prompt)
    given["max_new_tokens"] = min(given.get("max_new_tokens", room if native else _DEFAULT_LENGTH), room)
    if given["max_new_tokens"] < 1:
        raise Rejected(f"max_tokens must be at least 1, got {given['max_new_tokens']}.", "max_tokens")
    stop = params.get("stop", ())
    top_k = params.get("top_k") or -1
    found = SamplingParams(
        **given,
        top_k=top_k if top_k > 0 else -1,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=frozenset(params.get("stop_token_ids") or ()),
        logit_bias={int(token): float(bias) for token, bias in (params.get("logit_bias") or {}).items()},
    )
    if "" in found.stop:
        raise Rejected("stop cannot contain an empty string.")
    if found.n > 1 and found.temperature < _GREEDY_BELOW:
        raise Rejected(f"n must be 1 when using greedy sampling, got {found.n}.")
    if found.min_new_tokens > found.max_new_tokens:
        raise Rejected(
            f"min_tokens must be less than or equal to max_tokens={found.max_new_tokens}, got {found.min_new_tokens}."
        )
    return found


def _check(params: Mapping[str, Any], size: int) -> None:
    """Raise Rejected for a parameter that vLLM refuses. `size`: of the vocabulary."""
    for name, (fits, says) in _LIMITS.items():
        value = params.get(name)
        if value is not None and not fits(value):
            raise Rejected(f"{name} must be {says}, got {value}.", name)
    for name in ("stop_token_ids", "logit_bias"):
        outside = [token for token in params.get(name) or () if not _is_id(token, size)]
        if outside:
            raise Rejected(
                f"token_id(s) {outside} in {name} contain out-of-vocab token ids. Vocabulary size: {size}", name
            )


def _is_id(token: Any, size: int) -> bool:
    return str(token).isdigit() and int(token) < size
