"""`tito-router demo`: start everything, run conversations, show the results. `run` is that of both demonstrations."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from worker.demo.processes import StartError
from worker.demo.rollout import CallError

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


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    module: str,
    *,
    needs: Sequence[str],
    extra: str,
) -> NoReturn:
    """Parse the flags, run the module's `show`, and exit with its status.

    The status is 1 if a process or a request fails, 2 if a package is not installed, and 130 on Ctrl-C.

    Args:
        parser: the flags.
        argv: the command line; None takes that of this process.
        module: where `show` is, which gets the parsed flags and a folder that is deleted afterwards, and returns the status.
            It is slow to import, so `--help` does without it.
        needs: the packages that the module imports.
        extra: the extra of `tito-router` that installs them.
    """
    args = parser.parse_args(argv)
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    if lacking:
        names = " and ".join(lacking) + (" is" if len(lacking) == 1 else " are")
        parser.exit(2, f"{parser.prog}: error: {names} missing: pip install 'tito-router[{extra}]'\n")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal without UTF-8
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no warning that PyTorch is missing
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="tito-demo-") as folder:
            sys.exit(importlib.import_module(module).show(args, Path(folder)))
    except (StartError, CallError) as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        sys.exit(130)
