"""What stands behind the routers that are fuzzed, and beside them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvloop

from tests.fuzz.garbled import IDS, GarbledWorker
from tests.support.serving import serve
from worker.models.ngram import shipped_tokenizer
from worker.options import Interface, StreamStyle
from worker.vocabulary import load_vocabulary
from worker.worker import EmbeddedWorker

STYLES: tuple[StreamStyle, ...] = ("cumulative", "incremental")


@contextlib.contextmanager
def embedded_workers(interface: Interface = "sglang") -> Iterator[list[EmbeddedWorker]]:
    """One of each style of streaming. Their context is short, because much of what is asked for has no end."""
    with contextlib.ExitStack() as entered:
        yield [
            entered.enter_context(
                EmbeddedWorker(
                    interface=interface,
                    stream_style=style,
                    context_length=128,
                    keep_log=False,
                    new_loop=uvloop.new_event_loop,
                )
            )
            for style in STYLES
        ]


@contextlib.contextmanager
def garbled_worker() -> Iterator[str]:
    """The URL of one that talks nonsense."""
    text = load_vocabulary(str(shipped_tokenizer())).tokenizer.decode(list(IDS))
    with serve(GarbledWorker(text)) as url:
        yield url


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """The URL of a port where nobody listens, nor will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
