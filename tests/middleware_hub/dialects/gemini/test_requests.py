"""What bodies of Google's `generateContent` mean, with SGLang's fields beside them."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.gemini import COUNT, GENERATE, STREAM, Gemini, called
from middleware_hub.dialects.gemini.tools import json_schema
from middleware_hub.dialects.places import place_at
from router.errors import BadRequestError
from tests.middleware_hub.dialects.drawn import OBJECTS
from tests.middleware_hub.dialects.refused import nested, refused

DIALECT = Gemini("tiny", GENERATE, events=False)
USER = {"role": "user", "parts": [{"text": "Hi"}]}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "OBJECT"}}
KEYS = "role parts text functionCall functionResponse inlineData mimeType data name args response id".split()
TOOLS = [{"functionDeclarations": [ADD, {**ADD, "name": "sub"}]}]


def parse(**fields: Any) -> ChatRequest:
    return DIALECT.parse(json.dumps({"contents": [USER], **fields}).encode())


def error(**fields: Any) -> BadRequestError:
    return refused(DIALECT.parse, {"contents": [USER], **fields})


def config(**fields: Any) -> dict[str, Any]:
    return parse(generationConfig=fields).sampling


def messages(*contents: Any) -> list[dict[str, Any]]:
    return list(parse(contents=list(contents)).messages)


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(name: str, call_id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args, **({"id": call_id} if call_id else {})}}


def result(name: str, response: Any, call_id: str | None = None, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **({"id": call_id} if call_id else {}), **more}}


# Paths ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "model", "asked"),
    [
        ("models/m:generateContent", "m", GENERATE),
        ("models/org/m.1:b:streamGenerateContent", "org/m.1:b", STREAM),
        ("tunedModels/m:countTokens", "m", COUNT),
        ("projects/p/locations/l/publishers/google/models/m:generateContent", "m", GENERATE),
        ("models/a/models/b:generateContent", "a/models/b", GENERATE),
    ],
)
def test_a_path_names_the_model_and_the_call(place: str, model: str, asked: str) -> None:
    found = called(place, b"")
    assert found is not None
    dialect, name = found
    assert name == asked
    request = dialect.parse(json.dumps({"contents": [USER]}).encode())
    assert (request.model, request.stream) == (model, asked == STREAM)


@pytest.mark.parametrize("place", ["models/m", "models/:generateContent", "m:generateContent", "chat/completions", ""])
def test_other_paths_are_no_calls(place: str) -> None:
    assert called(place, b"") is None


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("v1beta/models/m:generateContent", "v1beta/models/{model}:generateContent"),
        ("v1/models/m:generateContent", "v1beta/models/{model}:generateContent"),
        ("v1/v1beta/models/m:countTokens", "v1beta/models/{model}:countTokens"),
        ("models/m:streamGenerateContent", "v1beta/models/{model}:streamGenerateContent"),
        ("v1beta/models", "v1beta/models"),
        ("v1alpha/models/a/b", "v1beta/models/{model}"),
        ("v1/models", "v1/models"),
        ("models/a", "v1/models"),
        ("v1/v1/messages", "v1/messages"),
        ("responses", "v1/responses"),
        ("chat/completions", "v1/chat/completions"),
        ("v1beta/files", ""),
        ("v1/messages/batches", ""),
    ],
)
def test_places(path: str, row: str) -> None:
    place = place_at(path, {"query_string": b"", "headers": []})
    assert place is not None
    assert place.row == row


@pytest.mark.parametrize("path", ["finalize", "", "v1", "v2/models", "tree"])
def test_what_is_no_place(path: str) -> None:
    assert place_at(path, {"query_string": b"", "headers": []}) is None


@pytest.mark.parametrize(
    ("query", "events"),
    [("alt=sse", True), ("a=b&alt=sse", True), ("", False), ("alt=json", False), ("xalt=sse", False)],
)
def test_how_a_stream_is_written(query: str, events: bool) -> None:
    found = called("models/m:streamGenerateContent", query.encode())
    assert found is not None
    stream = found[0].stream(parse(), None)  # type: ignore[arg-type]  # no head is needed to begin
    assert stream.begin(1) == (b"" if events else b"[")


def test_equal_bodies_at_other_places_are_other_requests() -> None:
    asked = [(m, c, e) for m in ("a", "b") for c in (GENERATE, STREAM) for e in (False, True)]
    assert len({Gemini(m, c, events=e).name for m, c, e in asked}) == len(asked)


# Contents ---------------------------------------------------------------------------------------------------------------


def test_the_least_there_can_be() -> None:
    assert parse() == ChatRequest(
        messages=[{"role": "user", "content": "Hi"}],
        model="tiny",
        call_choice="none",
        stream_usage=True,
        include_reasoning=False,
    )


def test_a_turn_may_be_several_contents() -> None:
    """As the events of a stream; thoughts and signatures among them."""
    found = messages(
        USER,
        model({"text": "h", "thought": True, "thoughtSignature": "eA=="}),
        model({"text": "m", "thought": True}, {"text": "I "}),
        model({"text": "look."}),
        model(call("add", "c1", a=1), {"text": "", "thoughtSignature": "eA=="}),
        model({"thoughtSignature": "eA=="}, {"text": ""}),
        user(result("add", {"output": "2"}, "c1")),
    )
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("parts", [[], None, [{"text": ""}], [{}]])
def test_an_empty_turn_is_one(parts: Any) -> None:
    assert messages(USER, {"role": "model", "parts": parts}, USER)[1] == {"role": "assistant", "content": ""}


def test_the_spellings_mean_the_same() -> None:
    camel = {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "generationConfig": {"maxOutputTokens": 3, "topP": 0.5, "thinkingConfig": {"includeThoughts": True}},
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}},
        "tools": [{"functionDeclarations": [{"name": "add", "parametersJsonSchema": {"a_b": 1}}, {"name": "sub"}]}],
        "contents": [
            USER,
            model({"functionCall": {"name": "add", "args": {"a_b": 1}}}),
            user({"functionResponse": {"name": "add", "response": {"c_d": 1, "e": 2}}}),
        ],
    }
    text = re.sub(r'(?<=")[a-z]+(?:[A-Z][a-z]+)+(?=":)', lambda found: snake(found[0]), json.dumps(camel))
    assert "function_call" in text
    assert DIALECT.parse(text.encode()) == DIALECT.parse(json.dumps(camel).encode())
    assert parse(**camel).messages[2]["tool_calls"][0]["function"]["arguments"] == {"a_b": 1}


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)


def test_lists_of_one_may_be_their_entry() -> None:
    assert parse(contents={"role": "user", "parts": {"text": "Hi"}}, tools=TOOLS[0]) == parse(tools=TOOLS)


@given(
    st.lists(st.tuples(st.sampled_from(["look", "see"]), OBJECTS, st.booleans()), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_every_result_finds_its_call(calls: list[tuple[str, dict[str, Any], bool]], chance: Any) -> None:
    """With ids in any order; without, those of one name in their order. Calls without an id get one."""
    named = [call(name, f"id{at}" if with_id else None, **args) for at, (name, args, with_id) in enumerate(calls)]
    results = [
        (at, result(name, {"output": str(at)}, f"id{at}" if with_id else None))
        for at, (name, _, with_id) in enumerate(calls)
    ]
    with_ids = [one for one in results if calls[one[0]][2]]
    chance.shuffle(with_ids)
    order = [one for one in results if not calls[one[0]][2]]
    for one in with_ids:
        order.insert(chance.randint(0, len(order)), one)
    _, turn, *told = messages(USER, model(*named), user(*[one for _, one in order]))
    ids = [one["id"] for one in turn["tool_calls"]]
    assert len(set(ids)) == len(ids)
    assert {ids.index(one["tool_call_id"]): one["content"] for one in told} == {at: str(at) for at in range(len(calls))}


def test_ids_that_are_made_are_no_ids_of_the_router() -> None:
    turns = [
        one
        for at in range(300)
        for one in (model(call("add"), call("add")), user(result("add", {}), result("add", {})))
    ]
    found = messages(USER, *turns)
    made = [one["id"] for message in found for one in message.get("tool_calls", ())]
    assert len(set(made)) == 600
    assert all(re.fullmatch(r"x[0-9]{8}", one) for one in made)


def test_results_before_the_words_of_their_content() -> None:
    found = messages(
        USER, model(call("add", "c")), user({"text": "so"}, result("add", {"error": "no"}, "c"), {"text": "what"})
    )
    assert found[2] == {"role": "tool", "content": "no", "tool_call_id": "c", "is_error": True}
    assert found[3] == {"role": "user", "content": [{"type": "text", "text": "so"}, {"type": "text", "text": "what"}]}


def test_a_result_that_is_there_twice_is_one() -> None:
    twice = result("add", {"output": "2"}, "c")
    assert len(messages(USER, model(call("add", "c")), user(twice, twice))) == 3
    without = result("add", {"output": "2"})
    assert len(messages(USER, model(call("add"), call("add")), user(without, without))) == 4
    other = result("add", {"output": "3"}, "c")
    assert len(messages(USER, model(call("add", "c")), user(twice, other))) == 4


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a"}, "a"),
        ({"result": "a"}, "a"),
        ({"error": "a"}, "a"),
        ({"result": {"b": 1}}, '{"b":1}'),
        ({"result": None}, "null"),
        ({"result": 0}, "0"),
        ({"output": ""}, ""),
        ({"a": "b"}, '{"a":"b"}'),
        ({"output": "a", "error": "b"}, '{"output":"a","error":"b"}'),
        ({}, ""),
        (None, ""),
    ],
)
def test_the_text_of_a_response(response: Any, text: str) -> None:
    assert messages(USER, model(call("add", "c")), user(result("add", response, "c")))[2]["content"] == text


def test_a_result_of_no_call_keeps_what_it_says() -> None:
    assert messages(user(result("add", {"output": "1"})))[0] == {"role": "tool", "content": "1", "name": "add"}
    assert messages(user(result("add", {"output": "1"}, "c")))[0] == {
        "role": "tool",
        "content": "1",
        "tool_call_id": "c",
    }


@pytest.mark.parametrize(
    ("system", "meant"),
    [
        ({"parts": [{"text": "a"}, {"text": ""}, {"text": "b"}]}, "a\nb"),
        ({"role": "system", "parts": {"text": "a"}}, "a"),
        ({"text": "a"}, "a"),
        ("a", "a"),
        ({"parts": [{"text": "x-anthropic-billing-header: 1\na"}]}, "a"),
    ],
)
def test_system_prompts(system: Any, meant: str) -> None:
    assert parse(systemInstruction=system).messages[0] == {"role": "system", "content": meant}


def test_a_last_turn_of_the_models_is_continued() -> None:
    assert parse(contents=[USER, model({"text": "The"})]).continue_final
    assert not parse().continue_final


@pytest.mark.parametrize(
    ("contents", "param"),
    [
        ([], "contents"),
        (None, "contents"),
        ("a", "contents"),
        (["a"], "contents[0]"),
        ([{"role": "user"}], "contents[0].parts"),
        ([{"role": "user", "parts": []}], "contents[0].parts"),
        ([{"role": "system", "parts": [{"text": "a"}]}], "contents[0].role"),
        ([{"role": "user", "parts": ["a"]}], "contents[0].parts[0]"),
        ([{"role": "user", "parts": [{}]}], "contents[0].parts[0]"),
        ([{"role": "user", "parts": [{"text": 1}]}], "contents[0].parts[0].text"),
        ([USER, model({"text": 1})], "contents[1].parts[0].text"),
        ([USER, model({"functionCall": 1}), USER], "contents[1].parts[0].functionCall"),
        ([USER, model({"functionCall": {"args": {}}}), USER], "contents[1].parts[0].functionCall.name"),
        ([USER, model({"functionCall": {"name": "a", "id": 1}}), USER], "contents[1].parts[0].functionCall.id"),
        (
            [USER, model({"functionCall": {"name": "a", "args": nested(300)}}), USER],
            "contents[1].parts[0].functionCall.args",
        ),
        ([USER, model({"executableCode": {}}), USER], "contents[1].parts[0]"),
        ([USER, model({"inlineData": {}}), USER], "contents[1].parts[0]"),
        ([user({"functionCall": {"name": "a"}})], "contents[0].parts[0]"),
        (
            [user({"functionResponse": {"name": "a", "response": "b"}})],
            "contents[0].parts[0].functionResponse.response",
        ),
        ([user({"functionResponse": 1})], "contents[0].parts[0].functionResponse"),
        ([user(result("a", nested(300)))], "contents[0].parts[0].functionResponse.response"),
        ([user(result("a", {}, id=["b"]))], "contents[0].parts[0].functionResponse.id"),
        ([user({"functionResponse": {"name": {}}})], "contents[0].parts[0].functionResponse.name"),
        ([user(result("a", {}, parts=5))], "contents[0].parts[0].functionResponse.parts"),
        ([user({"inlineData": {"data": "a"}})], "contents[0].parts[0].inlineData.mimeType"),
        ([user({"inlineData": {"mimeType": "audio/wav", "data": "a"}})], "contents[0].parts[0]"),
        ([user({"fileData": {"mimeType": "application/pdf", "fileUri": "a"}})], "contents[0].parts[0]"),
        ([USER, model(call("add"))], "contents"),
    ],
)
def test_contents_that_cannot_be_read(contents: Any, param: str) -> None:
    assert error(contents=contents).details["param"] == param


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
)


@given(ODD, st.sampled_from("contents systemInstruction tools toolConfig generationConfig".split()))
def test_nothing_else_than_a_clear_refusal(odd: Any, field: str) -> None:
    """Whatever JSON comes, it is read or refused, and never breaks."""
    with contextlib.suppress(BadRequestError):
        assert DIALECT.parse(json.dumps({"contents": [USER], field: odd}).encode()).messages


# Everything else ---------------------------------------------------------------------------------------------------------


def test_generation_config() -> None:
    assert config(
        temperature=0,
        topP=0.5,
        topK=40.0,
        seed="7",
        presencePenalty=1,
        frequencyPenalty=-1,
        maxOutputTokens=9.0,
        stopSequences=["a"],
        min_p=0.1,
    ) == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "sampling_seed": 7,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "max_new_tokens": 9,
        "stop": ["a"],
        "min_p": 0.1,
    }
    asked = parse(
        generationConfig={"candidateCount": 2, "responseLogprobs": True, "logprobs": 3, "mediaResolution": "X"}
    )
    assert (asked.samples, asked.logprobs, asked.top_logprobs, asked.sampling) == (2, True, 3, {})


def test_fields_of_sglang_go_to_the_worker() -> None:
    asked = parse(lora_path="a", return_routed_experts=True, ignore_eos=True, return_token_ids=True)
    assert asked.extra == {"lora_path": msgspec.Raw(b'"a"'), "return_routed_experts": msgspec.Raw(b"true")}
    assert (asked.sampling, asked.token_ids) == ({"ignore_eos": True}, True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"responseMimeType": "application/json"}, {"json_schema": '{"type": "object"}'}),
        ({"responseMimeType": "text/plain"}, {}),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "ARRAY", "items": {"type": "STRING"}}},
            {"json_schema": '{"type":"array","items":{"type":"string"}}'},
        ),
        ({"responseJsonSchema": {"type": "OBJECT"}}, {"json_schema": '{"type":"OBJECT"}'}),
        ({"_responseJsonSchema": {"a": 1}}, {"json_schema": '{"a":1}'}),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a.b", "c"]}},
            {"regex": r"a\.b|c"},
        ),
    ],
)
def test_the_form_of_a_reply(given: Any, wanted: Any) -> None:
    assert config(**given) == wanted


@pytest.mark.parametrize(
    ("thinking", "template", "shown"),
    [
        ({}, {}, False),
        ({"includeThoughts": True}, {}, True),
        ({"thinkingBudget": 0}, {"enable_thinking": False, "thinking": False}, False),
        ({"thinkingBudget": 512.0}, {"enable_thinking": True, "thinking": True}, False),
        ({"thinkingBudget": -1}, {}, False),
        ({"thinkingLevel": "HIGH"}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}, False),
    ],
)
def test_thinking(thinking: Any, template: Any, shown: bool) -> None:
    asked = parse(generationConfig={"thinkingConfig": thinking})
    assert (asked.template, asked.include_reasoning) == (template, shown)


@pytest.mark.parametrize(
    ("tool_config", "choice", "allowed"),
    [
        (None, "auto", ()),
        ({}, "auto", ()),
        ({"mode": "AUTO"}, "auto", ()),
        ({"mode": "any"}, "required", ()),
        ({"mode": "NONE"}, "none", ()),
        ({"mode": "VALIDATED"}, "auto", ()),
        ({"mode": "ANY", "allowedFunctionNames": ["sub"]}, "required", ("sub",)),
        ({"mode": "ANY", "allowedFunctionNames": ["sub", "add"]}, "required", ()),
        ({"allowedFunctionNames": ["add"]}, "auto", ("add",)),
    ],
)
def test_choices(tool_config: Any, choice: str, allowed: Any) -> None:
    asked = parse(tools=TOOLS, toolConfig=None if tool_config is None else {"functionCallingConfig": tool_config})
    assert (asked.call_choice, asked.allowed) == (choice, allowed)


def test_tools_that_google_runs_are_left_out() -> None:
    asked = parse(
        tools=[{"googleSearch": {}}, {"functionDeclarations": [ADD], "codeExecution": {}}, {"url_context": {}}]
    )
    assert asked.tools == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    ]
    assert asked.ignored_tools == ("googleSearch", "codeExecution", "urlContext")


def test_schemas() -> None:
    """Google's own form, and that of JSON, which stays what it is. A property may have the name of a keyword."""
    googles = {
        "type": "OBJECT",
        "nullable": True,
        "propertyOrdering": ["b", "type"],
        "min_properties": "1",
        "properties": {
            "type": {"type": "STRING", "format": "enum", "enum": ["A", "B"]},
            "any_of": {"any_of": [{"type": "INTEGER", "format": "int32"}, {"type": "NUMBER"}], "nullable": True},
            "b": {"type": "ARRAY", "items": {"type": "BOOLEAN", "nullable": True}, "maxItems": "3", "example": [True]},
            "c": {"type": "TYPE_UNSPECIFIED", "description": "STRING"},
        },
        "required": ["b"],
    }
    assert json_schema("x", googles) == {
        "type": ["object", "null"],
        "minProperties": 1,
        "properties": {
            "type": {"type": "string", "enum": ["A", "B"]},
            "any_of": {"anyOf": [{"type": "integer", "format": "int32"}, {"type": "number"}, {"type": "null"}]},
            "b": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 3},
            "c": {"description": "STRING"},
        },
        "required": ["b"],
    }
    usual = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": ["string", "null"]}}}
    assert json_schema("x", usual) == usual


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cachedContent": "a"}, "cachedContent"),
        ({"cached_content": "a"}, "cachedContent"),
        ({"messages": []}, "messages"),
        ({"systemInstruction": 1}, "systemInstruction"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts[0].text"),
        ({"tools": 1}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"functionDeclarations": 1}]}, "tools[0].functionDeclarations"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "a", "parameters": 1}]}]},
            "tools[0].functionDeclarations[0].parameters",
        ),
        (
            {"tools": [{"functionDeclarations": [{"name": "a", "parametersJsonSchema": 1}]}]},
            "tools[0].functionDeclarations[0].parametersJsonSchema",
        ),
        ({"tools": [{"functionDeclarations": [{"name": "a", "parameters": nested(300)}]}]}, "tools[0]"),
        (
            {"tools": [{"functionDeclarations": [{"name": "a", "parameters": {"maxItems": "9" * 5000}}]}]},
            "tools[0].functionDeclarations[0].parameters.maxItems",
        ),
        ({"toolConfig": 1}, "toolConfig"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "X"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        (
            {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["x"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        (
            {
                "tools": TOOLS,
                "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
                "generationConfig": {"responseMimeType": "application/json"},
            },
            "toolConfig.functionCallingConfig",
        ),
        ({"generationConfig": 1}, "generationConfig"),
        ({"generationConfig": {"topP": 2}}, "generationConfig.topP"),
        ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"candidateCount": 1000}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"stopSequences": ["b" * 4097]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"logprobs": 2}}, "generationConfig.logprobs"),
        ({"generationConfig": {"topQ": 2}}, "generationConfig.topQ"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"responseMimeType": "a/b"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": {}, "responseJsonSchema": {}}}, "generationConfig.responseSchema"),
        ({"generationConfig": {"responseSchema": nested(300)}}, "generationConfig.responseSchema"),
        (
            {"generationConfig": {"thinkingConfig": {"thinkingBudget": -2}}},
            "generationConfig.thinkingConfig.thinkingBudget",
        ),
        (
            {"generationConfig": {"thinkingConfig": {"thinkingLevel": "x"}}},
            "generationConfig.thinkingConfig.thinkingLevel",
        ),
        ({"generationConfig": {"thinkingConfig": {"x": 1}}}, "generationConfig.thinkingConfig.x"),
        ({"instructions": "a"}, "instructions"),
        ({"prompt": "a"}, "prompt"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"stop_sequences": ["a"]}, "stop_sequences"),
        ({"text": "a"}, "text"),
        ({"image_data": "a"}, "image_data"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    assert error(**fields).details.get("param") == param


def test_what_is_for_googles_own_use_means_nothing() -> None:
    assert parse(labels={}, serviceTier="a", store=True, model="models/x", safetySettings=[]) == parse()


def test_what_a_function_returns_is_shown_nowhere_and_named() -> None:
    plain, returns = ({"functionDeclarations": [{**ADD, **more}]} for more in ({}, {"response": {"type": "NUMBER"}}))
    assert parse(tools=[returns]) == msgspec.structs.replace(parse(tools=[plain]), ignored_fields=("tools.response",))


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"safetySettings": [{"category": "X"}]}, ("safetySettings",)),
        ({"safety_settings": [{"category": "X"}]}, ("safetySettings",)),
        ({"modelArmorConfig": {"promptTemplateName": "x"}}, ("modelArmorConfig",)),
        (
            {"safetySettings": [{}], "generationConfig": {"media_resolution": "LOW", "speechConfig": {}, "seed": 1}},
            ("safetySettings", "generationConfig.mediaResolution"),
        ),
    ],
)
def test_what_has_no_effect_is_named(fields: dict[str, Any], ignored: tuple[str, ...]) -> None:
    """All else of the request is what it is without these fields."""
    seed = {"generationConfig": {"seed": 1}} if "generationConfig" in fields else {}
    assert parse(**fields) == msgspec.structs.replace(parse(**seed), ignored_fields=ignored)


@pytest.mark.parametrize("mime", ["IMAGE/PNG", "Image/Png", "image/png"])
def test_a_media_type_is_the_same_in_capitals(mime: str) -> None:
    def seen(kind: str) -> Any:
        return messages({"parts": [{"inlineData": {"mimeType": kind, "data": "aGk="}}, {"text": "a"}]})

    assert seen(mime) == seen("image/png")
    shaped = {"responseMimeType": "Application/JSON"}
    assert parse(generationConfig=shaped) == parse(generationConfig={"responseMimeType": "application/json"})
    heard = [{"parts": [{"inlineData": {"mimeType": "AUDIO/WAV", "data": "aGk="}}]}]
    assert error(contents=heard).details["code"] == "unsupported_content"


def test_counting() -> None:
    body = {"contents": [USER, model(call("add"))], "systemInstruction": "s"}
    plain = DIALECT.parse_count(json.dumps(body).encode())
    assert DIALECT.parse_count(json.dumps({"generateContentRequest": {"model": "models/x", **body}}).encode()) == plain
    assert [one["role"] for one in plain.messages] == ["system", "user", "assistant"]
    assert msgspec.json.decode(DIALECT.count(7)) == {"totalTokens": 7}
