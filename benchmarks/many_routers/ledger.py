"""The ledger: what each client asked and was answered, and what was done to the machines meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["plain", "stream", "n", "batch", "openai", "anthropic", "chat"]
Outcome = Literal["waiting", "answered", "refused", "unanswered", "left"]
TOLD_LOSSES = {"store_unreachable", "unknown_parent"}
"""Reasons by which a router says that it may not have known all of a text."""


@dataclass(eq=False)
class Entry:
    """One reply that was asked for.

    Attributes:
        at, until: seconds of the ledger, from the request to the end of its answer.
        line: the conversation, or the session's id.
        parent: the reply that it goes on from.
        saved: what the answer said, in a header or at the end of a stream.
        reasons: of the prompt, as answered; and those of the replies before it.
        images: the digests of the pictures up to its end, in order.
        prompt, text: what was asked and answered; of a chat without a session, `messages` is what was asked.
        sent, sampled, logprobs, versions: what the answer said of the tokens; of a session what its worker knows.
    """

    kind: Kind
    tenant: str
    space: str
    line: str
    at: float
    parent: Entry | None = None
    rid: str = ""
    prompt: str = ""
    until: float = 0.0
    outcome: Outcome = "waiting"
    why: str = ""
    router: str = ""
    saved: bool = True
    reasons: frozenset[str] = frozenset()
    recorded: str = ""
    text: str = ""
    sent: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: str = ""
    finish: str = ""
    messages: list[Any] = field(default_factory=list)
    images: tuple[str, ...] = ()

    @property
    def chain(self) -> list[int]:
        """Return all tokens up to its end."""
        return self.sent + self.sampled

    @property
    def whole(self) -> str:
        """Return all text up to its end."""
        return self.prompt + self.text

    def follows(self, other: Entry) -> bool:
        """Return whether it is another reply, or goes on from it."""
        one: Entry | None = self
        while one is not None and one is not other:
            one = one.parent
        return one is other

    def __str__(self) -> str:
        """Return one line of a story."""
        saved = "saved" if self.saved else "NOT SAVED"
        told = f"{len(self.sent)}+{len(self.sampled)} tokens {self.finish}" if self.outcome == "answered" else self.why
        on = f" on {self.parent.rid[:8]}" if self.parent is not None else ""
        return (
            f"{self.at:8.3f} to {self.until:8.3f}  {self.kind:9} {self.rid[:8]:8}{on}  at {self.router or '?'}: {self.outcome},"
            f" {told}, {saved}, {self.recorded or '-'} {' '.join(sorted(self.reasons))}"
        )


@dataclass(eq=False)
class Fault:
    """A fault of a process or a wire."""

    at: float
    what: str
    until: float = 0.0

    def __str__(self) -> str:
        """Return one line of a story."""
        return f"{self.at:8.3f} to {self.until:8.3f}  -- {self.what}"


@dataclass(frozen=True)
class Wrong:
    """A broken promise: its kind (`lost`, `doubled`, `wrong`, `crossed`), in words, and the reply it is about."""

    kind: str
    words: str
    entry: Entry | None = None


class Ledger:
    """Everything that happened, written down by many threads."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self.entries: list[Entry] = []
        self.faults: list[Fault] = []
        self.wrong: list[Wrong] = []
        self.counts: Counter[str] = Counter()

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._begun

    def begin(self, entry: Entry) -> Entry:
        """Write down a request that is about to be sent."""
        with self._lock:
            self.entries.append(entry)
        return entry

    def end(self, entry: Entry, outcome: Outcome, why: str = "") -> None:
        """Write down what became of it."""
        entry.until, entry.outcome, entry.why = self.now(), outcome, why
        self.count(f"{entry.kind} {outcome}")

    def count(self, what: str, by: int = 1) -> None:
        """Count something."""
        with self._lock:
            self.counts[what] += by

    def accuse(self, kind: str, words: str, entry: Entry | None = None) -> None:
        """Write down a broken promise."""
        with self._lock:
            self.wrong.append(Wrong(kind, words, entry))
            self.counts[f"WRONG {kind}"] += 1

    def fault(self, what: str) -> Fault:
        """Write down a fault that begins; the caller sets its end."""
        found = Fault(self.now(), what)
        with self._lock:
            self.faults.append(found)
        return found

    def story(self, wrong: Wrong) -> str:
        """Return the shortest story of something wrong: the replies that it builds on, and the faults of that time."""
        lines = [f"{wrong.kind.upper()}: {wrong.words}"]
        entry = wrong.entry
        if entry is None:
            return lines[0]
        lines.append(
            f"    {entry.kind} of tenant {entry.tenant}, namespace {entry.space or '-'}, conversation {entry.line}"
        )
        path: list[Entry] = []
        step: Entry | None = entry
        while step is not None:
            path.append(step)
            step = step.parent
        tried = [
            one
            for one in self.entries
            if one.line == entry.line and one.outcome != "answered" and one.at <= entry.until
        ]
        told: list[Any] = sorted([*path, *tried], key=lambda one: one.at)[-12:]
        since, until = told[0].at - 3, entry.until + 1
        faults = [one for one in self.faults if one.at <= until and (one.until or until) >= since][-15:]
        lines += [f"    {one}" for one in sorted([*told, *faults], key=lambda one: one.at)]
        lines.append(f"    its text ends {entry.whole[-60:]!r}")
        return "\n".join(lines)
