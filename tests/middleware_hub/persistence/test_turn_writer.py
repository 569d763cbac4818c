"""Replies that are written down together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from msgspec import Raw

from middleware_hub.persistence import saving
from middleware_hub.persistence.weight_versions import LOG
from middleware_hub.store.protocol import Batch
from tests.middleware_hub.persistence.lives import VOCABULARY, Ask, Life, Lives
from tests.middleware_hub.toy import E_HEAD, E_TAIL, EOS, A, B

NS = ("", "", "")
TOLD = {"output_token_sampling_mask": Raw(b"[[1,2],[3],[4]]")}
"""What a worker tells of three tokens."""


def ask(text: str, name: str, ids: list[int] | None = None, sampled: Sequence[int] = (A, B, EOS)) -> Ask:
    return Ask(NS, text, ids, None, [*sampled], name, "1")


def watched(lives: Lives, batches: list[Batch], refuses: Callable[[Batch], bool] = lambda _: False) -> Life:
    """Note what is appended in the first life, and refuse some of it."""
    store = lives.stores[0]
    append = store.append

    async def noted(batch: Batch) -> list[int]:
        batches.append(batch)
        if refuses(batch):
            raise ValueError("it cannot be")
        return await append(batch)

    store.append = noted  # type: ignore[method-assign]
    return lives.lives[0]


def replies(batch: Batch) -> list[str]:
    return [name for record in batch.records for name in record.request_ids]


def played(work: Callable[[Lives], Awaitable[None]], scheme: str = "sqlite") -> None:
    async def play() -> None:
        async with Lives(scheme, 1) as lives:
            await work(lives)
            assert [finding async for finding in lives.stores[0].verify()] == []
            there = {record.id: record async for record in lives.stores[0].scan()}
            # Each record comes after those it builds on, so a look-up has them in order at once.
            assert all(there[link].serial < record.serial for record in there.values() for link in record.links)

    asyncio.run(play())


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_what_is_recorded_at_once_is_one_batch(scheme: str) -> None:
    """Also where the replies share a prompt, and where one builds on another."""

    async def work(lives: Lives) -> None:
        batches: list[Batch] = []
        life = watched(lives, batches)
        asks = [ask("a b", "r0"), ask("a b", "r1"), ask("b a", "r2"), ask("a bab<e>b", "r3")]
        for one in asks:
            await lives.one.ask(one)
        await asyncio.gather(*(life.ask(one) for one in asks))
        assert [replies(batch) for batch in batches] == [["r0", "r1", "r2", "r3"]]
        assert life.memory is not None
        assert life.memory.saving.saved == 4
        await lives.restart(0)
        for text in ("a bab", "b aab", "a bab<e>bab"):
            await lives.retrieve(0, NS, text)

    played(work, scheme)


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_what_is_saved_may_be_collected(scheme: str) -> None:
    async def work(lives: Lives) -> None:
        for name, text in (("r0", "a b"), ("r1", "b a"), ("r2", "a bab<e>b")):
            await lives.ask(0, ask(text, name))
        tree = lives.lives[0].tree
        tree.max_tokens = 0
        assert not tree.collect()
        assert (tree.stats.generations, tree.stats.tokens) == (0, 0)
        await lives.retrieve(0, NS, "a bab<e>bab")

    played(work, scheme)


def test_a_reply_that_the_store_refuses_takes_no_other_with_it() -> None:
    async def work(lives: Lives) -> None:
        batches: list[Batch] = []
        life = watched(lives, batches, lambda batch: "bad" in replies(batch))
        asks = [ask("a b", "r0"), ask("b b", "bad"), ask("b a", "r2")]
        for one in asks:
            if one.name != "bad":
                await lives.one.ask(one)
        found = await asyncio.gather(*(life.ask(one) for one in asks), return_exceptions=True)
        assert [isinstance(one, AssertionError) for one in found] == [False, True, False]
        assert [replies(batch) for batch in batches] == [["r0", "bad", "r2"], ["r0"], ["bad"], ["r2"]]
        together, *apart = [[event.data for event in batch.events] for batch in batches]
        assert together, "the weight version, which no router has noted before"
        assert apart == [together, [], []]
        assert life.memory is not None
        saving = life.memory.saving
        assert (saving.saved, saving.unsaved, saving.lost) == (2, 1, 1)
        await lives.restart(0)
        await lives.retrieve(0, NS, "a bab")
        await lives.retrieve(0, NS, "b aab")

    played(work)


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_several_forgotten_conversations_go_on_at_once(scheme: str) -> None:
    async def work(lives: Lives) -> None:
        first = [await lives.ask(0, ask(text, text)) for text in ("a b", "b a", "ab ab")]  # the last has a name twice
        assert (await lives.stores[0].forget(0)).records
        asks = [ask(text + " b", f"then {text}") for text in first]
        life = lives.lives[0]
        for one in asks:
            await lives.one.ask(one)
        await asyncio.gather(*(life.ask(one) for one in asks))
        assert life.memory is not None
        assert life.memory.saving.unsaved == 0
        await lives.restart(0)
        for text in first:
            await lives.retrieve(0, NS, text + " bab")

    played(work, scheme)


@pytest.mark.parametrize("turns", [2, 120])
def test_a_forgotten_conversation_of_any_length_is_written_again_at_once(turns: int) -> None:
    """What it lacks is found out in two steps, not reply by reply: there is an end to how often a batch is mended."""

    async def work(lives: Lives) -> None:
        text = "a b"
        for number in range(turns):
            text = await lives.ask(0, ask(text + "b", f"r{number}"))
        assert (await lives.stores[0].forget(0)).records
        batches: list[Batch] = []
        watched(lives, batches)
        text = await lives.ask(0, ask(text + "b", "then"))
        assert [len(batch.records) for batch in batches] == [2, 3, 2 * turns + 2]
        await lives.restart(0)
        await lives.retrieve(0, NS, text)

    played(work, "memory")


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_a_forgotten_conversation_is_written_again_with_all_that_came_with_it(scheme: str) -> None:
    """What the worker told of each token of an earlier reply, and the news that go with the batch."""

    async def work(lives: Lives) -> None:
        store, memory = lives.stores[0], lives.lives[0].memory
        assert memory is not None
        text = await lives.ask(0, Ask(NS, "a b", None, None, [A, B, EOS], "r0", "1", told=TOLD))
        first = lives.lives[0].tree.reply(NS, "r0")
        assert first is not None
        name = first.span.stored.id
        before = await store.blobs(name)
        assert before
        assert (await store.forget(0)).records
        text = await lives.ask(0, Ask(NS, text + "b", None, None, [A, B, EOS], "r1", "2", told=TOLD))
        assert await store.blobs(name) == before
        news = b"".join([event.data for event in await store.read(LOG)])
        assert b"1" in news
        assert b"2" in news
        second = lives.lives[0].tree.reply(NS, "r1")
        assert second is not None
        assert len(await store.blobs(second.span.stored.id)) == len(before)
        await lives.restart(0)
        await lives.retrieve(0, NS, text)

    played(work, scheme)


def test_of_replies_that_wait_together_none_is_lost_because_of_another() -> None:
    """Also if the store has forgotten the conversation of one of them meanwhile."""

    async def work(lives: Lives) -> None:
        life, line, memory = lives.lives[0], lives.lines[0], lives.lives[0].memory
        assert memory is not None
        text = await lives.ask(0, ask("a b", "r0"))
        line.refuses = True
        one = ask(text + "b", "r1")
        await lives.one.ask(one)
        await asyncio.gather(life.ask(one, refused=True), life.ask(ask("b b", "bad"), refused=True))
        assert (await lives.stores[0].forget(0)).records
        watched(lives, [], lambda batch: "bad" in replies(batch))
        await lives.back(0)
        assert memory.saving.lost == 1
        await lives.restart(0)
        await lives.retrieve(0, NS, text + "bab")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "RETRY_SECONDS", 0.0)
        played(work)


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_a_forgotten_conversation_that_goes_on_is_found_by_its_ids(scheme: str) -> None:
    """What its ids spell is not its text: nobody spelled the first end of turn."""

    async def work(lives: Lives) -> None:
        text = await lives.ask(0, ask("a b", "r0"))
        text = await lives.ask(0, ask(text + "b", "r1"))
        assert (await lives.stores[0].forget(0)).records
        await lives.ask(0, ask(text + "b", "r2"))
        await lives.restart(0)
        ids = await lives.chain_of(0, NS, "r1")
        assert ids is not None
        await lives.restart(0)
        await lives.ask(0, ask(VOCABULARY.spell(ids[:-1]), "r3", ids[:-1]))

    played(work, scheme)


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
@pytest.mark.parametrize("more", [[], [B]])
def test_a_reply_that_completes_the_character_with_which_its_prompt_ended_is_found_by_its_ids(
    scheme: str, more: list[int]
) -> None:
    """Its text is empty, or begins behind that character: no text of more ids begins with the half of it."""

    async def work(lives: Lives) -> None:
        await lives.ask(0, ask("a b", "r0", sampled=[A, E_HEAD]))
        for name, sampled in (("r1", [E_TAIL, *more, EOS]), ("r2", [A, EOS]), ("r3", [B])):
            chain = await lives.chain_of(0, NS, f"r{int(name[1]) - 1}")
            assert chain is not None
            await lives.restart(0)
            text = await lives.ask(0, ask(VOCABULARY.spell(chain), name, chain, sampled))
            await lives.restart(0)
            await lives.retrieve(0, NS, text)

    played(work, scheme)


@pytest.mark.parametrize("scheme", ["sqlite", "redis"])
def test_routers_that_take_turns_spell_only_what_is_new(scheme: str) -> None:
    """Each reply is recorded by the router that lacks the one before it. `CheckedSpelling` compares with the whole chain."""
    whole: list[str] = []

    def spell(ids: Sequence[int]) -> str:
        whole.append(VOCABULARY.spell(ids))
        return whole[-1]

    def watch(life: Life) -> None:
        assert life.memory is not None
        life.memory._turns._spelling._spell = spell

    async def play() -> None:
        async with Lives(scheme, 2) as lives:
            for life in lives.lives:
                watch(life)
            text = "a b"
            for number in range(40):
                text = await lives.ask(number % 2, ask(text + "b ab", f"r{number}"))
            await lives.restart(0)
            watch(lives.lives[0])
            await lives.ask(0, ask(text + "b", "r40"))
            await lives.restart(1)
            await lives.ask(1, ask(text[:-1] + "ab", "r41"))  # leaves a reply midway

    asyncio.run(play())
    assert whole
    assert max(map(len, whole)) < 10


def test_what_was_gathered_is_written_when_a_router_ends() -> None:
    async def work(lives: Lives) -> None:
        await lives.one.ask(ask("a b", "r0"))
        asking = asyncio.create_task(lives.lives[0].ask(ask("a b", "r0")))
        await asyncio.sleep(0)
        await lives.restart(0)
        await asking
        await lives.retrieve(0, NS, "a bab")

    played(work)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("scheme", ["memory", "sqlite", "redis"])
def test_a_conversation_that_is_retrieved_before_it_is_in_the_store_counts_as_retrieved(
    scheme: str, refuses: bool
) -> None:
    """The store has nothing to mark while the first turn is gathered, or waits in the spool."""

    async def work(lives: Lives) -> None:
        life, line, memory = lives.lives[0], lives.lines[0], lives.lives[0].memory
        assert memory is not None
        line.refuses = refuses
        await lives.one.ask(ask("a b", "r0"))
        asking = asyncio.create_task(life.ask(ask("a b", "r0"), refused=refuses))
        while not life.tree.stats.generations:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0)
        memory.retrieved(life.tree.recall(NS, "a bab"))
        memory.retrieved(life.tree.recall(NS, "a bab"))
        await lives.stores[0].forget_roots([bytes(16)])  # marks are written before
        await asking
        await lives.back(0)
        gone = await lives.stores[0].forget(0)
        assert (gone.retrieved, gone.unretrieved) == (1, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "RETRY_SECONDS", 0.0)
        played(work, scheme)
