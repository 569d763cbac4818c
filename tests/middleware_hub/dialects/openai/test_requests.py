"""What OpenAI's chat completions mean, with SGLang's fields beside them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.openai import OpenAI
from router.errors import BadRequestError
from tests.middleware_hub.dialects.drawn import VALUES
from tests.middleware_hub.dialects.refused import nested, refused
from tests.support.depths import limited

PARSE = OpenAI().parse
USER = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def parse(**fields: Any) -> ChatRequest:
    return PARSE(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode())


def message(wrote: dict[str, Any]) -> dict[str, Any]:
    return dict(parse(messages=[wrote]).messages[0])


def error(**fields: Any) -> BadRequestError:
    return refused(PARSE, {"model": "tiny", "messages": [USER], **fields})


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}


# Messages ----------------------------------------------------------------------------------------------------------------


def test_the_least_there_can_be() -> None:
    assert parse() == ChatRequest(messages=[USER], model="tiny", call_choice="none")


@pytest.mark.parametrize(
    ("wrote", "meant"),
    [
        ({"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        ({"role": "system", "content": None}, {"role": "system", "content": ""}),
        ({"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "a", "name": "Ann"}),
        ({"role": "user", "content": "a", "name": None, "weight": 0}, {"role": "user", "content": "a", "weight": 0}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "a"}),
        (
            {"role": "tool", "content": "42", "tool_call_id": "c"},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ),
        ({"role": "tool"}, {"role": "tool", "content": ""}),
        ({"role": "function", "name": "f", "content": "42"}, {"role": "tool", "name": "f", "content": "42"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "user", "content": "a", "more": nested(200)},
            {"role": "user", "content": "a", "more": nested(200)},
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        ({"role": "assistant", "content": "a", "refusal": "No."}, {"role": "assistant", "content": "a"}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}, {"type": "text", "text": "."}]},
            {"role": "assistant", "content": "No."},
        ),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
        (
            {**called("{}"), "function_call": {"name": "older", "arguments": "{}"}},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
        (
            {"role": "assistant", "content": "a", "thinking_blocks": [{"thinking": "b"}], "annotations": []},
            {"role": "assistant", "content": "a", "thinking_blocks": [{"thinking": "b"}]},
        ),
    ],
)
def test_a_message(wrote: dict[str, Any], meant: dict[str, Any]) -> None:
    assert message(wrote) == meant


def test_several_parts_of_text_stay_parts() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {}},
        {"type": "text", "text": ""},
        {"type": "text", "text": "b"},
    ]
    assert message({"role": "user", "content": parts})["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ('{"b": 1,\n "a": [2]}', {"b": 1, "a": [2]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" \n", {}),
        (None, "null"),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ("4", "4"),
        (5, "5"),
        ([1, {"a": 2}], '[1,{"a":2}]'),
        ("null", "null"),
        ('{"a": 1} and more', '{"a": 1} and more'),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_arguments_are_objects_where_they_can_be(arguments: Any, meant: Any) -> None:
    assert message(called(arguments))["tool_calls"][0]["function"]["arguments"] == meant


def test_arguments_that_nobody_could_print_stay_text() -> None:
    deep = json.dumps(nested(201))
    assert message(called(deep))["tool_calls"][0]["function"]["arguments"] == deep
    assert message(called(json.dumps(nested(200))))["tool_calls"][0]["function"]["arguments"] == nested(200)
    bomb = '{"a":' * 100_000
    assert message(called(bomb))["tool_calls"][0]["function"]["arguments"] == bomb


def test_ids_of_calls_may_be_missing_or_double() -> None:
    calls = [
        {"function": {"name": "f"}},
        {"id": "c", "function": {"name": "f"}},
        {"id": "c", "function": {"name": "g"}},
    ]
    found = message({"role": "assistant", "tool_calls": calls})["tool_calls"]
    assert [call.get("id", "left out") for call in found] == ["left out", "c", "c"]


def test_what_streams_and_libraries_add_to_a_call_is_left_out() -> None:
    call = {
        "index": 0,
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
    }
    assert message({"role": "assistant", "content": None, "tool_calls": [call], "parsed": {"a": 1}}) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
    }


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url"])
def test_what_is_not_text_is_refused_by_name(kind: str) -> None:
    found = error(
        messages=[USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]
    )
    assert found.details == {"param": "messages[1].content[1]", "code": "unsupported_content"}
    assert kind in found.message
    assert "text only" in found.message


@pytest.mark.parametrize(
    ("wrote", "param", "said"),
    [
        ({"content": "a"}, "messages[0].role", "null"),
        ({"role": "root", "content": "a"}, "messages[0].role", '"root"'),
        ({"role": ["user"], "content": "a"}, "messages[0].role", "a list"),
        ({"role": "user"}, "messages[0].content", "missing"),
        ({"role": "user", "content": []}, "messages[0].content", "missing"),
        ({"role": "user", "content": 4}, "messages[0].content", "4"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content", "an object"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]", '"a"'),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[0].content[0].type", "null"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "null"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text", "1"),
        ({"role": "user", "content": "a", "name": 5}, "messages[0].name", "5"),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, "messages[0].tool_call_id", "5"),
        ({"role": "assistant", "reasoning_content": ["a"]}, "messages[0].reasoning_content", "a list"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[0].audio", "text only"),
        ({"role": "assistant", "tool_calls": "a"}, "messages[0].tool_calls", '"a"'),
        ({"role": "assistant", "tool_calls": ["a"]}, "messages[0].tool_calls[0]", '"a"'),
        ({"role": "user", "content": "a", "tool_calls": "a"}, "messages[0].tool_calls", '"a"'),
        ({"role": "tool", "content": "a", "tool_calls": ["a"]}, "messages[0].tool_calls[0]", '"a"'),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function", "null"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]},
            "messages[0].tool_calls[0].custom.input",
            "a string",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].id",
            "1",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[0].tool_calls[0].function.name",
            "null",
        ),
        (called(nested(201)), "messages[0].tool_calls[0].function.arguments", "levels"),
        ({"role": "user", "content": "a", "more": nested(201)}, "messages[0].more", "levels"),
        ({"role": "user", "content": "a", "more": [nested(200)]}, "messages[0].more", "levels"),
    ],
)
def test_a_message_that_is_none(wrote: dict[str, Any], param: str, said: str) -> None:
    found = error(messages=[wrote])
    assert found.details["param"] == param
    assert f"`{param}`" in found.message
    assert said in found.message


# Sampling ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "name", "meant"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_k", -1, "top_k", -1),
        ("min_p", 1, "min_p", 1.0),
        ("frequency_penalty", -2, "frequency_penalty", -2.0),
        ("presence_penalty", 2, "presence_penalty", 2.0),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("seed", -1, "sampling_seed", -1),
        ("min_tokens", 3, "min_new_tokens", 3),
        ("sampling_seed", 7, "sampling_seed", 7),
        ("min_new_tokens", 3, "min_new_tokens", 3),
        ("max_new_tokens", 3, "max_new_tokens", 3),
        ("max_tokens", 3, "max_new_tokens", 3),
        ("max_completion_tokens", 3, "max_new_tokens", 3),
        ("stop", "END", "stop", ["END"]),
        ("stop", ["a", "b"], "stop", ["a", "b"]),
        ("stop_token_ids", [1, 2], "stop_token_ids", [1, 2]),
        ("stop_regex", "a+", "stop_regex", ["a+"]),
        ("stop_regex", ["a"] * 32, "stop_regex", ["a"] * 32),
        ("ignore_eos", True, "ignore_eos", True),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("no_stop_trim", True, "no_stop_trim", True),
        ("logit_bias", {"5": -100}, "logit_bias", {"5": -100.0}),
        ("custom_params", {"a": [1]}, "custom_params", {"a": [1]}),
        ("regex", "a|b", "regex", "a|b"),
        ("ebnf", "root ::= x", "ebnf", "root ::= x"),
        ("response_format", {"type": "json_object"}, "json_schema", '{"type": "object"}'),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
            "json_schema",
            '{"type":"array"}',
        ),
        ("response_format", {"type": "json_schema", "schema": {"b": 1, "a": 2}}, "json_schema", '{"b":1,"a":2}'),
        (
            "response_format",
            {"type": "structural_tag", "structures": [], "triggers": []},
            "structural_tag",
            '{"type":"structural_tag","structures":[],"triggers":[]}',
        ),
    ],
)
def test_a_sampling_parameter(field: str, value: Any, name: str, meant: Any) -> None:
    assert parse(**{field: value}).sampling == {name: meant}


@pytest.mark.parametrize(
    "field", ["temperature", "stop", "seed", "max_tokens", "regex", "response_format", "n", "tools"]
)
def test_null_is_nothing(field: str) -> None:
    assert parse(**{field: None}) == parse()


@pytest.mark.parametrize(("field", "value"), [("stop", []), ("regex", ""), ("response_format", {"type": "text"})])
def test_what_asks_for_nothing_is_nothing(field: str, value: Any) -> None:
    assert parse(**{field: value}).sampling == {}


def test_of_two_limits_the_newer_field_wins() -> None:
    assert parse(max_tokens=3, max_completion_tokens=9).sampling == {"max_new_tokens": 9}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("min_p", -1),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("seed", "a"),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_completion_tokens", 0),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 33),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("stop_regex", "("),
        ("stop_regex", "a" * 257),
        ("stop_regex", ["a"] * 33),
        ("stop", ["a", "b" * 4097]),
        ("logit_bias", {"the": 1}),
        ("logit_bias", {"1": "a"}),
        ("ignore_eos", 1),
        ("custom_params", []),
        ("custom_params", nested(201)),
        ("n", 0),
        ("n", 129),
        ("top_logprobs", 21),
        ("top_logprobs", 1),
        ("logprobs", 3),
        ("stream", "yes"),
        ("stream_options", True),
        ("model", 5),
        ("tools", {}),
        ("parallel_tool_calls", "no"),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", nested(201)),
        ("reasoning_effort", True),
        ("documents", "a"),
        ("modalities", ["audio"]),
        ("continue_final_message", True),
        ("messages", None),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", ["Hi"]),
    ],
)
def test_a_field_that_cannot_be_meant_is_named(field: str, value: Any) -> None:
    found = error(**{field: value})
    assert str(found.details["param"]).partition("[")[0] == field
    assert f"`{field}" in found.message


@pytest.mark.parametrize(
    "value",
    [{}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": "a"}}],
)
def test_a_response_format_that_is_none(value: Any) -> None:
    assert str(error(response_format=value).details["param"]).startswith("response_format.")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    refused(PARSE, b'{"messages": [{"role": "user", "content": "a"}], "temperature": %b}' % number.encode())


def test_only_one_grammar_can_hold() -> None:
    assert "regex" in error(regex="a", response_format={"type": "json_object"}).message
    assert parse(regex="a", ebnf="").sampling == {"regex": "a"}


def test_the_least_is_not_more_than_the_most() -> None:
    assert error(min_tokens=4, max_tokens=3).details["param"] == "min_tokens"
    assert parse(min_tokens=3, max_tokens=3).sampling == {"min_new_tokens": 3, "max_new_tokens": 3}
    assert error(min_new_tokens=4, max_new_tokens=3).details["param"] == "min_tokens"
    assert parse(max_new_tokens=5, max_tokens=3).sampling == {"max_new_tokens": 3}


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_an_older_name_of_a_grammar_is_refused_with_the_one_to_use(field: str) -> None:
    assert error(**{field: ["yes", "no"]}).details["param"] == field


# Tools -------------------------------------------------------------------------------------------------------------------


def test_tools_are_kept_as_they_were_written() -> None:
    odd = {"function": {"strict": None, "name": "odd", "x": 1}, "type": "function", "y": 2}
    assert json.dumps(parse(tools=[odd]).tools) == json.dumps([odd])


def test_switches_of_thinking_are_read_at_the_top_level() -> None:
    for field in ("enable_thinking", "thinking"):
        for value in (True, False):
            assert parse(**{field: value}).template == {"enable_thinking": value, "thinking": value}
    assert parse(enable_thinking=False, chat_template_kwargs={"enable_thinking": True}).template == {
        "enable_thinking": True,
        "thinking": False,
    }
    assert parse(enable_thinking=None) == parse()
    assert error(enable_thinking="false").details["param"] == "enable_thinking"


def test_switches_of_how_reasoning_is_shown() -> None:
    assert not parse(separate_reasoning=False).separate_reasoning
    assert not parse(include_reasoning=False).include_reasoning
    assert parse(separate_reasoning=True, include_reasoning=True) == parse()
    assert error(separate_reasoning="no").details["param"] == "separate_reasoning"


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer", "tool"])
def test_parts_of_text_are_text_whatever_dialect_names_them(role: str, kind: str) -> None:
    parts = [{"type": kind, "text": "a", "annotations": []}]
    assert parse(messages=[{"role": role, "content": parts}]) == parse(messages=[{"role": role, "content": "a"}])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "thinking", "text": "Hm."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "reasoning", "text": "Hm."},
        {"type": "reasoning", "reasoning": "Hm."},
    ],
)
def test_parts_of_reasoning_are_reasoning(part: dict[str, Any]) -> None:
    found = parse(messages=[{"role": "assistant", "content": [part, {"type": "output_text", "text": "Yes."}]}])
    assert found == parse(messages=[{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}])
    refused = error(messages=[{"role": "user", "content": [part]}])
    assert refused.details["param"] == "messages[0].content[0]"
    assert "only messages of the assistant" in refused.message


def test_older_functions_are_tools() -> None:
    request = parse(functions=[ADD["function"]], function_call={"name": "add"})
    assert json.dumps(request.tools) == json.dumps([ADD])
    assert request.call_choice == "add"
    assert parse(functions=[ADD["function"]], function_call="none").call_choice == "none"
    both = parse(functions=[ADD["function"]], function_call="none", tool_choice="required")
    assert both.call_choice == "required"


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "add"}}, "add"),
    ],
)
def test_which_tool_to_call(choice: Any, meant: str) -> None:
    assert parse(tools=[ADD], tool_choice=choice).call_choice == meant


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_is_a_call(tools: Any) -> None:
    request = parse(tools=tools, tool_choice="auto")
    assert (request.tools, request.call_choice) == (None, "none")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_cannot_be_required_without_tools(choice: Any) -> None:
    assert error(tool_choice=choice).details["param"] == "tool_choice"


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        {"type": "allowed_tools", "allowed_tools": {}},
        {"type": "function", "function": {"name": "sub"}},
        {"type": "function", "function": {}},
        {"type": "function"},
    ],
)
def test_a_choice_that_is_none(choice: Any) -> None:
    assert str(error(tools=[ADD], tool_choice=choice).details["param"]).startswith("tool_choice")


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "tools[0].function"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": 1}, "tools[0].custom"),
        ({"type": "web_search"}, "tools[0].type"),
        ({"type": "function", "name": "f"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": ""}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "f", "parameters": nested(200)}}, "tools[0]"),
    ],
)
def test_a_tool_that_is_none(tool: dict[str, Any], param: str) -> None:
    assert error(tools=[tool]).details["param"] == param


def test_parallel_calls() -> None:
    assert parse().parallel_calls
    assert not parse(parallel_tool_calls=False).parallel_calls


# The rest ----------------------------------------------------------------------------------------------------------------


def test_how_the_reply_comes() -> None:
    request = parse(n=3, stream=True, stream_options={"include_usage": True, "x": 1}, logprobs=True, top_logprobs=2)
    assert (request.samples, request.stream, request.stream_usage) == (3, True, True)
    assert (request.logprobs, request.top_logprobs) == (True, 2)
    assert not parse(stream_options={}).stream_usage
    for named in ({"return_token_ids": True}, {"return_tokens_as_token_ids": True}, {}):
        found = parse(**named)
        assert {"return_token_ids": found.token_ids, "return_tokens_as_token_ids": found.tokens_as_ids} == {
            "return_token_ids": False,
            "return_tokens_as_token_ids": False,
            **named,
        }
        assert not found.extra


def test_variables_of_the_template() -> None:
    assert parse(chat_template_kwargs={"a": 1}, documents=[{"text": "x"}]).template == {
        "a": 1,
        "documents": [{"text": "x"}],
    }
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert parse(reasoning_effort="none").template == off
    assert parse(reasoning={"effort": "none"}).template == off
    on = {"enable_thinking": True, "thinking": True}
    assert parse(reasoning_effort="low").template == {"reasoning_effort": "low", **on}
    assert parse(thinking={"type": "enabled"}).template == parse(reasoning={"enabled": True}).template == on


def test_a_clients_own_variables_win() -> None:
    own = {"enable_thinking": True, "reasoning_effort": "high"}
    assert parse(reasoning_effort="none", chat_template_kwargs=own).template == {**own, "thinking": False}


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "add_generation_prompt", "self"])
def test_what_rendering_decides_is_no_variable(name: str) -> None:
    assert error(chat_template_kwargs={name: "x"}).details["param"] == f"chat_template_kwargs.{name}"


def test_going_on_with_the_last_message() -> None:
    begun = {"role": "assistant", "content": "Once "}
    assert parse(messages=[USER, begun], continue_final_message=True).continue_final
    assert not parse(messages=[USER, begun]).continue_final
    prefix = parse(messages=[USER, {**begun, "prefix": True}])
    assert prefix.continue_final
    assert list(prefix.messages) == [USER, begun]
    found = error(messages=[USER, called("{}")], continue_final_message=True)
    assert found.details["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("system", "Be brief."),
        ("instructions", "Be brief."),
        ("input", "a"),
        ("prompt", "a"),
        ("contents", [{"parts": [{"text": "a"}]}]),
        ("conversation", "conv_1"),
        ("previous_response_id", "resp_1"),
        ("max_output_tokens", 9),
        ("stop_sequences", ["a"]),
    ],
)
def test_names_of_other_dialects_are_refused_with_what_is_here(field: str, value: Any) -> None:
    found = error(**{field: value})
    assert found.details == {"param": field}
    assert "is not read in chat completions: " in found.message
    for empty in (None, "", []):
        parse(**{field: empty})


@pytest.mark.parametrize("options", [{}, {"search_context_size": "low"}])
def test_a_search_that_nobody_does_is_named_also_without_options(options: dict[str, Any]) -> None:
    request = parse(web_search_options=options, moderation={"model": "x"}, prompt_cache_options={"mode": "explicit"})
    assert request.ignored_fields == ("moderation", "web_search_options")
    assert not request.extra
    assert not parse(web_search_options=None).ignored_fields


def test_unknown_fields_are_for_the_worker() -> None:
    request = parse(lora_path="a", priority=3, return_routed_experts=True, brand_new={"x": [1.50]}, return_entropy=None)
    assert {key: bytes(raw) for key, raw in request.extra.items()} == {
        "lora_path": b'"a"',
        "priority": b"3",
        "return_routed_experts": b"true",
        "brand_new": b'{"x": [1.5]}',
    }


@pytest.mark.parametrize("name", [b'"\x80"', b"{}", b"5"])
def test_an_adapter_without_a_name_is_refused(name: bytes) -> None:
    with pytest.raises(BadRequestError, match="`lora_path` must be a string"):
        OpenAI().parse(b'{"messages": [{"role": "user", "content": "a"}], "lora_path": ' + name + b"}")


@pytest.mark.parametrize(
    "field", ["user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"]
)
def test_openais_bookkeeping_is_ignored(field: str) -> None:
    assert parse(**{field: "x"}) == parse()


@pytest.mark.parametrize("field", ["rid", "return_logprob", "top_logprobs_num", "stream_reasoning"])
def test_what_the_router_writes_itself_no_client_does(field: str) -> None:
    assert parse(**{field: "x"}) == parse()


@pytest.mark.parametrize(
    "field", ["text", "input_ids", "sampling_params", "image_data", "chat_template", "session_params"]
)
def test_what_would_be_missed_is_refused(field: str) -> None:
    assert error(**{field: "x"}).details["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        pytest.param(
            b'{"messages": [{"role": "user", "content": "a"}], "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
            marks=limited,
        ),
        b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    refused(PARSE, body)


def test_an_adapter_is_no_longer_than_a_path() -> None:
    """It is kept with each reply."""
    asked = {"messages": [{"role": "user", "content": "a"}], "lora_path": "x" * 4096}
    assert bytes(PARSE(json.dumps(asked).encode()).extra["lora_path"]) == json.dumps(asked["lora_path"]).encode()
    assert refused(PARSE, {**asked, "lora_path": "x" * 4097}).details["param"] == "lora_path"


MANGLED = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), VALUES, max_size=3)
        )
    },
    optional=dict.fromkeys(
        ["tools", "tool_choice", "stop", "n", "response_format", "stream_options", "chat_template_kwargs", "seed"],
        VALUES,
    ),
)


@given(MANGLED)
def test_nothing_is_more_than_refused(body: dict[str, Any]) -> None:
    """Whatever stands in the fields: a request, or a 400."""
    try:
        request = PARSE(msgspec.json.encode(body))
    except BadRequestError:
        return
    msgspec.json.encode(request)
