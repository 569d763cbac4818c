"""OpenAI's older API of texts, with its own clients: what they get is what a worker sampled, and it is remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_openai import OpenAI as LangChain

from tests.support.asking import Asking, assert_kept, settle
from tests.support.stack import Stack, events, stack
from worker.engine.script import Fault
from worker.worker import EmbeddedWorker

PROMPT = "Question: how many?\nAnswer: "


@pytest.fixture(scope="module", params=["cumulative"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One worker, so that it is known whom to tell what it is to say; how it streams matters only to streams."""
    with stack("qwen", styles=(request.param,)) as made:
        yield made
        settle(made)


@pytest.fixture
def worker(served: Stack) -> Iterator[EmbeddedWorker]:
    (only,) = served.workers
    yield only
    only.release()
    only.forget_scripts()


@pytest.fixture
def client(served: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_text_is_continued_and_remembered(served: Stack, worker: EmbeddedWorker, client: openai.OpenAI) -> None:
    worker.script(text="four of them.")
    raw = client.completions.with_raw_response.create(model="m", prompt=PROMPT, max_tokens=20)
    reply, record = raw.parse(), worker.log[-1]
    assert not record.from_text
    assert reply.choices[0].text == "four of them."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(record.input_ids)
    assert reply.usage.completion_tokens == len(record.output_ids)
    assert raw.headers["x-radix-recorded"] == "exact"
    assert raw.headers["x-router-worker"] == worker.url
    assert reply.id.startswith("cmpl-")
    found = served.retrieve(PROMPT + "four of them.", request_id=reply.id.removeprefix("cmpl-"))
    assert_kept(found, record)


def test_the_next_turn_continues_the_tokens(served: Stack, worker: EmbeddedWorker, client: openai.OpenAI) -> None:
    prompt = f"Turns.\n{PROMPT}"
    worker.script(text="many, man")
    first = client.completions.create(model="m", prompt=prompt)
    chain = worker.log[-1].input_ids + worker.log[-1].output_ids
    following = prompt + first.choices[0].text + "\nQuestion: sure?\nAnswer: "
    worker.script(text="yes.")
    raw = client.completions.with_raw_response.create(model="m", prompt=following)
    assert worker.log[-1].input_ids[: len(chain)] == chain
    assert int(raw.headers["x-radix-reused-tokens"]) == len(chain)
    assert_kept(served.retrieve(following + "yes."), worker.log[-1])


def test_16_tokens_where_nobody_says_how_many(worker: EmbeddedWorker, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m", prompt=PROMPT)
    assert len(worker.log[-1].output_ids) == 16
    assert reply.choices[0].finish_reason == "length"
    assert client.completions.create(model="m", prompt=PROMPT, max_tokens=3).usage.completion_tokens == 3  # type: ignore[union-attr]


def test_a_stop_string(worker: EmbeddedWorker, client: openai.OpenAI) -> None:
    worker.script(text="one two END three")
    choice = client.completions.create(model="m", prompt=PROMPT, stop=["END"]).choices[0]
    assert (choice.text, choice.finish_reason) == ("one two ", "stop")
    assert choice.matched_stop == "END"  # type: ignore[attr-defined]


def test_ids_are_sent_as_they_are(worker: EmbeddedWorker, client: openai.OpenAI) -> None:
    worker.script(text="four", times=3)
    assert client.completions.create(model="m", prompt=[9707, 11]).choices[0].text == "four"
    assert worker.log[-1].input_ids == [9707, 11]
    both = client.completions.create(model="m", prompt=[[9707], [9707, 11]])
    assert [choice.text for choice in both.choices] == ["four", "four"]
    assert sorted(record.input_ids for record in worker.log[-2:]) == [[9707], [9707, 11]]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_what_the_worker_read_and_sampled(
    worker: EmbeddedWorker, client: openai.OpenAI, stream: bool
) -> None:
    worker.script(text="four of them.")
    reply = client.completions.create(
        model="m", prompt=PROMPT, max_tokens=20, stream=stream, extra_body={"return_token_ids": True}
    )
    choice: Any = ([*reply][-1] if stream else reply).choices[0]  # type: ignore[union-attr,attr-defined]
    assert (choice.prompt_token_ids, choice.token_ids) == (worker.log[-1].input_ids, worker.log[-1].output_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_with_several_samples(served: Stack, client: openai.OpenAI, stream: bool, space: str) -> None:
    prompts = ["First: ", "Second: "]
    headers = {"x-radix-namespace": space}
    texts = ["", "", "", ""]
    if stream:
        for chunk in client.completions.create(
            model="m", prompt=prompts, n=2, echo=True, stream=True, extra_headers=headers
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        reply = client.completions.create(model="m", prompt=prompts, n=2, echo=True, extra_headers=headers)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        texts = [choice.text for choice in reply.choices]
    assert [text.startswith(prompts[number // 2]) for number, text in enumerate(texts)] == [True] * 4
    records = {record.text: record for record in served.workers[0].log[-4:]}
    for number, text in enumerate(texts):
        reply_text = text.removeprefix(prompts[number // 2])
        assert_kept(served.retrieve(text, namespace=space), records[reply_text])


@pytest.mark.parametrize("served", ["cumulative", "incremental", "mixed"], indirect=True)
class TestStreams:
    """Of workers of each kind: each has its own way to stream."""

    def test_its_events_come_as_tokens_do(self, worker: EmbeddedWorker, client: openai.OpenAI) -> None:
        worker.script(text="one two three four five six")
        worker.hold(after=3)
        options: Any = {"include_usage": True}
        chunks = iter(client.completions.create(model="m", prompt=PROMPT, stream=True, stream_options=options))
        said = next(chunks).choices[0].text
        assert said
        worker.release()
        rest = list(chunks)
        said += "".join(choice.text for chunk in rest for choice in chunk.choices)
        assert said == "one two three four five six"
        assert [choice.finish_reason for chunk in rest for choice in chunk.choices][-1] == "stop"
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens == len(worker.log[-1].output_ids)

    def test_it_says_the_same_as_a_reply_in_one_piece(self, worker: EmbeddedWorker, client: openai.OpenAI) -> None:
        text = "naïve 😀 日本語 and 🤷🏽‍♀️ END"
        worker.script(text=text, times=2)
        asked: dict[str, Any] = {"model": "m", "prompt": PROMPT, "logprobs": 2, "echo": False, "max_tokens": 100}
        whole = client.completions.create(**asked).choices[0]
        pieces = [choice for chunk in client.completions.create(**asked, stream=True) for choice in chunk.choices]
        assert "".join(piece.text for piece in pieces) == whole.text == text
        assert whole.logprobs is not None
        joined: dict[str, list[Any]] = {}
        for piece in pieces:
            for name, values in piece.logprobs.model_dump().items() if piece.logprobs else ():
                joined.setdefault(name, []).extend(values)
        ours, theirs = whole.logprobs.model_dump(), [record.logprobs for record in worker.log[-2:]]
        assert ours["token_logprobs"] == theirs[0]
        assert joined["token_logprobs"] == theirs[1]
        assert (joined["tokens"], joined["text_offset"]) == (ours["tokens"], ours["text_offset"])
        for token, logprob, top in zip(joined["tokens"], joined["token_logprobs"], joined["top_logprobs"], strict=True):
            assert top[token] == logprob
        for token, offset in zip(ours["tokens"], ours["text_offset"], strict=True):
            assert token.startswith(("bytes:", "<|")) or text[offset:].startswith(token)

    def test_the_last_event_has_the_trajectory(self, worker: EmbeddedWorker, client: openai.OpenAI) -> None:
        worker.script(text="four")
        chunks = client.completions.create(
            model="m", prompt=PROMPT, stream=True, extra_body={"return_trajectory": True}
        )
        *_, last = chunks
        meta: dict[str, Any] = last.choices[0].meta_info  # type: ignore[attr-defined]
        assert_kept(meta["trajectory"], worker.log[-1])

    def test_a_client_that_leaves_ends_it(self, served: Stack, worker: EmbeddedWorker, asks: list[Asking]) -> None:
        worker.script(text="one two three four five six seven eight")
        worker.hold(after=4)
        asks.append(Asking(served.url, {"prompt": "Leaving: ", "stream": True}, path="/v1/completions"))
        assert asks[0].event()
        worker.wait_for_arrivals(1)
        asks[0].leave()
        worker.wait_until_idle()
        worker.release()
        settle(served)
        record = worker.log[-1]
        assert len(record.output_ids) < 8
        assert served.retrieve("Leaving: one two")["response_length"] >= 2, "what was streamed is remembered"


def test_a_client_that_leaves_ends_a_reply_in_one_piece(
    served: Stack, worker: EmbeddedWorker, asks: list[Asking]
) -> None:
    worker.hold(after=4)
    asks.append(Asking(served.url, {"prompt": PROMPT}, path="/v1/completions"))
    worker.wait_for_arrivals(1)
    asks[0].leave()
    worker.wait_until_idle()


def test_errors_are_what_its_library_knows(served: Stack, worker: EmbeddedWorker, client: openai.OpenAI) -> None:
    for body in ({"prompt": ""}, {"prompt": PROMPT, "suffix": "x"}, {"prompt": [10**8]}, {"prompt": "a", "top_p": 0}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="m", **body)  # type: ignore[call-overload]
        assert caught.value.type == "invalid_request_error"
    answer = served.post("/v1/completions", None, raw=b"{")
    assert (answer.status, answer.json()["error"].keys()) == (400, {"message", "type", "param", "code"})


FAULTS: list[Fault] = [
    "not_json",
    "no_done",
    "dies",
    "http_500",
    "http_503",
    "error_event",
    "abort_503",
    "late_count",
    "wrong_completion_tokens",
    "wrong_prompt_tokens",
    "wrong_text",
    "wrong_logprob_ids",
    "null_logprob",
    "missing_logprob",
    "missing_last_logprob",
    "no_logprobs",
]
LOUD = {"not_json", "no_done", "dies", "http_500", "http_503", "error_event", "abort_503"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_fails(
    worker: EmbeddedWorker, client: openai.OpenAI, served: Stack, fault: Fault, stream: bool
) -> None:
    """Half a reply never looks like a whole one; what is only wrong with its tokens is the router's business."""
    worker.script(text="one two three", fault=fault)
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPT, "logprobs": 1, "stream": stream}
    if fault in LOUD:
        with pytest.raises(openai.APIError):
            list(client.completions.create(**asked))
    else:
        reply = client.completions.create(**asked)
        pieces = [choice for chunk in (reply if stream else [reply]) for choice in chunk.choices]
        assert "".join(piece.text for piece in pieces).endswith("one two three")
        assert pieces[-1].finish_reason == "stop"
    settle(served)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt=[9707] * 40_000, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_an_abort_ends_it_with_what_there_is(served: Stack, worker: EmbeddedWorker, asks: list[Asking]) -> None:
    worker.script(text="one two three four five six")
    worker.hold(after=3)
    asks.append(Asking(served.url, {"prompt": PROMPT, "stream": True}, path="/v1/completions"))
    first = asks[0].event()
    assert first is not None
    worker.wait_for_arrivals(1)
    served.post("/abort_request", {"rid": first["id"].removeprefix("cmpl-")})
    last = asks[0].events()[-1]
    assert last["choices"][0]["finish_reason"] == "abort"
    worker.release()


def test_by_hand(served: Stack, worker: EmbeddedWorker) -> None:
    worker.script(text="four", times=2)
    whole = served.post("/v1/completions", {"prompt": PROMPT, "model": "tiny"})
    stream = served.post("/v1/completions", {"prompt": PROMPT, "model": "tiny", "stream": True})
    assert whole.headers["content-type"] == "application/json"
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-radix-recorded"] == "pending"
    assert {event["object"] for event in events(stream)} == {whole.json()["object"]} == {"text_completion"}
    assert {event["model"] for event in events(stream)} == {"tiny"}
    assert json.dumps(whole.json()).count("generation_id") == 1


def test_langchain(served: Stack, worker: EmbeddedWorker) -> None:
    model = LangChain(base_url=f"{served.url}/v1", api_key="none", model="m")  # type: ignore[arg-type]
    worker.script(text="four", times=4)
    assert model.invoke(PROMPT) == "four"
    assert "".join(model.stream(PROMPT)) == "four"
    result = model.generate(["one", "two"])
    assert [generations[0].text for generations in result.generations] == ["four", "four"]
