"""Claims: a trainer takes samples for a while, and acknowledges them when it has them.

    choose --> lease --> `claimed` in the log --> read on: which samples are ours --> lay the tokens out --> answer
       ^                                                                               |
       +---- nothing: wait for news ----+---- a whole group came out short: give it back

A failure after `claimed` loses nothing: the lease ends, and the samples are claimed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from middleware_hub.persistence.memory import Memory
from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.errors import StoreError
from middleware_hub.trajectories.choosing import ChosenGroup, Steps, choosing, groups_in_steps, overflow
from middleware_hub.trajectories.events import Claimed, Judged, Released, Taken
from middleware_hub.trajectories.journal import MOST_EVENTS, MOST_MEMBERS, Journal
from middleware_hub.trajectories.ledger import STEP, Ledger
from middleware_hub.trajectories.samples import Built, GroupSample, LedgerClaim, SampleTrajectories, dropping
from router.http.responses import SEND_BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS: Final = 1.0
"""How often a claim that waits checks whether a lease is over."""


class ClaimRequest(msgspec.Struct, frozen=True):
    """The request of a trainer; see docs/http-api/claims.md."""

    groups: int = 1
    limit: int | None = None
    group_size: int | None = None
    lease_seconds: float = 600.0
    wait_seconds: float = 0.0
    allow_partial: bool = False
    partial_after_seconds: float = 0.0
    exact_only: bool = False
    max_staleness: int | None = None
    return_logp: bool = True
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    return_top_p: bool = False
    media: str = "ref"
    kv_staleness: bool = False

    @property
    def retrieval(self) -> dict[str, Any]:
        """Return the options for the sequences: see `SampleTrajectories.built`."""
        return {name: getattr(self, name) for name in _RETRIEVAL}


_RETRIEVAL: Final = (
    "return_logp",
    "max_staleness",
    "kv_staleness",
    "return_routed_experts",
    "return_indexer_topk",
    "return_top_p",
    "media",
)


class Claims:
    """Serves the claims of all tenants.

    Args:
        counts: see `Groups`.
        stopping: returns whether the router is about to stop, so that no claim may wait any longer.
        memory: knows the weight versions that other routers have seen, if there is a store.
    """

    def __init__(
        self,
        sequences: SampleTrajectories,
        clock: VersionClock,
        counts: Counter[str],
        stopping: Callable[[], bool],
        memory: Memory | None = None,
    ) -> None:
        self._sequences = sequences
        self._clock = clock
        self._counts = counts
        self._stopping = stopping
        self._memory = memory

    async def claim(self, tenant: str, journal: Journal, wanted: ClaimRequest) -> dict[str, Any]:
        """Return the answer to a claim: with samples, or without any when the time is up. Raises StoreError."""
        until = time.monotonic() + wanted.wait_seconds
        lost: list[dict[str, str]] = []
        bare = set[bytes]()
        while True:
            began = time.monotonic()
            choices, claim, refused = await self._take(journal, wanted, bare)
            if claim is not None:
                found = await self._laid_out(tenant, journal, wanted, claim, choices, lost, bare)
                if found is not None:
                    return {**found, "filtered": refused, "lost": lost, "evicted": journal.ledger.counts["evicted"]}
                continue
            took, left = time.monotonic() - began, until - time.monotonic()
            if left <= 0 or self._stopping():
                return {
                    **{"claim_id": None, "lease_seconds": wanted.lease_seconds, "groups": [], "samples": []},
                    **{"filtered": refused, "lost": lost, "evicted": journal.ledger.counts["evicted"]},
                    "waiting": await result(waiting(journal.ledger)),
                }
            await asyncio.sleep(min(left, took))  # under load, news comes faster than it can be read
            await journal.wait(min(left, LOOK_SECONDS))

    async def _take(
        self, journal: Journal, wanted: ClaimRequest, bare: Container[bytes]
    ) -> tuple[list[ChosenGroup], LedgerClaim | None, Counter[str]]:
        """Choose samples and claim them; return no claim if there was nothing to choose.

        If other claims were faster, the claim holds fewer samples than were chosen. `bare`: exact samples that this request
        cannot have, as the files of their images are missing. Nothing is recorded of that: they may come back.
        """
        async with journal.choosing:
            await journal.read_on()
            if wanted.max_staleness is not None and self._memory is not None:
                await self._memory.read_versions()  # this router may be one through which nothing is sampled
            ledger = journal.ledger
            too_many = overflow(ledger, MOST_MEMBERS, ledger.last - MOST_EVENTS)
            if too_many:
                await journal.append(dropping(too_many, "evicted", journal.now()))
                self._counts["evicted"] += len(too_many)
                logger.warning(
                    "%d replies were given up that no trainer had claimed: too many waited, or too long", len(too_many)
                )
                await journal.read_on()
            live = await journal.live()
            before = journal.now() - wanted.partial_after_seconds
            choices, refused = await result(
                choosing(
                    ledger,
                    live,
                    lambda sample: "inexact" if sample.id in bare else self._refusal(sample, wanted),
                    groups=wanted.groups,
                    limit=wanted.limit,
                    size=wanted.group_size,
                    partial_before=before if wanted.allow_partial else None,
                )
            )
            if not choices:
                return [], None, refused
            name = uuid.uuid4().hex
            samples, over = await result(_taking(choices))
            await journal.lease(name, wanted.lease_seconds)
            try:
                await journal.append(Claimed(claim=name, samples=tuple(samples), time=journal.now()))
                await journal.read_on()
            except BaseException:
                await asyncio.shield(self._release(journal, name))  # the claim may be in the log, and has no trainer
                raise
            claim = journal.ledger.claim(name)
            if claim is not None:
                self._counts["claimed"] += len(claim.held)
                self._counts["expired"] += len(over & claim.held.keys())
            return choices, claim, refused

    @staticmethod
    async def _release(journal: Journal, claim: str, samples: Sequence[bytes] = ()) -> None:
        """Give samples of a claim back (none named: all), now or when the store is back."""
        with suppress(StoreError):  # then the lease ends by itself
            saved = await journal.keep(Released(claim=claim, samples=tuple(samples), time=journal.now()))
            if saved and not samples:
                await journal.lease(claim, 0)
            if saved:
                await journal.read_on()

    def _refusal(self, sample: GroupSample, wanted: ClaimRequest) -> str | None:
        if wanted.exact_only and sample.inexact:
            return "inexact"
        if wanted.max_staleness is not None:
            caches = sample.kv_versions if wanted.kv_staleness else ()
            if self._stale((*sample.versions, *caches), wanted.max_staleness):
                return "stale"
        return None

    def _stale(self, versions: Sequence[str], most: int) -> bool:
        return any(self._clock.distance(version) > most for version in versions)

    async def _laid_out(
        self,
        tenant: str,
        journal: Journal,
        wanted: ClaimRequest,
        claim: LedgerClaim,
        choices: Sequence[ChosenGroup],
        lost: list[dict[str, str]],
        bare: set[bytes],
    ) -> dict[str, Any] | None:
        """Return the answer with the samples that a claim holds; None if it holds none any more."""
        groups, answered = [], []
        given_back: list[bytes] = []
        try:
            for choice in choices:
                asked = [one.id for one in choice.samples]
                here = [claim.held[one] for one in asked if one in claim.held]
                made: list[tuple[GroupSample, Raw]] = []
                for sample in here:
                    built = await self._built(tenant, journal, wanted, sample, lost, bare)
                    if built is not None:
                        made.append((sample, Raw(msgspec.json.encode(described(sample, built)))))
                if not made or (len(made) < len(asked) and not choice.partial and not wanted.allow_partial):
                    given_back += [one.id for one in here]
                    continue
                kept = {sample.id for sample, _ in made}
                given_back += [one.id for one in here if one.id not in kept]
                size = wanted.group_size or choice.group.size
                groups.append(
                    {
                        **{"group_id": choice.group.id, "size": size, "samples": len(made)},
                        **{"partial": choice.partial or len(made) < len(asked)},
                        "acknowledged_before": choice.group.acknowledged,
                    }
                )
                answered += [written for _, written in made]
            if not answered or given_back:
                await self._give_back(journal, claim, given_back if answered else ())
        except BaseException:
            # The samples reach no trainer: other trainers need not wait for the end of the lease.
            await asyncio.shield(self._give_back(journal, claim, ()))
            raise
        if not answered:
            return None
        return {"claim_id": claim.id, "lease_seconds": wanted.lease_seconds, "groups": groups, "samples": answered}

    async def _give_back(self, journal: Journal, claim: LedgerClaim, samples: Sequence[bytes]) -> None:
        self._counts["released"] += len(samples or claim.held)
        await self._release(journal, claim.id, samples)

    async def _built(
        self,
        tenant: str,
        journal: Journal,
        wanted: ClaimRequest,
        sample: GroupSample,
        lost: list[dict[str, str]],
        bare: set[bytes],
    ) -> Built | None:
        """Return the tokens of a sample; None if they are lost or unwanted, which is noted in `lost` or `bare`."""
        built = await self._sequences.built(tenant, sample, wanted.retrieval)
        if built is None:
            lost.append({"id": sample.id.hex(), "group_id": sample.group.id})
            logger.warning("a sample of group %r is lost: its tokens were evicted or forgotten", sample.group.id)
            await journal.append(dropping(sample.members, "lost", journal.now()))
            self._counts["lost"] += 1
            await journal.read_on()
            return None
        filtered = wanted.exact_only or wanted.max_staleness is not None
        known = set(sample.versions), set(sample.kv_versions)
        if filtered and (sample.inexact is not built.inexact or known != (set(built.versions), set(built.kv_versions))):
            judged = Judged(
                sample=sample.id,
                inexact=built.inexact,
                versions=built.versions,
                kv_versions=built.kv_versions,
                time=journal.now(),
            )
            await journal.append(judged)
            await journal.read_on()
            if self._refusal(sample, wanted) is not None:
                return None
        if wanted.exact_only and not built.exact:
            bare.add(sample.id)
            return None
        return built


def _taking(choices: Sequence[ChosenGroup]) -> Steps[tuple[list[Taken], set[bytes]]]:
    """Return samples as `Claimed` names them, and the ids of samples in claims whose lease is over."""
    taking: list[Taken] = []
    over: set[bytes] = set()
    for choice in choices:
        for sample in choice.samples:
            taking.append(sample.taking())
            if sample.held:
                over.add(sample.id)
            if len(taking) % STEP == 0:
                yield
    return taking, over


async def result(steps: Steps[T]) -> T:
    """Return the result of a walk. Between its steps the event loop serves other requests."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
        await asyncio.sleep(0)


