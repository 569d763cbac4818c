"""Cuts replies out of a pool made beforehand, for measuring load: a reply is a slice of the pool.

Nothing is sampled, nothing stops a reply, and no token costs any Python. `max_new_tokens` is the length, whatever else the
`sampling_params` of a request say, and only the sampled tokens have logprobs. Still a reply is consistent: its ids decode to
its text, because the pool has only tokens whose text is the same at every place.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from worker.engine.records import length
from worker.engine.sample import ReplyRequest, ReturnOptions, WorkerSample
from worker.engine.script import FREE
from worker.engine.source import float32
from worker.vocabulary import EngineVocabulary

_WORDS = 4096  # different tokens
_SIZE = 1 << 17  # tokens, 30 MB of them with their logprobs


class Pool:
    """Ids with their texts and logprobs.

    Raises:
        ValueError: the vocabulary has no token that decodes alike at every place.
    """

    def __init__(self, vocabulary: EngineVocabulary, seed: int = 0) -> None:
        rng = random.Random(seed)
        words = _words(vocabulary, rng)
        if not words:
            raise ValueError("a pool needs tokens that are words of their own, and this vocabulary has none")
        chosen = rng.choices(sorted(words), k=_SIZE)
        self.ids = chosen
        self.logprobs = [float32(-rng.expovariate(0.7)) for _ in chosen]
        self.entries = [(logprob, token, None) for logprob, token in zip(self.logprobs, chosen, strict=True)]
        self.ends = [0, *itertools.accumulate(len(words[token]) for token in chosen)]  # of each token, in `text`
        self.text = "".join(words[token] for token in chosen)
        self._rng = rng

    def place(self, length: int) -> int:
        """Return the index in the pool of a new reply of `length` tokens."""
        return self._rng.randrange(max(1, _SIZE - length))


class PooledReply(WorkerSample):
    """A slice of the pool, which grows as it is sampled."""

    burst = plain_interval = _SIZE

    def __init__(self, pool: Pool, request: ReplyRequest) -> None:
        asked = request.returns
        returns = ReturnOptions(logprobs=asked.logprobs, texts=asked.texts, prompt_ids=asked.prompt_ids)
        super().__init__(replace(request, returns=returns, script=FREE))
        self._pool = pool
        self._length = min(request.sampling.max_new_tokens, _SIZE)
        self._start = pool.place(self._length)

    def advance(self, count: int, version: str) -> None:
        count = min(count, self._length - len(self.output_ids))
        at = self._start + len(self.output_ids)
        self.output_ids += self._pool.ids[at : at + count]
        self.logprobs += self._pool.logprobs[at : at + count]
        self.versions.extend(version, len(self.output_ids))
        if len(self.output_ids) == self._length:
            self.finish = length(self._length)

    def text(self) -> str:
        ends = self._pool.ends
        return self._pool.text[ends[self._start] : ends[self._start + len(self.output_ids)]]

    def entries(self, start: int, end: int) -> list[tuple[float, int, None]]:
        return self._pool.entries[self._start + start : self._start + end]


def _words(vocabulary: EngineVocabulary, rng: random.Random) -> dict[int, str]:
    """Return ids that are a word with its space: they decode alike after each other, after a prompt, and alone."""
    tried = rng.sample(vocabulary.ordinary, min(len(vocabulary.ordinary), 8 * _WORDS))

    def decode(*ids: int) -> str:
        return vocabulary.decode(ids, skip_special_tokens=True)

    before = next((one for one in tried if decode(one).isalpha() and decode(one).isascii()), None)
    if before is None:
        return {}
    found: dict[int, str] = {}
    for token in tried:
        text = decode(before, token)[len(decode(before)) :]
        if _is_word(text):
            found[token] = text
        if len(found) == _WORDS:
            break
    return found


def _is_word(text: str) -> bool:
    return len(text) > 2 and text[0] == " " and text.isascii() and text[1:].isalpha()
