"""`tito-router report`: the figures of everything in a store, as one page or as JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncIterator, Hashable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from middleware_hub.inspector.conversations.chain import Chain
from middleware_hub.inspector.gallery import embedded
from middleware_hub.inspector.reports.drift import ChainDrift, Drifts
from middleware_hub.inspector.reports.files import report_page
from middleware_hub.inspector.reports.run import ImageFigures, RunFigures
from middleware_hub.media.picture import Picture
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.spans.chain import TokenSpan, links
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.chains import span_of
from middleware_hub.store.protocol import Store
from middleware_hub.store_cli.command import STATUS, add_store, opened, run_and_exit
from middleware_hub.store_cli.export import deleted_sessions
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.rows import Ends
from middleware_hub.store_cli.selection import Places, Selection, add_places, moment, named
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.errors import BadRequestError, RouterError
from router.flags import tokenizer_path

_AT_ONCE = 32
"""Sequences that are read in one look-up."""
_DESCRIPTION = """\
Writes the report of a run, as the inspector shows it: drift, reasons why something is not exact, staleness, reuse, logprobs by
weight version. It reads a whole store, and may run beside the routers that use it.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tito-router report", description=_DESCRIPTION, epilog=STATUS, allow_abbrev=False
    )
    add_store(parser)
    parser.add_argument(
        "--out", required=True, type=Path, metavar="PATH", help="a page that needs nothing else (.html), or .json"
    )
    parser.add_argument(
        "--tokenizer-path", metavar="DIR-or-hub-id", help="the model's: without it the report says nothing about drift"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the tokenizer"
    )
    add_places(parser)
    parser.add_argument(
        "--since", type=moment, metavar="TIME", help="sequences that end since then: 12h, 7d, 2026-03-31"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command, and exit with its status."""
    flags = parser()
    run_and_exit(flags, flags.parse_args(argv), _run)


async def _run(args: argparse.Namespace) -> int:
    if args.out.suffix not in (".html", ".json"):
        raise BadRequestError(f"--out {args.out}: the name of a report ends with .html or .json")
    tokenizer = None
    if args.tokenizer_path is not None:
        path = tokenizer_path(args.tokenizer_path)
        tokenizer = Tokenizer.load(path, trust_remote_code=args.trust_remote_code)
    async with opened(args, None if tokenizer is None else tokenizer.fingerprint) as store:
        places = Places(args.tenant, args.lora_path, args.namespace)
        selection = Selection(places, since=args.since or 0, without=await deleted_sessions(store))
        report, missing, owners = await stored_report(store, selection, tokenizer)
        if args.out.suffix == ".json":
            _write(args.out, msgspec.json.encode(report))
        else:
            _write(args.out, report_page(report, embedded([one async for one in _commonest(store, report, owners)])))
        left_out = f"; {missing} sequences could not be read or were forgotten" if missing else ""
        sys.stderr.write(
            f"{report['conversations']} conversations, {report['sampled_tokens']} sampled tokens{left_out}\n"
        )
        return 1 if missing and (await store.stats()).damaged else 0


async def stored_report(
    store: Store, selection: Selection, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], int, dict[str, str]]:
    """Return the report of an open store, the number of sequences that could not be read, and a tenant of each image."""
    clock = VersionClock()
    await VersionLog(store, clock, WorkerVersions()).read()
    tally = RunFigures(None if tokenizer is None else tokenizer.vocabulary, clock.distance)
    drifts = None if tokenizer is None else Drifts(tokenizer)
    ends = Ends()
    with bar("reading", (await store.stats()).records) as advance:
        async for record in store.scan():
            ends.add(record, record in selection)
            advance(1)
    roots = ends.roots
    ids = list(roots)
    missing, owners = 0, dict[str, str]()
    with bar("counting", len(ids)) as advance:
        for at in range(0, len(ids), _AT_ONCE):
            some = ids[at : at + _AT_ONCE]
            found = await store.get(some, roots=roots)
            spans: dict[bytes, TokenSpan] = {}
            tenants: dict[bytes, str] = {}
            for record in found.records:
                spans[record.id] = span_of(record, spans)
                tenants[record.id] = named(record.namespace)[0]
            for wanted in some:
                if wanted in spans:
                    await _add(tally, drifts, spans[wanted])
                    await _measure(store, tally.images, tenants[wanted], owners)
                else:
                    missing += 1
            advance(len(some))
    return tally.report(progress=1.0), missing, owners


async def _measure(store: Store, images: ImageFigures, tenant: str, owners: dict[str, str]) -> None:
    """Look for the files of the images that were counted last, which are those of a tenant."""
    fresh = images.fresh()
    for digest, file in (await store.media(tenant, fresh, data=False) if fresh else {}).items():
        images.held(digest, file.size)
        owners[digest] = tenant


async def _commonest(store: Store, report: dict[str, Any], owners: dict[str, str]) -> AsyncIterator[Picture]:
    """Yield the images that a report shows, and note in it what is known of them."""
    for one in report["images"]["commonest"]:
        digest = one["digest"]
        files = await store.media(owners[digest], [digest]) if digest in owners else {}
        for file in files.values():
            one |= {"mime": file.mime, "width": file.width, "height": file.height, "size": file.size}
            yield Picture(digest, file.mime, file.width, file.height, file.data, file.upright)


async def _add(tally: RunFigures, drifts: Drifts | None, end: TokenSpan) -> None:
    parts = list(links(end, end.count))
    parts.reverse()
    chain = Chain(parts)
    drift: ChainDrift | None = None
    if drifts is not None:
        try:
            drift = await drifts.of(chain)
        except RouterError as error:
            sys.stderr.write(f"{error}: a sequence of {chain.total} tokens is not encoded again\n")
    first = next(span for span, _ in parts if span.sampled)
    tally.add(_id_of(first), chain, drift, chain.reasons, key=_id_of, moment=_moment)


def _id_of(span: TokenSpan) -> Hashable:
    found: bytes = span.stored.id
    return found


def _moment(span: TokenSpan) -> float:
    return float(span.stored.serial) / 1e9


def _write(path: Path, content: bytes) -> None:
    """Write a file, which gets its name once it is complete."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
