"""Routers on one store are killed and stopped under load, and all that clients were told is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.many_routers.run import Plan, run

MINUTES = float(os.environ.get("TITO_MINUTES", "1"))


@pytest.mark.slow
@pytest.mark.parametrize(("store", "apart"), [("sqlite", False), ("redis", False), ("redis", True)])
def test_nothing_that_was_answered_is_lost_doubled_wrong_or_seen_by_others(
    store: str, apart: bool, tmp_path: Path
) -> None:
    """Also of workers that prefill or decode."""
    result = run(Plan(store, MINUTES, apart=apart), tmp_path)
    print(result)
    assert not result.wrong, "\n".join(result.wrong)
    assert result.counts["count: answered"] > 300 * MINUTES
    late = result.counts["count: told unsaved, and the session was finalized before it was handed over"]
    assert result.counts["count: answered"] == result.counts["count: retrieved whole"] + late
    assert any(what.startswith("fault: ") for what in result.counts)
