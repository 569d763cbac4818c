"""What is wrong in a request or in a worker's reply: the right status, a message that helps, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import re
import socket
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.depths import limited
from tests.support.serving import dead_url
from tests.support.stack import Stack, events, stack
from worker.engine.script import Fault

LIMIT = 64 * 1024


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), server={"max_body_bytes": LIMIT}) as started:
        yield started


@pytest.fixture(autouse=True)
def unharmed(served: Stack) -> Iterator[None]:
    """After each test: nothing in flight, the worker got no request outside of its range, and the next request works."""
    yield
    served.workers[0].wait_until_idle()
    assert served.idle(), served.inflight()
    assert served.workers[0].out_of_range == []
    space = {"x-radix-namespace": uuid.uuid4().hex}
    reply = served.generate({"text": "Hello", "sampling_params": scripted([9707])}, headers=space)
    assert served.retrieve("HelloHello", namespace=space["x-radix-namespace"])["exact"], reply
    assert served.idle(), served.inflight()


def scripted(ids: list[int], **script: Any) -> dict[str, Any]:
    return {"custom_params": {"script": {"ids": ids, **script}}}


def problem(answer: Any) -> str:
    """The message of an error, whose shape is always the same."""
    error = json.loads(answer.content)["error"]
    assert {"message", "type", "code"} <= error.keys(), error
    assert error["message"]
    return str(error["message"])


def nothing_held(served: Stack) -> dict[str, Any]:
    stats = served.get("/radix_tree/stats").json()
    return {name: stats[name] for name in ("tokens", "generations")}


HUGE = 10**30
BAD_REQUESTS: list[tuple[str, Any, str]] = [
    ("neither text nor ids", {}, "text"),
    ("nulls", {"text": None, "input_ids": None}, "text"),
    ("empty text", {"text": ""}, "empty"),
    ("an empty text in a batch", {"text": ["a", ""]}, "empty"),
    ("a batch of one empty text", {"text": [""]}, "empty"),
    ("no texts", {"text": []}, "empty"),
    ("no ids", {"input_ids": []}, "empty"),
    ("a batch of no ids", {"input_ids": [[]]}, "empty"),
    ("no ids in a batch", {"input_ids": [[1], []]}, "empty"),
    ("a negative id", {"input_ids": [1, -1]}, "-1"),
    ("an id past the vocabulary", {"input_ids": [1, 151650]}, "151650"),
    ("a large id", {"input_ids": [1, 2**31]}, str(2**31)),
    ("a larger id", {"input_ids": [1, 2**63]}, ""),
    ("an id that fits nowhere", {"input_ids": [HUGE]}, ""),
    ("a bad id in a batch", {"input_ids": [[1], [-7]]}, "-7"),
    ("ids that are strings", {"input_ids": ["1"]}, "input_ids"),
    ("ids that are floats", {"input_ids": [1.5]}, "input_ids"),
    ("ids that are booleans", {"input_ids": [True]}, "input_ids"),
    ("ids that are null", {"input_ids": [None]}, "input_ids"),
    ("ids in a dict", {"input_ids": {"a": 1}}, "input_ids"),
    ("ids of mixed depth", {"input_ids": [[1], 2]}, "input_ids"),
    ("a number for a text", {"text": 7}, "text"),
    ("numbers for texts", {"text": [7]}, "text"),
    ("a list in a list", {"text": [["a"]]}, "text"),
    ("a boolean for a text", {"text": True}, "text"),
    ("empty text, but streamed", {"text": "", "stream": True}, "empty"),
    ("a bad id, but streamed", {"input_ids": [-1], "stream": True}, "-1"),
    (
        "more top logprobs than tokens",
        {"text": "a", "return_logprob": True, "top_logprobs_num": 10**9},
        "top_logprobs_num",
    ),
    (
        "more top logprobs in a batch",
        {"text": ["a", "b"], "return_logprob": True, "top_logprobs_num": [1, 10**9]},
        "top",
    ),
    ("fewer than no samples", {"text": "a", "sampling_params": {"n": -1}}, "n"),
    ("more samples than anybody wants", {"text": "a", "sampling_params": {"n": 10**11}}, "n"),
    ("a logprob start below -1", {"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ("a top_k beyond int32", {"text": "a", "sampling_params": {"top_k": 2**31}}, "top_k"),
    (
        "logprob starts of one prompt",
        {"text": "a", "return_logprob": True, "logprob_start_len": [0]},
        "logprob_start_len",
    ),
    ("top logprobs of one prompt", {"input_ids": [1], "return_logprob": True, "top_logprobs_num": []}, "top_logprobs"),
    ("names of one prompt", {"text": "a", "rid": ["a"]}, "rid"),
    ("logprobs of one of two", {"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ("logprob starts of none of two", {"text": ["a", "b"], "logprob_start_len": []}, "logprob_start_len"),
    ("chosen ids of one of two", {"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob"),
    ("adapters of one of two", {"text": ["a", "b"], "lora_path": ["x"]}, "lora_path"),
    ("rooms of one of two", {"text": ["a", "b"], "bootstrap_room": [1]}, "bootstrap_room"),
    ("no embeddings", {"input_embeds": []}, "input_embeds"),
    ("embeddings of nothing", {"input_embeds": [[]]}, "input_embeds"),
    ("a pattern that is none", {"text": "a", "sampling_params": {"stop_regex": "("}}, "unterminated subpattern"),
    ("a stop string that takes long to encode", {"text": "a", "sampling_params": {"stop": "a" * 4097}}, "4096"),
    ("one of two", {"text": "a", "sampling_params": {"stop": ["a", "\N{GRINNING FACE}" * 4097]}}, "4096"),
    ("that of one of two prompts", {"text": ["a", "b"], "sampling_params": [{}, {"stop": ["a" * 4097]}]}, "4096"),
    ("one pattern of two", {"text": "a", "sampling_params": {"stop_regex": ["a", "*"]}}, "nothing to repeat"),
    (
        "a pattern of one of two prompts",
        {"text": ["a", "b"], "sampling_params": [{}, {"stop_regex": "a{99999999999}"}]},
        "too large",
    ),
    (
        "a stop id past the vocabulary that is to wait",
        {"text": "a", "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [5, 151650]}},
        "151650",
    ),
    (
        "a negative stop id that is to wait, of one of two",
        {"text": ["a", "b"], "sampling_params": [{}, {"min_new_tokens": 1, "stop_token_ids": [-1]}]},
        "-1",
    ),
]


@pytest.mark.parametrize(("body", "says"), [pytest.param(*row[1:], id=row[0]) for row in BAD_REQUESTS])
def test_a_bad_prompt_is_refused_here(served: Stack, body: dict[str, Any], says: str) -> None:
    """400, and the worker gets no request."""
    received = served.workers[0].received
    answer = served.post("/generate", {"sampling_params": {}, **body})
    assert answer.status == 400, answer.content
    assert says in problem(answer)
    assert served.workers[0].received == received


VALID: list[tuple[str, dict[str, Any]]] = [
    ("a list of logprob starts that nobody reads", {"text": "a", "logprob_start_len": [0]}),
    ("chosen ids for all of a batch", {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [1]}),
    ("no chosen ids", {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": []}),
    ("more logprob starts than prompts", {"text": ["a"], "return_logprob": True, "logprob_start_len": [0, 0]}),
    ("long stop strings", {"text": "a", "sampling_params": {"stop": ["\N{GRINNING FACE}" * 4096, "a" * 4096]}}),
    ("a stop id that never comes", {"text": "a", "sampling_params": {"stop_token_ids": [151650]}}),
]


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in VALID])
def test_what_only_looks_bad_is_served(served: Stack, body: dict[str, Any]) -> None:
    params = {"max_new_tokens": 1, **body.get("sampling_params", {})}
    answer = served.post("/generate", {**body, "sampling_params": params})
    assert answer.status == 200, answer.content


@pytest.mark.parametrize("source", ["%00", "%0d%0ax-a:%20b", "%3Fa=b", "%C3%A9", "%ff"])
def test_a_call_to_all_workers_goes_where_it_was_sent_to(served: Stack, source: str) -> None:
    """What is escaped in its path stays so: it is no line break, no query, and nothing that a request cannot have."""
    answer = served.post(f"/update_weights_from_{source}?x=%00", {})
    assert answer.status == 404, answer.content
    assert answer.json()["workers"][0]["body"] == {"detail": "Not Found"}


def test_a_null_count_is_no_500_where_nothing_is_recorded_either(served: Stack) -> None:
    params = {"max_new_tokens": 1, "n": None}
    answer = served.post("/generate", {"text": "a", "session_params": {}, "sampling_params": params})
    assert answer.status == 200, answer.content
    assert answer.headers["x-radix-recorded"] == "no; session_params"


def test_ids_win_over_a_text_where_nothing_is_recorded_either(served: Stack) -> None:
    """Beside a text that is none, SGLang would not know the ids for a batch."""
    body = {"text": "a", "input_ids": [[1], [2]], "session_params": {}, "sampling_params": {"max_new_tokens": 1}}
    answer = served.post("/generate", body)
    assert answer.status == 200, answer.content
    assert answer.headers["x-radix-recorded"] == "no; session_params"
    assert len(answer.json()) == 2
    assert "text" not in served.workers[0].log[-1].body


RAW: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("no JSON", b"hello"),
    ("half a JSON", b'{"text": "a"'),
    ("a list", b'["text"]'),
    ("a string", b'"text"'),
    ("null", b"null"),
    ("not UTF-8", b'{"text": "\xff"}'),
    ("two of them", b'{"text": "a"}{"text": "a"}'),
    ("very deep", b"[" * 30_000),
    ("very deep inside", b'{"text": "a", "x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/api/chat",
        "/api/generate",
        "/invocations",
        "/vertex_generate",
        "/inference/v1/generate",
        "/v1/chat/completions/batch",
    ],
)
def test_a_path_of_a_worker_that_samples_says_that_nothing_is_recorded(served: Stack, path: str) -> None:
    answer = served.post(path, {"model": "m", "input": "Hello"})
    assert answer.headers["x-radix-recorded"] == "no; other_path"
    assert "x-radix-recorded" not in served.get("/v1/models").headers


@pytest.mark.parametrize("path", ["/generate", "/retrieve_from_text", "/radix_tree/explain"])
@pytest.mark.parametrize(
    "raw", [pytest.param(raw, id=name, marks=[limited] * (name == "very deep inside")) for name, raw in RAW]
)
def test_what_is_no_json_object_is_refused(served: Stack, path: str, raw: bytes) -> None:
    answer = served.post(path, None, raw=raw)
    assert answer.status == 400, answer.content
    assert problem(answer)


@pytest.mark.parametrize("path", ["/generate", "/retrieve_from_text", "/radix_tree/explain"])
def test_half_a_surrogate_is_no_crash(served: Stack, path: str) -> None:
    """`"\\ud800"` is JSON, and no text: there is no UTF-8 for it."""
    answer = served.post(path, None, raw=b'{"text": "a\\ud800b"}')
    assert answer.status == 400, answer.content
    assert problem(answer)


@pytest.mark.parametrize("path", ["/generate", "/retrieve_from_text", "/radix_tree/explain"])
def test_a_body_over_the_limit_is_refused(served: Stack, path: str) -> None:
    answer = served.post(path, {"text": "a" * LIMIT})
    assert answer.status == 413, answer.content
    assert str(LIMIT) in problem(answer)


def test_a_large_body_for_a_worker_names_no_flag(served: Stack) -> None:
    """The limit of these calls is a fixed one."""
    answer = served.post("/add_worker", {"url": "http://127.0.0.1:1" + " " * 1024 * 1024})
    assert answer.status == 413, answer.content
    assert "--max-body-bytes" not in problem(answer)


@pytest.mark.parametrize("path", ["/add_worker", "/remove_worker", "/workers"])
def test_the_limit_holds_for_bodies_that_name_a_worker(served: Stack, path: str) -> None:
    answer = served.post(path, {"url": "http://127.0.0.1:1" + " " * LIMIT})
    assert answer.status == 413, answer.content
    assert str(LIMIT) in problem(answer)


def test_an_id_that_no_vocabulary_has_is_refused_in_completions(served: Stack) -> None:
    """Also beside a prompt that is good."""
    asked = served.workers[0].received
    answer = served.post("/v1/completions", {"model": "m", "prompt": [[5], [10**7]]})
    assert answer.status == 400, answer.content
    assert "10000000" in answer.json()["error"]["message"]
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert served.workers[0].received == asked


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_group_is_named(served: Stack, given: str) -> None:
    answer = served.post("/generate", {"text": "a"}, headers={"x-group-id": given})
    assert answer.status == 400, answer.content
    assert "x-group-id is empty" in problem(answer)


@pytest.mark.parametrize("path", ["/generate", "/retrieve_from_text", "/v1/completions", "/sessions", "/v1/messages"])
def test_a_misspelt_header_of_the_memory_is_named(served: Stack, path: str) -> None:
    """Without effect, it would let an evaluation continue the replies of the training."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    body = {"/v1/completions": {"prompt": "Hi"}, "/v1/messages": chat, "/sessions": {}}.get(path, {"text": "Hi"})
    before = nothing_held(served)
    answer = served.post(path, body, headers={"x-radix-name-space": "eval"})
    assert answer.status == 400, answer.content
    assert "x-radix-name-space: did you mean x-radix-namespace?" in answer.json()["error"]["message"]
    assert nothing_held(served) == before
    sent_back = {"x-radix-recorded": "exact", "x-radix-reasons": "edited_turn", "x-radix-saved": "no"}
    answer = served.post(path, body, headers=sent_back)
    assert "x-radix-" not in answer.content.decode(), "a client may send the headers of a reply back"


