"""The message trie: every kind of fork, and random agent histories compared with an oracle that keeps full token lists."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from middleware_hub.chat.keys import adapter_of, strict, tools_of
from middleware_hub.chat.messages import Message
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, NewTurn, PreparedTurn
from middleware_hub.sessions.trie.trie import MessageTrie, TrieClosedError
from middleware_hub.spans.chain import TokenSpan, chain_ids, pack_ids, unpack_ids
from tests.conftest import examples
from tests.middleware_hub.sessions.trie.recount import recount

SETTING = b"tools"


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


@dataclass
class Talk:
    """Drives a trie as a session does, with made-up tokens: context is `-n`, sampled ones are what the test says."""

    trie: MessageTrie = field(default_factory=MessageTrie)
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def open(
        self, *messages: Message, setting: bytes = SETTING, parent: str | None = None
    ) -> tuple[PreparedTurn, BranchHandle]:
        turn = self.trie.prepare(setting, messages, parent=parent)
        return turn, self.trie.open(turn, f"g{next(self.ids)}")

    def commit(
        self, handle: BranchHandle, reply: Message, *sampled: int, context: int = 2, **details: Any
    ) -> Checkpoint:
        above = handle.checkpoint
        before = TokenSpan(
            None if above is None else above.span,
            0 if above is None else len(above.span),
            0,
            pack_ids([1000 + next(self.ids) for _ in range(context)]),
            0,
        )
        span = TokenSpan(before, context, 0, pack_ids(sampled or (next(self.ids),)), 0, versions="1")
        return self.trie.commit(handle, NewTurn(reply, span, **{"finish": "stop", **details}))

    def say(
        self,
        *messages: Message,
        reply: str = "yes",
        setting: bytes = SETTING,
        parent: str | None = None,
        **details: Any,
    ) -> Checkpoint:
        _, handle = self.open(*messages, setting=setting, parent=parent)
        made = self.commit(handle, assistant(reply), **details)
        recount(self.trie)
        return made


def ids_of(checkpoint: Checkpoint) -> list[int]:
    return unpack_ids(chain_ids(checkpoint.span, len(checkpoint.span)))


class TestForks:
    """The rows of the contract's table."""

    def test_a_conversation_is_one_chain(self) -> None:
        talk = Talk()
        first = talk.say(user("a"), reply="b")
        second = talk.say(user("a"), assistant("b"), user("c"), reply="d")
        assert second.parent is first
        assert ids_of(second)[: len(ids_of(first))] == ids_of(first)
        assert talk.trie.checkpoints(terminal=True) == [second]
        assert talk.trie.nodes == 4

    def test_another_system_prompt_is_another_edge_from_the_root(self) -> None:
        talk = Talk()
        one = talk.say(system("plan"), user("a"))
        other = talk.say(system("code"), user("a"))
        assert one.node is not other.node
        assert talk.trie.checkpoints(terminal=True) == [one, other]

    def test_a_condensed_context_forks_from_the_checkpoint_there(self) -> None:
        talk = Talk()
        first = talk.say(user("a"), reply="b")
        long = talk.say(user("a"), assistant("b"), user("c"), reply="d")
        condensed = talk.say(user("a"), assistant("b"), user("in short: c"), reply="d")
        assert (long.parent, condensed.parent) == (first, first)
        assert talk.trie.checkpoints(terminal=True) == [long, condensed]

    def test_the_same_input_with_another_output_is_a_sibling(self) -> None:
        talk = Talk()
        one, other = talk.say(user("a"), reply="b"), talk.say(user("a"), reply="c")
        assert one.node is not other.node
        assert one.node.parent is other.node.parent

    def test_the_same_output_sampled_again_is_one_more_sample_of_the_same_node(self) -> None:
        talk = Talk()
        samples = [talk.say(user("a"), reply="b") for _ in range(3)]
        assert len({id(sample.node) for sample in samples}) == 1
        assert samples[0].node.samples == samples
        assert talk.trie.checkpoints(terminal=True) == samples

    def test_turns_that_were_never_sampled_are_context(self) -> None:
        talk = Talk()
        turn, handle = talk.open(user("a"), assistant("few-shot"), user("b"))
        assert (turn.checkpoint, turn.covered) == (None, 0)
        talk.commit(handle, assistant("c"))
        recount(talk.trie)

    def test_a_rewritten_turn_forks_there_and_the_sampled_one_stays(self) -> None:
        talk = Talk()
        first = talk.say(user("a"), reply="b")
        sampled = talk.say(user("a"), assistant("b"), user("c"), reply="d")
        rewritten = talk.say(user("a"), assistant("b"), user("c"), assistant("better d"), user("e"), reply="f")
        assert rewritten.parent is first
        assert talk.trie.checkpoints(terminal=True) == [sampled, rewritten]

    def test_going_back_to_an_older_branch_continues_its_checkpoint(self) -> None:
        talk = Talk()
        talk.say(user("a"), reply="b")
        old = talk.say(user("a"), assistant("b"), user("c"), reply="d")
        talk.say(user("a"), assistant("b"), user("other"), reply="e")
        back = talk.say(user("a"), assistant("b"), user("c"), assistant("d"), user("f"), reply="g")
        assert back.parent is old

    def test_other_tools_begin_a_branch_and_lose_nothing(self) -> None:
        talk = Talk()
        before = talk.say(user("a"), reply="b")
        turn, handle = talk.open(user("a"), assistant("b"), user("c"), setting=b"other tools")
        assert turn.checkpoint is None
        after = talk.commit(handle, assistant("d"))
        assert talk.trie.checkpoints(terminal=True) == [before, after]
        again, _ = talk.open(user("a"), assistant("b"), user("c"))
        assert again.checkpoint is before


