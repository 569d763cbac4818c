"""When a reply ends. The order is SGLang's: stop strings, patterns, tokens, length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from router.embedded.engine.finish import ABORTED, FinishReason, length, stop
from router.embedded.engine.sampling import SamplingParams
from router.embedded.engine.script import Script
from router.embedded.models.vocabulary import EngineVocabulary


class Stopping:
    """The stop conditions of one reply."""

    def __init__(self, vocabulary: EngineVocabulary, sampling: SamplingParams, script: Script) -> None:
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._script = script
        self._ids = frozenset() if sampling.ignore_eos else vocabulary.eos_ids | sampling.stop_token_ids
        # How many last tokens are searched: one more than the longest stop has when it is encoded.
        self._window = 0
        if sampling.stop or sampling.stop_regex:
            self._window = 1 + max(
                _longest(sampling.stop, lambda text: _encoded_length(vocabulary, text)),
                _longest(sampling.stop_regex, _pattern_length),
            )

    def reason(self, output_ids: Sequence[int]) -> FinishReason | None:
        """Return why the last of these tokens ends the reply; None if it does not."""
        sampling, script, count = self._sampling, self._script, len(output_ids)
        if self._window:
            tail = self._tail(output_ids)
            found = [text for text in sampling.stop if text in tail]
            found += [pattern for pattern in sampling.stop_regex if re.search(pattern, tail)]
            if found:
                return stop(found[0])
        if output_ids[-1] in self._ids:
            return stop(output_ids[-1])
        if count >= sampling.max_new_tokens:
            return length(sampling.max_new_tokens)
        if count >= len(script.ids) and script.finish == "length":
            return length(count)
        if count >= len(script.ids) and script.finish == "abort":
            return dict(ABORTED)
        return None

    def may_begin(self, output_ids: Sequence[int]) -> bool:
        """Return whether the end of the text may begin a stop string; a stream then waits."""
        if not self._sampling.stop:
            return False
        tail = self._tail(output_ids)
        return any(
            text in tail or any(tail.endswith(text[:size]) for size in range(1, len(text) + 1))
            for text in self._sampling.stop
            if text
        )

    def _tail(self, output_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(output_ids[-self._window :], skip_special_tokens=False)


def _longest(items: Sequence[str], measure: Callable[[str], int]) -> int:
    return max((measure(item) for item in items), default=0)


@lru_cache(maxsize=256)
def _encoded_length(vocabulary: EngineVocabulary, text: str) -> int:
    return len(vocabulary.encode_bare(text))


@lru_cache(maxsize=256)
def _pattern_length(pattern: str) -> int:
    # SGLang measures a pattern by the longest text it can match. An unbounded pattern gets a generous window here.
    pieces = re.sub(r"\\.|\[[^]]*\]", "x", pattern)
    return 64 if re.search(r"[*+{]", pieces) else len(pieces)
