"""A conversation of the radix tree: everything that continues one first sampled reply, counted as replies come and go.

There may be as many as there are replies, so each has few objects that Python's garbage collector walks: it has slots, and
plain dictionaries of spans and numbers, which the collector skips. With objects of the usual kind, the first look at 50,000
conversations stopped the event loop for a tenth of a second and more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

import msgspec

from middleware_hub.inspector.conversations.conversation import (
    MOST_BRANCHES,
    MOST_NODES,
    PICTURES_OF_NODE,
    PREVIEW,
    TITLE,
    Branch,
    cut_reply,
    name_branches,
    opening,
)
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Namespace
from middleware_hub.spans.chain import (
    INEXACT,
    STORE_UNREACHABLE,
    SpanFlag,
    TokenSpan,
    chain_ids,
    links,
    reasons_of,
    version_names,
)

MOST_REWARDED = 16
"""Ends of a conversation that are checked for its reward, the newest first."""

Spell = Callable[[Sequence[int]], str]
Standing = Callable[[Namespace, str], tuple[str, float | None] | None]
"""Returns the group in which a reply was entered, and its reward; None if it is in no group."""


_Key = TypeVar("_Key", bound=Hashable)


def _add(counts: dict[_Key, int], key: _Key) -> int:
    counts[key] = count = counts.get(key, 0) + 1
    return count


def _take(counts: dict[_Key, int], key: _Key) -> int:
    counts[key] = count = counts.get(key, 0) - 1
    if count <= 0:
        del counts[key]
    return count


class _Reply(msgspec.Struct, frozen=True, gc=False):
    """A reply in a conversation.

    Attributes:
        contexts: those before it, the last one first.
        before: the reply that it continues.
        kept: how many tokens of that reply are in its chain.
    """

    generation: Generation
    contexts: tuple[TokenSpan, ...]
    before: TokenSpan | None
    kept: int

    @property
    def whole(self) -> bool:
        """Whether all of the reply before it that the client saw is in its chain."""
        return self.before is not None and self.kept >= self.before.visible

    @classmethod
    def of(cls, generation: Generation) -> _Reply:
        contexts: list[TokenSpan] = []
        for part, take in links(generation.span.parent, generation.span.take):
            if part.sampled:
                return cls(generation, tuple(contexts), part, take)
            contexts.append(part)
        return cls(generation, tuple(contexts), None, 0)


def _reasons(span: TokenSpan) -> Iterator[str]:
    """Yield the reasons that stay. A reason because the store could not be asked may go away later."""
    yield from reasons_of(span.flags & ~SpanFlag.DOUBTFUL)
    if span.sampled and span.logprobs is None:
        yield "no_logprobs"


@dataclass(slots=True, eq=False, repr=False)
class TextConversation:
    """See the top of this file. `name` is the name of its first reply, or that reply's place in the order of recording."""

    first: TokenSpan
    namespace: Namespace
    name: InitVar[str]
    _spell: Spell
    _standing: Standing = lambda *_: None
    id: str = field(init=False)
    updated: int = 0
    created: int = 0
    _replies: dict[TokenSpan, _Reply] = field(default_factory=dict)
    _contexts: dict[TokenSpan, int] = field(default_factory=dict)
    _continued: dict[TokenSpan, int] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _reasons: dict[str, int] = field(default_factory=dict)
    _doubtful: dict[TokenSpan, int] = field(default_factory=dict)
    _sampled: int = 0
    _context_tokens: int = 0
    _images: int = 0
    _title: str | None = None
    _group: str | None = None
    _named: dict[TokenSpan, str] | None = None
    _by_name: dict[str, TokenSpan] = field(default_factory=dict)

    opened = None

    def __post_init__(self, name: str) -> None:
        self.id = f"text:{name}"

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def tokens(self) -> int:
        """The number of its tokens, each once."""
        return self._sampled + self._context_tokens

    def add(self, generation: Generation) -> None:
        span = generation.span
        if span in self._replies:
            return
        reply = self._replies[span] = _Reply.of(generation)
        self._named = None
        for part in reply.contexts:
            if _add(self._contexts, part) == 1:
                self._context_tokens += part.count
                self._images += len(part.media)
                self._count(_add, part)
        if reply.before is not None and reply.whole:
            _add(self._continued, reply.before)
        self._count(_add, span)
        self._sampled += span.count
        self.created = min(self.created or generation.serial, generation.serial)
        self.updated = max(self.updated, generation.serial)

    def remove(self, generation: Generation) -> None:
        reply = self._replies.pop(generation.span, None)
        if reply is None:
            return
        self._named = None
        for part in reply.contexts:
            if _take(self._contexts, part) == 0:
                self._context_tokens -= part.count
                self._images -= len(part.media)
                self._count(_take, part)
        if reply.before is not None and reply.whole:
            _take(self._continued, reply.before)
        self._count(_take, generation.span)
        self._sampled -= generation.span.count

    @property
    def doubtful(self) -> bool:
        """Whether a prompt of it was made while the store could not be asked."""
        return bool(self._doubtful)

    def _count(self, count: Callable[[dict[Any, int], Any], int], span: TokenSpan) -> None:
        """Count the versions and reasons of a span: `count` adds one, or takes one away."""
        for name in version_names(span.versions):
            count(self._versions, name)
        for name in _reasons(span):
            count(self._reasons, name)
        if span.flags & SpanFlag.DOUBTFUL:
            count(self._doubtful, span)

    # What is shown -----------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        reasons = list(self._reasons)
        if any(span.flags & SpanFlag.UNASKED for span in self._doubtful):
            reasons.append(STORE_UNREACHABLE)
        return {
            "id": self.id,
            "kind": "text",
            "namespace": self.namespace[2],
            "adapter": self.namespace[1],
            "title": self.title,
            "turns": len(self._replies),
            "tokens": self.tokens,
            "sampled": self._sampled,
            "images": self._images,
            "branches": len(self._replies) - len(self._continued.keys() & self._replies.keys()),
            "versions": list(self._versions),
            "reward": self._newest_reward(),
            "group": self.group,
            "exact": INEXACT.isdisjoint(reasons),
            "reasons": reasons,
            "created": self.created / 1e9,
            "updated": self.updated / 1e9,
            "model": None,
        }

    @property
    def title(self) -> str:
        """The beginning of its first prompt."""
        if self._title is None:
            parts = list(links(self.first.parent, self.first.take))
            self._title = self._spell(opening(reversed(parts), TITLE))[:TITLE]
        return self._title

    @property
    def group(self) -> str:
        """The group that its client named, or else a group for all samples of one prompt."""
        named = next(map(self._entered, self._replies), None)
        if named is not None:
            return named[0]
        if self._group is None:
            prompt = chain_ids(self.first.parent, self.first.take)
            key = "\0".join(self.namespace).encode("utf-8", "surrogatepass")
            self._group = hashlib.blake2b(prompt, digest_size=8, key=hashlib.blake2b(key).digest()).hexdigest()
        return self._group

    def _entered(self, span: TokenSpan) -> tuple[str, float | None] | None:
        return self._standing(self.namespace, span.request_ids[0]) if span.request_ids else None

    def _newest_reward(self) -> float | None:
        if next(map(self._entered, self._replies), None) is None:
            return None  # in no group, so no client could reward it
        rewards = map(self._reward, self.leaves()[:MOST_REWARDED])
        return next((one for one in rewards if one is not None), None)

    def _reward(self, generation: Generation) -> float | None:
        entered = self._entered(generation.span)
        return None if entered is None else entered[1]

    def leaves(self) -> list[Generation]:
        """Return the replies that no other reply continues, newest first."""
        found = [reply.generation for span, reply in self._replies.items() if span not in self._continued]
        return sorted(found, key=lambda one: one.serial, reverse=True)

    def branches(self) -> Iterator[Branch]:
        names = self._names()
        return (self._branch(names[one.span], one) for one in self.leaves())

    def branch(self, name: str) -> Branch | None:
        self._names()
        span = self._by_name.get(name)
        return None if span is None else self._branch(name, self._replies[span].generation)

    def _branch(self, name: str, generation: Generation) -> Branch:
        return Branch(name, generation.span, generation.serial / 1e9, name, self._reward(generation))

    def _names(self) -> dict[TokenSpan, str]:
        """Return a name for each reply: its first name, with its place in the order if another reply has that name already."""
        if self._named is None:
            self._named, self._by_name = {}, {}
            for span, reply in self._replies.items():
                name = name_of(reply.generation, self._by_name)
                self._named[span] = name
                self._by_name[name] = span
        return self._named

    def named(self, name: str) -> bool:
        return name in (self.id, self.id.removeprefix("text:")) or any(span.named(name) for span in self._replies)

    def moment(self, span: TokenSpan) -> float | None:
        reply = self._replies.get(span)
        return None if reply is None else reply.generation.serial / 1e9

    def _preview(self, span: TokenSpan) -> Callable[[], str]:
        return lambda: self._spell(opening([(span, span.count)], PREVIEW))[:PREVIEW]

    def texts(self) -> Iterator[str]:
        return (leaf.node.text for leaf in self.leaves())

    def nodes(self) -> tuple[list[dict[str, Any]], bool]:
        names = self._names()
        numbers: dict[TokenSpan, str] = {}
        nodes: dict[str, dict[str, Any]] = {}
        truncated = False
        for reply in sorted(self._replies.values(), key=lambda one: one.generation.serial):
            if len(nodes) >= MOST_NODES:
                truncated = True
                break
            above = None if reply.before is None else names.get(reply.before)
            cuts = None if reply.before is None else cut_reply(reply.before, reply.kept)
            for part in reversed(reply.contexts):
                known = numbers.get(part)
                if known is None:
                    known = numbers[part] = f"context:{len(numbers)}"
                    role = "prompt" if above is None else "context"
                    nodes[known] = _node(known, above, role, part, self._preview(part), cuts)
                above, cuts = known, None
            span, name = reply.generation.span, names[reply.generation.span]
            nodes[name] = _node(name, above, "assistant", span, self._preview(span), cuts)
        name_branches(nodes, [(names[one.span], names[one.span]) for one in self.leaves()[:MOST_BRANCHES]])
        return list(nodes.values()), truncated


def _node(
    name: str,
    above: str | None,
    role: str,
    span: TokenSpan,
    preview: Callable[[], str],
    cuts: dict[str, Any] | None,
) -> dict[str, Any]:
    sampled = span.sampled
    return {
        "id": name,
        "parent": above,
        "role": role,
        "request_id": (span.request_ids[0] if span.request_ids else "") if sampled else None,
        "tokens": span.count,
        "sampled": span.count if sampled else 0,
        "images": len(span.media),
        "pictures": [digest for _, _, digest in span.media[:PICTURES_OF_NODE]],
        "version": next(reversed(version_names(span.versions)), None) if sampled else None,
        "preview": preview,
        "finish": span.finish if sampled else None,
        "cuts": cuts,
        "branch_of": [],
    }


def name_of(generation: Generation, taken: Container[str]) -> str:
    """Return a name for a reply that is not taken: the client's, the engine's, or its place in the order of recording."""
    found = generation.span.request_ids
    name = next((one for one in found[:1] if one), "")
    return name if name and name not in taken else f"{name}~{generation.serial}"
