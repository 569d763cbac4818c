"""A worker's records of its requests, for a test to compare with."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any

FinishReason = dict[str, Any]

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
DEQUEUED: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


def stop(matched: int | str) -> FinishReason:
    return {"type": "stop", "matched": matched}


def length(count: int) -> FinishReason:
    return {"type": "length", "length": count}


logger = logging.getLogger(__name__)


@dataclass
class GenerationRecord:
    """One reply, as it was made."""

    rid: str
    body: dict[str, Any]  # the request as received; of a batch, the whole of it
    raw: bytes
    headers: dict[str, str]
    index: int  # the reply's place in the batch
    input_ids: list[int]  # the tokens that the model consumed
    from_text: bool  # the worker had to encode a text itself, which a router must prevent
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # per output token
    text: str = ""
    finish_reason: FinishReason | None = None
    disconnected: bool = False
    rank: int = 0  # the data-parallel rank that served it
    images: tuple[str, ...] = ()  # the digests of the images that the prompt's placeholders took, in their order


@dataclass
class ControlRecord:
    """Any request that is not a generation."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        """The JSON of the body; None without a body."""
        return json.loads(self.raw) if self.raw else None


@dataclass
class WorkerLog:
    """All records of a worker, in the order of arrival; none if it does not `keep` them.

    Attributes:
        received: the number of requests to generate, including refused ones.
        out_of_range: the faults of requests outside of the valid range.
    """

    keep: bool
    received: int = 0
    generations: list[GenerationRecord] = field(default_factory=list)
    requests: list[ControlRecord] = field(default_factory=list)
    out_of_range: list[str] = field(default_factory=list)

    def add_generations(self, records: list[GenerationRecord]) -> None:
        if self.keep:
            self.generations += records

    def add_out_of_range(self, what: str) -> None:
        logger.warning("refused a request outside of the valid range: %s", what)
        if self.keep:
            self.out_of_range.append(what)

    def add_request(self, record: ControlRecord) -> None:
        if self.keep:
            self.requests.append(record)
