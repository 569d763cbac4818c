"""An agent that sees, trained on a real engine: what the trainer's own forward pass says of our tokens and pictures."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import ROOT, real_router
from tests.support import sglang_server
from tests.support.client import call
from tests.support.engine_server import EngineServer
from tests.support.vision import Vision, models

ENGINES = ("sglang",)
FAMILIES = ("qwen2_5_vl",)  # with Qwen3-VL its forward pass was not tried
STEPS = 3
NOISE = 1e-4
"""Two implementations in float32 differ by 1e-5 here; a wrong token, picture, position or version by more than 1."""


@pytest.fixture
def trained(vision: Vision, vision_worker: EngineServer) -> Iterator[EngineServer]:
    """The worker, which has its own weights again at the end."""
    yield vision_worker
    body = {"model_path": str(models() / vision.family), "weight_version": "default"}
    assert call(f"{vision_worker.url}/update_weights_from_disk", body, timeout=120).status == 200


def test_three_steps(vision: Vision, trained: EngineServer, tmp_path: Path) -> None:
    python = sglang_server.python_with("torch")
    if python is None:
        pytest.skip("no torch: tests/sglang_cpu/setup.sh brings it")
    model = models() / vision.family
    with real_router([trained.url], model, tmp_path / "router.log") as url:
        command = [python, "-m", "examples.grid_world", "--router", url, "--model", str(model)]
        command += ["--weights", str(tmp_path / "weights"), "--steps", str(STEPS)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    print("\n" + done.stdout)
    steps: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [step["versions"] for step in steps] == [[str(number)] for number in range(STEPS)]
    for step in steps:
        assert step["pictures"] > step["sampled"] / 6
        assert step["picture_tokens"] > step["pictures"]
        assert step["difference"] < NOISE
