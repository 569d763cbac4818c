"""`tito-router demo`: start everything, run conversations, show the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from worker.demo.program import run

_DESCRIPTION = """\
Two workers with a small language model and a router in front of them, on this machine, without a GPU. A group of
conversations is played over text, as an agent would. Half way the router is killed and started again, with the same store.
In the end each conversation is recovered from its text, token by token.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tito-router demo", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--conversations", type=_count, default=8, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--turns", type=_count, default=5, metavar="N", help="of each (%(default)s)")
    parser.add_argument("--workers", type=_count, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--serve", action="store_true", help="run no conversations: keep serving, and print what to try"
    )
    parser.add_argument(
        "--store",
        metavar="FOLDER",
        type=lambda given: given.removeprefix("sqlite:"),
        help="the router's (one for this run; with --serve, one in ~/.cache)",
    )
    parser.add_argument("--port", type=int, help="the router's (a free one; 30000 with --serve)")
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the demonstration. The status is 1 if a trajectory is not exact; for the others see `run`."""
    run(parser(), argv, "worker.demo.show", needs=("rich",), extra="demo")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a count")
    return number
