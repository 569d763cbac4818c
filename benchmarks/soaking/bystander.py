"""A process that only sleeps and measures how late it wakes up: the machine's part of an event loop's lag.

`python -m benchmarks.soaking.bystander` runs until SIGTERM and then prints a line of JSON: p50 and p99 in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from router.observability.loop_lag import PERIOD


@contextlib.contextmanager
def a_bystander() -> Iterator[list[float]]:
    """Run a bystander for a block. At its end, the yielded list gets the p50 and the p99."""
    found: list[float] = []
    command = [sys.executable, "-m", "benchmarks.soaking.bystander"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield found
        finally:
            process.terminate()
            said, _ = process.communicate()
            found += json.loads(said)


async def _sleep() -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    late: list[float] = []
    while not over.is_set():
        due = time.monotonic() + PERIOD
        await asyncio.sleep(PERIOD)
        late.append(max(0.0, time.monotonic() - due))
    cuts = statistics.quantiles(late, n=100) if len(late) > 1 else [0.0] * 99
    print(json.dumps([round(1000 * cuts[49], 3), round(1000 * cuts[98], 3)]))


if __name__ == "__main__":
    asyncio.run(_sleep())
