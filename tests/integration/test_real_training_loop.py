"""The loop of docs/training-loop.md on real workers: what its own forward pass says of our tokens is what the engines said."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import ROOT, RouterFor
from tests.support import sglang_server

STEPS = 5
NOISE = 1e-4
"""Two implementations in float32 differ by 5e-6 here; another token, context or version by more than 1."""


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.usefixtures("own_weights")
def test_three_updates(router_for: RouterFor, tmp_path: Path) -> None:
    python = sglang_server.python_with("torch")
    if python is None:
        pytest.skip("no torch: tests/sglang_cpu/setup.sh brings it")
    command = [python, "-m", "examples.measured", "--router", router_for(0, 1), "--weights", str(tmp_path)]
    command += ["--model", str(sglang_server.model_path()), "--steps", str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()[STEPS:]]
    print("\n" + done.stdout)
    assert len(steps) == STEPS
    for step in steps:
        assert sum(step["by_version"].values()) == step["sampled"] > 0
        assert step["difference"] < NOISE
        assert step["wrong_tokens"] > 0.01
        assert step["drifted"] > 1.0
        assert step["mean_drifted"] > 1000 * step["mean_difference"]
        assert step["cosine"] < 0.95
        assert {int(version) for version in step["by_version"]} <= {step["step"] - 2, step["step"] - 1}
    versions = set().union(*(step["by_version"] for step in steps))
    assert versions >= {"0", "1", "2", "3"}
    # The newest weights are the wrong ones for a token that is older: a version belongs to each token.
    assert all(step["newest_only"] > 1.0 for step in steps if _older(step) > 100)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [str(version) for version in range(STEPS + 1)]


def _older(step: dict[str, Any]) -> int:
    """Return how many tokens were sampled under other weights than those that the step began with."""
    return int(step["sampled"]) - int(step["by_version"].get(str(step["step"] - 1), 0))


def test_the_page_shows_the_code_that_runs() -> None:
    page = (ROOT / "docs" / "training-loop.md").read_text()
    code = (ROOT / "examples" / "training_loop.py").read_text()
    shown = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    assert len(shown) > 2
    for block in shown:
        assert any(textwrap.indent(block, " " * depth) in code for depth in range(0, 20, 4)), block
