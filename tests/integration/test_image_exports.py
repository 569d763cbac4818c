"""Exports of sessions with images: JSON, binary and as a tree. The oracle is the worker's own log."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load
from starlette.types import Message, Receive, Scope, Send

import tests.support.stack
from middleware_hub.client import Client, Session, image_part
from router.app import RouterApp, create_app
from router.config import StoreConfig
from router.http.responses import SEND_BYTES
from tests.middleware_hub.store_cli.running import status
from tests.support.pictures import digest, picture
from tests.support.stack import Stack, stack
from worker.engine.prompt_images import length_of
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
PAD = 4097


def twins() -> tuple[bytes, bytes]:
    """Two pictures that an engine makes as many tokens of: their ids are equal, and they are not."""
    made = [picture(40, 30, seed) for seed in range(40)]
    return next((a, b) for a, b in combinations(made, 2) if length_of(digest(a)) == length_of(digest(b)))


SCREEN, OTHER = twins()
CAT = picture(64, 48, 77)


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", folder=shipped_image_tokenizer()) as made:
        yield made


@pytest.fixture
def session(served: Stack) -> Iterator[Session]:
    """A task that begins with a picture and goes on with one of two others, of which the first has two replies."""

    def asked(content: bytes) -> Json:
        return {"role": "user", "content": [image_part(content), {"type": "text", "text": "Where?"}]}

    with Client(served.url) as client, Session(client) as made:
        begun = [asked(CAT)]
        begun.append(made.chat(begun, max_tokens=6)["choices"][0]["message"])
        for one in (SCREEN, OTHER, SCREEN):
            made.chat([*begun, asked(one)], max_tokens=6)
        yield made


def exported(served: Stack, session: Session, form: str, media: str) -> Any:
    found = served.post(f"/sessions/{session.id}/finalize?media={media}", {"format": form})
    assert found.status == 200, found.content
    return found


def trajectories(served: Stack, session: Session, media: str = "ref") -> list[Json]:
    found: list[Json] = exported(served, session, "json", media).json()["trajectories"]
    return found


class LargestParts:
    """Wraps an application: notes the bytes of the largest part of a reply that it sends at once."""

    def __init__(self, app: RouterApp) -> None:
        self._app = app
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            self.bytes = max(self.bytes, len(message.get("body", b"")))
            await send(message)

        await self._app(scope, receive, noted)


@pytest.mark.parametrize("form", ["json", "atif", "tree", "arrow", "safetensors"])
def test_files_are_sent_in_parts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred megabytes of screenshots, sent at once, would hold up all other requests."""
    wrapped: list[LargestParts] = []

    def measured(*given: Any, **named: Any) -> LargestParts:
        wrapped.append(LargestParts(create_app(*given, **named)))
        return wrapped[-1]

    monkeypatch.setattr(tests.support.stack, "create_app", measured)
    screen = CAT + bytes(3 * SEND_BYTES)
    with stack("qwen", styles=("cumulative",), folder=shipped_image_tokenizer()) as made:
        path = f"/sessions/{made.post('/sessions', {}).json()['session_id']}"
        body = {"messages": [{"role": "user", "content": [image_part(screen)]}], "max_tokens": 4}
        assert made.post(f"{path}/v1/chat/completions", body).status == 200
        content = made.get(f"{path}/trajectories?media=inline&format={form}").content
    assert screen in content or base64.b64encode(screen) in content
    assert 0 < wrapped[0].bytes <= SEND_BYTES


def test_json_has_the_files_only_if_asked(served: Stack, session: Session) -> None:
    for one, inline in zip(trajectories(served, session), trajectories(served, session, "inline"), strict=True):
        shown = one["multi_modal_data"]["images"]
        assert [image["bytes"] for image in shown] == [None] * len(shown)
        files = [base64.b64decode(image["bytes"]) for image in inline["multi_modal_data"]["images"]]
        assert [digest(file) for file in files] == [image["digest"] for image in shown]
        path = f"/sessions/{session.id}/trajectories?media=inline"
        assert served.get(path).json()["trajectories"][0]["multi_modal_data"]["images"][0]["bytes"] is not None


@pytest.mark.parametrize("media", ["ref", "inline"])
def test_arrow_has_a_column_of_spans_and_each_file_once(served: Stack, session: Session, media: str) -> None:
    wanted = trajectories(served, session)
    source = pa.BufferReader(exported(served, session, "arrow", media).content)
    table = pa.ipc.open_stream(source).read_all()
    assert [len(row) for row in table["images"].to_pylist()] == [2] * len(wanted)
    for row, one in zip(table.to_pylist(), wanted, strict=True):
        ids = row["prompt_ids"] + row["response_ids"]
        assert json.loads(row["json"])["multi_modal_data"] == one["multi_modal_data"]
        for image, told in zip(row["images"], one["multi_modal_data"]["images"], strict=True):
            assert [image.pop("start"), image.pop("end")] == told["span"]
            assert image == {name: told[name] for name in image}
            assert set(ids[slice(*told["span"])]) == {PAD}
    if media == "ref":
        assert not source.read()
        return
    files = pa.ipc.open_stream(source).read_all().to_pylist()
    assert sorted(one["bytes"] for one in files) == sorted((CAT, SCREEN, OTHER))
    assert [one["digest"] for one in files] == [digest(one["bytes"]) for one in files]
    assert {(one["mime"], one["width"], one["height"]) for one in files} == {
        ("image/png", 40, 30),
        ("image/png", 64, 48),
    }


