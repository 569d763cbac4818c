"""Routers on one store are killed and stopped under load, and all that clients were told is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.many_routers.run import Plan, run

MINUTES = float(os.environ.get("TITO_MINUTES", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_nothing_that_was_answered_is_lost_doubled_wrong_or_seen_by_others(store: str, tmp_path: Path) -> None:
    result = run(Plan(store, MINUTES), tmp_path)
    print(result)
    assert not result.wrong, "\n".join(result.wrong)
    assert result.counts["count: answered"] > 300 * MINUTES
    late = result.counts["count: told unsaved, and the session was finalized before it was handed over"]
    assert result.counts["count: answered"] == result.counts["count: retrieved whole"] + late
    assert any(what.startswith("fault: ") for what in result.counts)
