"""A context that several generations share: what the verifier finds wrong with it is wrong with all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.prompt.composer import share
from middleware_hub.sessions.trie.nodes import MessageNode, PreparedTurn
from middleware_hub.spans.chain import TokenSpan, pack_ids
from tests.middleware_hub.sessions.in_process import Client, Room, gated, until

# The first message is written in another way as soon as there is another: what goes on is not what the whole would be.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if loop.first and not loop.last and 'odd' in message.content %}{{- 'oddly: ' }}{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "odd.jinja"
    file.write_text(TEMPLATE)
    return str(file)


def body(word: str, reply: str = "", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"an {word} one"}]
    if reply:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And?"}]
    return {"messages": messages, "max_tokens": 20, **more}


async def exported(room: Room) -> list[tuple[bool, list[str]]]:
    _, found = await room.call("POST", "/sessions/s/finalize")
    return [(one["exact"], one["reasons"]) for one in found["trajectories"]]


def reasons(client: Client) -> str:
    found: bytes = dict(client.out[0]["headers"]).get(b"x-radix-reasons", b"")
    return found.decode()


@pytest.mark.parametrize("word", ["odd", "even"])
def test_a_later_equal_request_gets_it_too(template: str, word: str) -> None:
    """It gets the context that is there, which is not verified a second time."""
    wrong = word == "odd"
    expected = "template_mismatch" if wrong else ""

    async def work() -> None:
        room = Room(chat_template=template, verify_rate=1.0)
        await room.open()
        assert (await room.ask(body(word)).answer())[0] == 200
        for _ in range(2):
            client = room.ask(body(word, "Yes.", n=2))
            assert (await client.answer())[0] == 200
            assert reasons(client) == expected
        assert room.metric("tito_session_turns_total", kind="template_mismatch", reason="") == 2 * wrong
        (node,) = [node for node in room.session.trie.each_node() if node.depth == 3]
        assert len(node.contexts or ()) == 1
        assert await exported(room) == [(not wrong, [expected] * wrong)] * 4

    asyncio.run(work())


def test_requests_that_are_composed_at_once_share_it(template: str) -> None:
    async def work() -> None:
        room, slow = gated(chat_template=template, verify_rate=1.0)
        await room.open()
        slow.gate.set()
        assert (await room.ask(body("odd")).answer())[0] == 200
        slow.gate.clear()
        clients = [room.ask(body("odd", "Yes.")) for _ in range(3)]
        await until(lambda: slow.waiting == 4)
        slow.gate.set()
        assert [(await client.answer())[0] for client in clients] == [200] * 3
        assert [reasons(client) for client in clients] == ["template_mismatch"] * 3
        (node,) = [node for node in room.session.trie.each_node() if node.depth == 3]
        assert len(node.contexts or ()) == 1
        assert await exported(room) == [(False, ["template_mismatch"])] * 3

    asyncio.run(work())


def test_the_first_turn_of_its_kind_is_verified_whatever_the_rate(template: str) -> None:
    """A kind is a system prompt, tools and options; the next conversation of the same kind is not."""

    async def work() -> None:
        room = Room(chat_template=template, verify_rate=0.0)
        await room.open()
        for word, told in (("odd", "template_mismatch"), ("odder", "")):
            assert (await room.ask(body(word)).answer())[0] == 200
            client = room.ask(body(word, "Yes."))
            assert (await client.answer())[0] == 200
            assert reasons(client) == told

    asyncio.run(work())


def test_equal_ids_behind_other_tokens_of_one_span_are_two_contexts() -> None:
    node = MessageNode("1", "user", b"", None, 1)
    turn, request = PreparedTurn(node, None, 0), ChatRequest(messages=[{"role": "user", "content": "And?"}])
    above = TokenSpan(None, 0, 0, pack_ids([1, 2, 3]), 0)
    shorter, longer, again = (TokenSpan(above, take, 0, pack_ids([4]), 0) for take in (2, 3, 3))
    assert share(turn, request, shorter) is shorter
    assert share(turn, request, longer) is longer
    assert share(turn, request, again) is longer
