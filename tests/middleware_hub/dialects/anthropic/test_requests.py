"""What Anthropic's messages mean, with SGLang's fields beside them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.anthropic import Anthropic
from router.errors import BadRequestError
from tests.middleware_hub.dialects.drawn import VALUES
from tests.middleware_hub.dialects.refused import nested, refused

DIALECT = Anthropic()
PARSE = DIALECT.parse
USER = {"role": "user", "content": "Hi"}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": content, **more}


def parse(**fields: Any) -> ChatRequest:
    return PARSE(json.dumps({"model": "tiny", "max_tokens": 9, "messages": [USER], **fields}).encode())


def error(**fields: Any) -> BadRequestError:
    return refused(PARSE, {"model": "tiny", "max_tokens": 9, "messages": [USER], **fields})


def messages(role: str, content: Any) -> list[dict[str, Any]]:
    """What one message means; with one of the user's behind it, so that it is no prefill."""
    *found, last = parse(messages=[{"role": role, "content": content}, USER]).messages
    assert last == USER
    return found


# Messages ----------------------------------------------------------------------------------------------------------------


def test_the_least_there_can_be() -> None:
    assert parse() == ChatRequest(
        messages=[USER], model="tiny", call_choice="none", stream_usage=True, sampling={"max_new_tokens": 9}
    )


@pytest.mark.parametrize(
    ("system", "meant"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.")], "Be brief."),
        ([text("Be brief."), text(""), text("Be kind.")], "Be brief.\nBe kind."),
        ("x-anthropic-billing-header: cc_version=2; cch=1;\nBe brief.", "Be brief."),
        ([text("x-anthropic-billing-header: cc_version=2; cch=1;"), text("Be brief.")], "Be brief."),
        ([text("x-anthropic-billing-header: cch=1;\nBe brief."), text("Be kind.")], "Be brief.\nBe kind."),
        ([text("Be brief."), text("Be kind.\nx-anthropic-billing-header: cch=1;")], "Be brief.\nBe kind."),
    ],
)
def test_a_system_prompt_comes_first(system: Any, meant: str) -> None:
    assert list(parse(system=system).messages) == [{"role": "system", "content": meant}, USER]


@pytest.mark.parametrize("system", [None, "", [], [text("")], "x-anthropic-billing-header: cch=1;"])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert list(parse(system=system).messages) == [USER]


@pytest.mark.parametrize(
    ("content", "meant"),
    [
        ("a", [{"role": "user", "content": "a"}]),
        ([text("a")], [{"role": "user", "content": "a"}]),
        (
            [text("a"), text("b")],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        ([result("42")], [{"role": "tool", "content": "42", "tool_call_id": "c"}]),
        ([result([text("42")])], [{"role": "tool", "content": "42", "tool_call_id": "c"}]),
        ([result(None)], [{"role": "tool", "content": "", "tool_call_id": "c"}]),
        ([{"type": "tool_result"}], [{"role": "tool", "content": ""}]),
        ([result("42"), text("")], [{"role": "tool", "content": "42", "tool_call_id": "c"}]),
        (
            [result("no", is_error=True)],
            [{"role": "tool", "content": "no", "tool_call_id": "c", "is_error": True}],
        ),
        (
            [text("a"), result("1"), result("2", is_error=False)],
            [
                {"role": "tool", "content": "1", "tool_call_id": "c"},
                {"role": "tool", "content": "2", "tool_call_id": "c"},
                {"role": "user", "content": "a"},
            ],
        ),
    ],
)
def test_a_users_message(content: Any, meant: list[dict[str, Any]]) -> None:
    assert messages("user", content) == meant


CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("content", "meant"),
    [
        ("a", {"content": "a"}),
        ([], {"content": ""}),
        ([text("a"), text("b")], {"content": "ab"}),
        ([USE], {"content": None, "tool_calls": [CALLED]}),
        ([text("a"), {**USE, "caller": {"type": "direct"}}], {"content": "a", "tool_calls": [CALLED]}),
        (
            [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("a")],
            {"content": "a", "reasoning_content": "Hm."},
        ),
        ([{"type": "redacted_thinking", "data": "x"}, text("a")], {"content": "a"}),
    ],
)
def test_an_assistants_message(content: Any, meant: dict[str, Any]) -> None:
    assert messages("assistant", content) == [{"role": "assistant", **meant}]


