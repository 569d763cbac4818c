"""Images through the client, against a whole router: what it sends, what it returns, and what it says when it is refused.

The oracle is the worker's own log: its ids, in which each picture is a run, and the digests of the pictures that it took.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from middleware_hub.client import (
    AsyncClient,
    Client,
    Conversation,
    InconsistentAnswerError,
    RefusedError,
    Retries,
    Session,
    Trajectory,
    Transcript,
    UnknownReplyError,
    image_part,
)
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

PAD = 4097
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CAT, DOG, SUN = (picture(40, 30, seed, kind) for seed, kind in ((1, "PNG"), (2, "JPEG"), (3, "PNG")))
FEW = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", folder=shipped_image_tokenizer()) as made:
        yield made
        assert [worker.out_of_range for worker in made.workers] == [[] for _ in made.workers]


@pytest.fixture
def client(served: Stack, space: str) -> Iterator[Client]:
    with Client(served.url, namespace=space, retries=Retries(attempts=2, first=0.01)) as made:
        yield made


def record_of(served: Stack, reply_id: str) -> Any:
    (found,) = [one for worker in served.workers for one in worker.log if one.rid == reply_id]
    return found


def check(found: Trajectory, record: Any, pictures: list[bytes], *, inline: bool = False) -> None:
    """The sequence is what the worker computed with last, with these pictures at their runs."""
    assert found.require_exact().tokens == record.input_ids + record.output_ids
    shown = found.multi_modal_data.images
    assert [one.digest for one in shown] == [digest(one) for one in pictures] == list(record.images)
    assert [one.data for one in shown] == [one if inline else None for one in pictures]
    assert sum(one.tokens for one in shown) == found.tokens.count(PAD)
    for one, content in zip(shown, pictures, strict=True):
        assert set(found.tokens[slice(*one.span)]) == {PAD}
        size = Image.open(io.BytesIO(content))
        assert (one.width, one.height, one.mime) == (*size.size, f"image/{(size.format or '').lower()}")


def test_every_kind_of_image_is_the_same_picture(served: Stack, client: Client, tmp_path: Path) -> None:
    """The bytes of a file, its path, its data URL and its digest name one picture; an array of pixels makes its own file."""
    path = tmp_path / "dog.jpeg"
    path.write_bytes(DOG)
    kinds: list[Any] = [DOG, bytearray(DOG), path, str(path), data_url(DOG), digest(DOG)]
    for number, one in enumerate(kinds):
        reply = client.generate(f"Kind {number}: {IMAGE}", FEW, images=[one])
        assert record_of(served, reply.id).images == (digest(DOG),)
        assert reply.recorded == "exact"
    opened = Image.open(io.BytesIO(DOG))
    first, second = (client.generate(f"Pillow: {IMAGE}", FEW, images=[opened]) for _ in range(2))
    (made,) = record_of(served, first.id).images
    assert record_of(served, second.id).images == (made,)
    kept = Image.open(io.BytesIO(client.media(made)))
    assert (kept.format, kept.tobytes()) == ("PNG", opened.convert("RGB").tobytes())


def test_a_conversation_sends_its_images_every_turn(served: Stack, client: Client) -> None:
    """So it does after it was saved as JSON and taken up elsewhere; what nobody answered is not retrieved."""
    talk = Conversation(client, f"Look: {IMAGE} what?", FEW, images=[CAT])
    pictures = [CAT]
    talk.say()
    for new in ([DOG], [], [CAT, SUN]):
        talk.append(f" And {IMAGE * len(new)}? ", new)
        pictures += new
        talk = Conversation(client, Transcript.of(json.loads(json.dumps(talk.transcript.state()))), FEW)
        reply = talk.say()
        check(talk.retrieve(), record_of(served, reply.id), pictures)
        check(talk.retrieve(media="inline"), record_of(served, reply.id), pictures, inline=True)
    talk.append(f" unanswered {IMAGE}", [DOG])
    (whole,) = talk.cover(media="inline")
    check(whole, record_of(served, reply.id), pictures, inline=True)


def test_a_loop_that_rewrites_has_the_images_of_each_sequence(served: Stack, client: Client) -> None:
    """`cover` gives all sequences that hold the replies, each with the pictures of its own path."""
    talk = Conversation(client, f"Rewritten: {IMAGE} what?", FEW, images=[CAT])
    first = talk.say()
    talk.transcript.text = talk.text[: -len(first.text)] + "Something else."
    talk.append(f" And {IMAGE}?", [DOG])
    last = talk.say()
    main, other = talk.cover(media="inline")
    check(main, record_of(served, last.id), [CAT, DOG], inline=True)
    check(other, record_of(served, first.id), [CAT], inline=True)
    assert main.text == talk.text


def test_batches_streams_and_trajectories(served: Stack, client: Client) -> None:
    texts, images = [f"Row one {IMAGE}", "Row two", f"Row three {IMAGE} {IMAGE}"], [[CAT], [], [DOG, CAT]]
    for (reply,), row in zip(client.generate_batch(texts, FEW, images=images), images, strict=True):
        assert record_of(served, reply.id).images == tuple(map(digest, row))
    *_, last = client.stream(texts[2], FEW, images=images[2])
    assert last.last is not None
    found = client.retrieve(texts[2] + last.last.text, images=images[2], request_id=last.last.id)
    check(found, record_of(served, last.last.id), images[2])
    with_all = client.generate(texts[0], FEW, images=images[0], return_trajectory=True)
    assert with_all.trajectory is not None
    check(with_all.trajectory, record_of(served, with_all.id), images[0])
    assert "another image" in client.explain(texts[0], [SUN])["message"]


def test_the_ids_of_a_sequence_may_be_sent_on(served: Stack, client: Client) -> None:
    """They have a run for each image. A client says so; without that they are refused."""
    text = f"Sent on {IMAGE}"
    reply = client.generate(text, FEW, images=[CAT])
    found = client.retrieve(text + reply.text, images=[CAT])
    with pytest.raises(RefusedError, match=r"^400 media_expanded: "):
        client.generate(found.tokens, FEW, images=[CAT])
    again = client.generate(found.tokens, FEW, images=[digest(CAT)], expanded=True)
    assert record_of(served, again.id).input_ids == found.tokens


def test_a_session_takes_parts_of_messages(served: Stack, client: Client) -> None:
    with Session(client) as session:
        said = session.chat([{"role": "user", "content": [image_part(CAT), {"type": "text", "text": "What?"}]}])
        (found,) = session.finalize(media="inline")
    name = said["choices"][0]["meta_info"]["generation_id"]
    (record,) = [one for worker in served.workers for one in worker.log if name.startswith(one.rid)]
    check(found, record, [CAT], inline=True)
    assert [(one.message, one.part) for one in found.multi_modal_data.images] == [(0, 0)]


@pytest.mark.parametrize("inline", [False, True])
def test_claims_give_the_images_of_texts_and_of_sessions(served: Stack, client: Client, *, inline: bool) -> None:
    """As the retrieval and `finalize` do: text with placeholders, and each picture at its run."""
    reply = client.generate(
        f"Claimed {IMAGE}", FEW, images=[CAT], group_id="texts", rollout_end=True, group_size=1, rid=f"claim{inline}"
    )
    session = Session(client, group_id="sessions", group_size=1)
    said = session.chat([{"role": "user", "content": [image_part(DOG), {"type": "text", "text": "What?"}]}])
    session.finalize()
    claim = client.claim(groups=2, wait_seconds=5, media="inline" if inline else "ref")
    found = {one.group_id: one.trajectories for one in claim}
    (text,), (branch,) = found["texts"], found["sessions"]
    check(text, record_of(served, reply.id), [CAT], inline=inline)
    assert text.text == f"Claimed {IMAGE}{reply.text}"
    name = said["choices"][0]["meta_info"]["generation_id"]
    (record,) = [one for worker in served.workers for one in worker.log if name.startswith(one.rid)]
    check(branch, record, [DOG], inline=inline)
    assert client.acknowledge(claim) == 2
    session.delete()


def test_refusals_have_their_word(served: Stack, client: Client) -> None:
    with pytest.raises(RefusedError, match=r"^400 media_count: .*an image for each placeholder") as count:
        client.generate(f"{IMAGE} {IMAGE}", FEW, images=[CAT])
    assert (count.value.code, count.value.kind, count.value.status) == ("media_count", "invalid_request_error", 400)
    with pytest.raises(RefusedError, match=r"^400 media_unknown: .*send the image's bytes"):
        client.generate(IMAGE, FEW, images=["sha256:" + "0" * 64])
    with pytest.raises(RefusedError, match=r"^400 media_url: "):
        client.generate(IMAGE, FEW, images=["http://127.0.0.1/a.png"])
    with pytest.raises(RefusedError, match=r"^400 media_invalid: "):
        client.retrieve(IMAGE, images=[b"no picture"])
    with pytest.raises(UnknownReplyError, match=r"^404 media_unknown: "):
        client.media("sha256:" + "0" * 64)
    with pytest.raises(RefusedError, match=r"400 invalid_request_error: .*`media`"):
        client.claim(media="all")  # type: ignore[typeddict-item]
    with pytest.raises(RefusedError, match=r"400 invalid_request_error: .*`media`"):
        client.retrieve("text", media="all")  # type: ignore[typeddict-item]


def test_what_is_no_list_of_images_is_noticed_before_it_is_sent(served: Stack, client: Client) -> None:
    before = [len(worker.log) for worker in served.workers]
    with pytest.raises(TypeError, match="is a list"):
        client.generate(IMAGE, FEW, images=CAT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int is no image"):
        client.generate(IMAGE, FEW, images=[3])
    with pytest.raises(FileNotFoundError):
        client.generate(IMAGE, FEW, images=["no/such/file.png"])
    with pytest.raises(ValueError, match="1 lists of images for 2 prompts"):
        client.generate_batch([IMAGE, IMAGE], FEW, images=[[CAT]])
    with pytest.raises(ValueError, match="to `append`"):
        Conversation(client, "a", FEW).say(images=[CAT])
    with pytest.raises(ValueError, match="its own `images`"):
        Conversation(client, Transcript("a"), FEW, images=[CAT])
    assert [len(worker.log) for worker in served.workers] == before


def test_the_asynchronous_client(served: Stack, space: str) -> None:
    async def ask() -> tuple[Trajectory, str, bytes]:
        async with AsyncClient(served.url, namespace=space) as client:
            reply = await client.generate(f"Async {IMAGE}", FEW, images=[CAT])
            text = f"Async {IMAGE}{reply.text}"
            return await client.retrieve(text, images=[CAT]), reply.id, await client.media(digest(CAT))

    found, name, content = asyncio.run(ask())
    check(found, record_of(served, name), [CAT])
    assert content == CAT


@pytest.mark.parametrize("span", [[0, 3], [4, 4], [6, 8], [2, 9]])
def test_a_span_that_is_not_the_images_own_is_noticed(span: list[int]) -> None:
    """Outside of the sequence, empty, over sampled tokens, or over another image."""
    entry = {"mime": None, "width": None, "height": None, "message": None, "part": None, "bytes": None}
    shown = [{**entry, "digest": "a", "span": [1, 3]}, {**entry, "digest": "b", "span": span}]
    answer = {
        **{"tokens": [1] * 8, "loss_mask": [0] * 6 + [1, 1], "response_length": 2, "token_length": 8},
        **{"loss_mask_length": 8, "rollout_logp": None, "response": "", "exact": True, "exact_chars": 0, "reasons": []},
        **{"weight_versions": [], "turns": [], "multi_modal_data": {"images": shown}},
    }
    with pytest.raises(InconsistentAnswerError, match="image b has the tokens"):
        Trajectory.of(answer)
    shown[1]["span"] = [3, 6]
    assert [one.span for one in Trajectory.of(answer).multi_modal_data.images] == [(1, 3), (3, 6)]
