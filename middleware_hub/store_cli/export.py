"""`tito-router store export`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Mapping
from typing import BinaryIO, Final

from middleware_hub.sessions.log.events import DELETED, PREFIX, Ended, read
from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Mark
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.rows import Ends, Row, read_rows
from middleware_hub.store_cli.selection import Places, Selection
from middleware_hub.store_cli.tables import TREE, RowWriter, format_of, opened
from middleware_hub.store_cli.trees import read_trees
from router.errors import BadRequestError

_PAGE: Final = 1_000


async def export(store: Store, args: argparse.Namespace) -> int:
    """Write trajectories to a file or to standard output, and return the exit status."""
    kind = format_of(args.out, args.format)
    selection = Selection(
        Places(args.tenant, args.lora_path, args.namespace),
        frozenset(args.version or ()),
        args.since or 0,
        await deleted_sessions(store),
    )
    if args.per_token and kind != TREE:
        raise BadRequestError(f"--per-token is for --format {TREE}: tables have no column for it")
    with opened(args.out) as sink:
        ends = Ends(every=args.rows == "replies")
        with bar("reading", (await store.stats()).records) as advance:
            async for record in store.scan():
                ends.add(record, record in selection)
                advance(1)
        roots = ends.roots
        rows, marks = 0, dict[bytes, Mark]()
        written = _trees(store, roots, sink, args) if kind == TREE else _tables(store, roots, sink, kind)
        with bar("writing", len(roots)) as advance:
            async for some in written:
                rows += len(some)
                advance(len(some))
                marks |= _exported(some)
    # Only now is the file complete. The store forgets first what was exported, so an export that failed must not count.
    if not args.keep_marks:
        store.note(list(marks.values()))
    left_out = len(roots) - rows
    what = "branches" if kind == TREE else "rows"
    sys.stderr.write(f"{rows} {what}{f', {left_out} could not be read or were forgotten' if left_out else ''}\n")
    return 1 if left_out and (await store.stats()).damaged else 0


async def _tables(store: Store, roots: Mapping[bytes, bytes], sink: BinaryIO, kind: str) -> AsyncIterator[list[Row]]:
    with RowWriter(sink, kind) as writer:
        async for some in read_rows(store, roots):
            writer.add(some)
            yield some


async def _trees(
    store: Store, roots: Mapping[bytes, bytes], sink: BinaryIO, args: argparse.Namespace
) -> AsyncIterator[list[Row]]:
    async for some, line in read_trees(store, roots, per_token=args.per_token):
        sink.write(line)
        yield some


async def deleted_sessions(store: Store) -> frozenset[str]:
    """Return the logs of sessions that a client has deleted: their tokens stay in the store until they are forgotten."""
    found, after = set[str](), ""
    while page := await store.logs(PREFIX, after=after, limit=_PAGE):
        after = page[-1].log
        for info in page:
            if info.closed >= DELETED:
                try:
                    last = [read(event) for event in await store.read(info.log, after=info.last - 1)]
                except DamagedRecordError:  # it may have been deleted
                    found.add(info.log)
                    continue
                found |= {info.log for event in last if isinstance(event, Ended) and event.why == "deleted"}
    return frozenset(found)


def _exported(rows: list[Row]) -> dict[bytes, Mark]:
    """Return the marks that note the retrieval, by root. The time and version of the last hits stay unchanged."""
    marks = [row.mark for row in rows if row.mark is not None]
    return {mark.root: Mark(mark.root, mark.tick, mark.stamp, retrieved=True) for mark in marks}
