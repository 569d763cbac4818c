"""What real engines answered to requests with images: read here, written by `make`, described in README.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.pictures import data_url

FOLDER = Path(__file__).parent / "vlm"
RUN = 8
"""Equal ids in a row, from so many on, are written as one: `{"run": [id, count]}`."""


@dataclass(frozen=True)
class Exchange:
    """A request, and what came back.

    Attributes:
        name: of the exchange, one of its kind in a file.
        path: where it was sent.
        body: as it was sent, images included.
        aborted: whether the request was aborted while the engine sampled.
        status: of the answer.
        reply: its JSON; of a stream a list of its events, of an aborted one the first and the last.
    """

    name: str
    path: str
    body: Any
    aborted: bool
    status: int
    reply: Any

    @property
    def ends(self) -> Any:
        """Of a stream the first event and the last one of each choice, as a worker may join those between; else the reply."""
        if not self.body.get("stream") or self.status != 200:
            return self.reply
        last: dict[tuple[int, ...], Any] = {}
        for event in self.reply:
            last[event.get("index", -1), *(choice["index"] for choice in event.get("choices", []))] = event
        row = min(event.get("index", -1) for event in self.reply)  # the rows of a batch come in any order
        first = next(event for event in self.reply if event.get("index", -1) == row)
        return [first, *(last[key] for key in sorted(last))]


def exchanges(engine: str, family: str) -> list[Exchange]:
    """Return what an engine (`sglang`, `vllm`) with a family (`qwen2_5_vl`, `qwen3_vl`) said, in the order of the requests."""
    found = json.loads((FOLDER / f"{engine}-{family}.json").read_text())
    return [Exchange(**_whole(one)) for one in found]


def image(name: str) -> bytes:
    """Return the file of an image that was sent."""
    return (FOLDER / name).read_bytes()


def _whole(value: Any) -> Any:
    """Undo what `make` shortened."""
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        found: list[Any] = []
        for one in value:
            if isinstance(one, dict) and one.keys() == {"run"}:
                number, count = one["run"]
                found += [number] * count
            else:
                found.append(_whole(one))
        return found
    if isinstance(value, str) and value.startswith("@"):
        return data_url(image(value[1:]))
    return value
