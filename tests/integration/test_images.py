"""Images in `/generate` and `/retrieve_from_text`, on the whole product: what a worker computed with is what comes back.

The oracle is the worker's own log: its ids, in which each picture is a run, and the digests of the pictures that it took.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from router.config import AbortConfig, StoreConfig
from tests.conftest import examples
from tests.support.asking import settle
from tests.support.pictures import data_url, digest, picture
from tests.support.redis_server import redis_server
from tests.support.stack import Reply, Stack, stack
from worker.engine.prompt_images import length_of
from worker.models.ngram import shipped_image_tokenizer
from worker.options import Interface, StreamStyle

Json = dict[str, Any]
PAD = "<|image_pad|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
CAT, DOG, SUN = (picture(40, 30, seed) for seed in (1, 2, 3))


def repacked(content: bytes) -> bytes:
    """The same pixels in other bytes."""
    encoded = io.BytesIO()
    Image.open(io.BytesIO(content)).save(encoded, "PNG", compress_level=0)
    assert encoded.getvalue() != content
    return encoded.getvalue()


CAT_AGAIN = repacked(CAT)
KEYS = ("a:key-of-a", "b:key-of-b")
FOLDER = shipped_image_tokenizer()
ENGINES: tuple[Interface, ...] = ("sglang", "vllm")


@contextlib.contextmanager
def product(**options: Any) -> Iterator[Stack]:
    with stack("qwen", folder=FOLDER, **options) as made:
        yield made
        assert [worker.out_of_range for worker in made.workers] == [[] for _ in made.workers]


@pytest.fixture(scope="module", params=ENGINES)
def shared(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with product(interface=request.param) as made:
        yield made


@pytest.fixture
def served(shared: Stack) -> Iterator[Stack]:
    for worker in shared.workers:
        worker.forget_scripts()
    yield shared
    settle(shared)


def sampling(tokens: int = 6, **more: Any) -> Json:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def last(reply: Reply) -> Json:
    """The whole reply, streamed or not; incremental events are joined."""
    body = reply.body
    if not isinstance(body, list):
        return dict(body)
    return {"text": reply.record.text, "meta_info": body[-1]["meta_info"]}


def spans_of(ids: Sequence[int], pad: int = 4097) -> list[list[int]]:
    """The runs of the placeholder. The vocabulary's pictures have an id on each side."""
    found: list[list[int]] = []
    for place, number in enumerate(ids):
        if number != pad:
            continue
        if found and found[-1][1] == place:
            found[-1][1] = place + 1
        else:
            found.append([place, place + 1])
    return found


def check(found: Json, ids: list[int], pictures: Sequence[bytes], mask: list[int] | None = None) -> None:
    """An exact answer, with these ids, and these pictures at the runs."""
    assert (found["exact"], found["reasons"]) == (True, []), found
    assert found["tokens"] == ids
    if mask is not None:
        assert found["loss_mask"] == mask[len(mask) - len(found["loss_mask"]) :]
        assert not any(mask[: len(mask) - len(found["loss_mask"])])
    shown = found.get("multi_modal_data", {"images": []})["images"]
    assert [one["digest"] for one in shown] == [digest(one) for one in pictures]
    assert [one["span"] for one in shown] == spans_of(ids)
    for one in shown:
        assert all(ids[place] == 4097 for place in range(*one["span"]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["text", "ids"])
def test_turns_with_pictures_are_one_sequence(served: Stack, form: str, stream: bool) -> None:
    """Each prompt begins with all that was computed before, bit for bit; every style of streaming has its turns."""
    text, sent, ids, pictures, mask = f"Look {form}{stream}:", list[int](), list[int](), list[bytes](), list[int]()
    for turn in range(6):
        new = (CAT, DOG, SUN)[turn % 3]
        pictures.append(new)
        text += f" {turn} {IMAGE} what?"
        images = [data_url(one) for one in pictures]
        body: Json = {"image_data": images, "sampling_params": sampling(), "stream": stream}
        if form == "text":
            reply = served.generate(body | {"text": text})
        else:
            asked = encode(f" {turn} {IMAGE} what?" if turn else text, start=not turn)
            sent += asked
            reply = served.generate(body | {"input_ids": sent})
        record = reply.record
        assert record.images == tuple(map(digest, pictures))
        assert record.input_ids[: len(ids)] == ids
        assert not record.from_text
        mask += [0] * (len(record.input_ids) - len(ids)) + [1] * len(record.output_ids)
        ids = record.input_ids + record.output_ids
        sent += record.output_ids
        text += record.text
        assert last(reply)["meta_info"]["prompt_tokens"] == len(record.input_ids)
        check(served.retrieve(text, image_data=images), ids, pictures, mask)
        refs = [digest(one) for one in pictures]
        check(served.retrieve(text, image_data=refs), ids, pictures, mask)


def encode(text: str, *, start: bool) -> list[int]:
    return list(Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text, add_special_tokens=start).ids)


