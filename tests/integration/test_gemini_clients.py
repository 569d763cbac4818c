"""Google's own client in sessions: calls, streams, chats, functions that it calls by itself, pictures.

It changes `base_url`, and nothing else.

The oracle is the worker's own log: each prompt begins with all that the engine consumed and produced before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from tests.support import templates
from tests.support.agents import AgentSession, call_text, ids_of
from tests.support.pictures import digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

PICTURES = [picture(40 + turn, 30, turn) for turn in range(3)]
LOOK = types.FunctionDeclaration(
    name="look",
    description="Look somewhere.",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={
            "where": types.Schema(type=types.Type.STRING),
            "times": types.Schema(type=types.Type.INTEGER, nullable=True, minimum=0),
        },
        required=["where"],
    ),
)
TOOLS: list[Any] = [types.Tool(function_declarations=[LOOK])]
CONFIG = types.GenerateContentConfig(
    system_instruction="You look.",
    tools=TOOLS,
    temperature=0.7,
    top_k=40,
    thinking_config=types.ThinkingConfig(include_thoughts=True),
    safety_settings=[
        types.SafetySetting(
            category=types.HarmCategory.HARM_CATEGORY_HARASSMENT, threshold=types.HarmBlockThreshold.BLOCK_NONE
        )
    ],
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Stack]:
    with stack(
        "qwen", styles=("cumulative",), sessions={"chat_template": str(templates.folder() / "qwen3.jinja")}
    ) as made:
        yield made
        assert made.idle()


@pytest.fixture(scope="module")
def sees() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=shipped_image_tokenizer()) as made:
        yield made
        assert made.idle()


@pytest.fixture
def session(engine: Stack) -> Iterator[AgentSession]:
    made = AgentSession.make(engine)
    yield made
    engine.workers[0].forget_scripts()


@pytest.fixture
def client(session: AgentSession) -> genai.Client:
    return client_of(session)


def client_of(session: AgentSession, key: str = "none") -> genai.Client:
    base = f"{session.stack.url}{session.path}"
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base))


def truth(session: AgentSession, since: int) -> list[int]:
    """All that the engine consumed and produced in the last of its generations, which begin with each other."""
    chain: list[int] = []
    for record in session.stack.workers[0].log[since:]:
        assert list(record.input_ids)[: len(chain)] == chain
        chain = [*record.input_ids, *record.output_ids]
    return chain


def check(session: AgentSession, since: int, turns: int) -> None:
    """The session is one exact trajectory."""
    (only,) = session.finalize()
    assert (only["exact"], only["reasons"], only["num_turns"]) == (True, [], turns)
    assert ids_of(only) == truth(session, since)
    sampled = sum(len(record.output_ids) for record in session.stack.workers[0].log[since:])
    assert sum(only["response_mask"]) == sampled


def said(number: int, *calls: str) -> str:
    """A reply with a thought, a text with outer white space, and calls."""
    return "\n".join([f"<think>\nhm {number}\n</think>\n\n I  look.\n", *calls])


class TestCalls:
    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_tool_loop(self, session: AgentSession, client: genai.Client, streamed: bool) -> None:
        """Thoughts are echoed, two calls are answered in one content, and no result names its call."""
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="Where is it?")])]
        for number in range(3):
            worker.script(text=said(number, call_text("there", number), call_text("here", number)))
            if streamed:
                chunks = list(client.models.generate_content_stream(model="m", contents=contents, config=CONFIG))
                new = [chunk.candidates[0].content for chunk in chunks if chunk.candidates]
                last = chunks[-1]
            else:
                last = client.models.generate_content(model="m", contents=contents, config=CONFIG)
                assert last.candidates is not None
                new = [last.candidates[0].content]
            parts = [part for content in new if content is not None for part in content.parts or ()]
            assert "".join(part.text or "" for part in parts if part.thought) == f"hm {number}"
            assert "".join(part.text or "" for part in parts if not part.thought).strip() == "I  look."
            calls = [part.function_call for part in parts if part.function_call]
            assert [call.args for call in calls] == [
                {"where": "there", "times": number},
                {"where": "here", "times": number},
            ]
            assert all(call.id for call in calls)
            assert last.candidates is not None
            assert last.candidates[0].finish_reason == types.FinishReason.STOP
            usage, record = last.usage_metadata, worker.log[-1]
            assert usage is not None
            assert (usage.prompt_token_count, usage.candidates_token_count) == (
                len(record.input_ids),
                len(record.output_ids),
            )
            assert usage.total_token_count == len(record.input_ids) + len(record.output_ids)
            answers = [types.Part.from_function_response(name="look", response={"result": f"r{at}"}) for at in range(2)]
            contents += [*new, types.Content(role="user", parts=answers)]
        worker.script(text="<think>\n\n</think>\n\nNowhere.")
        last = client.models.generate_content(model="m", contents=contents, config=CONFIG)
        assert last.text == "Nowhere."
        check(session, since, 4)

    def test_results_are_those_of_their_calls(self, session: AgentSession, client: genai.Client) -> None:
        """Without ids a result belongs to the next call of its name."""
        worker = session.stack.workers[0]
        calls = [
            types.Part(function_call=types.FunctionCall(name=name, args={"n": number}))
            for number, name in enumerate(("look", "see", "look"))
        ]
        results = [
            types.Part.from_function_response(name=name, response={"output": said})
            for name, said in (("see", "s"), ("look", "a"), ("look", "b"))
        ]
        contents = [
            types.UserContent("go"),
            types.Content(role="model", parts=calls),
            types.Content(role="user", parts=[*results, types.Part(text="and?")]),
        ]
        worker.script(text="ok")
        client.models.generate_content(model="m", contents=contents, config=CONFIG)
        (only,) = session.finalize()
        called = {call["id"]: call["function"]["arguments"]["n"] for call in only["messages"][2]["tool_calls"]}
        told = [(called[m["tool_call_id"]], m["content"]) for m in only["messages"] if m["role"] == "tool"]
        assert told == [(1, "s"), (0, "a"), (2, "b")]
        assert only["messages"][-2] == {"role": "user", "content": "and?"}

    def test_it_calls_functions_by_itself(self, session: AgentSession, client: genai.Client) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        seen: list[tuple[str, int]] = []

        def look(where: str, times: int) -> str:
            """Look somewhere."""
            seen.append((where, times))
            if times == 7:
                raise ValueError("seven")
            return "nothing"

        for text in (said(1, call_text("there", 2), call_text("here", 7)), said(2, call_text("there", 3)), "Nowhere."):
            worker.script(text=text)
        chat = client.chats.create(model="m", config=types.GenerateContentConfig(tools=[look]))
        assert chat.send_message("Where is it?").text == "Nowhere."
        assert seen == [("there", 2), ("here", 7), ("there", 3)]
        worker.script(text="Yes.")
        assert chat.send_message("Sure?").text == "Yes."
        check(session, since, 4)

    def test_a_chat_of_streams(self, session: AgentSession, client: genai.Client) -> None:
        """The client keeps each event as a content of its own."""
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        chat = client.chats.create(model="m", config=CONFIG)
        for number in range(3):
            worker.script(text=said(number, " one two  three"))
            chunks = list(chat.send_message_stream(f"turn {number}"))
            assert len(chunks) > 2
        check(session, since, 3)

    def test_a_stream_is_a_stream(self, session: AgentSession, client: genai.Client) -> None:
        worker = session.stack.workers[0]
        worker.script(text="<think>\nhm\n</think>\n\none two three four five six")
        worker.hold(after=8)
        chunks = client.models.generate_content_stream(model="m", contents="Count")
        text = ""
        while "one" not in text:
            text += next(chunks).text or ""
        worker.release()
        text += "".join(chunk.text or "" for chunk in chunks)
        assert text == "one two three four five six"

    def test_thoughts_are_shown_only_if_they_are_wanted(self, session: AgentSession, client: genai.Client) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        chat = client.chats.create(model="m")
        for number in range(2):
            worker.script(text=said(number))
            reply = chat.send_message("a")
            assert reply.parts is not None
            assert [part.thought for part in reply.parts] == [None]
        check(session, since, 2)

    def test_a_call_is_demanded(self, session: AgentSession, client: genai.Client) -> None:
        worker = session.stack.workers[0]
        config = CONFIG.model_copy()
        config.tool_config = types.ToolConfig(
            function_calling_config=types.FunctionCallingConfig(
                mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["look"]
            )
        )
        worker.script(text="No.")
        reply = client.models.generate_content(model="m", contents="a", config=config)
        assert "structural_tag" in worker.log[-1].body["sampling_params"]
        assert reply.candidates is not None
        assert reply.candidates[0].finish_reason == types.FinishReason.MALFORMED_FUNCTION_CALL


class TestConfig:
    def test_each_field_has_its_effect(self, session: AgentSession, client: genai.Client) -> None:
        worker = session.stack.workers[0]
        config = types.GenerateContentConfig(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            max_output_tokens=5,
            stop_sequences=["END"],
            seed=3,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            candidate_count=2,
            response_logprobs=True,
            logprobs=2,
            response_mime_type="application/json",
            response_schema={"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}},
        )
        since = len(worker.log)
        reply = client.models.generate_content(model="m", contents="a", config=config)
        records = worker.log[since:]
        sampling = records[0].body["sampling_params"]
        schema = '{"properties":{"a":{"type":["string","null"]}},"type":"object"}'
        wanted = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "max_new_tokens": 5,
            "sampling_seed": 3,
            "json_schema": schema,
        }
        assert {key: sampling[key] for key in wanted} == wanted
        assert (sampling["presence_penalty"], sampling["frequency_penalty"]) == (0.1, 0.2)
        assert "END" in sampling["stop"]
        assert reply.candidates is not None
        assert [one.finish_reason for one in reply.candidates] == [types.FinishReason.MAX_TOKENS] * 2
        found = sorted(
            [token.log_probability for token in one.logprobs_result.chosen_candidates or ()]
            for one in reply.candidates
            if one.logprobs_result
        )
        assert found == sorted(list(record.logprobs) for record in records)
        first = reply.candidates[0].logprobs_result
        assert first is not None
        assert first.top_candidates is not None
        assert {len(one.candidates or ()) for one in first.top_candidates} == {2}
        assert reply.usage_metadata is not None
        assert reply.usage_metadata.candidates_token_count == sum(len(record.output_ids) for record in records)

    def test_thinking_is_switched_off_by_a_budget_of_none(self, session: AgentSession, client: genai.Client) -> None:
        worker = session.stack.workers[0]
        thinking = types.ThinkingConfig(thinking_budget=0)
        config = types.GenerateContentConfig(thinking_config=thinking)
        client.models.generate_content(model="m", contents="a", config=config)
        text = session.stack.spelling.text_of_request(list(worker.log[-1].input_ids))
        assert text.endswith("<think>\n\n</think>\n\n")

    def test_a_prefill_is_continued(self, session: AgentSession, client: genai.Client) -> None:
        worker = session.stack.workers[0]
        worker.script(text=" is 4.")
        contents: list[Any] = [types.UserContent("2+2"), types.ModelContent("The answer")]
        reply = client.models.generate_content(model="m", contents=contents)
        assert reply.text == " is 4."
        text = session.stack.spelling.text_of_request(list(worker.log[-1].input_ids))
        assert text.endswith("The answer")

    def test_tokens_are_counted(self, session: AgentSession, client: genai.Client) -> None:
        counted = client.models.count_tokens(model="m", contents="Hello there").total_tokens
        assert session.show()["nodes"] == 0
        reply = client.models.generate_content(model="m", contents="Hello there")
        assert reply.usage_metadata is not None
        assert reply.usage_metadata.prompt_token_count == counted

    def test_models(self, session: AgentSession, client: genai.Client) -> None:
        (model,) = client.models.list()
        assert model.name is not None
        assert client.models.get(model=model.name).input_token_limit == model.input_token_limit
        with pytest.raises(errors.ClientError, match="there is no model") as refused:
            client.models.get(model="nobody")
        assert refused.value.code == 404


class TestErrors:
    def test_they_are_its_own(self, session: AgentSession, client: genai.Client) -> None:
        with pytest.raises(errors.ClientError, match="topP") as refused:
            client.models.generate_content(model="m", contents="a", config=types.GenerateContentConfig(top_p=7))
        assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
        config = types.GenerateContentConfig(cached_content="cachedContents/1")
        with pytest.raises(errors.ClientError, match="cachedContent"):
            client.models.generate_content(model="m", contents="a", config=config)
        with pytest.raises(errors.ClientError, match="exceeds the maximum number of tokens allowed"):
            client.models.generate_content(model="m", contents="word " * 40_000)
        gone = genai.Client(
            api_key="none", http_options=types.HttpOptions(base_url=f"{session.stack.url}/sessions/nobody")
        )
        with pytest.raises(errors.ClientError, match="POST /sessions") as refused:
            gone.models.generate_content(model="m", contents="a")
        assert (refused.value.code, refused.value.status) == (404, "NOT_FOUND")
        session.finalize()
        with pytest.raises(errors.ClientError) as refused:
            client.models.generate_content(model="m", contents="a")
        assert (refused.value.code, refused.value.status) == (409, "FAILED_PRECONDITION")

    def test_a_stream_that_fails(self, session: AgentSession, client: genai.Client) -> None:
        """An error behind the first event is raised: half a reply does not look whole."""
        worker = session.stack.workers[0]
        worker.script(text="one two three four five six")
        worker.fault("error_event")
        with pytest.raises(errors.APIError):
            list(client.models.generate_content_stream(model="m", contents="Count"))


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")
class TestManyAtOnce:
    async def _many(self, session: AgentSession) -> None:
        client = client_of(session)
        await asyncio.gather(
            *(
                client.aio.models.generate_content(
                    model="m", contents=str(number % 4), config=types.GenerateContentConfig(max_output_tokens=5)
                )
                for number in range(16)
            )
        )
        session.stack.workers[0].script(text="one two")
        chat = client.aio.chats.create(model="m")
        async for chunk in await chat.send_message_stream("b"):
            assert chunk.response_id

    def test_asynchronously(self, session: AgentSession) -> None:
        asyncio.run(self._many(session))
        assert len(session.finalize()) == 17


class TestPictures:
    @pytest.mark.parametrize("streamed", [False, True])
    def test_in_a_chat(self, sees: Stack, streamed: bool) -> None:
        session, worker = AgentSession.make(sees), sees.workers[0]
        since, client = len(worker.log), client_of(session)
        chat = client.chats.create(model="m")
        for content in PICTURES:
            worker.script(text="I see  it.")
            asked: list[Any] = ["See ", types.Part.from_bytes(data=content, mime_type="image/png")]
            if streamed:
                list(chat.send_message_stream(asked))
            else:
                chat.send_message(asked)
        assert list(worker.log[-1].images) == [digest(one) for one in PICTURES]
        check(session, since, len(PICTURES))

    def test_in_a_result(self, sees: Stack) -> None:
        session, worker = AgentSession.make(sees), sees.workers[0]
        contents: list[Any] = [
            types.UserContent("See"),
            types.Content(role="model", parts=[types.Part(function_call=types.FunctionCall(name="look", args={}))]),
        ]
        blob = types.FunctionResponseBlob(mime_type="image/png", data=PICTURES[0])
        response = types.FunctionResponse(
            name="look", response={"output": "here"}, parts=[types.FunctionResponsePart(inline_data=blob)]
        )
        contents.append(types.Content(role="user", parts=[types.Part(function_response=response)]))
        worker.script(text="I see it.")
        client = client_of(session)
        client.models.generate_content(model="m", contents=contents, config=types.GenerateContentConfig(tools=TOOLS))
        assert list(worker.log[-1].images) == [digest(PICTURES[0])]

    def test_what_is_none_is_refused(self, sees: Stack) -> None:
        client = client_of(AgentSession.make(sees))
        for part, word in (
            (types.Part.from_bytes(data=b"no image", mime_type="image/png"), "media_invalid"),
            (types.Part.from_uri(file_uri="https://example.org/a.png", mime_type="image/png"), "media_url"),
            (types.Part.from_bytes(data=b"RIFF", mime_type="audio/wav"), "multimodal_unsupported"),
        ):
            with pytest.raises(errors.ClientError) as refused:
                client.models.generate_content(model="m", contents=[part])
            assert refused.value.details["error"]["details"][0]["reason"] == word
