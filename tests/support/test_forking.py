from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.usual import usual

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only")


@pytest.mark.parametrize(
    "flags", usual([["--help"], ["--nonsense"], ["--tokenizer-path", "{folder}/nowhere"]], ["--nonsense"]), ids=" ".join
)
def test_a_forked_program_does_what_a_started_one_does(flags: list[str], tmp_path: Path) -> None:
    words = ["router", *(flag.format(folder=tmp_path) for flag in flags)]
    environment = {**os.environ, **forking.SETTINGS, "COLUMNS": "70"}
    started = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=forking.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    log = tmp_path / "log"
    log.touch()
    assert forking.start(words, environment, log).wait(60) == started.returncode
    assert log.read_bytes() == started.stdout


def test_a_forked_program_that_is_killed_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    program = forking.start(["router", "demo-worker", "--port", "0"], os.environ, log)
    assert program.poll() is None
    program.send_signal(signal.SIGKILL)
    assert program.wait(60) == -signal.SIGKILL
    assert not Path(f"/proc/{program.pid}").exists()
