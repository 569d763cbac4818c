"""`tito-router demo-worker`, or `python -m worker`: a worker to try the router on, to test against, and to load."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, get_args

from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer
from worker.options import Interface, Role, WorkerOptions

logger = logging.getLogger(__name__)

COMMAND = "tito-router demo-worker"
_PACE = 200  # tokens per second
_ALIASES = {str(shipped_tokenizer()): "demo", str(shipped_image_tokenizer()): "demo-images"}
"""What `tito-router --tokenizer-path` calls the shipped tokenizers."""

_DESCRIPTION = """\
A worker without a GPU and without an engine that behaves as SGLang does, or as vLLM. With its own tokenizer it is a
small language model, whose replies make some sense and are spelled in many ways. With any other tokenizer it replies
with noise, which is almost always spelled in a way that no tokenizer would choose.
"""
_EXAMPLES = """\
examples:
  a worker; it prints the line that starts a router in front of it:
    {prog} &

  one that speaks vLLM's API:
    {prog} --engine vllm --port 30002 &

  something to measure a router with:
    {prog} --scripted --tokenizer-path Qwen/Qwen3-8B --log-level warning

With --scripted, replies are cut out of a pool: their length is max_new_tokens, whatever else a request says, and text,
ids and logprobs of each fit each other. There is no model to wait for, and so no pace unless you set one.
"""


class _WorkerParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows all flags)\n")


def parser(prog: str = COMMAND) -> argparse.ArgumentParser:
    """Return the parser of the flags, which are named as those of SGLang's server where it has them."""
    parser = _WorkerParser(
        prog=prog,
        description=_DESCRIPTION,
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=_port, default=30001, metavar="N", help="0 takes a free one (%(default)s)")
    parser.add_argument(
        "--engine", choices=get_args(Interface), default="sglang", help="whose HTTP interface it has (%(default)s)"
    )
    parser.add_argument(
        "--tokenizer-path",
        default=str(shipped_tokenizer()),
        metavar="DIR-or-hub-id",
        help="default: the shipped one, %(default)s",
    )
    parser.add_argument(
        "--images",
        action="store_const",
        const=str(shipped_image_tokenizer()),
        dest="tokenizer_path",
        help="take images: the tokenizer is the shipped one with their placeholder in it",
    )
    parser.add_argument(
        "--disaggregation-mode",
        choices=get_args(Role),
        default="null",
        help="prefill or decode: one of two workers that serve a request together (%(default)s)",
    )
    parser.add_argument(
        "--prefix-cache", action="store_true", help="have a prefix cache, as a worker with --images has in any case"
    )
    parser.add_argument(
        "--dp-size",
        type=_count,
        default=1,
        metavar="N",
        help="data-parallel ranks, each with a prefix cache and a load of its own (%(default)s)",
    )
    parser.add_argument("--scripted", action="store_true", help="cut replies out of a pool, for measuring load")
    parser.add_argument(
        "--tokens-per-second",
        type=_pace,
        metavar="N",
        help=f"of each reply; 0 is as fast as possible ({_PACE}; with --scripted: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (%(default)s)")
    parser.add_argument("--weight-version", default="default", metavar="NAME", help="the first one (%(default)s)")
    parser.add_argument(
        "--context-length", type=_count, default=32768, metavar="N", help="longer prompts are refused (%(default)s)"
    )
    parser.add_argument(
        "--stream-interval", type=_count, default=1, metavar="N", help="tokens per event of a stream (%(default)s)"
    )
    parser.add_argument(
        "--incremental-streaming-output",
        action="store_true",
        help="events have only what is new, as vLLM's always have",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str = COMMAND) -> NoReturn:
    """Serve until SIGTERM or SIGINT. `prog`: what was called, for messages.

    The status is 0 then, 1 if it cannot listen, and 2 for a wrong flag or without a usable tokenizer.
    """
    flags = parser(prog)
    args = flags.parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no warning that PyTorch is missing
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn.error").setLevel("WARNING")

    from worker.worker import EmbeddedWorker  # slow to import: not for --help

    pace = args.tokens_per_second if args.tokens_per_second is not None else 0 if args.scripted else _PACE
    over = threading.Event()
    options = WorkerOptions(
        interface=args.engine,
        dp_size=args.dp_size,
        disaggregation_mode=args.disaggregation_mode,
        kv_connector=args.engine == "vllm",
        scripted=args.scripted,
        prefix_cache=args.prefix_cache,
        host=args.host,
        port=args.port,
        stream_style="incremental" if args.incremental_streaming_output else "cumulative",
        stream_interval=args.stream_interval,
        seed=args.seed,
        weight_version=args.weight_version,
        context_length=args.context_length,
        token_delay=1 / pace if pace else 0.0,
        keep_log=False,
        new_loop=_new_loop(),
    )
    try:
        worker = EmbeddedWorker(args.tokenizer_path, options)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises
        why = " ".join(str(error).split())
        if args.tokenizer_path.startswith((".", "~", os.sep)) and not os.path.isdir(args.tokenizer_path):
            why = "there is no such folder"  # transformers takes the path for a hub id, and complains of that
        flags.exit(2, f"{flags.prog}: error: no tokenizer could be loaded from {args.tokenizer_path}: {why}\n")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: over.set())
    try:
        worker.__enter__()
    except OSError as error:
        flags.exit(1, f"{flags.prog}: error: cannot listen on {args.host}:{args.port}: {error.strerror or error}\n")
    logger.info("listening on %s, tokenizer %s", worker.url, worker.tokenizer_path)
    # Whatever the level of the log is: a worker that says nothing leaves its user to look for its tokenizer.
    tokenizer = _ALIASES.get(str(worker.tokenizer_path), worker.tokenizer_path)
    sys.stderr.write(f"a router: tito-router --tokenizer-path {tokenizer} --worker-urls {worker.url}\n")
    sys.stderr.flush()
    while not over.wait(1):
        pass  # without an end to the wait this thread does not see a signal that another one has taken
    worker.__exit__()
    flags.exit(0)


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a count")
    return number


def _pace(text: str) -> float:
    pace = float(text)
    if not pace >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a pace")
    return pace
