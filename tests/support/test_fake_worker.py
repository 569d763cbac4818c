"""The worker double keeps SGLang's contract: its shapes, its rules of what is text and what is a token, its manners."""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support import sglang_server
from tests.support.fake_engine import Detokenizer, Sampling, float32, load_vocabulary
from tests.support.fake_worker import FakeWorker, StreamStyle
from tests.support.vocabularies import NAMES, Name, vocabulary


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeWorker(vocabulary("qwen")) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as running:
        yield running


@pytest.fixture(scope="session")
def contract() -> ModuleType:
    """SGLang's own generated contract, loaded by its path: it needs only msgspec."""
    package = sglang_server.package_path()
    if package is None:
        pytest.skip("no SGLang here: run tests/sglang_cpu/setup.sh")
    spec = importlib.util.spec_from_file_location("sglang_api_types", package / "api" / "v1" / "api_types.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sglang_api_types"] = module  # msgspec looks annotations up there
    spec.loader.exec_module(module)
    return module


def request(
    worker: FakeWorker, path: str, body: Any = None, *, raw: bytes | None = None, kind: str = "application/json"
) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
    try:
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request("GET" if content is None else "POST", path, content, {"content-type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("content-type")
    finally:
        connection.close()


def generate(worker: FakeWorker, prompt: Any = "Hello", **body: Any) -> Any:
    key = "text" if isinstance(prompt, str) or isinstance(prompt[0], str) else "input_ids"
    status, content, _ = request(worker, "/generate", {key: prompt, **body})
    assert status == 200, content
    return json.loads(content)


def events(content: bytes) -> list[dict[str, Any]]:
    parts = content.decode().split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def stream(worker: FakeWorker, prompt: str = "Hello", **body: Any) -> list[dict[str, Any]]:
    status, content, kind = request(worker, "/generate", {"text": prompt, "stream": True, **body})
    assert status == 200
    assert kind == "text/event-stream; charset=utf-8"
    return events(content)


def test_a_reply_has_sglangs_keys_and_the_log_has_the_truth(worker: FakeWorker) -> None:
    reply = generate(worker, "Hello", sampling_params={"max_new_tokens": 5}, return_logprob=True)
    (record,) = worker.log
    meta = reply["meta_info"]
    assert list(reply) == ["text", "output_ids", "meta_info"]
    assert record.input_ids == worker.vocabulary.encode("Hello")
    assert record.from_text
    assert reply["output_ids"] == record.output_ids
    assert [entry[0] for entry in meta["output_token_logprobs"]] == record.logprobs
    assert [entry[1] for entry in meta["output_token_logprobs"]] == record.output_ids
    assert all(float32(value) == value for value in record.logprobs)
    assert reply["text"] == record.text
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == len(record.input_ids)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
    assert (meta["completion_tokens"], meta["output_token_logprobs_length"]) == (5, 5)
    assert worker.dead is None


def test_logprob_keys_and_prompt_ids_are_there_only_when_asked_for(worker: FakeWorker) -> None:
    plain = generate(worker, "Hello")
    assert not [key for key in plain["meta_info"] if "logprob" in key]
    full = generate(
        worker, "Hello", return_logprob=True, return_prompt_token_ids=True, logprob_start_len=0, top_logprobs_num=2
    )
    assert full["prompt_token_ids"] == worker.log[1].input_ids
    assert len(full["meta_info"]["input_token_logprobs"]) == full["meta_info"]["prompt_tokens"]
    assert len(full["meta_info"]["output_top_logprobs"]) == full["meta_info"]["completion_tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_random_replies_are_mostly_not_what_re_encoding_gives(name: Name) -> None:
    """Otherwise a router that re-encodes would pass every test."""
    with FakeWorker(vocabulary(name)) as worker:
        for _ in range(20):
            generate(worker, "Hello", sampling_params={"max_new_tokens": 20})
        encode = worker.vocabulary.tokenizer.encode
        same = [encode(record.text, add_special_tokens=False).ids == record.output_ids for record in worker.log]
    assert sum(same) <= 4


def test_the_same_seed_samples_the_same_ids() -> None:
    runs = []
    for _ in range(2):
        with FakeWorker(vocabulary("qwen"), seed=7) as worker:
            runs.append([generate(worker)["output_ids"] for _ in range(3)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


class TestFinish:
    def test_eos_is_in_the_ids_and_not_in_the_text(self, worker: FakeWorker) -> None:
        worker.script(text="Hi there", finish="eos", times=2)
        reply = generate(worker)
        eos = worker.vocabulary.eos_id
        assert reply["text"] == "Hi there"
        assert reply["output_ids"][-1] == eos
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
        shown = generate(worker, sampling_params={"no_stop_trim": True, "skip_special_tokens": False})
        assert shown["text"] == "Hi there<|im_end|>"
        assert shown["output_ids"] == reply["output_ids"]

    def test_eos_at_once_is_an_empty_text_with_one_token(self, worker: FakeWorker) -> None:
        worker.script([], finish="eos")
        reply = generate(worker)
        assert (reply["text"], reply["output_ids"]) == ("", [worker.vocabulary.eos_id])

    def test_a_stop_token_is_trimmed_unless_no_stop_trim(self, worker: FakeWorker) -> None:
        ids = worker.vocabulary.encode("one two three")
        worker.script(ids, times=2)
        trimmed = generate(worker, sampling_params={"stop_token_ids": [ids[1]]})
        kept = generate(worker, sampling_params={"stop_token_ids": [ids[1]], "no_stop_trim": True})
        assert trimmed["output_ids"] == kept["output_ids"] == ids[:2]
        assert (trimmed["text"], kept["text"]) == ("one", "one two")
        assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[1]}

    def test_ignore_eos_goes_on(self, worker: FakeWorker) -> None:
        worker.script([], finish="eos")
        assert len(generate(worker, sampling_params={"ignore_eos": True, "max_new_tokens": 4})["output_ids"]) == 4

    def test_a_stop_string_is_cut_before_its_first_match_and_the_ids_keep_all(self, worker: FakeWorker) -> None:
        ids = worker.vocabulary.encode("one two three")
        worker.script(ids, times=2)
        cut = generate(worker, sampling_params={"stop": ["tw"]})
        kept = generate(worker, sampling_params={"stop": "tw", "no_stop_trim": True})
        assert cut["output_ids"] == ids[:2]
        assert (cut["text"], kept["text"]) == ("one ", "one tw")
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "tw"}

    def test_a_stop_regex_is_not_trimmed(self, worker: FakeWorker) -> None:
        worker.script(text="one two three")
        reply = generate(worker, sampling_params={"stop_regex": "t[vw]o"})
        assert reply["text"] == "one two"
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "t[vw]o"}

    def test_a_length_stop_inside_a_character_ends_in_a_replacement_character(self, worker: FakeWorker) -> None:
        pieces = [worker.vocabulary.tokenizer.token_to_id(byte) for byte in ("ä", "½")]  # E4 BD of 你 = E4 BD A0
        worker.script(pieces)
        reply = generate(worker, sampling_params={"max_new_tokens": 2})
        assert (reply["text"], reply["output_ids"]) == ("\ufffd", pieces)

    def test_special_tokens_in_the_middle_vanish_from_the_text_only(self, worker: FakeWorker) -> None:
        ids = worker.vocabulary.encode("a<|im_start|>b<think>c")
        worker.script(ids, finish="length")
        reply = generate(worker)
        assert (reply["text"], reply["output_ids"]) == ("ab<think>c", ids)

    def test_nothing_asked_for_is_nothing_sampled(self, worker: FakeWorker) -> None:
        reply = generate(worker, sampling_params={"max_new_tokens": 0})
        assert (reply["text"], reply["output_ids"]) == ("", [])
        assert reply["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


class TestStreams:
    @pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
    @pytest.mark.parametrize("interval", [1, 3])
    def test_the_pieces_make_the_whole(self, style: StreamStyle, interval: int) -> None:
        """What is a delta and what repeats everything is the whole difference between the three."""
        with FakeWorker(vocabulary("qwen"), stream_style=style, stream_interval=interval) as worker:
            got = stream(worker, sampling_params={"max_new_tokens": 10}, return_logprob=True)
            (record,) = worker.log
        last, ids, text, logprobs = got[-1]["meta_info"], [], "", []
        for event in got:
            ids = event["output_ids"] if style == "cumulative" else ids + event["output_ids"]
            text = text + event["text"] if style == "incremental" else event["text"]
            entries = [entry[0] for entry in event["meta_info"]["output_token_logprobs"]]
            logprobs = logprobs + entries if style == "incremental" else entries
            assert event["meta_info"]["completion_tokens"] == len(ids) == len(logprobs)
        assert (ids, text, logprobs) == (record.output_ids, record.text, record.logprobs)
        assert [event["meta_info"]["finish_reason"] for event in got[:-1]] == [None] * (len(got) - 1)
        assert all("weight_versions" not in event["meta_info"] for event in got[:-1])
        assert last["weight_versions"] == [{"version": "default", "start": 0, "end": 10}]
        assert len(got) == (10 if interval == 1 else 4)

    def test_a_stream_keeps_back_what_may_become_a_stop_string(self, worker: FakeWorker) -> None:
        worker.script(text="one two three")
        got = stream(worker, sampling_params={"stop": "two three"})
        assert [event["text"] for event in got] == ["one", "one "]

    def test_a_batch_interleaves_with_indexes(self, worker: FakeWorker) -> None:
        body = {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 3}}
        status, content, _ = request(worker, "/generate", body)
        got = events(content)
        assert status == 200
        assert {event["index"] for event in got} == {0, 1}
        for index, record in enumerate(worker.log):
            mine = [event for event in got if event["index"] == index]
            assert mine[-1]["output_ids"] == record.output_ids

    def test_a_wrong_request_is_an_error_event(self, worker: FakeWorker) -> None:
        (event,) = stream(worker, sampling_params={"temperature": -1})
        assert event["error"]["code"] == 400


class TestBatches:
    def test_prompt_major_with_fresh_ids_for_n(self, worker: FakeWorker) -> None:
        params = {"n": 2, "max_new_tokens": 2}
        replies = generate(worker, ["a", "b"], sampling_params=params, rid=["x", "y"])
        assert [record.input_ids for record in worker.log] == [worker.vocabulary.encode(text) for text in "aabb"]
        assert [reply["output_ids"] for reply in replies] == [record.output_ids for record in worker.log]
        assert not {reply["meta_info"]["id"] for reply in replies} & {"x", "y"}

    def test_a_list_of_one_is_a_list(self, worker: FakeWorker) -> None:
        (reply,) = generate(worker, ["a"], rid="x")
        assert reply["meta_info"]["id"] == "x_0"
        (reply,) = generate(worker, [[5, 6]], rid=["x"])
        assert reply["meta_info"]["id"] == "x"
        assert worker.log[1].input_ids == [5, 6]

    def test_each_prompt_may_have_its_own_sampling_params(self, worker: FakeWorker) -> None:
        replies = generate(worker, ["a", "b"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}])
        assert [len(reply["output_ids"]) for reply in replies] == [1, 2]

    def test_a_request_can_bring_its_own_script(self, worker: FakeWorker) -> None:
        own = {"fake": {"ids": [5, 6], "finish": "length", "logprobs": [-0.5, -0.25]}}
        reply = generate(worker, sampling_params={"custom_params": own}, return_logprob=True)
        assert reply["output_ids"] == [5, 6]
        assert [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] == [-0.5, -0.25]


class TestGatesAndAborts:
    def test_a_held_request_is_queued_and_an_abort_leaves_it_empty(
        self, worker: FakeWorker, pool: ThreadPoolExecutor
    ) -> None:
        worker.hold()
        waiting = pool.submit(generate, worker, rid="r1")
        worker.wait_for_arrivals(1)
        assert request(worker, "/abort_request", {"rid": "r1"})[0] == 200
        reply = waiting.result(20)
        assert (reply["text"], reply["output_ids"]) == ("", [])
        assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert "prompt_tokens" not in reply["meta_info"]

    def test_an_abort_of_a_running_request_returns_what_there_is(
        self, worker: FakeWorker, pool: ThreadPoolExecutor
    ) -> None:
        """By prefix, once the id itself is known: D1 takes D12 along."""
        worker.hold(after=3)
        waiting = [pool.submit(generate, worker, rid=rid, return_logprob=True) for rid in ("D1", "D12", "E")]
        worker.wait_for_arrivals(3)
        request(worker, "/abort_request", {"rid": "D"})
        request(worker, "/abort_request", {"rid": "D1"})
        for one in waiting[:2]:
            meta = one.result(20)["meta_info"]
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            assert meta["finish_reason"] == reason
            assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 3
        assert not waiting[2].done()
        worker.release()
        assert waiting[2].result(20)["meta_info"]["completion_tokens"] == 128

    def test_release_lets_some_go(self, worker: FakeWorker, pool: ThreadPoolExecutor) -> None:
        worker.hold()
        waiting = [pool.submit(generate, worker, rid=f"r{number}") for number in range(3)]
        worker.wait_for_arrivals(3)
        worker.release(1)
        worker.wait_for(lambda: worker.in_flight == 2)
        worker.release()
        assert all(one.result(20) for one in waiting)
        worker.wait_until_idle()

    def test_the_gate_says_when_nobody_comes(self, worker: FakeWorker) -> None:
        with pytest.raises(TimeoutError, match="0 in flight"):
            worker.wait_for_arrivals(1, timeout=0.05)

    def test_a_pause_aborts_or_freezes_and_holds_new_requests(
        self, worker: FakeWorker, pool: ThreadPoolExecutor
    ) -> None:
        worker.hold(after=2)
        running = pool.submit(generate, worker, rid="r1")
        worker.wait_for_arrivals(1)
        request(worker, "/pause_generation", {"mode": "in_place"})
        worker.release()
        later = pool.submit(generate, worker, rid="r2", sampling_params={"max_new_tokens": 3})
        worker.wait_for_arrivals(2)
        assert request(worker, "/ready")[0] == 503
        assert request(worker, "/ping")[0] == 200
        request(worker, "/continue_generation", {})
        assert running.result(20)["meta_info"]["completion_tokens"] == 128
        assert later.result(20)["meta_info"]["completion_tokens"] == 3

    def test_health_blocks_while_paused(self) -> None:
        with FakeWorker(vocabulary("qwen"), health_timeout=0.05) as worker:
            assert request(worker, "/health")[0] == 200
            request(worker, "/pause_generation", {})
            assert request(worker, "/health")[0] == 503

    def test_a_client_that_goes_away_ends_its_request(self, worker: FakeWorker) -> None:
        worker.hold(after=2)
        connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
        connection.request("POST", "/generate", json.dumps({"text": "Hi"}), {"content-type": "application/json"})
        worker.wait_for_arrivals(1)
        connection.close()
        worker.wait_until_idle()
        assert worker.log[0].disconnected
        assert len(worker.log[0].output_ids) == 2


class TestWeights:
    def test_an_update_in_flight_makes_spans(self, worker: FakeWorker, pool: ThreadPoolExecutor) -> None:
        """And the reply's single version is the one at its end."""
        worker.hold(after=4)
        running = pool.submit(generate, worker, sampling_params={"max_new_tokens": 6})
        worker.wait_for_arrivals(1)
        request(worker, "/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        worker.release()
        meta = running.result(20)["meta_info"]
        old, new = {"version": "default", "start": 0, "end": 4}, {"version": "7", "start": 4, "end": 6}
        assert meta["weight_versions"] == [old, new]
        assert meta["weight_version"] == "7"
        assert worker.log[0].versions == ["default"] * 4 + ["7"] * 2

    def test_an_update_aborts_everything_unless_told_not_to(self, worker: FakeWorker, pool: ThreadPoolExecutor) -> None:
        worker.hold(after=4)
        running = pool.submit(generate, worker)
        worker.wait_for_arrivals(1)
        request(worker, "/update_weight_version", {"new_version": "7"})
        assert running.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
        for path in ("/model_info", "/get_model_info"):
            assert json.loads(request(worker, path)[1])["weight_version"] == "7"

    def test_new_weights_bring_their_version(self, worker: FakeWorker) -> None:
        body = {"model_path": "x", "weight_version": "8"}
        assert json.loads(request(worker, "/update_weights_from_disk", body)[1])["success"] is True
        assert generate(worker)["meta_info"]["weight_version"] == "8"
        assert [call.path for call in worker.calls] == ["/update_weights_from_disk"]

    def test_an_old_engine_has_no_spans(self) -> None:
        with FakeWorker(vocabulary("qwen"), version_spans=False) as worker:
            assert "weight_versions" not in generate(worker)["meta_info"]


class TestWrongRequests:
    @pytest.mark.parametrize(
        ("body", "shape"),
        [
            ({}, "message"),
            ({"text": "a", "sampling_params": {"max_tokens": 3}}, "error"),
            ({"text": "a", "sampling_params": {"max_new_tokens": "a"}}, "error"),
            ({"text": "a", "sampling_params": {"temperature": -1}}, "message"),
            ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "message"),
            ({"text": 5}, "object"),
            ({"input_ids": "abc"}, "object"),
            ({"input_ids": [1.5]}, "object"),
            ({"input_ids": [5] * 40000}, "message"),
            ({"input_ids": []}, "message"),
            ({"text": ["a", "b"], "rid": ["x", "x"]}, "message"),
            ([1], "object"),
        ],
    )
    def test_each_has_its_shape(self, worker: FakeWorker, body: Any, shape: str) -> None:
        status, content, _ = request(worker, "/generate", body)
        error = json.loads(content)
        assert status == 400
        found = "object" if "object" in error else "error" if isinstance(error["error"], str) else "message"
        assert found == shape
        assert worker.dead is None

    def test_content_type_and_json_are_needed(self, worker: FakeWorker) -> None:
        assert request(worker, "/generate", {"text": "a"}, kind="text/plain")[0] == 400
        assert request(worker, "/generate", raw=b"{nope")[0] == 400
        assert json.loads(request(worker, "/nope", {})[1]) == {"detail": "Not Found"}

    @pytest.mark.parametrize("body", [{"text": "a", "sampling_params": {"n": None}}, {"text": ["a"], "input_ids": [5]}])
    def test_some_break_it(self, worker: FakeWorker, body: dict[str, Any]) -> None:
        status, content, kind = request(worker, "/generate", body)
        assert (status, content, kind) == (500, b"Internal Server Error", "text/plain; charset=utf-8")

    def test_a_request_id_in_use_is_refused(self, worker: FakeWorker, pool: ThreadPoolExecutor) -> None:
        worker.hold()
        first = pool.submit(generate, worker, rid="r")
        worker.wait_for_arrivals(1)
        assert request(worker, "/generate", {"text": "a", "rid": "r"})[0] == 400
        worker.release()
        assert first.result(20)["meta_info"]["id"] == "r"

    @pytest.mark.parametrize("body", [{"text": ""}, {"input_ids": [[]]}, {"input_ids": [1, 10**7]}])
    def test_two_requests_kill_it(self, worker: FakeWorker, body: dict[str, Any]) -> None:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            request(worker, "/generate", body)
        assert worker.dead is not None
        with pytest.raises(ConnectionError):
            request(worker, "/ping")
        worker.restart()
        assert request(worker, "/ping")[0] == 200
        assert worker.dead is None


class TestFaults:
    def test_spoilt_replies(self, worker: FakeWorker) -> None:
        def spoilt(fault: Any) -> dict[str, Any]:
            worker.fault(fault)
            return dict(generate(worker, return_logprob=True, sampling_params={"max_new_tokens": 3}))

        assert spoilt("wrong_completion_tokens")["meta_info"]["completion_tokens"] == 4
        assert spoilt("wrong_prompt_tokens")["meta_info"]["prompt_tokens"] == len(worker.log[1].input_ids) + 1
        assert spoilt("wrong_text")["text"] != worker.log[2].text
        assert len(spoilt("missing_logprob")["meta_info"]["output_token_logprobs"]) == 2
        assert math.isnan(spoilt("nan_logprob")["meta_info"]["output_token_logprobs"][-1][0])
        assert spoilt("null_logprob")["meta_info"]["output_token_logprobs"][-1][0] is None
        assert spoilt("wrong_logprob_ids")["meta_info"]["output_token_logprobs"][-1][1] != worker.log[6].output_ids[-1]
        assert not [key for key in spoilt("no_logprobs")["meta_info"] if "logprob" in key]
        assert generate(worker)["text"] == worker.log[-1].text

    def test_answers_that_are_none(self, worker: FakeWorker) -> None:
        def answer(fault: Any, **body: Any) -> tuple[int, bytes, str | None]:
            worker.fault(fault)
            return request(worker, "/generate", {"text": "a", **body})

        assert answer("http_503")[0] == 503
        assert answer("http_500")[0] == 500
        with pytest.raises(ValueError, match="Expecting value"):
            json.loads(answer("not_json")[1])
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            answer("dies")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            answer("dies", stream=True)
        assert b"[DONE]" not in answer("no_done", stream=True)[1]
        assert b'"error"' in answer("error_event", stream=True)[1]
        assert b'"status_code":503' in answer("abort_503", stream=True)[1]
        assert request(worker, "/ping")[0] == 200

    def test_no_answer_lasts_until_the_client_goes(self, worker: FakeWorker) -> None:
        worker.fault("no_answer")
        connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
        connection.request("POST", "/generate", json.dumps({"text": "Hi"}), {"content-type": "application/json"})
        worker.wait_for(lambda: worker.in_flight == 1)
        connection.close()
        worker.wait_until_idle()

    def test_unknown_keys_can_be_added(self, worker: FakeWorker) -> None:
        worker.script([5], extra={"new": 1}, extra_meta={"routed_experts": "AAAA"})
        reply = generate(worker)
        assert (reply["new"], reply["meta_info"]["routed_experts"]) == (1, "AAAA")


def test_many_at_once(worker: FakeWorker, pool: ThreadPoolExecutor) -> None:
    """The log has one record per reply, and none of them is mixed up with another."""
    waiting: list[Future[Any]] = [
        pool.submit(generate, worker, f"prompt {number}", rid=f"r-{number}") for number in range(40)
    ]
    replies = {reply["meta_info"]["id"]: reply for reply in (one.result(30) for one in waiting)}
    assert len(replies) == len(worker.log) == 40
    for record in worker.log:
        assert replies[record.rid]["output_ids"] == record.output_ids
    assert threading.active_count() < 30


@pytest.mark.parametrize("name", NAMES)
def test_incremental_text_is_the_text_of_the_ids(name: Name) -> None:
    """However the ids are cut into chunks, ordinary text comes out whole: priming loses and doubles no space."""
    known = load_vocabulary(str(vocabulary(name)))
    prompt, text = known.encode("A prompt: 你好 "), "Hello world, 你好世界 😀🚀 naïve — done.\n\n  And more"
    ids = known.tokenizer.encode(prompt_text := "x" + text, add_special_tokens=False).ids
    assert known.decode([*prompt, *ids], skip_special_tokens=True).endswith(prompt_text)
    for size in (1, 2, 3, 7, 50):
        detokenizer = Detokenizer(known, prompt, Sampling())
        out = ""
        for at in range(0, len(ids), size):
            last = at + size >= len(ids)
            out += detokenizer.push(ids[at : at + size], {"type": "length", "length": len(ids)} if last else None)
        assert out.lstrip() == prompt_text


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
def test_sglangs_own_contract_accepts_what_it_says(
    contract: ModuleType, style: StreamStyle, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Replies, events and errors are read by the decoder that ships with SGLang."""
    with FakeWorker(vocabulary("qwen"), stream_style=style) as worker:
        wanted = {"return_logprob": True, "return_prompt_token_ids": True, "logprob_start_len": 0}
        reply = generate(worker, sampling_params={"max_new_tokens": 4}, **wanted)
        decoded = contract.GenerateResponse.from_json_value(reply)
        assert decoded.output_ids == worker.log[0].output_ids
        assert decoded.prompt_token_ids == worker.log[0].input_ids
        assert [entry.logprob for entry in decoded.meta_info.output_token_logprobs] == worker.log[0].logprobs
        for event in stream(worker, sampling_params={"max_new_tokens": 4}, **wanted):
            contract.GenerateResponse.from_json_value(event)
        for event in stream(worker, sampling_params={"temperature": -1}):
            contract.GenerateStreamError.from_json_value(event)
        worker.hold()
        queued = pool.submit(generate, worker, rid="r")
        worker.wait_for_arrivals(1)
        request(worker, "/abort_request", {"rid": "r"})
        contract.GenerateResponse.from_json_value(queued.result(20))
        contract.GetModelInfoResponse.from_json_value(json.loads(request(worker, "/model_info")[1]))
        contract.GenerateRequest.from_json_value(worker.log[0].body)
