"""The pytest plugin of `make test-sglang`: says on which engine how many tests ran, and fails unless all of them did."""

from __future__ import annotations

import pytest

from tests.support import sglang_server


class SGLangReport:
    """Counts. A test that was expected to fail and did has run; one that was skipped has not."""

    def __init__(self) -> None:
        self.ran = 0
        self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped += 1
        elif report.when == "call":
            self.ran += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.skipped += report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and (self.skipped or not self.ran):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        version = sglang_server.engine_version() or "(not installed)"
        skipped = f", {self.skipped} SKIPPED, which fails this run" if self.skipped else ""
        terminalreporter.write_line(f"SGLang {version}: {self.ran} tests ran on it{skipped}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SGLangReport())
