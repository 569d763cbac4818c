"""Routers on one store are killed and stopped under load, and all that clients were told is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.many_routers.run import Plan, run

MINUTES = float(os.environ.get("TITO_MINUTES", "1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "apart", "ranks"),
    [("sqlite", False, 1), ("redis", False, 1), ("redis", True, 1), ("sqlite", False, 4), ("redis", True, 2)],
)
def test_nothing_that_was_answered_is_lost_doubled_wrong_or_seen_by_others(
    store: str, apart: bool, ranks: int, tmp_path: Path
) -> None:
    """Also of workers that prefill or decode, and of workers with ranks. At the end no router counts a request in flight."""
    result = run(Plan(store, MINUTES, apart=apart, ranks=ranks), tmp_path)
    print(result)
    assert not result.wrong, "\n".join(result.wrong)
    assert result.counts["count: answered"] > 300 * MINUTES
    assert result.counts["targets: targets"] == 3 * (4 if apart else 2) * ranks
    late = result.counts["count: told unsaved, and the session was finalized before it was handed over"]
    assert result.counts["count: answered"] == result.counts["count: retrieved whole"] + late
    assert any(what.startswith("fault: ") for what in result.counts)
