"""Real clients in sessions: OpenAI's, Anthropic's, LangChain's. They change `base_url`, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai.types.responses import Response

from tests.support import templates
from tests.support.agents import TOOLS, AgentSession, call_text, ids_of
from tests.support.stack import Stack, stack

FUNCTIONS: list[Any] = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
CLAUDE_TOOLS: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Stack]:
    with stack(
        "qwen", styles=("cumulative",), sessions={"chat_template": str(templates.folder() / "qwen3.jinja")}
    ) as made:
        yield made
        assert made.idle()


@pytest.fixture
def session(engine: Stack) -> Iterator[AgentSession]:
    made = AgentSession.make(engine)
    yield made
    engine.workers[0].forget_scripts()


def url(session: AgentSession) -> str:
    return f"{session.stack.url}{session.path}"


def truth(session: AgentSession, since: int) -> list[int]:
    """All that the engine consumed and produced in the last of its generations, which begin with each other."""
    chain: list[int] = []
    for record in session.stack.workers[0].log[since:]:
        assert list(record.input_ids)[: len(chain)] == chain
        chain = [*record.input_ids, *record.output_ids]
    return chain


class TestAnthropicsToolRunner:
    """It keeps a thread at Anthropic's servers, and sends only the new messages, unless a server has no threads."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_tool_loop_is_one_trajectory(self, session: AgentSession, stream: bool) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)

        @anthropic.beta_tool
        def look(where: str, times: int) -> str:
            """Looks somewhere.

            Args:
                where: the place
                times: how often
            """
            return f"{where}: {times}"

        for number in range(3):
            worker.script(text=f"<think>\nhm {number}\n</think>\n\nI look.\n{call_text('there', number)}")
        worker.script(text="<think>\n\n</think>\n\nNowhere.")
        client = anthropic.Anthropic(base_url=url(session), api_key="none")
        runner = client.beta.messages.tool_runner(
            model="m",
            max_tokens=200,
            tools=[look],
            messages=[{"role": "user", "content": "Where is it?"}],
            stream=stream,
        )
        last = runner.until_done()
        assert [block.text for block in last.content if block.type == "text"] == ["Nowhere."]
        (only,) = session.finalize()
        assert ids_of(only) == truth(session, since)
        assert len(session.stack.workers[0].log) == since + 4

    def test_a_tool_that_is_added_on_the_way_is_called(self, session: AgentSession) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)

        @anthropic.beta_tool
        def wait(seconds: int) -> str:
            """Waits."""
            return f"{seconds} s"

        @anthropic.beta_tool
        def look(where: str, times: int) -> str:
            """Looks somewhere."""
            return f"{where}: {times}"

        worker.script(
            text='<think>\n\n</think>\n\n<tool_call>\n{"name": "wait", "arguments": {"seconds": 1}}\n</tool_call>'
        )
        worker.script(text=f"<think>\n\n</think>\n\n{call_text('there', 2)}")
        worker.script(text="<think>\n\n</think>\n\nNowhere.")
        client = anthropic.Anthropic(base_url=url(session), api_key="none")
        asked: list[Any] = [{"role": "user", "content": "Where is it?"}]
        runner = client.beta.messages.tool_runner(model="m", max_tokens=200, tools=[wait], messages=asked)
        replies = []
        for reply in runner:
            replies.append(reply)
            if len(replies) == 1:
                runner.add_tools(look)
        assert [block.type for reply in replies for block in reply.content] == ["tool_use", "tool_use", "text"]
        (only,) = session.finalize()
        assert ids_of(only) == truth(session, since)

    def test_who_asks_for_a_thread_is_told(self, session: AgentSession) -> None:
        client = anthropic.Anthropic(base_url=url(session), api_key="none")
        thread = client.beta.messages.thread(model="m", max_tokens=20)
        with pytest.raises(anthropic.BadRequestError, match="continue_unthreaded"):
            thread.send({"role": "user", "content": "Where is it?"})


