"""What both demonstrations do around their show: check the installation, print, and end with a status."""

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
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows what it can
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no warning that PyTorch is missing
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="tito-demo-") as folder:
            sys.exit(importlib.import_module(module).show(args, Path(folder)))
    except (StartError, CallError) as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        sys.exit(130)
