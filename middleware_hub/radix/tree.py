"""A radix tree over the characters of texts, pointing to the token chains that were recorded under them.

Indexes point, spans own (see `spans`): the tree finds chains by text and never holds a token itself, so a split moves no
token and two tokenizations of one text cannot mix. The tree is pure: no await, no framework, no clock but its own counter.

Three rules carry it:

* **Matching reads, recording writes.** `match` and `recall` change nothing but the flag that a reply was retrieved, which
  protects nothing else's answer. A hit counts when the request that hit is recorded.
* **The longest complete reply is continued**; a chain is cut inside only behind it (`prefix_match`).
* **Leaves go first.** A generation can be collected only when nothing builds on it, so its last hit needs no stamp while it
  has children: it inherits theirs when the last of them goes. That makes a hit O(1) however deep the conversation is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from middleware_hub.radix import check
from middleware_hub.radix.eviction import Leaves
from middleware_hub.radix.ids_index import IdsIndex, begins_with
from middleware_hub.radix.match import FRESH, Cut, PrefixMatch, resolve_complete, resolve_partial, sampled_base
from middleware_hub.radix.node import Generation, RadixNode, common_length
from middleware_hub.radix.records import Context, Departure, Recall, SampledReply, TreeStats
from middleware_hub.radix.reply_names import ReplyNames
from middleware_hub.radix.walk import (
    Walk,
    first_characters,
    longest_complete,
    same_encoding,
    walk_down,
)
from middleware_hub.spans.chain import Measure, SpanFlag, TokenSpan, links
from middleware_hub.spans.versions import VersionClock

Namespace = tuple[str, ...]
"""(tenant, lora path, x-radix-namespace): texts of different namespaces never answer for each other."""

NO_PARENT = "none"
"""As the name of a parent: continue nothing, all of the text is context."""


class RadixTree:
    """See the top of this file.

    Args:
        measure: tells where tokens end in their text (the tokenizer).
        max_tokens: the budget `collect` keeps to; None for none.
        keep_versions: a leaf that was last hit this many weight versions ago, or more, is stale.
        unretrieved_versions: a leaf that nobody retrieved, and that was last hit so many weight versions ago, goes before all
            others; None: it goes after all others however old it is.
        clock: of weight versions, where others look at it, too.
    """

    def __init__(
        self,
        measure: Measure,
        *,
        max_tokens: int | None = None,
        keep_versions: int = 5,
        unretrieved_versions: int | None = None,
        clock: VersionClock | None = None,
    ) -> None:
        self.measure = measure
        self.max_tokens = max_tokens
        self.keep_versions = keep_versions
        self.unretrieved_versions = unretrieved_versions
        self.clock = clock or VersionClock()
        self.stats = TreeStats()
        self._roots: dict[Namespace, RadixNode] = {}
        self._ticks = 0
        self._leaves = Leaves()
        self._by_ids = IdsIndex()
        self._names = ReplyNames()

    def __repr__(self) -> str:
        return f"<RadixTree {self.stats.generations} generations, {self.stats.tokens} tokens, {self.stats.nodes} nodes>"

    # Reading -----------------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, text: str, *, parent: str | None = None) -> PrefixMatch:
        """Find the chain that a request with this text continues.

        Args:
            namespace: where to look.
            text: the whole text of the request, not empty.
            parent: request id of the reply to continue where several could be; `NO_PARENT` for none at all.
        """
        root = self._roots.get(namespace)
        if root is None or parent == NO_PARENT:
            return PrefixMatch(namespace, text, unknown_parent=parent not in (None, NO_PARENT))
        return self._checked_parent(self._match(namespace, text, walk_down(root, text), parent), parent)

    def match_ids(
        self, namespace: Namespace, text: str, ids: bytes, width: Callable[[int], int], *, parent: str | None = None
    ) -> PrefixMatch:
        """The same for a request that came as ids: a chain counts if the ids begin with it.

        Args:
            namespace: where to look.
            text: the spelling of the ids.
            ids: packed.
            width: how many characters of `text` the first so many ids spell.
            parent: as in `match`.
        """
        root = self._roots.get(namespace)
        if root is None or parent == NO_PARENT:
            return PrefixMatch(namespace, text, unknown_parent=parent not in (None, NO_PARENT))
        path = walk_down(root, text)
        found = PrefixMatch(namespace, text)
        longest = self._by_ids.longest(namespace, ids, parent)
        if longest is None and parent is not None:
            longest = self._by_ids.longest(namespace, ids, None)
        if longest is not None:
            found = self._continued(namespace, text, path, *longest, width)
        further = None if found.foreign else self._partial(text, path, found.continues, found.cut)
        if further is not None and further.span is not None and begins_with(ids, further.span, further.take):
            found = replace(found, cut=further)
        found = replace(found, mismatched=path.passes_mismatch(found.continues))
        return self._checked_parent(found, parent)

    def _continued(
        self,
        namespace: Namespace,
        text: str,
        path: Walk,
        generation: Generation,
        take: int,
        width: Callable[[int], int],
    ) -> PrefixMatch:
        """The match of ids that begin with the chain of a reply: on the path of their own text, or under another one.

        Under another one, the longest reply of the chain that is on the path all the same is what is continued.
        """
        span = generation.span
        for node, position in path.stops:
            if node is generation.node:
                cut = resolve_complete(generation, text, position)
                if cut is None or (cut.span, cut.take) != (span, take):
                    cut = Cut(span, take, position)
                return PrefixMatch(namespace, text, cut, generation)
        owners = {part.owner for part, _ in links(span.parent, span.take) if part.sampled}
        line = next((g for node, _ in reversed(path.stops) for g in node.generations() if g in owners), None)
        return PrefixMatch(namespace, text, Cut(span, take, width(span.offset + take)), line, foreign=True)

    def recall(self, namespace: Namespace, text: str, *, request_id: str | None = None) -> Recall | None:
        """Find what is remembered of a whole text; None if `request_id` is none of the replies on its path."""
        root = self._roots.get(namespace)
        if root is None:
            return None if request_id is not None else Recall(FRESH, exact=False)
        path = walk_down(root, text)
        if path.stops and path.stops[-1][1] == len(text):
            for generation in reversed(path.stops[-1][0].generations()):
                if request_id is None or generation.span.named(request_id):
                    return self.recall_generation(generation)
        found = self._match(namespace, text, path, request_id)
        if found.unknown_parent:
            return None
        cut = found.cut
        if cut.start < len(text) and path.ends_on_node(text):
            cut = self._recorded_context(path.at, found, any_chain=request_id is None) or cut
        return self._recalled(cut, found.continues, exact=cut.start == len(text))

    def reply(self, namespace: Namespace, request_id: str) -> Generation | None:
        """The reply with this name; of several the newest."""
        return self._names.newest(namespace, request_id)

    def recall_generation(self, generation: Generation) -> Recall:
        """What `recall` says of the text of this reply."""
        span = generation.span
        return self._recalled(Cut(span, len(span), span.text_end), generation, exact=True)

    def left_out(self, namespace: Namespace, text: str, request_id: str) -> bool:
        """Whether a reply of which a text holds no token was left out of it by rule 6, and not lost.

        All of its tokens are hidden, and the text goes on behind it without spelling them.
        """
        generation = self._names.newest(namespace, request_id)
        return generation is not None and not generation.span.visible and text.startswith(self.text_of(generation))

    def text_of(self, generation: Generation) -> str:
        """The whole text of a reply: its prompt, and what was sampled."""
        edges: list[str] = []
        node: RadixNode | None = generation.node
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return "".join(reversed(edges))

    def departure(self, namespace: Namespace, text: str, *, context: int = 10) -> Departure:
        """Where the text leaves the tree, and what is recorded on both sides of that place."""
        root = self._roots.get(namespace)
        if root is None:
            return Departure(0, "", (), 0)
        path = walk_down(root, text)
        ways = [(path.at, path.inside)] if path.inside < len(path.at.edge) else [(c, 0) for c in path.at.each_child()]
        after = tuple(first_characters(node, skip, context) for node, skip in ways[-8:])
        return Departure(path.limit, text[max(0, path.limit - context) : path.limit], after, len(path.stops))

    def _match(
        self,
        namespace: Namespace,
        text: str,
        path: Walk,
        parent: str | None,
    ) -> PrefixMatch:
        cut, continues, unknown = FRESH, None, False
        if parent is not None:
            cut, continues = longest_complete(path.stops, text, parent)
            unknown = continues is None
        if continues is None:
            cut, continues = longest_complete(path.stops, text, None)
            begin = None if continues is None else self.measure.straddled(text, continues.span.text_end)
            if begin is not None:
                # It ends inside an added token that the text spells: a shorter reply is the one that goes on with it.
                shorter = longest_complete([stop for stop in path.stops if stop[1] <= begin], text, None)
                cut, continues = (cut, continues) if shorter[1] is None else shorter
        at_prompt = path.at.contexts is not None and path.ends_on_node(text)
        further = self._partial(text, path, continues, cut, boundaries=not at_prompt)
        known = None
        if at_prompt:
            known = same_encoding(path.at, further or cut)
            if known is None:
                further = self._partial(text, path, continues, cut)
        cut = further or cut if known is None else Cut(known, len(known), len(text))
        ambiguous = continues is not None and self._matches_further(path, continues, cut.start)
        mismatched = path.passes_mismatch(continues)
        return PrefixMatch(namespace, text, cut, continues, known, ambiguous, unknown, mismatched=mismatched)

    def _checked_parent(self, match: PrefixMatch, parent: str | None) -> PrefixMatch:
        """Note whether the tokens of the reply that a request named as its parent are in its prompt, and all of them."""
        if parent is None:
            return match
        cut = match.cut
        named = next(((span, take) for span, take in links(cut.span, cut.take) if span.named(parent)), None)
        if named is None:
            return replace(match, unknown_parent=not self.left_out(match.namespace, match.text, parent))
        span, take = named
        return replace(match, unknown_parent=False, edited=take < span.visible)

    def _partial(
        self, text: str, path: Walk, line: Generation | None, cut: Cut, *, boundaries: bool = True
    ) -> Cut | None:
        """Tokens behind `cut` of a chain that continues `line` and that the text left in mid-way: the furthest, then newest.

        Sampled tokens come first: context, which is encoded as the text would be anyway, is only looked for where
        none are.
        """
        best: Cut | None = None
        newest: tuple[Generation, int] | None = None
        for generation, limit in path.beside(line, cut.start):
            if best is not None and limit <= best.start:
                break
            newest = newest or (generation, limit)
            further = self._whole_literals(text, generation, limit, line, boundaries=False)
            if further is not None and further.start > (cut if best is None else best).start:
                best = further
        if best is None and boundaries and newest is not None:
            further = self._whole_literals(text, *newest, line, boundaries=True)
            if further is not None and further.start > cut.start:
                return further
        return best

    def _whole_literals(
        self, text: str, generation: Generation, limit: int, line: Generation | None, *, boundaries: bool
    ) -> Cut | None:
        """`resolve_partial`, with no cut inside an added token that the text spells.

        A sampled `<` and the text `<|im_end|>` have a character in common. With that token kept, the rest would be encoded as
        `|im_end|>`, which ends nothing.
        """
        while True:
            cut = resolve_partial(generation, limit, line, self.measure, boundaries=boundaries)
            begin = None if cut is None else self.measure.straddled(text, cut.start)
            if begin is None:
                return cut
            limit = begin

    def _matches_further(self, path: Walk, continues: Generation, start: int) -> bool:
        """Whether a chain that does not continue the chosen reply has whole sampled tokens of this text behind it."""
        for node, limit in path.upward(start):
            for other in node.lines():
                if other.continues is not continues:
                    cut = resolve_partial(other, limit, other.continues, self.measure, boundaries=False)
                    if cut is not None and cut.start > start:
                        return True
        return False

    def _recorded_context(self, at: RadixNode, found: PrefixMatch, *, any_chain: bool) -> Cut | None:
        """A prompt that was sent with exactly this text, of the chain that was found if there is one."""
        contexts = at.known_contexts()
        base = sampled_base(found.cut.span, found.cut.take, found.cut.start)
        for span in reversed(contexts):
            if sampled_base(span, len(span), span.text_end) == base:
                return Cut(span, len(span), span.text_end)
        if contexts and any_chain:
            return Cut(contexts[-1], len(contexts[-1]), contexts[-1].text_end)
        return None

    def _recalled(self, cut: Cut, generation: Generation | None, *, exact: bool) -> Recall:
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
                self._leaves.offer(generation)

    # Writing -----------------------------------------------------------------------------------------------------------

    def pin(self, match: PrefixMatch) -> None:
        """Keep the chain of a match while a request uses it."""
        if match.cut.span is not None:
            match.cut.span.users += 1

    def unpin(self, match: PrefixMatch) -> None:
        """The opposite of `pin`."""
        self._release(match.cut.span)

    def record(self, match: PrefixMatch, context: Context | None, reply: SampledReply) -> Generation:
        """Remember a reply to the prompt that a (still pinned) match was made for.

        Args:
            match: the match the prompt was made from.
            context: what was encoded behind it; None if the chain is the whole prompt.
            reply: what the worker sampled.
        """
        self.clock.observe_reply(reply.versions, late=reply.late)
        if match.cut.span is None:
            self.stats.misses += 1
        else:
            self.stats.hits += 1
        node, position = self._resume(match)
        path: list[RadixNode] = []
        before, take = match.cut.span, match.cut.take
        if context is None:
            node = self._descend(node, match.text[position:] + reply.text, 0, path)
        else:
            node = self._descend(node, match.text, position, path)
            before = self._context_span(match, context, node)
            take = len(before)
            node = self._descend(node, reply.text, 0, path)
        span = TokenSpan(
            before,
            take,
            len(match.text),
            reply.ids,
            len(reply.text),
            logprobs=reply.logprobs,
            versions=reply.versions,
            flags=reply.flags if context is not None else reply.flags | _flags(match),
            visible=-1 if reply.visible is None else reply.visible,
            ends=reply.ends,
            request_ids=reply.request_ids,
            finish=reply.finish,
        )
        self._ticks += 1
        generation = Generation(
            span,
            node,
            match.continues,
            reply.tail,
            self._ticks,
            self.clock.now,
            self._ticks,
        )
        span.owner = generation
        span.users = 1
        self._add_span(span)
        node.add_end(generation)
        for passed in path:
            passed.note_pass(generation)
        self.stats.generations += 1
        self._by_ids.add(match.namespace, generation)
        self._names.add(generation)
        self._leaves.offer(generation)
        return generation

    def _resume(self, match: PrefixMatch) -> tuple[RadixNode, int]:
        """The node from which the text of a match has to be laid down, and from which character on."""
        if match.continues is not None:
            return match.continues.node, match.continues.span.text_end
        root = self._roots.get(match.namespace)
        if root is None:
            root = self._roots[match.namespace] = RadixNode("", None)
        return root, 0

    def _descend(self, node: RadixNode, text: str, position: int, path: list[RadixNode]) -> RadixNode:
        """Go down along `text[position:]`, making and splitting nodes, so that a node ends exactly where the text does."""
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
            path.append(child)
            node = child
        return node

    def _context_span(self, match: PrefixMatch, context: Context, node: RadixNode) -> TokenSpan:
        cut = match.cut
        flags = context.flags | _flags(match) | (SpanFlag.RECUT if match.cut.recut else SpanFlag.NONE)
        for known in node.known_contexts():
            same_place = known.parent is cut.span and known.take == cut.take and known.start == cut.start
            if same_place and known.ids == context.ids and known.flags == flags:
                return known
        span = TokenSpan(
            cut.span, cut.take, cut.start, context.ids, len(match.text) - cut.start, flags=flags, ends=context.ends
        )
        span.owner = node
        node.add_context(span)
        self._add_span(span)
        return span

    def _add_span(self, span: TokenSpan) -> None:
        if span.parent is not None:
            span.parent.users += 1
        self.stats.spans += 1
        self.stats.tokens += len(span)
        self.stats.payload += _payload(span)

    @property
    def estimated_bytes(self) -> int:
        """Bytes held: what is counted exactly, and what CPython's objects cost on average (benchmarks/ measures it)."""
        stats = self.stats
        return stats.payload + stats.characters + 200 * stats.spans + 190 * stats.nodes + 420 * stats.generations

    # Collecting --------------------------------------------------------------------------------------------------------

    @property
    def over_budget(self) -> bool:
        """Whether `collect` has something to do."""
        return self.max_tokens is not None and self.stats.tokens > self.max_tokens

    def collect(self, *, seconds: float = float("inf")) -> bool:
        """Remove leaves until the budget is kept: least recently hit first, never-retrieved replies after all others.

        Last hits only grow along with weight versions, so the least recently hit are the ones of the oldest versions; the
        reasons `version` (last hit `keep_versions` or more versions ago) and `least_recently_hit` tell them apart.

        Args:
            seconds: stop after about this long, so that an event loop is not held up.

        Returns:
            Whether more is to be done: still over budget, and something left that may go.
        """
        deadline = time.perf_counter() + seconds
        while self.over_budget:
            generation = self._leaves.pop(self._abandoned)
            if generation is None:
                return False
            stale = self.clock.age(generation.stamp) >= self.keep_versions
            self.stats.evicted["version" if stale else "least_recently_hit"] += 1
            if not generation.retrieved:
                self.stats.evicted["abandoned" if self._abandoned(generation) else "never_retrieved"] += 1
            before = self.stats.tokens
            self._remove(generation)
            self.stats.evicted_tokens += before - self.stats.tokens
            if time.perf_counter() > deadline:
                return self.over_budget
        return False

    def _abandoned(self, generation: Generation) -> bool:
        """Of what nobody retrieved: whether it is so old that nobody is expected to."""
        limit = self.unretrieved_versions
        return limit is not None and self.clock.age(generation.stamp) >= limit

    def _remove(self, generation: Generation) -> None:
        node, line = generation.node, generation.continues
        self._by_ids.remove(generation)
        self._names.remove(generation)
        node.remove_end(generation)
        self.stats.generations -= 1
        top = None if line is None else line.node
        passed: RadixNode | None = node
        while passed is not None and passed is not top and passed.forget_pass(generation):
            passed = passed.parent
        span = generation.span
        parent = self._nearest_generation(span)
        if parent is not None and generation.tick > parent.tick:
            # What was hit last below it was hit last there too; it mattered to nobody while there was something below.
            parent.tick, parent.stamp = generation.tick, generation.stamp
        self._prune(node)
        self._release(span)
        span.owner = None

    @staticmethod
    def _nearest_generation(span: TokenSpan) -> Generation | None:
        above = span.parent
        while above is not None and not isinstance(above.owner, Generation):
            above = above.parent
        return None if above is None else above.owner

    def _release(self, span: TokenSpan | None) -> None:
        """One user of a span is gone; a span without any is gone too, and so on upward."""
        while span is not None:
            span.users -= 1
            assert span.users >= 0
            owner = span.owner
            if span.users:
                if isinstance(owner, Generation):
                    self._leaves.offer(owner)
                return
            self.stats.spans -= 1
            self.stats.tokens -= len(span)
            self.stats.payload -= _payload(span)
            if isinstance(owner, RadixNode):
                span.owner = None
                owner.remove_context(span)
                self._prune(owner)
            span = span.parent

    def _prune(self, node: RadixNode) -> None:
        """Take away nodes that stand for nothing any more, and join what is left."""
        while node.parent is not None and node.removable:
            above = node.parent
            above.detach(node)
            self.stats.nodes -= 1
            self.stats.characters -= len(node.edge)
            node = above
        if node.parent is None:
            if node.removable:
                for namespace in [name for name, root in self._roots.items() if root is node]:
                    del self._roots[namespace]
        elif node.ends is None and node.contexts is None and isinstance(node.children, RadixNode):
            node.merge_down()
            self.stats.nodes -= 1

    def clear(self) -> None:
        """Forget everything, link by link: a chain of 100,000 spans freed by its end alone would overflow the C stack."""
        for node, _ in list(check.every_node(self._roots.values())):
            for generation in node.generations():
                span: TokenSpan | None = generation.span
                while span is not None:
                    above = span.parent
                    span.parent = span.owner = None
                    span = above
            node.parent = node.children = node.ends = node.contexts = node._through = None
        self._roots.clear()
        self._leaves = Leaves()
        self._by_ids.clear()
        self._names.clear()
        self.stats = TreeStats(evicted=self.stats.evicted, evicted_tokens=self.stats.evicted_tokens)

    def check(self) -> None:
        """Recount everything and compare; AssertionError if an invariant does not hold. Slow, for tests."""
        check.check(self._roots.values(), self.stats)


def _flags(match: PrefixMatch) -> int:
    """What is to be known of the first span behind a match."""
    return match.lost | (SpanFlag.FOREIGN if match.foreign else SpanFlag.NONE)


def _payload(span: TokenSpan) -> int:
    return len(span.ids) + len(span.logprobs or b"")