@pytest.mark.parametrize("begun", ["Once ", [text("Once ")]])
def test_a_last_message_of_the_assistants_is_gone_on_with(begun: Any) -> None:
    request = parse(messages=[USER, {"role": "assistant", "content": begun}])
    assert request.continue_final
    assert request.messages[-1] == {"role": "assistant", "content": "Once "}
    assert not parse().continue_final


def test_calls_cannot_be_gone_on_with() -> None:
    assert error(messages=[USER, {"role": "assistant", "content": [USE]}]).details["param"] == "messages"


@pytest.mark.parametrize("kind", ["document", "search_result", "server_tool_use", "container_upload"])
def test_what_is_not_text_is_refused_by_name(kind: str) -> None:
    for role in ("user", "assistant"):
        found = error(messages=[{"role": role, "content": [text("a"), {"type": kind}]}, USER])
        assert found.details == {"param": "messages[0].content[1]", "code": "unsupported_content"}
        assert "text only" in found.message
    found = error(messages=[{"role": "user", "content": [result([{"type": kind}])]}])
    assert found.details == {"param": "messages[0].content[0].content[0]", "code": "unsupported_content"}


@pytest.mark.parametrize(
    ("wrote", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": "tool", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [result(5)]}, "messages[0].content[0].content"),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages[0].content[0].thinking"),
        ({"role": "assistant", "content": [{**USE, "input": nested(201)}]}, "messages[0].content[0].input"),
        ({"role": "assistant", "content": [{**USE, "name": None}]}, "messages[0].content[0].name"),
        ({"role": "assistant", "content": [{**USE, "id": 5}]}, "messages[0].content[0].id"),
    ],
)
def test_a_message_that_is_none(wrote: dict[str, Any], param: str) -> None:
    found = error(messages=[wrote, USER])
    assert found.details["param"] == param
    assert f"`{param}`" in found.message


# Tools -------------------------------------------------------------------------------------------------------------------


def test_tools_are_functions() -> None:
    tools = [{**ADD, "type": "custom", "cache_control": {}}, {"name": "b", "input_schema": {"type": "object"}}]
    assert json.dumps(parse(tools=tools).tools) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
            },
            {"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}},
        ]
    )


@pytest.mark.parametrize(
    ("choice", "meant", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": False}, "add", True),
    ],
)
def test_which_tool_to_call(choice: Any, meant: str, parallel: bool) -> None:
    request = parse(tools=[ADD], tool_choice=choice)
    assert (request.call_choice, request.parallel_calls) == (meant, parallel)


@pytest.mark.parametrize(
    "choice", [{}, {"type": "required"}, {"type": "tool"}, {"type": "tool", "name": "sub"}, "auto"]
)
def test_a_choice_that_is_none(choice: Any) -> None:
    assert str(error(tools=[ADD], tool_choice=choice).details["param"]).startswith("tool_choice")


def test_a_call_cannot_be_required_without_tools() -> None:
    assert error(tool_choice={"type": "any"}).details["param"] == "tool_choice"


@pytest.mark.parametrize(
    "kind", ["web_search_20250305", "computer_20250124", "code_execution_20250522", "tool_search_tool_regex_20251119"]
)
def test_tools_that_nobody_runs_here_are_left_out(kind: str) -> None:
    request = parse(tools=[ADD, {"type": kind, "name": "x"}])
    assert (request.tools, request.ignored_tools) == (parse(tools=[ADD]).tools, (kind,))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bash_20250124", {"command", "restart"}),
        ("text_editor_20250728", {"command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"}),
        ("memory_20250818", {"command", "path", "old_path", "new_path"}),
    ],
)
def test_tools_that_the_client_runs_have_their_schemas(kind: str, fields: set[str]) -> None:
    (tool,) = parse(tools=[{"type": kind, "name": "mine"}]).tools or ()
    assert tool["function"]["name"] == "mine"
    assert fields <= tool["function"]["parameters"]["properties"].keys()


def test_examples_of_an_input_stand_in_the_description() -> None:
    tools = [{**ADD, "input_examples": [{"a": 1}, {"a": 2}]}, {"type": "bash_20250124", "name": "bash"}]
    shown = (parse(tools=tools).tools or ())[0]["function"]
    assert shown["description"] == 'Adds.\n\nExamples of its input:\n{"a":1}\n{"a":2}'
    bare = {"name": "add", "input_schema": {}, "input_examples": [{"a": 1}]}
    assert (parse(tools=[bare]).tools or ())[0]["function"]["description"] == 'Examples of its input:\n{"a":1}'


