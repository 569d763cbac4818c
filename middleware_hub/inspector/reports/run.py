"""The run report of a tenant's memory, computed in the background, a branch at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from middleware_hub.inspector.conversations.chain import Chain, SpanSlice, versions_in
from middleware_hub.inspector.conversations.conversation import Branch, ConversationView
from middleware_hub.inspector.gallery import Gallery
from middleware_hub.inspector.reports.drift import ChainDrift, Drifts
from middleware_hub.spans.chain import TokenSpan, unpack_logprobs
from middleware_hub.tokenizer.vocabulary import REPLACEMENT, Vocabulary
from router.errors import NotFoundError, RouterError
from router.http.offload import offload

EDGES = np.linspace(-10.0, 0.0, 41)
"""Edges of the logprobs' histogram. Values below the first edge count in the first bin."""
MOST_LOGPROBS = 1_000_000
"""Logprobs of one weight version that its quantiles count; later logprobs are left out."""
MOST_PAIRS = 100_000
SHOWN_PAIRS = 50
PAIR_TOKENS = 8
MOST_BUCKETS = 300
SHOWN_IMAGES = 12
KINDS = ("word", "number", "space", "punctuation", "special", "bytes", "other")


class ImageFigures:
    """Counts images, span by span. A file that many sequences hold is one image."""

    def __init__(self) -> None:
        self.count = self.tokens = 0
        self._times: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._new: list[str] = []

    def add(self, span: TokenSpan) -> None:
        """Count the images of a span."""
        for _, length, digest in span.media:
            self.count += 1
            self.tokens += length
            if digest not in self._times:
                self._new.append(digest)
            self._times[digest] = self._times.get(digest, 0) + 1
            self._lengths[digest] = length

    def fresh(self) -> list[str]:
        """Return the digests of the images that came since the last call."""
        new, self._new = self._new, []
        return new

    def held(self, digest: str, size: int | None) -> None:
        """Note the bytes of an image's file; None if there is none."""
        if size is not None:
            self._sizes[digest] = size

    def commonest(self) -> list[str]:
        """Return the digests of the images that occur most often."""
        return sorted(self._times, key=lambda digest: (-self._times[digest], digest))[:SHOWN_IMAGES]

    def described(self) -> dict[str, Any]:
        """Return the figures. `bytes` is that of the `held` files, each once."""
        return {
            "count": self.count,
            "distinct": len(self._times),
            "tokens": self.tokens,
            "held": len(self._sizes),
            "bytes": sum(self._sizes.values()),
            "commonest": [
                {"digest": digest, "times": self._times[digest], "tokens": self._lengths[digest]}
                for digest in self.commonest()
            ],
        }


