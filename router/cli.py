"""The command line: argv -> RouterConfig -> serve."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import prometheus_client

from router.app import create_app
from router.errors import RouterError
from router.flags import config_from_args, parser
from router.observability.logs import configure_logging
from router.server import bind, serve

COMMANDS = {
    "demo": "router.demo.cli",
    "demo-agent": "router.demo.agent.cli",
    "demo-worker": "router.embedded.cli",
}
"""Programs of their own, with which a router shares nothing: imported only when they are asked for."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the router, or a demo worker.

    A router exits with 0 after draining, 1 when stopped at once, 2 on a bad configuration.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in COMMANDS:
        importlib.import_module(COMMANDS[given[0]]).main(given[1:])
    flags = parser()
    args = flags.parse_args(given)
    try:
        config = config_from_args(args)
        configure_logging(config.server.log_level, config.server.log_format)
        _own_the_process()
        app = create_app(config)
        listener = bind(config.server)
    except RouterError as error:
        flags.exit(2, f"{flags.prog}: error: {error}\n")
    with listener:
        sys.exit(serve(app, config.server, listener))


def _own_the_process() -> None:
    """What holds for a whole process is for its command to decide, not for `create_app`."""
    # Beside each counter there would be another series, of when it was made.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it without types
    # It says on stderr, past the log, that there is no PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
