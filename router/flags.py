"""The flags, and the configuration that they describe. Names follow SGLang's router where it has one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn, get_args

from router.config import (
    CALL_PARSERS,
    RADIX_TREE_MIDDLEWARE,
    REASONING_PARSERS,
    SESSIONS_MIDDLEWARE,
    AbortConfig,
    BreakerConfig,
    CacheAwareConfig,
    HealthConfig,
    History,
    LogFormat,
    QueueConfig,
    RadixConfig,
    RetryConfig,
    RouterConfig,
    ServerConfig,
    SessionsConfig,
    TokenizerBackend,
    TraceConfig,
    WorkersConfig,
)
from router.errors import BadRequestError
from router.policies import POLICIES
from router.workers.worker import normalize_url

NO_MIDDLEWARE = "none"

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

    for title, add in (
        ("server", _server_flags),
        ("workers", _workers_flags),
        ("the policy cache_aware", _cache_aware_flags),
        ("the health of workers", _health_flags),
        ("full workers, and the queue", _retry_flags),
        ("aborted generations", _abort_flags),
        ("the memory of tokens", _radix_flags),
        ("agent sessions", _session_flags),
        ("traces", _trace_flags),
        ("plug-ins", _plugin_flags),
    ):
        add(parser.add_argument_group(title))
    return parser


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        default=ServerConfig.host,
        help="address to listen on; one that other machines reach wants --api-key, or --insecure (%(default)s)",
    )
    group.add_argument(
        "--port", type=int, default=ServerConfig.port, help="0 takes a free one, and the log says which (%(default)s)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[TENANT:]KEY",
        help="ask for a key, one tenant's; repeatable; @FILE has one a line, and does not show in the list of processes",
    )
    group.add_argument(
        "--admin-key",
        action="append",
        default=[],
        metavar="KEY",
        help="ask for this one for what changes the fleet or shows what others do; repeatable, or @FILE",
    )
    group.add_argument("--insecure", action="store_true", help="listen beyond this machine without any --api-key")
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=ServerConfig.max_body_bytes,
        metavar="N",
        help="of a request's body, whatever it is for; more gets 413 (%(default)s)",
    )
    group.add_argument(
        "--body-timeout-secs",
        type=float,
        default=ServerConfig.body_timeout,
        metavar="S",
        help="between two pieces of a body; then the request gets 408 (%(default)g)",
    )
    group.add_argument(
        "--max-header-bytes",
        type=int,
        default=ServerConfig.max_header_bytes,
        metavar="N",
        help="of a request's first line and headers; more gets 431 (%(default)s)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="of clients; one more gets 503 (half as many as files may be open)",
    )
    group.add_argument(
        "--idle-timeout-secs",
        type=int,
        default=ServerConfig.idle_timeout,
        metavar="S",
        help="that a connection is kept between two requests (%(default)s)",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        default=ServerConfig.max_batch,
        metavar="N",
        help="replies that one request may ask for, its prompts times `n`; more gets 400 (%(default)s)",
    )
    group.add_argument(
        "--shutdown-grace",
        type=float,
        default=ServerConfig.shutdown_grace,
        metavar="SECONDS",
        help="what requests in flight get to finish after SIGTERM; a second signal stops at once (%(default)g)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=ServerConfig.log_level,
        help="debug has a line for each request (%(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default=ServerConfig.log_format,
        help="of the log, on stderr; json is one object a line (%(default)s)",
    )


def _workers_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--worker-urls",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="the ones to begin with; more can be added while it runs",
    )
    group.add_argument(
        "--worker-allow",
        action="append",
        default=[],
        metavar="CIDR",
        help="a network that workers may be in; repeatable (anywhere)",
    )
    group.add_argument(
        "--policy",
        default=WorkersConfig.policy,
        metavar="NAME",
        help=f"which worker gets a request: {', '.join(POLICIES)} (%(default)s)",
    )

    group.add_argument(
        "--max-idle-secs",
        type=float,
        default=WorkersConfig.max_idle,
        metavar="S",
        help="of the policy manual: after which a key that nobody uses is forgotten (%(default)g)",
    )
    group.add_argument(
        "--connect-timeout-secs",
        type=float,
        default=WorkersConfig.connect_timeout,
        metavar="S",
        help="what connecting to a worker may take (%(default)g)",
    )
    group.add_argument(
        "--request-timeout-secs",
        type=float,
        metavar="S",
        help="what a reply may take, a stream until its first event; pauses count; then it is tried elsewhere (no limit)",
    )
    group.add_argument(
        "--stream-idle-timeout-secs",
        type=float,
        metavar="S",
        help="what may pass between two pieces of a reply (no limit)",
    )
    group.add_argument(
        "--fleet-timeout",
        type=float,
        default=WorkersConfig.fleet_timeout,
        metavar="S",
        help="what one worker may take to answer a call to all of them; a transfer of weights takes as long as its worker"
        " answers probes, and that long after its last answer (%(default)g)",
    )


def _cache_aware_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cache-threshold",
        type=float,
        default=CacheAwareConfig.threshold,
        metavar="SHARE",
        help="of a prompt: more than that has to be cached for its worker to be taken (%(default)g)",
    )
    group.add_argument(
        "--balance-abs-threshold",
        type=int,
        default=CacheAwareConfig.balance_abs,
        metavar="N",
        help="requests in flight that the busiest worker may have more than the idlest, whatever is cached (%(default)s)",
    )
    group.add_argument(
        "--balance-rel-threshold",
        type=float,
        default=CacheAwareConfig.balance_rel,
        metavar="X",
        help="and how many times as many; the least loaded is taken where both are exceeded (%(default)g)",
    )
    group.add_argument(
        "--eviction-interval-secs",
        type=float,
        default=CacheAwareConfig.eviction_interval,
        metavar="S",
        help="between two looks whether too much is remembered (%(default)g)",
    )
    group.add_argument(
        "--max-tree-size",
        type=int,
        default=CacheAwareConfig.max_tree_size,
        metavar="N",
        help="characters, and as many ids, that are remembered of prompts (%(default)s)",
    )
    group.add_argument(
        "--kv-events",
        action="store_true",
        help="follow what the workers say that they have cached, those that were started with --kv-events-config",
    )
    group.add_argument(
        "--policy-snapshot",
        type=Path,
        metavar="FILE",
        help="where what is remembered is kept over a restart: read at the start, written while it runs and at the end",
    )
    group.add_argument(
        "--policy-snapshot-interval-secs",
        type=float,
        default=CacheAwareConfig.snapshot_interval,
        metavar="S",
        help="between two times that it is written (%(default)g)",
    )


def _health_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--health-check-interval-secs",
        type=float,
        default=HealthConfig.interval,
        metavar="S",
        help="between two probes of a worker (%(default)g)",
    )
    group.add_argument(
        "--health-check-timeout-secs",
        type=float,
        default=HealthConfig.timeout,
        metavar="S",
        help="what an answer to one may take (%(default)g)",
    )
    group.add_argument(
        "--health-failure-threshold",
        type=int,
        default=HealthConfig.failure_threshold,
        metavar="N",
        help="bad probes in a row after which nothing more is sent to a worker (%(default)s)",
    )
    group.add_argument(
        "--health-success-threshold",
        type=int,
        default=HealthConfig.success_threshold,
        metavar="N",
        help="good ones in a row after which it is taken back (%(default)s)",
    )
    group.add_argument(
        "--version-gate",
        action="store_true",
        help="send nothing to a worker at another weight version than a call through here gave to all",
    )
    group.add_argument(
        "--cb-failure-threshold",
        type=int,
        default=BreakerConfig.failure_threshold,
        metavar="N",
        help="requests in a row that fail by a worker's fault and open its circuit breaker (%(default)s)",
    )
    group.add_argument(
        "--cb-timeout-duration-secs",
        type=float,
        default=BreakerConfig.timeout,
        metavar="S",
        help="until an open one lets a request through to see (%(default)g)",
    )
    group.add_argument(
        "--cb-success-threshold",
        type=int,
        default=BreakerConfig.success_threshold,
        metavar="N",
        help="such requests in a row that close it (%(default)s)",
    )
    group.add_argument(
        "--disable-circuit-breaker", action="store_true", help="leave it to the probes to find bad workers"
    )


def _retry_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--retry-max-retries",
        type=int,
        default=RetryConfig.attempts,
        metavar="N",
        help="attempts in all at workers that answer 429 or 503 (%(default)s)",
    )
    group.add_argument(
        "--retry-initial-backoff-ms",
        type=float,
        default=RetryConfig.first_wait * 1000,
        metavar="MS",
        help="the wait before the second attempt (%(default)g)",
    )
    group.add_argument(
        "--retry-max-backoff-ms",
        type=float,
        default=RetryConfig.longest_wait * 1000,
        metavar="MS",
        help="the longest wait, also where a worker's retry-after asks for more (%(default)g)",
    )
    group.add_argument(
        "--retry-backoff-multiplier",
        type=float,
        default=RetryConfig.multiplier,
        metavar="X",
        help="by which each wait is longer than the last (%(default)g)",
    )
    group.add_argument(
        "--retry-jitter-factor",
        type=float,
        default=RetryConfig.jitter,
        metavar="X",
        help="how far a wait is spread by chance, 0 to 1 (%(default)g)",
    )
    group.add_argument(
        "--disable-retries",
        action="store_true",
        help="pass a worker's 429 or 503 on at once; what got no reply still goes elsewhere",
    )
    group.add_argument("--max-inflight", type=int, metavar="N", help="requests at all workers together (no limit)")
    group.add_argument(
        "--max-inflight-per-worker", type=int, metavar="N", help="requests at each of them; others wait (no limit)"
    )
    group.add_argument(
        "--queue-size",
        type=int,
        default=QueueConfig.size,
        metavar="N",
        help="requests that may wait for room; others get 429 (%(default)s)",
    )
    group.add_argument(
        "--queue-timeout-secs",
        type=float,
        default=QueueConfig.timeout,
        metavar="S",
        help="how long one may wait, then it gets 408 (%(default)g)",
    )


def _abort_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--abort-policy",
        choices=("retry", "return"),
        default=AbortConfig.policy,
        help="what becomes of what a worker aborted; x-abort-policy overrules it for one request (%(default)s)",
    )
    group.add_argument(
        "--abort-retries",
        type=int,
        default=AbortConfig.attempts,
        metavar="N",
        help="attempts in all, the first one counted (%(default)s)",
    )
    group.add_argument(
        "--abort-retry-wait",
        type=float,
        default=AbortConfig.wait,
        metavar="SECONDS",
        help="between two attempts: about as long as a weight update takes (%(default)g)",
    )


def _radix_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer-path", metavar="DIR-or-hub-id", help="the workers' own; the memory needs it")
    group.add_argument(
        "--tokenizer-backend",
        choices=get_args(TokenizerBackend),
        default=RadixConfig.tokenizer_backend,
        help="what encodes texts: the workers' library, or a faster one for byte-level BPE; auto is fastokens where both"
        " give the same ids (%(default)s)",
    )
    group.add_argument(
        "--max-text-tokens",
        type=int,
        default=RadixConfig.max_text_tokens,
        metavar="N",
        help="of one text or prompt, and 8 characters for each; more gets 413 (%(default)s)",
    )
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer")
    group.add_argument(
        "--radix-max-tokens",
        type=int,
        metavar="N",
        help="how many to remember (a quarter of the memory, at 16 bytes a token)",
    )
    group.add_argument(
        "--radix-keep-versions",
        type=int,
        default=RadixConfig.keep_versions,
        metavar="N",
        help="evictions of what was last used so many weight versions ago count as version (%(default)s)",
    )
    group.add_argument(
        "--radix-unretrieved-versions",
        type=int,
        metavar="N",
        help="a reply that nobody retrieved in so many weight versions is given up first (never: it goes after all others)",
    )
    group.add_argument(
        "--force-logprobs",
        choices=("on", "off"),
        default="on",
        help="have workers send logprobs always; off, retrievals lack what clients did not ask for (%(default)s)",
    )
    group.add_argument(
        "--add-special-tokens",
        choices=("auto", "always", "never"),
        default=RadixConfig.add_special_tokens,
        help="before a text that begins anew; auto as the tokenizer does, but no second BOS where the text spells one"
        " (%(default)s)",
    )


def _session_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--no-sessions",
        action="store_true",
        help="leave them out, and chats without a session to the workers; with --middleware they are as it says",
    )
    group.add_argument(
        "--implicit-sessions",
        action="store_true",
        help="an `X-Session-Id` that names no session yet opens one; else it only routes",
    )
    group.add_argument(
        "--session-ttl-secs",
        type=float,
        default=SessionsConfig.ttl,
        metavar="S",
        help="without a request, after which one is forgotten; `ttl_s` of a session overrules it (%(default)g)",
    )
    group.add_argument(
        "--session-max-tokens",
        type=int,
        metavar="N",
        help="that all of them may hold; one more turn gets 429 (a quarter of the memory, at 16 bytes a token)",
    )
    group.add_argument(
        "--session-match",
        default=SessionsConfig.match,
        metavar="NAME",
        help="when a message is one that is known: canonical, strict, or pkg.mod:function (%(default)s)",
    )
    group.add_argument(
        "--history",
        choices=get_args(History),
        default=SessionsConfig.history,
        help="where a template writes earlier turns anew: keep what the model saw, or begin a branch with what the template"
        " makes of it, in which turns keep their ids where they can (%(default)s)",
    )
    group.add_argument(
        "--verify-rate",
        type=float,
        default=SessionsConfig.verify_rate,
        metavar="X",
        help="the share of turns whose ids are compared with a rendering of the whole conversation (%(default)g)",
    )
    group.add_argument(
        "--orphan-grace",
        type=float,
        default=SessionsConfig.orphan_grace,
        metavar="S",
        help="how long a turn goes on when its client has left, for one that asks again (%(default)g)",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens of a prompt and its reply, in chats and `prompt_segments`; more gets 400 before a worker is asked"
        " (the worker decides)",
    )
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template in the place of the tokenizer's own")
    group.add_argument(
        "--tool-call-parser",
        default=SessionsConfig.tool_call_parser,
        metavar="NAME",
        help=f"how tool calls are read: {', '.join(CALL_PARSERS)}, or pkg.mod:Class; auto asks the template (%(default)s)",
    )
    group.add_argument(
        "--reasoning-parser",
        default=SessionsConfig.reasoning_parser,
        metavar="NAME",
        help=f"how reasoning is told from content: {', '.join(REASONING_PARSERS)}; auto asks the template (%(default)s)",
    )


def _trace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--enable-trace", action="store_true", help="export OpenTelemetry spans: pip install 'tito-router[otel]'"
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="HOST:PORT-or-URL",
        help="where they go, as OTLP over HTTP (localhost:4318, or what OTEL_EXPORTER_OTLP_ENDPOINT says)",
    )


def _plugin_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--middleware",
        action="append",
        metavar="pkg.mod:Class",
        help=f"repeatable, the first one outermost; '{NO_MIDDLEWARE}' for a plain router"
        f" ({SESSIONS_MIDDLEWARE}, {RADIX_TREE_MIDDLEWARE})",
    )


def config_from_args(args: argparse.Namespace) -> RouterConfig:
    """The configuration that the flags describe. BadRequestError tells which flag is wrong."""
    sessions = () if args.no_sessions else (SESSIONS_MIDDLEWARE,)
    middlewares = tuple(args.middleware or (*sessions, RADIX_TREE_MIDDLEWARE))
    if NO_MIDDLEWARE in middlewares:
        if len(middlewares) > 1:
            raise BadRequestError(f"--middleware {NO_MIDDLEWARE} cannot be combined with another one")
        middlewares = ()
    if {RADIX_TREE_MIDDLEWARE, SESSIONS_MIDDLEWARE} & set(middlewares) and args.tokenizer_path is None:
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
            body_timeout=args.body_timeout_secs,
            idle_timeout=args.idle_timeout_secs,
            max_batch=args.max_batch,
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
            unretrieved_versions=args.radix_unretrieved_versions,
            force_logprobs=args.force_logprobs == "on",
            add_special_tokens=args.add_special_tokens,
            max_text_tokens=args.max_text_tokens,
            tokenizer_backend=args.tokenizer_backend,
        ),
        sessions=SessionsConfig(
            ttl=args.session_ttl_secs,
            max_tokens=args.session_max_tokens,
            max_context=args.max_context,
            history=args.history,
            verify_rate=args.verify_rate,
            orphan_grace=args.orphan_grace,
            match=args.session_match,
            implicit=args.implicit_sessions,
            chat_template=args.chat_template,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
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
        max_idle=args.max_idle_secs,
        cache_aware=CacheAwareConfig(
            threshold=args.cache_threshold,
            balance_abs=args.balance_abs_threshold,
            balance_rel=args.balance_rel_threshold,
            eviction_interval=args.eviction_interval_secs,
            max_tree_size=args.max_tree_size,
            snapshot=args.policy_snapshot,
            snapshot_interval=args.policy_snapshot_interval_secs,
            kv_events=args.kv_events,
        ),
        connect_timeout=args.connect_timeout_secs,
        request_timeout=args.request_timeout_secs,
        stream_idle_timeout=args.stream_idle_timeout_secs,
        fleet_timeout=args.fleet_timeout,
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


def _version() -> str:
    try:
        return metadata.version("tito-router")
    except metadata.PackageNotFoundError:
        return "(not installed)"