class TestWhichSample:
    """A node with several samples."""

    def test_the_newest_is_continued_and_the_choice_is_reported(self) -> None:
        talk = Talk()
        talk.say(user("a"), reply="b")
        newest = talk.say(user("a"), reply="b")
        turn, _ = talk.open(user("a"), assistant("b"), user("c"))
        assert (turn.checkpoint, turn.ambiguous) == (newest, True)

    def test_equal_reasoning_picks(self) -> None:
        talk = Talk()
        thought = talk.say(user("a"), reply="b", reasoning="hm")
        talk.say(user("a"), reply="b", reasoning="well")
        turn, _ = talk.open(user("a"), assistant("b", reasoning_content="hm"), user("c"))
        assert (turn.checkpoint, turn.ambiguous) == (thought, False)

    def test_reasoning_that_the_client_has_stripped_picks_too(self) -> None:
        talk = Talk()
        thought = talk.say(user("a"), reply="b", reasoning=" hm\n")
        talk.say(user("a"), reply="b", reasoning="well")
        turn, _ = talk.open(user("a"), assistant("b", reasoning_content="hm"), user("c"))
        assert (turn.checkpoint, turn.ambiguous) == (thought, False)
        talk.say(user("a"), reply="b", reasoning="hm ")
        turn, _ = talk.open(user("a"), assistant("b", reasoning_content=" hm\n"), user("c"))
        assert (turn.checkpoint, turn.ambiguous) == (thought, False)

    def test_a_named_parent_picks(self) -> None:
        talk = Talk()
        first = talk.say(user("a"), reply="b")
        talk.say(user("a"), reply="b")
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), parent=first.id)
        assert (turn.checkpoint, turn.ambiguous, turn.unknown_parent) == (first, False, False)

    def test_a_parent_that_is_not_on_the_path_is_reported(self) -> None:
        talk = Talk()
        other = talk.say(user("elsewhere"))
        mine = talk.say(user("a"), reply="b")
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), parent=other.id)
        assert (turn.checkpoint, turn.unknown_parent) == (mine, True)


