"""Random conversations with images at two routers on one store, which restart, forget, and have room for little.

The oracle keeps, for each turn, what the worker computed with: its ids, and the digests of the pictures that it read.
"""

from __future__ import annotations

import base64
import contextlib
import io
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from router.config import StoreConfig
from tests.integration.test_images_in_stores import IMAGE, SAMPLING, TENANTS, product, shown, store_at
from tests.support.client import Answer
from tests.support.pictures import digest, picture
from tests.support.stack import Stack
from tests.support.usual import usual
from worker.engine.records import GenerationRecord
from worker.worker import EmbeddedWorker

Json = dict[str, Any]


def repacked(content: bytes) -> bytes:
    """The same pixels in other bytes."""
    encoded = io.BytesIO()
    Image.open(io.BytesIO(content)).save(encoded, "PNG", compress_level=0)
    return encoded.getvalue()


FIRST = picture(40, 30, 1)
POOL = [FIRST, repacked(FIRST), *(picture(40, 30, seed) for seed in range(2, 6))]
BYTES = {digest(one): one for one in POOL}


@dataclass
class Turn:
    """A turn of a session. `message` shows pictures by their digests."""

    above: Turn | None
    message: Json
    reply: Json
    ids: list[int]
    images: list[str]

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The computed sequence."""
        return tuple(self.ids), tuple(self.images)

    @property
    def path(self) -> list[Turn]:
        return [*([] if self.above is None else self.above.path), self]


@dataclass
class Talk:
    """A session, or a text (without a name), of one tenant."""

    tenant: str
    name: str
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    named: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


class World:
    """Two routers on one store, and all that was said."""

    def __init__(self, store: StoreConfig, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.talks: list[Talk] = []
        self.sent: dict[str, set[str]] = {"a": set(), "b": set()}
        self.entered = [contextlib.ExitStack(), contextlib.ExitStack()]
        self.routers: list[Stack] = []
        self.workers: dict[EmbeddedWorker, int] = {}
        for number in range(2):
            self.routers.append(self.start(number))

    def start(self, number: int) -> Stack:
        max_bytes = self.random.choice([None, 1, 4 * len(FIRST)])
        served: Stack = self.entered[number].enter_context(
            product(self.store, media={"max_bytes": max_bytes}, **TENANTS)
        )
        self.workers.update((worker, len(worker.log)) for worker in served.workers)
        return served

    def record(self) -> GenerationRecord:
        """What a worker has read and sampled since the last call. The routers share their workers."""
        (found,) = (made for worker, seen in self.workers.items() for made in worker.log[seen:])
        self.workers = {worker: len(worker.log) for worker in self.workers}
        return found

    def restart(self) -> None:
        number = self.random.randrange(2)
        # The store remembers workers. What has the port of one that is gone may be the router of another test.
        served = self.random.choice(self.routers)
        for worker in self.routers[number].workers:
            answer = served.exchange("POST", "/remove_worker", {"url": worker.url}, {"authorization": "Bearer root"})
            assert answer.status == 200, answer.content
        self.entered[number].close()
        self.routers[number] = self.start(number)

    def close(self) -> None:
        for one in self.entered:
            one.close()

    def ask(self, method: str, path: str, tenant: str, body: Json | None = None) -> Answer:
        served = self.random.choice(self.routers)
        return served.exchange(method, path, body, {"authorization": f"Bearer key-of-{tenant}"})

    def given(self, tenant: str, name: str) -> bytes | str:
        """A picture as a client gives it: its bytes, or only its digest if the tenant has sent it before."""
        return name if name in self.sent[tenant] and self.random.random() < 0.7 else BYTES[name]

    def drawn(self) -> list[str]:
        return [digest(one) for one in self.random.choices(POOL, k=self.random.choice([0, 1, 1, 2]))]

    # Steps ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        tenant = self.random.choice("ab")
        if self.random.random() < 0.3:
            self.talks.append(Talk(tenant, "", text=f"Text {len(self.talks)}:"))
            return
        answer = self.ask("POST", "/sessions", tenant, {})
        self.talks.append(Talk(tenant, str(answer.json()["session_id"])))

    def talk(self) -> None:
        one = self.random.choice(self.talks)
        if not one.name:
            self.go_on(one)
            return
        above = self.random.choice([None, *one.turns, *one.turns[-2:]])  # often the newest, else a fork
        new = self.drawn()
        message = {"text": self.random.choice(["Look", "And?"]), "images": new}
        messages = list[Json]()
        for turn in [] if above is None else above.path:
            messages += [self.user(one.tenant, turn.message), turn.reply]
        messages.append(self.user(one.tenant, message))
        answer = self.ask(
            "POST", f"/sessions/{one.name}/v1/chat/completions", one.tenant, {"messages": messages, **SAMPLING}
        )
        assert answer.status == 200, answer.content
        self.sent[one.tenant].update(new)
        record = self.record()
        expected = [name for turn in (above.path if above else []) for name in turn.message["images"]] + new
        assert list(record.images) == expected
        if above is not None:
            assert record.input_ids[: len(above.ids)] == above.ids
        ids = [*record.input_ids, *record.output_ids]
        one.turns.append(Turn(above, message, answer.json()["choices"][0]["message"], ids, expected))

    def user(self, tenant: str, message: Json) -> Json:
        parts = [{"type": "text", "text": message["text"]}]
        parts += [shown(self.given(tenant, name)) for name in message["images"]]
        return {"role": "user", "content": parts}

    def go_on(self, one: Talk) -> None:
        new = self.drawn()
        text = one.text + "".join(f" {IMAGE}" for _ in new) + " more"
        names = [*one.named, *new]
        images = [shown(self.given(one.tenant, name))["image_url"]["url"] for name in names]
        body: Json = {"text": text, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
        answer = self.ask("POST", "/generate", one.tenant, body | ({"image_data": images} if images else {}))
        assert answer.status == 200, answer.content
        self.sent[one.tenant].update(new)
        record = self.record()
        assert list(record.images) == names
        assert record.input_ids[: len(one.ids)] == one.ids
        one.ids, one.text, one.named = [*record.input_ids, *record.output_ids], text + record.text, names

    def pry(self) -> None:
        """A tenant names what it has not sent: the answer is that for what nobody has."""
        tenant = self.random.choice("ab")
        foreign = [name for name in BYTES if name not in self.sent[tenant]]
        if foreign:
            name = self.random.choice(foreign)
            assert self.ask("GET", f"/media/{name}", tenant).status == 404
            body = {"messages": [{"role": "user", "content": [shown(name)]}], **SAMPLING}
            answer = self.ask("POST", "/v1/chat/completions", tenant, body)
            assert (answer.status, answer.json()["error"]["code"]) == (400, "media_unknown")

    def look(self) -> None:
        one = self.random.choice(self.talks)
        other = "b" if one.tenant == "a" else "a"
        if not one.name:
            if one.ids:
                asked = {"text": one.text, **({"image_data": one.named} if one.named else {})}
                answer = self.ask("POST", "/retrieve_from_text?media=inline", one.tenant, asked)
                found = answer.json()
                assert found["tokens"] == one.ids
                check(found, one.named, found["tokens"], found["loss_mask"])
            return
        assert self.ask("GET", f"/sessions/{one.name}/trajectories", other).status == 404
        answer = self.ask("GET", f"/sessions/{one.name}/trajectories?media=inline", one.tenant)
        made = Counter(turn.key for turn in one.turns)
        leaves = made.keys() - {turn.above.key for turn in one.turns if turn.above is not None}
        twins = {key for key, turns in made.items() if turns > 1}  # a conversation that goes on may go on from either
        seen = set()
        for branch in answer.json()["trajectories"]:
            ids = branch["prompt_ids"] + branch["response_ids"]
            mask = [0] * len(branch["prompt_ids"]) + branch["response_mask"]
            names = [image["digest"] for image in images_of(branch)]
            check(branch, names, ids, mask)
            seen.add((tuple(ids), tuple(names)))
        assert leaves <= seen <= leaves | twins
        for name in self.random.sample(sorted(self.sent[one.tenant]), min(2, len(self.sent[one.tenant]))):
            assert self.ask("GET", f"/media/{name}", one.tenant).content == BYTES[name]


def images_of(found: Json) -> list[Json]:
    """Return the images of a sequence, which says nothing if it has none."""
    told = found.get("multi_modal_data")
    return [] if told is None else list(told["images"])


def check(found: Json, names: list[str], ids: list[int], mask: list[int]) -> None:
    """The pictures of a sequence stand where their runs are, with their bytes, and nothing of them is trained on."""
    assert found["exact"], found["reasons"]
    images = images_of(found)
    assert [one["digest"] for one in images] == names
    for one in images:
        low, high = one["span"]
        assert set(ids[low:high]) == {4097}
        assert 4097 not in (ids[low - 1], ids[high])
        assert not any(mask[low:high])
        assert base64.b64decode(one["bytes"]) == BYTES[one["digest"]]
        assert (one["mime"], one["width"], one["height"]) == ("image/png", 40, 30)


@pytest.fixture(params=usual(["sqlite", "redis"], "sqlite", "redis"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    with store_at(request.param, tmp_path) as config:
        yield config


@pytest.mark.parametrize("seed", usual(list(range(12)), 1, 2))
def test_random_lives_with_images(store: StoreConfig, seed: int) -> None:
    """No id, span, digest or mask is ever wrong, and no picture is another branch's or tenant's."""
    world = World(store, seed)
    try:
        world.begin()
        for _ in range(60):
            step = world.random.choices(
                [world.begin, world.talk, world.look, world.pry, world.restart], [2, 20, 8, 3, 3]
            )[0]
            step()
        for _ in range(10):
            world.look()
    finally:
        world.close()
