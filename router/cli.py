"""The command line: argv -> RouterConfig -> serve."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn, get_args

from router.app import create_app
from router.config import (
    RADIX_TREE_MIDDLEWARE,
    AbortConfig,
    RadixConfig,
    RouterConfig,
    ServerConfig,
    TokenizerBackend,
    WorkersConfig,
)
from router.errors import BadRequestError, RouterError
from router.policies import POLICIES
from router.server import bind, configure_logging, serve
from router.workers.worker import normalize_url

NO_MIDDLEWARE = "none"
COMMANDS = {"demo": "router.demo.cli", "demo-worker": "router.embedded.cli"}
"""Programs of their own, with which a router shares nothing: imported only when they are asked for."""

_EXAMPLES = f"""\
examples:
  a router that remembers every sampled token, in front of two SGLang servers:
    tito-router --tokenizer-path Qwen/Qwen3-8B --worker-urls http://10.0.0.1:30001 http://10.0.0.2:30001

  begin without workers and add them while it runs:
    tito-router --tokenizer-path /models/qwen3 --port 30000
    curl -X POST 'http://127.0.0.1:30000/add_worker?url=http://10.0.0.1:30001'

  see what it does, on this machine, with two small workers that need neither SGLang nor a GPU:
    tito-router demo

  one such worker, to try things on (`tito-router demo-worker --help` tells more):
    tito-router demo-worker

  only route:
    tito-router --middleware {NO_MIDDLEWARE} --worker-urls http://10.0.0.1:30001 --policy power_of_two

  ask for text, then for the tokens behind it:
    curl http://127.0.0.1:30000/generate -H 'content-type: application/json' \\
      -d '{{"text": "Hello", "sampling_params": {{"max_new_tokens": 16}}}}'
    curl http://127.0.0.1:30000/retrieve_from_text -H 'content-type: application/json' -d '{{"text": "Hello..."}}'

Start the SGLang servers with --incremental-streaming-output if you stream long generations: without it every
event repeats all that came before, 80 MB for 2,000 tokens with logprobs.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows all flags)\n")


def parser() -> argparse.ArgumentParser:
    """The flags. Names follow SGLang's router where it has one."""
    parser = _Parser(
        prog="tito-router",
        description="Text in, exact tokens out: a router in front of SGLang workers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")

    server = parser.add_argument_group("server")
    server.add_argument("--host", default=ServerConfig.host, help="address to listen on (%(default)s)")
    server.add_argument("--port", type=int, default=ServerConfig.port, help="0 takes a free one (%(default)s)")
    server.add_argument("--api-key", action="append", default=[], metavar="KEY", help="ask for this key; repeatable")
    server.add_argument("--insecure", action="store_true", help="listen beyond this machine without any --api-key")
    server.add_argument(
        "--max-body-bytes", type=int, default=ServerConfig.max_body_bytes, metavar="N", help="(%(default)s)"
    )
    server.add_argument(
        "--shutdown-grace",
        type=float,
        default=ServerConfig.shutdown_grace,
        metavar="SECONDS",
        help="what requests in flight get to finish after SIGTERM (%(default)s)",
    )
    server.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=ServerConfig.log_level,
        help="(%(default)s)",
    )

    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--worker-urls", nargs="+", action="extend", default=[], metavar="URL", help="more can be added while it runs"
    )
    workers.add_argument(
        "--policy", default=WorkersConfig.policy, metavar="NAME", help=f"{', '.join(POLICIES)} (%(default)s)"
    )

    abort = parser.add_argument_group("aborted generations")
    abort.add_argument("--abort-policy", choices=("retry", "return"), default=AbortConfig.policy, help="(%(default)s)")
    abort.add_argument(
        "--abort-retries", type=int, default=AbortConfig.attempts, metavar="N", help="attempts in all (%(default)s)"
    )
    abort.add_argument(
        "--abort-retry-wait", type=float, default=AbortConfig.wait, metavar="SECONDS", help="in between (%(default)s)"
    )

    radix = parser.add_argument_group("the memory of tokens")
    radix.add_argument("--tokenizer-path", metavar="DIR-or-hub-id", help="the workers' tokenizer")
    radix.add_argument(
        "--tokenizer-backend",
        choices=get_args(TokenizerBackend),
        default=RadixConfig.tokenizer_backend,
        help="what encodes texts; auto is fastokens where it gives the same ids as Hugging Face's (%(default)s)",
    )
    radix.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer")
    radix.add_argument(
        "--radix-max-tokens", type=int, metavar="N", help="how many to remember (a quarter of the machine's memory)"
    )
    radix.add_argument(
        "--radix-keep-versions",
        type=int,
        default=RadixConfig.keep_versions,
        metavar="N",
        help="weight versions after which a text that nobody used is forgotten (%(default)s)",
    )
    radix.add_argument(
        "--force-logprobs", choices=("on", "off"), default="on", help="have workers send logprobs always (%(default)s)"
    )
    radix.add_argument(
        "--add-special-tokens",
        choices=("auto", "always", "never"),
        default=RadixConfig.add_special_tokens,
        help="before a text that begins anew; auto does as the tokenizer's own model (%(default)s)",
    )

    parser.add_argument_group("plug-ins").add_argument(
        "--middleware",
        action="append",
        metavar="pkg.mod:Class",
        help=f"repeatable, the first one outermost; '{NO_MIDDLEWARE}' for a plain router ({RADIX_TREE_MIDDLEWARE})",
    )
    return parser


def config_from_args(args: argparse.Namespace) -> RouterConfig:
    """The configuration that the flags describe. BadRequestError tells which flag is wrong."""
    middlewares = tuple(args.middleware or (RADIX_TREE_MIDDLEWARE,))
    if NO_MIDDLEWARE in middlewares:
        if len(middlewares) > 1:
            raise BadRequestError(f"--middleware {NO_MIDDLEWARE} cannot be combined with another one")
        middlewares = ()
    if RADIX_TREE_MIDDLEWARE in middlewares and args.tokenizer_path is None:
        raise BadRequestError(
            "--tokenizer-path is missing: name the workers' tokenizer,"
            f" or use --middleware {NO_MIDDLEWARE} for a plain router"
        )
    return RouterConfig(
        server=ServerConfig(
            host=args.host,
            port=args.port,
            api_keys=tuple(args.api_key),
            insecure=args.insecure,
            max_body_bytes=args.max_body_bytes,
            shutdown_grace=args.shutdown_grace,
            log_level=args.log_level,
        ),
        workers=WorkersConfig(urls=tuple(normalize_url(url) for url in args.worker_urls), policy=args.policy),
        abort=AbortConfig(policy=args.abort_policy, attempts=args.abort_retries, wait=args.abort_retry_wait),
        radix=RadixConfig(
            tokenizer_path=args.tokenizer_path,
            trust_remote_code=args.trust_remote_code,
            max_tokens=args.radix_max_tokens,
            keep_versions=args.radix_keep_versions,
            force_logprobs=args.force_logprobs == "on",
            add_special_tokens=args.add_special_tokens,
            tokenizer_backend=args.tokenizer_backend,
        ),
        middlewares=middlewares,
    )


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
        configure_logging(config.server.log_level)
        app = create_app(config)
        listener = bind(config.server)
    except RouterError as error:
        flags.exit(2, f"{flags.prog}: error: {error}\n")
    with listener:
        sys.exit(serve(app, config.server, listener))


def _version() -> str:
    try:
        return metadata.version("tito-router")
    except metadata.PackageNotFoundError:
        return "(not installed)"
