"""TRL's GRPOTrainer on real workers, which it gives new weights through the router."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import RouterFor
from tests.support.engines import Engine
from tests.trainers.test_trl import grpo

ENGINES = ("sglang", "vllm")

NOISE = 1e-4
"""Two implementations in float32 differ by 5e-6 here; another token, context or version by more than 1."""

pytestmark = pytest.mark.usefixtures("own_weights")


def two_steps(engine: Engine, router: str, folder: Path, *flags: str) -> None:
    """Its own forward pass says of every sampled token what the engine said, before and behind an update."""
    weights = folder / "weights"
    samples = grpo(router, engine.kit.model, folder / "trl", "--weights", str(weights), *flags)
    assert max(one["difference"] for one in samples) < NOISE
    assert [path.name for path in weights.iterdir()] == ["1"]


def test_two_steps_of_texts(engine: Engine, router_for: RouterFor, tmp_path: Path) -> None:
    two_steps(engine, router_for(0, 1), tmp_path)


def test_two_steps_of_messages(engine: Engine, router_for: RouterFor, tmp_path: Path) -> None:
    two_steps(engine, router_for(0, 1), tmp_path, "--chat")
