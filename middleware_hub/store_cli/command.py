"""The common parts of the commands that work on a store: the flags that name it, opening it, failures and exit status."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from middleware_hub.store.errors import StoreError, StoreMismatchError, StoreUnreachableError
from middleware_hub.store.opening import open_store, read_only
from middleware_hub.store.protocol import Store
from router.errors import BadRequestError
from router.flags import store_address

STATUS = "The status is 0 when it is done, 1 for damage or a failure on the way, 2 for a wrong flag or no such store."


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a store."""
    parser.add_argument("--store", required=True, metavar="URL", help="as the router's --store")
    parser.add_argument("--store-prefix", default="tito:", metavar="TEXT", help="as the router's --store-prefix")


@asynccontextmanager
async def opened(args: argparse.Namespace, fingerprint: str | None = None) -> AsyncIterator[Store]:
    """Open the store that the flags name, and close it at the end. Raises BadRequestError if that is impossible.

    A file that cannot be written is only read. `fingerprint`: that of the tokenizer to which the store must belong; None takes
    any.
    """
    store = await _opened(args, fingerprint)
    try:
        yield store
    finally:
        await store.close()


async def _opened(args: argparse.Namespace, fingerprint: str | None) -> Store:
    store, reader = open_store(args.store, prefix=args.store_prefix), read_only(args.store)
    try:
        if reader is None:
            try:
                await store.open(fingerprint)
                return store
            except StoreUnreachableError as error:
                reader = read_only(args.store, error)
                if reader is None:
                    raise
        await reader.open(fingerprint)
    except (StoreMismatchError, StoreUnreachableError) as error:
        raise BadRequestError(error.message) from error
    sys.stderr.write(f"{args.store} cannot be written: it is only read, and nothing is noted in it\n")
    return reader


def run_and_exit(
    flags: argparse.ArgumentParser,
    args: argparse.Namespace,
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]],
) -> NoReturn:
    """Run a command that works on a store, and exit with its status; a failure is one line on standard error."""
    if sys.stdout is None:
        flags.exit(2, f"{flags.prog}: error: standard output is closed\n")
    try:
        args.store = store_address(args.store)
        sys.exit(asyncio.run(_until_terminated(run(args))))
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
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


async def _until_terminated(work: Coroutine[Any, Any, int]) -> int:
    """Do the work. SIGTERM cancels it as Ctrl-C does, so that it removes incomplete files."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work
