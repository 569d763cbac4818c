"""A reply that is sampled or scripted token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from worker.engine.detokenizer import Detokenizer
from worker.engine.records import ABORTED, FinishReason, length, stop
from worker.engine.sample import ReplyRequest, WorkerSample
from worker.engine.script import ReplyScript
from worker.engine.source import SamplingParams, Source
from worker.vocabulary import EngineVocabulary


class GeneratedReply(WorkerSample):
    """Follows its script, then samples from a source."""

    plain_interval = 50  # SGLANG_FORCE_STREAM_INTERVAL

    def __init__(self, vocabulary: EngineVocabulary, source: Source, request: ReplyRequest, seed: str) -> None:
        prompt_ids, sampling, returns = request.input_ids, request.sampling, request.returns
        super().__init__(request)
        self.burst = source.burst
        self.seed = seed
        self._first = None if request.handover is None else request.handover.first
        self._eos_id = vocabulary.eos_id
        self._distributions = source.begin(request.read_ids, sampling, seed)
        self._stopping = Stopping(vocabulary, sampling, request.script)
        self._detokenizer = Detokenizer(vocabulary, prompt_ids, sampling)
        self._text = ""
        self._decoded = 0
        self._entries: list[tuple[float, int, None]] = []
        if returns.logprobs and returns.start >= 0:
            self._read(returns.start, returns.top, returns.chosen)

    def advance(self, count: int, version: str) -> None:
        for _ in range(count):
            self._sample()
            self.finish = self._stopping.reason(self.output_ids)
            if self.finish is not None:
                break
        self.versions.extend(version, len(self.output_ids))

    def _sample(self) -> None:
        ids, script, returns = self.output_ids, self.request.script, self.request.returns
        at = len(ids)
        place = self._distributions.next(ids)
        if at < len(script.ids):
            token = script.ids[at]
        elif script.finish == "eos":
            token = self._eos_id
        else:
            token = place.draw()
        logprob = script.logprobs[at] if at < len(script.logprobs) else place.logprob(token)
        if self._first is not None and not at:
            token, logprob = self._first
        if returns.top:
            self.details.output_top.append(place.top((logprob, token), returns.top))
        if returns.chosen:
            self.details.output_chosen.append(place.chosen(returns.chosen))
        ids.append(token)
        self.logprobs.append(logprob)

    def text(self) -> str:
        if self._decoded < len(self.output_ids) or self.finish is not None:
            self._text += self._detokenizer.push(self.output_ids[self._decoded :], self.finish)
            self._decoded = len(self.output_ids)
        return self._text

    def entries(self, start: int, end: int) -> list[tuple[float, int, None]]:
        known = len(self._entries)
        self._entries += [
            (logprob, token, None)
            for logprob, token in zip(self.logprobs[known:end], self.output_ids[known:end], strict=True)
        ]
        return self._entries[start:end]

    def holds_back(self) -> bool:
        return self._stopping.may_begin(self.output_ids)

    def _read(self, start: int, top: int, chosen: Sequence[int]) -> None:
        # The first of them has no logprob: the engine computes logprobs from this token on, so for the tokens after it.
        details, prompt = self.details, self.request.input_ids
        inside = {at for image in self.request.images for at in range(image.start, image.start + image.length)}
        for at in range(start, len(prompt)):
            place = self._distributions.read(at) if at > start else None
            # SGLang says 0 for the ids of an image.
            scored = (place.logprob(prompt[at]) if place else None, 0 if at in inside else prompt[at])
            details.prompt.append(scored)
            details.prompt_top.append(place.top(scored, top) if place and top else None)
            details.prompt_chosen.append(place.chosen(chosen) if place and chosen else None)


class Stopping:
    """The stop conditions of one reply, in SGLang's order: stop strings, patterns, tokens, length."""

    def __init__(self, vocabulary: EngineVocabulary, sampling: SamplingParams, script: ReplyScript) -> None:
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
