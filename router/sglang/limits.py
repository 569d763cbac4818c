"""How much one request may ask for."""

from __future__ import annotations

import msgspec

from router.errors import BadRequestError, BodyTooLargeError

CHARACTERS_PER_TOKEN = 8
"""What a text may have for each of the tokens that it may have: prose and code have three to five, many spaces have more."""


class TextTooLongError(BodyTooLargeError):
    """A text, or a prompt, has more tokens than `--max-text-tokens`."""

    type = "text_too_long"


class PromptLimits(msgspec.Struct, frozen=True):
    """The limits for a request's prompts.

    Attributes:
        replies: how many a request may ask for: its prompts times `n`.
        tokens: of one prompt.
    """

    replies: int = 8192
    tokens: int = 1024 * 1024

    def check_replies(self, count: int) -> None:
        """Raises BadRequestError."""
        if not 1 <= count <= self.replies:
            raise BadRequestError(
                f"`n` must be at least 1, and a request must not ask for more than {self.replies} replies, prompts times `n` "
                "(--max-batch): make several requests of it"
            )

    def check_tokens(self, count: int) -> None:
        """Raises TextTooLongError."""
        if count > self.tokens:
            raise TextTooLongError(
                f"a prompt or text has {count} tokens: more than {self.tokens} are not encoded at a time (--max-text-tokens)"
            )

    def check_text(self, text: str) -> None:
        """Raises TextTooLongError for a text that is too long whatever its tokens are."""
        most = CHARACTERS_PER_TOKEN * self.tokens
        if len(text) > most:
            raise TextTooLongError(
                f"a text has {len(text)} characters: more than {most} are not read at a time, {CHARACTERS_PER_TOKEN} for each "
                f"of {self.tokens} tokens (--max-text-tokens)"
            )


PROMPT_LIMITS = PromptLimits()
