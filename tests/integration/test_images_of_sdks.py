"""Pictures from real clients: OpenAI's, Anthropic's, LangChain's. They change `base_url`, and one conversation is one sequence.

The oracle is the worker's own log: the ids that it computed with, and the digests of the pictures that it took.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.support.agents import AgentSession, ids_of
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
PICTURES = [picture(40 + turn, 30, turn) for turn in range(4)]
SAID = "I see  it."
MOST = 64  # tokens a reply: more than `SAID` has, since OpenAI's streams raise where a reply is cut


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=shipped_image_tokenizer()) as made:
        yield made
        assert made.idle()


@pytest.fixture
def session(served: Stack) -> AgentSession:
    for _ in PICTURES:
        served.workers[0].script(text=SAID)
    return AgentSession.make(served)


def check(session: AgentSession, since: int, shown: list[bytes] = PICTURES) -> None:
    """The session is one exact trajectory: each prompt of the worker begins with all that was before it."""
    chain: list[int] = []
    log = session.stack.workers[0].log[since:]
    for record in log:
        assert list(record.input_ids)[: len(chain)] == chain
        chain = [*record.input_ids, *record.output_ids]
    assert list(log[-1].images) == [digest(one) for one in shown]
    (only,) = session.finalize()
    assert (only["exact"], only["reasons"], only["num_turns"]) == (True, [], len(log))
    assert ids_of(only) == chain
    assert [one["digest"] for one in only["multi_modal_data"]["images"]] == [digest(one) for one in shown]


def url(session: AgentSession) -> str:
    return f"{session.stack.url}{session.path}"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chats(session: AgentSession, stream: bool) -> None:
    since = len(session.stack.workers[0].log)
    client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none", max_retries=0)
    messages: list[Any] = []
    for content in PICTURES:
        parts = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": data_url(content)}}]
        messages.append({"role": "user", "content": parts})
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, max_tokens=MOST) as running:
                message = running.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="m", messages=messages, max_tokens=MOST).choices[0].message
        messages.append(message)
    check(session, since)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(session: AgentSession, stream: bool, linked: bool) -> None:
    """The client sends its whole history, or names the response before."""
    since = len(session.stack.workers[0].log)
    client = openai.OpenAI(base_url=f"{url(session)}/v1", api_key="none", max_retries=0)
    history: list[Any] = []
    last: str | None = None
    for content in PICTURES:
        parts = [{"type": "input_image", "image_url": data_url(content), "detail": "auto"}]
        new = {"role": "user", "content": [*parts, {"type": "input_text", "text": "?"}]}
        history.append(new)
        asked: Json = {"model": "m", "input": [new] if linked else history, "max_output_tokens": MOST}
        if linked and last is not None:
            asked["previous_response_id"] = last
        if stream:
            with client.responses.stream(**asked) as running:
                response = running.get_final_response()
        else:
            response = client.responses.create(**asked)
        last = response.id
        history += response.output
    check(session, since)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(session: AgentSession, stream: bool) -> None:
    since = len(session.stack.workers[0].log)
    client = anthropic.Anthropic(base_url=url(session), api_key="none", max_retries=0)
    messages: list[Any] = []
    for content in PICTURES:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(content).decode()}
        messages.append({"role": "user", "content": [{"type": "image", "source": source}]})
        if stream:
            with client.messages.stream(model="m", messages=messages, max_tokens=MOST) as running:
                message = running.get_final_message()
        else:
            message = client.messages.create(model="m", messages=messages, max_tokens=MOST)
        messages.append({"role": "assistant", "content": message.content})
    check(session, since)


def parts_of_openai(content: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def parts_of_langchain(content: bytes) -> Any:
    return {"type": "image", "base64": base64.b64encode(content).decode(), "mime_type": "image/png"}


@pytest.mark.parametrize("part", [parts_of_openai, parts_of_langchain])
@pytest.mark.parametrize("responses", [False, True])
def test_langchain(session: AgentSession, part: Any, responses: bool) -> None:
    since = len(session.stack.workers[0].log)
    base = f"{url(session)}/v1"
    model = ChatOpenAI(
        model="m",
        base_url=base,
        api_key=SecretStr("none"),
        max_completion_tokens=MOST,
        use_responses_api=responses,
        max_retries=0,
    )
    messages: list[BaseMessage] = []
    for content in PICTURES:
        messages.append(HumanMessage([{"type": "text", "text": "See "}, part(content)]))
        messages.append(model.invoke(messages))
    check(session, since)
