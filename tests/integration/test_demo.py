"""`tito-router demo`, as a process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.client import call
from tests.support.engine_server import free_port
from tests.support.processes import until

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "router", "demo"]


@pytest.mark.slow  # README.md has another one, which tests run
def test_the_demo_recovers_every_conversation() -> None:
    done = subprocess.run(
        [*DEMO, "--conversations", "3", "--turns", "3"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 of 9 turns" in done.stdout
    assert "after 4 of 9 turns the router was killed (SIGKILL) and started again with its store" in done.stdout
    assert "3 of 3 exact" in done.stdout
    assert "its text encodes to" in done.stdout
    assert not done.stderr


@pytest.mark.slow
def test_serve_leaves_it_running_and_its_lines_work(tmp_path: Path) -> None:
    with _serve(tmp_path / "kept") as (_, lines):
        assert any(f"its store {tmp_path / 'kept'}" in line for line in lines)
        assert (tmp_path / "kept" / "store.sqlite3").is_file()
        curls = [shlex.split(line) for line in lines if line.startswith("curl ")]
        assert len(curls) == 3
        answers = [call(words[1], json.loads(words[-1])).json() for words in curls]
        first, second = (json.loads(words[-1])["text"] for words in curls[:2])
        assert second.startswith(first + answers[0]["text"])
        trajectory = answers[2]
        assert trajectory["exact"]
        sampled = [token for token, own in zip(trajectory["tokens"], trajectory["loss_mask"], strict=True) if own]
        assert sampled == answers[0]["output_ids"] + answers[1]["output_ids"]
    with _serve(tmp_path / "kept") as (port, lines):  # the store has the workers of the first run, which are gone
        told = call(f"http://127.0.0.1:{port}/update_weight_version", {"new_version": "1", "abort_all_requests": False})
        assert told.json()["message"] == "2 of 2 workers did it"
        (router,) = [pid for pid, words in _processes_of(port) if "demo" not in words]
        (command,) = [line.split() for line in lines if line.startswith("kill ")]
        assert command[:3] == ["kill", "-9", str(router)]
        os.kill(router, signal.SIGKILL)
        until(lambda: {pid for pid, words in _processes_of(port) if "demo" not in words} - {router})
        until(lambda: _listens(port))
        body = json.loads(curls[2][-1])
        assert call(f"http://127.0.0.1:{port}/retrieve_from_text", body).json() == trajectory


@contextmanager
def _serve(store: Path) -> Iterator[tuple[int, list[str]]]:
    """Run `--serve` for the length of the block; yield its port and what it printed. Its processes end with it."""
    port = free_port()
    flags = ["--serve", "--port", str(port), "--store", str(store)]
    process = subprocess.Popen([*DEMO, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("Ctrl-C"):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        yield port, lines
    finally:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
    until(lambda: not _processes_of(port))


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def _processes_of(port: int) -> list[tuple[int, list[str]]]:
    """Return the processes that have this port in their command line, with it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(port) in words and path.parent.name != str(os.getpid()):
            found.append((int(path.parent.name), words))
    return found


@pytest.mark.parametrize("arguments", [["--turns", "0"], ["--conversations", "x"], ["--nonsense"]], ids=" ".join)
def test_a_wrong_flag_is_reported(arguments: list[str]) -> None:
    done = subprocess.run([*DEMO, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.search("error: ", done.stderr)


def test_a_missing_package_is_reported() -> None:
    code = "import sys; sys.modules['rich'] = None; from router.cli import main; main(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "rich is missing: pip install 'tito-router[demo]'" in done.stderr


def test_a_port_in_use_is_reported() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*DEMO, "--serve", "--port", port], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
