"""An image that is held is known by its base64, without decoding it; whatever is held, a body is read as if nothing was."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import Message

from middleware_hub.media import reading
from middleware_hub.media.errors import MediaError, MediaInvalidError
from middleware_hub.media.lifted import LiftedBody
from middleware_hub.media.picture import Base64Sample, Picture
from middleware_hub.media.reading import BodyReader
from middleware_hub.media.shelf import Shelf
from router.config.media import MediaConfig
from router.errors import BodyTooLargeError
from router.http.request_state import Caller, RequestRecord, first_state, with_state
from tests.conftest import examples
from tests.support.pictures import data_url, digest, picture

CAT = picture(60, 40, 1)


def noise(number: int) -> bytes:
    """An image of 150 KB."""
    return CAT + random.Random(number).randbytes(150_000)


LONG = noise(0)


class Reader:
    """A reader, and what is held by it."""

    def __init__(self, shelf: Shelf, **limits: Any) -> None:
        self.shelf = shelf
        self._reader = BodyReader(MediaConfig(**limits), shelf, max_body_bytes=10_000_000)

    def read(self, given: Sequence[str], tenant: str = "a", **more: Any) -> LiftedBody:
        """Read a request with these images, and keep them."""
        body = json.dumps({"text": "x", "image_data": list(given), **more}).encode()

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        scope["state"] = first_state(scope, RequestRecord("", "POST", "/generate"))
        found = asyncio.run(self._reader.read(with_state(scope, caller=Caller(tenant=tenant)), receive))
        for one in found.pictures.values():
            self.shelf.put(tenant, one)
        return found


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of images that were decoded."""
    places: list[int] = []
    real = reading.picture_at

    def noted(body: bytes, place: Any, max_bytes: int) -> Picture | None:
        places.append(place.start)
        return real(body, place, max_bytes)

    monkeypatch.setattr(reading, "picture_at", noted)
    return places