def test_equal_texts_with_other_pictures_are_other_texts(served: Stack) -> None:
    text = f"Twins: {IMAGE} and?"
    records = {}
    for one in (CAT, DOG, CAT_AGAIN):
        reply = served.generate({"text": text, "image_data": data_url(one), "sampling_params": sampling()})
        records[one] = reply.record
        assert reply.record.images == (digest(one),)
    for one, record in records.items():
        found = served.retrieve(text + record.text, image_data=[digest(one)])
        check(found, record.input_ids + record.output_ids, [one])
    never = served.retrieve(text + records[CAT].text, image_data=[data_url(SUN)])
    assert not never["exact"]
    assert sum(never["loss_mask"]) == 0
    assert [one["digest"] for one in never["multi_modal_data"]["images"]] == [digest(SUN)]


def test_a_picture_twice(served: Stack) -> None:
    text = f"Twice: {IMAGE} {IMAGE} and {IMAGE}"
    pictures = [CAT, CAT, DOG]
    images = [data_url(CAT), digest(CAT), data_url(DOG)]
    record = served.generate({"text": text, "image_data": images, "sampling_params": sampling()}).record
    assert record.images == tuple(map(digest, pictures))
    check(served.retrieve(text + record.text, image_data=images), record.input_ids + record.output_ids, pictures)


@pytest.mark.parametrize("gap", ["", " "])
def test_pictures_side_by_side(served: Stack, gap: str) -> None:
    """Placeholders without anything around them: of unknown lengths nobody can tell where one ends. Never a wrong span."""
    unseen = [picture(31, 29, 50 + len(gap)), picture(29, 31, 60 + len(gap))]
    images = [data_url(one) for one in unseen]
    text = f"Side{gap}: {PAD}{gap}{PAD}"
    answer = served.post("/generate", {"text": text, "image_data": images, "sampling_params": sampling()})
    assert answer.status == 200
    told = answer.headers["x-radix-recorded"]
    if gap:
        assert told.startswith("exact"), answer.headers
    else:
        assert told.startswith("no; media_mismatch")
    for one in unseen:  # each alone tells its length
        served.generate({"text": f"One: {IMAGE}", "image_data": [data_url(one)], "sampling_params": sampling()})
    reply = served.generate({"text": text, "image_data": images, "sampling_params": sampling()})
    found = served.retrieve(text + reply.record.text, image_data=images)
    assert found["exact"]
    assert found["tokens"] == reply.record.input_ids + reply.record.output_ids
    (first, second) = [one["span"] for one in found["multi_modal_data"]["images"]]
    lengths = [spans_of(worker_ids(served, one))[0] for one in unseen]
    assert [b - a for a, b in (first, second)] == [b - a for a, b in lengths]


def worker_ids(served: Stack, content: bytes) -> list[int]:
    """The ids of the latest prompt in which this was the only picture."""
    records = [one for worker in served.workers for one in worker.log if one.images == (digest(content),)]
    return records[-1].input_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["text", "input_ids"])
