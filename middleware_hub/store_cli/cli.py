"""The flags of `tito-router store`, and how its commands are run."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from middleware_hub.store.errors import StoreError, StoreMismatchError, StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Store
from middleware_hub.store_cli.export import export
from middleware_hub.store_cli.prune import prune
from middleware_hub.store_cli.selection import moment
from middleware_hub.store_cli.sizes import stats
from middleware_hub.store_cli.tables import FORMATS
from middleware_hub.store_cli.verify import verify
from router.errors import BadRequestError

Command = Callable[[Store, argparse.Namespace], Awaitable[int]]

_DESCRIPTION = """\
Looks into a store, checks it, exports what was recorded, and forgets parts of it. Each command may run beside the routers that
use the store.
"""
_STATUS = "The status is 0 when it is done, 1 for damage or a failure on the way, 2 for a wrong flag or no such store."


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tito-router store", description=_DESCRIPTION, epilog=_STATUS, allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Command, words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words[0].upper() + words[1:], allow_abbrev=False)
        made.add_argument("--store", required=True, metavar="URL", help="as the router's --store: sqlite:PATH")
        made.set_defaults(run=run)
        return made

    found = command("stats", stats, "print how much is in it")
    found.add_argument(
        "--tokens", action="store_true", help="read everything: tokens, characters, namespaces, versions"
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")

    command("verify", verify, "check every record, what it builds on and how it is found; print what is wrong")

    found = command("export", export, "write trajectories, with the columns of /retrieve_from_text")
    found.add_argument("--out", required=True, metavar="PATH", help="a file, or - for standard output")
    found.add_argument("--format", choices=FORMATS, help="(that of the file's suffix; parquet for standard output)")
    found.add_argument(
        "--rows",
        choices=("leaves", "replies"),
        default="leaves",
        help="a row for each end of a branch, or for every reply (%(default)s)",
    )
    _add_places(found)
    found.add_argument(
        "--version", action="append", metavar="V", help="rows whose last token has this weight version; repeatable"
    )
    found.add_argument("--since", type=moment, metavar="TIME", help="rows that end since then: 12h, 7d, 2026-03-31")
    found.add_argument("--keep-marks", action="store_true", help="do not note that this was exported")

    found = command("prune", prune, "forget whole conversations to which all given flags apply")
    _add_places(found)
    found.add_argument("--before-version", metavar="V", help="last hit under an older weight version than this one")
    found.add_argument(
        "--unused-for", type=moment, metavar="TIME", help="last hit so long ago, or before: 7d, 2026-03-31"
    )
    found.add_argument("--unretrieved", action="store_true", help="also those that nobody retrieved or exported")
    found.add_argument("--dry-run", action="store_true", help="only say how many")
    return parser


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="what this tenant recorded ('' for no keys)")
    parser.add_argument("--lora-path", metavar="PATH", help="what was sampled with this adapter ('' for none)")
    parser.add_argument("--namespace", metavar="NAME", help="what has this x-radix-namespace ('' for none)")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and exit with its status."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        sys.exit(asyncio.run(_run(args)))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at exit
        sys.exit(1)
    except OSError as error:
        flags.exit(1, f"{flags.prog}: error: {error}\n")
    except StoreError as error:
        flags.exit(1, f"{flags.prog}: error: {error.message}\n")
    except BadRequestError as error:
        flags.exit(2, f"{flags.prog}: error: {error.message}\n")
    except KeyboardInterrupt:
        sys.exit(130)


async def _run(args: argparse.Namespace) -> int:
    store = open_store(args.store)
    try:
        await store.open(None)
    except (StoreMismatchError, StoreUnreachableError) as error:
        raise BadRequestError(error.message) from error
    try:
        run: Command = args.run
        return await run(store, args)
    finally:
        await store.close()
