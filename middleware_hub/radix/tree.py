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
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from msgspec.structs import replace

from middleware_hub.media.shelf import Shelf
from middleware_hub.radix.cut import FRESH, Cut, end_of, has_context_at, recorded_context, resolve_complete
from middleware_hub.radix.indexes import IdsIndex, Landmarks, Leaves, ReplyNames
from middleware_hub.radix.match import PrefixMatch, match_chain, match_parent, match_text, walk_down
from middleware_hub.radix.node import Generation, RadixNode, StoredSpan, common_length, every_node
from middleware_hub.radix.records import NO_PARENT, Context, Departure, Namespace, Recall, SampledReply, TreeStats
from middleware_hub.spans.chain import Measure, SpanFlag, TokenSpan, links
from middleware_hub.spans.extras import Extras
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
        shelf: the pictures, of which it names those of its chains; None if there are none.

    Attributes:
        roots: the radix tree of each namespace.
        leaves, marks, by_ids, names: indexes over all of them.
        extras: further per-token data of engines for these replies.
        watcher: called with each reply that is added or removed; None while the inspector is not in use.
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
        shelf: Shelf | None = None,
    ) -> None:
        self.measure = measure
        self.max_tokens = max_tokens
        self.keep_versions = keep_versions
        self.unretrieved_versions = unretrieved_versions
        self.clock = clock or VersionClock()
        self._ticks = 0
        self.stats = TreeStats()
        self.leaves = Leaves(stored=stored)
        self.marks = Landmarks()
        self.by_ids = IdsIndex()
        self.names = ReplyNames()
        self.roots: dict[Namespace, RadixNode] = {}
        self.extras = Extras(stored=stored)
        self.watcher: Callable[[Generation], None] | None = None
        self._stored: dict[bytes, TokenSpan] = {}
        self._shelf = shelf

    def __repr__(self) -> str:
        return f"<RadixTree {self.stats.generations} generations, {self.stats.tokens} tokens, {self.stats.nodes} nodes>"

    @property
    def estimated_bytes(self) -> int:
        """Return the bytes held: the counted payload, and the average cost of CPython's objects (measured in benchmarks/)."""
        stats = self.stats
        objects = 200 * stats.spans + 190 * stats.nodes + 420 * stats.generations
        return stats.payload + self.extras.bytes + stats.characters + objects

    # Reading -----------------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, text: str, *, parent: str | None = None) -> PrefixMatch:
        """Find the chain that a request with this text (not empty) continues.

        `parent` is the request id of the reply to continue if several match; `NO_PARENT` to continue none.
        """
        root = self.roots.get(namespace)
        if root is None or parent == NO_PARENT:
            return PrefixMatch(namespace, text, unknown_parent=parent not in (None, NO_PARENT))
        found = match_text(namespace, walk_down(root, text, self.marks), parent, self.measure)
        return found if parent is None else self._checked_parent(found, parent, again=True)

    def match_ids(
        self, namespace: Namespace, text: str, ids: bytes, width: Callable[[int], int], *, parent: str | None = None
    ) -> PrefixMatch:
        """Find the chain that a request of packed ids continues: the ids have to begin with it.

        `text` is the spelling of the ids, and `width` returns how many of its characters the first n ids spell.
        """
        root = self.roots.get(namespace)
        if root is None or parent == NO_PARENT:
            return PrefixMatch(namespace, text, unknown_parent=parent not in (None, NO_PARENT))
        path = walk_down(root, text, self.marks)._replace(ids=ids)
        found = PrefixMatch(namespace, text)
        longest = self.by_ids.longest(namespace, ids, parent)
        if longest is None and parent is not None:
            longest = self.by_ids.longest(namespace, ids, None)
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
        root = self.roots.get(namespace)
        if root is None:
            return None if request_id is not None else Recall(FRESH, exact=False)
        path = walk_down(root, text, self.marks)
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
                if not self.leaves.stored:
                    self.leaves.offer(generation)

    def reply(self, namespace: Namespace, request_id: str) -> Generation | None:
        return self.names.newest(namespace, request_id)

    def left_out(self, namespace: Namespace, text: str, request_id: str, whole: Cut | None = None) -> bool:
        """Return whether a text has no token of a reply because of rule 6, not because the reply was lost.

        No token of such a reply is visible as a whole, and the text goes on after it without spelling it, or ends there. As a
        part of the `whole` that is remembered of the text, the reply is before its end, and no other sample has its place.
        """
        reply = self.names.newest(namespace, request_id)
        if reply is None or reply.span.visible or not text.startswith(said := self.text_of(reply)):
            return False
        in_place = whole is None or (len(text) > len(said) and has_context_at(whole, reply.span.start))
        return in_place and resolve_complete(reply, text, len(said)) is None

    def text_of(self, generation: Generation) -> str:
        """Return the whole text of a reply: its prompt, and what was sampled."""
        return generation.node.text

    def departure(self, namespace: Namespace, text: str, *, context: int = 10) -> Departure:
        """Return where the text leaves the tree, with `context` recorded characters on both sides of that place."""
        root = self.roots.get(namespace)
        if root is None:
            return Departure(0, "", (), 0)
        path = walk_down(root, text, self.marks)
        left = path.end - path.limit
        ways = [(path.at, len(path.at.edge) - left)] if left else [(child, 0) for child in path.at.each_child()]
        after = tuple(node.first_characters(skip, context) for node, skip in ways[-8:])
        return Departure(
            path.limit, text[max(0, path.limit - context) : path.limit], after, sum(1 for _ in path.stops())
        )

    def each_generation(self) -> Iterator[Generation | None]:
        """Yield all replies, and None for each node without one. While the tree changes, new replies may be left out."""
        for node, _ in every_node(list(self.roots.values())):
            yield from tuple(node.generations()) or (None,)

    # Writing -----------------------------------------------------------------------------------------------------------

    def pin(self, match: PrefixMatch) -> None:
        """Keep the chain of a match while a request uses it."""
        if match.cut.span is not None:
            match.cut.span.users += 1

    def unpin(self, match: PrefixMatch) -> None:
        self.release(match.cut.span)

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
            node = self._descend(node, match.text[position:] + reply.text, 0)
        else:
            node = self._descend(node, match.text, position)
            before = self._context_span(match, context, node)
            take = before.count
            node = self._descend(node, reply.text, 0)
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
            kv_version=reply.kv_version,
        )
        self._ticks += 1
        serial = self._ticks if serial is None else serial
        generation = Generation(span, node, match.continues, reply.tail, serial, self.clock.now, self._ticks)
        self._insert(match.namespace, generation)
        self.by_ids.settle()
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
        return self._root(match.namespace), 0

    def _context_span(self, match: PrefixMatch, context: Context, node: RadixNode) -> TokenSpan:
        cut = match.cut
        flags = context.flags | match.flags | (SpanFlag.RECUT if cut.recut else SpanFlag.NONE)
        for known in () if node.contexts is None else node.known_contexts():
            same_place = known.parent is cut.span and known.take == cut.take and known.start == cut.start
            if same_place and known.ids == context.ids and known.flags == flags:
                return known
        span = TokenSpan(
            cut.span,
            cut.take,
            cut.start,
            context.ids,
            len(match.text) - cut.start,
            flags=flags,
            ends=context.ends,
            media=context.media,
        )
        self._insert_context(span, node)
        return span

    # What a store has --------------------------------------------------------------------------------------------------

    @property
    def stored(self) -> Mapping[bytes, TokenSpan]:
        """The spans of which a store has records, by the ids of the records, with every span that they build on."""
        return self._stored

    def keep(self, span: TokenSpan, record: bytes) -> None:
        """Note the id under which a store has a span, or soon will. Its parent has been noted before."""
        self._stored[record] = span

    def hold(self, span: TokenSpan) -> None:
        """Keep a span, until it is released."""
        span.users += 1

    def restore(self, found: StoredSpan) -> None:
        """Remember what a store has as if it had been recorded here. The tree has its links; the clock does not move.

        Call `settle` after one or more, when there is time.
        """
        self._ticks += 1
        if found.span.sampled:
            self.measure.learn(np.frombuffer(found.span.ids, dtype=np.int32))
        span, base = found.span, found.base
        if base is None:
            above = self._root(found.namespace)
        else:
            above = base.owner.node if isinstance(base.owner, Generation) else base.owner
        node = self._descend(above, found.text, 0)
        if span.sampled:
            line = None if found.line is None else found.line.owner
            stamp = self.clock.stamp(found.version)
            self._insert(
                found.namespace,
                Generation(span, node, line, found.tail, found.serial, stamp, self._ticks, found.retrieved),
            )
        else:
            self._insert_context(span, node)
        self._stored[found.record] = span

    def settle(self) -> None:
        """Do what can be done for many replies at once, if there are many of which it is not done."""
        self.by_ids.settle()

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
            generation = self.leaves.pop(self._abandoned)
            if generation is None:
                return False
            stale = self.clock.age(generation.stamp) >= self.keep_versions
            self.stats.evicted["version" if stale else "least_recently_hit"] += 1
            if not generation.retrieved and not self.leaves.stored:
                self.stats.evicted["abandoned" if self._abandoned(generation) else "never_retrieved"] += 1
            before = self.stats.tokens
            self._remove(generation)
            self.stats.evicted_tokens += before - self.stats.tokens
            if time.perf_counter() > deadline:
                return self.over_budget
        return False

    def _abandoned(self, generation: Generation) -> bool:
        """Return whether an unretrieved reply is so old that no client is expected to retrieve it."""
        limit = self.unretrieved_versions
        return limit is not None and self.clock.age(generation.stamp) >= limit

    def clear(self) -> None:
        """Forget everything, link by link: freeing a chain of 100,000 spans by its end alone would overflow the C stack."""
        for node, _ in list(every_node(self.roots.values())):
            for generation in node.generations():
                span: TokenSpan | None = generation.span
                while span is not None:
                    above = span.parent
                    span.parent = span.owner = None
                    span = above
            node.parent = node.children = node.ends = node.contexts = node._through = None
        self.roots.clear()
        self._stored.clear()
        self.extras.clear()
        self.leaves = Leaves(stored=self.leaves.stored)
        self.marks = Landmarks()
        self.by_ids = IdsIndex()
        self.names = ReplyNames()
        self.stats.forget()

    # Nodes and spans ---------------------------------------------------------------------------------------------------

    def _root(self, namespace: Namespace) -> RadixNode:
        found = self.roots.get(namespace)
        if found is None:
            found = self.roots[namespace] = RadixNode("", None)
        return found

    def _descend(self, node: RadixNode, text: str, position: int) -> RadixNode:
        """Descend along `text[position:]`, making and splitting nodes, so that a node ends exactly where the text does."""
        while position < len(text):
            child = node.child(text[position])
            if child is None:
                child = RadixNode(text[position:], node)
                node.attach(child)
                self.stats.nodes += 1
                self.stats.characters += len(child.edge)
            elif not text.startswith(child.edge, position):
                child = child.split(common_length(child.edge, text, position))
                self.stats.nodes += 1
            position += len(child.edge)
            node = child
        return node

    def _insert(self, namespace: Namespace, generation: Generation) -> None:
        """Put a reply at its node and into all indexes, whether it is new or comes from a store."""
        span, node = generation.span, generation.node
        span.owner = generation
        span.users = 1
        self._add_span(span)
        node.add_end(generation)
        before = span.parent
        own = before is not None and bool(before.flags & SpanFlag.FOREIGN) and not before.sampled
        self._note_passes(generation, foreign=own or bool(span.flags & SpanFlag.FOREIGN))
        self.stats.generations += 1
        self.by_ids.add(namespace, generation)
        self.names.add(generation)
        self.leaves.offer(generation)
        if self.watcher is not None:
            self.watcher(generation)

    def _insert_context(self, span: TokenSpan, node: RadixNode) -> None:
        """Put the context of prompts at the node of their text."""
        span.owner = node
        node.add_context(span)
        self._add_span(span)

    def _note_passes(self, generation: Generation, *, foreign: bool) -> None:
        """Note a new reply in the nodes between it and the reply that it continues.

        The tokens of a `foreign` chain are not where its text has them, so its context counts as a reply.
        """
        line, span = generation.continues, generation.span
        top = None if line is None else line.node
        node, end = generation.node, span.start + span.width
        while node is not top and node.parent is not None:
            node.note_pass(generation)
            if foreign or end > span.start:
                node.replied = True
            end -= len(node.edge)
            node = node.parent

    def _add_span(self, span: TokenSpan) -> None:
        if span.parent is not None:
            span.parent.users += 1
        if span.media and self._shelf is not None:
            for _, _, digest in span.media:
                self._shelf.use(digest)
        self.stats.spans += 1
        self.stats.tokens += span.count
        self.stats.payload += len(span.ids) if span.logprobs is None else len(span.ids) + len(span.logprobs)

    def _remove(self, generation: Generation) -> None:
        """Remove a reply on which nothing builds."""
        node, line, span = generation.node, generation.continues, generation.span
        self.by_ids.remove(generation)
        self.names.remove(generation)
        node.remove_end(generation)
        self.stats.generations -= 1
        top = None if line is None else line.node
        passed: RadixNode | None = node
        while passed is not None and passed is not top and passed.forget_pass(generation):
            passed = passed.parent
        parent = _nearest_generation(span)
        if parent is not None and generation.tick > parent.tick:
            # A hit below counts as a hit here; it had no effect while there was something below.
            parent.tick, parent.stamp = generation.tick, generation.stamp
        self._prune(node)
        self.release(span)
        span.owner = None
        if self.watcher is not None:
            self.watcher(generation)

    def release(self, span: TokenSpan | None) -> None:
        """Count one user fewer of a span. A span without users is removed, and so on upward."""
        while span is not None:
            span.users -= 1
            assert span.users >= 0
            owner = span.owner
            if span.users:
                if isinstance(owner, Generation):
                    self.leaves.offer(owner)
                return
            self.stats.spans -= 1
            self.stats.tokens -= span.count
            self.stats.payload -= len(span.ids) if span.logprobs is None else len(span.ids) + len(span.logprobs)
            self.extras.forget(span)
            if span.media and self._shelf is not None:
                for _, _, digest in span.media:
                    self._shelf.free(digest)
            if span.stored is not None:
                self._stored.pop(span.stored.id, None)
            if isinstance(owner, RadixNode):
                span.owner = None
                owner.remove_context(span)
                self._prune(owner)
            span = span.parent

    def _prune(self, node: RadixNode) -> None:
        """Remove nodes at or below which nothing ends any more, and merge what is left."""
        while node.parent is not None and node.removable:
            above = node.parent
            above.detach(node)
            self.stats.nodes -= 1
            self.stats.characters -= len(node.edge)
            node = above
        if node.parent is None:
            if node.removable:
                for namespace in [name for name, root in self.roots.items() if root is node]:
                    del self.roots[namespace]
        elif node.ends is None and node.contexts is None and isinstance(node.children, RadixNode):
            node.merge_down()
            self.stats.nodes -= 1


def _nearest_generation(span: TokenSpan) -> Generation | None:
    above = span.parent
    while above is not None and not isinstance(above.owner, Generation):
        above = above.parent
    return None if above is None else above.owner
