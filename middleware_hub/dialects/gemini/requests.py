"""Bodies of `generateContent`, `streamGenerateContent` and `countTokens`, which may also have SGLang's own fields.

The fields are those of https://ai.google.dev/api/generate-content. What other dialects have at the top level, Google's API has
in `generationConfig`: it is renamed here, and read like theirs.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.dialects.fields import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    MOST_SAMPLES,
    MOST_TOP_LOGPROBS,
    OBJECT,
    RAW_OBJECT,
    STRING,
    STRINGS,
    Fields,
    check_depth,
    string,
    unsupported,
    wrong,
)
from middleware_hub.dialects.gemini.contents import read_contents, read_system
from middleware_hub.dialects.gemini.spelling import camel
from middleware_hub.dialects.gemini.tools import json_schema, offered_tools, read_choice
from middleware_hub.dialects.sampling import (
    LARGEST,
    add_stops,
    finish,
    form_field,
    read_sampling,
    sampling_names,
    schema_text,
)
from middleware_hub.dialects.template_variables import read_variables, switch_thinking
from router.engines.form.fields import parse_object
from router.errors import BadRequestError

_OWN = frozenset(
    "contents systemInstruction tools toolConfig generationConfig cachedContent safetySettings labels model serviceTier"
    " store generateContentRequest continuationToken modelArmorConfig".split()
)
_BOOKKEEPING = "labels model serviceTier store".split()
"""Fields for Google's own use."""
_SAFETY = ("safetySettings", "modelArmorConfig")
"""Nothing filters replies here, so a safety setting has nothing to set, which the reply says."""
_OTHER_NAMES = {
    "messages": "contents",
    "input": "contents",
    "prompt": "contents",
    "system": "systemInstruction",
    "instructions": "systemInstruction",
    "max_tokens": "generationConfig.maxOutputTokens",
    "max_completion_tokens": "generationConfig.maxOutputTokens",
    "max_output_tokens": "generationConfig.maxOutputTokens",
    "stop_sequences": "generationConfig.stopSequences",
}
"""Fields of other dialects, and their names here."""
_KEPT_ELSEWHERE = {
    "cachedContent": "nothing is cached by name. Send the whole conversation in `contents`: the engine finds by itself what it"
    " has computed before, and `cachedContentTokenCount` says how much that was",
    "continuationToken": "replies are not kept by name: send the whole conversation in `contents`",
}

_CONFIG = "generationConfig"
_SHARED = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
"""Fields of `generationConfig` that all dialects have, and their names there."""
_INTEGERS = frozenset("topK seed maxOutputTokens candidateCount logprobs thinkingBudget".split())
_HINTS = (
    "mediaResolution enableEnhancedCivicAnswers audioTimestamp speechConfig imageConfig routingConfig"
    " modelSelectionConfig modelConfig".split()
)
"""Fields about what this model neither reads nor writes, and about Google's choice of a model. The reply names them."""
_SCHEMAS = ("responseJsonSchema", "_responseJsonSchema", "responseSchema")
_CONFIG_FIELDS = frozenset(
    (
        *_SHARED,
        *_HINTS,
        *_SCHEMAS,
        *"maxOutputTokens stopSequences candidateCount responseLogprobs logprobs responseMimeType".split(),
        *"responseModalities thinkingConfig".split(),
    )
)
_CLIENTS_NAMES = {_SHARED.get(key, key): f"{_CONFIG}.{key}" for key in _CONFIG_FIELDS}
"""Of the fields of `generationConfig`, by the names that errors have here."""
_THINKING = frozenset("includeThoughts thinkingBudget thinkingLevel".split())
_TEXT, _JSON, _ENUM = "text/plain", "application/json", "text/x.enum"
_INTEGRAL = re.compile(rb"-?[0-9]{1,19}(?:\.0)?")
_LEVELS = ("minimal", "low", "medium", "high")


