"""SGLang's incremental detokenization (`DetokenizerManager._decode_batch_token_id_output`), step by step.

Text is decoded in chunks, each primed with what went before (five tokens of the prompt at first), and a chunk that ends in
U+FFFD is not committed. Stop strings are cut out of the text, which is without special tokens, although they were found in
a text that has them: so a stop string can end a reply and still not be in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.embedded.engine.sampling import Sampling
from router.embedded.models.vocabulary import Vocabulary

_PRIMING = 5  # INIT_INCREMENTAL_DETOKENIZATION_OFFSET

_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class Detokenizer:
    """The text of one reply, chunk by chunk."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._ids = list(prompt_ids[-_PRIMING:])
        self._surr = 0  # where the priming begins
        self._read = len(self._ids)  # where what is not committed yet begins
        self._committed = ""
        self._sent = 0

    def push(self, ids: Sequence[int], finish: dict[str, Any] | None) -> str:
        """Take more ids, and the finish reason with the last of them; return the text to be sent on."""
        self._ids.extend(ids)
        skip = self._sampling.skip_special_tokens
        pending = self._trim_token(self._ids[self._surr :], finish)
        primed = self._vocabulary.decode(self._ids[self._surr : self._read], skip_special_tokens=skip)
        new = self._vocabulary.decode(pending, skip_special_tokens=skip)[len(primed) :]
        already = self._sent - len(self._committed)
        if finish is not None:
            text = self._trim_string(self._committed + new, finish)
            out = text[self._sent :]
            self._sent = len(text)
            return out
        if new and not new.endswith("�"):
            self._committed += new
            self._surr, self._read = self._read, len(self._ids)
            self._sent = len(self._committed)
            return new[already:]
        printable = _printable(new)
        self._sent = len(self._committed) + len(printable)
        return printable[already:]

    def _trim_token(self, ids: list[int], finish: dict[str, Any] | None) -> list[int]:
        if finish is None or not isinstance(finish.get("matched"), int) or self._sampling.no_stop_trim:
            return ids
        return ids[:-1]

    def _trim_string(self, text: str, finish: dict[str, Any]) -> str:
        matched = finish.get("matched")
        if not isinstance(matched, str) or (at := text.find(matched)) < 0:
            return text
        return text[: at + len(matched)] if self._sampling.no_stop_trim else text[:at]


def _printable(text: str) -> str:
    """`sglang.utils.find_printable_text`: the whole words of a text that may still change at its end."""
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _CJK)
