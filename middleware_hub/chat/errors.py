"""The errors of sessions and chats."""

from __future__ import annotations

from router.errors import BadRequestError, RouterError

_NO_RETRY = (("x-should-retry", "false"),)
"""OpenAI's and Anthropic's own clients retry a 409 unless this header forbids it."""

CONTEXT_LENGTH = "context_length_exceeded"
"""OpenAI's code of an error for a prompt or a reply that does not fit the context. Client libraries match it."""


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


class ContextLengthError(BadRequestError):
    """A conversation does not fit the model's context. The message has OpenAI's words: agents match them, and condense.

    Attributes:
        context: the tokens that the model takes.
        prompt: those of the messages.
        completion: those that the reply may have; None if the messages alone are too many.
    """

    def __init__(self, context: int, prompt: int, completion: int | None = None) -> None:
        self.context = context
        self.prompt = prompt
        self.completion = None if prompt >= context else completion
        if self.completion is None:
            counted = f"your messages resulted in {prompt} tokens. Shorten the messages, or condense what came first."
        else:
            counted = (
                f"you requested {prompt + self.completion} tokens ({prompt} in the messages, {self.completion} in the"
                " completion). Shorten the messages or the completion."
            )
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, {counted}", code=CONTEXT_LENGTH
        )
