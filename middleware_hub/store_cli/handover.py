"""`tito-router store handover`: lists spool files that a router left behind, and hands them over."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.guarded import GuardedStore
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Store
from middleware_hub.store.spool.file import SpoolFile
from middleware_hub.store.spool.folder import SpoolFolder, default_base, identity
from middleware_hub.store.spool.handover import Drain
from middleware_hub.store.spool.packing import unpack
from router.errors import BadRequestError


async def handover(args: argparse.Namespace) -> int:
    """Hand over the batches that wait in files; return 1 if anything is left or damaged.

    Raises BadRequestError for a file that is in use, or belongs to another store, and StoreError.
    """
    left, found = 0, False
    for spool in _files(args):
        found, where = True, str(spool.path)
        try:
            if spool.head.store != identity(args.store, args.store_prefix) and not args.any_store:
                raise BadRequestError(f"{where} waits for {spool.head.store}: name that, or give --any-store")
            sys.stdout.write(f"{where}: {_described(spool)}\n")
            if not args.dry_run:
                done = await _hand_over(spool, open_store(args.store, prefix=args.store_prefix))
                left += not done or spool.damaged > 0
        finally:
            if not args.dry_run:
                spool.close()
    if not found:
        base = default_base() if args.spool is None else args.spool
        name = identity(args.store, args.store_prefix)
        sys.stdout.write(f"below {base} no router has left a file that waits for {name}\n")
    return int(bool(left))


def tell_of_waiting(args: argparse.Namespace) -> None:
    """Name on standard error the records that routers of this machine have and the store lacks."""
    replies = others = 0
    files = []
    for path in SpoolFolder(args.spool, identity(args.store, args.store_prefix), None, 0).paths():
        try:
            _, waiting = SpoolFile.look_into(path)
        except (OSError, DamagedRecordError) as error:
            sys.stderr.write(f"{path}: {getattr(error, 'strerror', None) or error}\n")
            continue
        if waiting:
            files.append(str(path))
            replies += sum(one.replies for one in waiting)
            others += sum(not one.replies for one in waiting)
    if files:
        what = [f"{replies} replies"] * bool(replies) + [f"{others} other records"] * bool(others)
        sys.stderr.write(
            f"not in the store yet: {' and '.join(what)}, in {', '.join(files)}. A router that starts hands them over, or "
            "`tito-router store handover`\n"
        )


def _files(args: argparse.Namespace) -> Iterable[SpoolFile]:
    paths = [Path(path) for path in args.paths]
    if not paths:
        paths = SpoolFolder(args.spool, identity(args.store, args.store_prefix), None, 0).paths()
    for path in paths:
        try:
            found = SpoolFile.adopt(path, None, look=args.dry_run)
        except (OSError, DamagedRecordError) as error:
            raise BadRequestError(f"{path}: {error}") from error
        if found is None and args.paths:
            raise BadRequestError(f"{path} is in use by a router, is not there, or is no spool file")
        if found is not None:
            yield found


def _described(spool: SpoolFile) -> str:
    replies = events = tokens = images = unreadable = 0
    for waiting in spool.waiting:
        try:
            batch = unpack(spool.read(waiting))
        except DamagedRecordError:
            unreadable += 1
            continue
        sampled = [record for record in batch.records if record.sampled]
        replies += len(sampled)
        tokens += sum(record.count for record in sampled)
        events += len(batch.events)
        images += len(batch.media)
    words = f"{replies} replies, {tokens} sampled tokens, {events} events, {spool.waiting_bytes} bytes"
    if images:
        words += f", {images} images"
    if spool.torn_bytes:
        words += f", {spool.torn_bytes} bytes torn"
    if spool.damaged or unreadable:
        words += f", {spool.damaged + unreadable} damaged"
    return words


async def _hand_over(spool: SpoolFile, opened: Store) -> bool:
    store = GuardedStore(opened)
    await store.open(spool.head.fingerprint)
    try:
        drain = Drain(store)
        done = await drain.empty(spool)
        sys.stdout.write(f"{drain.handed_over} handed over, {drain.lost} refused, {len(spool.waiting)} left\n")
        if not done:
            sys.stdout.write(f"{drain.why}\n")
        return done and not drain.lost
    finally:
        await store.close()