def test_batches_and_samples(served: Stack, form: str, stream: bool) -> None:
    texts = [f"Batch {form}{stream} {number}: {IMAGE * number}" for number in range(3)]
    images = [[], [data_url(CAT)], [data_url(DOG), data_url(CAT)]]
    pictures: list[list[bytes]] = [[], [CAT], [DOG, CAT]]
    prompts: list[Any] = texts if form == "text" else [encode(text, start=True) for text in texts]
    body = {form: prompts, "image_data": images, "stream": stream, "sampling_params": sampling(n=2, temperature=1)}
    answer = served.generate(body)
    assert len(answer.records) == 6
    for record in answer.records:
        number = next(place for place, text in enumerate(texts) if len(record.images) == place)
        assert record.images == tuple(map(digest, pictures[number]))
        ids = record.input_ids + record.output_ids
        found = served.retrieve(texts[number] + record.text, image_data=images[number])
        same = [r for r in answer.records if (r.images, r.text) == (record.images, record.text)]
        assert found["exact"]
        assert found["tokens"] in [r.input_ids + r.output_ids for r in same]
        check(found, found["tokens"], pictures[number])
        assert len(same) > 1 or found["tokens"] == ids


def test_return_trajectory(served: Stack) -> None:
    for stream in (False, True):
        text = f"Trajectory {stream}: {IMAGE}!"
        reply = served.generate(
            {
                "text": text,
                "image_data": [data_url(DOG)],
                "return_trajectory": True,
                "stream": stream,
                "sampling_params": sampling(),
            }
        )
        body = reply.body[-1] if stream else reply.body
        found = body["meta_info"].get("trajectory") or body.get("trajectory")
        check(found, reply.record.input_ids + reply.record.output_ids, [DOG])
        assert "prompt_token_ids" not in body


def test_inline_bytes(served: Stack) -> None:
    text = f"Inline: {IMAGE}"
    record = served.generate({"text": text, "image_data": data_url(SUN), "sampling_params": sampling()}).record
    body = {"text": text + record.text, "image_data": [digest(SUN)]}
    ref, inline = (
        served.post(f"/retrieve_from_text{query}", body).json()["multi_modal_data"]["images"][0]
        for query in ("", "?media=inline")
    )
    assert ref["bytes"] is None
    assert inline == ref | {"bytes": data_url(SUN).partition(",")[2]}
    assert (ref["mime"], ref["width"], ref["height"]) == ("image/png", 40, 30)
    assert served.post("/retrieve_from_text?media=all", body).status == 400


def test_a_stop_and_an_unknown_length_in_a_stream(served: Stack) -> None:
    new = picture(33, 44, 77)
    text = f"Stop: {IMAGE}"
    for turn in range(3):
        body = {"text": text, "image_data": data_url(new), "stream": True, "sampling_params": sampling(12, stop=[" "])}
        reply = served.generate(body)
        tokens = int(reply.answer.headers["x-radix-prompt-tokens"])
        assert tokens == len(reply.record.input_ids), turn
        shown = "".join(worker_text(reply))
        check(
            served.retrieve(text + shown, image_data=[digest(new)]),
            reply.record.input_ids + reply.record.output_ids,
            [new],
        )


def worker_text(reply: Reply) -> str:
    """What the client saw of a stream."""
    texts = [event["text"] for event in reply.body]
    cumulative = all(later.startswith(sooner) for sooner, later in pairwise(texts))
    return texts[-1] if cumulative else "".join(texts)


def test_a_fork_at_a_picture_keeps_what_is_before_it(served: Stack) -> None:
    text = f"Fork: {IMAGE}"
    first = served.generate({"text": text, "image_data": [data_url(CAT)], "sampling_params": sampling()}).record
    text += f"{first.text} next {IMAGE}."
    kept = first.input_ids + first.output_ids
    for one in (DOG, SUN, CAT, CAT_AGAIN):
        images = [data_url(CAT), data_url(one)]
        record = served.generate({"text": text, "image_data": images, "sampling_params": sampling()}).record
        assert record.input_ids[: len(kept)] == kept
        mask = [0] * len(first.input_ids) + [1] * len(first.output_ids)
        mask += [0] * (len(record.input_ids) - len(kept)) + [1] * len(record.output_ids)
        check(
            served.retrieve(text + record.text, image_data=images),
            record.input_ids + record.output_ids,
            [CAT, one],
            mask,
        )
    unseen = picture(50, 60, 91)
    found = served.retrieve(text, image_data=[data_url(CAT), data_url(unseen)])
    assert found["tokens"][: len(kept)] == kept
    assert "media_estimated" in found["reasons"]
    assert not found["exact"]
    assert [one["digest"] for one in found["multi_modal_data"]["images"]] == [digest(CAT), digest(unseen)]


