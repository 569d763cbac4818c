"""Run the blocks of a page as a reader would: in order, in one folder, against what `make serve` starts."""

from __future__ import annotations

import configparser
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from router.app import create_app
from router.config import AbortConfig, RadixConfig, RouterConfig, ServerConfig, WorkersConfig
from tests.integration.doc_pages import ROOT, Block, Piece, same
from tests.support.engine_server import free_port
from tests.support.serving import serve
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

BLOCK_SECONDS = 180
TOKENS_PER_SECOND = 200  # the default of `tito-router demo-worker`

# `make` itself is not run here: it would make the .venv that these tests run in. The commands of its recipes are run.
_MAKE = f"""\
#!/bin/sh
case "$*" in
    demo) exec "{sys.executable}" -m router demo ;;
    serve) ;;  # already runs, in this process
    *) echo "make $*: it is not run here, and the page does not say so" >&2; exit 1 ;;
esac
"""


@dataclass
class Reading:
    """A reader who follows a page."""

    router: str
    workers: list[EmbeddedWorker]
    folder: Path
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _ports: dict[str, int] = field(default_factory=dict)
    _started: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def read(self, piece: Piece) -> None:
        """Run all blocks. Raise AssertionError for the first block that does not do what the page says."""
        printed = None  # the output of the last command, if it was run
        for block in piece.blocks:
            printed = None if block.not_run is not None else self._do(block, printed)

    def _do(self, block: Block, printed: str | None) -> str | None:
        text = self._here(block.text)
        match block.language:
            case "bash" | "sh":
                return self._bash(block, text)
            case "python":
                return self._python(block, text)
            case "text":
                self._compare(block, text, printed)
            case "sql":
                return self._sql(text)
            case "json":
                json.loads(text)
                if block.directly_behind_a_command:
                    self._compare(block, text, printed)
            case "yaml":
                assert yaml.safe_load(text), block.place
            case "ini":
                unit = configparser.ConfigParser(interpolation=None)
                unit.read_string(text)
                assert unit.sections(), block.place
            case "promql":
                self._promql(block, text)
            case "diff":
                assert all(line[:1] in ("+", "-", " ") for line in text.splitlines() if line), block.place
            case "":
                pass  # a drawing
            case other:
                raise AssertionError(f"{block.place}: no rule says how to run {other}")
        return printed

    def _promql(self, block: Block, text: str) -> None:
        """Check that brackets are closed and that the router has the metrics; no Prometheus runs here."""
        with urllib.request.urlopen(f"{self.router}/metrics") as answer:
            shown = set(re.findall(r"^# TYPE (\w+) ", answer.read().decode(), re.MULTILINE))
        for line in text.splitlines():
            query = re.sub(r'"[^"]*"', '""', line.partition("#")[0])
            assert all(query.count(a) == query.count(b) for a, b in ("()", "[]", "{}")), f"{block.place}: {line}"
            named = re.findall(r"\btito_\w+?(?=(?:_bucket|_sum|_count)?\b)", query)
            assert shown >= set(named), f"{block.place}: {line}"

    def _compare(self, block: Block, text: str, printed: str | None) -> None:
        if printed is not None:
            assert same(text, printed, block.varies), f"{block.place} says\n{text}\nand this was printed:\n{printed}"

    def _sql(self, text: str) -> str:
        """Run a query as DuckDB does, in a process of its own: at the end of this one its library would complain of leaks."""
        program = "import duckdb, sys; print(duckdb.sql(sys.stdin.read()))"
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, cwd=self.folder, input=text, capture_output=True, text=True, timeout=BLOCK_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _bash(self, block: Block, text: str) -> str:
        tools = self.folder / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "make").write_text(_MAKE)
        (tools / "make").chmod(0o755)
        path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        output, errors = self.folder / "tools" / "output", self.folder / "tools" / "errors"
        # Files, not pipes: a process that a block leaves running would keep pipes open.
        with output.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self._processes.append(process)
            try:
                status = process.wait(BLOCK_SECONDS)
            except subprocess.TimeoutExpired:
                status = None
        printed = output.read_text(encoding="utf-8")
        said = f"{block.place}\n{text}\n{printed}\n{errors.read_text()}"
        assert status == 0, f"status {status}: {said}"
        # curl exits with 0 on a 400.
        assert '{"error":' not in printed, said
        return printed

    def _python(self, block: Block, text: str) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, block.place, "exec"), self.namespace)
        return printed.getvalue()

    def _here(self, text: str) -> str:
        """Replace the page's addresses with those of the servers that run here."""
        return re.sub(r"(?:(127\.0\.0\.1|10\.0\.0\.\d+):)?\b(3000\d)\b", self._address, text)

    def _address(self, match: re.Match[str]) -> str:
        host, port = match[1], match[2]
        if port == "30000":
            own = self.router.removeprefix("http://")
            return own if host else own.rpartition(":")[2]
        if host not in (None, "127.0.0.1"):
            return self._worker(int(host.rpartition(".")[2]) - 1).removeprefix("http://")
        # A block starts a server itself on any other port of this machine.
        if port not in self._ports:
            self._ports[port] = free_port()
        return f"{host}:{self._ports[port]}" if host else str(self._ports[port])

    def _worker(self, number: int) -> str:
        while len(self.workers) <= number:
            self.workers.append(self._started.enter_context(EmbeddedWorker(seed=len(self.workers))))
        return self.workers[number].url

    def forget(self) -> None:
        """Empty the workers' logs, so that they hold only what comes next."""
        for worker in self.workers:
            worker.log.clear()

    def close(self) -> None:
        """End the processes that the blocks left running, and close the clients that they left open."""
        for client in self.namespace.values():
            if type(client).__module__.startswith("openai") and hasattr(type(client), "__exit__"):
                client.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in self._processes:
            while _lives(process.pid) and time.monotonic() < deadline:
                time.sleep(0.02)  # these are no children of ours, so there is nothing to wait on
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._started.close()


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def reading(
    folder: Path,
    *,
    abort: AbortConfig | None = None,
    middlewares: tuple[str, ...] | None = None,
    tokenizer: Path | None = None,
) -> Iterator[Reading]:
    """Start what `make serve` starts, in this process, so that the workers' logs show what was sampled.

    `tokenizer`: another one, for workers that take images.
    """
    tokenizer = tokenizer or shipped_tokenizer()
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(EmbeddedWorker(tokenizer, seed=number, token_delay=1 / TOKENS_PER_SECOND))
            for number in range(2)
        ]
        config = RouterConfig(
            server=ServerConfig(),
            workers=WorkersConfig(urls=tuple(worker.url for worker in workers), policy="round_robin"),
            abort=abort or AbortConfig(),
            radix=RadixConfig(tokenizer_path=str(tokenizer)),
            **({} if middlewares is None else {"middlewares": middlewares}),
        )
        url = stack.enter_context(serve(create_app(config)))
        reader = Reading(url, workers, folder)
        stack.callback(reader.close)
        yield reader
