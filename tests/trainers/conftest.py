"""What the tests of several trainers have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router.config import AbortConfig
from tests.support.stack import Stack, stack


@pytest.fixture
def served() -> Iterator[Stack]:
    """A router as trainers have it: an aborted reply comes back. At the end nothing is in flight."""
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(policy="return")) as made:
        yield made
        assert made.idle()
