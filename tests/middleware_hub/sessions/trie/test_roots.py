"""Roots: what conversations begin with, numbered by first commits, and forgotten with their last turn."""

from __future__ import annotations

from middleware_hub.chat.keys import setting_of
from middleware_hub.chat.messages import ChatRequest
from tests.middleware_hub.sessions.trie.test_trie import Talk, assistant, system, user

TOOL = {"type": "function", "function": {"name": "look"}}
NONE, TOOLS, MORE = (setting_of(ChatRequest(messages=(), tools=tools)) for tools in (None, [TOOL], [TOOL, TOOL]))


def test_the_first_root_that_offers_tools_is_the_head() -> None:
    talk = Talk()
    title = talk.say(user("a"), reply="title", setting=NONE)
    assert talk.trie.head is title
    task = talk.say(system("s"), user("a"), reply="b", setting=TOOLS)
    assert talk.trie.head is task
    other = talk.say(system("t"), user("a"), reply="b", setting=TOOLS)
    assert [one.root.number for one in (title, task, other)] == [0, 1, 2]
    assert [one.root.beside(task.root) for one in (title, task, other)] == [True, False, True]
    assert (talk.trie.head, talk.trie.newest) == (task, other)


def test_a_conversation_stays_in_its_root_under_other_tools() -> None:
    talk = Talk()
    first = talk.say(user("a"), reply="b", setting=TOOLS)
    second = talk.say(user("a"), assistant("b"), user("c"), reply="d", setting=MORE)
    third = talk.say(user("a"), assistant("b"), user("c"), assistant("d"), user("e"), reply="f", setting=TOOLS)
    assert first.root is second.root is third.root
    assert talk.say(user("a"), assistant("b"), user("sum up"), reply="s", setting=NONE).root is not first.root


def test_an_own_beginning_of_those_tools_keeps_its_root() -> None:
    """The later conversation with these tools belongs to the first root, and not to this one."""
    talk = Talk()
    first = talk.say(user("a"), reply="b", setting=TOOLS)
    other = talk.say(user("x"), reply="y", setting=MORE)
    assert talk.say(user("a"), assistant("b"), user("c"), reply="d", setting=MORE).root is first.root
    assert talk.say(user("x"), assistant("y"), user("z"), reply="w", setting=MORE).root is other.root
    assert talk.say(user("new"), reply="y", setting=MORE).root is other.root


def test_a_root_is_forgotten_with_its_last_turn() -> None:
    """Chats without a session are dropped one by one: what they began with must not stay."""
    talk = Talk()
    title = talk.say(user("a"), reply="title", setting=NONE)
    first = talk.say(user("a"), reply="b", setting=TOOLS)
    task = talk.say(user("a"), reply="b", setting=TOOLS)
    for dropped in (first, task):
        assert talk.trie.head_root is task.root
        talk.trie.drop(dropped)
    assert talk.trie.head is title
    talk.trie.drop(title)
    assert (talk.trie.head, talk.trie.head_root) == (None, None)
    again = talk.say(user("a"), reply="b", setting=TOOLS)
    assert (again.root.number, talk.trie.head) == (2, again)


def test_nothing_stays_of_many() -> None:
    talk = Talk()
    for number in range(100):
        talk.trie.drop(talk.say(system(f"{number}"), user("a"), reply="b", setting=TOOLS))
    roots = talk.trie._beginnings
    assert not roots._roots
    assert not roots._by_beginning
