"""A program of the demonstration that does not start says whether it ended, or took too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.demo import processes
from worker.demo.processes import Program, StartError


def test_a_program_that_ends_says_its_status(tmp_path: Path) -> None:
    program = Program(["demo-worker", "--port", "none"], tmp_path / "log")
    with pytest.raises(StartError, match=r"--port none ended with status 2:\n(.|\n)*is not a port"):
        program.url()


def test_a_program_that_takes_too_long_says_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START_SECONDS", 0.0)
    program = Program(["demo-worker", "--port", "0"], tmp_path / "log")
    try:
        with pytest.raises(StartError, match=r"--port 0 did not start within 0 s:\nit has logged nothing$"):
            program.url()
    finally:
        program.kill()
