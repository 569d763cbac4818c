"""A body that is parsed with the help of the memo gives the same request as one that is parsed for the first time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from starlette.types import Message as AsgiMessage

from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.keys import canonical, setting_of
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.dialects.anthropic import Anthropic
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.sessions.controls import topology
from middleware_hub.sessions.trie.memo import MOST_BODIES, KnownBody, Landmark, MemoRoom, MessageMemo
from middleware_hub.sessions.trie.nodes import NewTurn, PreparedTurn
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import TokenSpan, pack_ids
from router.errors import BadRequestError
from tests.middleware_hub.sessions.in_process import PATH, Room
from tests.middleware_hub.sessions.trie.recount import recount

Json = dict[str, Any]

SAID: list[Json] = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": 'a"}], "messages": [{"role": "user", "content": "b'},
    {"role": "assistant", "content": "b"},
    {"role": "assistant", "content": "\N{OLD PERSIAN SIGN A}\n"},
    {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
]
FAULTY: list[Any] = [{"role": "nobody"}, 7, {"content": "a"}]
STYLES: list[tuple[str, str]] = [(",", ":"), (", ", ": "), (" ,\n", " :\t")]


@st.composite
def _body(draw: st.DrawFn) -> bytes:
    """Short conversations of few messages, so that bodies begin alike; some are malformed, or say things twice."""
    messages: list[Any] = draw(st.lists(st.sampled_from(SAID), max_size=7))
    if draw(st.integers(0, 9)) == 0:
        messages = [*messages, draw(st.sampled_from(FAULTY))]
    separators = draw(st.sampled_from(STYLES))

    def written(value: Any) -> str:
        return json.dumps(value, separators=separators, ensure_ascii=draw(st.booleans()))

    fields = [("messages", written(messages)), ("max_tokens", "5")]
    if draw(st.booleans()):
        fields.insert(draw(st.integers(0, 2)), ("system", written(draw(st.sampled_from(["s", "t"])))))
    if draw(st.integers(0, 5)) == 0:
        copied = {"messages": messages}
        fields.insert(draw(st.integers(0, 2)), ("metadata", written(copied)))
    if draw(st.integers(0, 5)) == 0:
        fields.insert(draw(st.integers(0, 2)), ("messages", written(draw(st.lists(st.sampled_from(SAID), max_size=3)))))
    body = "{" + separators[0].join(f'"{key}"{separators[1]}{value}' for key, value in fields) + "}"
    return body[: -draw(st.integers(1, 9)) if draw(st.integers(0, 19)) == 0 else None].encode()


def _grown(bodies: list[bytes], draw: st.DrawFn) -> bytes:
    """An earlier body with some messages more, as the next turn of a conversation is; perhaps with another system prompt."""
    body = draw(st.sampled_from(bodies))
    if draw(st.booleans()):
        body = body.replace(b'"s"', b'"t"')
    more = ",".join(json.dumps(one) for one in draw(st.lists(st.sampled_from(SAID), min_size=1, max_size=2)))
    return body.replace(b"}]", b"}," + more.encode() + b"]", 1)


@st.composite
def _bodies(draw: st.DrawFn) -> list[bytes]:
    found = [draw(_body())]
    for _ in range(draw(st.integers(1, 12))):
        found.append(_grown(found, draw) if draw(st.integers(0, 2)) else draw(_body()))
    return found


BODIES: SearchStrategy[list[bytes]] = _bodies()


def _read(dialect: Dialect, body: bytes, memo: MessageMemo | None) -> ChatRequest | str:
    try:
        return dialect.parse(body, memo)
    except BadRequestError as error:
        return str(error)


@pytest.mark.parametrize("dialect", [OpenAI(), Anthropic()], ids=["openai", "anthropic"])
@given(bodies=BODIES, room=st.sampled_from([0, 300, 10**9]))
def test_a_body_is_read_as_if_for_the_first_time(dialect: Dialect, bodies: list[bytes], room: int) -> None:
    """Forks, resends, other styles, fields that are there twice, copies of the messages elsewhere, and no room at all."""
    shared = MemoRoom(room)
    memos = [MessageMemo(canonical, shared), MessageMemo(canonical, shared)]
    for number, body in enumerate(bodies):
        found, expected = _read(dialect, body, memos[number % 2]), _read(dialect, body, None)
        assert found == expected
        assert shared.size <= room
        assert len(shared) == sum(map(len, memos))
    for memo in memos:
        memo.clear()
    assert not shared.size


@pytest.mark.parametrize("dialect", [OpenAI(), Anthropic()], ids=["openai", "anthropic"])
@given(bodies=BODIES, ends=st.lists(st.integers(0, 2), min_size=13, max_size=13), other=st.booleans())
def test_the_trie_is_the_same_however_its_messages_were_read(
    dialect: Dialect, bodies: list[bytes], ends: list[int], other: bool
) -> None:
    """Generations are committed, abandoned, or left in flight; settings change. A walk from a landmark ends where others do."""
    memo, short, long = MessageMemo(canonical, MemoRoom()), MessageTrie(), MessageTrie()
    for number, (body, end) in enumerate(zip(bodies, ends, strict=False)):
        request, plain = _read(dialect, body, memo), _read(dialect, body, None)
        if isinstance(request, str) or isinstance(plain, str):
            continue
        setting = setting_of(request) if number % 3 or not other else b"another"
        parent = str(number // 2) if number % 2 else None
        turns: list[PreparedTurn] = []
        for trie, asked in ((short, request), (long, plain)):
            turn = trie.prepare(setting, asked.messages, parent=parent)
            handle = trie.open(turn, str(number))
            turns.append(turn)
            if end == 0:
                trie.abandon(handle)
            elif end == 1:
                span = TokenSpan(None, 0, 0, pack_ids([number + 1]), 0, versions="1")
                trie.commit(handle, NewTurn({"role": "assistant", "content": "b"}, span, "stop"))
            recount(trie)
        one, two = turns
        assert (one.covered, one.ambiguous, one.unknown_parent) == (two.covered, two.ambiguous, two.unknown_parent)
        assert (one.checkpoint and one.checkpoint.id) == (two.checkpoint and two.checkpoint.id)
        assert topology(short) == topology(long)


def test_a_list_that_is_there_twice_is_not_taken_for_the_other() -> None:
    """The last one counts; the first begins alike, and what stands behind it would go on with the wrong one."""
    one, other = SAID[0], SAID[2]
    front = json.dumps({"messages": [one, other], "documents": [{"role": "user", "content": "c"}] * 3})
    for length in range(1, 300):
        memo, long = MessageMemo(canonical, MemoRoom()), {"role": "user", "content": "l" * length}
        twice = front[:-1] + ', "messages": ' + json.dumps([one, long]) + "}"
        for body in (twice.encode(), front.encode()):
            assert OpenAI().parse(body, memo) == OpenAI().parse(body, None)


@pytest.mark.parametrize(
    "around", ['{"messages": [%s], "messages": [%s]}', '{"metadata": {"messages": [%s]}, "messages": [%s]}']
)
def test_the_same_end_counts_only_behind_the_messages_themselves(around: str) -> None:
    """A list in front begins like the one that counts, and grows; the one that counts stays as it was."""
    memo = MessageMemo(canonical, MemoRoom())
    first, new, last = (json.dumps({"role": "user", "content": content}) for content in ("a", "new", "last"))
    for listed in ([first, last], [first, new, last], [first, new, new, last]):
        body = (around % (", ".join(listed), first)).encode()
        assert OpenAI().parse(body, memo) == OpenAI().parse(body, None)


@pytest.mark.parametrize("dialect", [OpenAI(), Anthropic()], ids=["openai", "anthropic"])
@pytest.mark.parametrize(
    "end",
    [b'{"role": "nobody"}]}', b'7], "top_p": 2}', b'%b], "messages": [%b, %b], "top_p": 1}'],
    ids=["a fault", "a fault among other fields", "another list"],
)
def test_what_comes_behind_known_messages_is_read_as_if_they_were_new(dialect: Dialect, end: bytes) -> None:
    """A fault is named with its place; of two lists the last one counts."""
    memo = MessageMemo(canonical, MemoRoom())
    messages = [json.dumps(one).encode() for one in (SAID[0], SAID[2], SAID[0], SAID[4])]
    front = b'{"max_tokens": 5, "messages": [' + b", ".join(messages[:3])
    assert not isinstance(_read(dialect, front + b"]}", memo), str)
    body = front + b", " + (end % (messages[2], messages[3], messages[0]) if b"%" in end else end)
    found = _read(dialect, body, memo)
    assert found == _read(dialect, body, None)
    assert isinstance(found, str) is (b"%" not in end)


@pytest.mark.parametrize("dialect", [OpenAI(), Anthropic()], ids=["openai", "anthropic"])
def test_the_fields_around_known_messages_are_read_once(dialect: Dialect) -> None:
    """They are the same request's as long as they are the same bytes, in front of the messages and behind them."""
    memo = MessageMemo(canonical, MemoRoom())

    def read(turns: int, *, limit: int = 5, name: str = "m") -> ChatRequest:
        messages = json.loads(_conversation(turns))["messages"]
        tools, before = [{"type": "function", "function": {"name": "f"}}], {"model": name, "user": "s"}
        if isinstance(dialect, Anthropic):
            tools, before = [{"name": "f", "input_schema": {"type": "object"}}], {"model": name, "system": "s"}
        fields = {**before, "messages": messages, "max_tokens": limit, "tools": tools}
        body = json.dumps(fields).encode()
        found = dialect.parse(body, memo)
        assert found == dialect.parse(body, None)
        return found

    first = read(1)
    for turns in (3, 5, 5, 3, 7):
        assert read(turns).tools is first.tools
    for other in (read(9, limit=6), read(9, name="n")):
        assert other.tools is not first.tools
    assert read(11, limit=6).sampling["max_new_tokens"] == 6


