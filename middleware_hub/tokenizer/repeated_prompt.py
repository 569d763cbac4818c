"""Prompts that vLLM repeats in the text of their replies, and that are taken out of it here.

vLLM decodes a reply behind its prompt, and leaves out what the prompt spells. vLLM 0.32.0 fails to leave it out where that
ends with U+FFFD. It does so behind half of a character, as when a reply that was cut there is continued, and behind a text
that ends with U+FFFD itself, with nothing but special tokens behind it that the text skips:

    the prompt spells   "So: �"      half of an emoji
    sampled             "�!"         the other half, and more
    its text            "So: 😀!"    with the whole prompt in it
    taken out           "!"          as SGLang has it: a character belongs to the prompt in which it begins
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.tokenizer.vocabulary import REPLACEMENT, Vocabulary
from router.engines.json import JSON_ERRORS, decode_object

_LOOKED_AT = 32
"""Ids at the end of a prompt that show the end of its text."""


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None


class RepeatedPrompt:
    """Takes the text of one prompt out of the replies to it."""

    def __init__(self, vocabulary: Vocabulary, packed: bytes, *, skips_special: bool) -> None:
        """`packed`: the prompt's ids, as spans keep them. `skips_special`: whether special tokens are left out of the text."""
        self._vocabulary = vocabulary
        self._skips_special = skips_special
        ids = memoryview(packed).cast("i")
        self._last = ids[-_LOOKED_AT:].tolist()
        last = vocabulary.spell(self._last, skip_special=skips_special)
        self._whole = len(last.rstrip(REPLACEMENT))
        self._spelled = vocabulary.spell(ids, skip_special=skips_special) if last.endswith(REPLACEMENT) else ""

    def taken_out(self, body: bytes | Raw, before: Sequence[int] = ()) -> bytes | Raw:
        """Return a reply, or an event of a stream behind `before`, without the prompt; the same object if it is not there."""
        if not self._spelled:
            return body
        try:
            fields = decode_object(body)
            text: Any = msgspec.json.decode(fields["text"])
            ids: list[int] = msgspec.json.decode(fields["output_ids"], type=list[int])
            completed = msgspec.json.decode(fields["meta_info"], type=_Meta).completion_tokens
        except (*JSON_ERRORS, KeyError):
            return body
        if not isinstance(text, str):
            return body
        rest = self._behind(text, ids if completed is None or len(ids) >= completed else [*before, *ids])
        if rest is None:
            return body
        fields["text"] = Raw(msgspec.json.encode(rest))
        return msgspec.json.encode(fields)

    def _behind(self, text: str, ids: Sequence[int]) -> str | None:
        """Return the text behind the prompt; None if the sampled ids explain all of it."""
        vocabulary, skips = self._vocabulary, self._skips_special
        if vocabulary.spell(ids, skip_special=skips).lstrip(REPLACEMENT).startswith(text.strip(REPLACEMENT)):
            return None
        # Bytes of several characters may be one broken run, so only prompt and reply together say where the prompt ends.
        both = [*self._last, *ids]
        spelled = vocabulary.spell(both, skip_special=skips)
        end = int(vocabulary.counted(both, skip_special=skips)[len(self._last) - 1])
        for prompt in (self._spelled, self._spelled.removeprefix(" ")):  # some decoders remove the first space
            whole = prompt.rstrip(REPLACEMENT)
            if whole and text.startswith(whole):
                rest = text[len(whole) + end - self._whole :]
                if spelled[end:].startswith(rest.rstrip(REPLACEMENT)):
                    return rest
        return None
