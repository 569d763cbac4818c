"""How many requests there were, and what came of them, by route."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from tests.fuzz.case import Case
from tests.fuzz.exchange import Answer

_PROGRESS = 20_000  # requests between two lines


class Tally:
    """Counts, from when it is made."""

    def __init__(self, *, tells: bool) -> None:
        """`tells`: a line now and then, for whoever waits for a million."""
        self._tells = tells
        self._begun = time.monotonic()
        self._statuses: dict[str, Counter[str]] = defaultdict(Counter)
        self._slowest: dict[str, tuple[float, Case]] = {}
        self.count = 0

    def add(self, path: str, case: Case, answer: Answer) -> None:
        """One more."""
        self.count += 1
        self._statuses[path]["left" if case.leaves else str(answer.status)] += 1
        if path not in self._slowest or answer.seconds > self._slowest[path][0]:
            self._slowest[path] = answer.seconds, case
        if self._tells and self.count % _PROGRESS == 0:
            print(f"{self.count} requests, {time.monotonic() - self._begun:.0f} s", flush=True)

    def __str__(self) -> str:
        seconds = time.monotonic() - self._begun
        lines = [f"{self.count} requests in {seconds:.0f} s, {self.count / max(seconds, 1e-9):.0f} a second"]
        for path, statuses in sorted(self._statuses.items()):
            counted = "  ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
            lines.append(f"  {path:<36} {statuses.total():>8}   {counted}   (slowest {self._slowest[path][0]:.2f} s)")
        return "\n".join(lines)

    def slowest(self, seconds: float) -> list[Case]:
        """Of each route the slowest request, if it took longer than that."""
        return [case for took, case in self._slowest.values() if took > seconds]
