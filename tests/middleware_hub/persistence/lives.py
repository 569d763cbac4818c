"""One history of requests, lived by a tree that never dies and by trees that come and go over one store."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from middleware_hub.persistence.memory import Memory
from middleware_hub.persistence.saving import Saving
from middleware_hub.persistence.spelling import Spelling
from middleware_hub.persistence.turn_writer import whole_chain
from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.records import Context, Recall, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import SpanFlag, TokenSpan, chain_ids, pack_ids, pack_logprobs, unpack_ids
from middleware_hub.spans.trajectory import flatten
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.opening import open_store
from middleware_hub.store.paths import TextEnd, TextPath
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Serials
from middleware_hub.tokenizer.alignment import align_context, align_reply
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.store.world import MEMORY
from tests.middleware_hub.toy import encode, toy_vocabulary
from tests.support.redis_server import empty_redis

Namespace = tuple[str, ...]
VOCABULARY = toy_vocabulary()


@dataclass
class Ask:
    """A request: of a text or of ids; then what is sampled for it."""

    namespace: Namespace
    text: str
    ids: list[int] | None
    parent: str | None
    sampled: list[int]
    name: str
    version: str
    skips: bool = True
    told: dict[str, Raw] = field(default_factory=dict)


class Line:
    """The way from one process to a store: it takes as many turns of the event loop as dice say, and it may refuse writes."""

    def __init__(self, store: Store, dice: random.Random | None = None) -> None:
        self._store, self._dice = store, dice
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._waiting(found) if name in ("append", "find", "get", "read") else found

    def _waiting(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **more: Any) -> Any:
            await self._turns()
            if self.refuses and method.__name__ == "append":
                raise StoreUnreachableError("it takes no writes")
            found = await method(*args, **more)
            await self._turns()
            return found

        return call

    async def _turns(self) -> None:
        for _ in range(0 if self._dice is None else self._dice.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)


BROKEN = "\ufffd"


class CheckedSpelling(Spelling):
    """Compares each answer with what the whole chain spells."""

    start = 1  # the toy vocabulary has no BOS, so short chains are spelled like long ones

    def __init__(self) -> None:
        super().__init__(VOCABULARY.spell, VOCABULARY.spell, VOCABULARY.special_ids)

    def apart(self, reply: TokenSpan, path: TextPath, line: TokenSpan | None) -> tuple[bool, TextEnd | None]:
        plain, end = super().apart(reply, path, line)
        spelled = VOCABULARY.spell(unpack_ids(chain_ids(reply, reply.visible)))
        if path.text.endswith(BROKEN):
            wholes = (VOCABULARY.spell(unpack_ids(chain_ids(reply, n))) for n in range(reply.visible, len(reply) + 1))
            completed = (one for one in wholes if not one.startswith(spelled) and not one.endswith(BROKEN))
            spelled = next(completed, spelled)
        assert plain == (spelled == path.text)
        assert end == (None if plain else TextPath(path.namespace, spelled).end())
        return plain, end


class Life:
    """One process, or what is left of one: a tree, with a store behind it or without."""

    away = False
    """Whether the store may fail: then replies need not be saved."""

    def __init__(
        self, store: Store | None, serials: Serials, max_tokens: int | None = None, saving: Saving | None = None
    ) -> None:
        self.tree = RadixTree(
            VOCABULARY, max_tokens=max_tokens, clock=VersionClock(), stored=store is not None, unretrieved_versions=None
        )
        self.memory: Memory | None = None
        if store is not None:
            log = VersionLog(store, self.tree.clock, WorkerVersions())
            self.memory = Memory(self.tree, store, serials, log, CheckedSpelling(), saving=saving)

    async def begin(self) -> None:
        if self.memory is not None:
            await self.memory._versions.read()
            await self.memory.open()

    async def end(self) -> None:
        if self.memory is not None:
            await self.memory.close()

    async def die(self) -> None:
        """End as SIGKILL does: nothing is written any more."""
        if self.memory is not None and self.memory._tending is not None:
            self.memory._tending.cancel()
            await asyncio.wait([self.memory._tending])

    async def ask(self, ask: Ask, *, refused: bool = False) -> dict[str, Any]:
        """Play a request to its end, as the middleware does, and return all that shows outside.

        `refused`: the store takes no writes, and the client is told.
        """
        return await self.answer(ask, await self.match(ask), refused=refused)

    async def match(self, ask: Ask) -> PrefixMatch:
        """Begin a request: return its match, pinned."""

        def match_again() -> PrefixMatch:
            if ask.ids is None:
                return self.tree.match(ask.namespace, ask.text, parent=ask.parent)
            ids = ask.ids
            return self.tree.match_ids(
                ask.namespace, ask.text, pack_ids(ids), lambda n: len(VOCABULARY.spell(ids[:n])), parent=ask.parent
            )

        match = match_again()
        if self.memory is not None:
            match = await self.memory.matched(match, ask.parent, match_again)
        self.tree.pin(match)
        return match

    async def answer(self, ask: Ask, match: PrefixMatch, *, refused: bool = False) -> dict[str, Any]:
        """End a request: record what is sampled for it, and return all that shows outside."""
        kept = unpack_ids(chain_ids(match.cut.span, match.cut.take))
        if ask.ids is None:
            rest, given = encode(ask.text[match.cut.start :]), SpanFlag.NONE
        else:
            rest, given = ask.ids[len(kept) :], SpanFlag.GIVEN
        context = None
        if rest or match.cut.start < len(ask.text):
            over = align_context(VOCABULARY, rest, ask.text[match.cut.start :], bos=(), offsets=lambda: None)
            context = Context(pack_ids(rest), over.flags | given, over.ends)
        before = (kept + rest)[-1:]  # the engine decodes a reply behind the prompt, which may end inside a character
        primed = before if VOCABULARY.spell(before) == BROKEN else []
        shown = VOCABULARY.spell(primed + ask.sampled, skip_special=ask.skips)[len(primed) :]
        over = align_reply(VOCABULARY, ask.sampled, shown, skips_special=ask.skips, matched=None)
        reply = SampledReply(
            pack_ids(ask.sampled),
            shown,
            ask.version,
            pack_logprobs([-(len(ask.name) * 16 + i + 1) / 64 for i in range(len(ask.sampled))]),
            over.visible,
            over.flags,
            over.ends,
            over.tail,
            tuple(ask.name.split()),
            told=ask.told,
            kv_version=ask.version if len(ask.sampled) % 2 else None,
        )
        if self.memory is None:
            self.tree.record(match, context, reply)
        else:
            _, saving = self.memory.record(match, context, reply)
            assert await saving is not refused or self.away
        self.tree.unpin(match)
        self.collect()
        return {
            "sent": kept + rest,
            "reasons": match.reasons,
            "text": ask.text + shown,
            "version": self.tree.clock.current,
        }

    async def retrieve(self, namespace: Namespace, text: str, request_id: str | None = None) -> dict[str, Any] | None:
        if self.memory is not None:
            assert await self.memory.cover(namespace, text, parent=request_id)
        recall = self.tree.recall(namespace, text, request_id=request_id)
        if self.memory is not None:
            self.memory.retrieved(recall)
        found = None if recall is None else shown(recall)
        self.collect()
        return found

    async def chain_of(self, namespace: Namespace, name: str) -> list[int] | None:
        """The tokens of the newest reply of a name, wherever it is."""
        if self.memory is not None:
            assert await self.memory.cover(namespace, "a", [name])
        found = self.tree.reply(namespace, name)
        return None if found is None else unpack_ids(chain_ids(found.span, found.span.count))

    def collect(self) -> None:
        while self.tree.collect():
            pass
        recount(self.tree)


def shown(recall: Recall) -> dict[str, Any]:
    """What is remembered of a text.

    Context that no sampled token follows is left out: a store brings no chains for it, so a tree may know such a text a
    little further. Encoded again, it has the same ids.
    """
    flat = flatten(recall.cut.span, recall.cut.take)
    mask = flat.loss_mask.tolist()
    exact = recall.exact and bool(mask) and mask[-1] == 1
    size = len(mask) if exact else max((at + 1 for at, one in enumerate(mask) if one), default=0)
    return {
        "tokens": flat.token_ids.tolist()[:size],
        "mask": mask[:size],
        "logprobs": None if flat.logprobs is None else flat.logprobs.tolist()[:size],
        "versions": [*flat.weight_versions],
        "reasons": flat.reasons if exact else (),
        "turns": [turn.described() for turn in flat.turns],
        "start": recall.cut.start if exact else None,
        "exact": exact,
        "request_ids": recall.request_ids,
    }


class Lives:
    """The same requests, asked of one life that never ends, and in turns of several that do."""

    def __init__(self, scheme: str, lives: int, max_tokens: int | None = None, seed: int | None = None) -> None:
        """`seed`: of how many turns of the event loop each call of the store takes; else it takes those that it needs."""
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        # The event loop is busy for seconds on a busy machine: that is no server that does not answer.
        patient = "?socket_timeout=20&socket_connect_timeout=20"
        self.address = empty_redis() + patient if scheme == "redis" else f"{scheme}:{self.folder.name}/store.sqlite3"
        self.one = Life(None, Serials())
        self.count, self.max_tokens = lives, max_tokens
        self.stores: list[Store] = []
        self.lines: list[Line] = []
        self._dice = None if seed is None else random.Random(seed)
        self.lives: list[Life] = []
        self.serials = Serials()  # of one machine, with one clock

    async def __aenter__(self) -> Lives:
        shared = open_store(self.address)
        if self.address.startswith("memory"):
            shared.others = itertools.count(1).__next__  # type: ignore[method-assign]  # it takes itself for the only one
        for _ in range(self.count):
            store = shared if self.address.startswith("memory") else open_store(self.address)
            await store.open("toy")
            self.stores.append(store)
            self.lines.append(Line(store, self._dice))
            self.lives.append(self._life(len(self.lives)))
            await self.lives[-1].begin()
        return self

    def _life(self, number: int) -> Life:
        as_store: Any = self.lines[number]
        return Life(as_store, self.serials, self.max_tokens)

    async def __aexit__(self, *_: object) -> None:
        for life, store in zip(self.lives, self.stores, strict=True):
            await life.end()
            await store.close()
        self.folder.cleanup()

    async def restart(self, number: int, *, killed: bool = False) -> None:
        number %= self.count
        await (self.lives[number].die() if killed else self.lives[number].end())
        if not self.address.startswith("memory"):
            await self.stores[number].close()
            self.stores[number] = open_store(self.address)
            await self.stores[number].open("toy")
        self.lines[number] = Line(self.stores[number], self._dice)
        self.lives[number] = self._life(number)
        await self.lives[number].begin()

    async def back(self, number: int) -> None:
        """The store takes the writes of one life again, and is handed what waits there."""
        self.lines[number % self.count].refuses = False
        memory = self.lives[number % self.count].memory
        while memory is not None and memory.saving.waiting:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0)

    async def ask(self, number: int, ask: Ask, *, alone: bool = True) -> str:
        """`alone`: nothing else is asked meanwhile, so that the current version is known."""
        expected = await self.one.ask(ask)
        found = await self.lives[number % self.count].ask(ask, refused=self.lines[number % self.count].refuses)
        if not alone:
            found["version"] = expected["version"]
        assert found == expected
        return str(found["text"])

    async def retrieve(self, number: int, namespace: Namespace, text: str, request_id: str | None = None) -> None:
        expected = await self.one.retrieve(namespace, text, request_id)
        assert await self.lives[number % self.count].retrieve(namespace, text, request_id) == expected

    async def chain_of(self, number: int, namespace: Namespace, name: str) -> list[int] | None:
        expected = await self.one.chain_of(namespace, name)
        assert await self.lives[number % self.count].chain_of(namespace, name) == expected
        return expected

    async def made_again(self, number: int) -> None:
        """Each record that a life would write down again is the one that is there.

        Else an append that was taken for lost, and comes late, would be refused as another content.
        """
        life, store = self.lives[number % self.count], self.stores[number % self.count]
        assert life.memory is not None
        there = {record.id: record async for record in store.scan()}
        for span in [span for span in life.tree.stored.values() if span.sampled]:
            again = whole_chain(lambda span, record: None, span.owner, life.tree.extras.of, CheckedSpelling().apart)
            for record in again.records:  # the id of a context is its content
                assert record.id in there
                assert not record.sampled or record == there[record.id]


def run(work: Any) -> None:
    asyncio.run(work)
