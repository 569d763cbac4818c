"""One reply while it is sampled: what was asked for, and what the engine and the wire read of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from router.embedded.engine.finish import FinishReason
from router.embedded.engine.sampling import SamplingParams
from router.embedded.engine.script import FREE, Script
from router.embedded.engine.source import Scored


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


@dataclass(frozen=True)
class ReplyRequest:
    """One of the replies that a request asks for."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    returns: ReturnOptions
    script: Script = FREE


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
class LogprobDetails:
    """The logprobs of the prompt, and what a reply reports at each place besides the logprob of the sampled token."""

    prompt: list[Scored] = field(default_factory=list)
    prompt_top: list[list[Scored] | None] = field(default_factory=list)
    prompt_chosen: list[list[Scored] | None] = field(default_factory=list)
    output_top: list[list[Scored]] = field(default_factory=list)
    output_chosen: list[list[Scored]] = field(default_factory=list)


class Sample(Protocol):
    """A reply as the engine runs it and the wire reports it."""

    request: ReplyRequest
    output_ids: list[int]
    versions: Versions
    details: LogprobDetails
    finish: FinishReason | None
    burst: int  # how many tokens may be sampled before the other samples run
    plain_interval: int  # without a stream, the text is decoded after so many tokens

    @property
    def logprobs(self) -> list[float]: ...

    def advance(self, count: int, version: str) -> None:
        """Sample `count` tokens under `version`, or fewer if the reply ends earlier."""
        ...

    def text(self) -> str:
        """Return the text that SGLang's detokenizer has passed on, if it decodes at each of these calls."""
        ...

    def entries(self, start: int, end: int) -> list[tuple[float, int, None]]:
        """Return a part of `output_token_logprobs`, without texts, as a new list."""
        ...

    def holds_back(self) -> bool:
        """Return whether a stream waits with its text, because a stop string may have begun."""
        ...