class TestEdited:
    """An assistant's message that was not sampled, beside one that was."""

    def test_the_samples_beside_it_are_named_newest_first_and_held(self) -> None:
        """They may be what it is an echo of, so none may be dropped while that is found out."""
        talk = Talk()
        older, newer = talk.say(user("a"), reply="b "), talk.say(user("a"), reply="b  ")
        turn, handle = talk.open(user("a"), assistant("b"), user("c"))
        assert (turn.checkpoint, turn.edited) == (None, ((2, (newer, older)),))
        assert (older.users, newer.users) == (1, 1)
        talk.trie.abandon(handle)
        assert (older.users, newer.users) == (0, 0)
        recount(talk.trie)

    def test_the_deepest_of_several_comes_first(self) -> None:
        talk = Talk()
        first = talk.say(user("a"), reply="b ")
        deeper = talk.say(user("a"), assistant("b"), user("c"), reply="d ")
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), assistant("d"), user("e"))
        assert turn.edited == ((4, (deeper,)), (2, (first,)))

    def test_what_was_sampled_behind_it_is_continued_instead(self) -> None:
        talk = Talk()
        talk.say(user("a"), reply="b ")
        behind = talk.say(user("a"), assistant("b"), user("c"), reply="d")
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), assistant("d"), user("e"))
        assert (turn.checkpoint, turn.edited) == (behind, ())

    def test_a_message_with_nothing_sampled_beside_it_is_no_edit(self) -> None:
        talk = Talk()
        talk.say(user("a"), reply="b")
        turn, _ = talk.open(user("x"), assistant("b"), user("c"))
        assert turn.edited == ()


class TestPending:
    """What has not been committed."""

    def test_it_is_not_continued(self) -> None:
        talk = Talk()
        talk.open(user("a"))
        turn, _ = talk.open(user("a"), assistant("b"), user("c"))
        assert turn.checkpoint is None

    def test_it_goes_with_its_last_handle(self) -> None:
        talk = Talk()
        talk.say(user("a"), reply="b")
        _, one = talk.open(user("a"), assistant("b"), user("c"), user("d"))
        _, other = talk.open(user("a"), assistant("b"), user("c"))
        talk.trie.abandon(one)
        assert talk.trie.nodes == 3
        talk.trie.abandon(other)
        talk.trie.abandon(other)
        assert talk.trie.nodes == 2
        recount(talk.trie)

    def test_a_turn_of_which_nothing_comes_leaves_nothing(self) -> None:
        talk = Talk()
        _, handle = talk.open(user("a"), user("b"))
        talk.trie.abandon(handle)
        assert talk.trie.nodes == 0
        recount(talk.trie)

    def test_a_late_commit_is_refused(self) -> None:
        talk = Talk()
        first = talk.say(user("a"), reply="b")
        _, handle = talk.open(user("a"), assistant("b"), user("c"))
        talk.trie.close()
        assert talk.trie.nodes == 2
        with pytest.raises(TrieClosedError):
            talk.commit(handle, assistant("late"))
        with pytest.raises(TrieClosedError):
            talk.open(user("a"))
        assert talk.trie.checkpoints() == [first]
        recount(talk.trie)

    def test_a_turn_continued_in_place_takes_the_place_of_its_beginning(self) -> None:
        talk = Talk()
        turn, handle = talk.open(user("a"), assistant("The answer"))
        span = TokenSpan(None, 0, 0, pack_ids([7]), 0, versions="1")
        made = talk.trie.commit(handle, NewTurn(assistant("The answer is 4"), span, "stop", in_place=True))
        recount(talk.trie)
        assert talk.trie.nodes == 2
        following, _ = talk.open(user("a"), assistant("The answer is 4"), user("sure?"))
        assert following.checkpoint is made
        assert turn.node.handles == 0

    @pytest.mark.parametrize("apart", [False, True])
    @pytest.mark.parametrize("more", [" is 4", ""])
    def test_a_sampled_turn_is_continued_in_place(self, apart: bool, more: str) -> None:
        """Its prompt may have been rendered again: then it is a branch of its own, beside the one that it goes on from."""
        talk = Talk()
        talk.say(user("q"), reply="a")
        asked = [user("q"), assistant("a"), user("r")]
        cut = talk.say(*asked, reply="The answer", finish="length")
        turn, handle = talk.open(*asked, assistant("The answer"))
        assert turn.checkpoint is cut
        handle.goes_on_from(cut, apart=apart)
        span = TokenSpan(cut.span, len(cut.span), 0, pack_ids([7]), 0, versions="1")
        made = talk.trie.commit(handle, NewTurn(assistant("The answer" + more), span, "stop", in_place=True))
        recount(talk.trie)
        assert (made.parent, made.apart, made.node.depth) == (cut, apart, cut.node.depth)
        assert talk.trie.checkpoints(terminal=True) == ([cut, made] if apart else [made])
        following = talk.say(*asked, assistant("The answer" + more), user("sure?"))
        assert following.parent is made
        talk.trie.clear()
        recount(talk.trie)


