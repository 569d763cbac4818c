"""Images whose bytes went from memory, without a store: ids and spans stay, and only what needs the bytes is refused.

The oracle is the worker's own log.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
CAT, DOG = (picture(40, 30, seed) for seed in (1, 2))
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
FEW = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
SAMPLING = {"max_tokens": 6, "temperature": 0}
NOWHERE = "sha256:" + "0" * 64
A, B = ({"authorization": f"Bearer key-of-{name}"} for name in "ab")


@pytest.fixture
def served() -> Iterator[Stack]:
    """The router holds one picture at a time."""
    keys = {"api_keys": ("a:key-of-a", "b:key-of-b")}
    with stack(
        "qwen",
        styles=("cumulative",),
        folder=shipped_image_tokenizer(),
        media={"max_bytes": 3 * len(CAT)},
        server=keys,
    ) as made:
        yield made
        assert made.workers[0].out_of_range == []


def ok(served: Stack, path: str, body: Json, headers: Json = A) -> Json:
    answer = served.exchange("POST", path, body, headers)
    assert answer.status in (200, 201), answer.content
    found: Json = answer.json()
    return found


def refused(served: Stack, path: str, body: Json, headers: Json = A) -> bytes:
    before = len(served.workers[0].log)
    answer = served.exchange("POST", path, body, headers)
    assert answer.status == 400, (answer.status, answer.content)
    assert len(served.workers[0].log) == before, "it reached a worker"
    return answer.content


def evict(served: Stack) -> None:
    """Let the picture of tenant a go, for one of tenant b."""
    ok(served, "/generate", {"text": IMAGE, "image_data": [data_url(DOG)], "sampling_params": FEW}, B)
    assert served.exchange("GET", f"/media/{digest(CAT)}", headers=A).status == 404


def check_missing(content: bytes) -> None:
    assert b'"media_missing"' in content
    assert digest(CAT).encode() in content


def test_a_response_goes_on_once_its_picture_was_sent_again(served: Stack) -> None:
    path = f"/sessions/{ok(served, '/sessions', {})['session_id']}/v1/responses"
    sampling = {"max_output_tokens": 6, "temperature": 0}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(CAT)}]}
    first = ok(served, path, {"input": [item], **sampling})
    record = served.workers[0].log[-1]
    evict(served)
    more = {"input": "more", "previous_response_id": first["id"], **sampling}
    check_missing(refused(served, path, more))
    assert served.exchange("POST", path, more | {"previous_response_id": "resp_none"}, A).status == 404
    text = {"text": IMAGE, "image_data": [data_url(CAT)]}
    ok(served, "/retrieve_from_text", text)
    ok(served, path, more)
    known = [*record.input_ids, *record.output_ids]
    assert served.workers[0].log[-1].input_ids[: len(known)] == known


OPENAI = {"type": "image_url", "image_url": {"url": digest(CAT)}}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": digest(CAT)}}
RESPONSES = {"type": "input_image", "image_url": digest(CAT)}
NAMING: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [OPENAI]}], **SAMPLING}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": [ANTHROPIC]}], **SAMPLING}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": [RESPONSES]}]}),
    "generate": ("/generate", {"text": IMAGE, "image_data": [digest(CAT)], "sampling_params": FEW}),
}


@pytest.mark.parametrize("form", NAMING)
def test_what_needs_the_bytes_says_that_they_are_missing(served: Stack, form: str) -> None:
    """To the tenant that sent them. To others the picture is one that nobody has sent, byte for byte."""
    path, body = NAMING[form]
    names = {id(one): path if form == "generate" else f"/sessions/{ok(served, '/sessions', {}, one)['session_id']}{path}"
             for one in (A, B)}  # fmt: skip
    unsent = refused(served, names[id(A)], body)
    assert b'"media_unknown"' in unsent
    ok(served, "/generate", {"text": IMAGE, "image_data": [data_url(CAT)], "sampling_params": FEW})
    evict(served)
    check_missing(refused(served, names[id(A)], body))
    assert refused(served, names[id(B)], body, B) == unsent


def test_a_retrieval_needs_no_bytes_unless_it_asks_for_them(served: Stack) -> None:
    text = f"Gone {IMAGE}"
    reply = ok(served, "/generate", {"text": text, "image_data": [data_url(CAT)], "sampling_params": FEW})
    record = served.workers[0].log[-1]
    evict(served)
    asked = {"text": text + reply["text"], "image_data": [digest(CAT)]}
    for media, exact, reasons in (("ref", True, []), ("inline", False, ["media_missing"])):
        found = ok(served, f"/retrieve_from_text?media={media}", asked)
        assert found["tokens"] == [*record.input_ids, *record.output_ids]
        assert (found["exact"], found["reasons"]) == (exact, reasons)
        (image,) = found["multi_modal_data"]["images"]
        assert (image["digest"], image["bytes"]) == (digest(CAT), None)
        low, high = image["span"]
        assert set(found["tokens"][low:high]) == {4097}
    ok(served, "/radix_tree/explain", asked)
    unsent = refused(served, "/retrieve_from_text", asked | {"image_data": [NOWHERE]}, B)
    assert refused(served, "/retrieve_from_text", asked, B) == unsent.replace(NOWHERE.encode(), digest(CAT).encode())


@pytest.mark.parametrize("place", ["/v1", "session"])
def test_count_tokens_says_that_it_goes_by_the_rule(served: Stack, place: str) -> None:
    path = place if place == "/v1" else f"/sessions/{ok(served, '/sessions', {})['session_id']}/v1"
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    told = []
    for _ in range(2):
        answer = served.exchange("POST", f"{path}/messages/count_tokens", body, A)
        told.append((answer.status, answer.headers.get("x-radix-reasons")))
        ok(served, f"{path}/messages", {**body, **SAMPLING})  # now an engine has told the length
    assert told == [(200, "media_estimated"), (200, None)]
    assert answer.json()["input_tokens"] == len(served.workers[0].log[-1].input_ids)


@pytest.mark.parametrize("kind", ["text", "session"])
def test_missing_bytes_of_one_claim_are_not_recorded(served: Stack, kind: str) -> None:
    """The sample is exact: claims without bytes get it, and those with bytes once these are back."""
    if kind == "text":
        group = {**A, "x-group-id": "g", "x-group-size": "1", "x-rollout-end": "true"}
        ok(served, "/generate", {"text": IMAGE, "image_data": [data_url(CAT)], "sampling_params": FEW}, group)
    else:
        group = {**A, "x-group-id": "g", "x-group-size": "1"}
        name = ok(served, "/sessions", {}, group)["session_id"]
        part = {"type": "image_url", "image_url": {"url": data_url(CAT)}}
        body = {"messages": [{"role": "user", "content": [part]}], **SAMPLING}
        ok(served, f"/sessions/{name}/v1/chat/completions", body)
        ok(served, f"/sessions/{name}/finalize", {})
    evict(served)

    def claim(media: str, *, exact_only: bool = True, wait: float = 0) -> Json:
        fields = {"exact_only": exact_only, "media": media, "lease_seconds": 600, "wait_seconds": wait}
        found = ok(served, "/trajectories/claim", fields)
        if found["claim_id"]:
            ok(served, "/trajectories/release", {"claim_id": found["claim_id"]})
        return found

    for _ in range(2):
        found = claim("inline", wait=0.2)
        assert (found["samples"], found["filtered"]) == ([], {"inexact": 1})
        (sample,) = claim("inline", exact_only=False)["samples"]
        assert not sample["exact"]
        (sample,) = claim("ref")["samples"]
        assert sample["exact"]
    ok(served, "/retrieve_from_text", {"text": IMAGE, "image_data": [data_url(CAT)]})
    (sample,) = claim("inline")["samples"]
    assert sample["exact"]
