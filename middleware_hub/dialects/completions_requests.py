"""Bodies of OpenAI's `POST /v1/completions`, which may also have SGLang's own fields."""

from __future__ import annotations

import re
from typing import Any, cast

from middleware_hub.dialects.completion import CompletionRequest, Prompts
from middleware_hub.dialects.fields import (
    ANYTHING,
    BOOLEAN,
    MOST_SAMPLES,
    MOST_TOP_LOGPROBS,
    STREAM_OPTIONS,
    STRING,
    Fields,
    Kind,
    unsupported,
    wrong,
)
from middleware_hub.dialects.sampling import LARGEST, finish, read_sampling, schema_text
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.engines.form.prompt_fields import read_texts
from router.errors import BadRequestError
from router.http.json_cost import LIGHT

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

_TEXTS = re.compile(rb'\s*(\[\s*)?"')
_PROMPT = "the prompt is `prompt`: a string, a list of strings, a list of token ids, or a list of such lists"
_REFUSED = {
    "text": _PROMPT,
    "input_ids": _PROMPT,
    "input_embeds": _PROMPT,
    "prompt_segments": "the prompt is `prompt`; segments are for /generate",
    "sampling_params": "write its fields at the top level",
    "messages": "they are for /v1/chat/completions",
}
"""Fields of other calls. Dropping them silently would surprise the client; sent on, some of them would be the prompt."""

_Listed = list[str | int | list[int]]
_WRITTEN: Kind[str | _Listed] = Kind(str | _Listed, _PROMPT.removeprefix("the prompt is `prompt`: "))
_SCHEMA: Kind[str | dict[str, Any]] = Kind(str | dict[str, Any], "a JSON schema, as an object or its text")


def parse(body: bytes, limits: PromptLimits = PROMPT_LIMITS) -> CompletionRequest:
    """Parse a body. Raises BadRequestError, whose `param` names the field, and TextTooLongError."""
    fields = Fields(body)
    for key, reason in _REFUSED.items():
        if key in fields and fields.take(key, ANYTHING) is not None:
            raise BadRequestError(f"`{key}` cannot be used here: {reason}", param=key)
    texts, listed = _long_texts(fields, limits)
    written = (texts if listed else texts[0]) if texts else fields.need("prompt", _WRITTEN)
    prompts, batch = _prompts(cast(str | _Listed, written))
    samples = fields.take_within("n", 1, MOST_SAMPLES) or 1
    best_of = fields.take_within("best_of", 1, MOST_SAMPLES)
    if best_of is not None and best_of != samples:
        raise wrong("best_of", best_of, f"the same as `n` ({samples}): all that is sampled is given back")
    if fields.take("suffix", STRING):
        raise unsupported("`suffix` is not supported: nothing can be put between two texts here", "suffix")
    logprobs = fields.take_within("logprobs", 0, MOST_TOP_LOGPROBS)
    echo = fields.take("echo", BOOLEAN) or False
    if echo and logprobs is not None:
        raise unsupported(
            "`echo` together with `logprobs` is not supported: a prompt's logprobs are /generate's, with `logprob_start_len`",
            "echo",
        )
    options = fields.take("stream_options", STREAM_OPTIONS)
    fields.drop(("user", "separate_reasoning", "include_reasoning"))  # a completion's text is not parsed
    return CompletionRequest(
        prompts=prompts,
        batch=batch,
        samples=samples,
        sampling=_sampling(fields, samples),
        stream=fields.take("stream", BOOLEAN) or False,
        stream_usage=bool(options is not None and options.include_usage),
        logprobs=logprobs,
        echo=echo,
        token_ids=fields.take("return_token_ids", BOOLEAN) or False,
        tokens_as_ids=fields.take("return_tokens_as_token_ids", BOOLEAN) or False,
        model=fields.take("model", STRING) or "",
        extra=fields.rest(),
    )


def _long_texts(fields: Fields, limits: PromptLimits) -> tuple[list[str] | None, bool]:
    """Take the texts of a long prompt, and whether they are a list. Any other prompt is left, and None returned."""
    raw = fields.raw("prompt")
    if raw is None or len(raw) <= LIGHT or not _TEXTS.match(raw):
        return None, False
    fields.drop(("prompt",))
    return read_texts({"prompt": raw}, "prompt", limits)


def _prompts(written: str | _Listed) -> tuple[Prompts, bool]:
    """Return the prompts, and whether they are a batch: a list of ids is one prompt."""
    if isinstance(written, str):
        if not written:
            raise BadRequestError("`prompt` is empty: give at least one character", param="prompt")
        return [written], False
    if not written:
        raise BadRequestError("`prompt` is an empty list: give at least one prompt", param="prompt")
    kinds = {type(one) for one in written}
    if len(kinds) > 1:
        raise BadRequestError(
            "`prompt` is a list of several kinds: give strings, token ids, or lists of ids", param="prompt"
        )
    if kinds == {int}:
        return [cast(list[int], written)], False
    for number, one in enumerate(written):
        if not one:
            raise BadRequestError(
                f"`prompt[{number}]` is empty: give at least one character, or one id", param="prompt"
            )
    return cast(Prompts, written), True


def _sampling(fields: Fields, samples: int) -> dict[str, Any]:
    sampling = read_sampling(fields)
    schema = fields.take("json_schema", _SCHEMA)
    if schema:
        if "json_schema" in sampling:
            raise BadRequestError(
                "`json_schema` and `response_format` are both there: give one of them", param="json_schema"
            )
        sampling["json_schema"] = schema if isinstance(schema, str) else schema_text("json_schema", schema)
    limit = fields.take_within("max_tokens", 0, LARGEST)
    finish(sampling, sampling.get("max_new_tokens", DEFAULT_MAX_TOKENS) if limit is None else limit)
    return {**sampling, "n": samples} if samples > 1 else sampling
