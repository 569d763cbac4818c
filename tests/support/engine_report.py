"""The pytest plugin of `make test-sglang`, `test-vllm` and `test-vlm`: on which engines how many tests ran; all have to."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support import sglang_server, vllm_server
from tests.support.engine_server import Kit

KITS = (sglang_server.KIT, vllm_server.KIT)


class EngineReport:
    """Counts. A test that was expected to fail and did has run; one that was skipped has not."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped += 1
        elif report.when == "call":
            self.ran.update(kit.name for kit in KITS if kit.name.lower() in report.keywords)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.skipped += report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and (self.skipped or not self.ran):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for kit in KITS:
            if self.ran[kit.name]:
                terminalreporter.write_line(f"{described(kit)}: {self.ran[kit.name]} tests ran on it")
        if self.skipped:
            terminalreporter.write_line(f"{self.skipped} SKIPPED, which fails this run")


def described(kit: Kit) -> str:
    return f"{kit.name} {kit.installed_version or '(not installed)'}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(EngineReport())