def test_safetensors_have_each_file_once(served: Stack, session: Session) -> None:
    content = exported(served, session, "safetensors", "inline").content
    files = {name.removeprefix("media."): one.tobytes() for name, one in load(content).items() if "media." in name}
    assert files == {digest(one): one for one in (CAT, SCREEN, OTHER)}
    length = int.from_bytes(content[:8], "little")
    told = json.loads(content[8 : 8 + length])["__metadata__"]
    assert json.loads(told["0"])["multi_modal_data"] == trajectories(served, session)[0]["multi_modal_data"]
    assert "media." not in str(load(exported(served, session, "safetensors", "ref").content).keys())


def test_a_tree_parts_where_the_pictures_do(served: Stack, session: Session) -> None:
    """Even if the ids are equal. What is shared has its picture once, and each path has the pictures of its branch."""
    wanted = {one["branch"]: one for one in trajectories(served, session, "inline")}
    tree = exported(served, session, "tree", "inline").json()
    assert session.tree(media="inline") == tree
    for leaf in tree["leaves"]:
        one = wanted[leaf["branch"]]
        ids, images, at = list[int](), list[Json](), leaf["node"]
        while at is not None:
            node = tree["nodes"][at]
            ids = node["token_ids"] + ids
            images = node.get("multi_modal_data", {"images": []})["images"] + images
            at = node["parent"]
        assert ids == one["prompt_ids"] + one["response_ids"]
        assert images == one["multi_modal_data"]["images"]
    digests = [
        image["digest"] for node in tree["nodes"] for image in node.get("multi_modal_data", {"images": []})["images"]
    ]
    assert sorted(digests) == sorted(map(digest, (CAT, SCREEN, OTHER)))


def test_a_store_is_exported_with_spans_and_each_file_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Texts and sessions, of two tenants of which both have sent one of the pictures."""
    url = f"sqlite:{tmp_path / 'steps.sqlite3'}"
    keys = {"api_keys": ("a:key-of-a", "b:key-of-b")}
    records = []
    with stack(
        "qwen", styles=("cumulative",), folder=shipped_image_tokenizer(), store=StoreConfig(url=url), server=keys
    ) as served:
        for tenant, pictures in (("a", [SCREEN, CAT]), ("b", [CAT])):
            with Client(served.url, api_key=f"key-of-{tenant}") as client:
                text = "Look: " + "<|vision_start|><|image_pad|><|vision_end|> " * len(pictures)
                client.generate(text, {"max_new_tokens": 6}, images=pictures)
                records.append((tenant, served.workers[0].log[-1]))
        with Client(served.url, api_key="key-of-a") as client:
            Session(client).chat([{"role": "user", "content": [image_part(OTHER)]}], max_tokens=6)
            records.append(("a", served.workers[0].log[-1]))
    rows_file, media_file = tmp_path / "rows.parquet", tmp_path / "media.parquet"
    assert status("export", "--store", url, "--out", str(rows_file), "--media", str(media_file)) == 0
    assert "4 images\n" in capfd.readouterr().err
    rows = pq.read_table(rows_file).to_pylist()
    assert [row["tenant"] for row in rows] == [tenant for tenant, _ in records]
    for row, (_, record) in zip(rows, records, strict=True):
        assert row["tokens"] == record.input_ids + record.output_ids
        assert tuple(one["digest"] for one in row["images"]) == record.images
        placeholders = [place for one in row["images"] for place in range(one["start"], one["end"])]
        assert placeholders == [place for place, number in enumerate(row["tokens"]) if number == PAD]
    files = pq.read_table(media_file).to_pylist()
    assert sorted((one["tenant"], one["bytes"]) for one in files) == sorted(
        [("a", SCREEN), ("a", CAT), ("b", CAT), ("a", OTHER)]
    )
    assert all(digest(one["bytes"]) == one["digest"] and one["mime"] == "image/png" for one in files)
    trees = tmp_path / "rows.jsonl"
    assert status("export", "--store", url, "--out", str(trees), "--keep-marks") == 0
    shown = [
        [
            image
            for node in json.loads(line)["nodes"]
            for image in node.get("multi_modal_data", {"images": []})["images"]
        ]
        for line in trees.read_text().splitlines()
    ]
    assert sorted(tuple(one["digest"] for one in images) for images in shown) == sorted(
        record.images for _, record in records
    )
    assert {one["width"] for images in shown for one in images} == {40, 64}
    assert status("export", "--store", url, "--out", str(rows_file), "--media", "-") == 2
