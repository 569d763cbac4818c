"""One reply in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.embedded.engine.detokenizer import Detokenizer
from router.embedded.engine.sampling import Sampling
from router.embedded.engine.script import Script
from router.embedded.engine.source import Scored, Source
from router.embedded.engine.stopping import ABORTED, FinishReason, Stopping
from router.embedded.models.vocabulary import Vocabulary

_FORCED_INTERVAL = 50  # SGLANG_FORCE_STREAM_INTERVAL


@dataclass(frozen=True)
class Asked:
    """Which logprobs a request wants of a reply.

    Attributes:
        logprobs: any at all; the rest is of no account without it.
        start: from which token of the prompt on; -1 for none of them.
        top: how many of the likeliest tokens, at each place.
        chosen: of which tokens, at each place.
        texts: each with its token's text.
        prompt_ids: what was read, too.
    """

    logprobs: bool = False
    start: int = -1
    top: int = 0
    chosen: tuple[int, ...] = ()
    texts: bool = False
    prompt_ids: bool = False


class Versions:
    """Which weights sampled which tokens, as runs of them."""

    def __init__(self) -> None:
        self._runs: list[tuple[str, int]] = []  # a version, and where its tokens end

    def extend(self, version: str, end: int) -> None:
        """The tokens up to `end` that had no version are of this one."""
        if self._runs and self._runs[-1][0] == version:
            self._runs.pop()
        self._runs.append((version, end))

    def per_token(self) -> list[str]:
        """Of each token."""
        found: list[str] = []
        for version, end in self._runs:
            found += [version] * (end - len(found))
        return found

    def spans(self, current: str, count: int) -> list[dict[str, Any]]:
        """`meta_info.weight_versions` of the first `count` tokens: half-open spans; never empty."""
        spans: list[dict[str, Any]] = []
        start = 0
        for version, end in self._runs:
            if start < count:
                spans.append({"version": version, "start": start, "end": min(end, count)})
            start = end
        return spans or [{"version": current, "start": 0, "end": 0}]


@dataclass
class Logprobs:
    """What the engine tells of probabilities: of the prompt from `Asked.start` on, and of each token that was sampled."""

    prompt: list[Scored] = field(default_factory=list)
    prompt_top: list[list[Scored] | None] = field(default_factory=list)
    prompt_chosen: list[list[Scored] | None] = field(default_factory=list)
    output_top: list[list[Scored]] = field(default_factory=list)
    output_chosen: list[list[Scored]] = field(default_factory=list)


class Sample(Protocol):
    """What the engine runs and the wire tells."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    script: Script
    asked: Asked
    output_ids: list[int]
    versions: Versions
    beside: Logprobs
    finish: FinishReason | None
    burst: int  # how many tokens may be sampled before others are let run
    plain_interval: int  # every how many tokens the text is decoded if nobody streams it

    @property
    def logprobs(self) -> list[float]:
        """Of each token that was sampled."""
        ...

    def advance(self, count: int, version: str) -> None:
        """Sample so many tokens under `version`, or fewer if that was the end."""
        ...

    def text(self) -> str:
        """All text so far that SGLang's detokenizer would have passed on, had it been asked at each of these calls."""
        ...

    def entries(self, start: int, end: int) -> list[tuple[float, int, None]]:
        """`output_token_logprobs` without texts. The list is the caller's."""
        ...

    def holds_back(self) -> bool:
        """Whether a stream waits before it tells this, because a stop string may have begun."""
        ...


class SampledReply:
    """A reply that is sampled token by token, or scripted."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        source: Source,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        script: Script,
        asked: Asked,
        seed: str,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.script = script
        self.asked = asked
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions = Versions()
        self.beside = Logprobs()
        self.finish: FinishReason | None = None
        self.burst = source.burst
        self.plain_interval = _FORCED_INTERVAL
        self._eos_id = vocabulary.eos_id
        self._drawing = source.begin(prompt_ids, sampling, seed)
        self._stopping = Stopping(vocabulary, sampling, script)
        self._detokenizer = Detokenizer(vocabulary, prompt_ids, sampling)
        self._text = ""
        self._decoded = 0
        self._entries: list[tuple[float, int, None]] = []
        if asked.logprobs and asked.start >= 0:
            self._read()
        if sampling.max_new_tokens == 0:
            self.finish = {"type": "length", "length": 0}

    def advance(self, count: int, version: str) -> None:
        """Sample, and look after each token whether it was the last one."""
        ids, given, script = self.output_ids, self.script.logprobs, self.script
        for _ in range(count):
            at = len(ids)
            place = self._drawing.next(ids)
            if at < len(script.ids):
                token = script.ids[at]
            elif script.finish == "eos":
                token = self._eos_id
            else:
                token = place.draw()
            logprob = given[at] if at < len(given) else place.logprob(token)
            if self.asked.top:
                self.beside.output_top.append(place.top((logprob, token), self.asked.top))
            if self.asked.chosen:
                self.beside.output_chosen.append(place.chosen(self.asked.chosen))
            ids.append(token)
            self.logprobs.append(logprob)
            self.finish = self._stopping.reason(ids)
            if self.finish is not None:
                break
        self.versions.extend(version, len(ids))

    def text(self) -> str:
        """Decode what has come since it was asked for last."""
        if self._decoded < len(self.output_ids) or self.finish is not None:
            self._text += self._detokenizer.push(self.output_ids[self._decoded :], self.finish)
            self._decoded = len(self.output_ids)
        return self._text

    def entries(self, start: int, end: int) -> list[tuple[float, int, None]]:
        """Built once for each token."""
        known = len(self._entries)
        self._entries += [
            (logprob, token, None)
            for logprob, token in zip(self.logprobs[known:end], self.output_ids[known:end], strict=True)
        ]
        return self._entries[start:end]

    def holds_back(self) -> bool:
        """Whether the end of the text may be the beginning of a stop string."""
        return self._stopping.may_begin(self.output_ids)

    def _read(self) -> None:
        # The first of them has no logprob: the engine begins to compute them with it, and so knows of what comes after it.
        beside, prompt = self.beside, self.prompt_ids
        for at in range(self.asked.start, len(prompt)):
            place = self._drawing.read(at) if at > self.asked.start else None
            scored = (place.logprob(prompt[at]) if place else None, prompt[at])
            beside.prompt.append(scored)
            beside.prompt_top.append(place.top(scored, self.asked.top) if place and self.asked.top else None)
            beside.prompt_chosen.append(place.chosen(self.asked.chosen) if place and self.asked.chosen else None)


def abort(sample: Sample) -> None:
    """End it as SGLang ends a request that is already running."""
    sample.finish = dict(ABORTED)
