"""What the routers say of their targets once all clients have gone: nothing in flight, and no reply of a wrong rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.many_routers.ledger import Ledger
from tests.support.client import call

SECONDS = 30.0
"""How long what was abandoned may take to end."""


def check_targets(urls: Sequence[str], key: str, ledger: Ledger) -> Counter[str]:
    """Wait until no router counts a request in flight, and accuse those that do. Return how many targets they count.

    `key`: an admin's.
    """
    found: Counter[str] = Counter()
    for url in urls:
        deadline = time.monotonic() + SECONDS
        while True:
            workers = _workers(url, key)
            busy = {worker["url"]: load for worker in workers if (load := worker["load"])}
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.2)  # a poll of another process: there is nothing to wait on
        found["targets"] += sum(len(worker["targets"]) for worker in workers)
        if busy:
            ledger.accuse(
                "a lease that nobody ends", f"{url} counts requests in flight, and no client is there: {busy}"
            )
        if mismatches := {worker["url"]: count for worker in workers if (count := worker["rank_mismatches"])}:
            ledger.accuse("another rank", f"replies of other ranks than were asked, by {url}: {mismatches}")
    return found


def _workers(url: str, key: str) -> list[dict[str, Any]]:
    answer = call(f"{url}/workers", headers={"authorization": f"Bearer {key}"})
    found: list[dict[str, Any]] = answer.json()["workers"]
    return found