def _conversation(turns: int) -> bytes:
    messages = [{"role": ("user", "assistant")[number % 2], "content": str(number)} for number in range(turns)]
    return json.dumps({"messages": messages, "max_tokens": 5}).encode()


@pytest.mark.parametrize("dialect", [OpenAI(), Anthropic()], ids=["openai", "anthropic"])
def test_what_is_known_is_not_read_again(dialect: Dialect) -> None:
    """A turn that goes on, the same one once more, and one that forks: only what is new is left to be read."""
    memo = MessageMemo(canonical, MemoRoom())
    dialect.parse(_conversation(101), memo)
    for turns, left in ((103, 2), (103, 1), (51, 1), (105, 2)):
        recalled = memo.recall(_conversation(turns))
        assert recalled is not None
        assert recalled.items == turns - left
        assert len(recalled.body) < 150
        dialect.parse(_conversation(turns), memo)


def test_resent_requests_and_sub_agents_share_few_bodies() -> None:
    """Many samples of one turn are one body; of many agents the ones that spoke last are known."""
    memo, dialect = MessageMemo(canonical, MemoRoom()), OpenAI()
    for _ in range(3):
        dialect.parse(_conversation(7), memo)
    assert len(memo) == 1
    agents = [json.dumps({"messages": [{"role": "system", "content": str(i)}, *[SAID[0]] * 3]}) for i in range(20)]
    for agent in agents:
        dialect.parse(agent.encode(), memo)
    assert len(memo) == MOST_BODIES
    assert memo.recall(agents[-1].encode()) is not None
    assert memo.recall(_conversation(9)) is None


