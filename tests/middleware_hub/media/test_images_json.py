"""Images in answers come in pieces that take little time, so that other requests have their turn in between."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from typing import Any

import pytest

from middleware_hub.media.images_json import images_json
from middleware_hub.retrieval.retrieval import json_pieces
from middleware_hub.spans.answer_json import Lists

MOST = 1 << 18
"""Characters of a piece."""
FILE = random.Random(0).randbytes(1_000_001)


def image(data: bytes | None) -> dict[str, Any]:
    return {"digest": "sha256:0", "mime": 'image/"png"', "span": [1, 5], "message": None, "part": None, "bytes": data}


@pytest.mark.parametrize("files", [[], [None], [b""], [FILE], [FILE, None, FILE[:-1], FILE[:3]]])
def test_files_are_written_in_base64_and_whole(files: list[bytes | None]) -> None:
    images = [image(data) for data in files]
    pieces = list(images_json(images))
    written = [{**one, "bytes": one["bytes"] and base64.b64encode(one["bytes"]).decode()} for one in images]
    expected = [{**one, "bytes": "" if one["bytes"] == b"" else one["bytes"]} for one in written]
    assert json.loads(b"".join(pieces)) == {"images": expected}
    assert max(map(len, pieces)) <= MOST


@pytest.mark.parametrize("names", [1, 1000])
def test_a_retrieval_with_files_is_made_in_pieces(names: int) -> None:
    """Also where many answers list the same replies, and the list is written once."""
    answer = {"tokens": [1, 2], "request_ids": [str(number) for number in range(names)], "exact": True}
    lists: Lists = {}
    for _ in range(2):
        whole = {**answer, "multi_modal_data": {"images": [image(FILE)]}}
        pieces = asyncio.run(json_pieces(False, whole, lists))
        shown = image(FILE) | {"bytes": base64.b64encode(FILE).decode()}
        assert json.loads(b"".join(pieces)) == {**answer, "multi_modal_data": {"images": [shown]}}
        assert max(map(len, pieces)) <= MOST
    assert len(lists) == (names > 1)
