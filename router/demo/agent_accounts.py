"""What workers have written down of their generations (`agent_witness`), read again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Account:
    """One generation, as its worker tells it.

    Attributes:
        read: the ids that the model consumed.
        sampled: the ids that it produced.
        logprobs: of each sampled one.
        versions: of the weights that each was sampled under.
    """

    read: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[str]


def read_all(folder: Path) -> dict[str, Account]:
    """What all workers of a demonstration have written, by generation."""
    written = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jsonl"))]
    lines = [json.loads(line) for text in written for line in text.splitlines()]
    return {line.pop("generation"): Account(**line) for line in lines}
