"""One reply while it is sampled: the request, and the state that the engine and the wire read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from worker.engine.prompt_images import PromptImage, digest_of, keyed
from worker.engine.records import FinishReason, length
from worker.engine.script import FREE, ReplyScript
from worker.engine.source import LogprobDetails, SamplingParams
from worker.engine.transfer import Bootstrap, Handover


@dataclass(frozen=True)
class ReturnOptions:
    """The extras that a request wants besides text and ids. Without `logprobs`, start, top, chosen and texts do nothing."""

    logprobs: bool = False
    start: int = -1  # the first token of the prompt with a logprob; -1 for none
    top: int = 0  # how many of the likeliest tokens at each place
    chosen: tuple[int, ...] = ()  # which tokens at each place
    texts: bool = False  # the text of each token with its logprob
    prompt_ids: bool = False


@dataclass(frozen=True)
class ReplyRequest:
    """One of the replies that a request asks for."""

    rid: str
    input_ids: list[int]  # with the run of each image
    sampling: SamplingParams
    returns: ReturnOptions
    script: ReplyScript = FREE
    rank: int | None = None  # the data-parallel rank that is to serve it; None leaves that to the engine
    images: tuple[PromptImage, ...] = ()
    image_names: tuple[str | None, ...] = ()  # vLLM's uuids: where there is one, the cache knows the image by it
    bootstrap: Bootstrap | None = None  # where the prefill and the decode leg of a request meet
    handover: Handover | None = None  # of the prefill leg
    salt: tuple[str, ...] = ()  # replies with different ones share nothing in the cache

    @cached_property
    def read_ids(self) -> list[int]:
        """What the model reads: the ids, with the images' keys."""
        return keyed(self.input_ids, self.images) if self.images else self.input_ids

    @cached_property
    def cached_ids(self) -> list[int]:
        """What the cache knows: the same, unless the images have names."""
        if not any(self.image_names):
            return self.read_ids
        pairs = zip(self.images, self.image_names, strict=True)
        named = [replace(image, digest=digest_of(name.encode())) if name else image for image, name in pairs]
        return keyed(self.input_ids, named)


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


class WorkerSample(ABC):
    """A reply as the engine runs it and the wire reports it."""

    burst: int  # how many tokens may be sampled before the other samples run
    plain_interval: int  # without a stream, the text is decoded after this many tokens
    seed: str = ""  # of its randomness, if it has any

    def __init__(self, request: ReplyRequest) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []  # of each sampled token
        self.versions = Versions()
        self.details = LogprobDetails()
        self.finish: FinishReason | None = None if request.sampling.max_new_tokens else length(0)

    @abstractmethod
    def advance(self, count: int, version: str) -> None:
        """Sample `count` tokens under `version`, or fewer if the reply ends earlier."""

    @abstractmethod
    def text(self) -> str:
        """Return the text that SGLang's detokenizer has passed on, if it decodes at each of these calls."""

    @abstractmethod
    def entries(self, start: int, end: int) -> list[tuple[float, int, None]]:
        """Return a part of `output_token_logprobs`, without texts, as a new list."""

    def holds_back(self) -> bool:
        """Return whether a stream waits with its text, because a stop string may have begun."""
        return False
