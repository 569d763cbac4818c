"""The command line: argv -> RouterConfig -> serve."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn, get_args

import prometheus_client

from router.app import create_app
from router.config import (
    RADIX_TREE_MIDDLEWARE,
    AbortConfig,
    BreakerConfig,
    HealthConfig,
    LogFormat,
    QueueConfig,
    RadixConfig,
    RetryConfig,
    RouterConfig,
    ServerConfig,
    TokenizerBackend,
    TraceConfig,
    WorkersConfig,
)
from router.errors import BadRequestError, RouterError
from router.logs import configure_logging
from router.policies import POLICIES
from router.server import bind, serve
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
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}", help="print it")

    server = parser.add_argument_group("server")
    server.add_argument(
        "--host",
        default=ServerConfig.host,
        help="address to listen on; one that other machines reach wants --api-key, or --insecure (%(default)s)",
    )
    server.add_argument(
        "--port", type=int, default=ServerConfig.port, help="0 takes a free one, and the log says which (%(default)s)"
    )
    server.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[TENANT:]KEY",
        help="ask for a key, one tenant's; repeatable; @FILE has one a line, and does not show in the list of processes",
    )
    server.add_argument(
        "--admin-key",
        action="append",
        default=[],
        metavar="KEY",
        help="ask for this one for what changes the fleet or shows what others do; repeatable, or @FILE",
    )
    server.add_argument("--insecure", action="store_true", help="listen beyond this machine without any --api-key")
    server.add_argument(
        "--max-body-bytes",
        type=int,
        default=ServerConfig.max_body_bytes,
        metavar="N",
        help="of a request's body; more gets 413 (%(default)s)",
    )
    server.add_argument(
        "--max-header-bytes",
        type=int,
        default=ServerConfig.max_header_bytes,
        metavar="N",
        help="of a request's first line and headers; more gets 431 (%(default)s)",
    )
    server.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="of clients; one more gets 503 (half as many as files may be open)",
    )
    server.add_argument(
        "--shutdown-grace",
        type=float,
        default=ServerConfig.shutdown_grace,
        metavar="SECONDS",
        help="what requests in flight get to finish after SIGTERM; a second signal stops at once (%(default)g)",
    )
    server.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=ServerConfig.log_level,
        help="debug has a line for each request (%(default)s)",
    )
    server.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default=ServerConfig.log_format,
        help="of the log, on stderr; json is one object a line (%(default)s)",
    )

    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--worker-urls",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="the ones to begin with; more can be added while it runs",
    )
    workers.add_argument(
        "--worker-allow",
        action="append",
        default=[],
        metavar="CIDR",
        help="a network that workers may be in; repeatable (anywhere)",
    )
    workers.add_argument(
        "--policy",
        default=WorkersConfig.policy,
        metavar="NAME",
        help=f"which worker gets a request: {', '.join(POLICIES)} (%(default)s)",
    )

    workers.add_argument(
        "--connect-timeout-secs",
        type=float,
        default=WorkersConfig.connect_timeout,
        metavar="S",
        help="what connecting to a worker may take (%(default)g)",
    )
    workers.add_argument(
        "--request-timeout-secs",
        type=float,
        metavar="S",
        help="what a reply may take, a stream until its first event; pauses count; then it is tried elsewhere (no limit)",
    )
    workers.add_argument(
        "--stream-idle-timeout-secs",
        type=float,
        metavar="S",
        help="what may pass between two pieces of a reply (no limit)",
    )

    health = parser.add_argument_group("the health of workers")
    health.add_argument(
        "--health-check-interval-secs",
        type=float,
        default=HealthConfig.interval,
        metavar="S",
        help="between two probes of a worker (%(default)g)",
    )
    health.add_argument(
        "--health-check-timeout-secs",
        type=float,
        default=HealthConfig.timeout,
        metavar="S",
        help="what an answer to one may take (%(default)g)",
    )
    health.add_argument(
        "--health-failure-threshold",
        type=int,
        default=HealthConfig.failure_threshold,
        metavar="N",
        help="bad probes in a row after which nothing more is sent to a worker (%(default)s)",
    )
    health.add_argument(
        "--health-success-threshold",
        type=int,
        default=HealthConfig.success_threshold,
        metavar="N",
        help="good ones in a row after which it is taken back (%(default)s)",
    )
    health.add_argument(
        "--version-gate",
        action="store_true",
        help="send nothing to a worker at another weight version than a call through here gave to all",
    )
    health.add_argument(
        "--cb-failure-threshold",
        type=int,
        default=BreakerConfig.failure_threshold,
        metavar="N",
        help="requests in a row that fail by a worker's fault and open its circuit breaker (%(default)s)",
    )
    health.add_argument(
        "--cb-timeout-duration-secs",
        type=float,
        default=BreakerConfig.timeout,
        metavar="S",
        help="until an open one lets a request through to see (%(default)g)",
    )
    health.add_argument(
        "--cb-success-threshold",
        type=int,
        default=BreakerConfig.success_threshold,
        metavar="N",
        help="such requests in a row that close it (%(default)s)",
    )
    health.add_argument(
        "--disable-circuit-breaker", action="store_true", help="leave it to the probes to find bad workers"
    )

    retry = parser.add_argument_group("full workers, and the queue")
    retry.add_argument(
        "--retry-max-retries",
        type=int,
        default=RetryConfig.attempts,
        metavar="N",
        help="attempts in all at workers that answer 429 or 503 (%(default)s)",
    )
    retry.add_argument(
        "--retry-initial-backoff-ms",
        type=float,
        default=RetryConfig.first_wait * 1000,
        metavar="MS",
        help="the wait before the second attempt (%(default)g)",
    )
    retry.add_argument(
        "--retry-max-backoff-ms",
        type=float,
        default=RetryConfig.longest_wait * 1000,
        metavar="MS",
        help="the longest wait, also where a worker's retry-after asks for more (%(default)g)",
    )
    retry.add_argument(
        "--retry-backoff-multiplier",
        type=float,
        default=RetryConfig.multiplier,
        metavar="X",
        help="by which each wait is longer than the last (%(default)g)",
    )
    retry.add_argument(
        "--retry-jitter-factor",
        type=float,
        default=RetryConfig.jitter,
        metavar="X",
        help="how far a wait is spread by chance, 0 to 1 (%(default)g)",
    )
    retry.add_argument(
        "--disable-retries",
        action="store_true",
        help="pass a worker's 429 or 503 on at once; what got no reply still goes elsewhere",
    )
    retry.add_argument("--max-inflight", type=int, metavar="N", help="requests at all workers together (no limit)")
    retry.add_argument(
        "--max-inflight-per-worker", type=int, metavar="N", help="requests at each of them; others wait (no limit)"
    )
    retry.add_argument(
        "--queue-size",
        type=int,
        default=QueueConfig.size,
        metavar="N",
        help="requests that may wait for room; others get 429 (%(default)s)",
    )
    retry.add_argument(
        "--queue-timeout-secs",
        type=float,
        default=QueueConfig.timeout,
        metavar="S",
        help="how long one may wait, then it gets 408 (%(default)g)",
    )

    abort = parser.add_argument_group("aborted generations")
    abort.add_argument(
        "--abort-policy",
        choices=("retry", "return"),
        default=AbortConfig.policy,
        help="what becomes of what a worker aborted; x-abort-policy overrules it for one request (%(default)s)",
    )
    abort.add_argument(
        "--abort-retries",
        type=int,
        default=AbortConfig.attempts,
        metavar="N",
        help="attempts in all, the first one counted (%(default)s)",
    )
    abort.add_argument(
        "--abort-retry-wait",
        type=float,
        default=AbortConfig.wait,
        metavar="SECONDS",
        help="between two attempts: about as long as a weight update takes (%(default)g)",
    )

    radix = parser.add_argument_group("the memory of tokens")
    radix.add_argument("--tokenizer-path", metavar="DIR-or-hub-id", help="the workers' own; the memory needs it")
    radix.add_argument(
        "--tokenizer-backend",
        choices=get_args(TokenizerBackend),
        default=RadixConfig.tokenizer_backend,
        help="what encodes texts: the workers' library, or a faster one for byte-level BPE; auto is fastokens where both"
        " give the same ids (%(default)s)",
    )
    radix.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer")
    radix.add_argument(
        "--radix-max-tokens",
        type=int,
        metavar="N",
        help="how many to remember (a quarter of the memory, at 16 bytes a token)",
    )
    radix.add_argument(
        "--radix-keep-versions",
        type=int,
        default=RadixConfig.keep_versions,
        metavar="N",
        help="evictions of what was last used so many weight versions ago count as version (%(default)s)",
    )
    radix.add_argument(
        "--force-logprobs",
        choices=("on", "off"),
        default="on",
        help="have workers send logprobs always; off, retrievals lack what clients did not ask for (%(default)s)",
    )
    radix.add_argument(
        "--add-special-tokens",
        choices=("auto", "always", "never"),
        default=RadixConfig.add_special_tokens,
        help="before a text that begins anew; auto as the tokenizer does, but no second BOS where the text spells one"
        " (%(default)s)",
    )

    trace = parser.add_argument_group("traces")
    trace.add_argument(
        "--enable-trace", action="store_true", help="export OpenTelemetry spans: pip install 'tito-router[otel]'"
    )
    trace.add_argument(
        "--otlp-traces-endpoint",
        metavar="HOST:PORT-or-URL",
        help="where they go, as OTLP over HTTP (localhost:4318, or what OTEL_EXPORTER_OTLP_ENDPOINT says)",
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
            api_keys=_keys("--api-key", args.api_key),
            admin_keys=_keys("--admin-key", args.admin_key),
            insecure=args.insecure,
            max_body_bytes=args.max_body_bytes,
            max_header_bytes=args.max_header_bytes,
            max_connections=args.max_connections,
            shutdown_grace=args.shutdown_grace,
            log_level=args.log_level,
            log_format=args.log_format,
        ),
        workers=_workers_config(args),
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
        trace=TraceConfig(enabled=args.enable_trace, endpoint=args.otlp_traces_endpoint),
        middlewares=middlewares,
    )


def _keys(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    """The keys of a flag, and those of files that it names: one a line; lines that are empty or begin with `#` have none."""
    keys: list[str] = []
    for value in given:
        if not value.startswith("@"):
            keys.append(value)
            continue
        try:
            lines = [line.strip() for line in Path(value[1:]).read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequestError(f"{flag} {value}: the file cannot be read: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise BadRequestError(f"{flag} {value}: there is no key in the file")
        keys += found
    return tuple(keys)


def _workers_config(args: argparse.Namespace) -> WorkersConfig:
    return WorkersConfig(
        urls=tuple(normalize_url(url) for url in args.worker_urls),
        allow=tuple(args.worker_allow),
        policy=args.policy,
        connect_timeout=args.connect_timeout_secs,
        request_timeout=args.request_timeout_secs,
        stream_idle_timeout=args.stream_idle_timeout_secs,
        health=HealthConfig(
            interval=args.health_check_interval_secs,
            timeout=args.health_check_timeout_secs,
            failure_threshold=args.health_failure_threshold,
            success_threshold=args.health_success_threshold,
            version_gate=args.version_gate,
        ),
        breaker=BreakerConfig(
            failure_threshold=args.cb_failure_threshold,
            success_threshold=args.cb_success_threshold,
            timeout=args.cb_timeout_duration_secs,
            enabled=not args.disable_circuit_breaker,
        ),
        retry=RetryConfig(
            attempts=1 if args.disable_retries else args.retry_max_retries,
            first_wait=args.retry_initial_backoff_ms / 1000,
            longest_wait=args.retry_max_backoff_ms / 1000,
            multiplier=args.retry_backoff_multiplier,
            jitter=args.retry_jitter_factor,
        ),
        queue=QueueConfig(
            max_inflight=args.max_inflight,
            max_inflight_per_worker=args.max_inflight_per_worker,
            size=args.queue_size,
            timeout=args.queue_timeout_secs,
        ),
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


def _version() -> str:
    try:
        return metadata.version("tito-router")
    except metadata.PackageNotFoundError:
        return "(not installed)"