@pytest.mark.parametrize(("given", "meant"), [("x-group-ids", "x-group-id"), ("x-rollout-ends", "x-rollout-end")])
def test_a_misspelt_header_of_a_group_is_named(served: Stack, given: str, meant: str) -> None:
    """Without effect, it would leave the sample out of its group, or the rollout without an end."""
    answer = served.post("/generate", {"text": "Hi"}, headers={given: "true", "x-group-id": "g"})
    assert answer.status == 400, answer.content
    assert f"{given}: did you mean {meant}?" in problem(answer)


def test_a_chunked_body_over_the_limit_is_refused(served: Stack) -> None:
    """It has no content-length to go by."""
    parts = urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        chunks = (b'{"text": "', *[b"a" * 1024] * 65, b'"}')
        connection.request("POST", "/generate", iter(chunks), {"content-type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
    finally:
        connection.close()


BAD_LOOKUPS: list[tuple[str, Any]] = [
    ("nothing", {}),
    ("null", {"text": None}),
    ("empty", {"text": ""}),
    ("an empty one of two", {"text": ["a", ""]}),
    ("none", {"text": []}),
    ("a number", {"text": 1}),
    ("numbers", {"text": [1]}),
    ("a dict", {"text": {"a": 1}}),
    ("strict of another type", {"text": "a", "strict": "perhaps"}),
    ("request_id of another type", {"text": "a", "request_id": 7}),
    ("max_staleness of another type", {"text": "a", "max_staleness": "old"}),
]


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in BAD_LOOKUPS])
def test_a_bad_lookup_is_refused(served: Stack, body: Any) -> None:
    answer = served.post("/retrieve_from_text", body)
    assert answer.status == 400, answer.content
    assert problem(answer)


