"""The flags of `tito-router store`, and how its commands are run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from middleware_hub.store.protocol import Store
from middleware_hub.store_cli.command import STATUS, add_store, opened, run_and_exit
from middleware_hub.store_cli.export import export
from middleware_hub.store_cli.handover import handover, tell_of_waiting
from middleware_hub.store_cli.prune import prune
from middleware_hub.store_cli.selection import add_places, moment
from middleware_hub.store_cli.sizes import stats
from middleware_hub.store_cli.tables import FORMATS, LINES
from middleware_hub.store_cli.verify import verify

Command = Callable[[Store, argparse.Namespace], Awaitable[int]]

_DESCRIPTION = """\
Looks into a store, checks it, exports what was recorded, and forgets parts of it. Each command may run beside the routers that
use the store.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tito-router store", description=_DESCRIPTION, epilog=STATUS, allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Command | None, words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words[0].upper() + words[1:], allow_abbrev=False)
        add_store(made)
        made.add_argument("--spool", metavar="PATH", help="as the router's --store-spool (below the user's cache)")
        made.set_defaults(run=run)
        return made

    found = command("stats", stats, "print how much is in it")
    found.add_argument("--tokens", action="store_true", help="also the characters, and each namespace and version")
    found.add_argument("--quick", action="store_true", help="only what is known without reading every record")
    found.add_argument("--json", action="store_true", help="print one JSON object")

    command("verify", verify, "check every record, what it builds on and how it is found; print what is wrong")

    found = command("export", export, "write trajectories, with the columns of /retrieve_from_text")
    found.add_argument("--out", required=True, metavar="PATH", help="a file, or - for standard output")
    found.add_argument(
        "--format", choices=(*FORMATS, *LINES), help="(that of the file's suffix; parquet for standard output)"
    )
    found.add_argument("--media", metavar="FILE", help="also write the files of images, each once, as a table")
    found.add_argument(
        "--rows",
        choices=("leaves", "replies"),
        default="leaves",
        help="a row for each end of a branch, or for every reply (%(default)s)",
    )
    add_places(found)
    found.add_argument(
        "--version", action="append", metavar="V", help="rows whose last token has this weight version; repeatable"
    )
    found.add_argument("--since", type=moment, metavar="TIME", help="rows that end since then: 12h, 7d, 2026-03-31")
    found.add_argument("--per-token", action="store_true", help="with tree: rows of experts as well, which are large")
    found.add_argument("--keep-marks", action="store_true", help="do not note that this was exported")

    found = command("prune", prune, "forget whole conversations to which all given flags apply")
    add_places(found)
    found.add_argument("--before-version", metavar="V", help="last hit under an older weight version than this one")
    found.add_argument(
        "--unused-for", type=moment, metavar="TIME", help="last hit so long ago, or before: 7d, 2026-03-31"
    )
    found.add_argument("--unretrieved", action="store_true", help="also those that were never retrieved or exported")
    found.add_argument("--dry-run", action="store_true", help="only say how many")

    found = command("handover", None, "hand over what routers left in spool files while the store was away")
    found.add_argument("--dry-run", action="store_true", help="only say what is in them")
    found.add_argument("--any-store", action="store_true", help="also a file that waits for a store of another name")
    found.add_argument(
        "paths",
        nargs="*",
        metavar="FILE",
        help="a spool file or a .refused file (all spool files of this store that are in no use)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and exit with its status."""
    flags = parser()
    run_and_exit(flags, flags.parse_args(argv), _run)


async def _run(args: argparse.Namespace) -> int:
    if args.run is None:
        return await handover(args)
    async with opened(args) as store:
        run: Command = args.run
        status = await run(store, args)
    sys.stdout.flush()
    tell_of_waiting(args)
    return status
