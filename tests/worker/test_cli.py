"""`tito-router demo-worker`, or `python -m worker`, as a process."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from router.cli import parser as router_parser
from tests.support.client import call, stream
from tests.support.usual import usual
from tests.support.vocabularies import vocabulary
from worker.cli import parser
from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "router", "demo-worker"]
MODULE = [sys.executable, "-m", "worker"]
EARLIER = [sys.executable, "-m", "router.embedded"]


class Demo:
    """A running demo worker, and the lines of its log up to its start."""

    def __init__(self, *flags: str, command: Sequence[str] = COMMAND) -> None:
        self.process = subprocess.Popen([*command, "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.logged: list[str] = []
        for line in self.process.stderr:
            self.logged.append(line)
            if "a router:" in line:
                break
        found = re.search(r"a router: .* --worker-urls (http://\S+)", "".join(self.logged))
        assert found is not None, self.logged
        self.url = found[1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal while it is stopped: then any of its threads may take it."""
        for each in (signal.SIGSTOP, number, signal.SIGCONT):
            self.process.send_signal(each)
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, rest


@contextlib.contextmanager
def demo(*flags: str, command: Sequence[str] = COMMAND) -> Iterator[Demo]:
    running = Demo(*flags, command=command)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", usual([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_it_serves_logs_how_to_start_a_router_and_stops_with_0(number: signal.Signals) -> None:
    with demo("--tokens-per-second", "4", "--weight-version", "7", "--log-level", "error") as running:
        assert running.logged == [f"a router: tito-router --tokenizer-path demo --worker-urls {running.url}\n"]
        reply = call(f"{running.url}/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}).json()
        assert reply["meta_info"]["weight_version"] == "7"
        minutes = {"max_new_tokens": 1000, "ignore_eos": True}  # it does not wait for the end of this stream
        events = stream(f"{running.url}/generate", {"text": "Hello", "stream": True, "sampling_params": minutes})
        next(events)
        code, rest = running.end(number)
        assert (code, rest) == (0, "")
        events.close()


@pytest.mark.slow
def test_a_scripted_worker_streams_incrementally() -> None:
    flags = ["--tokenizer-path", str(vocabulary("qwen")), "--incremental-streaming-output", "--stream-interval", "4"]
    with demo("--scripted", *flags) as running:
        assert call(f"{running.url}/server_info").json()["incremental_streaming_output"] is True
        body = {"text": "Hello", "stream": True, "sampling_params": {"max_new_tokens": 9}}
        events = list(stream(f"{running.url}/generate", body))
    assert [len(event["output_ids"]) for event in events] == [1, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("command", [COMMAND, MODULE], ids=["command", "module"])
@pytest.mark.parametrize("scripted", [False, True])
def test_it_speaks_vllms_api_if_asked(command: Sequence[str], scripted: bool) -> None:
    flags = ["--scripted"] if scripted else []
    with demo("--engine", "vllm", "--stream-interval", "4", *flags, command=command) as running:
        assert call(f"{running.url}/version").json() == {"version": "0.32.0"}
        assert call(f"{running.url}/generate", {"text": "Hello"}).status == 404
        body = {"prompt": "Hello", "max_tokens": 9, "ignore_eos": True, "return_token_ids": True, "stream": True}
        events = list(stream(f"{running.url}/v1/completions", body))
        assert [len(event["choices"][0]["token_ids"]) for event in events] == [1, 4, 4]


@pytest.mark.parametrize("command", [COMMAND, MODULE, EARLIER], ids=["command", "module", "earlier"])
def test_what_cannot_be_is_one_line_and_2(command: Sequence[str]) -> None:
    name = "python -m worker" if command is MODULE else "tito-router demo-worker"
    for flags, says in (
        (["--port", "65536"], "argument --port: 65536 is not a port: give a number from 0 to 65535"),
        (["--port", "-1"], "argument --port: -1 is not a port: give a number from 0 to 65535"),
        (["--engine", "trt"], "argument --engine: invalid choice: 'trt' (choose from 'sglang', 'vllm')"),
        (["--engin", "vllm"], "unrecognized arguments: --engin vllm"),
        (["now"], "unrecognized arguments: now"),
    ):
        done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert done.stderr == f"{name}: error: {says} (--help shows all flags)\n"
        assert done.stdout == ""


@pytest.mark.slow
def test_a_tokenizer_that_is_not_there_is_one_line_and_2(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    done = subprocess.run([*MODULE, "--tokenizer-path", nowhere], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1:] == [
        f"python -m worker: error: no tokenizer could be loaded from {nowhere}: there is no such folder"
    ]


@pytest.mark.slow
def test_tokens_per_second_slow_a_reply_down() -> None:
    with demo("--tokens-per-second", "100") as running:
        begun = time.monotonic()
        call(
            f"{running.url}/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
        )
        assert time.monotonic() - begun > 0.29


@pytest.mark.slow
def test_what_is_outside_of_the_valid_range_is_refused_and_logged() -> None:
    with demo() as running:
        assert call(f"{running.url}/generate", {"text": ""}).status == 400
        assert call(f"{running.url}/ping").status == 200
        running.process.terminate()
        assert running.process.wait(60) == 0
        assert running.process.stderr is not None
        assert "refused a request outside of the valid range: an empty prompt" in running.process.stderr.read()


@pytest.mark.slow
def test_a_port_in_use_is_one_line_and_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"tito-router demo-worker: error: cannot listen on 127.0.0.1:{port}: Address already in use"
    ]


@pytest.mark.parametrize(
    "flags", [["--tokens-per-second", "-1"], ["--context-length", "0"], ["--port", "x"], ["--scripte"], ["more"]]
)
def test_wrong_flags_are_one_line_and_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(flags)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("(--help shows all flags)")


def test_images_choose_the_tokenizer_that_has_them() -> None:
    assert parser().parse_args(["--images"]).tokenizer_path == str(shipped_image_tokenizer())
    assert parser().parse_args([]).tokenizer_path == str(shipped_tokenizer())


def test_the_help_of_the_router_names_it() -> None:
    assert "\n  demo-worker " in router_parser().format_help()
    assert "tito-router demo-worker" in parser().format_help()