# Refused before a worker sees it -------------------------------------------------------------------------------------------

ONLY_GENERATE = {"input_ids", "video_data", "audio_data", "features", "uuid", "mm_content_hashes"}
NOWHERE = "sha256:" + "0" * 64
ONE = {"text": IMAGE, "image_data": [data_url(CAT)]}
REFUSED: dict[str, tuple[Json, str]] = {
    "fewer": ({"text": IMAGE * 2, "image_data": [data_url(CAT)]}, "media_count"),
    "more": ({"text": IMAGE, "image_data": [data_url(CAT)] * 2}, "media_count"),
    "none": ({"text": IMAGE}, "media_count"),
    "null": ({"text": IMAGE, "image_data": None}, "media_count"),
    "no placeholder": ({"text": "a", "image_data": data_url(CAT)}, "media_count"),
    "ids, fewer": ({"input_ids": [5, 4097, 6, 4097], "image_data": [data_url(CAT)]}, "media_count"),
    "ids, more": ({"input_ids": [5, 4097], "image_data": [data_url(CAT)] * 2}, "media_count"),
    "rows": ({"text": [IMAGE, IMAGE], "image_data": [[data_url(CAT)]]}, "media_count"),
    "no rows": ({"text": [IMAGE, IMAGE], "image_data": data_url(CAT)}, "media_count"),
    "expanded": ({"input_ids": [5, *[4097] * 7, 6], "image_data": [data_url(CAT)]}, "media_expanded"),
    "no base64": ({"text": IMAGE, "image_data": ["data:image/png;base64,!!!"]}, "media_invalid"),
    "no image": ({"text": IMAGE, "image_data": ["data:image/png;base64,AAAA"]}, "media_invalid"),
    "no text": ({"text": IMAGE, "image_data": [{"url": data_url(CAT)}]}, "media_invalid"),
    "a number": ({"text": IMAGE, "image_data": 7}, "media_invalid"),
    "half a digest": ({"text": IMAGE, "image_data": ["sha256:00"]}, "media_invalid"),
    "address": ({"text": IMAGE, "image_data": ["http://127.0.0.1:9/a.png"]}, "media_url"),
    "file": ({"text": IMAGE, "image_data": ["file:///a.png"]}, "media_url"),
    "path": ({"text": IMAGE, "image_data": ["/a.png"]}, "media_url"),
    "unknown": ({"text": IMAGE, "image_data": [NOWHERE]}, "media_unknown"),
    "hashes": (ONE | {"mm_content_hashes": [digest(CAT)]}, "media_field"),
    "uuid": (ONE | {"uuid": "x"}, "media_field"),
    "features": ({"text": "a", "features": [1]}, "media_field"),
    **{
        name: (ONE | {name: given}, "media_field")
        for name, given in {
            "modalities": ["multi-images"],
            "max_dynamic_patch": 1,
            "min_dynamic_patch": 1,
            "image_max_dynamic_patch": 1,
            "video_max_dynamic_patch": 1,
            "need_wait_for_mm_inputs": True,
            "num_items_assigned": {"IMAGE": [1]},
            "encoder_urls": ["http://127.0.0.1:9"],
            "images_config": {"a": 1},
            "video_config": {"fps": 1},
            "use_audio_in_video": True,
            "mm_processor_kwargs": {"a": 1},
        }.items()
    },
    "video": (ONE | {"video_data": ["v"]}, "multimodal_unsupported"),
    "audio": ({"text": "a", "audio_data": "a"}, "multimodal_unsupported"),
    "reserved": ({"text": "a\ufdd0b"}, "reserved_character"),
    "a forged mark": ({"text": "\ufdd0" + digest(CAT) + "\ufdd1"}, "reserved_character"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_reaches_no_worker(served: Stack, name: str) -> None:
    body, code = REFUSED[name]
    before = [worker.received for worker in served.workers]
    answer = served.post("/generate", body | {"sampling_params": sampling()})
    assert (answer.status, answer.json()["error"]["code"]) == (400, code), answer.content
    if (
        name not in ("no text", "a number")
        and code != "media_field"
        and not {"input_ids", "video_data", "audio_data"} & body.keys()
    ):
        again = served.post("/retrieve_from_text", body)
        assert (again.status, again.json()["error"]["code"]) == (400, code), again.content
    assert [worker.received for worker in served.workers] == before


def test_fields_that_ask_for_nothing_are_served(served: Stack) -> None:
    """A client may send each field of `GenerateReqInput` with its default."""
    nothing = {"use_audio_in_video": False, "modalities": None, "mm_hashes": [None], "need_wait_for_mm_inputs": None}
    served.generate(ONE | nothing | {"sampling_params": sampling()})


def test_a_sampled_placeholder_ends_the_use_of_pictures(served: Stack) -> None:
    """The turn itself is exact; behind it an engine would take the placeholder for a picture's."""
    for worker in served.workers:
        worker.script(ids=[698, 4097, 698])
    text = f"Stray: {IMAGE}"
    reply = served.generate({"text": text, "image_data": [data_url(CAT)], "sampling_params": sampling(3)})
    text += reply.record.text.replace(PAD, "")
    found = served.retrieve(text, image_data=[digest(CAT)])
    assert found["tokens"] == reply.record.input_ids + reply.record.output_ids
    assert len(found["multi_modal_data"]["images"]) == 1
    before = [worker.received for worker in served.workers]
    more = {"text": text + IMAGE, "image_data": [data_url(CAT), data_url(DOG)]}
    answer = served.post("/generate", more)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "placeholder_sampled")
    assert [worker.received for worker in served.workers] == before


# Others' pictures, stores, trouble -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interface", ENGINES)
def test_a_tenant_knows_only_its_own_pictures(interface: Interface) -> None:
    a, b = ({"authorization": f"Bearer {key}"} for key in ("key-of-a", "key-of-b"))
    with product(styles=("cumulative",), server={"api_keys": KEYS}, interface=interface) as served:
        text = f"Mine: {IMAGE}"
        body = {"text": text, "image_data": [data_url(CAT)], "sampling_params": sampling()}
        record = served.generate(body, headers=a).record
        foreign = served.post("/generate", body | {"image_data": [digest(CAT)]}, headers=b)
        unknown = served.post("/generate", body | {"image_data": [NOWHERE]}, headers=b)
        assert foreign.status == unknown.status == 400
        assert foreign.content == unknown.content.replace(NOWHERE.encode(), digest(CAT).encode())
        asked = {"text": text + record.text, "image_data": [data_url(CAT)]}
        theirs = served.post("/retrieve_from_text", asked, headers=b).json()
        assert not theirs["exact"]
        assert sum(theirs["loss_mask"]) == 0
        mine = served.post("/retrieve_from_text", asked, headers=a).json()
        check(mine, record.input_ids + record.output_ids, [CAT])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("interface", ENGINES)
def test_no_head_tells_that_another_tenant_has_shown_a_picture(interface: Interface, chat: bool) -> None:
    """Whoever has the same file could learn from a stream's head, which comes before the worker says how long it is."""
    a, b = ({"authorization": f"Bearer {key}"} for key in ("key-of-a", "key-of-b"))
    path, body = (
        "/generate",
        {"text": f"What is {IMAGE}?", "image_data": [data_url(CAT)], "sampling_params": sampling()},
    )
    if chat:
        content = [{"type": "image_url", "image_url": {"url": data_url(CAT)}}]
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
    found = []
    slow: Json = {"styles": ("cumulative",), "token_delay": 0.05}  # so that the head goes out before the reply is whole
    for shown in (False, True):
        with product(**slow, server={"api_keys": KEYS}, interface=interface) as served:
            if shown:
                assert served.post(path, body, headers=a).status == 200
            streamed = served.post(path, body | {"stream": True}, headers=b)
            again = served.post(path, body | {"stream": True}, headers=b)
            assert streamed.status == again.status == 200
            found.append([one.headers.get("x-radix-prompt-tokens") for one in (streamed, again)])
    assert found[0] == found[1]
    assert found[0][1] is not None


@contextlib.contextmanager
def store_at(kind: str, folder: Path) -> Iterator[StoreConfig]:
    if kind == "sqlite":
        yield StoreConfig(url=f"sqlite:{folder / 'store'}")
    else:
        with redis_server(folder) as server:
            yield StoreConfig(url=f"redis://127.0.0.1:{server.port}/0")


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_restart_keeps_ids_and_spans(tmp_path: Path, kind: str) -> None:
    text, pictures, ids = "Kept:", list[bytes](), list[int]()
    with store_at(kind, tmp_path) as store:
        for turn in range(4):
            pictures.append((CAT, DOG)[turn % 2])
            text += f" {IMAGE}."
            images = [data_url(one) for one in pictures]
            with product(store=store) as served:
                if turn:
                    check(served.retrieve(text.removesuffix(f" {IMAGE}."), image_data=images[:-1]), ids, pictures[:-1])
                reply = served.generate({"text": text, "image_data": images, "sampling_params": sampling()})
                assert reply.record.input_ids[: len(ids)] == ids
                ids = reply.record.input_ids + reply.record.output_ids
                text += reply.record.text
                check(served.retrieve(text, image_data=images), ids, pictures)


def test_two_routers_on_one_store(tmp_path: Path) -> None:
    with store_at("redis", tmp_path) as store, product(store=store) as one, product(store=store) as two:
        text, pictures, ids = "Both:", list[bytes](), list[int]()
        for turn in range(5):
            served = (one, two)[turn % 2]
            pictures.append((CAT, DOG, CAT)[turn % 3])
            text += f" {IMAGE}."
            images = [data_url(one) for one in pictures]
            before = [(worker, len(worker.log)) for worker in (*one.workers, *two.workers)]
            served.generate({"text": text, "image_data": images, "sampling_params": sampling()})
            (record,) = (made for worker, start in before for made in worker.log[start:])
            assert record.input_ids[: len(ids)] == ids
            ids = record.input_ids + record.output_ids
            text += record.text
            for asked in (one, two):
                check(asked.retrieve(text, image_data=images), ids, pictures)


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_lies_is_not_recorded(served: Stack, stream: bool) -> None:
    """It left the picture out, or computed with other ids: the client gets its reply as it is, and is told."""
    for number, lie in enumerate(([1, 2, 3], [4096, 4097, 4098], [4096, *[4097] * 9, 5])):
        for worker in served.workers:
            worker.forget_scripts()
            worker.script(ids=[104, 105], finish="eos", extra={"prompt_token_ids": lie})
        text, new = f"Lie {number}{stream}: {IMAGE}", picture(30 + number, 60, 200 + stream)
        body = {"text": text, "image_data": [data_url(new)], "stream": stream, "sampling_params": sampling(2)}
        reply = served.generate(body)
        assert last(reply)["text"] == reply.record.text
        found = served.retrieve(text + reply.record.text, image_data=[data_url(new)])
        assert not found["exact"]
        assert sum(found["loss_mask"]) == 0
        if not stream:
            assert reply.answer.headers["x-radix-recorded"].startswith("no; media_mismatch")


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("interface", "style"), [("sglang", "cumulative"), ("sglang", "incremental"), ("vllm", "incremental")]
)
def test_an_aborted_reply(batch: bool, interface: Interface, style: StreamStyle) -> None:
    """In one piece it is made again, with the pictures; of a stream the client keeps a part, and goes on from there."""
    with product(styles=(style,), abort=AbortConfig(attempts=3, wait=0), interface=interface) as served:
        (worker,) = served.workers
        text, images = f"Abort: {IMAGE} now", [data_url(CAT)]
        for stream in (False, True):
            worker.script(text=" and then", finish="abort")
            body: Json = {"text": [text] if batch else text, "image_data": [images] if batch else images}
            reply = served.generate(body | {"sampling_params": sampling(), "stream": stream})
            assert len(reply.records) == 2 - stream
            assert {record.images for record in reply.records} == {(digest(CAT),)}
            kept = reply.records[-1]
            ids = kept.input_ids + kept.output_ids
            check(served.retrieve(text + kept.text, image_data=images), ids, [CAT])
            record = served.generate(
                {"text": text + kept.text, "image_data": images, "sampling_params": sampling()}
            ).record
            assert record.input_ids == ids
            mask = [0] * len(kept.input_ids) + [1] * (len(kept.output_ids) + len(record.output_ids))
            found = served.retrieve(text + kept.text + record.text, image_data=images)
            check(found, ids + record.output_ids, [CAT], mask)


