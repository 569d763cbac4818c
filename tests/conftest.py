"""Random tests are the same ones each time, so that a commit is judged by what it changed; exploring is asked for.

`TITO_SLOW=1`, as `make test-slow` has it, looks at all of the examples that a test names, and not at a share of them.
`TITO_EXAMPLES=20` looks further: twenty times as many examples, other ones each time (or those of `--hypothesis-seed`).
"""

import gc
import os
import signal
import sys
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from middleware_hub.store.opening import STORES
from tests.support import forking

MORE = int(os.environ.get("TITO_EXAMPLES", "0"))
SLOW = os.environ.get("TITO_SLOW") == "1"
LONGER = any(f"TITO_{name}" in os.environ for name in ("EXAMPLES", "FUZZ", "KILLS", "MINUTES"))
"""Whether tests are asked to run for longer than usual: then no test has a time limit."""
SHARE = 12
"""`make test` looks at one of so many examples."""
DEAR = 48
"""And of those that take a tenth of a second each, at one of so many."""

SLOW_BYTES = 7 << 30
"""What a process of slow tests takes at the most: 5 GB with whole vocabularies, and 2 for the programs that it starts."""


def examples(count: int, share: int = SHARE) -> int:
    """Return the number of examples for a random test that names `count`."""
    return count * MORE if MORE else count if SLOW else -(-count // share)


# How long an example takes is the machine's business, and the first text of all takes a second on a slow one.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", max_examples=examples(100), derandomize=True, **UNTIMED)
settings.register_profile("explore", max_examples=examples(100), print_blob=True, **UNTIMED)
settings.load_profile("explore" if MORE else "same")

STORES["memory"] = "tests.support.dictionary_store:DictionaryStore"
forking.is_used = sys.platform == "linux"

# A shell starts what is to run in the background with Ctrl-C ignored, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` does the same to SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # while tests are imported and collected: all of that stays


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test with a random test inside of it as hypothesis marks the others, so that `make test-slow` runs it, too.

    Take the time limit off, if tests are to run for longer.
    """
    for item in items:
        if isinstance(item, pytest.Function) and "given" in item.function.__code__.co_names:
            item.add_marker("hypothesis")
        if LONGER:
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish() -> None:
    """Keep Python's garbage collector away from what is there for the whole run: it took an eighth of the time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes `-n auto` takes: one more than there are cores, because many tests wait for programs."""
    cores = os.cpu_count() or 1
    is_large = psutil.virtual_memory().total >= (cores + 1) * SLOW_BYTES
    return cores + 1 if is_large or not SLOW else cores
