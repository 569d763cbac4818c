"""The command line: argv -> RouterConfig -> serve."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from router.errors import RouterError
from router.flags import config_from_args, parser

COMMANDS = {
    "demo": "router.demo.cli",
    "demo-agent": "router.demo.agent.cli",
    "demo-worker": "router.embedded.cli",
}
"""Programs that share nothing with a router. Each is imported only when it is asked for."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the router or one of `COMMANDS`.

    The router exits with 0 after draining, 1 when stopped at once, 2 on a bad configuration.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in COMMANDS:
        importlib.import_module(COMMANDS[given[0]]).main(given[1:])
    flags = parser()
    args = flags.parse_args(given)

    # Imported after parsing, so that --help and a wrong flag are answered at once: the application takes half a second.
    from router.app import create_app
    from router.observability.logs import configure_logging
    from router.server import bind, serve

    try:
        config = config_from_args(args)
        configure_logging(config.server.log_level, config.server.log_format)
        _configure_process()
        app = create_app(config)
        listener = bind(config.server)
    except RouterError as error:
        flags.exit(2, f"{flags.prog}: error: {error}\n")
    with listener:
        sys.exit(serve(app, config.server, listener))


def _configure_process() -> None:
    """Make the settings that concern the whole process, which `create_app` must leave to its caller."""
    import prometheus_client

    # Otherwise each counter gets a second series, with the time of its creation.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has it without types
    # Transformers would write to stderr, past the log, that there is no PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