class TestOpenAI:
    def test_a_tool_loop(self, session: AgentSession) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
        for number in range(4):
            worker.script(text=f"<think>\nhm {number}\n</think>\n\nI look.\n{call_text('there', number)}")
            reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            choice = reply.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"where": "there", "times": number}  # type: ignore[union-attr]
            messages.append(choice.message)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "nothing"})
        worker.script(text="<think>\n\n</think>\n\nNowhere.")
        assert client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message.content  # type: ignore[arg-type]
        (only,) = session.finalize()
        assert ids_of(only) == truth(session, since)

    def test_a_stream_is_a_stream(self, session: AgentSession) -> None:
        worker = session.stack.workers[0]
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        worker.script(text="<think>\nhm\n</think>\n\none two three four five six")
        worker.hold(after=8)
        stream = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Count"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = iter(stream)
        said = ""
        while "one" not in said:
            said += next(chunks).choices[0].delta.content or ""
        worker.release()
        rest = list(chunks)
        said += "".join(chunk.choices[0].delta.content or "" for chunk in rest if chunk.choices)
        assert said == "one two three four five six"
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens == len(worker.log[-1].output_ids)

    def test_headers_and_logprobs(self, session: AgentSession) -> None:
        worker = session.stack.workers[0]
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        worker.script(text="one two")
        raw = client.chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": "Count"}], logprobs=True, top_logprobs=2
        )
        reply = raw.parse()
        assert raw.headers["x-generation-id"] == session.show()["current_head"]
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [token.logprob for token in logprobs.content] == worker.log[-1].logprobs
        assert all(len(token.top_logprobs) == 2 for token in logprobs.content)

    def test_errors_are_its_own(self, session: AgentSession) -> None:
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(model="m", messages=[])
        gone = openai.OpenAI(base_url=f"{session.stack.url}/sessions/nobody/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="POST /sessions"):
            gone.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        session.finalize()
        with pytest.raises(openai.ConflictError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])

    def test_models(self, session: AgentSession) -> None:
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        assert [model.id for model in client.models.list()]

    async def _many(self, session: AgentSession) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url(session)}/v1", api_key="none") as client:
            await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": f"{number % 4}"}], max_tokens=5
                    )
                    for number in range(16)
                )
            )

    def test_many_at_once(self, session: AgentSession) -> None:
        asyncio.run(self._many(session))
        assert len(session.finalize()) == 16


class TestResponses:
    """OpenAI's Responses API, by OpenAI's own client."""

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_tool_loop(self, session: AgentSession, streamed: bool) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        items: list[Any] = [{"role": "user", "content": "Where is it?"}]

        def ask() -> Response:
            asked: dict[str, Any] = {
                "model": "m",
                "instructions": "You look.",
                "input": items,
                "tools": FUNCTIONS,
                "store": False,
            }
            if not streamed:
                reply: Response = client.responses.create(**asked)
                return reply
            with client.responses.stream(**asked) as stream:
                return stream.get_final_response()

        for number in range(3):
            worker.script(text=f"<think>\nhm {number}\n</think>\n\nI look.\n{call_text('there', number)}")
            reply = ask()
            assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
            assert reply.usage is not None
            assert reply.usage.output_tokens == len(worker.log[-1].output_ids)
            call = reply.output[-1]
            assert json.loads(call.arguments) == {"where": "there", "times": number}  # type: ignore[union-attr]
            items += reply.output
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "nothing"})  # type: ignore[union-attr]
        worker.script(text="<think>\n\n</think>\n\nNowhere.")
        assert ask().output_text == "Nowhere."
        (only,) = session.finalize()
        assert (only["exact"], only["num_turns"]) == (True, 4)
        assert ids_of(only) == truth(session, since)

    def test_a_chat_goes_on_as_responses_and_as_messages(self, session: AgentSession) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        ours = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        theirs = anthropic.Anthropic(base_url=url(session), api_key="none")
        worker.script(text=f"I look.\n{call_text('there')}")
        first = ours.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "a"}],
            tools=TOOLS,  # type: ignore[arg-type]
        )
        (call,) = first.choices[0].message.tool_calls or ()
        worker.script(text="Two.")
        used = {"type": "function_call", "call_id": call.id, "name": "look", "arguments": call.function.arguments}  # type: ignore[union-attr]
        second = ours.responses.create(
            model="m",
            tools=FUNCTIONS,
            input=[
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": first.choices[0].message.content or ""},
                used,  # type: ignore[list-item]
                {"type": "function_call_output", "call_id": call.id, "output": "nothing"},
            ],
        )
        worker.script(text="Three.")
        uses = [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": call.id, "name": "look", "input": {"where": "there", "times": 1}},
        ]
        theirs.messages.create(
            model="m",
            max_tokens=20,
            tools=CLAUDE_TOOLS,
            messages=[
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": uses},  # type: ignore[typeddict-item]
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "nothing"}]},
                {"role": "assistant", "content": second.output_text},
                {"role": "user", "content": "b"},
            ],
        )
        (only,) = session.finalize()
        assert ids_of(only) == truth(session, since)

    def test_it_counts_as_a_turn(self, session: AgentSession) -> None:
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        name = 'tito_router_requests_total{route="turn",status="200"}'

        def counted() -> float:
            lines = session.stack.get("/metrics").content.decode().splitlines()
            return sum(float(line.split()[1]) for line in lines if line.startswith(name))

        before = counted()
        client.responses.create(model="m", input="Count", max_output_tokens=3)
        assert counted() == before + 1

    def test_a_reply_that_ran_out_of_tokens_says_so(self, session: AgentSession) -> None:
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        reply = client.responses.create(model="m", input="Count", max_output_tokens=3)
        assert reply.status == "incomplete"
        assert reply.incomplete_details is not None
        assert reply.incomplete_details.reason == "max_output_tokens"

    def test_errors_are_its_own(self, session: AgentSession) -> None:
        client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="this session has not given") as refused:
            client.responses.create(model="m", input="a", previous_response_id="resp_1")
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
        with pytest.raises(
            openai.NotFoundError, match=r"there is nothing at .* a session has v1/chat/completions, .* finalize"
        ):
            client.responses.retrieve("resp_1")
        session.finalize()
        with pytest.raises(openai.ConflictError):
            client.responses.create(model="m", input="a")


