"""A radix tree over the characters of texts, pointing to the token chains that were recorded under them.

Indexes point, spans own (see `spans`): the tree finds chains by text and never holds a token itself, so a split moves no
token and two tokenizations of one text cannot mix. The tree is pure: no await, no framework, no clock but its own counter.

It has three rules:

* **Matching reads, recording writes.** `match` and `recall` change nothing but the flag that a reply was retrieved, which
  changes no other answer. A hit counts when the request that hit is recorded.
* **The longest complete reply is continued**; a chain is cut inside only after it (see `match`).
* **Leaves go first.** A generation can be collected only when nothing builds on it, so its last hit needs no stamp while it
  has children: it inherits theirs when the last of them goes. That makes a hit O(1) however deep the conversation is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from msgspec.structs import replace

from middleware_hub.radix.cut import FRESH, Cut, end_of, has_context_at, recorded_context, resolve_complete
from middleware_hub.radix.forest import Forest
from middleware_hub.radix.match import PrefixMatch, match_chain, match_parent, match_text, walk_down
from middleware_hub.radix.node import Generation, RadixNode, StoredSpan
from middleware_hub.radix.records import NO_PARENT, Context, Departure, Namespace, Recall, SampledReply
from middleware_hub.spans.chain import Measure, SpanFlag, TokenSpan, links
from middleware_hub.spans.versions import VersionClock


class RadixTree:
    """The tree, see the top of this file.

    Args:
        measure: computes where tokens end in their text (the tokenizer's vocabulary).
        max_tokens: the budget that `collect` keeps to; None for none.
        keep_versions: a leaf whose last hit is at least this many weight versions ago is stale.
        unretrieved_versions: an unretrieved leaf that was last hit this many weight versions ago goes before all others;
            None: unretrieved leaves go last, however old they are.
        clock: the clock of weight versions, if it is shared.
        stored: a store has all that is recorded, and this is a cache of it: nothing is lost by collecting.
    """

    def __init__(
        self,
        measure: Measure,
        *,
        max_tokens: int | None = None,
        keep_versions: int = 5,
        unretrieved_versions: int | None = None,
        clock: VersionClock | None = None,
        stored: bool = False,
    ) -> None:
        self.measure = measure
        self.max_tokens = max_tokens
        self.keep_versions = keep_versions
        self.unretrieved_versions = unretrieved_versions
        self.clock = clock or VersionClock()
        self._ticks = 0
        self._forest = Forest(stored=stored)
        self.stats = self._forest.stats
        self.extras = self._forest.extras
        """Further per-token data of engines for the replies."""

    def __repr__(self) -> str:
        return f"<RadixTree {self.stats.generations} generations, {self.stats.tokens} tokens, {self.stats.nodes} nodes>"

    @property
    def forest(self) -> Forest:
        """The trees of all namespaces, for readers only."""
        return self._forest

    @property
    def estimated_bytes(self) -> int:
        return self._forest.estimated_bytes

    # Reading -----------------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, text: str, *, parent: str | None = None) -> PrefixMatch:
        """Find the chain that a request with this text (not empty) continues.

        `parent` is the request id of the reply to continue if several match; `NO_PARENT` to continue none.
        """
        root = self._forest.roots.get(namespace)
        if root is None or parent == NO_PARENT:
            return PrefixMatch(namespace, text, unknown_parent=parent not in (None, NO_PARENT))
        found = match_text(namespace, walk_down(root, text, self._forest.marks), parent, self.measure)
        return found if parent is None else self._checked_parent(found, parent, again=True)

    def match_ids(
        self, namespace: Namespace, text: str, ids: bytes, width: Callable[[int], int], *, parent: str | None = None
    ) -> PrefixMatch:
        """Find the chain that a request of packed ids continues: the ids have to begin with it.

        `text` is the spelling of the ids, and `width` returns how many of its characters the first n ids spell.
        """
        root = self._forest.roots.get(namespace)
        if root is None or parent == NO_PARENT:
            return PrefixMatch(namespace, text, unknown_parent=parent not in (None, NO_PARENT))
        path = walk_down(root, text, self._forest.marks)._replace(ids=ids)
        found = PrefixMatch(namespace, text)
        longest = self._forest.by_ids.longest(namespace, ids, parent)
        if longest is None and parent is not None:
            longest = self._forest.by_ids.longest(namespace, ids, None)
        if longest is not None:
            found = match_chain(namespace, path, *longest, width)
        further = None if found.foreign else path.further(found.continues, found.cut, self.measure)
        if further is not None:
            found = replace(found, cut=further)
        found = replace(found, mismatched=path.passes_mismatch(found.continues))
        return found if parent is None else self._checked_parent(found, parent)

    def _checked_parent(self, match: PrefixMatch, parent: str, *, again: bool = False) -> PrefixMatch:
        """Note whether the prompt has tokens, or all tokens, of the reply that a request named as its parent.

        `again` matches once more if it has none, for what the text keeps of that reply.
        """
        named = next(((span, take) for span, take in links(match.cut.span, match.cut.take) if span.named(parent)), None)
        if named is None:
            reply = self.reply(match.namespace, parent) if again else None
            if reply is not None and (better := match_parent(match, reply, self.measure)) is not None:
                return self._checked_parent(better, parent)
            left_out = self.left_out(match.namespace, match.text, parent)
            return replace(match, unknown_parent=not left_out, hidden_parent=left_out)
        span, take = named
        return replace(match, unknown_parent=False, edited=take < span.visible)

    def recall(
        self, namespace: Namespace, text: str, *, request_id: str | None = None, note: bool = True
    ) -> Recall | None:
        """Return what is remembered of a whole text; None if no reply on its path is called `request_id`.

        With `note` its replies count as retrieved.
        """
        root = self._forest.roots.get(namespace)
        if root is None:
            return None if request_id is not None else Recall(FRESH, exact=False)
        path = walk_down(root, text, self._forest.marks)
        if path.ends_on_node():
            for generation in reversed(path.at.generations()):
                if request_id is None or generation.span.named(request_id):
                    return self._recalled(end_of(generation.span), generation, exact=True, note=note)
        found = match_text(namespace, path, request_id, self.measure, boundaries=False)
        if found.unknown_parent:
            return None
        cut = found.cut
        if cut.start < len(text) and path.ends_on_node():
            cut = recorded_context(path.at, cut, any_chain=request_id is None) or cut
        return self._recalled(cut, found.continues, exact=cut.start == len(text), note=note)

    def recall_generation(self, generation: Generation) -> Recall:
        """Return what `recall` answers for the text of this reply."""
        return self._recalled(end_of(generation.span), generation, exact=True, note=True)

    def _recalled(self, cut: Cut, generation: Generation | None, *, exact: bool, note: bool) -> Recall:
        if note:
            self._mark_retrieved(cut)
        if generation is None:
            return Recall(cut, exact)
        same_text = generation.node.generations()
        return Recall(cut, exact, tuple(g.request_ids[0] if g.request_ids else "" for g in reversed(same_text)))

    def _mark_retrieved(self, cut: Cut) -> None:
        for span, take in links(cut.span, cut.take):
            generation = span.owner
            if isinstance(generation, Generation) and take >= span.visible:
                if generation.retrieved:
                    return
                generation.retrieved = True
                if not self._forest.leaves.stored:
                    self._forest.leaves.offer(generation)

    def reply(self, namespace: Namespace, request_id: str) -> Generation | None:
        return self._forest.names.newest(namespace, request_id)

    def left_out(self, namespace: Namespace, text: str, request_id: str, whole: Cut | None = None) -> bool:
        """Return whether a text has no token of a reply because of rule 6, not because the reply was lost.

        No token of such a reply is visible as a whole, and the text goes on after it without spelling it, or ends there. As a
        part of the `whole` that is remembered of the text, the reply is before its end, and no other sample has its place.
        """
        reply = self._forest.names.newest(namespace, request_id)
        if reply is None or reply.span.visible or not text.startswith(said := self.text_of(reply)):
            return False
        in_place = whole is None or (len(text) > len(said) and has_context_at(whole, reply.span.start))
        return in_place and resolve_complete(reply, text, len(said)) is None

    def text_of(self, generation: Generation) -> str:
        """Return the whole text of a reply: its prompt, and what was sampled."""
        return generation.node.text

    def departure(self, namespace: Namespace, text: str, *, context: int = 10) -> Departure:
        """Return where the text leaves the tree, with `context` recorded characters on both sides of that place."""
        root = self._forest.roots.get(namespace)
        if root is None:
            return Departure(0, "", (), 0)
        path = walk_down(root, text, self._forest.marks)
        left = path.end - path.limit
        ways = [(path.at, len(path.at.edge) - left)] if left else [(child, 0) for child in path.at.each_child()]
        after = tuple(node.first_characters(skip, context) for node, skip in ways[-8:])
        return Departure(
            path.limit, text[max(0, path.limit - context) : path.limit], after, sum(1 for _ in path.stops())
        )

    # Writing -----------------------------------------------------------------------------------------------------------

    def pin(self, match: PrefixMatch) -> None:
        """Keep the chain of a match while a request uses it."""
        if match.cut.span is not None:
            match.cut.span.users += 1

    def unpin(self, match: PrefixMatch) -> None:
        self._forest.release(match.cut.span)

    def record(
        self, match: PrefixMatch, context: Context | None, reply: SampledReply, *, serial: int | None = None
    ) -> Generation:
        """Remember a reply to the prompt that was made from a match, which is still pinned.

        Args:
            context: what was encoded after the match; None if the matched chain is the whole prompt.
            serial: the place in the order of recording, if other processes share that order.
        """
        self.clock.observe_reply(reply.versions, late=reply.late)
        if match.cut.span is None:
            self.stats.misses += 1
        else:
            self.stats.hits += 1
        node, position = self._start(match)
        before, take = match.cut.span, match.cut.take
        if context is None:
            node = self._forest.descend(node, match.text[position:] + reply.text, 0)
        else:
            node = self._forest.descend(node, match.text, position)
            before = self._context_span(match, context, node)
            take = before.count
            node = self._forest.descend(node, reply.text, 0)
        span = TokenSpan(
            before,
            take,
            len(match.text),
            reply.ids,
            len(reply.text),
            logprobs=reply.logprobs,
            versions=reply.versions,
            flags=reply.flags if context is not None else reply.flags | match.flags,
            visible=-1 if reply.visible is None else reply.visible,
            ends=reply.ends,
            request_ids=reply.request_ids,
            finish=reply.finish,
        )
        self._ticks += 1
        serial = self._ticks if serial is None else serial
        generation = Generation(span, node, match.continues, reply.tail, serial, self.clock.now, self._ticks)
        self._forest.insert(match.namespace, generation)
        self.settle()
        if reply.told:
            self.extras.keep(span, reply.told, reply.experts_from)
        return generation

    def _start(self, match: PrefixMatch) -> tuple[RadixNode, int]:
        """Return the node and the character from which the text of a match has to be inserted."""
        found = None if match.path is None else match.path.resume()
        if found is not None:
            return found
        if match.continues is not None:
            return match.continues.node, match.continues.span.text_end
        return self._forest.root(match.namespace), 0

    def _context_span(self, match: PrefixMatch, context: Context, node: RadixNode) -> TokenSpan:
        cut = match.cut
        flags = context.flags | match.flags | (SpanFlag.RECUT if cut.recut else SpanFlag.NONE)
        for known in () if node.contexts is None else node.known_contexts():
            same_place = known.parent is cut.span and known.take == cut.take and known.start == cut.start
            if same_place and known.ids == context.ids and known.flags == flags:
                return known
        span = TokenSpan(
            cut.span, cut.take, cut.start, context.ids, len(match.text) - cut.start, flags=flags, ends=context.ends
        )
        self._forest.insert_context(span, node)
        return span

    # What a store has --------------------------------------------------------------------------------------------------

    @property
    def stored(self) -> Mapping[bytes, TokenSpan]:
        """The spans of which a store has records, by the ids of the records, with every span that they build on."""
        return self._forest.stored

    def keep(self, span: TokenSpan, record: bytes) -> None:
        """Note the id under which a store has a span, or soon will. Its parent has been noted before."""
        self._forest.stored[record] = span

    def hold(self, span: TokenSpan) -> None:
        """Keep a span, until it is released."""
        span.users += 1

    def release(self, span: TokenSpan) -> None:
        self._forest.release(span)

    def restore(self, found: StoredSpan) -> None:
        """Remember what a store has as if it had been recorded here. The tree has its links; the clock does not move.

        Call `settle` after one or more, when there is time.
        """
        self._ticks += 1
        if found.span.sampled:
            self.measure.learn(np.frombuffer(found.span.ids, dtype=np.int32))
        self._forest.restore(found, self.clock.stamp(found.version), self._ticks)

    def settle(self) -> None:
        """Do what can be done for many replies at once, if there are many of which it is not done."""
        self._forest.by_ids.settle()

    # Collecting --------------------------------------------------------------------------------------------------------

    @property
    def over_budget(self) -> bool:
        return self.max_tokens is not None and self.stats.tokens > self.max_tokens

    def collect(self, *, seconds: float = float("inf")) -> bool:
        """Remove leaves until the budget is kept: least recently hit first, never-retrieved replies after all others.

        Last hits grow along with weight versions, so the least recently hit leaves are those of the oldest versions; the
        counters `version` (last hit `keep_versions` or more versions ago) and `least_recently_hit` tell them apart.
        This stops after about `seconds`, so that it does not hold up an event loop, and returns whether there is more to do:
        still over budget, and something left that may go.
        """
        deadline = time.perf_counter() + seconds
        while self.over_budget:
            generation = self._forest.leaves.pop(self._abandoned)
            if generation is None:
                return False
            stale = self.clock.age(generation.stamp) >= self.keep_versions
            self.stats.evicted["version" if stale else "least_recently_hit"] += 1
            if not generation.retrieved and not self._forest.leaves.stored:
                self.stats.evicted["abandoned" if self._abandoned(generation) else "never_retrieved"] += 1
            before = self.stats.tokens
            self._forest.remove(generation)
            self.stats.evicted_tokens += before - self.stats.tokens
            if time.perf_counter() > deadline:
                return self.over_budget
        return False

    def _abandoned(self, generation: Generation) -> bool:
        """Return whether an unretrieved reply is so old that no client is expected to retrieve it."""
        limit = self.unretrieved_versions
        return limit is not None and self.clock.age(generation.stamp) >= limit

    def clear(self) -> None:
        self._forest.clear()
