"""Bodies of OpenAI's `POST /v1/chat/completions`, which may also have SGLang's own fields."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import Raw

from middleware_hub.chat.memo import Memo
from middleware_hub.chat.messages import CUSTOM, FUNCTION, ChatRequest, Message, ToolForm
from middleware_hub.dialects.fields import (
    ANYTHING,
    BOOLEAN,
    MOST_SAMPLES,
    MOST_TOP_LOGPROBS,
    OBJECTS,
    STREAM_OPTIONS,
    STRING,
    STRINGS,
    Fields,
    Kind,
    check_depth,
    read_arguments,
    string,
    unsupported,
    wrong,
)
from middleware_hub.dialects.messages import (
    assistant_message,
    each_message,
    open_body,
    part_text,
    said,
    told,
    tool_call,
    whole_request,
    written,
)
from middleware_hub.dialects.sampling import LARGEST, finish, form_field, read_sampling
from middleware_hub.dialects.template_variables import read_variables
from middleware_hub.dialects.tools import (
    ANY,
    AUTO,
    NONE,
    OfferedTools,
    check_name,
    read_choice,
)
from router.engines.json import decode_any
from router.errors import BadRequestError

_BOOKKEEPING = (
    "user metadata store service_tier prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier"
    " prediction".split()
)
"""Fields for OpenAI's own use. `prediction` is to save time only."""
_HINTS = ("verbosity", "moderation")
"""Fields that have no effect here, which the reply says."""
_SHOWN_ELSEWHERE = (
    "return_prompt_text return_cached_tokens_details return_spec_tokens_details return_input_ids_in_sglext"
    " return_output_ids_in_sglext".split()
)
"""What a reply of an engine's own endpoint shows besides."""
_SEARCH = "web_search_options"
"""Asks for a search of OpenAI's, also if it is `{}`."""

_SYSTEM_PROMPT = "a system prompt is the first of the `messages`"
_CONVERSATION = "`messages` has the whole conversation"
_OTHER_NAMES = {
    "system": _SYSTEM_PROMPT,
    "instructions": _SYSTEM_PROMPT,
    "input": _CONVERSATION,
    "prompt": _CONVERSATION,
    "contents": _CONVERSATION,
    "conversation": _CONVERSATION,
    "previous_response_id": _CONVERSATION,
    "max_output_tokens": "the limit is `max_completion_tokens`",
    "stop_sequences": "strings to stop at are in `stop`",
}
"""Fields of other dialects, which a worker would pass over."""

_SYSTEM = ("system", "developer")
_ROLES = '"system", "developer", "user", "assistant" or "tool"'
_ECHOED = ("content", "refusal", "tool_calls", "function_call", "parsed", "reasoning_content", "reasoning", "prefix")
"""Keys of an assistant's message that are read here, and keys that SDKs add to it for their own use."""

_CHOICE: Kind[str | dict[str, Any]] = Kind(str | dict[str, Any], "a string, or an object that names a function")


def parse(body: bytes, memo: Memo | None = None) -> ChatRequest:
    """Read a body. Raises BadRequestError with `param`, the wrong field."""
    opened = open_body(body, memo)
    read = each_message(opened, _message)
    request = _read(opened.rest) if isinstance(opened.rest, Fields) else opened.rest
    continues = _continues(request, read[-1][-1], opened.listed[-1])
    return whole_request(body, opened, request, read, memo=memo, continue_final=continues)