@pytest.mark.parametrize("interface", ENGINES)
@pytest.mark.parametrize("budget", [None, 400])
def test_random_conversations(budget: int | None, interface: Interface) -> None:
    """Whatever was forgotten: what is called exact is what a worker computed with, with the pictures of this branch."""
    chance, known = random.Random(budget), dict[tuple[str, tuple[bytes, ...]], list[list[int]]]()
    whole = list[Json]()
    with product(radix={"max_tokens": budget}, interface=interface) as served:
        for _ in range(examples(150)):
            text, pictures = chance.choice([("", ()), *list(known)[-10:]])
            piece = chance.choice([" go", f" {IMAGE}", f" {IMAGE} {IMAGE}", f" and {IMAGE}?"])
            pictures += tuple(chance.choice([CAT, DOG, SUN, CAT_AGAIN]) for _ in range(piece.count(PAD)))
            images, before = [data_url(one) for one in pictures], known.get((text, pictures[: text.count(PAD)]))
            body = {"text": text + piece, "image_data": images, "stream": chance.random() < 0.4}
            record = served.generate(body | {"sampling_params": sampling(4)}).record
            assert record.images == tuple(map(digest, pictures))
            if before and budget is None:
                assert any(record.input_ids[: len(ids)] == ids for ids in before)
            ids = record.input_ids + record.output_ids
            if len(pictures) < 8:
                known.setdefault((text + piece + record.text, pictures), []).append(ids)
            for asked, of in chance.sample(list(known), min(2, len(known))):
                found = served.retrieve(asked, image_data=[digest(one) for one in of])
                shown = found.get("multi_modal_data", {"images": []})["images"]
                assert [one["digest"] for one in shown] == [digest(one) for one in of]
                if found["exact"]:
                    whole.append(found)
                    assert found["tokens"] in known[asked, of]
                    assert [one["span"] for one in shown] == spans_of(found["tokens"])
                else:
                    assert budget is not None
                    assert found["reasons"]
    assert whole