def test_strict_tells_how_far_it_would_have_been_exact(served: Stack) -> None:
    """409 with the covered length, instead of ids that no engine has seen."""
    space = {"x-radix-namespace": uuid.uuid4().hex}
    served.generate({"text": "Hello", "sampling_params": scripted([9707])}, headers=space)
    answer = served.post("/retrieve_from_text", {"text": "HelloHello, and more", "strict": True}, headers=space)
    assert answer.status == 409
    assert "10" in answer.content.decode()
    assert problem(answer)


@pytest.mark.parametrize(
    "body", [{}, {"url": ""}, {"url": "worker"}, {"url": "ftp://a"}, {"url": 7}, {"url": "http://"}]
)
def test_a_bad_worker_url_is_refused(served: Stack, body: dict[str, Any]) -> None:
    answer = served.post("/add_worker", body)
    assert answer.status == 400, answer.content
    assert problem(answer)
    assert len(served.get("/list_workers").json()["urls"]) == 1


def test_a_worker_that_is_not_there_costs_no_request(served: Stack) -> None:
    url = dead_url()
    assert served.post("/add_worker", {"url": url}).status < 500
    for _ in range(4):
        served.generate({"text": "Hello", "sampling_params": scripted([9707])})
    assert served.post("/remove_worker", {"url": url}).status == 200
    assert served.get("/list_workers").json()["urls"] == [served.workers[0].url]