class RunFigures:
    """The figures of a run report, counted branch by branch. What several branches share counts once.

    Args:
        vocabulary: spells ids. Without it the report has no drift.
        behind: returns how many versions a weight version is behind the current one.
    """

    def __init__(self, vocabulary: Vocabulary | None, behind: Callable[[str], int]) -> None:
        self._vocabulary = vocabulary
        self._behind = behind
        self._seen: set[Hashable] = set()
        self._conversations: set[Hashable] = set()
        self._reasons: set[tuple[Hashable, str]] = set()
        self._kinds: dict[int, str] = {}
        self.tokens = self.sampled = self.drifted = self.compared = 0
        self._of_kind: Counter[str] = Counter()
        self._drifted_of_kind: Counter[str] = Counter()
        self._pairs: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
        self._versions: Counter[str] = Counter()
        self._prompt = self._reused = 0
        self._histogram = np.zeros(len(EDGES) - 1, np.int64)
        self._logprobs: dict[str, list[NDArray[np.floating[Any]]]] = {}
        self._kept: Counter[str] = Counter()
        self._times: Counter[tuple[int, str]] = Counter()
        self._bucket = 1
        self.images = ImageFigures()

    def add(
        self,
        conversation: Hashable,
        chain: Chain,
        drift: ChainDrift | None,
        reasons: Iterable[str],
        *,
        key: Callable[[TokenSpan], Hashable],
        moment: Callable[[TokenSpan], float],
    ) -> None:
        """Count a branch. `key` identifies a span, and `moment` returns when it was sampled, in seconds since 1970."""
        self._conversations.add(conversation)
        self._reasons.update((conversation, reason) for reason in reasons)
        new = []
        reused = 0
        for part in chain.parts:
            name = key(part.span)
            if name not in self._seen:
                self._seen.add(name)
                self.tokens += part.span.count
                self.images.add(part.span)
                if part.span.sampled:
                    new.append(part)
                    self._prompt += part.start
                    self._reused += reused
            if part.span.sampled:
                reused = part.end
        for part in new:
            # Count also what the branch leaves out: a stop token, or the rest of a reply that is continued in its middle.
            self._count(SpanSlice(part.span, part.start, part.start + part.span.count), moment(part.span))
        if drift is not None and self._vocabulary is not None:
            self._add_drift(chain, drift, new, self._vocabulary)

    def _count(self, part: SpanSlice, moment: float) -> None:
        self.sampled += part.end - part.start
        packed = part.span.logprobs
        logprobs: NDArray[np.floating[Any]] | None = None
        if packed is not None:
            logprobs = unpack_logprobs(packed, part.span.count)
            numbers = np.clip(logprobs[: part.end - part.start], EDGES[0], EDGES[-1])
            self._histogram += np.histogram(numbers, EDGES)[0]
        for version, start, end in versions_in(part):
            self._versions[version] += end - start
            self._times[int(moment) // self._bucket * self._bucket, version] += end - start
            if logprobs is not None and self._kept[version] < MOST_LOGPROBS:
                self._logprobs.setdefault(version, []).append(logprobs[start - part.start : end - part.start])
                self._kept[version] += end - start
        if len(self._times) > 4 * MOST_BUCKETS:
            self._coarsen()

    def _coarsen(self) -> None:
        self._bucket *= 2
        finer, self._times = self._times, Counter()
        for (moment, version), tokens in finer.items():
            self._times[moment // self._bucket * self._bucket, version] += tokens

    def _add_drift(self, chain: Chain, drift: ChainDrift, new: list[SpanSlice], vocabulary: Vocabulary) -> None:
        noted: set[int] = set()
        for part in new:
            self.compared += part.end - part.start
            numbers, counts = np.unique(chain.ids(part.start, part.end), return_counts=True)
            for token_id, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                self._of_kind[self._kind(token_id, vocabulary)] += count
            for one in drift.between(part.start, part.end):
                low, high = max(one.start, part.start), min(one.end, part.end)
                self.drifted += high - low
                for token_id in chain.ids(low, high).tolist():
                    self._drifted_of_kind[self._kind(token_id, vocabulary)] += 1
                if one.start not in noted:  # it may be in several parts
                    noted.add(one.start)
                    self._note_pair(chain.ids(one.start, one.end).tolist(), one.encoded, vocabulary)

    def _note_pair(self, sampled: list[int], encoded: tuple[int, ...], vocabulary: Vocabulary) -> None:
        if max(len(sampled), len(encoded)) <= PAIR_TOKENS:
            pair = tuple(map(vocabulary.literal, sampled)), tuple(map(vocabulary.literal, encoded))
            if pair in self._pairs or len(self._pairs) < MOST_PAIRS:
                self._pairs[pair] += 1

    def _kind(self, token_id: int, vocabulary: Vocabulary) -> str:
        found = self._kinds.get(token_id)
        if found is None:
            found = self._kinds[token_id] = kind_of(vocabulary, token_id)
        return found

    # The report --------------------------------------------------------------------------------------------------------

    def report(self, *, progress: float) -> dict[str, Any]:
        """Return the figures so far, as `GET /inspect/api/run` answers them."""
        reasons = Counter(reason for _, reason in self._reasons)
        behind: Counter[int] = Counter()
        for version, tokens in self._versions.items():
            behind[max(0, self._behind(version))] += tokens
        while len(self._times) > MOST_BUCKETS and len({moment for moment, _ in self._times}) > 1:
            self._coarsen()
        return {
            "computed_at": time.time(),
            "done": progress >= 1,
            "progress": min(1.0, progress),
            "conversations": len(self._conversations),
            "tokens": self.tokens,
            "sampled_tokens": self.sampled,
            "drift": None if self._vocabulary is None else self._drift(),
            "inexact": [{"reason": name, "conversations": count} for name, count in reasons.most_common()],
            "staleness": [{"versions_behind": age, "tokens": behind[age]} for age in sorted(behind)],
            "reuse": {"prompt_tokens": self._prompt, "reused_tokens": self._reused},
            "logprobs": {
                "edges": EDGES.tolist(),
                "counts": self._histogram.tolist(),
                "by_version": [
                    _quantiles(version, self._logprobs[version])
                    for version in sorted(self._logprobs, key=lambda one: (-self._behind(one), one))
                ],
            },
            "sampled_over_time": [
                {"time": moment, "version": version, "tokens": tokens}
                for (moment, version), tokens in sorted(self._times.items())
            ],
            "bucket_seconds": self._bucket,
            "images": self.images.described(),
        }

    def _drift(self) -> dict[str, Any]:
        return {
            "sampled_tokens": self.compared,
            "drifted_tokens": self.drifted,
            "share": self.drifted / self.compared if self.compared else 0.0,
            "by_kind": [
                {"kind": kind, "tokens": self._of_kind[kind], "drifted": self._drifted_of_kind[kind]}
                for kind in KINDS
                if self._of_kind[kind]
            ],
            "pairs": [
                {"sampled": list(sampled), "encoded": list(encoded), "count": count}
                for (sampled, encoded), count in sorted(self._pairs.items(), key=_often)[:SHOWN_PAIRS]
            ],
        }


def _often(pair: tuple[Hashable, int]) -> tuple[int, Hashable]:
    return -pair[1], pair[0]


def _quantiles(version: str, parts: list[NDArray[np.floating[Any]]]) -> dict[str, Any]:
    numbers = np.concatenate(parts).astype(np.float64)
    low, middle, high = np.percentile(numbers, (5, 50, 95)).tolist()
    return {"version": version, "mean": float(numbers.mean()), "p05": low, "p50": middle, "p95": high}


def kind_of(vocabulary: Vocabulary, token_id: int) -> str:
    """Return the kind of a token, one of `KINDS`, by what it spells on its own."""
    if token_id in vocabulary.special_ids:
        return "special"
    text = vocabulary.literal(token_id)
    if REPLACEMENT in text:
        return "bytes"
    bare = text.strip()
    if not bare:
        return "space"
    if bare.isalpha():
        return "word"
    if bare.isdigit():
        return "number"
    return "other" if any(one.isalnum() for one in bare) else "punctuation"


FRESH = 30.0
"""Seconds for which a report is answered again although something was recorded since."""
TELL = 0.5
"""Seconds between two looks at a report that is being computed."""
MOST_REPORTS = 16
"""Tenants whose reports are kept."""
HEAVY = 2_000


class _Running:
    """One report, finished or being computed."""

    def __init__(self, tally: RunFigures, change: int) -> None:
        self.tally = tally
        self.change = change
        self.began = time.monotonic()
        self.partial = tally.report(progress=0.0)
        self.report: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None


class RunReports:
    """The run reports of all tenants; see the top of this file."""

    def __init__(self, vocabulary: Vocabulary, drifts: Drifts, behind: Callable[[str], int], gallery: Gallery) -> None:
        self._vocabulary = vocabulary
        self._drifts = drifts
        self._behind = behind
        self._gallery = gallery
        self._of: OrderedDict[str, _Running] = OrderedDict()

    async def report(
        self, tenant: str, change: int, conversations: Callable[[], tuple[int, Iterable[ConversationView]]]
    ) -> dict[str, Any]:
        """Return the report so far. Begin a new one if something was recorded since the last.

        `conversations` returns their number, and all of them.
        """
        running = self._of.pop(tenant, None)
        if running is not None and running.report is not None and running.change != change:
            running = None if time.monotonic() - running.began > FRESH else running
        if running is None:
            running = _Running(RunFigures(self._vocabulary, self._behind), change)
            running.task = asyncio.create_task(self._compute(tenant, running, *conversations()))
        self._of[tenant] = running
        if len(self._of) > MOST_REPORTS:
            _, oldest = self._of.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()
        assert running.task is not None
        await asyncio.wait([running.task], timeout=0.05)
        if running.task.done() and running.report is None:
            self._of.pop(tenant, None)  # it failed: the next look begins a new one
            running.task.result()
        report = running.report or running.partial
        images = report["images"]
        about = await self._gallery.about(tenant, [one["digest"] for one in images["commonest"]])
        commonest = [{**one, **about[one["digest"]]} for one in images["commonest"]]
        return {**report, "images": {**images, "commonest": commonest}}

    async def _compute(
        self, tenant: str, running: _Running, total: int, conversations: Iterable[ConversationView]
    ) -> None:
        tally, told = running.tally, time.monotonic()
        for done, conversation in enumerate(conversations):
            for branch in conversation.branches():
                try:
                    chain = branch.chain()
                except NotFoundError:
                    break  # it was deleted meanwhile
                try:
                    drift = await self._drifts.of(chain)
                except RouterError:
                    drift = None  # a text that is too long to be encoded
                await offload(
                    len(chain) > HEAVY,
                    tally.add,
                    conversation.id,
                    chain,
                    drift,
                    branch.reasons(chain),
                    key=_itself,
                    moment=_moments(conversation, branch),
                )
                for digest, known in (await self._gallery.about(tenant, tally.images.fresh())).items():
                    tally.images.held(digest, known["size"])
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # it may have no branch
            if time.monotonic() - told > TELL:
                running.partial = await offload(True, tally.report, progress=min(0.999, done / max(1, total)))
                told = time.monotonic()
        running.report = await offload(tally.sampled > HEAVY, tally.report, progress=1.0)


def _itself(span: TokenSpan) -> Hashable:
    return span


def _moments(conversation: ConversationView, branch: Branch) -> Callable[[TokenSpan], float]:
    """Return the time at which a reply of a branch was recorded; if that is unknown, the end of the branch."""
    return lambda span: conversation.moment(span) or branch.time