class TestSize:
    """Deep, and wide."""

    def test_five_thousand_turns(self) -> None:
        talk, said = Talk(), []
        for number in range(5_000):
            said.append(user(f"u{number}"))
            if number % 500 == 499:
                checkpoint = talk.say(*said, reply=f"a{number}")
            said.append(assistant(f"a{number}"))
        recount(talk.trie)
        assert checkpoint.node.depth == 10_000 - 0
        talk.trie.clear()
        recount(talk.trie)

    def test_ten_thousand_siblings(self) -> None:
        talk = Talk()
        for number in range(10_000):
            _, handle = talk.open(user("a"))
            talk.commit(handle, assistant(f"b{number}"))
        recount(talk.trie)
        assert len(talk.trie.checkpoints(terminal=True)) == 10_000
        talk.trie.clear()

    def test_a_chain_that_is_very_long_is_freed_without_a_crash(self) -> None:
        talk, said = Talk(), []
        for number in range(3_000):
            said.append(user(f"u{number}"))
            _, handle = talk.open(*said[-3:], setting=b"%d" % number) if False else talk.open(*said)
            talk.commit(handle, assistant("ok"), number)
            said.append(assistant("ok"))
            if number == 300:
                break
        talk.trie.clear()
        assert talk.trie.nodes == 0


ONE, OTHER, SOME, MORE_TOOLS, ON, OFF = (letter * 16 for letter in (b"1", b"2", b"s", b"m", b"+", b"-"))
SETTINGS = [ONE + SOME + ON, ONE + SOME + OFF, ONE + MORE_TOOLS + ON, ONE + MORE_TOOLS + OFF, OTHER + SOME + ON]
"""Adapter, tools, options."""