def parse(body: bytes, *, model: str, stream: bool) -> ChatRequest:
    """Read a body. Raises BadRequestError with `param`, the wrong field."""
    request = _read(_spelled(parse_object(body), _OWN), model, stream=stream)
    last = request.messages[-1]
    if last["role"] == "assistant" and "tool_calls" in last:
        raise BadRequestError("`contents` ends with function calls: their responses have to follow", param="contents")
    return msgspec.structs.replace(request, continue_final=last["role"] == "assistant")


def parse_count(body: bytes, *, model: str) -> ChatRequest:
    """Read a body for which nothing is sampled. Raises BadRequestError."""
    given = _spelled(parse_object(body), _OWN)
    inner = Fields(given).take("generateContentRequest", RAW_OBJECT)
    request = _read(given if inner is None else _spelled(inner, _OWN), model, stream=False)
    last = request.messages[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last
    return msgspec.structs.replace(request, continue_final=continues)


def _spelled(given: dict[str, Raw], known: frozenset[str]) -> dict[str, Raw]:
    """Return an object with Google's names in camel case. Others are SGLang's own."""
    return {own if (own := camel(name)) in known else name: raw for name, raw in given.items()}


def _integer(raw: Raw) -> Raw:
    """Return an integer in its usual form. Google's servers read `40.0` and `"40"` as well; its library writes the first."""
    text = bytes(raw).strip().strip(b'"')
    return Raw(text.removesuffix(b".0")) if _INTEGRAL.fullmatch(text) else raw


def _read(given: dict[str, Raw], model: str, *, stream: bool) -> ChatRequest:
    for key in _OTHER_NAMES.keys() & given.keys():
        raise BadRequestError(f"`{key}` is `{_OTHER_NAMES[key]}` in Google's API", param=key)
    config = _spelled(Fields(given).peek(_CONFIG, RAW_OBJECT) or {}, _CONFIG_FIELDS)
    for key in config:
        if key not in _CONFIG_FIELDS and key not in sampling_names():
            raise BadRequestError(f"`{_CONFIG}.{key[:60]}` is not known here", param=f"{_CONFIG}.{key[:60]}")
    config |= {key: _integer(config[key]) for key in _INTEGERS & config.keys()}
    own = Fields({key: raw for key, raw in config.items() if key in _CONFIG_FIELDS and key not in _SHARED})
    shared = {_SHARED.get(key, key): raw for key, raw in config.items() if key not in own}
    fields = Fields({**{key: raw for key, raw in given.items() if key != _CONFIG}, **shared})
    for key in fields.present(_KEPT_ELSEWHERE):
        if fields.take(key, ANYTHING):
            raise unsupported(f"`{key}` is not supported: {_KEPT_ELSEWHERE[key]}", key)
    system = fields.take("systemInstruction", ANYTHING)
    told = "" if system is None else read_system("systemInstruction", system)
    front: list[Message] = [{"role": "system", "content": told}] if told else []
    messages = [*front, *read_contents(fields.take("contents", ANYTHING))]
    try:
        return _request(fields, own, model, messages, stream=stream)
    except BadRequestError as error:
        name = error.details.get("param")
        if isinstance(name, str) and (clients := _CLIENTS_NAMES.get(name)) is not None:
            error.message = error.message.replace(f"`{name}`", f"`{clients}`", 1)
            error.details["param"] = clients
        raise


def _request(fields: Fields, own: Fields, model: str, messages: list[Message], *, stream: bool) -> ChatRequest:
    """Return the request. `own` are the fields of `generationConfig` that other dialects have elsewhere, or not at all."""
    sampling = read_sampling(fields)
    add_stops(sampling, "stopSequences", own.take("stopSequences", STRINGS))
    shaped = form_field(sampling)
    shaped = _add_format(own, sampling) or shaped
    template = read_variables(fields)
    shows = _add_thinking(own, template)
    wants = own.take("responseLogprobs", BOOLEAN) or False
    top = own.take_within("logprobs", 0, MOST_TOP_LOGPROBS) or 0
    if top and not wants:
        raise BadRequestError("`logprobs` needs `responseLogprobs` to be true", param="logprobs")
    modalities = own.take("responseModalities", STRINGS) or []
    if any(one.upper() not in ("TEXT", "MODALITY_UNSPECIFIED") for one in modalities):
        raise unsupported(
            '`responseModalities` must be ["TEXT"]: this model\'s replies are texts', "responseModalities"
        )
    offered = offered_tools("tools", fields.take("tools", ANYTHING))
    choice, allowed = read_choice(fields.take("toolConfig", ANYTHING), offered, shaped)
    fields.drop(_BOOKKEEPING)
    ignored = (*fields.ignored(_SAFETY), *(f"{_CONFIG}.{key}" for key in own.ignored(_HINTS)), *offered.ignored_fields)
    return ChatRequest(
        messages=messages,
        tools=offered.shown or None,
        ignored_tools=tuple(offered.ignored),
        ignored_fields=ignored,
        template=template,
        sampling=finish(sampling, own.take_within("maxOutputTokens", 1, LARGEST)),
        samples=own.take_within("candidateCount", 1, MOST_SAMPLES) or 1,
        stream=stream,
        stream_usage=True,
        include_reasoning=shows,
        call_choice=choice,
        allowed=allowed,
        logprobs=wants,
        top_logprobs=top,
        token_ids=fields.take("return_token_ids", BOOLEAN) or False,
        model=model,
        extra=fields.rest(),
    )


def _add_format(own: Fields, sampling: dict[str, Any]) -> str | None:
    """Read the form of the reply, and return the field that sets it; None if none does. Raises BadRequestError."""
    mime = (own.take("responseMimeType", STRING) or _TEXT).lower()
    schemas = {key: schema for key in _SCHEMAS if (schema := own.take(key, OBJECT)) is not None}
    if mime not in (_TEXT, _JSON, _ENUM):
        raise wrong("responseMimeType", mime, f'"{_TEXT}", "{_JSON}" or "{_ENUM}"')
    if len(schemas) > 1:
        raise BadRequestError(f"only one of {', '.join(schemas)} can hold for a reply", param=[*schemas][1])
    place, schema = next(iter(schemas.items()), ("responseMimeType", None))
    if schema is not None:
        check_depth(place, schema)
        schema = json_schema(place, schema) if place == "responseSchema" else schema
    if mime == _ENUM:
        words = None if schema is None else schema.get("enum")
        if type(words) is not list or not words:
            raise BadRequestError(
                f'`responseMimeType` "{_ENUM}" needs a schema with an `enum`', param="responseMimeType"
            )
        sampling["regex"] = "|".join(re.escape(string(f"{place}.enum", word)) for word in words if word is not None)
    elif schema is not None:
        sampling["json_schema"] = schema_text(place, schema)
    elif mime == _JSON:
        sampling["json_schema"] = '{"type": "object"}'
    else:
        return None
    return f"{_CONFIG}.{place}"


def _add_thinking(own: Fields, template: dict[str, Any]) -> bool:
    """Read `thinkingConfig`, and return whether the reply shows thoughts. Raises BadRequestError."""
    thinking = _spelled(own.take("thinkingConfig", RAW_OBJECT) or {}, _THINKING)
    thinking |= {key: _integer(thinking[key]) for key in _INTEGERS & thinking.keys()}
    fields, place = Fields(thinking), f"{_CONFIG}.thinkingConfig"
    for key in thinking:
        if key not in _THINKING:
            raise BadRequestError(f"`{place}.{key[:60]}` is not known here", param=f"{place}.{key[:60]}")
    budget, level = fields.take("thinkingBudget", INTEGER), fields.take("thinkingLevel", STRING)
    if budget is not None and budget < -1:
        raise wrong(
            f"{place}.thinkingBudget", budget, "-1 (as much as the model likes), 0 (none), or a number of tokens"
        )
    if level is not None and (level := level.lower()) not in (*_LEVELS, "thinking_level_unspecified"):
        raise wrong(f"{place}.thinkingLevel", level, ", ".join(f'"{one.upper()}"' for one in _LEVELS))
    if level in _LEVELS:
        template.setdefault("reasoning_effort", level)
        switch_thinking(template, True)
    if budget is not None and budget >= 0:
        switch_thinking(template, budget > 0)
    return fields.take("includeThoughts", BOOLEAN) or False
