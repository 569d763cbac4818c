"""The same requests to a real worker and to the embedded engine: what comes back has the same shape.

The shape of an answer is its status, its content type, and of its JSON the keys and the kinds of their values. Where the
two differ and shall, `KNOWN` says why.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support import sglang_server
from tests.support.sglang_server import SGLangServer
from worker.options import StreamStyle
from worker.worker import EmbeddedWorker

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

Json = Any
STYLES: tuple[StreamStyle, ...] = ("cumulative", "incremental")
Answered = tuple[int, str | None, bytes]
FEW = {"max_new_tokens": 4, "ignore_eos": True}
LONG = {"max_new_tokens": 3000, "ignore_eos": True}
MOMENT = 1.2  # seconds in which an answer would have come


@dataclass(frozen=True)
class Ask:
    """A request."""

    name: str
    method: str
    path: str
    body: Json = None
    raw: bytes | None = None
    kind: str = "application/json"

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True


@dataclass(frozen=True)
class Shape:
    """Of an answer."""

    status: int
    kind: str | None
    content: Json


def post(name: str, body: Json, path: str = "/generate", **more: Any) -> Ask:
    return Ask(name, "POST", path, body, **more)


def generate(name: str, **body: Any) -> Ask:
    prompt = {} if "text" in body or "input_ids" in body else {"text": "Hello"}
    return post(name, {**prompt, "sampling_params": FEW, **body})


def sampling(name: str, **params: Any) -> Ask:
    return generate(name, sampling_params={**FEW, **params})


EVERY_LOGPROB = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5, 7],
    "return_text_in_logprobs": True,
}

ASKS = [
    # -- replies
    generate("a text"),
    generate("ids", input_ids=[60, 61, 62]),
    Ask("by PUT", "PUT", "/generate", {"text": "Hello", "sampling_params": FEW}),
    generate("both", text="Hello", input_ids=[60, 61]),
    generate("no parameters", sampling_params=None),
    generate("unknown key", nonsense=1),
    generate("a name", rid="a-name"),
    generate("logprobs", return_logprob=True),
    generate("logprobs of the prompt", return_logprob=True, logprob_start_len=0),
    generate("logprobs from the third token on", input_ids=[60, 61, 62, 63], return_logprob=True, logprob_start_len=2),
    generate("top logprobs", return_logprob=True, top_logprobs_num=2),
    generate("chosen logprobs", return_logprob=True, token_ids_logprob=[5, 7]),
    generate("texts of logprobs", return_logprob=True, return_text_in_logprobs=True),
    generate("every logprob", **EVERY_LOGPROB),
    generate("logprob options without logprobs", top_logprobs_num=2, logprob_start_len=0),
    generate("ids of the prompt", return_prompt_token_ids=True),
    generate("nothing sampled", sampling_params={"max_new_tokens": 0}),
    sampling("stop string", stop=["e", "a", "i", "o", "t", "n", "s", " "], max_new_tokens=200),
    sampling("stop regex", stop_regex="[a-z]", max_new_tokens=200),
    sampling("stop ids", ignore_eos=False, stop_token_ids=list(range(3000)), max_new_tokens=200),
    sampling("several", n=2),
    generate("a list of one", text=["Hello"]),
    generate("a list", text=["Hello", "There"], return_logprob=True),
    generate("a list of ids", input_ids=[[60, 61], [62, 63]]),
    generate("a list with names", text=["Hello", "There"], rid=["one", "two"]),
    generate("a list with a stem", text=["Hello", "There"], rid="stem"),
    generate("a list with parameters for each", text=["Hello", "There"], sampling_params=[FEW, FEW]),
    generate("a list with logprobs of one", text=["Hello", "There"], return_logprob=[True, False]),
    sampling(
        "every parameter",
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        min_new_tokens=2,
        logit_bias={"60": 1.5},
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        no_stop_trim=True,
        custom_params={"a": 1},
    ),
    sampling("parameters that are null", temperature=None, top_p=None, top_k=None, stop=None, max_new_tokens=4),
    # -- streams
    generate("a stream", stream=True),
    generate("a stream with logprobs", stream=True, **EVERY_LOGPROB),
    generate("a stream of a list", stream=True, text=["Hello", "There"]),
    generate("a stream of several", stream=True, sampling_params={**FEW, "n": 2}),
    generate("a stream with ids of the prompt", stream=True, return_prompt_token_ids=True),
    generate("a stream with an interval", stream=True, sampling_params={**FEW, "stream_interval": 2}),
    generate("a stream that is wrong", stream=True, sampling_params={"temperature": -1}),
    generate("a stream with an unknown parameter", stream=True, sampling_params={"max_tokens": 1}),
    # -- what is refused
    post("no prompt", {}),
    post("no object", [1]),
    post("no JSON", None, raw=b"{nope"),
    post("no body", None, raw=b""),
    post("not called JSON", None, raw=b'{"text": "Hello"}', kind="text/plain"),
    post("a text that is none", {"text": 5}),
    post("texts that are none", {"text": ["a", 5]}),
    post("no texts", {"text": []}),
    post("ids that are text", {"input_ids": "abc"}),
    post("ids that are fractions", {"input_ids": [1.5]}),
    post("no ids", {"input_ids": []}),
    post("more ids than there is room for", {"input_ids": [60] * 40000}),
    post(
        "as many ids as there is room for, and more",
        {"input_ids": [60] * 4000, "sampling_params": {"max_new_tokens": 97}},
    ),
    post(
        "nearly as many ids as there is room for", {"input_ids": [60] * 4094, "sampling_params": {"max_new_tokens": 1}}
    ),
    generate("parameters that are none", sampling_params="x"),
    generate("parameters for each that are none", text=["Hello"], sampling_params=[5]),
    generate("too many parameters for a list", text=["Hello", "There"], sampling_params=[FEW] * 3),
    generate("a list of answers for one", return_logprob=[True]),
    generate("a count of logprobs that is none", return_logprob=True, top_logprobs_num="x"),
    generate("a start of logprobs that is none", return_logprob=True, logprob_start_len="x"),
    generate("a start of logprobs behind the prompt", return_logprob=True, logprob_start_len=50),
    generate("ids for logprobs that are none", return_logprob=True, token_ids_logprob=5),
    generate("ids for logprobs outside the vocabulary", return_logprob=True, token_ids_logprob=[10**7]),
    generate("chosen logprobs of a list", text=["a", "b"], return_logprob=True, token_ids_logprob=[[5], [6, 7]]),
    generate("no chosen logprobs", return_logprob=True, token_ids_logprob=[]),
    generate("chosen logprobs of nobody", return_logprob=True, token_ids_logprob=[[5]]),
    generate("chosen logprobs that are none", return_logprob=True, token_ids_logprob=[5, [6]]),
    generate("less than no top logprobs", return_logprob=True, top_logprobs_num=-1),
    generate("counts of logprobs that are none", text=["a", "b"], return_logprob=True, top_logprobs_num=[1, "x"]),
    generate("answers that are none", text=["a", "b"], return_logprob=[True, "x"]),
    generate("a stream that is none", stream="x"),
    generate("a stream of too many ids", stream=True, input_ids=[60] * 40000),
    generate("too few names for a list", text=["Hello", "There"], rid=["one"]),
    generate("a name that is none", rid=5),
    generate("the same name twice", text=["Hello", "There"], rid=["x", "x"]),
    sampling("an unknown parameter", max_tokens=3),
    sampling("a number that is none", max_new_tokens="a"),
    sampling("a count that is a fraction", max_new_tokens=1.5),
    sampling("a negative temperature", temperature=-1),
    sampling("a negative length", max_new_tokens=-1),
    sampling("top_p of none", top_p=0),
    sampling("top_k of none", top_k=0),
    sampling("min_p of two", min_p=2),
    sampling("a penalty of three", frequency_penalty=3),
    sampling("a repetition of none", repetition_penalty=0),
    sampling("more at least than at most", min_new_tokens=5),
    sampling("a bias outside the vocabulary", logit_bias={"10000000": 1}),
    sampling("no samples", n=0),
    sampling("a bias of no token", logit_bias={"x": 1}),
    sampling("a bias that is none", logit_bias=5),
    sampling("a stop that is none", stop=5),
    sampling("stops that are none", stop=[5]),
    sampling("more stops than are allowed", stop=["x"] * 40),
    sampling("stop ids that are none", stop_token_ids=5),
    sampling("stop ids of which one is none", stop_token_ids=[5, "a"]),
    sampling("a bias of null", logit_bias={"5": None}),
    sampling("a switch that is none", ignore_eos="x"),
    sampling("two grammars", json_schema="{}", regex="a"),
    sampling("a seed", sampling_seed=5),
    sampling("a pattern that is too long", stop_regex="a" * 300),
    sampling("more patterns than are allowed", stop_regex=["x"] * 40),
    post(
        "as many tokens as there is room for", {"input_ids": [60] * 4000, "sampling_params": {"max_new_tokens": None}}
    ),
    # -- about the worker
    Ask("ping", "GET", "/ping"),
    Ask("ready", "GET", "/ready"),
    Ask("health", "GET", "/health"),
    Ask("health by a token", "GET", "/health_generate"),
    Ask("the model", "GET", "/model_info"),
    Ask("the model, as it was", "GET", "/get_model_info"),
    Ask("the server", "GET", "/server_info"),
    Ask("the server, as it was", "GET", "/get_server_info"),
    Ask("models", "GET", "/v1/models"),
    Ask("nowhere", "GET", "/nowhere"),
    Ask("generate by GET", "GET", "/generate"),
    post("ping by POST", {}, "/ping"),
    post("ids of a text", {"prompt": "Hello there"}, "/tokenize"),
    post("ids of a text alone", {"prompt": "Hello there", "add_special_tokens": False}, "/tokenize"),
    Ask("abort by GET", "GET", "/abort_request"),
    # -- commands
    post("abort nobody", {"rid": "nobody"}, "/abort_request"),
    post("abort", {}, "/abort_request"),
    post("abort without a body", None, "/abort_request", raw=b""),
    post("abort all", {"abort_all": True}, "/abort_request"),
    post("abort a number", {"rid": 5}, "/abort_request"),
    post("pause without a body", None, "/pause_generation", raw=b""),
    post("pause in no mode", {"mode": "nap"}, "/pause_generation"),
    post("continue", {}, "/continue_generation"),
    post("continue without a body", None, "/continue_generation", raw=b""),
    post("flush", {}, "/flush_cache"),
    Ask("flush by GET", "GET", "/flush_cache"),
    post("a version", {"new_version": "7"}, "/update_weight_version"),
    post("a version without aborts", {"new_version": "8", "abort_all_requests": False}, "/update_weight_version"),
    post("no version", {}, "/update_weight_version"),
    post("a version that is a number", {"new_version": 7}, "/update_weight_version"),
    post("weights without a path", {}, "/update_weights_from_disk"),
    post(
        "weights", {"model_path": str(sglang_server.model_path()), "weight_version": "9"}, "/update_weights_from_disk"
    ),
    post("tensors without any", {}, "/update_weights_from_tensor"),
    post("distributed without names", {}, "/update_weights_from_distributed"),
    post("ipc without handles", {}, "/update_weights_from_ipc"),
]

# Keys that are looked at on neither side, and why.
KNOWN: dict[str, str] = {
    "cached_tokens_details": "the embedded engine has no cache; null is what a real one says of a prompt that was not cached",
    "embedding": "what of /model_info is for models that embed",
    "context_length": "of /server_info: null at a real one that was not told it",
}
# Paths of which the embedded engine tells only a part: what a router asks for.
PARTIAL = ("/server_info", "/get_server_info")


@pytest.fixture(scope="module", autouse=True)
def versions_put_back(sglang_workers: list[SGLangServer]) -> Iterator[None]:
    """The workers are those of other tests, too, which take it that all have the same weights."""
    yield
    for worker in sglang_workers:
        body = {"new_version": "default", "abort_all_requests": False}
        ask = Ask("put back", "POST", "/update_weight_version", body)
        assert send(worker.url, ask)[0] == 200


@pytest.fixture(scope="module")
def embedded() -> Iterator[list[EmbeddedWorker]]:
    """Like the real ones: the first streams cumulatively, the second in deltas."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                EmbeddedWorker(sglang_server.model_path(), context_length=4096, token_delay=0.005, stream_style=style)
            )
            for style in STYLES
        ]


