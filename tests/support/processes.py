"""A router of several processes, as a program: its processes, and what they say together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.client import call
from tests.support.programs import Program
from worker.models.ngram import shipped_tokenizer


class Processes(Program):
    """`tito-router --processes`, with a store and the small tokenizer that is shipped, in front of one worker."""

    def __init__(self, name: str, worker: str, *flags: str, folder: Path, store: str = "") -> None:
        store = store or f"sqlite:{folder / 'store'}/"
        fixed = ("--processes", "2", "--store", store, "--tokenizer-path", str(shipped_tokenizer()))
        super().__init__(name, *fixed, "--worker-urls", worker, *flags, folder=folder)

    @property
    def children(self) -> list[int]:
        """The processes that serve or start, by their ids, the oldest first."""
        return children_of(self.pid)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Map each name and its labels to the value."""
        answer = call(f"{self.url}/metrics")
        assert answer.status == 200, answer.content
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.content.decode())
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a series, 0 if nothing was counted yet."""
        return self.metrics().get((name, tuple(sorted(labels.items()))), 0.0)

    def get(self, path: str) -> Any:
        answer = call(f"{self.url}{path}")
        assert answer.status == 200, answer.content
        return answer.json()

    def generate(self, text: str, **body: Any) -> dict[str, Any]:
        answer = call(f"{self.url}/generate", {"text": text, "sampling_params": {"max_new_tokens": 8}, **body})
        assert answer.status == 200, answer.content
        found: dict[str, Any] = answer.json()
        return found


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    """Return when it holds; what other processes do can only be looked at again and again."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
