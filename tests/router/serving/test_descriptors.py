"""How many files, and so connections, a process may have open."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router.serving.server import SPARE, connections_for

RAISED = """
import logging, resource
logging.basicConfig(level="INFO", format="%(message)s")
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
from router.serving.server import PLENTY, raise_limit
assert raise_limit() == raise_limit() == (PLENTY if hard == resource.RLIM_INFINITY else hard)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_the_limit_is_raised() -> None:
    """In a process of its own, for it is a process's. The log says so, once."""
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert line.startswith("open files: the limit was 200, and is ")


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(1, 1), (SPARE, 1), (SPARE + 2, 1), (1024, (1024 - SPARE) // 2), (10**6, 499_968)]
)
def test_each_client_may_need_a_worker(descriptors: int, connections: int) -> None:
    assert connections_for(descriptors) == connections
