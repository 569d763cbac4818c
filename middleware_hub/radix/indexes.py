"""Indexes onto recorded replies other than their text: by ids, by name, and by last hit; and shortcuts down their trees.

A client that sends ids (a partial rollout, resumed from what was retrieved) continues a chain although the text of its ids
need not be the text under which the chain was recorded: special tokens are spelled in one and may be silent in the other.
So `IdsIndex` finds chains by a fingerprint of their ids: a polynomial over all of them modulo 2^64. It grows by the new
tokens only, and all prefixes of a request cost one running sum. A hit is compared id for id before it counts. New replies wait
until there are several, or until they are asked for: together they cost less than one by one.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from middleware_hub.radix.node import Generation, RadixNode, added, removed
from middleware_hub.spans.chain import ID_BYTES, TokenSpan, links, names_of

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers never vanish
_MASK = (1 << 64) - 1
_MOST_WAITING = 64
_MOST_WAITING_TOKENS = 20_000
"""A step of the index holds up the event loop for at most .5 ms."""
_Entry = tuple[int, int, Generation]
_FEW_ENTRIES = 64
_SERIAL = attrgetter("serial")


class IdsIndex:
    """Chains by namespace and fingerprint, each with and without its hidden tail. Of equal chains the newest is found."""

    def __init__(self) -> None:
        self._powers: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)
        self._chains: dict[tuple[str, ...], dict[int, Generation | list[Generation]]] = {}
        self._waiting: list[Generation] = []
        self._waiting_tokens = 0

    def add(self, namespace: tuple[str, ...], generation: Generation) -> None:
        """Add a reply. Call `settle` after one or more."""
        generation.namespace = namespace
        self._waiting.append(generation)
        span = generation.span
        self._waiting_tokens += span.count if span.parent is None else span.count + span.parent.count

    def settle(self) -> None:
        """Take in the replies that wait, if they are many."""
        if len(self._waiting) >= _MOST_WAITING or self._waiting_tokens >= _MOST_WAITING_TOKENS:
            self._take_in()

    def remove(self, generation: Generation) -> None:
        """Remove a reply; an equal chain takes its place, even one with another text."""
        if not generation.fingerprints:
            self._take_in()
        chains = self._chains[generation.namespace]
        for fingerprint in generation.fingerprints:
            left = removed(chains[fingerprint], generation)
            if left is None:
                del chains[fingerprint]
            else:
                chains[fingerprint] = left
        if not chains:
            del self._chains[generation.namespace]

    def longest(self, namespace: tuple[str, ...], ids: bytes, parent: str | None) -> tuple[Generation, int] | None:
        """Return the longest chain that packed ids begin with, and how many tokens of its reply are among them.

        `parent` restricts the search to replies with this request id.
        """
        if self._waiting:
            self._take_in()
        chains = self._chains.get(namespace)
        if not chains:
            return None
        self._reach(len(ids) // ID_BYTES)
        sums = np.cumsum(_values(ids) * self._powers[: len(ids) // ID_BYTES], dtype=np.uint64)
        for fingerprint in reversed(sums.tolist()) if len(sums) < 4 * len(chains) else _possible(sums, chains):
            found = chains.get(fingerprint)
            if found is None:
                continue
            for generation in reversed(found) if isinstance(found, list) else (found,):
                if parent is not None and not generation.span.named(parent):
                    continue
                for known, take in zip(
                    generation.fingerprints, (generation.span.count, generation.span.visible), strict=False
                ):
                    if known == fingerprint and begins_with(ids, generation.span, take):
                        return generation, take
        return None

    def _take_in(self) -> None:
        """Add the replies that wait. What is new in all of them is summed at once, because numpy is slow to start."""
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        known: list[Generation | None] = []
        runs: list[tuple[bytes, int]] = []
        for generation in waiting:
            before, new, dropped = _since_last_reply(generation.span)
            known.append(before)
            runs += (new, _run(generation.span, generation.span.visible), dropped)
        sums = iter(self._sums(runs))
        for generation, before in zip(waiting, known, strict=True):
            span = generation.span
            seen = (before.fingerprints[0] if before else 0) + next(sums)
            whole = seen + next(sums)
            less = next(sums)
            generation.fingerprints = ((whole - less) & _MASK,)
            if span.width and 0 < span.visible < span.count:
                # Without its hidden tail, an empty reply is not in the index.
                generation.fingerprints += ((seen - less) & _MASK,)
            chains = self._chains.setdefault(generation.namespace, {})
            for fingerprint in generation.fingerprints:
                chains[fingerprint] = added(chains.get(fingerprint), generation, _SERIAL)

    def _sums(self, runs: list[tuple[bytes, int]]) -> list[int]:
        """Return what each run of packed ids adds to the fingerprint of its chain; its offset counts the tokens before it."""
        values = _values(b"".join([ids for ids, _ in runs]))
        found, begin = [], 0
        for ids, offset in runs:
            size = len(ids) // ID_BYTES
            if size:
                self._reach(offset + size)
                found.append(int(np.dot(values[begin : begin + size], self._powers[offset : offset + size])))
                begin += size
            else:
                found.append(0)
        return found

    def _reach(self, end: int) -> None:
        while len(self._powers) < end:
            grown = self._powers * _power(len(self._powers))
            self._powers = np.concatenate([self._powers, grown])


def _possible(sums: NDArray[np.uint64], chains: dict[int, Generation | list[Generation]]) -> list[int]:
    """Return the sums that are in the index, the longest prefix first. It looks at one reply of each chain, not at each sum."""
    spans = ((key, (one[0] if isinstance(one, list) else one).span) for key, one in chains.items())
    ends = ((span.offset + take, key) for key, span in spans for take in (span.count, span.visible))
    found = {end: key for end, key in ends if 0 < end <= len(sums) and sums[end - 1] == key}
    return [found[end] for end in sorted(found, reverse=True)]


def _values(ids: bytes) -> NDArray[np.uint64]:
    """Return the value that a fingerprint multiplies by the power of a token's place (modulo 2^64, as uint64 wraps)."""
    return np.frombuffer(ids, dtype=np.int32).astype(np.uint64) + np.uint64(1)


