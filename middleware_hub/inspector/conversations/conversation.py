"""The inspector's view of any conversation, text or session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from middleware_hub.inspector.conversations.chain import Chain
from middleware_hub.spans.chain import ID_BYTES, INEXACT, TokenSpan, links, unpack_ids
from middleware_hub.spans.media import collapsed, media_of
from router.errors import NotFoundError

MOST_BRANCHES = 1_000
"""Branches of one conversation that are listed, the newest first."""
MOST_NODES = 5_000
"""Nodes of one tree that are listed."""
PICTURES_OF_NODE = 4
"""Images of one node that are named."""
BRANCHES_OF_NODE = 16
"""Branches that are named at each node through which they run."""
TITLE = 160
PREVIEW = 80


@dataclass(frozen=True)
class Branch:
    """One chain of a conversation, from its first prompt to its end.

    Attributes:
        id: names it within its conversation.
        span: its last span.
        time: when it ended, in seconds since 1970.
        roles: of its contexts, if the messages are known.
        more: reasons that its spans do not have.
        remarks: those of them that belong to one turn, by the turn's span.
    """

    id: str
    span: TokenSpan
    time: float
    label: str
    reward: float | None = None
    more: tuple[str, ...] = ()
    roles: Mapping[TokenSpan, str] = field(default_factory=dict)
    remarks: Mapping[TokenSpan, Sequence[str]] = field(default_factory=dict)

    def chain(self) -> Chain:
        """Take its spans, which then survive an eviction. Raises NotFoundError if it was evicted before."""
        found = list(links(self.span, self.span.count))
        found.reverse()
        if found[0][0].offset:
            raise NotFoundError(f"branch {self.id[:200]!r} is no longer remembered")
        return Chain(found, self.roles, self.remarks)

    def reasons(self, chain: Chain) -> list[str]:
        """Return why it is not exact, or not in every way."""
        return list(dict.fromkeys((*chain.reasons, *self.more)))

    def described(self, chain: Chain) -> dict[str, Any]:
        """Return its line in the list of a conversation's branches."""
        reasons = self.reasons(chain)
        return {
            "id": self.id,
            "label": self.label,
            "turns": len(chain.replies),
            "tokens": chain.total,
            "sampled": chain.sampled,
            "images": len(chain.media),
            "versions": chain.versions,
            "reward": self.reward,
            "exact": INEXACT.isdisjoint(reasons),
            "reasons": reasons,
            "updated": self.time,
        }


class ConversationView(Protocol):
    """One conversation of a tenant."""

    @property
    def opened(self) -> Callable[[], Opened] | None:
        """Reads it for as long as it is inspected; None if its branches are in memory."""
        ...

    @property
    def id(self) -> str:
        """Its name in paths."""
        ...

    @property
    def updated(self) -> int:
        """The time of its last record, in nanoseconds since 1970."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return its line in the list of conversations."""
        ...

    def branches(self) -> Iterator[Branch]:
        """Yield its branches, newest first."""
        ...

    def branch(self, name: str) -> Branch | None:
        """Return the branch of this id."""
        ...

    def named(self, name: str) -> bool:
        """Return whether it, or a reply in it, has this id."""
        ...

    def moment(self, span: TokenSpan) -> float | None:
        """Return when a reply was recorded, in seconds since 1970; None if that is not known."""
        ...

    def texts(self) -> Iterator[str] | None:
        """Yield the whole texts of its branches; None if only the tokens spell them."""
        ...

    def nodes(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the nodes of its tree, parents before children, and whether some were left out.

        The `preview` of each is a function that makes it, so that many can be made in steps. `pictures` are the digests
        of its first images.
        """
        ...


Opened = AbstractAsyncContextManager[ConversationView | None]
"""Reads a conversation for an inspection; None if it has ended. Raises RouterError."""


def opening(parts: Iterable[tuple[TokenSpan, int]], most: int) -> list[int]:
    """Return the first `most` ids of a chain, one id for each image. `parts` are its spans, and how many tokens it takes."""
    found: list[int] = []
    for span, take in parts:
        if len(found) >= most:
            break
        media = [one for one in media_of(span) if one.start + one.length <= take]
        packed = span.ids[: ID_BYTES * (take if media else min(take, most))]
        found += unpack_ids(collapsed(packed, media))
    return found[:most]


def cut_reply(reply: TokenSpan, kept: int) -> dict[str, Any] | None:
    """Return how much of a reply a chain keeps that goes on after it; None if that is all of its text."""
    if kept >= reply.visible:
        return None
    return {"request_id": reply.request_ids[0] if reply.request_ids else "", "kept": kept, "of": reply.visible}


def name_branches(nodes: Mapping[str, dict[str, Any]], ends: Sequence[tuple[str, str]]) -> None:
    """Add to each node the branches that run through it, or some of them if there are many.

    `ends` are branches, each with the node where it ends.
    """
    for branch, at in ends:
        node = nodes.get(at)
        while node is not None and len(node["branch_of"]) < BRANCHES_OF_NODE:
            node["branch_of"].append(branch)  # if a node is full, all nodes above it are full
            node = nodes.get(node["parent"] or "")
