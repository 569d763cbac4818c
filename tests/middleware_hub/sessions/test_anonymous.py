"""Chats without a session are remembered as long as there is room, the most recent conversations first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.keys import canonical
from middleware_hub.sessions.anonymous import SHARE, AnonymousSession, OpenChats
from middleware_hub.sessions.log import chat_notes
from middleware_hub.sessions.log.chat_notes import ChatNotes, Noted
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt, PromptIds, PromptIdsCache
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, NewTurn
from middleware_hub.spans.chain import TokenSpan, chain_ids, pack_ids
from middleware_hub.store.chains import Stored
from tests.middleware_hub.sessions.trie.recount import recount

SETTING = b"setting"


class Room:
    """An anonymous session, and generations in it."""

    def __init__(self, max_tokens: int) -> None:
        self.session = AnonymousSession("", canonical, max_tokens=max_tokens)
        self.session.prompts = self.prompts = PromptIdsCache()
        self.serial = 0

    def begin(self, messages: list[dict[str, Any]]) -> tuple[BranchHandle, ComposedPrompt]:
        turn = self.session.trie.prepare(SETTING, messages)
        self.serial += 1
        handle = self.session.trie.open(turn, str(self.serial))
        above = None if turn.checkpoint is None else turn.checkpoint.span
        contexts = turn.node.contexts = turn.node.contexts or []
        context = next((one for one in contexts if one.parent is above), None)
        if context is None:
            context = TokenSpan(above, 0 if above is None else len(above), 0, pack_ids([len(messages)] * 3), 0)
            contexts.append(context)
        return handle, ComposedPrompt(
            turn.checkpoint, context, 3, PromptIds.of(chain_ids(context, 3)), context.offset + 3, 0
        )

    def end(self, handle: BranchHandle, prompt: ComposedPrompt, says: str) -> Checkpoint:
        span = TokenSpan(prompt.span, prompt.take, 0, pack_ids([7, 8]), 0, versions="1")
        message = {"role": "assistant", "content": says}
        checkpoint = self.session.trie.commit(handle, NewTurn(message, span, "stop"))
        self.prompts.keep(checkpoint, prompt.ids)
        self.session.committed(checkpoint)
        return checkpoint

    def ends(self) -> list[Checkpoint]:
        """The last turns of its conversations, in the order in which they were sampled."""
        return self.session.trie.checkpoints(terminal=True)

    def check(self) -> None:
        """Counted again: a token is held by a sample, or by a context that a sample stands on."""
        trie = self.session.trie
        recount(trie)
        samples = trie.checkpoints()
        contexts = {id(one.span.parent): len(one.span.parent) for one in samples if one.span.parent is not None}
        assert self.session.tokens == sum(len(one.span) for one in samples) + sum(contexts.values())
        assert self.session.samples == len(samples)
        assert self.prompts._kept.keys() <= {one.id for one in samples}


def talk(path: tuple[int, ...]) -> list[dict[str, Any]]:
    """A conversation: what the user says, and the replies to it but for the last one."""
    found: list[dict[str, Any]] = []
    for number, word in enumerate(path):
        if number:
            found.append({"role": "assistant", "content": "r"})
        found.append({"role": "user", "content": str(word)})
    return found


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@given(st.lists(st.tuples(PATHS, st.sampled_from(["commit", "abandon", "wait"])), max_size=30), st.integers(0, 40))
def test_it_holds_what_there_is_room_for(steps: list[tuple[tuple[int, ...], str]], room: int) -> None:
    """Whatever is in flight, a chain is never dropped from under it."""
    place = Room(room)
    waiting: list[tuple[BranchHandle, ComposedPrompt]] = []
    for path, end in steps:
        handle, prompt = place.begin(talk(path))
        if end == "commit":
            place.end(handle, prompt, "r")
        elif end == "abandon":
            place.session.trie.abandon(handle)
        else:
            waiting.append((handle, prompt))
        place.check()
        if not waiting:
            assert place.session.tokens <= room
    for handle, prompt in waiting:
        assert prompt.checkpoint is None or prompt.checkpoint.id in {c.id for c in place.session.trie.checkpoints()}
        place.end(handle, prompt, "late")
        place.check()
    place.end(*place.begin(talk((9,))), "r")
    assert place.session.tokens <= room
    place.check()


def test_the_least_recently_used_conversation_goes_first_from_its_end() -> None:
    place = Room(30)
    for path in ((0,), (0, 1), (0, 1, 2), (1,), (1, 1)):
        place.end(*place.begin(talk(path)), "r")
    kept = {len(one.node.path()) for one in place.session.trie.checkpoints()}
    assert place.session.tokens == 25
    place.end(*place.begin(talk((1, 1, 2))), "r")
    place.end(*place.begin(talk((1, 1, 2, 0))), "r")
    words = [[node.message for node in one.node.path()] for one in place.session.trie.checkpoints(terminal=True)]
    assert kept == {2, 4, 6}
    # Of the first conversation two turns are left: its last one went.
    assert sorted(map(len, words)) == [4, 8]


def test_a_conversation_that_lost_its_end_is_dropped_first() -> None:
    """What stood before a turn that went was last used before it: later conversations stay until it is gone, too."""
    place = Room(20)
    for path in ((0,), (0, 1), (0, 1, 2), (1,)):
        place.end(*place.begin(talk(path)), "r")
    left = []
    for word in (2, 3, 4, 5):
        place.end(*place.begin(talk((word,))), "r")
        place.check()
        left.append([msgspec.json.decode(one.node.path()[0].message)["content"] for one in place.ends()])
    assert left == [["0", "1", "2"], ["0", "1", "2", "3"], ["1", "2", "3", "4"], ["2", "3", "4", "5"]]


def test_room_is_made_after_many_turns_that_another_process_sampled() -> None:
    """One request may bring a whole conversation. What it brought goes, too, although the request has only one end."""
    place = Room(20)
    for turns in range(1, 9):
        handle, prompt = place.begin(talk(tuple(range(turns))))
        span = TokenSpan(prompt.span, prompt.take, 0, pack_ids([7, 8]), 0, versions="1")
        message = {"role": "assistant", "content": "r"}
        place.session.restored(place.session.trie.commit(handle, NewTurn(message, span, "stop")))
    assert place.session.tokens == 40
    place.end(*place.begin(talk((9,))), "r")
    place.check()
    assert place.session.tokens <= 20


def test_requests_that_commit_nothing_do_not_let_a_memory_grow() -> None:
    """They may bring turns of other processes, to count tokens for one. The next request makes room."""
    chats = OpenChats(max_tokens=20 * SHARE)
    place = Room(0)
    place.session = chats.of("", "")
    for word in range(9):
        handle, prompt = place.begin(talk((word,)))
        span = TokenSpan(prompt.span, prompt.take, 0, pack_ids([7, 8]), 0, versions="1")
        message = {"role": "assistant", "content": "r"}
        place.session.restored(place.session.trie.commit(handle, NewTurn(message, span, "stop")))
    assert place.session.tokens == 45
    assert chats.of("", "") is place.session
    place.check()
    assert place.session.tokens <= 20


def test_a_turn_that_is_dropped_while_the_store_is_filled_again_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling waits for the store after each group of turns, and chats go on meanwhile."""
    monkeypatch.setattr(chat_notes, "_WRITTEN_AT_ONCE", 1)
    place, replies, kept = Room(100), {}, []

    class Memory:
        def noting(self, reply: TokenSpan, namespace: Any, names: list[str], note: bytes) -> str:
            return names[0]

    class Store:
        async def append(self, batch: str) -> None:
            kept.append(batch)
            for one in reversed(place.session.trie.checkpoints()[1:]):
                place.session.trie.drop(one)

    for turns in range(1, 4):
        checkpoint = place.end(*place.begin(talk(tuple(range(turns)))), "r")
        record = b"%d" % turns
        checkpoint.span.stored = Noted(record)
        replies[record] = SimpleNamespace(stored=Stored(record, b"1"), owner=SimpleNamespace(namespace=("", "", "")))
    hub: Any = SimpleNamespace(tree=SimpleNamespace(stored=replies), memory=Memory())
    store: Any = Store()
    asyncio.run(ChatNotes(hub, "", "", place.session.trie, place.session.restored).refill(store))
    assert kept == ["1"]
