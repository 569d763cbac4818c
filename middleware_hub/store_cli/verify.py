"""`tito-router store verify`."""

from __future__ import annotations

import argparse
import sys

from middleware_hub.store.protocol import Store
from middleware_hub.store_cli.progress import bar


async def verify(store: Store, _: argparse.Namespace) -> int:
    """Check everything in a store, print what is wrong, a line each, and return the exit status."""
    found = checked = 0
    with bar("checking", (await store.stats()).records) as advance:

        def count(records: int) -> None:
            nonlocal checked
            checked += records
            advance(records)

        async for finding in store.verify(count):
            found += 1
            sys.stdout.write(f"{finding.kind}: {finding.message}\n")
    sys.stdout.write(f"{checked} records checked, {f'{found} findings' if found else 'nothing is wrong'}\n")
    return 1 if found else 0
