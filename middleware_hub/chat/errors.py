"""The errors of sessions and chats."""

from __future__ import annotations

from router.errors import BadRequestError, RouterError

_NO_RETRY = (("x-should-retry", "false"),)
"""OpenAI's and Anthropic's own clients retry a 409 unless this header forbids it."""


class UnknownSessionError(RouterError):
    """The tenant has no session of this name."""

    status = 404
    type = "not_found"


class SessionExistsError(RouterError):
    """A session of this name exists already."""

    status = 409
    type = "session_exists"


class SessionOverError(RouterError):
    """The session was finalized or aborted and takes no more turns."""

    status = 409
    type = "session_over"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=_NO_RETRY)


class CapacityError(RouterError):
    """Sessions hold as many tokens as they may."""

    status = 429
    type = "over_capacity"


def context_length_error(message: str) -> BadRequestError:
    """Return the error for a conversation that does not fit the model's context. Client libraries match on the code."""
    return BadRequestError(message, code="context_length_exceeded")
