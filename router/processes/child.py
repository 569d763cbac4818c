"""One of several processes: a router like any other, whose connections come through a socket that it inherits.

The parent starts it as `python -m router.processes.child DESCRIPTOR`, the number of one end of a socket pair.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import pickle
import signal
import socket
import sys

from router.errors import RouterError
from router.processes.channel import receive_first, send_last
from router.processes.messages import Failed
from router.processes.parent_link import ParentLink
from router.processes.shares import Setup
from router.serving.server import CANNOT_START, serve_from
from router.serving.shared_listener import ConnectionBoard, SharedListener

STACKS = signal.SIGUSR1
"""Makes a process write to stderr what each of its threads does: the parent sends it before it kills one that hangs."""

ROUTER = "router.app"
"""Imported only when the parent's death would be noticed: it takes half a second."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent ends it, or is gone. Exits as `router.cli.main` does."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _end_with_the_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent's to pass on
    faulthandler.register(STACKS)
    setup: Setup = pickle.loads(receive_first(connection))
    try:
        sys.exit(_serve(setup, connection))
    except RouterError as error:
        with contextlib.suppress(OSError):
            send_last(connection, Failed(error.message))
        sys.exit(CANNOT_START)


def _serve(setup: Setup, connection: socket.socket) -> int:
    gc.disable()  # as the command line does: the server switches it on
    config, number = setup.config, setup.number
    router = importlib.import_module(ROUTER)
    router.prepare_process(config.server, number)
    board = ConnectionBoard(setup.board, config.server.processes)
    listener = SharedListener(socket.socket(fileno=setup.listener), board, number)
    link = ParentLink(connection, listener, number, setup.instance)
    return serve_from(link, router.create_app(config, others=link), config.server)


def _end_with_the_parent() -> None:
    """Let Linux kill this process, stopped or not, as soon as the parent is gone. Elsewhere the channel notices."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