def bare(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize("form", [data_url, bare, lambda one: "data:image/x;base64," + bare(one)])
@pytest.mark.parametrize("content", [CAT, LONG], ids=["short", "long"])
def test_what_was_sent_before_is_not_decoded_again(form: Any, content: bytes, decoded: list[int]) -> None:
    reader = Reader(Shelf(10_000_000))
    first = reader.read([data_url(content)])
    assert len(decoded) == 1
    again = reader.read([form(content), form(content)])
    assert len(decoded) == 1
    assert again.pictures[digest(content)] is first.pictures[digest(content)]
    assert json.loads(again.body)["image_data"] == [digest(content)] * 2


def test_another_tenant_has_to_prove_that_it_has_an_image(decoded: list[int]) -> None:
    """Who knows a part of it must not learn from the time of an answer whether another one has sent the whole."""
    reader = Reader(Shelf(10_000_000))
    reader.read([data_url(CAT)], "a")
    reader.read([data_url(CAT)], "b")
    assert len(decoded) == 2
    reader.read([data_url(CAT)], "b")
    assert len(decoded) == 2


@pytest.mark.parametrize("seed", range(examples(60)))
def test_one_other_byte_is_another_image(seed: int) -> None:
    """Also where lengths and middles are the same."""
    rng = random.Random(seed)
    content = rng.choice((CAT, LONG))
    at = rng.choice((len(content) - 1, rng.randrange(40, len(content))))  # behind what a header says
    other = content[:at] + bytes((content[at] ^ (1 << rng.randrange(8)),)) + content[at + 1 :]
    reader = Reader(Shelf(10_000_000))
    sent = [content, other, content, other]
    for one in sent:
        found = reader.read([data_url(one)])
        assert found.pictures[digest(one)].data == one
    (lifted,) = [reader.read([data_url(one) for one in sent])]
    assert json.loads(lifted.body)["image_data"] == [digest(one) for one in sent]


def test_pictures_of_one_sample_replace_each_other(decoded: list[int]) -> None:
    other = CAT[:-1] + bytes((CAT[-1] ^ 1,))
    text, another = (data_url(one).encode() for one in (CAT, other))
    assert Base64Sample.of(text, 22, len(text)) == Base64Sample.of(another, 22, len(another))
    reader = Reader(Shelf(10_000_000))
    for count, one in enumerate((CAT, other, other, CAT, CAT), 1):
        reader.read([data_url(one)])
        assert len(decoded) == {1: 1, 2: 2, 3: 2, 4: 3, 5: 3}[count]


def test_what_went_from_the_shelf_is_decoded_again(decoded: list[int]) -> None:
    reader = Reader(Shelf(3 * len(CAT)))
    for one in (CAT, picture(60, 40, 3), CAT):
        assert reader.read([data_url(one)]).pictures[digest(one)].data == one
    assert len(decoded) == 3
    assert reader.shelf.count == 1


@pytest.mark.parametrize("given", ["data:image/png,", "data:image/png;BASE64x,", "data:", ";base64,"])
def test_what_is_refused_is_refused_although_its_base64_is_held(given: str) -> None:
    reader = Reader(Shelf(10_000_000))
    reader.read([data_url(CAT)])
    with pytest.raises(MediaError):
        reader.read([given + bare(CAT)])


def test_a_limit_counts_for_what_is_held() -> None:
    shelf = Shelf(10_000_000)
    Reader(shelf).read([data_url(CAT)])
    with pytest.raises(MediaInvalidError):
        Reader(shelf, max_image_bytes=len(CAT) - 1).read([data_url(CAT)])


def test_a_file_that_another_one_begins_with_is_another_one() -> None:
    short = CAT + bytes(3_000 - len(CAT) % 3)
    long = short + bytes(3_000)
    reader = Reader(Shelf(10_000_000))
    for one in (short, long, short, long):
        assert reader.read([bare(one)]).pictures[digest(one)].data == one


def test_images_do_not_hide_values_that_take_long_to_parse() -> None:
    with pytest.raises(BodyTooLargeError):
        Reader(Shelf(10_000_000)).read([data_url(LONG)], more=[{}] * 200_000)
    with pytest.raises(BodyTooLargeError):
        Reader(Shelf(10_000_000)).read([data_url(LONG)], more=[{"a": 1}] * 60_000)


@pytest.mark.parametrize(("copies", "apart"), [(1, False), (8, True)])
def test_many_new_images_are_decoded_in_a_thread(copies: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are not: to hand them over takes as long. One that is held is never decoded."""
    threads = list[bool]()
    real = reading.picture_at

    def noted(*given: Any) -> Picture | None:
        threads.append(threading.current_thread() is not threading.main_thread())
        return real(*given)

    monkeypatch.setattr(reading, "picture_at", noted)
    reader, new = Reader(Shelf(10_000_000)), [noise(number) for number in range(copies)]
    for _ in range(2):
        reader.read([data_url(one) for one in new])
        assert threads == [apart] * copies


@pytest.mark.parametrize("copies", [1, 60])
def test_all_that_was_sent_before_is_compared(copies: int) -> None:
    """On the event loop, or in a thread for a body of many megabytes."""
    reader, many = Reader(Shelf(100_000_000)), [noise(number) for number in range(copies)]
    reader.read([data_url(one) for one in many])
    many[-1] = many[-1][:-1] + b"x"
    found = reader.read([data_url(one) for one in many])
    assert json.loads(found.body)["image_data"] == [digest(one) for one in many]


def test_the_limit_of_a_request_counts_what_is_held_and_what_is_new() -> None:
    shelf = Shelf(10_000_000)
    reader = Reader(shelf, max_request_bytes=2 * len(LONG) - 1)
    reader.read([data_url(LONG)])
    with pytest.raises(MediaInvalidError, match="--media-max-request-bytes"):
        reader.read([data_url(LONG), data_url(noise(1))])