def _read(fields: Fields) -> ChatRequest:
    """Read everything except the messages. `continue_final` is the value of the field of that name."""
    fields.refuse_others(_OTHER_NAMES, "chat completions")
    old_calls = "functions" in fields and "tools" not in fields
    offered = _tools(fields)
    sampling = read_sampling(fields)
    older = fields.take_within("max_tokens", 1, LARGEST)
    newer = fields.take_within("max_completion_tokens", 1, LARGEST)
    options = fields.take("stream_options", STREAM_OPTIONS)
    top_logprobs = fields.take_within("top_logprobs", 0, MOST_TOP_LOGPROBS) or 0
    logprobs = fields.take("logprobs", BOOLEAN) or False
    if top_logprobs and not logprobs:
        raise BadRequestError("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    modalities = fields.take("modalities", STRINGS)
    if modalities and modalities != ["text"]:
        raise unsupported('`modalities` must be ["text"]: this model\'s replies are texts', "modalities")
    fields.drop(_BOOKKEEPING)
    searches = fields.take(_SEARCH, ANYTHING) is not None
    ignored = (*fields.ignored(_HINTS), *((_SEARCH,) if searches else ()))
    ignored += tuple(key for key in fields.present(_SHOWN_ELSEWHERE) if fields.take(key, BOOLEAN))
    if options is not None and options.continuous_usage_stats:
        ignored += ("stream_options.continuous_usage_stats",)
    continues = fields.take("continue_final_message", BOOLEAN) or False
    _check_rendering(fields, continues=continues)
    choice, allowed = _choice(fields, offered, sampling)
    return ChatRequest(
        messages=(),
        tools=offered.shown or None,
        deferred=tuple(offered.deferred),
        forms=offered.forms,
        ignored_fields=ignored,
        template=read_variables(fields),
        sampling=finish(sampling, older if newer is None else newer),
        samples=fields.take_within("n", 1, MOST_SAMPLES) or 1,
        stream=fields.take("stream", BOOLEAN) or False,
        stream_usage=bool(options is not None and options.include_usage),
        continue_final=continues,
        parallel_calls=fields.take("parallel_tool_calls", BOOLEAN) is not False and not old_calls,
        old_calls=old_calls,
        separate_reasoning=fields.take("separate_reasoning", BOOLEAN) is not False,
        include_reasoning=fields.take("include_reasoning", BOOLEAN) is not False,
        call_choice=choice,
        allowed=allowed,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        token_ids=fields.take("return_token_ids", BOOLEAN) or False,
        tokens_as_ids=fields.take("return_tokens_as_token_ids", BOOLEAN) or False,
        model=fields.take("model", STRING) or "",
        extra=fields.rest(),
    )


def _check_rendering(fields: Fields, *, continues: bool) -> None:
    """Raise BadRequestError for one of vLLM's fields that would give another prompt, or another text, than is given here."""
    if fields.take("add_generation_prompt", BOOLEAN) is False and not continues:
        raise BadRequestError(
            "`add_generation_prompt` can be false only with `continue_final_message`: any other reply begins behind the"
            " template's generation prompt",
            param="add_generation_prompt",
        )
    if fields.take("add_special_tokens", BOOLEAN):
        raise BadRequestError(
            "`add_special_tokens` cannot be true: a prompt has the special tokens that the chat template writes",
            param="add_special_tokens",
        )
    if fields.take("echo", BOOLEAN):
        raise BadRequestError("`echo` cannot be true: a reply has only the text that was sampled", param="echo")


def _message(place: str, wrote: dict[str, Any]) -> tuple[Message]:
    """Return one message. Its known keys are taken out of `wrote`, and the others kept."""
    role = wrote.pop("role", None)
    if role == "assistant":
        message = _assistant(place, wrote)
    else:
        read = written if role in ("tool", "function") else told
        content = read(f"{place}.content", wrote.pop("content", None))
        if role == "user":
            if content is None:
                raise BadRequestError(f"`{place}.content` is missing: it must be a string", param=f"{place}.content")
            message = {"role": "user", "content": content}
        elif role in _SYSTEM:
            message = {"role": "system", "content": content or ""}
        elif role == "tool" or role == "function":
            message = {"role": "tool", "content": content or ""}
        else:
            raise wrong(f"{place}.role", role, _ROLES)
    for key, value in wrote.items():
        if value is None or value == "" or value == []:
            continue
        if key == "name" or key == "tool_call_id":
            string(f"{place}.{key}", value)
        elif key == "tool_calls":
            value = _calls(f"{place}.tool_calls", value)
        elif type(value) is dict or type(value) is list:
            check_depth(f"{place}.{key}", value)
        message[key] = value
    return (message,)


def _assistant(place: str, wrote: dict[str, Any]) -> Message:
    content, thought = wrote.get("content"), ""
    if type(content) is not str:
        content, thought = _thought_and_said(f"{place}.content", content)
    reasoning = wrote.get("reasoning_content") or wrote.get("reasoning") or thought
    calls = wrote.get("tool_calls")
    if wrote.get("audio") is not None:
        raise unsupported(f"`{place}.audio` cannot be read: this model takes text only", f"{place}.audio")
    if not content and wrote.get("refusal"):
        content = string(f"{place}.refusal", wrote["refusal"])
    if reasoning:
        string(f"{place}.reasoning_content", reasoning)
    if calls:
        calls = _calls(f"{place}.tool_calls", calls)
    elif wrote.get("function_call"):
        calls = [_call(f"{place}.function_call", {"function": wrote["function_call"]})]
    for key in _ECHOED:
        wrote.pop(key, None)
    return assistant_message(content, reasoning or "", calls or ())


def _thought_and_said(place: str, content: Any) -> tuple[str, str]:
    """Return the text of an assistant's content, and the reasoning in its parts, which SGLang and others take there."""
    if type(content) is not list:
        return said(place, content), ""
    thought, parts = [], []
    for at, part in enumerate(content):
        kind = part.get("type") if type(part) is dict else None
        if kind not in ("thinking", "reasoning"):
            parts.append(part_text(f"{place}[{at}]", part))
            continue
        given = next((part[key] for key in (kind, "text") if part.get(key) is not None), "")
        # Mistral's are lists of parts in turn.
        thought.append(said(f"{place}[{at}].{kind}", given))
    return "".join(parts), "".join(thought)


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    if type(calls) is not list:
        raise wrong(place, calls, "a list of calls")
    return [_call(f"{place}[{at}]", call) for at, call in enumerate(calls)]


def _call(place: str, call: Any) -> dict[str, Any]:
    """Return one call, without the additions of streams and SDKs (`index`, `parsed_arguments`)."""
    if type(call) is not dict:
        raise wrong(place, call, "an object with `id` and `function`")
    if call.get("type") == CUSTOM:
        return _custom_call(place, call)
    if call.get("type") not in (FUNCTION, None):
        raise wrong(f"{place}.type", call["type"], '"function" or "custom": no other tools can be called here')
    function = call.get("function")
    if type(function) is not dict:
        raise wrong(f"{place}.function", function, "an object with `name` and `arguments`")
    call_id, arguments = call.get("id"), read_arguments(f"{place}.function.arguments", function.get("arguments", ""))
    if call_id is not None:
        string(f"{place}.id", call_id)
    return tool_call(call_id, string(f"{place}.function.name", function.get("name")), arguments)


def _custom_call(place: str, call: dict[str, Any]) -> dict[str, Any]:
    custom, call_id = call.get(CUSTOM), call.get("id")
    if type(custom) is not dict:
        raise wrong(f"{place}.custom", custom, "an object with `name` and `input`")
    if call_id is not None:
        string(f"{place}.id", call_id)
    text = {"input": string(f"{place}.custom.input", custom.get("input"))}
    return tool_call(call_id, string(f"{place}.custom.name", custom.get("name")), text)


def _tools(fields: Fields) -> OfferedTools:
    tools = fields.take("tools", OBJECTS) or []
    functions = fields.take("functions", OBJECTS) or []
    offered = OfferedTools()
    for at, tool in enumerate(tools):
        _offer(offered, f"tools[{at}]", tool)
    for at, function in enumerate(functions):
        offered.add(f"functions[{at}]", {"function": function})
    return offered


def _offer(offered: OfferedTools, place: str, tool: dict[str, Any]) -> None:
    if tool.get("type") != CUSTOM:
        offered.add(place, tool)
        return
    custom = tool.get(CUSTOM)
    if type(custom) is not dict:
        raise wrong(f"{place}.custom", custom, "an object with the `name` of the tool")
    check_depth(place, tool)
    name, form = check_name(f"{place}.custom.name", custom.get("name")), custom.get("format")
    grammar = form.get("grammar") if type(form) is dict else None
    offered.add_custom(place, custom, grammar if type(grammar) is dict else {}, name, form=ToolForm(CUSTOM, name))


def _choice(fields: Fields, offered: OfferedTools, sampling: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the choice, and the names of the tools that are allowed; none if all are. Raises BadRequestError."""
    key, older = "tool_choice", fields.take("function_call", _CHOICE)
    wanted = fields.take(key, _CHOICE)
    if wanted is None and older is not None:
        key, wanted = "function_call", older if isinstance(older, str) else {"function": older}
    return read_choice(wanted, key, offered, partial(_chosen, offered), form=form_field(sampling), nested=True)


def _chosen(offered: OfferedTools, wanted: dict[str, Any], place: str) -> str:
    """Return the name in the prompt of the tool that an object names. Raises BadRequestError."""
    kind = wanted.get("type", FUNCTION)
    named = wanted.get(kind) if kind in (FUNCTION, CUSTOM) else None
    if type(named) is not dict:
        raise wrong(place, wanted, f'"{NONE}", "{AUTO}", "{ANY}", or an object that names a function')
    return offered.called(kind, string(f"{place}.{kind}.name", named.get("name")))


def _continues(request: ChatRequest, last: Message, wrote: Raw) -> bool:
    """Return whether the last message is to be continued. Raises BadRequestError if that is impossible."""
    asked = request.continue_final
    if not asked and last["role"] == "assistant":
        text = bytes(wrote)  # with `prefix`, which is DeepSeek's name for the beginning of a reply
        asked = b'"prefix"' in text and decode_any(text).get("prefix") is True
    if asked and (last["role"] != "assistant" or "tool_calls" in last):
        raise BadRequestError(
            "`continue_final_message` needs a last message of the assistant's, without tool calls",
            param="continue_final_message",
        )
    return asked
