"""`tito-router demo-agent`, as a process: real clients, and the tree of their tokens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "router", "demo-agent"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files. In the end it is empty, and no process has it in its command line."""
    yield tmp_path
    assert not list(tmp_path.iterdir())
    assert not [words for words in command_lines() if str(tmp_path) in words]


def command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().decode().replace("\0", " ")
        except OSError:
            continue


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), **more}


@pytest.mark.slow  # two whole demos; CI runs another one
def test_every_id_is_what_a_worker_wrote_down(folder: Path) -> None:
    """Two runs show the same tree, and a proxy in the environment gets no request."""
    trees = []
    for seed in ("1", "2"):
        given = environment(
            folder, PYTHONHASHSEED=seed, HTTP_PROXY="http://127.0.0.1:9", OPENAI_BASE_URL="http://127.0.0.1:9"
        )
        done = subprocess.run(DEMO, cwd=ROOT, capture_output=True, text=True, timeout=120, env=given)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not done.stderr
        tree, table = re.split(r"\n(?=branch +turns)", done.stdout[done.stdout.index("\nlead") :])
        trees.append(tree)
    assert trees[0] == trees[1]
    assert tree.count("● assistant") == 11
    assert tree.count("anthropic client") == 2
    assert '→ calculate(expression="3776 - 2962")' in tree
    assert table.count(" yes ") == 6
    assert "NO" not in table
    assert re.search(r"^(\d+) ids in 6 trajectories, and each is the one that a worker wrote down", table, re.MULTILINE)
    assert re.search(r"would have got [1-9]\d* of these \d+ wrong", table)
    assert "its text encodes to" in table


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(folder: Path) -> None:
    process = subprocess.Popen(
        DEMO, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder)
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "the lead asks" in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not errors


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_missing_client_is_reported(name: str, folder: Path) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; from router.cli import main; main(['demo-agent'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment(folder)
    )
    assert done.returncode == 2
    assert f"{name} is missing: pip install 'tito-router[agents]'" in done.stderr


def test_a_wrong_flag_is_reported() -> None:
    done = subprocess.run([*DEMO, "--nonsense"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error: " in done.stderr
