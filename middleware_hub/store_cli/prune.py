"""`tito-router store prune`: forget conversations by what was last done with them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Final

from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.spans.versions import DEFAULT, VersionClock, WorkerVersions, is_number
from middleware_hub.store.protocol import Forgotten, Store
from middleware_hub.store.records import Mark, SpanRecord
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.selection import Places
from middleware_hub.store_cli.sizes import size
from router.errors import BadRequestError

_AT_ONCE: Final = 200
_CRITERIA: Final = ("before_version", "unused_for", "tenant", "lora_path", "namespace")


@dataclass
class PruneChoice:
    """The conversations to forget, and those that are left out.

    Attributes:
        unretrieved: how many more would be forgotten if they had been retrieved.
    """

    roots: list[bytes] = field(default_factory=list)
    records: int = 0
    unretrieved: int = 0


async def prune(store: Store, args: argparse.Namespace) -> int:
    """Forget what the flags describe, and return the exit status. Raises BadRequestError if they describe everything."""
    if all(getattr(args, name) is None for name in _CRITERIA):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in _CRITERIA)
        raise BadRequestError(f"say what to forget, with at least one of {flags}")
    before = await store.stats()
    clock = await _clock(store, args.before_version)
    choice = await _choose(store, args, clock, before.records)
    write = sys.stdout.write
    if choice.unretrieved:
        write(f"never retrieved or exported, so kept: {choice.unretrieved} (--unretrieved forgets these, too)\n")
    if args.dry_run:
        write(f"would forget {len(choice.roots)} of {before.roots} conversations, {choice.records} records\n")
        if unnamed := await store.media_unnamed():
            write(f"would remove {unnamed} images that no record names\n")
        return 0
    done = Forgotten()
    with bar("forgetting", len(choice.roots)) as advance:
        for at in range(0, len(choice.roots), _AT_ONCE):
            some = choice.roots[at : at + _AT_ONCE]
            done = done.plus(await store.forget_roots(some))
            advance(len(some))
    swept = await store.sweep_media()
    after = await store.stats()
    write(
        f"forgot {done.retrieved + done.unretrieved} of {before.roots} conversations, {done.records} records; "
        f"{size(before.bytes)} used before, {size(after.bytes)} now\n"
    )
    if before.media:
        write(f"removed {before.media - after.media} of {before.media} images")
        write(f"; no record named {swept} of them\n" if swept else "\n")
    return 0


async def _clock(store: Store, version: str | None) -> VersionClock:
    """Return the order of weight versions that the routers have written down.

    Raises BadRequestError for a version that is not in this order: everything would be older.
    """
    clock = VersionClock()
    await VersionLog(store, clock, WorkerVersions()).read()
    if version is not None and version not in clock.known and not is_number(version):
        raise BadRequestError(
            f"--before-version {version}: no router that used this store has seen it; known are "
            f"{', '.join(clock.known[-10:]) or 'none'}"
        )
    return clock


async def _choose(store: Store, args: argparse.Namespace, clock: VersionClock, records: int) -> PruneChoice:
    places = Places(args.tenant, args.lora_path, args.namespace)
    choice, counts = PruneChoice(), dict[bytes, int]()
    waiting: list[SpanRecord] = []
    with bar("reading", records) as advance:
        async for record in store.scan():
            advance(1)
            if record.namespace not in places:
                continue
            counts[record.root] = counts.get(record.root, 0) + 1
            if record.id == record.root:
                waiting.append(record)
            if len(waiting) == _AT_ONCE:
                await _sort(store, waiting, args, clock, choice)
                waiting = []
        await _sort(store, waiting, args, clock, choice)
    choice.records = sum(counts[root] for root in choice.roots)
    return choice


async def _sort(
    store: Store, roots: list[SpanRecord], args: argparse.Namespace, clock: VersionClock, choice: PruneChoice
) -> None:
    """Fetch the marks of some conversations, and choose among them."""
    marks = (await store.get([one.id for one in roots], roots={one.id: one.root for one in roots})).marks
    for record in roots:
        mark = marks.get(record.id) or Mark(record.id, record.serial, record.stamp)
        if args.unused_for is not None and mark.tick >= args.unused_for:
            continue
        if args.before_version is not None:
            behind = clock.distance(mark.stamp or DEFAULT) - clock.distance(args.before_version)
            if behind <= 0:
                continue
        if mark.retrieved or args.unretrieved:
            choice.roots.append(record.id)
        else:
            choice.unretrieved += 1
