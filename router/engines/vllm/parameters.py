"""Sampling parameters: every name that SGLang takes, and its equivalent at a vLLM worker.

SGLang's names are those of its `SamplingParams` (0.5.23), the others those of vLLM's (0.32). Parameters that a client
leaves out have SGLang's defaults here, too: vLLM would take them from the model's `generation_config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from router.errors import BadRequestError

Params = dict[str, Any]

DEFAULT_TOKENS = 128
_GREEDY = 1e-6
"""Temperatures below it mean greedy sampling to SGLang."""
_LARGEST_BIAS = 100.0


def _same(name: str) -> Callable[[Params, Any], None]:
    def put(out: Params, value: Any) -> None:
        out[name] = value

    return put


def _refused(why: str) -> Callable[[Params, Any], None]:
    def refuse(out: Params, value: Any) -> None:
        raise BadRequestError(why)

    return refuse


def _unless(nothing: tuple[Any, ...], why: str) -> Callable[[Params, Any], None]:
    """Refuse a parameter, except for values that ask for nothing."""

    def check(out: Params, value: Any) -> None:
        if value not in nothing:
            raise BadRequestError(why)

    return check


def _max_new_tokens(out: Params, value: Any) -> None:
    # vLLM samples at least one token. Where none is wanted, the reply leaves it out.
    out["max_tokens"] = 1 if value == 0 and value is not False else value


def _temperature(out: Params, value: Any) -> None:
    out["temperature"] = 0.0 if isinstance(value, int | float) and 0 <= value < _GREEDY else value


def _stop_token_ids(out: Params, value: Any) -> None:
    out["stop_token_ids"] = [one for one in value if one is not None] if isinstance(value, list) else value


def _logit_bias(out: Params, value: Any) -> None:
    for bias in value.values() if isinstance(value, dict) else ():
        if isinstance(bias, int | float) and abs(bias) > _LARGEST_BIAS:
            raise BadRequestError(f"`logit_bias` must be within -100 and 100, not {bias}: vLLM would cut it to that")
    out["logit_bias"] = value


def _custom_params(out: Params, value: Any) -> None:
    if not isinstance(value, dict):
        raise BadRequestError("`custom_params` must be an object")
    for key, one in value.items():
        if not isinstance(one, str | int | float) and not (
            isinstance(one, list) and all(isinstance(item, str | int | float) for item in one)
        ):
            raise BadRequestError(
                f"`custom_params` goes to vLLM as `vllm_xargs`, which takes numbers, strings and lists of them: not {key!r}"
            )
    if value:
        out["vllm_xargs"] = value


def _grammar(kind: str) -> Callable[[Params, Any], None]:
    def constrain(out: Params, value: Any) -> None:
        if value in (None, ""):
            return
        if "structured_outputs" in out:
            raise BadRequestError("only one of `json_schema`, `regex`, `ebnf` and `structural_tag` can be given")
        any_json = kind == "json" and value == "$$ANY$$"
        out["structured_outputs"] = {"json_object": True} if any_json else {kind: value}

    return constrain


_INTERNAL = "is SGLang's own note and no parameter"

TABLE: Mapping[str, Callable[[Params, Any], None]] = {
    "max_new_tokens": _max_new_tokens,
    "stop": _same("stop"),
    "stop_token_ids": _stop_token_ids,
    "stop_regex": _unless(([], ""), "vLLM cannot stop at a pattern: give `stop` instead of `stop_regex`"),
    "temperature": _temperature,
    "top_p": _same("top_p"),
    "top_k": _same("top_k"),
    "min_p": _same("min_p"),
    "frequency_penalty": _same("frequency_penalty"),
    "presence_penalty": _same("presence_penalty"),
    "repetition_penalty": _same("repetition_penalty"),
    "min_new_tokens": _same("min_tokens"),
    "n": _same("n"),
    "beam_width": _unless((1,), "`beam_width` is not supported with vLLM workers: a beam has no sampled tokens"),
    "json_schema": _grammar("json"),
    "regex": _grammar("regex"),
    "ebnf": _grammar("grammar"),
    "structural_tag": _grammar("structural_tag"),
    "ignore_eos": _same("ignore_eos"),
    "skip_special_tokens": _same("skip_special_tokens"),
    "spaces_between_special_tokens": _same("spaces_between_special_tokens"),
    "no_stop_trim": _same("include_stop_str_in_output"),
    "stream_interval": _same("stream_interval"),
    "logit_bias": _logit_bias,
    "sampling_seed": _same("seed"),
    "custom_params": _custom_params,
    "watermark": _unless((False, {}), "`watermark` is not supported with vLLM workers, which mark differently"),
    # The rest of SGLang's class, which its worker would take from a client, too.
    "stop_strs": _refused(f"`stop_strs` {_INTERNAL}: give `stop`"),
    "stop_regex_strs": _refused(f"`stop_regex_strs` {_INTERNAL}: give `stop`"),
    "stop_str_max_len": _refused(f"`stop_str_max_len` {_INTERNAL}"),
    "stop_regex_max_len": _refused(f"`stop_regex_max_len` {_INTERNAL}"),
    "is_normalized": _refused(f"`is_normalized` {_INTERNAL}"),
    "ebnf_full_assistant": _refused(f"`ebnf_full_assistant` {_INTERNAL}"),
}
"""The effect of each of SGLang's names on the parameters for vLLM. None is called for null, which means the default."""

OWN = frozenset(
    "allowed_token_ids bad_words structured_outputs repetition_detection thinking_token_budget vllm_xargs".split()
)
"""vLLM's own parameters, which SGLang does not have. They pass unchanged."""

_DEFAULTS: Params = {
    "max_tokens": DEFAULT_TOKENS,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def translated(sampling: Mapping[str, Any]) -> Params:
    """Return vLLM's parameters for a client's. Raise BadRequestError that names a parameter that vLLM lacks."""
    out = dict(_DEFAULTS)
    for name, value in sampling.items():
        if name in OWN:
            if name == "structured_outputs" and name in out:
                raise BadRequestError("`structured_outputs` says the same as `json_schema`, `regex`, `ebnf`: give one")
            out[name] = value
            continue
        put = TABLE.get(name)
        if put is None:
            alike = get_close_matches(name, [*TABLE, *OWN], 1)
            advice = f": did you mean `{alike[0]}`?" if alike else ""
            raise BadRequestError(f"`sampling_params` has no `{name}`{advice}")
        if value is not None:
            put(out, value)
        elif name == "max_new_tokens":
            out["max_tokens"] = None  # as many as there is room for
    return out
