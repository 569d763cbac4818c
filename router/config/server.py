"""The server: its address, its limits for clients, its logs and traces."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from router.config.flag import NOT_NEGATIVE, Section, at_least, between, flag
from router.errors import BadRequestError

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class ServerConfig(Section):
    """The address to listen on, and the limits on clients. Times are in seconds."""

    TITLE = "server"

    host: str = flag(
        "--host", "127.0.0.1", "address to listen on; unless local, it needs --api-key or --insecure", metavar="HOST"
    )
    port: int = flag(
        "--port", 30000, "port; 0 takes a free one, which the log names", metavar="PORT", limit=between(0, 65535)
    )
    router_id: str | None = flag(
        "--router-id",
        None,
        "readable name of this router in GET /routers and in the logs of other routers",
        metavar="NAME",
        unset="host, port and process",
    )
    api_keys: tuple[str, ...] = flag(
        "--api-key",
        (),
        "key that clients must send, and the tenant it belongs to; repeatable; @FILE has one key per line, which the list of"
        " processes does not show",
        metavar="[TENANT:]KEY",
        repr=False,
    )
    admin_keys: tuple[str, ...] = flag(
        "--admin-key",
        (),
        "key for requests that change the fleet or show what other clients do; repeatable, or @FILE",
        metavar="KEY",
        repr=False,
    )
    insecure: bool = flag("--insecure", False, "listen on any address without an --api-key")
    max_body_bytes: int = flag(
        "--max-body-bytes", 32 * 1024 * 1024, "largest body of a request, on any route; a larger one gets 413"
    )
    body_timeout: float = flag(
        "--body-timeout-secs", 30.0, "longest pause between two pieces of a body; then the request gets 408"
    )
    write_timeout: float = flag(
        "--write-timeout-secs",
        600.0,
        "how long a client may read nothing of a reply that waits for it; then its connection ends, and its request with it",
    )
    max_header_bytes: int = flag(
        "--max-header-bytes", 65536, "largest request line and headers; larger ones get 431", limit=at_least(1024)
    )
    max_connections: int | None = flag(
        "--max-connections", None, "most connections; one more gets 503", unset="half as many as files may be open"
    )
    idle_timeout: int = flag(
        "--idle-timeout-secs", 120, "how long to keep a connection between two requests", metavar="SECONDS"
    )
    max_batch: int = flag("--max-batch", 8192, "most replies to one request, its prompts times `n`; more gets 400")
    shutdown_grace: float = flag(
        "--shutdown-grace",
        180.0,
        "time to finish after SIGTERM, Ctrl-C or SIGHUP; a second signal stops at once",
        limit=NOT_NEGATIVE,
    )
    processes: int = flag(
        "--processes", 1, "routers that share the port, each in a process of its own; more than one needs --store"
    )
    hang_timeout: float = flag(
        "--hang-timeout-secs",
        60.0,
        "with --processes: how long the event loop of one of them may stand still; then it is killed and started again",
    )
    log_level: LogLevel = flag("--log-level", "info", "least severe messages to log; debug logs every request")
    log_format: LogFormat = flag("--log-format", "text", "format of the log on stderr; json is one object per line")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in ("--host", self.host), ("--router-id", self.router_id or ""):
            if not _is_text(value):
                raise BadRequestError(f"{name} {value!r} is not UTF-8")
        if not self.api_keys and not self.insecure and not _is_loopback(self.host):
            raise BadRequestError(
                f"--host {self.host} lets other machines in: set --api-key, or --insecure to let everyone in"
                + (" (--admin-key alone leaves generating free)" if self.admin_keys else "")
            )


@dataclass(frozen=True)
class TraceConfig(Section):
    """Whether to export spans, and where to. An `endpoint` of None leaves the address to the exporter."""

    TITLE = "traces"

    enabled: bool = flag("--enable-trace", False, "export OpenTelemetry spans: pip install 'tito-router[otel]'")
    endpoint: str | None = flag(
        "--otlp-traces-endpoint",
        None,
        "where to send spans, as OTLP over HTTP",
        metavar="HOST:PORT-or-URL",
        unset="localhost:4318, or what OTEL_EXPORTER_OTLP_ENDPOINT says",
    )

    def __post_init__(self) -> None:
        try:
            _ = self.url
        except ValueError as error:
            raise BadRequestError(
                f"--otlp-traces-endpoint must be HOST:PORT or an http URL, not {self.endpoint!r}"
            ) from error

    @property
    def url(self) -> str | None:
        """The URL to post spans to; the standard's path is added to one without a path."""
        if self.endpoint is None:
            return None
        url = self.endpoint if "://" in self.endpoint else f"http://{self.endpoint}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(url)
        return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # Python keeps the bytes of a command line that are no text as surrogates
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