@pytest.mark.parametrize("examples", [5, {"a": 1}, [5], [nested(201)]])
def test_examples_that_are_none(examples: Any) -> None:
    assert error(tools=[{**ADD, "input_examples": examples}]).details["param"] == "tools[0].input_examples"


def test_a_tool_for_programs_alone_is_offered_and_named() -> None:
    programs = {**ADD, "allowed_callers": ["code_execution_20260120"]}
    request = parse(tools=[programs, {**programs, "name": "sub"}])
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["add", "sub"]
    assert request.ignored_fields == ("tools.allowed_callers",)
    assert not parse(tools=[{**ADD, "allowed_callers": ["direct", "code_execution_20260120"]}]).ignored_fields


def test_a_type_of_tools_that_anthropic_does_not_have() -> None:
    found = error(tools=[ADD, {"type": "websearch", "name": "x"}])
    assert found.details == {"param": "tools[1].type", "code": "unsupported_content"}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"name": "f"}, "tools[0].input_schema"),
        ({"input_schema": {}}, "tools[0].name"),
        ({"name": "f", "input_schema": nested(200)}, "tools[0]"),
    ],
)
def test_a_tool_that_is_none(tool: dict[str, Any], param: str) -> None:
    assert error(tools=[tool]).details["param"] == param


# The rest ----------------------------------------------------------------------------------------------------------------


def test_sampling() -> None:
    request = parse(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"], seed=1, min_p=0.1, stream=True)
    assert request.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "sampling_seed": 1,
        "stop": ["END"],
        "max_new_tokens": 9,
    }
    assert request.stream


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", 0),
        ("max_tokens", "9"),
        ("temperature", -1),
        ("stop_sequences", "END"),
        ("stop_sequences", [""]),
        ("stop_sequences", ["b" * 4097]),
        ("system", 5),
        ("messages", None),
        ("messages", []),
        ("messages", "Hi"),
        ("tools", "add"),
        ("thinking", 1),
        ("enable_thinking", "no"),
        ("separate_reasoning", False),
        ("include_reasoning", False),
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 1),
        ("mcp_servers", [{"type": "url"}]),
        ("thread", {"type": "create"}),
        ("thread", {"type": "continue", "previous_message_id": "msg_1"}),
        ("thread", "create"),
        ("compaction", {"type": "enabled"}),
        ("stream", 1),
        ("input_ids", [1]),
    ],
)
def test_a_field_that_cannot_be_meant_is_named(field: str, value: Any) -> None:
    found = error(**{field: value})
    assert found.details["param"] == field
    assert f"`{field}`" in found.message


def test_thinking_is_a_variable_of_the_template() -> None:
    on, off = ({"enable_thinking": value, "thinking": value} for value in (True, False))
    assert parse().template == {}
    assert parse(thinking={"type": "enabled", "budget_tokens": 2048}).template == on
    assert parse(thinking={"type": "adaptive"}).template == on
    assert parse(thinking={"type": "disabled"}).template == off
    assert parse(thinking={"type": "enabled"}, chat_template_kwargs={"thinking": False, "x": 1}).template == {
        "x": 1,
        "enable_thinking": True,
        "thinking": False,
    }
    assert error(thinking={"type": "hard"}).details["param"] == "thinking.type"


def test_effort_and_format_of_the_output() -> None:
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    request = parse(output_config={"effort": "low", "format": schema, "task_budget": {}})
    assert request.template == {"reasoning_effort": "low"}
    assert request.sampling["json_schema"] == '{"type":"object"}'
    assert parse(output_format=schema).sampling["json_schema"] == '{"type":"object"}'
    older = {"type": "json_schema", "schema": {"type": "array"}}
    both = parse(output_config={"format": schema}, output_format=older)
    assert both.sampling["json_schema"] == '{"type":"object"}'
    own = parse(output_config={"effort": "low"}, chat_template_kwargs={"reasoning_effort": "high"})
    assert own.template == {"reasoning_effort": "high"}
    assert error(output_config={"format": {"type": "xml"}}).details["param"] == "output_config.format"


def test_a_budget_that_nobody_counts_is_named() -> None:
    budget = {"effort": "low", "task_budget": {"type": "tokens", "total": 20_000}}
    assert parse(output_config=budget).ignored_fields == ("output_config.task_budget",)
    assert not parse(output_config={"effort": "low"}).ignored_fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instructions", "Be brief."),
        ("input", "a"),
        ("prompt", "a"),
        ("contents", [{"parts": []}]),
        ("conversation", "conv_1"),
        ("previous_response_id", "resp_1"),
        ("max_completion_tokens", 9),
        ("max_output_tokens", 9),
    ],
)
def test_names_of_other_dialects_are_refused_with_what_is_here(field: str, value: Any) -> None:
    found = error(**{field: value})
    assert found.details == {"param": field}
    assert "is not read in Anthropic's API: " in found.message


