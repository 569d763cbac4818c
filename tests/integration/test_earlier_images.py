"""A store with images that a router wrote which kept none of their files: see `tests.support.earlier.make`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from router.config import StoreConfig
from tests.integration.test_images_in_stores import SAMPLING, product, shown, turn, user
from tests.middleware_hub.store_cli.running import status
from tests.support.earlier.make import FOLDER
from tests.support.pictures import digest, picture

CAT, DOG = picture(40, 30, 1), picture(40, 30, 2)
LONG = {"ttl": 1e9}
"""Seconds for which a session is kept: since the store was written, years may have passed."""


def test_ids_and_spans_are_there_and_files_come_with_what_is_sent(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite3").write_bytes(gzip.decompress((FOLDER / "2026-11-29.images.sqlite.gz").read_bytes()))
    truth: dict[str, Any] = json.loads(gzip.decompress((FOLDER / "2026-11-29.images.truth.json.gz").read_bytes()))
    address = f"sqlite:{tmp_path / 'store.sqlite3'}"
    store, name, messages = StoreConfig(url=address), truth["session"], truth["messages"]
    with product(store, sessions=LONG) as served:
        (found,) = served.get(f"/sessions/{name}/trajectories?media=inline").json()["trajectories"]
        assert found["prompt_ids"] + found["response_ids"] == truth["ids"]
        assert not found["exact"]
        assert "media_missing" in found["reasons"]
        images = found["multi_modal_data"]["images"]
        assert [one["digest"] for one in images] == truth["images"] == [digest(CAT), digest(DOG)]
        assert {one["bytes"] for one in images} == {one["mime"] for one in images} == {None}
        named = [{"role": "user", "content": [shown(digest(CAT))]}, *messages[1:], user(text="And?")]
        answer = served.exchange("POST", f"/sessions/{name}/v1/chat/completions", {"messages": named, **SAMPLING})
        assert (answer.status, answer.json()["error"]["code"]) == (400, "media_unknown")
        # What the session itself names was sent, whatever this process knows.
        more = {"input": "And?", "previous_response_id": found["turns"][-1]["request_id"]}
        answer = served.exchange("POST", f"/sessions/{name}/v1/responses", more)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "media_missing")
        turn(served, name, [*messages, user(DOG, text="And?")])
        record = served.workers[0].log[-1]
        assert record.input_ids[: len(truth["ids"])] == truth["ids"]
        assert list(record.images) == [digest(CAT), digest(DOG), digest(DOG)]
    assert status("verify", "--store", address) == 0
    with product(store, sessions=LONG) as served:  # the new turn names this one
        assert served.exchange("GET", f"/media/{digest(DOG)}").content == DOG
        text = {"text": "<|image_pad|>", "image_data": [digest(DOG)], "sampling_params": {"max_new_tokens": 2}}
        assert list(served.generate(text).record.images) == [digest(DOG)]
