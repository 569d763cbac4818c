"""The tokens of a sample: the sequences that hold its replies whole, as `cover` gives them, or its session's.

Only the replies of the sample itself have mask 1. The rest of a sequence belongs to another sample of the group, or to a reply
that was sampled without the group's header (`outside_group`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Raw

from middleware_hub.media.media import Media
from middleware_hub.media.viewer import Viewer
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.cut import end_of
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Recall
from middleware_hub.radix.tree import RadixTree
from middleware_hub.retrieval import retrieval
from middleware_hub.retrieval.retrieval import MANY_TOKENS
from middleware_hub.retrieval.retrieval_request import RetrievalRequest
from middleware_hub.spans.chain import INEXACT_TOKENS
from middleware_hub.spans.media import digests_in
from middleware_hub.spans.trajectory import SharedMask, flatten, kv_versions
from middleware_hub.trajectories.ledger import STEP
from middleware_hub.trajectories.samples import Built, GroupSample, Member, SampleTrajectories
from router.http.offload import offload

OUTSIDE_GROUP: Final = "outside_group"


class Sequences:
    """Implements `SampleTrajectories`.

    Args:
        tree, memory: these remember texts; `memory` fills the tree from a store.
        sessions: lays out sessions, if any are served.
        media: shows pictures, if the model sees.
    """

    def __init__(
        self,
        tree: RadixTree,
        memory: Memory | None,
        sessions: Callable[[], SampleTrajectories | None],
        media: Media | None = None,
    ) -> None:
        self._media = media
        self._tree = tree
        self._memory = memory
        self._sessions = sessions

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        """Return the sequences of a sample; None if some of its tokens are lost. Raises StoreError."""
        members = sample.members
        if members[0].session is not None:
            sessions = self._sessions()
            return None if sessions is None else await sessions.built(tenant, sample, options)
        request = RetrievalRequest("", **{name: value for name, value in options.items() if name != "media"})
        found = await self._found(members)
        if found is None:
            return None
        own = {one.span for one in found}
        in_group = sample.group.members.keys()
        last = found[-1]
        recall = Recall(end_of(last.span), True, _names(last))
        # Taken before the next await, so that they contain spans that are evicted meanwhile.
        first = flatten(*recall.cut[:2])
        others = retrieval.chains_to_add(first, found)
        chains = [(one, self._tree.text_of(one)) for one in (last, *others)]
        missed = await self._asked_late([last, *others])
        viewer = None
        if self._media is not None:
            digests = [digest for _, text in chains for digest in digests_in(text)]
            viewer = await Viewer.look(self._media, tenant, digests, inline=options.get("media") == "inline")
        first = flatten(*recall.cut[:2])  # with the reasons that are known now
        masks = SharedMask(first, [one.span for one in others])
        answers, exact, tokens, versions, caches = [], True, True, dict[str, None](), dict[str, None]()
        for number, (generation, text) in enumerate(chains):
            cut = end_of(generation.span)
            heavy = cut.tokens > MANY_TOKENS
            flat = first if not number else await offload(heavy, flatten, cut.span, cut.take)
            masks.apply(number, flat)
            outside = False
            for turn in flat.turns:
                if turn.span not in own:
                    flat.loss_mask[turn.start : turn.end] = 0
                    outside = outside or turn.span.stored is None or turn.span.stored.id not in in_group
            if outside:
                flat = flat.because(OUTSIDE_GROUP)
            flat, extras = await retrieval.with_extras(self._tree, self._memory, flat, request)
            recall = Recall(cut, True, _names(generation))
            answer_of = partial(
                retrieval.answer_of, self._tree, text, recall, flat, request, [], missed=missed[number], viewer=viewer
            )
            answer = {**await offload(heavy, answer_of), **extras}
            exact = exact and answer["exact"]
            tokens = tokens and INEXACT_TOKENS.isdisjoint(answer["reasons"])
            versions.update((version, None) for version, _, _ in flat.weight_versions)
            caches.update((version, None) for version in kv_versions(flat.turns))
            answers.append(Raw(b"".join(await retrieval.json_pieces(heavy, answer))))
            await asyncio.sleep(0)
        return Built(answers, exact, tuple(versions), kv_versions=tuple(caches), exact_tokens=tokens)

    async def _asked_late(self, ends: Sequence[Generation]) -> list[Sequence[str]]:
        """Return `Memory.asked_late` of each of these chains."""
        memory = self._memory
        if memory is None:
            return [()] * len(ends)
        for one in ends:
            self._tree.hold(one.span)
        try:
            return [await memory.asked_late(one.namespace, end_of(one.span)) for one in ends]
        finally:
            for one in ends:
                self._tree.release(one.span)

    async def _found(self, members: Sequence[Member]) -> list[Generation] | None:
        """Return the replies in the order of their recording; None if one of them is lost."""
        if self._memory is not None:
            await self._memory.bring({one.key: one.root for one in members})
        spans = [self._tree.stored.get(one.key) for one in members]
        found = [span.owner for span in spans if span is not None and isinstance(span.owner, Generation)]
        return sorted(found, key=lambda one: one.serial) if len(found) == len(members) else None

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        """Note that a trainer has these replies: they may be forgotten before others."""
        of_sessions, sessions = [one for one in members if one.session is not None], self._sessions()
        if of_sessions and sessions is not None:
            await sessions.acknowledged(tenant, of_sessions)
        for number, member in enumerate(members, 1):
            if number % STEP == 0:
                await asyncio.sleep(0)
            if member.session is not None:
                continue
            span = self._tree.stored.get(member.key)
            if span is not None and isinstance(span.owner, Generation):
                self._tree.recall_generation(span.owner)
            if self._memory is not None:  # if another router handed it out, it may not be in this tree
                self._memory.taken(member.root)


def _names(generation: Generation) -> tuple[str, ...]:
    return generation.request_ids[:1]