FAULTY: list[tuple[Fault, int]] = [
    ("not_json", 200),
    ("no_done", 200),
    ("http_500", 500),
    ("http_503", 503),
    ("wrong_completion_tokens", 200),
    ("wrong_prompt_tokens", 200),
    ("wrong_text", 200),
    ("wrong_logprob_ids", 200),
    ("nan_logprob", 200),
    ("null_logprob", 200),
    ("missing_logprob", 200),
]


@pytest.mark.parametrize(("fault", "status"), FAULTY)
def test_a_faulty_reply_is_passed_on_and_never_exact(served: Stack, fault: Fault, status: int) -> None:
    """The client has what the worker said; the memory does not call it exact; the reason is told and counted."""
    space = uuid.uuid4().hex
    worker = served.workers[0]
    ids = [9707, 1879]
    body = {"text": "Hello", "return_logprob": True, "sampling_params": scripted(ids, fault=fault)}
    answer = served.post("/generate", body, headers={"x-radix-namespace": space})
    assert answer.status == status, answer.content
    said = answer.headers["x-radix-recorded"] if status == 200 else "no"
    assert said.startswith(("inexact", "no")), said
    if said.startswith("no") and status == 200:
        assert said.startswith("no; "), said
    record = worker.log[-1]
    meant = ids_text(served, ids)
    shown = answer.json()["text"] if said.startswith(("inexact", "no; engine_mismatch")) else meant
    assert (shown != meant) is (fault == "wrong_text")
    for text in {meant, shown}:
        never_exact(
            served, "Hello" + text, space, "engine_mismatch" if said == "inexact" and text == shown else "retokenized"
        )
    again = served.generate(
        {"text": "Hello" + ids_text(served, ids), "sampling_params": scripted(ids)},
        headers={"x-radix-namespace": space},
    )
    if said.startswith("no"):
        assert again.record.input_ids == served.spelling.encode_start("HelloHello world")
    assert record.input_ids == [9707]


