"""`tito-router store verify`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator

from middleware_hub.sessions.events import DELETED, PREFIX, Created, TurnCommitted, read
from middleware_hub.store.errors import VERIFY, DamagedRecordError
from middleware_hub.store.event_log import readable
from middleware_hub.store.protocol import LogInfo, Store
from middleware_hub.store_cli.progress import bar

_PAGE = 1_000


async def verify(store: Store, _: argparse.Namespace) -> int:
    """Check everything in a store, print what is wrong, a line each, and return the exit status."""
    found = checked = 0
    stats = await store.stats()
    with bar("checking", stats.records) as advance:

        def count(records: int) -> None:
            nonlocal checked
            checked += records
            advance(records)

        async for finding in store.verify(count):
            found += 1
            sys.stdout.write(f"{finding.kind}: {finding.message}\n")
    with bar("checking sessions", stats.logs) as advance:
        async for info in _sessions(store):
            for wrong in await _session(store, info):
                found += 1
                sys.stdout.write(f"session: {wrong}\n")
            advance(1)
    sys.stdout.write(f"{checked} records checked, {f'{found} findings' if found else 'nothing is wrong'}\n")
    return 1 if found else 0


async def _sessions(store: Store) -> AsyncIterator[LogInfo]:
    """Yield the logs of the sessions that have not ended."""
    after = ""
    while page := await store.logs(PREFIX, after=after, limit=_PAGE):
        for info in page:
            if info.closed < DELETED:
                yield info
        after = page[-1].log


async def _session(store: Store, info: LogInfo) -> list[str]:
    """Return what is wrong with a session whose records are well: an event that is none, and records that are not there."""
    wrong, named, root = list[str](), dict[bytes, None](), b""
    async for event in readable(store, info.log, lambda _: None):  # a damaged event is a finding of the store
        try:
            heard = read(event)
        except DamagedRecordError as error:
            wrong.append(error.message.removesuffix(VERIFY))
            continue
        if isinstance(heard, Created):
            root = heard.root
        elif isinstance(heard, TurnCommitted):
            named.update(dict.fromkeys(one for one in (heard.context, heard.span) if one is not None))
    if named and root:
        ids = [root, *named]
        found = await store.get(ids, roots=dict.fromkeys(ids, root))
        there = {record.id for record in found.records}
        missing = [one for one in named if one not in there]
        # A session whose root is gone was forgotten, as a whole. Damaged records are findings of the store.
        if root in there and missing and not found.damaged:
            wrong.append(f"{len(missing)} of {len(named)} records of the log {info.log!r} are not there")
    return wrong
