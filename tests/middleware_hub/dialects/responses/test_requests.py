"""What the items of OpenAI's Responses API mean, with SGLang's fields beside them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.responses import Responses
from middleware_hub.dialects.responses.tools import CALLS, RESULTS
from router.errors import BadRequestError, NotFoundError
from tests.middleware_hub.dialects.drawn import VALUES
from tests.middleware_hub.dialects.refused import nested, refused

PARSE = Responses().parse
USER = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"}
CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "2"}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def parse(**fields: Any) -> ChatRequest:
    return PARSE(json.dumps({"model": "tiny", "input": "Hi", **fields}).encode())


def error(**fields: Any) -> BadRequestError:
    return refused(PARSE, {"model": "tiny", "input": "Hi", **fields})


def meant(*items: Any) -> list[dict[str, Any]]:
    return [dict(one) for one in parse(input=list(items)).messages]


def test_the_least_there_can_be() -> None:
    assert parse() == ChatRequest(messages=[USER], model="tiny", call_choice="none", stream_usage=True)


def test_instructions_come_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert list(parse(instructions="Be brief.").messages) == [system, USER]
    assert list(parse(instructions="").messages) == [USER]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (USER, USER),
        ({"type": "message", **USER}, USER),
        ({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, USER),
        ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        ({"role": "system", "content": []}, {"role": "system", "content": ""}),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        (RESULT, {"role": "tool", "content": "2", "tool_call_id": "c"}),
        (
            {**RESULT, "output": [{"type": "input_text", "text": "2"}]},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ),
        ({"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "Yes."}),
        (said("Yes."), {"role": "assistant", "content": "Yes."}),
        (CALL, {"role": "assistant", "content": None, "tool_calls": [CALLED]}),
        (thought("Hm."), {"role": "assistant", "content": "", "reasoning_content": "Hm."}),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "assistant", "content": ""}),
    ],
)
def test_an_item(item: Any, message: dict[str, Any]) -> None:
    assert meant(USER, item, USER) == [USER, message, USER]


SAID = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        pytest.param(
            [thought("Hm."), said("a"), CALL, {**CALL, "call_id": "d"}],
            [{**SAID, "reasoning_content": "Hm.", "tool_calls": [CALLED, {**CALLED, "id": "d"}]}],
            id="all of one turn",
        ),
        pytest.param(
            [said("a"), CALL, said("b")],
            [{"role": "assistant", "content": "ab", "tool_calls": [CALLED]}],
            id="a text around a call",
        ),
        pytest.param([thought("H"), thought("m.")], [{**SAID, "content": "", "reasoning_content": "Hm."}], id="cut"),
        pytest.param([said("a"), said("a")], [SAID, SAID], id="two messages are two turns"),
        pytest.param(
            [thought("H"), said("a"), thought("m."), CALL],
            [{**SAID, "reasoning_content": "Hm.", "tool_calls": [CALLED]}],
            id="reasoning in between",
        ),
        pytest.param(
            [{**said("a"), "id": "msg_r1_0"}, {**thought("Hm."), "id": "rs_r2_0"}, {**said("a"), "id": "msg_r2_1"}],
            [SAID, {**SAID, "reasoning_content": "Hm."}],
            id="of two replies",
        ),
        pytest.param(
            [{**said("a"), "id": "msg_r1_0"}, {**said("b"), "id": "msg_r1_1"}],
            [{**SAID, "content": "ab"}],
            id="of one reply",
        ),
        pytest.param(
            [CALL, RESULT, said("a")],
            [
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "content": "2", "tool_call_id": "c"},
                SAID,
            ],
            id="a result is between two turns",
        ),
    ],
)
def test_items_of_a_turn_are_one_message(items: list[Any], messages: list[dict[str, Any]]) -> None:
    assert meant(USER, *items) == [USER, *messages]


def test_tools_are_those_of_a_chat() -> None:
    request = parse(tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert json.dumps(request.tools) == json.dumps([{"type": "function", "function": function}])
    assert (request.call_choice, request.parallel_calls) == ("required", False)
    assert parse(tools=[ADD], tool_choice={"type": "function", "name": "add"}).call_choice == "add"


def test_sampling_and_the_template() -> None:
    schema = {"type": "object"}
    request = parse(
        max_output_tokens=9,
        temperature=0.5,
        top_k=3,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        lora_path="a",
    )
    assert request.sampling == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "json_schema": json.dumps(schema, separators=(",", ":")),
    }
    assert request.template["reasoning_effort"] == "low"
    assert bytes(request.extra["lora_path"]) == b'"a"'


def test_the_last_message_may_be_continued() -> None:
    assert not parse(input=[USER, said("The answer")]).continue_final
    assert parse(input=[USER, said("The answer")], continue_final_message=True).continue_final


SENT = {
    "store": False,
    "metadata": {"run": "7"},
    "truncation": "auto",
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "max_tool_calls": 3,
    "user": "u",
}


@pytest.mark.parametrize("key", SENT)
def test_bookkeeping_is_for_the_reply_only(key: str) -> None:
    assert parse(**{key: SENT[key]}) == msgspec.structs.replace(parse(), echoed={key: SENT[key]})


def test_hints_reach_no_worker() -> None:
    assert parse(client_metadata={"a": "b"}, stream_options={"include_obfuscation": False}) == parse()


def test_what_has_no_effect_is_named() -> None:
    request = parse(
        image={"context_compression": "enabled"},
        text={"verbosity": "low"},
        reasoning={"effort": "low", "context": "current_turn", "mode": "pro", "summary": "auto"},
        tools=[{**ADD, "output_schema": {"type": "number"}, "allowed_callers": ["programmatic"]}],
    )
    reasoning = ("reasoning.context", "reasoning.mode", "reasoning.summary")
    assert request.ignored_fields == (
        *("image", "text.verbosity", *reasoning),
        *("tools.output_schema", "tools.allowed_callers"),
    )
    assert not request.extra
    usual = {"effort": "low", "context": "auto", "mode": "standard", "summary": None}
    assert not parse(reasoning=usual, tools=[{**ADD, "allowed_callers": ["direct"]}]).ignored_fields


def test_what_is_null_is_absent() -> None:
    names = "instructions tools tool_choice text reasoning max_output_tokens top_logprobs include previous_response_id"
    assert parse(**dict.fromkeys(names.split())) == parse()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "is missing"),
        ({"system": "Be brief."}, "system", "`instructions`"),
        ({"contents": []}, "contents", "`input`"),
        ({"stop_sequences": ["a"]}, "stop_sequences", "`stop`"),
        ({"input": []}, "input", "is empty"),
        ({"input": 1}, "input", "a string, or a list of items"),
        ({"input": ["a"]}, "input[0]", "an object"),
        ({"input": [{"content": "a"}]}, "input[0].type", "a string"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", '"assistant"'),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [{**CALL, "arguments": nested(201)}]}, "input[0].arguments", "levels"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "a string"),
        ({"input": [{**RESULT, "call_id": 1}]}, "input[0].call_id", "a string"),
        ({"input": [{**thought(""), "content": "x"}]}, "input[0].content", "a list"),
        ({"input": [{**thought(""), "content": [{"text": 1}]}]}, "input[0].content[0].text", "a string"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "name"),
        ({"tools": [{**ADD, "parameters": 1}]}, "tools[0].parameters", "schema"),
        ({"tools": [{**ADD, "parameters": nested(300)}]}, "tools[0]", "nested"),
        ({"tools": [ADD], "tool_choice": {"type": "mcp"}}, "tool_choice", "OpenAI's servers run"),
        ({"tools": [ADD], "tool_choice": {"type": "pick"}}, "tool_choice.type", '"function"'),
        ({"metadata": {"a": 1}}, "metadata", "an object of strings"),
        ({"truncation": "middle"}, "truncation", '"auto" or "disabled"'),
        ({"tools": [ADD], "tool_choice": "all"}, "tool_choice", '"required"'),
        ({"tool_choice": "required"}, "tool_choice", "there are no `tools`"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": "text"}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "a JSON schema"),
        ({"max_tokens": 9}, "max_tokens", "max_output_tokens"),
        ({"messages": [USER]}, "messages", "`input`"),
        ({"n": 2}, "n", "one sample"),
        ({"continue_final_message": True}, "continue_final_message", "at the end of `input`"),
        ({"input": [USER, CALL], "continue_final_message": True}, "continue_final_message", "without calls"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"top_logprobs": 2}, "top_logprobs", "chat/completions"),
        ({"logprobs": True}, "logprobs", "chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "chat/completions"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    found = error(**fields)
    assert found.details["param"] == param
    assert words in str(found)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "functoin"}]}, "tools[0].type"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ],
)
def test_fields_that_need_stored_responses_are_refused(fields: dict[str, Any], param: str) -> None:
    found = error(**fields)
    assert (found.details["param"], found.details["code"]) == (param, "unsupported_content")


@given(st.dictionaries(st.sampled_from(["input", "tools", "text", "reasoning", "tool_choice", "instructions"]), VALUES))
def test_anything_is_understood_or_refused(fields: dict[str, Any]) -> None:
    with suppress(BadRequestError):
        PARSE(json.dumps({"input": "Hi", **fields}).encode())


@given(st.lists(st.dictionaries(st.sampled_from(["type", "role", "content", "output", "call_id"]), VALUES), max_size=3))
def test_any_items_are_understood_or_refused(items: list[dict[str, Any]]) -> None:
    with suppress(BadRequestError):
        PARSE(json.dumps({"input": items}).encode())


ITEMS = [*CALLS, *RESULTS, "item_reference", "additional_tools", "reasoning", "message"]
FIELDS = "id call_id role name namespace input arguments action operation output tools content status".split()


@given(
    st.lists(
        st.builds(
            lambda kind, rest: {**rest, "type": kind},
            st.sampled_from(ITEMS),
            st.dictionaries(st.sampled_from(FIELDS), VALUES | st.just("ctc_a_0")),
        ),
        max_size=4,
    )
)
def test_any_items_of_known_types_are_understood_or_refused(items: list[dict[str, Any]]) -> None:
    with suppress(BadRequestError, NotFoundError):
        PARSE(json.dumps({"input": items}).encode())


KINDS = "function custom namespace local_shell shell apply_patch tool_search web_search mcp x".split()
TOOL_FIELDS = "name description parameters format tools execution environment defer_loading".split()


@given(
    st.lists(
        st.builds(
            lambda kind, rest: {"name": "f", **rest, "type": kind},
            st.sampled_from(KINDS),
            st.dictionaries(st.sampled_from(TOOL_FIELDS), VALUES),
        ),
        max_size=3,
    ),
    st.none() | VALUES | st.builds(lambda kind: {"type": kind, "name": "f"}, st.sampled_from(KINDS)),
)
def test_any_tools_are_understood_or_refused(tools: list[dict[str, Any]], choice: Any) -> None:
    with suppress(BadRequestError):
        PARSE(json.dumps({"input": "Hi", "tools": tools, "tool_choice": choice}).encode())


SPAWN = {"type": "function", "name": "spawn"}


@pytest.mark.parametrize(
    ("tools", "call", "name"),
    [
        ([{"type": "namespace", "name": "a", "tools": [SPAWN]}], {"name": "spawn", "namespace": "a"}, "a__spawn"),
        ([{"type": "namespace", "name": "a", "tools": [SPAWN]}], {"name": "spawn"}, "a__spawn"),
        ([{"type": "namespace", "name": "a", "tools": [SPAWN]}], {"name": "a__spawn"}, "a__spawn"),
        ([{"type": "namespace", "name": "a", "tools": [SPAWN]}, SPAWN], {"name": "spawn"}, "spawn"),
        ([{"type": "namespace", "name": one, "tools": [SPAWN]} for one in "ab"], {"name": "spawn"}, "spawn"),
        ([], {"name": "spawn", "namespace": "a"}, "a__spawn"),
    ],
)
def test_a_call_of_a_namespace(tools: list[Any], call: dict[str, Any], name: str) -> None:
    """Clients that do not know namespaces drop theirs: the name says which tool it is, if there is one of that name only."""
    item = {"type": "function_call", "call_id": "c", "arguments": "{}", **call}
    *_, message = parse(input=[USER, item], tools=tools).messages
    assert message["tool_calls"][0]["function"]["name"] == name


def test_tools_in_front_of_all_messages_are_those_of_the_prompt() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [ADD]}
    system = {"role": "developer", "content": "S"}
    assert parse(input=[item, system, USER]).tools == parse(input=[system, USER], tools=[ADD]).tools
    later = parse(input=[system, USER, item])
    assert (later.tools, [tool["function"]["name"] for tool in later.deferred]) == (None, ["add"])
    assert error(input=[{**item, "tools": 1}]).details["param"] == "input[0].tools"


def test_two_tools_of_one_name() -> None:
    found = error(tools=[ADD, {"type": "custom", "name": "add"}])
    assert (found.details["param"], "'add'" in str(found)) == ("tools[1].name", True)