def test_a_list_of_no_servers_asks_for_nothing() -> None:
    assert parse(mcp_servers=[]) == parse()


def test_a_thread_is_refused_in_the_words_by_which_clients_send_all_messages() -> None:
    """Ignored, it would make a conversation of each turn: a client with a thread sends the new messages only."""
    found = error(thread={"type": "continue", "previous_message_id": "msg_1"})
    assert found.details["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert parse(thread=None, compaction=None) == parse()


def test_a_system_message_changes_the_tools_from_there_on() -> None:
    sub = {"name": "sub", "description": "Subtracts.", "input_schema": {"type": "object"}}
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": sub}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "add"}}
    again = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "add"}}
    found = parse(
        tools=[ADD], messages=[USER, {"role": "system", "content": [added, removed, again, text("Now.")]}, USER]
    )
    assert [tool["function"]["name"] for tool in found.tools or ()] == ["add"]
    assert [tool["function"]["name"] for tool in found.deferred] == ["sub"]
    said = "".join(part["text"] for part in found.messages[1]["content"])
    for word in ('"sub"', "Subtracts.", "add is not available any more", "Adds.", "Now."):
        assert said.count(word) == 1
    for block, param in (
        ({"type": "tool_addition"}, "tool"),
        ({"type": "tool_addition", "tool": {"type": "tool_definition"}}, "tool.definition"),
        (
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {}}},
            "tool.definition.input_schema",
        ),
        ({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "no"}}, "tool.name"),
        ({"type": "tool_removal", "tool": {"type": "mcp_toolset_reference"}}, "tool.type"),
    ):
        refusal = error(tools=[ADD], messages=[USER, {"role": "system", "content": [block]}, USER])
        assert refusal.details["param"] == f"messages[1].content[0].{param}"


def test_unknown_fields_are_for_the_worker_and_anthropics_bookkeeping_for_nobody() -> None:
    request = parse(
        lora_path="a", metadata={"user_id": "u"}, betas=["x"], context_management={}, service_tier="auto", n=1
    )
    assert {key: bytes(raw) for key, raw in request.extra.items()} == {"lora_path": b'"a"'}


def test_counting_needs_no_limit() -> None:
    body = {"model": "tiny", "messages": [USER, {"role": "assistant", "content": [USE]}], "tools": [ADD]}
    request = DIALECT.parse_count(json.dumps(body).encode())
    assert request.sampling == {}
    assert [message["role"] for message in request.messages] == ["user", "assistant"]
    assert not request.continue_final


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"max_tokens": 1, "messages": ' + b"[" * 100_000,
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    refused(PARSE, body)


BLOCKS = st.dictionaries(
    st.sampled_from(["type", "text", "id", "name", "input", "content", "thinking", "tool_use_id"]),
    VALUES | st.sampled_from(["text", "tool_use", "tool_result", "thinking"]),
    max_size=4,
)
MANGLED = st.fixed_dictionaries(
    {
        "max_tokens": st.just(9),
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["user", "assistant", "system"]),
                    "content": VALUES | st.lists(BLOCKS, max_size=3),
                }
            ),
            min_size=1,
            max_size=3,
        ),
    },
    optional=dict.fromkeys(["system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences"], VALUES),
)


@given(MANGLED)
def test_nothing_is_more_than_refused(body: dict[str, Any]) -> None:
    """Whatever stands in the fields: a request, or a 400."""
    try:
        request = PARSE(msgspec.json.encode(body))
    except BadRequestError:
        return
    msgspec.json.encode(request)


@pytest.mark.parametrize(
    ("given", "meant"), [("{}", {}), ('{"a": 1', '{"a": 1'), ([1], "[1]"), ("", {}), (5, "5"), ('{"a": 1}', {"a": 1})]
)
def test_an_input_that_is_no_object(given: Any, meant: Any) -> None:
    """A client that could not read what the model wrote sends it back as it is."""
    listed = [{"role": "assistant", "content": [{**USE, "input": given}]}, {"role": "user", "content": [result("a")]}]
    assert parse(messages=listed).messages[0]["tool_calls"][0]["function"]["arguments"] == meant
