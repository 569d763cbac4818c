"""`tito-router store export`."""

from __future__ import annotations

import argparse
import sys

from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Mark
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.rows import Ends, Row, read_rows
from middleware_hub.store_cli.selection import Places, Selection
from middleware_hub.store_cli.tables import RowWriter, format_of, opened


async def export(store: Store, args: argparse.Namespace) -> int:
    """Write trajectories to a file or to standard output, and return the exit status."""
    kind = format_of(args.out, args.format)
    selection = Selection(
        Places(args.tenant, args.lora_path, args.namespace), frozenset(args.version or ()), args.since or 0
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


def _exported(rows: list[Row]) -> list[Mark]:
    """Return the marks that say so. When the conversations were hit last, and under which version, stays as it is."""
    return [Mark(row.mark.root, row.mark.tick, row.mark.stamp, retrieved=True) for row in rows if row.mark is not None]