def never_exact(served: Stack, text: str, space: str, reason: str) -> None:
    """Check that this text is not exact, that the reason is told, and that `strict` is refused."""
    found = served.retrieve(text, namespace=space)
    assert (found["exact"], found["reasons"]) == (False, [reason])
    body = {"text": text, "strict": True}
    refused = served.post("/retrieve_from_text", body, headers={"x-radix-namespace": space})
    assert refused.status == 409, refused.content
    assert json.loads(refused.content)["error"]["reasons"] == [reason]


@pytest.mark.parametrize("fault", [fault for fault, status in FAULTY if status == 200])
def test_a_faulty_reply_reaches_the_client_untouched(served: Stack, fault: Fault) -> None:
    """With logprobs asked for there is nothing to take out: byte by byte what the worker sends."""
    worker = served.workers[0]
    body = {
        "return_logprob": True,
        "rid": "x",
        "sampling_params": scripted([9707, 1879], fault=fault, logprobs=[-1.0, -2.0, -3.0]),
    }
    answer = served.post("/generate", {**body, "rid": uuid.uuid4().hex, "text": "Hello"})
    parts = urlsplit(worker.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request(
        "POST",
        "/generate",
        json.dumps({**body, "rid": uuid.uuid4().hex, "input_ids": [9707]}),
        {"content-type": "application/json"},
    )
    direct = connection.getresponse().read()
    connection.close()
    assert steady(answer.content) == steady(direct)


def steady(content: bytes) -> Any:
    """Less what differs from one reply to the next."""
    try:
        found = json.loads(content)
    except ValueError:
        return content[:40]
    for key in ("id", "response_sent_to_client_ts"):
        found["meta_info"].pop(key)
    return json.dumps(found)


def ids_text(served: Stack, ids: list[int]) -> str:
    return served.spelling.spell(ids, skip_special=True).text


STREAM_FAULTS: list[Fault] = [
    "error_event",
    "abort_503",
    "wrong_completion_tokens",
    "wrong_prompt_tokens",
    "wrong_text",
    "wrong_logprob_ids",
    "nan_logprob",
    "null_logprob",
    "missing_logprob",
    "missing_last_logprob",
]


@pytest.mark.parametrize("fault", STREAM_FAULTS)
def test_a_faulty_stream_is_never_exact(served: Stack, fault: Fault) -> None:
    space = uuid.uuid4().hex
    body = {"text": "Hello", "stream": True, "sampling_params": scripted([9707, 1879], fault=fault)}
    answer = served.post("/generate", body, headers={"x-radix-namespace": space, "x-abort-policy": "return"})
    assert answer.status == 200
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert not served.retrieve("HelloHello world", namespace=space)["exact"]
    shown = next((event["text"] for event in reversed(events(answer)) if event.get("text")), "")
    assert shown.startswith("What these ids do not say.") is (fault == "wrong_text")
    found = served.retrieve("Hello" + shown, namespace=space)
    assert found["tokens"][:1] == [9707]
    # What came before an error event was sampled, and stays.
    assert found["exact"] is (fault in ("error_event", "abort_503") and bool(shown))
    if fault == "wrong_text":
        never_exact(served, "Hello" + shown, space, "engine_mismatch")


@pytest.mark.parametrize("text", ["Hello", "Hello world"])
def test_a_refusal_inside_a_stream_is_not_recorded(served: Stack, text: str) -> None:
    """SGLang refuses a faulty grammar this way: one token, sampled behind a prompt of its own that has one id."""
    space = uuid.uuid4().hex
    reason = {"type": "abort", "message": "no grammar", "status_code": 400, "err_type": "BadRequestError"}
    meta = {"finish_reason": reason, "prompt_tokens": 1}
    asked = scripted([1879], finish="length", extra_meta=meta)
    body = {"text": text, "stream": True, "sampling_params": {**asked, "max_new_tokens": 1}}
    before = unrecorded_replies(served)
    answer = served.post("/generate", body, headers={"x-radix-namespace": space})
    assert [event["meta_info"]["finish_reason"] for event in events(answer)] == [reason]
    found = served.retrieve(text + " world", namespace=space)
    assert (found["exact"], sum(found["loss_mask"])) == (False, 0)
    assert unrecorded_replies(served) - before == {"worker error": 1}


def test_a_reply_without_ids_is_no_mismatch(served: Stack) -> None:
    """In a batch, SGLang may send a logprob for `max_new_tokens: 0`, and no id."""
    meta = {"output_token_logprobs": [[-1.5, 1879, None]]}
    asked = {**scripted([], finish="length", extra_meta=meta), "max_new_tokens": 0}
    answer = served.post("/generate", {"text": "Hello", "sampling_params": asked})
    assert answer.json()["output_ids"] == []
    assert answer.headers["x-radix-recorded"] == "no; no tokens were sampled: length"


def unrecorded_replies(served: Stack) -> Counter[str]:
    """How many replies were not recorded, by the reason."""
    line = rb'tito_radix_replies_total{reason="([^"]*)",recorded="no"} (\d+)'
    found = re.findall(line, served.get("/metrics").content)
    return Counter({reason.decode(): int(count) for reason, count in found})


@pytest.mark.parametrize("fault", ["no_done", "dies"])
def test_half_a_stream_is_not_taken_for_a_whole_one(served: Stack, fault: Fault) -> None:
    """What came is passed on, and the connection breaks, also where the worker ended its stream well but without [DONE]."""
    space = uuid.uuid4().hex
    body = {"text": "Hello", "stream": True, "sampling_params": scripted([9707, 1879], fault=fault)}
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        served.post("/generate", body, headers={"x-radix-namespace": space})
    assert not served.retrieve("HelloHello world", namespace=space)["exact"]


def test_a_worker_that_dies_in_its_reply(served: Stack) -> None:
    """An error or a broken connection, never half a reply that looks whole."""
    body = {"text": "Hello", "sampling_params": scripted([9707], fault="dies")}
    try:
        answer = served.post("/generate", body)
    except (http.client.HTTPException, ConnectionError):
        return
    assert answer.status == 502
    assert problem(answer)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_without_logprobs_is_not_exact(served: Stack, streamed: bool) -> None:
    """Logprobs were asked for and did not come."""
    space = uuid.uuid4().hex
    body = {"text": "Hello", "stream": streamed, "sampling_params": scripted([9707], fault="no_logprobs")}
    answer = served.post("/generate", body, headers={"x-radix-namespace": space})
    assert answer.status == 200
    found = served.retrieve("HelloHello", namespace=space)
    if found["exact"]:
        assert found["rollout_logp"] is None
        assert "no_logprobs" in found["reasons"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_a_silent_worker(served: Stack, streamed: bool) -> None:
    """The worker's request is cancelled with the client's."""
    worker = served.workers[0]
    logged = len(worker.log)
    body = {"text": "Hello", "stream": streamed, "sampling_params": scripted([9707], fault="no_answer")}
    content = json.dumps(body).encode()
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        worker.wait_for(lambda: len(worker.log) > logged)
    worker.wait_for(lambda: worker.log[-1].disconnected)
    worker.wait_until_idle()


def test_a_client_that_leaves_a_stream_keeps_what_it_has_seen(served: Stack) -> None:
    """Tokens already streamed to it are recorded."""
    worker, space = served.workers[0], uuid.uuid4().hex
    worker.hold(after=2)
    body = {"text": "Hello", "stream": True, "sampling_params": scripted([9707, 1879, 0, 0])}
    parts = urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        headers = {"content-type": "application/json", "x-radix-namespace": space}
        connection.request("POST", "/generate", json.dumps(body), headers)
        response = connection.getresponse()
        seen = [line for line in (response.readline() for _ in range(4)) if line.startswith(b"data: ")]
        assert json.loads(seen[-1][6:])["output_ids"] == [9707, 1879]
    finally:
        response.close()
        connection.close()
        worker.wait_for(lambda: worker.log[-1].disconnected)
        worker.release()
    found = served.retrieve("HelloHello world", namespace=space)
    assert found["tokens"] == [9707, 9707, 1879]
    assert found["loss_mask"] == [0, 1, 1]
    assert found["rollout_logp"][1:] == worker.log[-1].logprobs[:2]
    assert found["exact"]


REFUSED_BY_WORKER: list[tuple[str, dict[str, Any]]] = [
    ("an unknown sampling parameter", {"max_tokens": 3}),
    ("a negative temperature", {"temperature": -1}),
    ("a wrong type", {"max_new_tokens": "many"}),
]


@pytest.mark.parametrize("params", [pytest.param(params, id=name) for name, params in REFUSED_BY_WORKER])
def test_what_the_worker_refuses_is_refused_with_its_words(served: Stack, params: dict[str, Any]) -> None:
    held = nothing_held(served)
    answer = served.post("/generate", {"text": "Hello", "sampling_params": params})
    assert answer.status == 400
    assert b"field" in answer.content or b"temperature" in answer.content or b"invalid type" in answer.content
    assert nothing_held(served) == held


def test_a_prompt_that_is_too_long_is_refused_with_the_workers_words(served: Stack) -> None:
    """It is below the limit of bytes, and above the model's context length."""
    held = nothing_held(served)
    answer = served.post("/generate", {"text": "!@" * 17_000})
    assert answer.status == 400
    assert b"context length" in answer.content
    assert nothing_held(served) == held


def test_one_bad_item_spoils_a_batch(served: Stack) -> None:
    logged = len(served.workers[0].log)
    answer = served.post("/generate", {"input_ids": [[1], [2], [10**9]]})
    assert answer.status == 400
    assert len(served.workers[0].log) == logged


def test_an_unknown_parent_is_no_error(served: Stack) -> None:
    """It may have been evicted."""
    reply = served.generate({"text": "Hello", "sampling_params": scripted([9707])}, headers={"x-radix-parent": "gone"})
    assert reply.record.input_ids == [9707]


def test_streams_end_with_done(served: Stack) -> None:
    answer = served.post("/generate", {"text": "Hello", "stream": True, "sampling_params": scripted([9707])})
    assert events(answer)[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_names_and_notes_have_a_length(served: Stack) -> None:
    """They are kept with what they name, and in no budget."""
    assert served.post("/generate", {"text": "Hello", "rid": "x" * 2000}).status == 400
    assert served.post("/update_weight_version", {"new_version": "7" * 2000}).status == 400
    assert served.post("/retrieve_from_text", {"text": "a", "expect_request_ids": ["x"] * 9000}).status == 400
