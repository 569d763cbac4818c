"""The way of a completion through `Completions`, in front of an engine in this process that does as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from middleware_hub.completions_middleware import Completions
from middleware_hub.served_models import ServedModels
from router.errors import BadRequestError, NoWorkerError
from router.http.disconnect import ClientConnection
from router.http.upstream import UpstreamBrokenError
from tests.middleware_hub.sessions.in_process import Client, tokenizer, until
from tests.support.asgi_backend import AsgiBackend

HEADERS = [(b"x-router-worker", b"http://engine"), (b"x-radix-recorded", b"exact"), (b"x-other", b"1")]


def reply(text: str, finish: dict[str, Any] | None, count: int, **meta: Any) -> dict[str, Any]:
    found = {"id": "g", "finish_reason": finish, "prompt_tokens": 4, "completion_tokens": count, "weight_version": "1"}
    return {"text": text, "output_ids": list(range(count)), "meta_info": {**found, "cached_tokens": 3, **meta}}


STOP = {"type": "stop", "matched": "END"}
ONE = reply("Four.", STOP, 2)


@dataclass
class Engine:
    """Says what it is told, in the place of `/generate`.

    Attributes:
        body: of a reply in one piece.
        events: of a stream; an exception in their place is raised there.
        done: whether `[DONE]` comes behind them.
        late: events behind that.
        hold: stop behind the first event until `go` is set.
    """

    body: Any = None
    events: list[Any] = field(default_factory=list)
    status: int = 200
    done: bool = True
    late: list[Any] = field(default_factory=list)
    hold: bool = False
    go: asyncio.Event = field(default_factory=asyncio.Event)
    scope: Scope = field(default_factory=dict)
    asked: Any = None
    left: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.asked = scope, json.loads((await receive())["body"])
        if isinstance(self.body, Exception):
            raise self.body
        try:
            async with ClientConnection(receive) as client:
                if self.asked["stream"] and self.status == 200:
                    await self._stream(send, client)
                else:
                    await self._whole(send, client)
        except BaseException:
            self.left = True
            raise

    async def _whole(self, send: Send, client: ClientConnection) -> None:
        if self.hold:
            await self.go.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": HEADERS})
        client.stop_watching()
        await send(_body(json.dumps(self.body).encode(), more=False))

    async def _stream(self, send: Send, client: ClientConnection) -> None:
        headers = [*HEADERS, (b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, event in enumerate(self.events):
            if isinstance(event, Exception):
                raise event
            await send(_body(b"data: " + json.dumps(event).encode() + b"\n\n", more=True))
            if self.hold and number == 0:
                await self.go.wait()
        client.stop_watching()
        done = [b"data: [DONE]\n\n"] if self.done else []
        late = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in self.late]
        await send(_body(b"".join(done + late), more=False))


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def no_models(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send(_body(b"", more=False))


def ask(engine: Engine, *, raw_headers: dict[str, str] | None = None, **body: Any) -> Client:
    hub: Any = SimpleNamespace(backend=AsgiBackend(no_models))
    app = Completions(AsgiBackend(engine).generate, tokenizer(), ServedModels(hub), max_body_bytes=10_000)
    return Client(app, "POST", "/v1/completions", {"prompt": "2 + 2 = ", **body}, raw_headers or {})


def answer(engine: Engine, **body: Any) -> tuple[int, Any]:
    """The whole reply; of a stream the data of its events."""

    async def work() -> tuple[int, Any]:
        return await ask(engine, **body).answer()

    return asyncio.run(work())


def test_a_whole_reply() -> None:
    status, found = answer(Engine(ONE), model="tiny")
    assert status == 200
    assert found["id"].startswith("cmpl-")
    assert (found["object"], found["model"]) == ("text_completion", "tiny")
    assert found["choices"][0] == {
        "index": 0,
        "text": "Four.",
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": "END",
        "meta_info": {"generation_id": "g", "weight_version": "1"},
    }
    assert found["usage"]["total_tokens"] == 6
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(stream: bool) -> None:
    told = {**ONE, "prompt_token_ids": [4, 5, 6, 7]}
    engine = Engine(told, events=[told])
    _, found = answer(engine, stream=stream, return_token_ids=True)
    assert engine.asked["return_prompt_token_ids"] is True
    (choice,) = (found[-2] if stream else found)["choices"]  # `[DONE]` comes last
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([4, 5, 6, 7], [0, 1])
    assert "prompt_token_ids" not in choice["meta_info"]


def test_no_token_ids_where_nobody_asks() -> None:
    engine = Engine(ONE)
    _, found = answer(engine, return_token_ids=False)
    assert "return_prompt_token_ids" not in engine.asked
    assert not {"prompt_token_ids", "token_ids"} & found["choices"][0].keys()


def test_what_is_asked_inside() -> None:
    async def work() -> None:
        engine = Engine(ONE)
        given = {"x-radix-namespace": "eval", "content-type": "text/plain", "content-length": "1", "x-mine": "1"}
        await ask(engine, raw_headers=given).answer()
        assert (engine.scope["method"], engine.scope["path"]) == ("POST", "/generate")
        headers = dict(engine.scope["headers"])
        assert headers[b"x-radix-namespace"] == b"eval"
        assert headers[b"content-type"] == b"application/json"
        assert int(headers[b"content-length"]) > 1
        assert headers[b"x-mine"] == b"1"
        assert engine.asked["text"] == "2 + 2 = "

    asyncio.run(work())


def test_the_headers_about_the_tokens_are_passed_on() -> None:
    async def work(**body: Any) -> None:
        client = ask(Engine(ONE, [ONE]), **body)
        await client.answer()
        headers = dict(client.out[0]["headers"])
        assert headers[b"x-radix-recorded"] == b"exact"
        assert headers[b"x-router-worker"] == b"http://engine"
        assert b"x-other" not in headers

    asyncio.run(work())
    asyncio.run(work(stream=True))


def test_a_batch_is_a_list_of_choices() -> None:
    replies = [reply(text, STOP, 2) for text in ("a", "b", "c", "d")]
    status, found = answer(Engine(replies), prompt=["one", "two"], n=2, echo=True)
    assert status == 200
    assert [choice["text"] for choice in found["choices"]] == ["onea", "oneb", "twoc", "twod"]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (8, 8)


def test_an_echo_of_ids_is_what_they_spell() -> None:
    ids = tokenizer().encode_start("2 + 2 = ")
    _, found = answer(Engine(ONE), prompt=ids, echo=True)
    assert found["choices"][0]["text"] == "2 + 2 = Four."


def test_errors_have_openais_form() -> None:
    status, found = answer(Engine(ONE), n=0)
    assert status == 400
    assert found["error"].keys() == {"message", "type", "param", "code"}
    assert (found["error"]["param"], found["error"]["type"]) == ("n", "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("engine", "status", "words"),
    [
        (lambda: Engine(NoWorkerError("nobody", headers=(("Retry-After", "1"),))), 503, "nobody"),
        (lambda: Engine(BadRequestError("never")), 400, "never"),
        (lambda: Engine({"error": {"message": "too hot"}}, status=400), 400, "too hot"),
        (lambda: Engine({"error": {"message": "longer than the model's context length"}}, status=400), 400, "longer"),
        (lambda: Engine({"object": "error", "message": "busy"}, status=503), 503, "busy"),
        (lambda: Engine("Internal Server Error", status=500), 502, "Internal"),
        (lambda: Engine(UpstreamBrokenError("it broke off")), 502, "it broke off"),
        (lambda: Engine("no reply", ["no reply"], done=False), 502, "worker"),
        (lambda: Engine({"text": 5, "meta_info": {}}, [{"text": 5, "meta_info": {}}]), 502, "worker"),
    ],
)
def test_what_goes_wrong_before_there_is_a_reply(
    engine: Callable[[], Engine], status: int, words: str, stream: bool
) -> None:
    found_status, found = answer(engine(), stream=stream)
    assert found_status == status, found
    assert words in found["error"]["message"]
    assert found["error"].keys() >= {"message", "type", "param", "code"}


def test_a_batch_with_too_few_replies() -> None:
    status, found = answer(Engine([ONE]), prompt=["a", "b"])
    assert status == 502
    assert "1 replies, asked for 2" in found["error"]["message"]


# -- streams -----------------------------------------------------------------------------------------------------------


def texts(found: list[Any], index: int = 0) -> str:
    return "".join(one["text"] for event in found[:-1] for one in event["choices"] if one["index"] == index)


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_a_stream_says_what_is_new(style: str) -> None:
    deltas, so_far = ["Fo", "", "ur", "."], ""
    events = []
    for number, delta in enumerate(deltas):
        so_far += delta
        ids = list(range(number + 1)) if style == "cumulative" else [number]
        shown = so_far if style == "cumulative" else delta
        entries = [[-0.5, token, None] for token in ids]
        tops = [[[-0.5, token, None], [-1.5, token + 9, None], [-2.5, token + 19, None]] for token in ids]
        last = number == len(deltas) - 1
        event = reply(
            shown, STOP if last else None, number + 1, output_token_logprobs=entries, output_top_logprobs=tops
        )
        events.append({**event, "output_ids": ids})
    status, found = answer(Engine(events=events), stream=True, logprobs=2, stream_options={"include_usage": True})
    assert (status, found[-1]) == (200, b"[DONE]")
    assert [one["text"] for event in found[:-2] for one in event["choices"]] == ["Fo", "ur", "."]
    logprobs = [one["logprobs"]["token_logprobs"] for event in found[:-2] for one in event["choices"]]
    assert logprobs == [[-0.5], [-0.5, -0.5], [-0.5]], "a token without a text comes with the next one that has some"
    spell = tokenizer().vocabulary.literal
    wanted = [{spell(token): -0.5, spell(token + 9): -1.5} for token in range(4)]
    assert [top for event in found[:-2] for top in event["choices"][0]["logprobs"]["top_logprobs"]] == wanted
    assert [one["finish_reason"] for event in found[:-2] for one in event["choices"]] == [None, None, "stop"]
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["completion_tokens"] == 4
    assert len({event["id"] for event in found[:-1]}) == 1


def test_events_go_on_as_they_come() -> None:
    async def work() -> None:
        engine = Engine(events=[reply("one", None, 1), reply("one two", STOP, 2)], hold=True)
        client = ask(engine, stream=True)
        await client.heard(b'"text":"one"')
        assert b"[DONE]" not in client.content
        engine.go.set()
        _, found = await client.answer()
        assert texts(found) == "one two"

    asyncio.run(work())


def test_what_comes_behind_the_end_of_a_stream_is_not_shown() -> None:
    _, found = answer(Engine(events=[ONE], late=[reply("Four. Five", None, 3)]), stream=True)
    assert texts(found) == "Four."
    assert found[-2]["choices"][0]["finish_reason"] == "stop"


def test_a_stream_of_a_batch() -> None:
    events = [
        {**reply("a", None, 1), "index": 0},
        {**reply("c", None, 1), "index": 1},
        {**reply("cd", STOP, 2), "index": 1},
        {**reply("ab", STOP, 2), "index": 0},
    ]
    _, found = answer(Engine(events=events), prompt=["one ", "two "], stream=True, echo=True)
    assert (texts(found, 0), texts(found, 1)) == ("one ab", "two cd")


def test_a_reply_that_only_ends_is_reported() -> None:
    _, found = answer(Engine(events=[reply("", {"type": "abort"}, 0)]), stream=True, echo=True)
    (choice,) = found[0]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("2 + 2 = ", "abort")
    assert found[-1] == b"[DONE]"


@pytest.mark.parametrize(
    ("event", "status", "words"),
    [
        ({"error": {"message": "too hot", "code": 400}}, 400, "the worker refused the request: too hot"),
        (reply("", {"type": "abort", "message": "busy", "status_code": 503}, 0), 503, "busy"),
    ],
)
def test_a_refusal_in_the_place_of_the_first_event_is_an_error(event: Any, status: int, words: str) -> None:
    found_status, found = answer(Engine(events=[event]), stream=True)
    assert found_status == status
    assert found["error"]["message"] == words


@pytest.mark.parametrize(
    "events",
    [
        [{"error": {"message": "no", "code": 500}}],
        [UpstreamBrokenError("it broke off")],
        [NoWorkerError("nobody")],
        ["no reply"],
        [{**reply("b", None, 2), "meta_info": None}],
        [],
    ],
)
def test_what_goes_wrong_in_a_stream_is_its_last_event(events: list[Any]) -> None:
    """Without `[DONE]`, for that is how a client knows that it has all."""
    status, found = answer(Engine(events=[reply("a", None, 1), *events], done=not events), stream=True)
    assert status == 200
    assert texts(found) == "a"
    assert set(found[-1]) == {"error"}


def test_a_stream_that_says_it_is_done_and_is_not() -> None:
    _, found = answer(Engine(events=[reply("a", None, 1)]), stream=True)
    assert set(found[-1]) == {"error"}


def test_an_event_of_a_reply_that_was_not_asked_for() -> None:
    _, found = answer(Engine(events=[{**ONE, "index": 0}, {**ONE, "index": 2}]), prompt=["a", "b"], stream=True)
    assert set(found[-1]) == {"error"}


# -- clients that leave ------------------------------------------------------------------------------------------------


def test_the_layers_inside_see_a_client_leave() -> None:
    async def work(*, stream: bool) -> None:
        engine = Engine(ONE, [reply("one", None, 1), reply("one two", STOP, 2)], hold=True)
        client = ask(engine, stream=stream)
        await (client.heard(b"one") if stream else until(lambda: engine.asked))
        await client.leave()
        assert engine.left

    asyncio.run(work(stream=True))
    asyncio.run(work(stream=False))


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_layers_inside_names_the_prompt_as_the_client_does(stream: bool) -> None:
    for inside in ("`input_ids` has 7 in it", "`text` encodes to no token at all"):
        status, found = answer(Engine(BadRequestError(inside)), stream=stream)
        assert status == 400
        assert found["error"]["message"] == "`prompt`" + inside[inside.rindex("`") + 1 :]
        assert found["error"]["param"] == "prompt"
    _, found = answer(Engine(BadRequestError("`top_k` must be positive", param="top_k")), stream=stream)
    assert (found["error"]["message"], found["error"]["param"]) == ("`top_k` must be positive", "top_k")


def test_a_body_that_is_too_large() -> None:
    assert answer(Engine(ONE), prompt="a" * 20_000)[0] == 413