# What it costs, and for how long it is kept ------------------------------------------------------------------------------


class Counting(bytes):
    """Counts what is copied out of it."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.copied += len(found) if isinstance(found, bytes) else 1
        return found


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(0, 30), st.data())
def test_a_body_is_compared_in_linear_time(sizes: list[int], long: int, data: st.DataObject) -> None:
    """Wherever two bodies part, and however long a single message is: no character is copied twice."""
    sizes[min(long, len(sizes) - 1)] *= 100
    messages = [b"%d" % (number % 10) * size for number, size in enumerate(sizes)]
    text = Counting(b'{"messages":[' + b",".join(messages))
    ends = [len(b'{"messages":[' + b",".join(messages[:count])) for count in range(1, len(messages) + 1)]
    known = KnownBody(text, 13, ends, list(range(1, len(ends) + 1)), [], Landmark())
    parts_at = data.draw(st.sampled_from([0, len(text), *ends, *(end - 1 for end in ends)]))
    body = bytes(text)[:parts_at] + b"x" + bytes(text)[parts_at + 1 :]
    assert known.common(body) == sum(end <= parts_at for end in ends)
    assert text.copied <= len(text)


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/sessions/s"), ("POST", "/sessions/s/finalize")])
def test_a_body_that_arrives_after_the_end_of_its_session_is_not_kept(method: str, path: str) -> None:
    """The session was there when the request began; nobody would clear what is kept for it now."""

    async def work() -> None:
        room = Room()
        await room.open()
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 1000}]}).encode()
        sent: list[AsgiMessage] = []

        async def receive() -> AsgiMessage:
            status, _ = await room.call(method, path)
            assert status == 200
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: AsgiMessage) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", "state": {}}
        await room.app(scope, receive, send)
        assert sent[0]["status"] == 409
        chats = room.app._chats
        assert chats is not None
        assert (len(chats._room), chats._room.size) == (0, 0)

    asyncio.run(work())


def test_what_is_known_goes_with_its_session() -> None:
    async def work() -> None:
        room = Room()
        await room.open()
        status, _ = await room.ask({"messages": [{"role": "user", "content": "a"}]}).answer()
        assert status == 200
        chats = room.app._chats
        assert chats is not None
        assert len(chats._room) == 1
        await room.call("DELETE", "/sessions/s")
        assert (len(chats._room), chats._room.size) == (0, 0)

    asyncio.run(work())
