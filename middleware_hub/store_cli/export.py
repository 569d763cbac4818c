"""`tito-router store export`."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from middleware_hub.sessions.log.events import DELETED, PREFIX, Ended, read
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Mark
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.rows import Ends, Row, read_rows
from middleware_hub.store_cli.selection import Places, Selection
from middleware_hub.store_cli.tables import RowWriter, format_of, opened

_PAGE: Final = 1_000


async def export(store: Store, args: argparse.Namespace) -> int:
    """Write trajectories to a file or to standard output, and return the exit status."""
    kind = format_of(args.out, args.format)
    selection = Selection(
        Places(args.tenant, args.lora_path, args.namespace),
        frozenset(args.version or ()),
        args.since or 0,
        await _deleted(store),
    )
    with opened(args.out) as sink, RowWriter(sink, kind) as writer:
        ends = Ends(every=args.rows == "replies")
        with bar("reading", (await store.stats()).records) as advance:
            async for record in store.scan():
                ends.add(record, record in selection)
                advance(1)
        ids = ends.ids
        rows = 0
        with bar("writing", len(ids)) as advance:
            async for some in read_rows(store, ids):
                writer.add(some)
                rows += len(some)
                advance(len(some))
                if not args.keep_marks:
                    store.note(_exported(some))
    left_out = len(ids) - rows
    sys.stderr.write(f"{rows} rows{f', {left_out} could not be read or were forgotten' if left_out else ''}\n")
    return 1 if left_out and (await store.stats()).damaged else 0


async def _deleted(store: Store) -> frozenset[str]:
    """Return the logs of sessions that a client has deleted: their tokens are there until they are forgotten."""
    found, after = set[str](), ""
    while page := await store.logs(PREFIX, after=after, limit=_PAGE):
        after = page[-1].log
        for info in page:
            if info.closed >= DELETED:
                last = [read(event) for event in await store.read(info.log, after=info.last - 1)]
                found |= {info.log for event in last if isinstance(event, Ended) and event.why == "deleted"}
    return frozenset(found)


def _exported(rows: list[Row]) -> list[Mark]:
    """Return the marks that say so. When the conversations were hit last, and under which version, stays as it is."""
    return [Mark(row.mark.root, row.mark.tick, row.mark.stamp, retrieved=True) for row in rows if row.mark is not None]
