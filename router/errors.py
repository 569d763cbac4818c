"""The errors that the router answers with.

The class has the HTTP status and the machine-readable type; the message says what to do. Errors of libraries are mapped to
these classes where they enter (`http/upstream`, `http/bodies`, `engines/form`), so no handler has to know what aiohttp or
msgspec raises.
"""

from __future__ import annotations

from typing import ClassVar


class RouterError(Exception):
    """An error that the client sees, as `{"error": {"message", "type", "code"}}`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, headers: tuple[tuple[str, str], ...] = (), **details: object) -> None:
        """`details` are further JSON fields of the error object; `headers` are added to the reply."""
        super().__init__(message)
        self.message = message
        self.headers = headers
        self.details = details

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "code": self.status, **self.details}}


class BadRequestError(RouterError):
    """The request, or the configuration, is wrong."""

    status = 400
    type = "invalid_request_error"


class UnauthorizedError(RouterError):
    """No key, or a wrong one."""

    status = 401
    type = "unauthorized"


class ForbiddenError(RouterError):
    """The key is valid, but does not permit the request."""

    status = 403
    type = "forbidden"


class NotFoundError(RouterError):
    """What the request names does not exist."""

    status = 404
    type = "not_found"


class MethodNotAllowedError(RouterError):
    """The path exists, the method does not."""

    status = 405
    type = "method_not_allowed"


class NotExactError(RouterError):
    """The request has `strict`, and the answer would not be exact."""

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


class UnsupportedEncodingError(RouterError):
    """The request body is compressed in a way that the router cannot unpack."""

    status = 415
    type = "unsupported_encoding"


class NoWorkerError(RouterError):
    """No worker can take the request."""

    status = 503
    type = "no_worker"


class QueueFullError(RouterError):
    """All workers are busy and the queue is full."""

    status = 429
    type = "queue_full"


class EndedInQueueError(RouterError):
    """A client ended the generation while it waited for a worker with room."""

    status = 503
    type = "aborted"


class QueueTimeoutError(RouterError):
    """No worker had room in time."""

    status = 408
    type = "queue_timeout"


class StoppedError(RouterError):
    """The router stopped with the request in flight."""

    status = 503
    type = "stopped"


class UpstreamTimeoutError(RouterError):
    """A worker took longer than the flags allow."""

    status = 504
    type = "worker_timeout"


class UpstreamError(RouterError):
    """A worker failed before its reply began, and no other could take over."""

    status = 502
    type = "worker_error"


class LoopError(RouterError):
    """A request of this process came back to it."""

    status = 508
    type = "loop"


class ClientDisconnectedError(Exception):
    """The client has left. There is no status, because there is no reply."""