class TestElsewhere:
    """The same messages under other tools or options."""

    def test_what_others_ask_pushes_nothing_out(self) -> None:
        """Twelve foreign sets of tools were enough, whatever was asked under them."""
        talk = Talk()
        mine = talk.say(user("a"), reply="b", setting=SETTINGS[0])
        for number in range(1_000):
            asked = user("a" if number % 2 else f"{number}")
            talk.commit(talk.open(asked, setting=ONE + b"%016d" % number + ON)[1], assistant("b"))
        turn, handle = talk.open(user("a"), assistant("b"), user("c"), setting=SETTINGS[1])
        assert turn.checkpoint is None
        assert turn.elsewhere is mine, "the one with the same tools"
        talk.trie.abandon(handle)
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), setting=ONE + b"n" * 16 + ON)
        assert turn.elsewhere is talk.trie.newest, "the newest"

    def test_another_adapter_is_another_model(self) -> None:
        talk = Talk()
        other = talk.say(user("a"), reply="b", setting=SETTINGS[0])
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), setting=SETTINGS[4])
        assert turn.elsewhere is None
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), setting=SETTINGS[4], parent=other.id)
        assert (turn.elsewhere, turn.unknown_parent) == (None, True)

    @pytest.mark.parametrize("own", [False, True])
    def test_a_named_parent_picks(self, own: bool) -> None:
        """It is neither the newest, nor the one with the same tools."""
        talk = Talk()
        named = talk.say(user("a"), reply="b", setting=SETTINGS[2])
        for setting in SETTINGS[1:3]:
            talk.say(user("a"), reply="b", setting=setting)
        mine = talk.say(user("a"), reply="b", setting=SETTINGS[0]) if own else None
        turn, handle = talk.open(user("a"), assistant("b"), user("c"), setting=SETTINGS[0], parent=named.id)
        assert (turn.elsewhere, turn.checkpoint, turn.unknown_parent) == (named, mine, True)
        assert named.users == 1, "it cannot be dropped while the turn is composed"
        talk.trie.abandon(handle)

    def test_a_turn_that_turns_out_to_continue_one_has_it_as_its_parent(self) -> None:
        """The handle held it from the start, and did not continue it yet."""
        talk = Talk()
        other = talk.say(user("a"), reply="b", setting=SETTINGS[0])
        turn, handle = talk.open(user("a"), assistant("b"), user("c"), setting=SETTINGS[1])
        assert (turn.elsewhere, handle.checkpoint) == (other, None)
        handle.goes_on_from(other, apart=True)
        made = talk.commit(handle, assistant("d"))
        assert (made.parent, other.users, other.continued) == (other, 1, 0)
        recount(talk.trie)

    def test_paths_that_only_have_a_hash_in_common_are_two(self) -> None:
        talk = Talk()
        other = talk.say(user("x"), reply="b", setting=SETTINGS[0])
        talk.open(user("a"), assistant("b"), user("c"), setting=SETTINGS[1])
        (node,) = [node for node in talk.trie.each_node() if node.depth == 2 and not node.samples]
        node.path_hash = other.node.path_hash
        turn, _ = talk.open(user("a"), assistant("b"), user("c"), setting=SETTINGS[1])
        assert turn.elsewhere is None


TEXTS = st.sampled_from(["a", "b", "c"])


@dataclass
class Known:
    """What the oracle knows of a sample: the whole conversation, and the whole token list."""

    setting: bytes
    messages: list[Message]
    ids: list[int]
    reasoning: str