def _run(span: TokenSpan, begin: int) -> tuple[bytes, int]:
    """Return the ids of a span from its token `begin` on, with the number of tokens before them."""
    return span.ids[ID_BYTES * begin :], span.offset + begin


def _since_last_reply(span: TokenSpan) -> tuple[Generation | None, tuple[bytes, int], tuple[bytes, int]]:
    """Return the reply before this one, the visible ids after it in the chain, and its own ids that the chain lacks."""
    parts = [span.ids[: ID_BYTES * span.visible]]
    for part, take in links(span.parent, span.take):
        if isinstance(part.owner, Generation):
            return part.owner, (b"".join(reversed(parts)), part.offset + take), _run(part, take)
        parts.append(part.ids[: ID_BYTES * take])
    return None, (b"".join(reversed(parts)), 0), (b"", 0)


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_BASE), exponent, 1 << 64))


def begins_with(ids: bytes, span: TokenSpan, take: int) -> bool:
    """Return whether packed ids begin with a chain."""
    for part, count in links(span, take):
        low, size = ID_BYTES * part.offset, ID_BYTES * count
        if ids[low : low + size] != (part.ids if size == len(part.ids) else part.ids[:size]):
            return False
    return True


class ReplyNames:
    """Replies by namespace and name (the client's `rid`, or SGLang's `meta_info.id`). Of equal names the newest is found."""

    def __init__(self) -> None:
        self._replies: dict[tuple[str, ...], dict[str, Generation | list[Generation]]] = {}

    def add(self, generation: Generation) -> None:
        names = generation.span.request_ids
        if not names:
            return
        replies = self._replies.setdefault(generation.namespace, {})
        for name in names:
            known = replies.get(name)
            replies[name] = generation if known is None else added(known, generation, _SERIAL)

    def remove(self, generation: Generation) -> None:
        names = generation.span.request_ids
        if not names:
            return
        replies = self._replies[generation.namespace]
        for name in names:
            left = removed(replies[name], generation)
            if left is None:
                del replies[name]
            else:
                replies[name] = left
        if not replies:
            del self._replies[generation.namespace]

    def newest(self, namespace: tuple[str, ...], request_id: str) -> Generation | None:
        replies = self._replies.get(namespace, {})
        for name in names_of(request_id):
            known = replies.get(name)
            if known is not None:
                return known[-1] if isinstance(known, list) else known
        return None