# Answers. They may be large, so each sample is written once, and between steps the event loop serves other requests.


def _rewards(sample: GroupSample, of_session: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the rewards of a sample and of its replies."""
    if of_session is not None:
        number = next((of_session[key] for key in ("reward", "score") if _is_number(of_session.get(key))), None)
        return {"reward": number, "reward_info": of_session, "rewards": []}
    last = sample.rewarded
    each = [
        {"request_id": next(iter(one.names), ""), "reward": one.reward, "reward_info": Raw(one.info or b"{}")}
        for one in sample.members
        if one.rewarded
    ]
    return {
        "reward": None if last is None else last.reward,
        "reward_info": Raw((None if last is None else last.info) or b"{}"),
        "rewards": each,
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def described(sample: GroupSample, built: Built) -> dict[str, Any]:
    """Return a sample as answers show it."""
    first = sample.members[0]
    adapters = built.adapters or (first.lora,)
    return {
        "id": sample.id.hex(),
        "group_id": sample.group.id,
        "rollout_id": first.rollout,
        "session_id": first.session,
        "lora_path": adapters[0] if len(adapters) == 1 else None,
        "complete": sample.complete,
        **_rewards(sample, built.rewards),
        "exact": built.exact,
        "trajectories": built.trajectories,
    }


def in_pieces(answer: Mapping[str, Any]) -> Steps[list[bytes]]:
    """Return the JSON of an answer whose `samples` are written already: they may be large, and each is copied once."""
    before, key, behind = msgspec.json.encode({**answer, "samples": []}).partition(b'"samples":[]')
    pieces, few, size = [before + key[:-1]], list[Raw](), 0
    for number, sample in enumerate(answer["samples"], 1):
        few.append(sample)
        size += len(sample)
        if size > SEND_BYTES or number == len(answer["samples"]):
            pieces.append(b",".join(few))
            if number < len(answer["samples"]):
                pieces.append(b",")
            few, size = [], 0
            yield
    return [*pieces, b"]" + behind]


def waiting(ledger: Ledger) -> Steps[dict[str, int]]:
    """Count the samples that were not given out."""
    found = Counter(groups=0, complete_samples=0, open_samples=0, claimed_samples=0)
    looked = count(1)
    for few in groups_in_steps(ledger):
        for group in few:
            found["groups"] += 1
            for sample in group.samples():
                if next(looked) % STEP == 0:
                    yield
                found["complete_samples"] += sample.complete and not sample.held
                found["open_samples"] += not sample.complete
                found["claimed_samples"] += sample.held
        yield
    return dict(found)