class AgentHistories(RuleBasedStateMachine):
    """Random requests, commits, cancellations and resamplings against lists that are never shared."""

    @initialize(kind=st.sampled_from([None, strict]))
    def begin(self, kind: Any) -> None:
        self.trie = MessageTrie() if kind is None else MessageTrie(kind)
        self.known: dict[str, Known] = {}
        self.open: list[tuple[BranchHandle, bytes, list[Message], list[int]]] = []
        self.count = itertools.count(1)

    @rule(
        data=st.data(),
        setting=st.sampled_from(SETTINGS),
        texts=st.lists(TEXTS, min_size=1, max_size=3),
        samples=st.integers(1, 3),
    )
    def ask(self, data: st.DataObject, setting: bytes, texts: list[str], samples: int) -> None:
        history: list[Message] = []
        if self.known and data.draw(st.booleans(), label="go on"):
            history = list(data.draw(st.sampled_from(list(self.known.values())), label="which").messages)
            if data.draw(st.booleans(), label="cut"):
                history = history[: data.draw(st.integers(0, len(history)), label="where")]
        messages = [*history, *(user(text) for text in texts)]
        parent = data.draw(st.sampled_from([None, "nobody", *self.known]), label="parent")
        named = self._named(setting, messages, parent)
        mine = named is not None and self.known[named].setting == setting
        expected = named if mine else self._expected(setting, messages)
        turn = self.trie.prepare(setting, messages, parent=parent)
        assert turn.unknown_parent == (parent is not None and not mine)
        if expected is None:
            assert turn.checkpoint is None
            chain = []
        else:
            assert turn.checkpoint is not None
            assert turn.checkpoint.id == expected
            chain = ids_of(turn.checkpoint)
            assert chain == self.known[expected].ids
            assert turn.covered == len(self.known[expected].messages)
        elsewhere = self._elsewhere(setting, messages, turn.covered) if named is None else None if mine else named
        assert (turn.elsewhere and turn.elsewhere.id) == elsewhere
        for _ in range(samples):
            handle = self.trie.open(turn, f"g{next(self.count)}")
            self.open.append((handle, setting, messages, chain))

    def _named(self, setting: bytes, messages: list[Message], parent: str | None) -> str | None:
        """The parent that a request names, if the request goes on with it for the same adapter."""
        known = None if parent is None else self.known.get(parent)
        if known is None or adapter_of(known.setting) != adapter_of(setting):
            return None
        return parent if messages[: len(known.messages)] == known.messages else None

    def _expected(self, setting: bytes, messages: list[Message]) -> str | None:
        """The newest sample of the longest known conversation that this one goes on with."""
        best: tuple[int, int, str] | None = None
        for order, (name, known) in enumerate(self.known.items()):
            size = len(known.messages)
            if known.setting == setting and messages[:size] == known.messages:
                best = max(best or (0, 0, ""), (size, order, name))
        return None if best is None else best[2]

    def _elsewhere(self, setting: bytes, messages: list[Message], covered: int) -> str | None:
        """The longest one under another setting, if it is longer: with the same tools if there is one, else the newest."""
        best: tuple[int, bool, int, str] | None = None
        for order, (name, known) in enumerate(self.known.items()):
            size, other = len(known.messages), known.setting
            if other == setting or adapter_of(other) != adapter_of(setting) or size <= covered:
                continue
            if messages[:size] == known.messages:
                found = (size, tools_of(other) == tools_of(setting), order, name)
                best = found if best is None else max(best, found)
        return None if best is None else best[3]

    @rule(data=st.data(), text=TEXTS, reasoning=st.sampled_from(["", "hm"]))
    def commit(self, data: st.DataObject, text: str, reasoning: str) -> None:
        if not self.open:
            return
        handle, setting, messages, chain = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        context, sampled = [next(self.count) for _ in range(2)], [next(self.count) for _ in range(3)]
        above = handle.checkpoint
        before = TokenSpan(None if above is None else above.span, 0 if above is None else 3, 0, pack_ids(context), 0)
        span = TokenSpan(before, 2, 0, pack_ids(sampled), 0, versions="1")
        made = self.trie.commit(handle, NewTurn(assistant(text), span, "stop", reasoning=reasoning))
        self.known[made.id] = Known(setting, [*messages, assistant(text)], [*chain, *context, *sampled], reasoning)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            handle, *_ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.trie.abandon(handle)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """As a memory of limited size does."""
        unused = [one for one in self.trie.checkpoints() if not one.users]
        if unused and data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(unused), label="which")
            self.trie.drop(gone)
            del self.known[gone.id]

    @rule()
    def ask_and_leave(self) -> None:
        before = self.trie.nodes
        turn = self.trie.prepare(SETTINGS[0], [user("never"), user("sent")])
        self.trie.abandon(self.trie.open(turn, f"g{next(self.count)}"))
        assert self.trie.nodes == before

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "trie"):
            return
        recount(self.trie)
        found = {one.id: one for one in self.trie.checkpoints()}
        assert list(found) == list(self.known)
        for name, known in self.known.items():
            assert ids_of(found[name]) == known.ids
        pending = [node for node in self.trie.each_node() if not node.committed]
        assert bool(pending) <= bool(self.open)


AgentHistories.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestAgentHistories = AgentHistories.TestCase
