"""The same requests to a real vLLM and to the embedded engine with vLLM's routes: what comes back has the same shape.

The ordinary tests of fleets on vLLM rest on this. Where the two differ, the real one is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from tests.integration.test_both_engines import Ask, kinds, post, send
from tests.support.client import call
from tests.support.engine_server import EngineServer
from tests.support.engines import VLLM
from worker.vocabulary import load_vocabulary
from worker.worker import EmbeddedWorker

ENGINES = ("vllm",)

Json = dict[str, Any]
FEW = {"max_tokens": 4, "ignore_eos": True, "logprobs": 0}
IDS = [60, 61, 62]
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


def tokens(name: str, params: Json | None = None, **body: Any) -> Ask:
    sampling = {**FEW, **(params or {})}
    return post(name, {"token_ids": IDS, "sampling_params": sampling, **body}, GENERATE)


def completion(name: str, **body: Any) -> Ask:
    return post(name, {"prompt": IDS, **FEW, **body}, COMPLETIONS)


ASKS = [
    tokens("tokens"),
    tokens("text", output_mode="text"),
    tokens("no logprobs", {"logprobs": None}),
    tokens("top logprobs", {"logprobs": 2}),
    tokens("top logprobs in a text", {"logprobs": 2}, output_mode="text"),
    tokens("ids of the prompt", return_token_ids=True),
    tokens("several", {"n": 3}),
    tokens("a stream", stream=True),
    tokens("a stream of text", stream=True, output_mode="text", return_token_ids=True),
    tokens("a stream with usage", stream=True, stream_options={"include_usage": True}),
    tokens("unknown parameters", {"nonsense": 1}),
    tokens("no length", {"max_tokens": 0}),
    tokens("a negative temperature", {"temperature": -1}),
    tokens("a stream with a negative temperature", {"temperature": -1}, stream=True),
    tokens("a temperature above 2", {"temperature": 3}),
    tokens("no share of the likeliest tokens", {"top_p": 0}),
    tokens("a penalty of 5", {"frequency_penalty": 5}),
    tokens("an empty stop string", {"stop": [""]}),
    tokens("several, and greedy", {"n": 2, "temperature": 0}),
    tokens("more tokens at least than at most", {"min_tokens": 9}),
    tokens("a stop token outside the vocabulary", {"stop_token_ids": [999_999]}),
    tokens("a bias outside the vocabulary", {"logit_bias": {"999999": 1}}),
    tokens("a mode of output that there is not", output_mode="?"),
    tokens("no ids", token_ids=[]),
    tokens("an id outside the vocabulary", token_ids=[999_999]),
    tokens("a negative id", token_ids=[-1]),
    tokens("too many ids", token_ids=[60] * 5000),
    tokens("more than there is room for", {"max_tokens": 500}, token_ids=[60] * 4094),
    tokens("nothing said of the length", {"max_tokens": None}, token_ids=[60] * 4094),
    completion("a completion"),
    completion("a completion with ids", return_token_ids=True),
    completion("top logprobs of a completion", logprobs=2, return_token_ids=True),
    completion("several completions", n=2, return_token_ids=True),
    completion("completions of a list", prompt=[[60, 61], [62, 63]], return_token_ids=True),
    completion("a completion of a text", prompt="Hello", return_token_ids=True),
    completion("a stream of a completion", stream=True, return_token_ids=True),
    completion("a stream of completions", stream=True, n=2, return_token_ids=True),
    completion("a stream with its usage", stream=True, stream_options={"include_usage": True}),
    completion("a completion of no given length", max_tokens=None, return_token_ids=True),
    completion("a completion up to the context", prompt=[60] * 4070, max_tokens=4096, return_token_ids=True),
    completion("a completion beyond the context", prompt=[60] * 4070, max_tokens=4097),
    completion("a completion of nothing", prompt=[]),
    completion("a completion of no token", prompt=[999_999]),
    Ask("health", "GET", "/health"),
    Ask("ping", "GET", "/ping"),
    Ask("version", "GET", "/version"),
    Ask("load", "GET", "/load"),
    Ask("weights", "GET", "/weight_info"),
    Ask("paused", "GET", "/is_paused"),
    Ask("nowhere", "GET", "/nowhere"),
    Ask("by GET", "GET", "/v1/completions"),
    post("abort nobody", {"request_ids": ["nobody"]}, "/abort_requests"),
    post("abort all", {}, "/abort_requests"),
    post("abort without a body", None, "/abort_requests", raw=b""),
    post("abort some", {"request_ids": ["nobody"]}, "/inference/v1/abort_requests"),
    post("abort none", {}, "/inference/v1/abort_requests"),
    post("flush", None, "/reset_prefix_cache", raw=b""),
    post("pause", None, "/pause?mode=keep", raw=b""),
    post("resume", None, "/resume", raw=b""),
    post("pause in no mode", None, "/pause?mode=nap", raw=b""),
    post("a version", {"new_version": "7"}, "/update_weight_version"),
    post("no version", {}, "/update_weight_version"),
    post("a version that is a number", {"new_version": 7}, "/update_weight_version"),
    post("an update without a transfer", None, "/start_weight_update", raw=b""),
    post("the end of none", {"weight_version": "8"}, "/finish_weight_update"),
    post("weights from disk", {"method": "reload_weights"}, "/collective_rpc"),
    post("sleep", None, "/sleep?level=1", raw=b""),
    post("wake up", None, "/wake_up", raw=b""),
]


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(VLLM.kit.model, interface="vllm", context_length=4096, token_delay=0.005) as worker:
        yield worker


@pytest.fixture(scope="module", autouse=True)
def version_put_back(workers: list[EngineServer]) -> Iterator[None]:
    yield
    for worker in workers:
        VLLM.set_version(worker, "default")


def shapes(value: Any) -> Any:
    return kinds(_by_place(value))


def _by_place(value: Any) -> Any:
    """A JSON value whose candidates, which have their text for a key, are lists."""
    if isinstance(value, list):
        return [_by_place(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "text_offset" in value:
        return {**value, "top_logprobs": [list(one.values()) for one in value["top_logprobs"]]}
    return {key: _by_place(one) for key, one in value.items()}


def shape(url: str, ask: Ask) -> Any:
    """Status, content type, and of JSON the keys in their order and the kinds of the values."""
    status, kind, content = send(url, ask)
    if kind is None or not kind.startswith("text/event-stream"):
        found = shapes(json.loads(content)) if content else None
        # A refusal's words are vLLM's own, and so is whether it names a parameter.
        if status == 200:
            return status, kind, json.dumps(found)
        error = found.get("error") if isinstance(found, dict) else None
        return status, kind, sorted(error) if isinstance(error, dict) else json.dumps(found)
    *events, done, rest = content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    # How many tokens an event has is the engine's business: the first one, the last ones, and one between.
    read = [json.loads(event.removeprefix(b"data: ")) for event in events]
    by_choice: dict[Any, list[str]] = {}
    for event in read:
        number = event["choices"][0]["index"] if event["choices"] else "usage"
        by_choice.setdefault(number, []).append(json.dumps(shapes(event)))
    return status, kind, {number: (found[0], found[-1]) for number, found in sorted(by_choice.items(), key=str)}


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.name)
def test_the_shapes_are_the_same(workers: list[EngineServer], embedded: EmbeddedWorker, ask: Ask) -> None:
    assert shape(embedded.url, ask) == shape(workers[0].url, ask)


CASES: list[Json] = [
    {"max_tokens": 60},
    {"max_tokens": 60, "skip_special_tokens": False},
    {"max_tokens": 120, "logit_bias_eos": 5.0},
    {"max_tokens": 120, "logit_bias_eos": 5.0, "skip_special_tokens": False, "include_stop_str_in_output": True},
    {"max_tokens": 60, "stop": ["e"]},
    {"max_tokens": 60, "stop": [" t", "in", "(s"], "include_stop_str_in_output": True},
    {"max_tokens": 60, "stop_token_ids": list(range(0, 3000, 7))},
    {"max_tokens": 60, "min_tokens": 10, "stop": ["e", "a", "o"]},
    {"max_tokens": 3},
]


@pytest.mark.parametrize("stream", [False, True], ids=["reply", "stream"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[:80])
def test_the_embedded_engine_says_the_same_about_the_same_ids(
    workers: list[EngineServer], embedded: EmbeddedWorker, case: Json, stream: bool
) -> None:
    """Given the ids that a real worker sampled, its text and its end are the real ones."""
    vocabulary = load_vocabulary(str(VLLM.kit.model))
    params = {key: value for key, value in case.items() if key != "logit_bias_eos"} | {"logprobs": 0}
    if "logit_bias_eos" in case:
        params["logit_bias"] = {str(vocabulary.eos_id): case["logit_bias_eos"]}
    for prompt in ("Hello", "你好世界 😀", "def f(x):\n", "<|im_start|>user\nHi<|im_end|>\n"):
        body = {"token_ids": vocabulary.encode(prompt), "sampling_params": params, "output_mode": "text"}
        real = _whole(workers[0].url, {**body, "stream": stream})
        embedded.script(real["token_ids"], finish=None)
        copy = _whole(embedded.url, {**body, "stream": stream})
        for key in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert copy[key] == real[key], (key, real)
        spans = [[span["start"], span["end"]] for span in real["weight_versions"]]
        assert [[span["start"], span["end"]] for span in copy["weight_versions"]] == spans


def _whole(url: str, body: Json) -> Json:
    """The one choice of a reply, or of a stream put together."""
    answer = call(f"{url}{GENERATE}", body)
    assert answer.status == 200, answer.content
    if not body["stream"]:
        found: Json = answer.json()["choices"][0]
        return found
    events = [json.loads(event[6:]) for event in answer.content.split(b"\n\n")[:-2]]
    choices = [event["choices"][0] for event in events]
    text = "".join(choice["text"] for choice in choices)
    ids = [token for choice in choices for token in choice["token_ids"]]
    return {**choices[-1], "text": text, "token_ids": ids}


@pytest.mark.parametrize("pause", [None, "keep", "abort"])
def test_the_course_of_an_abort_is_the_same(
    workers: list[EngineServer], embedded: EmbeddedWorker, pause: str | None
) -> None:
    """By which name, in which pause, and how it ends."""
    courses = []
    for url in (workers[0].url, embedded.url):
        steps: list[Any] = []
        body = {"request_id": "x", "token_ids": IDS, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
        with ThreadPoolExecutor() as pool:
            if pause is not None:
                assert call(f"{url}/pause?mode={pause}", {}).status == 200
            begun = pool.submit(call, f"{url}{GENERATE}", body)
            steps.append(bool(wait([begun], 0.3).done))
            for name, patience in (("x", 0.3), ("generate-tokens-x", 3.0)):  # 4,000 tokens take two seconds and more
                assert call(f"{url}/inference/v1/abort_requests", {"request_ids": [name]}).status == 200
                steps.append(bool(wait([begun], patience).done))
            choice = begun.result().json()["choices"][0]
            steps.append((choice["finish_reason"], bool(choice["token_ids"]), choice["weight_versions"] == []))
            assert call(f"{url}/resume", {}).status == 200
        courses.append(steps)
    assert courses[0] == courses[1]
