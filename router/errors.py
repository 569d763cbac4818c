"""The errors this server answers with.

One small tree. The HTTP status and the machine-readable type stand on the class, the message says what to do.
Errors of libraries are mapped onto it at the seam where they enter (`upstream`, `asgi`, `sglang`), so no
handler ever has to know what aiohttp or msgspec raise.
"""

from __future__ import annotations

from typing import ClassVar


class RouterError(Exception):
    """Something the client is told about, as `{"error": {"message", "type", "code"}}`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, headers: tuple[tuple[str, str], ...] = (), **details: object) -> None:
        """`details` are further JSON fields of the error object; `headers` go onto the answer."""
        super().__init__(message)
        self.message = message
        self.headers = headers
        self.details = details

    def body(self) -> dict[str, object]:
        """The JSON body of the answer."""
        return {"error": {"message": self.message, "type": self.type, "code": self.status, **self.details}}


class BadRequestError(RouterError):
    """The request cannot be served as it is written."""

    status = 400
    type = "invalid_request_error"


class ForbiddenError(RouterError):
    """The key is a good one, and not for this."""

    status = 403
    type = "forbidden"


class NotFoundError(RouterError):
    """What the request names does not exist."""

    status = 404
    type = "not_found"


class MethodNotAllowedError(RouterError):
    """The path is one of ours, the method is not."""

    status = 405
    type = "method_not_allowed"


class NotExactError(RouterError):
    """`strict` was asked for and the answer would not be exact."""

    status = 409
    type = "not_exact"


class RequestTimeoutError(RouterError):
    """The client took too long to send its request."""

    status = 408
    type = "request_timeout"


class BodyTooLargeError(RouterError):
    """The request body is over `--max-body-bytes`."""

    status = 413
    type = "body_too_large"


class NoWorkerError(RouterError):
    """No worker can take the request."""

    status = 503
    type = "no_worker"


class QueueFullError(RouterError):
    """All workers are busy, and so many requests wait already that another one may not."""

    status = 429
    type = "queue_full"


class QueueTimeoutError(RouterError):
    """No worker had room for a request for as long as it may wait."""

    status = 408
    type = "queue_timeout"


class StoppedError(RouterError):
    """The process ended with the request in flight."""

    status = 503
    type = "stopped"


class UpstreamTimeoutError(RouterError):
    """Workers took longer than the flags allow."""

    status = 504
    type = "worker_timeout"


class UpstreamError(RouterError):
    """A worker failed before its reply began, and no other could take over."""

    status = 502
    type = "worker_error"


class ClientDisconnectedError(Exception):
    """The client is gone. Nobody is left to answer, so this has no status."""
