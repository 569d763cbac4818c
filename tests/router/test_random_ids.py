"""Random ids: never the same twice, in no thread and no process."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.random_ids import AT_ONCE, random_id


def test_ids_are_hexadecimal_and_all_different() -> None:
    found = [random_id() for _ in range(3 * AT_ONCE + 1)]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in found)
    assert len(set(found)) == len(found)


def test_threads_get_different_ids() -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: random_id(), range(20 * AT_ONCE)))
    assert len(set(found)) == len(found)


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)  # the child only draws and writes
def test_a_forked_process_gets_other_ids() -> None:
    random_id()  # others are drawn and wait
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:  # it must not go on with the tests
        os.write(theirs, "".join(random_id() for _ in range(AT_ONCE)).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        digits = pipe.read()
    os.waitpid(child, 0)
    forked = {digits[at : at + 32] for at in range(0, len(digits), 32)}
    assert len(forked) == AT_ONCE
    assert not forked & {random_id() for _ in range(2 * AT_ONCE)}
