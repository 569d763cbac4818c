"""Conversations for the tests of stores: made as the tree makes them, and kept whole by an oracle that compares texts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from middleware_hub.spans.chain import SpanFlag, pack_ids, pack_logprobs
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.store.opening import open_store
from middleware_hub.store.paths import Namespace, TextPath
from middleware_hub.store.protocol import Batch, Durability, Found, Query, Store
from middleware_hub.store.records import Serials, SpanRecord, identified, new_id
from tests.support.redis_server import empty_cluster, empty_redis, empty_valkey

NS: Namespace = ("", "", "")
EOS = HiddenToken(1, "<|im_end|>", True, 0)


MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A folder in which syncing takes no time, for tests that make many stores."""


def ids_of(text: str) -> bytes:
    return pack_ids([ord(character) for character in text])


@dataclass(frozen=True)
class Turn:
    """A recorded reply, the context before it (if it has one of its own), and its whole text."""

    reply: SpanRecord
    context: SpanRecord | None
    text: str

    @property
    def records(self) -> list[SpanRecord]:
        return [self.reply] if self.context is None else [self.context, self.reply]

    @property
    def path(self) -> TextPath:
        return TextPath(self.reply.namespace, self.text)

    @property
    def batch(self) -> Batch:
        return Batch(self.records, {self.reply.id: self.path})


@dataclass
class World:
    """Makes turns, and knows all of them."""

    serials: Serials = field(default_factory=Serials)
    turns: list[Turn] = field(default_factory=list)

    def turn(
        self,
        line: Turn | None,
        user: str,
        reply: str,
        *,
        namespace: Namespace = NS,
        own_context: bool = True,
        inside: int | None = None,
        names: tuple[str, ...] = (),
        flags: int = SpanFlag.NONE,
        tail: tuple[HiddenToken, ...] = (),
        stamp: str = "1",
        each: int = 1,
    ) -> Turn:
        """Return the reply to a prompt that goes on behind `line`, or leaves its reply after `inside` characters.

        A token is `each` characters. A cut inside keeps tokens of the reply, but continues the complete reply before it.
        """
        above, continued = line, line
        before, start, take = "", 0, 0
        if line is not None:
            namespace = line.reply.namespace
            before, start, take = line.text, line.reply.text_end, line.reply.count
            if inside is not None:
                start = line.reply.start + inside
                before, take = line.text[:start], inside
                continued = next((turn for turn in self.turns if turn.reply.id == line.reply.line), None)
            elif line.reply.tail:
                # The text spells the end of turn: its characters are the chain's, and not the context's.
                before += EOS.text
                start += len(EOS.text)
        prompt = before + user
        base = None if continued is None else continued.reply
        parent = None if above is None else above.reply
        context = None
        if own_context or parent is None:
            context = identified(
                SpanRecord(
                    id=b"",
                    root=b"" if parent is None else parent.root,
                    namespace=namespace,
                    serial=self.serials.next(),
                    stamp=stamp,
                    start=start,
                    width=len(prompt) - start,
                    text=prompt[0 if base is None else base.text_end :],
                    ids=ids_of(user[::each]),
                    parent=None if parent is None else parent.id,
                    take=take,
                    line=None if base is None else base.id,
                    base=None if base is None else base.id,
                )
            )
        else:
            prompt = before
        behind = context or parent
        under = context or base
        assert behind is not None
        whole = prompt + reply
        shown = reply[::each]
        count = len(shown) + sum(token.tokens for token in tail)
        sampled = SpanRecord(
            id=new_id(),
            root=behind.root,
            namespace=namespace,
            serial=self.serials.next(),
            stamp=stamp,
            start=len(prompt),
            width=len(reply),
            text=whole[0 if under is None else under.text_end :],
            ids=ids_of(shown + "\0" * (count - len(shown))),
            parent=behind.id,
            take=context.count if context is not None else take,
            line=None if base is None else base.id,
            base=None if under is None else under.id,
            logprobs=pack_logprobs([-(i % 7) / 8 for i in range(count)]),
            versions=stamp,
            flags=flags,
            visible=len(shown),
            tail=tail,
            request_ids=names,
            finish="stop",
            kv_version=stamp if len(shown) % 2 else None,
        )
        made = Turn(sampled, context, whole)
        self.turns.append(made)
        return made

    def ending_on(self, text: str, namespace: Namespace, known_from: int = 0) -> list[Turn]:
        """Return the replies that are complete on the path of a text."""
        return [
            turn
            for turn in self.turns
            if turn.reply.namespace == namespace and len(turn.text) >= max(1, known_from) and text.startswith(turn.text)
        ]

    def leaving(self, text: str, namespace: Namespace, floor: int) -> list[Turn]:
        """Return the replies of which the text has something, behind `floor`, but not all."""
        return [
            turn
            for turn in self.turns
            if turn.reply.namespace == namespace and agreed(turn.text, text) > max(floor, turn.reply.start)
        ]


def agreed(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def closed(found: Found, known: Container[bytes] = ()) -> bool:
    """Return whether each record comes behind all that it builds on."""
    here: set[bytes] = set()
    for record in found.records:
        if any(link not in here and link not in known for link in record.links):
            return False
        here.add(record.id)
    return True


def ids(found: Found) -> set[bytes]:
    return {record.id for record in found.records}


def query(text: str, namespace: Namespace = NS, **options: Any) -> Query:
    return Query(TextPath(namespace, text), **options)


def with_store(
    address: str,
    work: Callable[[Store], Awaitable[Any]],
    fingerprint: str | None = "toy",
    durability: Durability = "process",
) -> Any:
    """Open a store, do something with it, and close it."""

    async def run() -> Any:
        store = open_store(address, durability=durability)
        await store.open(fingerprint)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def append_all(store: Store, turns: Sequence[Turn]) -> None:
    for turn in turns:
        await store.append(turn.batch)


async def findings(store: Store) -> list[str]:
    return [finding.kind async for finding in store.verify()]


def address_of(kind: str, folder: Path) -> str:
    """Return the address of an empty store of a kind; `folder` is for those that are files."""
    return {
        "memory": lambda: "memory:process",
        "sqlite": lambda: sqlite(folder),
        "redis": empty_redis,
        "valkey": empty_valkey,
        "cluster": empty_cluster,
    }[kind]()


def sqlite(folder: Path) -> str:
    return f"sqlite:{folder / 'store.sqlite3'}"
