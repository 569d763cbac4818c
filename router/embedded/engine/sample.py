"""One reply while it is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.embedded.engine.detokenizer import Detokenizer
from router.embedded.engine.sampling import SamplingParams
from router.embedded.engine.script import Script
from router.embedded.engine.source import Scored, Source
from router.embedded.engine.stopping import ABORTED, FinishReason, Stopping
from router.embedded.models.vocabulary import EngineVocabulary


@dataclass(frozen=True)
class ReturnOptions:
    """What a request wants returned besides text and ids.

    Attributes:
        logprobs: any logprobs at all; without it start, top, chosen and texts do nothing.
        start: the first token of the prompt with a logprob; -1 for none.
        top: how many of the likeliest tokens at each place.
        chosen: which tokens at each place.
        texts: the text of each token with its logprob.
        prompt_ids: the ids of the prompt.
    """

    logprobs: bool = False
    start: int = -1
    top: int = 0
    chosen: tuple[int, ...] = ()
    texts: bool = False
    prompt_ids: bool = False


class Versions:
    """Which weights sampled which tokens, as runs."""

    def __init__(self) -> None:
        self._runs: list[tuple[str, int]] = []  # a version, and where its tokens end

    def extend(self, version: str, end: int) -> None:
        """Give this version to all tokens before `end` that have none yet."""
        if self._runs and self._runs[-1][0] == version:
            self._runs.pop()
        self._runs.append((version, end))

    def per_token(self) -> list[str]:
        found: list[str] = []
        for version, end in self._runs:
            found += [version] * (end - len(found))
        return found

    def spans(self, current: str, count: int) -> list[dict[str, Any]]:
        """Return `meta_info.weight_versions` of the first `count` tokens: half-open spans, at least one."""
        spans: list[dict[str, Any]] = []
        start = 0
        for version, end in self._runs:
            if start < count:
                spans.append({"version": version, "start": start, "end": min(end, count)})
            start = end
        return spans or [{"version": current, "start": 0, "end": 0}]


@dataclass
class Logprobs:
    """The logprobs of the prompt, and what a reply reports at each place besides the logprob of the sampled token."""

    prompt: list[Scored] = field(default_factory=list)
    prompt_top: list[list[Scored] | None] = field(default_factory=list)
    prompt_chosen: list[list[Scored] | None] = field(default_factory=list)
    output_top: list[list[Scored]] = field(default_factory=list)
    output_chosen: list[list[Scored]] = field(default_factory=list)


class Sample(ABC):
    """A reply as the engine runs it and the wire reports it."""

    burst: int  # how many tokens may be sampled before the other samples run
    plain_interval: int  # without a stream, the text is decoded after so many tokens

    def __init__(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, script: Script, returns: ReturnOptions
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.script = script
        self.returns = returns
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []  # of each sampled token
        self.versions = Versions()
        self.details = Logprobs()
        self.finish: FinishReason | None = None
        if sampling.max_new_tokens == 0:
            self.finish = {"type": "length", "length": 0}

    @abstractmethod
    def advance(self, count: int, version: str) -> None:
        """Sample `count` tokens under `version`, or fewer if the reply ends before."""

    @abstractmethod
    def text(self) -> str:
        """Return the text that SGLang's detokenizer has passed on, if it decodes at each of these calls."""

    @abstractmethod
    def entries(self, start: int, end: int) -> list[tuple[float, int, None]]:
        """Return a part of `output_token_logprobs`, without texts, as a new list."""

    def holds_back(self) -> bool:
        """Whether a stream waits with its text, because a stop string may have begun."""
        return False


class GeneratedReply(Sample):
    """A reply that is sampled or scripted token by token."""

    plain_interval = 50  # SGLANG_FORCE_STREAM_INTERVAL

    def __init__(
        self,
        vocabulary: EngineVocabulary,
        source: Source,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        script: Script,
        returns: ReturnOptions,
        seed: str,
    ) -> None:
        super().__init__(prompt_ids, sampling, script, returns)
        self.burst = source.burst
        self._eos_id = vocabulary.eos_id
        self._distributions = source.begin(prompt_ids, sampling, seed)
        self._stopping = Stopping(vocabulary, sampling, script)
        self._detokenizer = Detokenizer(vocabulary, prompt_ids, sampling)
        self._text = ""
        self._decoded = 0
        self._entries: list[tuple[float, int, None]] = []
        if returns.logprobs and returns.start >= 0:
            self._read()

    def advance(self, count: int, version: str) -> None:
        ids, given, script = self.output_ids, self.script.logprobs, self.script
        for _ in range(count):
            at = len(ids)
            place = self._distributions.next(ids)
            if at < len(script.ids):
                token = script.ids[at]
            elif script.finish == "eos":
                token = self._eos_id
            else:
                token = place.draw()
            logprob = given[at] if at < len(given) else place.logprob(token)
            if self.returns.top:
                self.details.output_top.append(place.top((logprob, token), self.returns.top))
            if self.returns.chosen:
                self.details.output_chosen.append(place.chosen(self.returns.chosen))
            ids.append(token)
            self.logprobs.append(logprob)
            self.finish = self._stopping.reason(ids)
            if self.finish is not None:
                break
        self.versions.extend(version, len(ids))

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

    def _read(self) -> None:
        # The first of them has no logprob: the engine computes logprobs from this token on, so for the tokens behind it.
        details, prompt = self.details, self.prompt_ids
        for at in range(self.returns.start, len(prompt)):
            place = self._distributions.read(at) if at > self.returns.start else None
            scored = (place.logprob(prompt[at]) if place else None, prompt[at])
            details.prompt.append(scored)
            details.prompt_top.append(place.top(scored, self.returns.top) if place and self.returns.top else None)
            details.prompt_chosen.append(place.chosen(self.returns.chosen) if place and self.returns.chosen else None)


def abort(sample: Sample) -> None:
    """End a sample as SGLang ends a request that is running."""
    sample.finish = dict(ABORTED)
