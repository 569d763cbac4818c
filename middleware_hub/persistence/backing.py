"""The store behind the radix tree, as users of the tree see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from middleware_hub.radix.cut import Cut
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Context, Namespace, Recall, SampledReply
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.extras import Extra
from middleware_hub.store.protocol import Batch
from middleware_hub.store.records import Event

Beside = Callable[[Generation], Sequence[Event]]
"""Returns what is to be appended with the record of a reply, whose span has its id by then."""


class Backing(Protocol):
    """The memory behind a tree that is only a cache: it fills the tree before a request asks it, and keeps what is recorded.

    `persistence.memory` implements it.
    """

    @property
    def away(self) -> bool:
        """Return whether the store is known not to answer, so that what is recorded now is not saved at once."""
        ...

    async def open(self) -> None:
        """Start, with the store open."""

    async def close(self) -> None:
        """Write everything that waits."""

    async def matched(self, match: PrefixMatch, parent: str | None, again: Callable[[], PrefixMatch]) -> PrefixMatch:
        """Return the match of a text, given the match in the tree as it is now; `again` matches once more."""
        ...

    async def cover(
        self, namespace: Namespace, text: str, names: Sequence[str] = (), *, parent: str | None = None
    ) -> bool:
        """Fill the tree with what it needs for a text, and with the replies of these names; return whether that was possible.

        `parent` is the name of a reply with which the text has to begin.
        """
        ...

    async def asked_late(self, namespace: Namespace, cut: Cut) -> Sequence[str]:
        """Ask for what the store could not be asked for when the prompts of a chain were made, and note that in its flags.

        Returns the names of the replies that these prompts passed over. Where the store does not answer, the flags stay.
        """
        ...

    def record(
        self, match: PrefixMatch, context: Context | None, reply: SampledReply, beside: Beside | None = None
    ) -> tuple[Generation, Awaitable[bool]]:
        """Record a reply in the tree, and begin to save it. The second value tells whether the store has acknowledged it.

        `beside` returns events that are appended together with it.
        """
        ...

    async def notes(self, namespace: Namespace, names: Sequence[str], *, whole: bool) -> Sequence[tuple[bytes, bytes]]:
        """Return the notes of these names, oldest first, each after the id of its reply; fill the tree with these replies.

        `whole` says that the caller still has all notes that it made or found. Raises StoreError.
        """
        ...

    def note(self, reply: Generation, notes: Callable[[], Sequence[Batch]]) -> Awaitable[bool]:
        """Begin to save the notes on a reply and those before it, see `noting`; the result tells whether they are in the store.

        `notes` makes them. If the store has forgotten the conversation meanwhile, that is written again, with what `notes`
        returns then; nothing is, if it returns nothing.
        """
        ...

    def noting(self, reply: TokenSpan, namespace: Namespace, names: Sequence[str], note: bytes) -> Batch:
        """Return what has to be appended for a note on a reply, to be found by these names."""
        ...

    async def bring(self, records: Mapping[bytes, bytes]) -> None:
        """Fill the tree with these replies, given by the ids of their records and their roots, if the store has them.

        Raises StoreError.
        """

    async def extras(self, span: TokenSpan, names: Sequence[str]) -> Mapping[str, Extra] | None:
        """Return what the store has besides a reply under these names; None if it cannot be read."""
        ...

    async def read_versions(self) -> None:
        """Learn which weight versions other routers have seen, as far as the store answers."""

    def retrieved(self, recall: Recall | None) -> None:
        """Note that a conversation was retrieved."""

    def taken(self, root: bytes) -> None:
        """Note that the conversation with this root was retrieved. It need not be in memory."""