def send(url: str, ask: Ask, timeout: float = 300) -> Answered:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        raw = ask.raw if ask.raw is not None or ask.body is None else json.dumps(ask.body).encode()
        connection.request(ask.method, ask.path, raw, {"content-type": ask.kind} if raw is not None else {})
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-type"), answer.read()
    finally:
        connection.close()


def shape(url: str, ask: Ask) -> Shape:
    assert send(url, post("", {}, "/flush_cache"))[0] == 200
    status, kind, content = send(url, ask)
    return Shape(status, kind, _content(kind, content))


def _content(kind: str | None, content: bytes) -> Json:
    if kind is not None and kind.startswith("application/json"):
        return kinds(json.loads(content))
    if kind is None or not kind.startswith("text/event-stream"):
        return bool(content)
    *events, done, rest = content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    found = [json.loads(event.removeprefix(b"data: ")) for event in events]
    last = {event.get("index"): number for number, event in enumerate(found)}
    # What lies between a first event and a last one depends on how the engine joined its tokens.
    return [kinds(found[0]), *(kinds(found[number]) for number in sorted(last.values()))]


def kinds(value: Json) -> Json:
    """JSON without its values: of a list the different kinds that are in it."""
    if isinstance(value, dict):
        return {key: kinds(one) for key, one in value.items() if key not in KNOWN}
    if isinstance(value, list):
        found: list[Json] = []
        for one in map(kinds, value):
            if one not in found:
                found.append(one)
        return found
    return "null" if value is None else type(value).__name__


