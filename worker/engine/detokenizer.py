"""SGLang's incremental detokenization (`DetokenizerManager._decode_batch_token_id_output`), step by step.

Text is decoded in chunks, each primed with the tokens before it (at first five of the prompt), and a chunk that ends in U+FFFD
is not committed. Stop strings are searched in a text with special tokens, but cut out of the text without them: so a stop
string can end a reply and not be in its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.engine.source import SamplingParams
from worker.vocabulary import EngineVocabulary

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
    """Decodes one reply, chunk by chunk."""

    def __init__(self, vocabulary: EngineVocabulary, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._ids = list(prompt_ids[-_PRIMING:])
        self._surr = 0  # where the priming begins
        self._read = len(self._ids)  # where the uncommitted ids begin
        self._committed = ""
        self._sent = 0

    def push(self, ids: Sequence[int], finish: dict[str, Any] | None) -> str:
        """Take more ids, with the last of them the finish reason; return the text to send."""
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
    """Return the whole words of a text whose end may still change, as `sglang.utils.find_printable_text` does."""
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _CJK)