class Leaves:
    """The replies that may be collected: two heaps by last hit, one of retrieved replies and one of the others.

    An outdated entry is not removed, but recognised when it comes up. It is outdated when its generation was hit again, is no
    leaf any more, was retrieved meanwhile, or was removed. If everything is retrieved sooner or later, nothing comes up in the
    other heap. So a heap is also purged when it is twice as long as after the last purge; otherwise it would keep removed
    generations in memory.
    """

    def __init__(self, *, stored: bool = False) -> None:
        """`stored`: whether a store has all leaves: then nothing is lost with a leaf, and all are treated as retrieved."""
        self.stored = stored
        self._heaps: dict[bool, list[_Entry]] = {True: [], False: []}
        self._kept = {True: 0, False: 0}

    def offer(self, generation: Generation) -> None:
        """Add a generation that became a leaf, or a leaf of the other kind."""
        if generation.span.users != 1:
            return  # something builds on it
        kind = self.stored or generation.retrieved
        heap = self._heaps[kind]
        heapq.heappush(heap, (generation.tick, generation.serial, generation))
        if len(heap) > 2 * self._kept[kind] + _FEW_ENTRIES:
            heap[:] = [entry for entry in heap if self._current(entry, kind)]
            heapq.heapify(heap)
            self._kept[kind] = len(heap)

    def pop(self, outdated: Callable[[Generation], bool]) -> Generation | None:
        """Return the next reply to collect; None if there is none.

        `outdated` says whether an unretrieved reply is too old to be retrieved any more: such replies go before all others.
        """
        unretrieved = self._first(retrieved=False)
        kinds = (False,) if unretrieved is not None and outdated(unretrieved) else (True, False)
        for retrieved in kinds:
            found = self._first(retrieved=retrieved)
            if found is not None:
                heapq.heappop(self._heaps[retrieved])
                return found
        return None

    def _first(self, *, retrieved: bool) -> Generation | None:
        """Return the least recently hit leaf of a kind."""
        heap = self._heaps[retrieved]
        while heap and not self._current(heap[0], retrieved):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _current(self, entry: _Entry, retrieved: bool) -> bool:
        tick, _, generation = entry
        return (
            generation.tick == tick
            and (self.stored or generation.retrieved) is retrieved
            and generation.span.owner is generation
            and generation.leaf
        )


FAR = 64
"""A walk of this many nodes takes longer than looking for a landmark."""
BLOCK = 4_096
"""Characters between two places where landmarks may be."""
MOST_LANDMARKS = 4_096
"""How many are kept, of all conversations: one or two megabytes, and the edges of nodes that were removed meanwhile."""

_Key = tuple[RadixNode, int, int]


class Landmarks:
    """Places deep in the tree at which the walk of a long text may begin.

    A conversation of 5,000 turns is a path of 10,000 nodes, and each of its requests would walk down all of them. A landmark is
    a node on such a path, kept under a hash of the text around it:

        text      |-- block --|-- block --|-- block --|-- block --| go on
        hashes                h1          h2          h3          h4        each is the hash of all blocks up to there
        landmark                               node, under (root, 3, h3): every text with these three blocks runs through it

    A walk that has passed `FAR` nodes looks for its last landmark, and goes on from there; a walk that passes `FAR` more nodes
    leaves a landmark. So a short conversation neither makes landmarks nor hashes anything. Landmarks change no answer.

    The hash of a string is keyed, and has 64 bits; the node's own edge is compared besides. An entry is outdated when its node
    was removed or merged into the one below, which cuts it from its parent. It is recognised when it comes up, or dropped as
    the least recently used entry.
    """

    def __init__(self) -> None:
        self._nodes: OrderedDict[_Key, tuple[RadixNode, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def deepest(self, root: RadixNode, text: str, node: RadixNode, position: int) -> tuple[RadixNode, int]:
        """Return the last landmark on the path of a text, and the characters down to its end; if none, what was given.

        The walk of the text has reached `node`, `position` characters down.
        """
        if not self._nodes:
            return node, position
        hashes = _hashes(text, len(text))
        for blocks in range(len(hashes), position // BLOCK, -1):
            key = root, blocks, hashes[blocks - 1]
            found = self._nodes.get(key)
            if found is None:
                continue
            landmark, end = found
            if landmark.parent is None:
                del self._nodes[key]
            elif end > position and text.startswith(landmark.edge, end - len(landmark.edge)):
                self._nodes.move_to_end(key)
                return found
        return node, position

    def place(self, root: RadixNode, text: str, node: RadixNode, position: int) -> None:
        """Make a landmark of the last node that ends within whole blocks of a text whose walk has reached `node`."""
        hashes = _hashes(text, position)
        above: RadixNode | None = node
        while above is not None and position > len(hashes) * BLOCK:
            position -= len(above.edge)
            above = above.parent
        if above is None or above is root:
            return
        self._nodes[root, len(hashes), hashes[-1]] = above, position
        if len(self._nodes) > MOST_LANDMARKS:
            self._nodes.popitem(last=False)


def _hashes(text: str, size: int) -> list[int]:
    """Return the hash of the first block of a text, of the first two, and so on, within its first `size` characters."""
    found: list[int] = []
    before = 0
    for end in range(BLOCK, size + 1, BLOCK):
        before = hash((before, text[end - BLOCK : end]))
        found.append(before)
    return found