@pytest.mark.parametrize(
    ("ask", "number"),
    [
        pytest.param(ask, number, id=f"{ask.name}-{STYLES[number]}")
        for ask in ASKS
        for number in (0, 1)[: 1 + ask.streams]
    ],
)
def test_the_shapes_are_the_same(
    sglang_workers: list[SGLangServer], embedded: list[EmbeddedWorker], ask: Ask, number: int
) -> None:
    """The order of the keys is, too."""
    real, copy = shape(sglang_workers[number].url, ask), shape(embedded[number].url, ask)
    if ask.path in PARTIAL:
        real = replace(real, content={key: real.content.get(key) for key in copy.content})
    if ask.name == "no parameters":  # by what a random reply ends is chance
        for one in (real, copy):
            one.content["meta_info"]["finish_reason"] = "any"
    assert copy == real
    assert json.dumps(copy.content) == json.dumps(real.content)
    assert embedded[number].out_of_range == []


# -- one after the other -------------------------------------------------------------------------------------------------


class Talk:
    """Requests to one worker, some of them at the same time."""

    def __init__(self, url: str, style: StreamStyle, pool: ThreadPoolExecutor) -> None:
        self.url = url
        self.style = style
        self._pool = pool

    def say(self, path: str, body: Json = None) -> int:
        return send(self.url, Ask("", "GET" if body is None else "POST", path, body))[0]

    def begin(self, rid: str, **body: Any) -> Future[Answered]:
        """A long reply, which runs when this returns, or waits for the end of a pause."""
        ask = generate("", rid=rid, sampling_params=LONG, return_logprob=True, **body)
        begun = self._pool.submit(send, self.url, ask, 120)
        assert self.is_waiting(begun)
        return begun

    def is_waiting(self, begun: Future[Answered]) -> bool:
        return not wait([begun], MOMENT).done