@pytest.mark.parametrize("interface", ENGINES)
def test_one_of_several_samples_is_aborted(interface: Interface) -> None:
    """It alone is made again: its pictures go with it, in the shape of a batch."""
    with product(styles=("cumulative",), abort=AbortConfig(attempts=3, wait=0), interface=interface) as served:
        (worker,) = served.workers
        worker.script(text=" and then", finish="abort")
        text, images = f"Samples: {IMAGE}{IMAGE}", [data_url(DOG), data_url(CAT)]
        body = {"text": text, "image_data": images, "sampling_params": sampling(n=2, temperature=1)}
        reply = served.generate(body)
        assert len(reply.records) == 3
        assert {record.images for record in reply.records} == {(digest(DOG), digest(CAT))}
        kept = [record for record in reply.records if (record.finish_reason or {})["type"] != "abort"]
        assert {one["text"] for one in reply.body} == {r.text for r in kept}
        for record in kept:
            found = served.retrieve(text + record.text, image_data=images)
            assert found["tokens"] in [one.input_ids + one.output_ids for one in kept if one.text == record.text]
            check(found, found["tokens"], [DOG, CAT])


def test_pictures_of_one_length_have_equal_ids_and_other_spans(tmp_path: Path) -> None:
    """Their contexts differ in nothing but the digest: the store keeps both."""
    by_length: dict[int, bytes] = {}
    for seed in range(200):
        one = picture(20, 20, seed)
        other = by_length.setdefault(length_of(digest(one)), one)
        if other != one:
            break
    text, store = f"Same: {IMAGE} x", StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
    records = {}
    with product(styles=("cumulative",), store=store) as served:
        for content in (one, other):
            served.workers[0].script(text=" hello there", finish="length")
            body = {"text": text, "image_data": [data_url(content)], "sampling_params": sampling(2)}
            records[content] = served.generate(body).record
    ids = [record.input_ids + record.output_ids for record in records.values()]
    assert ids[0] == ids[1]
    with product(styles=("cumulative",), store=store) as served:
        for content, record in records.items():
            found = served.retrieve(text + record.text, image_data=[data_url(content)])
            check(found, record.input_ids + record.output_ids, [content])
