"""Routers on one store are killed and stopped under load, and all that clients were told is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.many_routers.ledger import Ledger
from benchmarks.many_routers.machines import TENANTS
from benchmarks.many_routers.run import Plan, run
from middleware_hub.store.sqlite.file import connect

MINUTES = float(os.environ.get("TITO_MINUTES", "1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "apart", "ranks", "images"),
    [
        ("sqlite", False, 1, True),
        ("redis", False, 1, True),
        ("redis", True, 1, False),
        ("sqlite", False, 4, False),
        ("redis", True, 2, False),
    ],
)
def test_nothing_that_was_answered_is_lost_doubled_wrong_or_seen_by_others(
    store: str, apart: bool, ranks: int, images: bool, tmp_path: Path
) -> None:
    """Also of workers that prefill or decode, that have ranks, or that see. At the end no router counts a request in flight."""
    result = run(Plan(store, MINUTES, apart=apart, ranks=ranks, images=images), tmp_path)
    print(result)
    assert not result.wrong, "\n".join(result.wrong)
    assert result.counts["count: answered"] > 300 * MINUTES
    assert result.counts["count: trained on once"] > 100 * MINUTES
    assert not images or result.counts["count: answered to pictures"] > 100 * MINUTES
    assert result.counts["targets: targets"] == 3 * (4 if apart else 2) * ranks
    late = result.counts["count: told unsaved, and the session was finalized before it was handed over"]
    assert result.counts["count: answered"] == result.counts["count: retrieved whole"] + late
    assert any(what.startswith("fault: ") for what in result.counts)
    assert not any("Traceback" in what for what in result.counts), result.counts


@pytest.mark.slow
def test_a_reply_that_is_lost_altered_or_crossed_is_found(tmp_path: Path) -> None:
    """The count is not blind: it finds each of three faults that are planted, and no other."""
    planted: list[str] = []
    lines: set[str] = set()  # a trainer gets none of a sample that has lost a reply

    def plant(ledger: Ledger, store: str) -> None:
        parents = {one.parent for one in ledger.entries}
        texts = [one for one in ledger.entries if one.kind in ("plain", "stream", "n", "batch") and one.sampled]
        # The newest: of what others must not see, the count looks at the last hundreds.
        lost, altered, crossed = [one for one in texts if one not in parents and one.saved][-3:]
        altered.logprobs[-1] += 1.0
        crossed.tenant = next(one for one in TENANTS if one != crossed.tenant)
        (path,) = Path(store.removeprefix("sqlite:")).glob("*.sqlite3")
        connection = connect(path)
        number, _ = next(
            (number, body)
            for number, body in connection.execute("SELECT n, body FROM records ORDER BY n DESC")
            if lost.rid.encode() in bytes(body)
        )
        connection.execute("DELETE FROM records WHERE n = ?", (number,))
        connection.execute("DELETE FROM places WHERE record = ?", (number,))
        connection.close()
        planted.extend(one.rid[:8] for one in (lost, altered, crossed))
        lines.update(one.line for one in (lost, altered, crossed))

    result = run(Plan("sqlite", 0.3, clients=8), tmp_path, plant=plant)
    kinds = [{story.partition(":")[0] for story in result.wrong if f" {rid} " in story} for rid in planted]
    assert kinds[0] >= {"LOST"}, result.wrong
    assert kinds[1] >= {"WRONG"}, result.wrong
    assert kinds[2] >= {"CROSSED"}, result.wrong
    others = [story for story in result.wrong if not any(f"conversation {line}" in story for line in lines)]
    assert [story for story in others if "verify: " not in story] == []
