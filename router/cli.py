"""The command line: argv -> RouterConfig -> the router, or another program."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from router.errors import RouterError

if TYPE_CHECKING:
    from router.flags import FlagParser

FLAGS = "router.flags"
ROUTER = "router.app"
PARENT = "router.processes.supervisor"
COMMANDS = {
    "demo": "worker.demo.cli",
    "demo-agent": "worker.demo.agent.cli",
    "demo-worker": "worker.cli",
    "drift": "middleware_hub.drift.cli",
    "report": "middleware_hub.inspector.reports.cli",
    "store": "middleware_hub.store_cli.cli",
}
"""The programs. Each is imported only when it is asked for: the router takes half a second, and --help must not."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the router or one of `COMMANDS`.

    The router exits with 0 after draining, 1 when stopped at once, 2 on a bad configuration or a store that it cannot use. A
    program that Ctrl-C ends before it handles signals, such as while it loads, exits with 130; as process 1 of a container it
    then also exits at a SIGTERM, with 143.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    if os.getpid() == 1:  # in a container: the kernel delivers to it only the signals for which it has a handler
        signal.signal(signal.SIGTERM, _end)
    try:
        if given and given[0] in COMMANDS:
            _loaded(COMMANDS[given[0]]).main(given[1:])
        _route(given)
    except KeyboardInterrupt:
        sys.exit(130)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def parser() -> FlagParser:
    """Return the parser of the router's own flags."""
    flags: FlagParser = _loaded(FLAGS).parser()
    return flags


def _route(given: Sequence[str]) -> NoReturn:
    flags = parser()
    if given and not given[0].startswith("-"):
        flags.error(f"there is no command {given[0]}: the commands are {', '.join(COMMANDS)}; the router has none")
    args, unknown = flags.parse_known_args(given)
    if unknown:
        flags.refuse(unknown)
    try:
        config = _loaded(FLAGS).config_from_args(args)
        if config.server.processes > 1:
            sys.exit(_loaded(PARENT).supervise(config))
        gc.disable()  # until the server has started: what a start loads stays, and walking it took an eighth of the time
        sys.exit(_loaded(ROUTER).run(config))
    except RouterError as error:
        flags.exit(2, f"{flags.prog}: error: {error}\n")


def _loaded(program: str) -> ModuleType:
    """Import a program. Exits with 2 if a package that it needs is missing, as it is after `pip install --no-deps`."""
    try:
        return importlib.import_module(program)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "router", "middleware_hub"):
            raise
        lacks, how = f"it needs {missing}", "install tito-router with its dependencies, so without --no-deps"
        if missing == "worker":
            lacks = "the demos and their worker are in a package of their own, tito-worker"
            how = "pip install 'tito-worker[agents]', or in a clone pip install './worker[agents]'"
        sys.stderr.write(f"tito-router: error: {lacks}, which {sys.executable} does not have: {how}\n")
        sys.exit(2)
