"""Images in front of vLLM workers, in what is theirs alone: names in place of bytes, and what they say of the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from router.app import create_app
from router.config import QueueConfig, RadixConfig, RouterConfig, WorkersConfig
from tests.integration.test_images import CAT, DOG, FOLDER, IMAGE, KEYS, SUN, Json, check, last, product, sampling
from tests.support.asking import until
from tests.support.client import call
from tests.support.pictures import data_url, digest, picture
from tests.support.serving import serve
from tests.support.stack import Stack
from worker.engine.records import GenerationRecord
from worker.worker import EmbeddedWorker


def vllm(**options: Any) -> Any:
    return product(**{"styles": ("cumulative",), "interface": "vllm", **options})


@pytest.fixture
def served() -> Iterator[Stack]:
    with vllm() as made:
        yield made


def parts(record: GenerationRecord) -> list[tuple[str, bool]]:
    """The name of each picture that a worker was sent, and whether its bytes came too."""
    return [(part["uuid"], "url" in part) for part in record.body.get("content_parts", ())]


def turns(served: Stack, count: int, *, stream: bool = False, headers: dict[str, str] | None = None) -> Iterator[Json]:
    """A conversation with a new picture in each turn: of each turn the record, and what an agent would resend."""
    text, pictures = "Turns:", list[bytes]()
    for turn in range(count):
        pictures.append(picture(60, 50, 1000 + turn))
        text += f" {turn} {IMAGE}"
        images = [data_url(one) for one in pictures]
        body = {"text": text, "image_data": images, "sampling_params": sampling(), "stream": stream}
        reply = served.generate(body, headers=headers)
        text += reply.record.text
        yield {"record": reply.record, "text": text, "pictures": pictures, "reply": reply}


@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_crosses_the_wire_once(served: Stack, stream: bool) -> None:
    """In ten turns with ten pictures no byte of a picture is sent twice."""
    bytes_of_pictures = sent = 0
    for number, turn in enumerate(turns(served, 10, stream=stream)):
        record = turn["record"]
        assert record.images == tuple(map(digest, turn["pictures"]))
        assert parts(record) == [(digest(one), place == number) for place, one in enumerate(turn["pictures"])]
        sent += sum(len(part.get("url", "")) + len(part["uuid"]) for part in record.body["content_parts"])
        bytes_of_pictures += len(data_url(turn["pictures"][-1]))
    assert bytes_of_pictures < sent
    check(
        served.retrieve(turn["text"], image_data=[digest(one) for one in turn["pictures"]]),
        record.input_ids + record.output_ids,
        turn["pictures"],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["forgotten", "restarted"])
def test_a_worker_that_does_not_know_a_name_gets_the_bytes(served: Stack, how: str, stream: bool) -> None:
    """The client sees nothing of it: one reply, whole, in one more request at the most."""
    (worker,) = served.workers
    text, images = f"Again {how}{stream}: {IMAGE}{IMAGE}", [data_url(CAT), data_url(DOG)]
    body = {"text": text, "image_data": images, "sampling_params": sampling(), "stream": stream}
    first = served.generate(body)
    if how == "forgotten":
        worker.forget_images()
    else:
        worker.kill()
        worker.restart()
    before = worker.received
    second = served.generate(body)
    assert worker.received - before <= 2
    assert parts(second.record) == [(digest(CAT), True), (digest(DOG), True)]
    assert second.record.images == first.record.images
    assert last(second)["text"] == second.record.text
    third = served.generate(body)
    assert parts(third.record) == [(digest(CAT), False), (digest(DOG), False)]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/sessions/waits/v1/chat/completions"])
def test_a_picture_that_waits_for_a_worker_is_kept(path: str) -> None:
    """Meanwhile the shelf lets its file go, to make room for another one."""
    queue = QueueConfig(max_inflight_per_worker=1)
    with vllm(workers={"queue": queue}, media={"max_bytes": 1}) as served, ThreadPoolExecutor() as pool:
        (worker,) = served.workers
        assert served.post("/sessions", {"session_id": "waits"}).status == 201
        worker.hold()
        first = pool.submit(served.post, "/generate", {"text": "First", "sampling_params": sampling()})
        worker.wait_for_arrivals(1)
        part = {"type": "image_url", "image_url": {"url": data_url(CAT)}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
        if path == "/generate":
            body = {"text": IMAGE, "image_data": [data_url(CAT)], "sampling_params": sampling()}
        second = pool.submit(served.post, path, body)
        until(lambda: b"router_queue_length 1.0" in served.get("/metrics").content)
        served.retrieve(IMAGE, image_data=[data_url(DOG)])
        worker.release()
        assert [first.result(30).status, second.result(30).status] == [200, 200]
        assert worker.log[-1].images == (digest(CAT),)


def test_workers_have_memories_of_their_own() -> None:
    with vllm(styles=("cumulative", "cumulative")) as served:
        body = {"text": f"Own: {IMAGE}", "image_data": [data_url(CAT)], "sampling_params": sampling()}
        with_bytes = [parts(served.generate(body).record) for _ in range(4)]
        assert with_bytes == [[(digest(CAT), known)] for known in (True, True, False, False)]


def test_a_batch_of_which_one_picture_is_forgotten(served: Stack) -> None:
    (worker,) = served.workers
    texts, images = [f"Row {n}: {IMAGE}" for n in range(3)], [[data_url(one)] for one in (CAT, DOG, SUN)]
    body = {"text": texts, "image_data": images, "sampling_params": sampling()}
    served.generate(body)
    worker.forget_images()
    served.generate({"text": texts[0], "image_data": images[0], "sampling_params": sampling()})
    answer = served.generate(body)
    assert [last_of["text"] for last_of in answer.body] == [
        next(r.text for r in reversed(worker.log) if r.images == (digest(one),)) for one in (CAT, DOG, SUN)
    ]


def test_tenants_do_not_share_a_picture_at_the_worker() -> None:
    """Nobody can tell by a cached token, or by the time of an answer, that another tenant has sent a picture."""
    with vllm(server={"api_keys": KEYS}) as served:
        body = {"text": f"Whose: {IMAGE} it is", "image_data": [data_url(CAT)], "sampling_params": sampling()}
        names, cached = set[str](), list[int]()
        for key in ("key-of-a", "key-of-b", "key-of-b"):
            reply = served.generate(body, headers={"authorization": f"Bearer {key}"})
            ((name, _),) = parts(reply.record)
            names.add(name)
            cached.append(last(reply)["meta_info"]["cached_tokens"])
        assert len(names) == 2
        assert digest(CAT) not in names
        before_the_picture = reply.record.input_ids.index(4097)
        assert cached[1] <= before_the_picture < cached[2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shift", ["offset", "length", "more", "fewer", "none"])
def test_a_worker_that_says_other_places_is_not_recorded(served: Stack, shift: str, stream: bool) -> None:
    (worker,) = served.workers
    text, new = f"Places {shift}{stream}: {IMAGE}", picture(30, 60, 77)
    body = {"text": text, "image_data": [data_url(new)], "stream": stream, "sampling_params": sampling(2)}
    right = served.generate(body)
    start = right.record.input_ids.index(4097)
    length = right.record.input_ids.count(4097)
    lies = {
        "offset": [(start + 1, length)],
        "length": [(start, length - 1)],
        "more": [(start, length)] * 2,
        "fewer": [],
        "none": None,
    }
    told = lies[shift]
    places = None if told is None else {"image": [{"offset": a, "length": b} for a, b in told]}
    worker.script(ids=[698, 699], extra={"mm_placeholders": places})
    reply = served.generate(body)
    assert last(reply)["text"] == reply.record.text
    if not stream:
        assert reply.answer.headers["x-radix-recorded"].startswith("no; media_mismatch")
    found = served.retrieve(text + reply.record.text, image_data=[digest(new)])
    assert not found["exact"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": IMAGE, "image_data": [data_url(CAT)]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(CAT)}}]}]},
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 4,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": data_url(CAT).partition(",")[2],
                                },
                            }
                        ],
                    }
                ],
            },
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_without_scale_out_is_named(path: str, body: Json, stream: bool) -> None:
    with vllm(scale_out=False) as served:
        answer = served.post(path, body | {"stream": stream})
        assert answer.status == 400
        told = answer.json()["error"]
        assert told["code"] == "multimodal_unsupported", told
        assert "--enable-scale-out" in told["message"]
        assert served.generate({"text": "Text goes on", "sampling_params": sampling()}).record.text


def test_without_a_middleware_no_picture_passes() -> None:
    """Nobody has looked at it: it might be an address, which a worker would open."""
    with EmbeddedWorker(FOLDER, interface="vllm") as worker:
        config = RouterConfig(
            workers=WorkersConfig(urls=(worker.url,)), radix=RadixConfig(tokenizer_path=str(FOLDER)), middlewares=()
        )
        with serve(create_app(config)) as url:
            for given in ("http://127.0.0.1:9/a.png", data_url(CAT), digest(CAT)):
                answer = call(f"{url}/generate", {"input_ids": [4097], "image_data": [given]})
                assert (answer.status, answer.json()["error"]["code"]) == (400, "multimodal_unsupported")
        assert worker.log == []
        assert worker.out_of_range == []


def test_logprobs_of_the_prompt_count_expanded_ids(served: Stack) -> None:
    text = f"Scored: {IMAGE} it"
    body: Json = {"text": text, "image_data": [data_url(CAT)], "sampling_params": sampling(3)}
    first = served.generate(body).record
    start = len(first.input_ids) - 4
    texts = served.generate(body | {"return_logprob": True, "return_text_in_logprobs": True})
    entries = last(texts)["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == texts.record.output_ids
    assert [entry[0] for entry in entries] == pytest.approx(texts.record.logprobs)
    assert all(isinstance(entry[2], str) for entry in entries)
    streamed = served.post("/generate", body | {"return_logprob": True, "logprob_start_len": start, "stream": True})
    assert streamed.status == 400
    top = served.post("/generate", body | {"return_logprob": True, "top_logprobs_num": 2})
    assert top.status == 400
    assert "top_logprobs_num" in top.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stream_says_of_the_prompt(served: Stack, stream: bool) -> None:
    """Every position is checked, in streams too; a client that asks sees the ids, in the first event and the last."""
    for _ in range(2):
        body = {
            "text": f"Says: {IMAGE}",
            "image_data": [data_url(CAT)],
            "stream": stream,
            "sampling_params": sampling(),
        }
        reply = served.generate(body)
        assert "x-radix-reasons" not in reply.answer.headers
        events = reply.body if stream else [reply.body]
        assert all({"prompt_token_ids", "prompt_images"}.isdisjoint(event) for event in events)
        asked = served.generate(body | {"return_prompt_token_ids": True})
        events = asked.body if stream else [asked.body]
        for event in (events[0], events[-1]):
            assert event["prompt_token_ids"] == asked.record.input_ids
            ((offset, length),) = event["prompt_images"]
            assert set(asked.record.input_ids[offset : offset + length]) == {4097}
        assert sum("prompt_token_ids" in event for event in events) == (2 if stream else 1)


def test_weights_of_another_version_are_shown_pictures_anew() -> None:
    """What a vision tower made of a picture is found by its name alone: under another salt it has another name."""
    with vllm(kv_salt={"mode": "version"}) as served:
        names = []
        for version in ("one", "two"):
            assert call(f"{served.url}/update_weight_version", {"new_version": version}).status == 200
            for turn in turns(served, 2):
                assert turn["record"].images == tuple(map(digest, turn["pictures"]))
                names.append(parts(turn["record"]))
        (first, _), (other, _) = names[0][0], names[2][0]
        assert first != other
        assert [sent for each in names for _, sent in each] == [True, False, True] * 2