def ending(begun: Future[Answered], style: StreamStyle = "cumulative") -> Json:
    """How a reply ended, what of it there was, and how much of it more than once."""
    status, kind, content = begun.result()
    events = [content]
    if kind is not None and kind.startswith("text/event-stream"):
        events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n")[:-2]]
    replies = [json.loads(event) for event in (events if style == "incremental" else events[-1:])]
    reply, meta = replies[-1], replies[-1]["meta_info"]
    count = meta["completion_tokens"]
    ids = sum(len(one["output_ids"]) for one in replies) - count
    told = sum(len(one["meta_info"]["output_token_logprobs"]) for one in replies) - count
    return status, meta["finish_reason"], kinds(reply), count > 0, ids, told == count if told else "once"


def abort_of_a_running_one(talk: Talk) -> Iterator[Json]:
    begun = talk.begin("both-1")
    yield talk.say("/flush_cache", {})
    yield talk.say("/abort_request", {"rid": "both"})
    yield talk.is_waiting(begun)
    yield talk.say("/abort_request", {"rid": "both-1"})
    yield ending(begun)


def abort_of_all(talk: Talk) -> Iterator[Json]:
    begun = [talk.begin("both-2"), talk.begin("both-3")]
    yield talk.say("/abort_request", {"abort_all": True})
    yield [ending(one) for one in begun]


