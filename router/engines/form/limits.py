"""The limits of one request."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from router.errors import BadRequestError, BodyTooLargeError

CHARACTERS_PER_TOKEN = 8
"""Characters that a text may have per allowed token. Prose and code have three to five, runs of spaces have more."""

LONGEST_NAME = 1024
"""Characters of a request id, or of a weight version: both are kept with every reply."""

AdapterPath = Annotated[str, msgspec.Meta(max_length=4096)]
"""A `lora_path`, as long as Linux takes a path. It is kept with every reply, too."""

LONGEST_STOP = 4096
"""Characters of a stop string. A worker encodes it, and serves nobody meanwhile: a million characters take SGLang seconds."""

_STEP = 1 << 20
_WITHIN_CHARACTERS = bytes(range(0x80, 0xC0))
"""The UTF-8 continuation bytes: every character has exactly one byte that is none of these."""


class TextTooLongError(BodyTooLargeError):
    """A text or prompt has more tokens than `--max-text-tokens`."""

    type = "text_too_long"


class PromptLimits(msgspec.Struct, frozen=True):
    """The limits of a request's prompts.

    Attributes:
        replies: the replies that a request may ask for: its prompts times `n`.
        tokens: the tokens of one prompt.
        characters: the characters of one text, and the bytes of a chat, which contains more than its text; computed.
    """

    replies: int = 8192
    tokens: int = 512 * 1024
    characters: int = 0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "characters", CHARACTERS_PER_TOKEN * self.tokens)

    def check_replies(self, count: int) -> None:
        """Raise BadRequestError if a request asks for too many replies, or for none."""
        if not 1 <= count <= self.replies:
            raise BadRequestError(
                f"a request may be about 1 to {self.replies} replies (--max-batch: prompts times `n`, or texts), not {count}: "
                "make several requests of it"
            )

    def check_tokens(self, count: int) -> None:
        """Raise TextTooLongError if a prompt has too many tokens."""
        if count > self.tokens:
            raise TextTooLongError(
                f"a prompt or text has {count} tokens: more than {self.tokens} are not encoded at a time (--max-text-tokens)"
            )

    def check_text(self, text: str) -> None:
        """Raise TextTooLongError if a text has too many characters to be encoded."""
        if len(text) > self.characters:
            raise self._too_long(len(text))

    def check_raw_text(self, raw: Raw) -> None:
        """Check a JSON string before it is decoded, with a lower bound of its length. Call it in a thread for long ones."""
        if len(memoryview(raw)) > self.characters:
            whole = bytes(raw)
            pieces = (whole[at : at + _STEP] for at in range(0, len(whole), _STEP))
            count = sum(len(piece.translate(None, _WITHIN_CHARACTERS)) for piece in pieces) - 6 * whole.count(b"\\")
            count -= len(b'""')
            if count > self.characters:
                raise self._too_long(count)

    def check_chat(self, body: bytes) -> None:
        """Raise TextTooLongError if a chat's body is too long to be parsed."""
        if len(body) > self.characters:
            raise TextTooLongError(
                f"a chat has {len(body)} bytes: more than {self.characters} are not read here, {CHARACTERS_PER_TOKEN} for each "
                f"of {self.tokens} tokens (--max-text-tokens)"
            )

    def _too_long(self, count: int) -> TextTooLongError:
        return TextTooLongError(
            f"a text has {count} characters: more than {self.characters} are not read at a time, {CHARACTERS_PER_TOKEN} "
            f"for each of {self.tokens} tokens (--max-text-tokens)"
        )


PROMPT_LIMITS = PromptLimits()