class TestAnthropic:
    def test_a_tool_loop(self, session: AgentSession) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        client = anthropic.Anthropic(base_url=url(session), api_key="none")
        messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
        for number in range(3):
            worker.script(text=f"<think>\nhm {number}\n</think>\n\nI look.\n{call_text('there', number)}")
            reply = client.messages.create(
                model="m", max_tokens=200, system="You look.", messages=messages, tools=CLAUDE_TOOLS
            )
            assert reply.stop_reason == "tool_use"
            assert reply._request_id
            assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "nothing"}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        worker.script(text="<think>\n\n</think>\n\nNowhere.")
        last = client.messages.create(
            model="m", max_tokens=200, system="You look.", messages=messages, tools=CLAUDE_TOOLS
        )
        assert last.stop_reason == "end_turn"
        (only,) = session.finalize()
        assert ids_of(only) == truth(session, since)
        assert only["num_turns"] == 4

    def test_a_stream(self, session: AgentSession) -> None:
        worker = session.stack.workers[0]
        client = anthropic.Anthropic(base_url=url(session), api_key="none")
        worker.script(text=f"<think>\nhm\n</think>\n\nI look.\n{call_text('there', 3)}")
        with client.messages.stream(
            model="m", max_tokens=200, messages=[{"role": "user", "content": "Where?"}], tools=CLAUDE_TOOLS
        ) as stream:
            said = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert said == "I look."
        assert message.stop_reason == "tool_use"
        assert message.content[-1].input == {"where": "there", "times": 3}  # type: ignore[union-attr]
        assert message.usage.output_tokens == len(worker.log[-1].output_ids)

    def test_a_prefill_is_continued(self, session: AgentSession) -> None:
        worker = session.stack.workers[0]
        client = anthropic.Anthropic(base_url=url(session), api_key="none")
        worker.script(text=" is 4.")
        reply = client.messages.create(
            model="m",
            max_tokens=20,
            messages=[{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "The answer"}],
        )
        assert reply.content[0].text == " is 4."  # type: ignore[union-attr]
        record = worker.log[-1]
        assert session.stack.spelling.text_of_request(list(record.input_ids)).endswith("The answer")
        (only,) = session.finalize()
        assert only["messages"][-1]["content"] == "The answer is 4."

    def test_tokens_are_counted(self, session: AgentSession) -> None:
        client = anthropic.Anthropic(base_url=url(session), api_key="none")
        messages: list[Any] = [{"role": "user", "content": "Hello there"}]
        counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
        assert session.show()["nodes"] == 0
        reply = client.messages.create(model="m", max_tokens=5, messages=messages)
        assert reply.usage.input_tokens == counted

    def test_errors_are_its_own(self, session: AgentSession) -> None:
        client = anthropic.Anthropic(base_url=url(session), api_key="none", max_retries=0)
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="m", max_tokens=5, messages=[])
        assert refused.value.request_id == refused.value.response.headers["x-request-id"]
        session.finalize()
        with pytest.raises(anthropic.ConflictError):
            client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "a"}])

    def test_both_dialects_in_one_session(self, session: AgentSession) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        ours = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none")
        theirs = anthropic.Anthropic(base_url=url(session), api_key="none")
        worker.script(text="One.")
        first = ours.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        worker.script(text="Two.")
        theirs.messages.create(
            model="m",
            max_tokens=20,
            messages=[
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": first.choices[0].message.content or ""},
                {"role": "user", "content": "b"},
            ],
        )
        (only,) = session.finalize()
        assert ids_of(only) == truth(session, since)


class TestLangChain:
    def test_a_tool_loop(self, session: AgentSession) -> None:
        worker, since = session.stack.workers[0], len(session.stack.workers[0].log)
        model = ChatOpenAI(base_url=f"{url(session)}/v1", api_key="none", model="m").bind_tools(TOOLS)  # type: ignore[arg-type]
        messages: list[Any] = [HumanMessage("Where is it?")]
        for number in range(3):
            worker.script(text=f"<think>\nhm {number}\n</think>\n\nI look.\n{call_text('there', number)}")
            reply = model.invoke(messages)
            assert isinstance(reply, AIMessage)
            (call,) = reply.tool_calls
            assert call["args"] == {"where": "there", "times": number}
            messages += [reply, ToolMessage("nothing", tool_call_id=call["id"])]
        worker.script(text="<think>\n\n</think>\n\nNowhere.")
        assert model.invoke(messages).content == "Nowhere."
        (only,) = session.finalize()
        assert ids_of(only) == truth(session, since)

    def test_a_stream(self, session: AgentSession) -> None:
        worker = session.stack.workers[0]
        model = ChatOpenAI(base_url=f"{url(session)}/v1", api_key="none", model="m")  # type: ignore[arg-type]
        worker.script(text="one two three")
        assert "".join(str(chunk.content) for chunk in model.stream("Count")) == "one two three"