def abort_by_a_new_version(talk: Talk) -> Iterator[Json]:
    begun = talk.begin("both-4")
    yield talk.say("/update_weight_version", {"new_version": "both", "abort_all_requests": False})
    yield talk.is_waiting(begun)
    yield talk.say("/update_weight_version", {"new_version": "both again"})
    yield ending(begun)


def pause_that_aborts(talk: Talk) -> Iterator[Json]:
    begun = talk.begin("both-5")
    yield talk.say("/pause_generation", {"mode": "abort"})
    yield begun.done() or not talk.is_waiting(begun)
    yield ending(begun)
    yield [talk.say(path) for path in ("/ready", "/ping")]
    parked = talk.begin("both-6")
    yield talk.is_waiting(parked)
    yield talk.say("/abort_request", {"rid": "both-6"})
    yield talk.is_waiting(parked)
    yield talk.say("/flush_cache", {})
    yield talk.say("/update_weight_version", {"new_version": "in a pause", "abort_all_requests": False})
    yield talk.say("/continue_generation", {})
    yield talk.is_waiting(parked)
    yield talk.say("/abort_request", {"abort_all": True})
    yield ending(parked)
    yield [talk.say(path) for path in ("/ready", "/ping")]


def pause_in_place(talk: Talk) -> Iterator[Json]:
    begun = talk.begin("both-7")
    yield talk.say("/pause_generation", {"mode": "in_place"})
    yield [talk.say(path) for path in ("/ready", "/ping", "/model_info")]
    yield talk.say("/abort_request", {"rid": "both-7"})
    yield talk.is_waiting(begun)
    yield talk.say("/continue_generation", {})
    yield ending(begun)


def pause_that_retracts(talk: Talk) -> Iterator[Json]:
    begun = talk.begin("both-8")
    going_on = talk.begin("both-9")
    yield talk.say("/pause_generation", {"mode": "retract"})
    yield talk.say("/abort_request", {"rid": "both-8"})
    yield ending(begun)
    yield talk.say("/flush_cache", {})
    yield talk.say("/continue_generation", {})
    yield talk.is_waiting(going_on)
    yield talk.say("/abort_request", {"abort_all": True})
    yield ending(going_on)


def pause_that_retracts_a_stream(talk: Talk) -> Iterator[Json]:
    begun = talk.begin("both-10", stream=True)
    yield talk.say("/pause_generation", {"mode": "retract"})
    yield talk.say("/abort_request", {"rid": "both-10"})
    yield ending(begun, talk.style)


SCENES: list[Callable[[Talk], Iterator[Json]]] = [
    abort_of_a_running_one,
    abort_of_all,
    abort_by_a_new_version,
    pause_that_aborts,
    pause_in_place,
    pause_that_retracts,
    pause_that_retracts_a_stream,
]


@pytest.mark.parametrize(
    ("scene", "number"),
    [
        *(pytest.param(scene, 0, id=scene.__name__) for scene in SCENES),
        pytest.param(pause_that_retracts_a_stream, 1, id="pause_that_retracts_a_stream-incremental"),
    ],
)
def test_the_course_is_the_same(
    sglang_workers: list[SGLangServer],
    embedded: list[EmbeddedWorker],
    scene: Callable[[Talk], Iterator[Json]],
    number: int,
) -> None:
    """Step by step: what is answered, what waits, how it ends."""
    with ThreadPoolExecutor(8) as pool:
        steps: list[list[Json]] = []
        for url in (sglang_workers[number].url, embedded[number].url):
            talk = Talk(url, STYLES[number], pool)
            try:
                steps.append(list(scene(talk)))
            finally:
                talk.say("/continue_generation", {})
                talk.say("/abort_request", {"abort_all": True})
    real, copy = steps
    assert copy == real
