"""Which signals make a router drain."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from router.serving.signals import stop_signals


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_makes_it_drain() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert stop_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def test_under_nohup_a_closed_terminal_is_nothing_to_it() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert stop_signals() == [signal.SIGTERM, signal.SIGINT]
