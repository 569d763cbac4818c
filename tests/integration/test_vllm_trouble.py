"""vLLM workers that fail, are aborted early, or come back as something else; and calls of vLLM in front of SGLang workers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import AbortConfig
from tests.support.asking import Asking, calls, settle, until
from tests.support.client import Answer
from tests.support.stack import Stack, events, stack
from tests.support.vocabularies import vocabulary
from worker.engine.script import Fault
from worker.options import Interface
from worker.worker import EmbeddedWorker

LONG = {"max_new_tokens": 50, "ignore_eos": True}
BRIEF: dict[str, Any] = {"text": "A:", "sampling_params": {"max_new_tokens": 2}}


@contextlib.contextmanager
def alone(interface: Interface = "vllm", **worker: Any) -> Iterator[tuple[Stack, EmbeddedWorker]]:
    """A router with one worker."""
    abort = AbortConfig(policy="return", attempts=1, wait=0)
    with stack("qwen", styles=("cumulative",), abort=abort, interface=interface, **worker) as served:
        yield served, served.workers[0]


def test_an_error_of_one_prompt_ends_the_stream_of_all_at_once(asks: list[Asking]) -> None:
    """Its client does not wait for the others, and their worker does not go on with them."""
    with alone() as (served, worker):
        worker.script(fault="error_event")
        worker.hold(after=3)
        asks.append(Asking(served.url, {"text": ["A:", "B:"], "stream": True, "sampling_params": LONG}))
        found = asks[-1].events()
        assert [event["error"]["code"] for event in found if "error" in event] == [500]
        assert "error" in found[-1]
        until(lambda: not worker.in_flight)
        settle(served)


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_stream_that_is_aborted_before_its_first_token_ends_well(
    scale_out: bool, samples: int, asks: list[Asking]
) -> None:
    """`/v1/completions` says nothing at all about such a generation."""
    with alone(scale_out=scale_out) as (served, worker):
        assert served.post("/pause_generation", {"mode": "in_place"}).status == 200
        body = {"text": "A:", "stream": True, "sampling_params": {**LONG, "n": samples}, "return_logprob": True}
        asks.append(Asking(served.url, body))
        until(lambda: worker.in_flight == samples)
        assert served.post("/abort_request", {"abort_all": True}).status == 200
        found = asks[-1].events()
        assert [event["meta_info"]["finish_reason"]["type"] for event in found] == ["abort"] * samples
        assert {event["meta_info"]["prompt_tokens"] for event in found} == {len(worker.log[0].input_ids)}
        assert [event["output_ids"] for event in found] == [[]] * samples
        assert [event["meta_info"]["output_token_logprobs"] for event in found] == [[]] * samples
        assert len(worker.log) == samples, "it was not sent again"
        assert served.post("/continue_generation", {}).status == 200
        settle(served)


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize("stop", ["\nObservation:", "me"], ids=["of many tokens", "inside of one"])
def test_what_a_worker_held_back_from_a_client_that_left_is_kept(
    scale_out: bool, stop: str, asks: list[Asking], space: str
) -> None:
    """It sends the ids at once, and the text without its last characters: a stop string may begin in them."""
    with alone(scale_out=scale_out) as (served, worker):
        ids = [
            one for piece in ("Hel", "lo", " sum", "mary", " of", " it") for one in served.spelling.encode_tail(piece)
        ]
        worker.script(ids, finish=None)
        worker.hold(after=len(ids))
        body = {"text": "A:", "stream": True, "rid": space, "sampling_params": {**LONG, "stop": [stop]}}
        asks.append(Asking(served.url, body))
        events = [asks[-1].event() for _ in ids]
        asks[-1].leave()
        until(lambda: not worker.in_flight)
        settle(served)
        last, whole = events[-1], served.spelling.spell(ids, skip_special=False).text
        assert last is not None
        assert (last["output_ids"], last["text"]) == (ids, whole[: 1 - len(stop)])
        assert worker.log[0].output_ids[: len(ids)] == ids
        found = served.retrieve("A:" + last["text"])
        prompt = worker.log[0].input_ids
        assert found["exact"], found["reasons"]
        assert (found["tokens"], found["loss_mask"]) == (prompt + ids, [0] * len(prompt) + [1] * len(ids))
        worker.forget_scripts()
        later = served.generate({"text": f"A:{whole}!", "sampling_params": {"max_new_tokens": 1}}).record
        assert later.input_ids == prompt + ids + served.spelling.encode_tail("!")
        cut = served.generate({"text": f"A:{last['text']}!", "sampling_params": {"max_new_tokens": 1}}).record
        assert cut.input_ids[: len(prompt) + 1] == prompt + ids[:1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["\ufffd", "half"])
def test_a_prompt_that_its_worker_repeats_is_no_part_of_the_reply(end: str, stream: bool) -> None:
    """vLLM begins the text of a reply with the whole prompt if that ends with U+FFFD, or inside of a character."""
    with alone() as (served, worker):
        prompt = served.spelling.encode_start("Tell me: ") + served.spelling.encode_tail("\ufffd")
        ids = served.spelling.encode_tail(" of it")
        if end == "half":
            character = served.spelling.encode_tail("🧿")
            prompt, ids = prompt[:-1] + character[:-1], character[-1:] + ids
        worker.script(ids, finish="length")
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": len(ids)}, "stream": stream, "rid": "it"}
        reply = served.generate(body)
        assert reply.record.output_ids == ids
        last = reply.body[-1] if stream else reply.body
        assert (last["text"], last["output_ids"]) == (" of it", ids)
        found = served.retrieve("Tell me: \ufffd of it", request_id="it")
        assert (found["tokens"], found["exact"]) == (prompt + ids, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_its_worker_repeats_is_no_part_of_a_message(stream: bool, tmp_path: Path) -> None:
    """Behind the user's text this template, as Mistral's, has only special tokens, which the text of a reply leaves out."""
    template = tmp_path / "special.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}<|im_end|>{% endfor %}")
    with alone(sessions={"chat_template": str(template)}) as (served, worker):
        path = f"/sessions/{served.post('/sessions', {}).json()['session_id']}"
        worker.script(served.spelling.encode_tail("Of it."), finish="length")
        body = {"model": "m", "messages": [{"role": "user", "content": "Cut here: \ufffd"}], "stream": stream}
        answer = served.post(f"{path}/v1/chat/completions", body)
        if stream:
            pieces = [event["choices"][0]["delta"].get("content") or "" for event in events(answer)]
        else:
            pieces = [answer.json()["choices"][0]["message"]["content"]]
        assert "".join(pieces) == "Of it."
        (found,) = served.post(f"{path}/finalize", {}).json()["trajectories"]
        assert found["prompt_ids"] + found["response_ids"] == worker.log[-1].input_ids + worker.log[-1].output_ids
        assert found["exact"], found["reasons"]


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", ["no_logprobs", "missing_logprob", "nan_logprob"])
def test_logprobs_that_do_not_fit_leave_the_tokens(fault: Fault, stream: bool, scale_out: bool) -> None:
    """The client gets what was sampled, and is told that the reply is not exact and why. Nothing is sampled again."""
    with alone(scale_out=scale_out) as (served, worker):
        worker.script(fault=fault)
        reply = served.generate({**BRIEF, "stream": stream, "return_logprob": True})
        last = reply.body[-1] if stream else reply.body
        assert last["output_ids"] == reply.record.output_ids
        logprobs = [entry[0] for entry in last["meta_info"]["output_token_logprobs"]]
        assert len(logprobs) == len(last["output_ids"]) > 0
        assert None in logprobs
        if not stream:
            why = "no; engine_mismatch: a logprob that is not a finite number"
            assert reply.answer.headers["x-radix-recorded"] == why
        counted = 'tito_radix_replies_total{reason="engine_mismatch",recorded="no"} 1.0'
        assert counted in served.get("/metrics").content.decode()
        assert not served.retrieve("A:" + last["text"])["exact"]


@pytest.mark.parametrize(("first", "then"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_a_worker_that_comes_back_as_the_other_engine_is_asked_again_what_it_is(
    first: Interface, then: Interface
) -> None:
    """No probe has seen that it was away."""
    with alone(first) as (served, worker):
        assert served.post("/generate", BRIEF).status == 200
        worker.kill()
        with EmbeddedWorker(vocabulary("qwen"), interface=then, port=worker.port) as other:
            until(lambda: served.post("/generate", BRIEF).status == 200, "it generates again", seconds=10)
            assert other.log


def test_a_worker_whose_engine_is_not_known_yet_is_no_worker_yet() -> None:
    """It may be asked in the words of another engine. A 404 would tell the client to give up."""
    with socket.socket() as taken, alone() as (served, worker):
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert served.post(f"/remove_worker?url={worker.url}", {}).status == 200
        assert served.post(f"/add_worker?url=http://127.0.0.1:{port}", {}).status == 200
        taken.close()
        with EmbeddedWorker(vocabulary("qwen"), interface="sglang", port=port):
            answers: list[Answer] = []

            def generates() -> bool:
                answers.append(served.post("/generate", BRIEF))
                return answers[-1].status == 200

            until(generates)
            assert {answer.status for answer in answers[:-1]} <= {502, 503}, answers


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/sleep", "/v1/load_lora_adapter"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_in_front_of_sglang_a_call_of_vllm_is_a_path_like_any_other(method: str, path: str) -> None:
    with stack("qwen", styles=("cumulative",) * 2) as served:
        answer = served.exchange(method, path, {} if method == "POST" else None)
        asked = [calls(worker, path) for worker in served.workers]
        assert sorted(map(len, asked)) == [0, 1], "one worker is asked"
        assert answer.status == 404
        assert "x-router-worker" in answer.headers


def test_in_front_of_sglang_a_tenant_may_not_make_a_call_of_vllm() -> None:
    server = {"api_keys": ("a:key",), "admin_keys": ("admin",)}
    with stack("qwen", styles=("cumulative",), server=server) as served:
        for key, status in (("key", 403), ("admin", 404), ("none", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert served.exchange("POST", "/update_weights", {}, headers).status == status
