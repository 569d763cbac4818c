"""How much one request may ask for."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from router.errors import BadRequestError, BodyTooLargeError

CHARACTERS_PER_TOKEN = 8
"""What a text may have for each of the tokens that it may have: prose and code have three to five, many spaces have more."""

_STEP = 1 << 20
_WITHIN_CHARACTERS = bytes(range(0x80, 0xC0))
"""In UTF-8, every character has one byte that is none of these."""


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
    tokens: int = 512 * 1024

    def check_replies(self, count: int) -> None:
        """Raises BadRequestError."""
        if not 1 <= count <= self.replies:
            raise BadRequestError(
                f"a request may be about 1 to {self.replies} replies (--max-batch: prompts times `n`, or texts), not {count}: "
                "make several requests of it"
            )

    def check_tokens(self, count: int) -> None:
        """Raises TextTooLongError."""
        if count > self.tokens:
            raise TextTooLongError(
                f"a prompt or text has {count} tokens: more than {self.tokens} are not encoded at a time (--max-text-tokens)"
            )

    def check_text(self, text: str) -> None:
        """Raises TextTooLongError for a text that is too long whatever its tokens are."""
        self._check_characters(len(text))

    def check_raw_text(self, raw: Raw) -> None:
        """The same before a string of JSON is read, as far as can be told then. To be called in a thread if it is long."""
        if len(memoryview(raw)) > self.characters:
            whole = bytes(raw)
            pieces = (whole[at : at + _STEP] for at in range(0, len(whole), _STEP))
            count = sum(len(piece.translate(None, _WITHIN_CHARACTERS)) for piece in pieces)
            self._check_characters(count - 6 * whole.count(b"\\"))

    @property
    def characters(self) -> int:
        """Of one text; and bytes of a chat, which has more in it than its text."""
        return CHARACTERS_PER_TOKEN * self.tokens

    def check_chat(self, body: bytes) -> None:
        """Raises TextTooLongError for a chat that is too long to be read here."""
        if len(body) > self.characters:
            raise TextTooLongError(
                f"a chat has {len(body)} bytes: more than {self.characters} are not read here, {CHARACTERS_PER_TOKEN} for each "
                f"of {self.tokens} tokens (--max-text-tokens)"
            )

    def _check_characters(self, count: int) -> None:
        if count > self.characters:
            raise TextTooLongError(
                f"a text has {count} characters: more than {self.characters} are not read at a time, {CHARACTERS_PER_TOKEN} "
                f"for each of {self.tokens} tokens (--max-text-tokens)"
            )


PROMPT_LIMITS = PromptLimits()
