"""Turns that continue under other tools or options are found whatever other clients do; what is not spliced has a reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.middleware_hub.sessions.in_process import Client, Room
from tests.support import templates
from tests.support.agents import TOOLS

OPEN = "/v1/chat/completions"
QWEN3 = str(templates.folder() / "qwen3.jinja")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thinking(on: bool) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": on}}


def tools(name: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**TOOLS[0]["function"], "name": name}}]


def header(client: Client, name: str) -> str:
    return str(dict(client.out[0]["headers"]).get(name.encode(), b"").decode())


async def ask(room: Room, path: str, messages: list[dict[str, Any]], **more: Any) -> Client:
    client = room.ask({"messages": messages, "max_tokens": 50, **more}, path)
    status, answer = await client.answer()
    assert status == 200, answer
    return client


@pytest.mark.parametrize("path", [OPEN, "/sessions/s/v1/chat/completions"])
@pytest.mark.parametrize("same", [True, False])
def test_thinking_is_switched_after_twelve_foreign_sets_of_tools(path: str, same: bool) -> None:
    """Whether these talked of the same or of something else."""

    async def work() -> None:
        room = Room(chat_template=QWEN3)
        await room.open()
        await ask(room, path, [user("Hello")], **thinking(False))
        for number in range(12):
            await ask(room, path, [user("Hello" if same else f"Hello {number}")], tools=tools(f"tool{number}"))
        mine = await ask(room, path, [user("Hello"), said("Yes."), user("And?")], **thinking(True))
        assert header(mine, "x-radix-reasons") == "setting, spliced"
        sent, sampled = room.engine.log[0]
        assert room.engine.log[-1][0]["input_ids"][: len(sent["input_ids"]) + 2] == [*sent["input_ids"], *sampled][:-1]

    asyncio.run(work())


def test_a_turn_that_was_asked_with_words_of_its_own_is_spliced(tmp_path: Path) -> None:
    """No short conversation shows its generation prompt: the turn itself remembers what it was asked with."""
    file = tmp_path / "json_fence.jinja"
    file.write_text(templates.READING["json_fence"])

    async def work() -> None:
        room = Room(chat_template=str(file))
        await room.open()
        path = "/sessions/s/v1/chat/completions"
        await ask(room, path, [user("Hello in JSON")], tools=TOOLS)
        later = await ask(room, path, [user("Hello in JSON"), said("Yes."), user("And?")])
        assert header(later, "x-radix-reasons") == "setting, spliced"
        sent, sampled = room.engine.log[0]
        chain = [*sent["input_ids"], *sampled]
        assert room.engine.log[-1][0]["input_ids"][: len(chain)] == chain

    asyncio.run(work())


def test_a_splice_that_is_dropped_is_counted() -> None:
    """What was sampled under other tools stands behind another prompt: the chain of these tools goes on, and says why."""

    async def work() -> None:
        room = Room(chat_template=QWEN3, verify_rate=1.0)
        await room.open()
        path = "/sessions/s/v1/chat/completions"
        talk = [user("Hello"), said("Yes."), user("And?"), said("Yes."), user("So?")]
        await ask(room, path, talk[:1])
        other = await ask(room, path, talk[:3], tools=TOOLS)
        assert header(other, "x-radix-reasons") == "setting, divergence"
        assert room.metric("tito_splice_fallbacks_total", reason="divergence") == 1
        back = await ask(room, path, talk)
        assert header(back, "x-radix-reasons") == "setting, divergence"
        assert room.metric("tito_splice_fallbacks_total", reason="divergence") == 2
        assert room.metric("tito_session_turns_total", kind="continued", reason="") == 1
        assert room.metric("tito_session_turns_total", kind="setting", reason="") == 1
        sent, sampled = room.engine.log[0]
        chain = [*sent["input_ids"], *sampled]
        assert room.engine.log[-1][0]["input_ids"][: len(chain)] == chain
        _, found = await room.call("POST", "/sessions/s/finalize")
        assert [one["reasons"] for one in found["trajectories"]] == [["setting", "divergence"]] * 2
        assert all(one["exact"] for one in found["trajectories"])

    asyncio.run(work())


def test_a_template_that_refuses_a_splice_is_counted(tmp_path: Path) -> None:
    """It wants its own words in an assistant's turn, and finds a sentinel there."""
    file = tmp_path / "picky.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' and m.content != 'Yes.' %}{{ raise_exception('no') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"
    )

    async def work() -> None:
        room = Room(chat_template=str(file))
        await room.open()
        await ask(room, OPEN, [user("Hello")], **thinking(False))
        second = await ask(room, OPEN, [user("Hello"), said("Yes."), user("And?")], **thinking(True))
        assert header(second, "x-radix-reasons") == "setting, template_error"
        assert room.metric("tito_splice_fallbacks_total", reason="template_error") == 1
        assert room.metric("tito_session_turns_total", kind="anew", reason="setting") == 1

    asyncio.run(work())


@pytest.mark.parametrize("named", [0, 1, 2])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("path", [OPEN, "/sessions/s/v1/chat/completions"])
def test_a_named_turn_is_continued_under_other_options(path: str, own: bool, named: int) -> None:
    """Whichever of several it is, and whether these options have a turn of their own there."""

    async def work() -> None:
        room = Room(chat_template=QWEN3)
        await room.open()
        for _ in range(3):
            await ask(room, path, [user("Hello")], temperature=1, **thinking(False))
        if own:
            await ask(room, path, [user("Hello")], **thinking(True))
        sent, _ = room.engine.log[named]
        talk = [user("Hello"), said("Yes."), user("And?")]
        client = room.ask({"messages": talk, **thinking(True)}, path, parent=sent["rid"])
        assert (await client.answer())[0] == 200
        assert header(client, "x-radix-reasons") == "setting, spliced"
        if path == OPEN:
            return
        _, found = await room.call("POST", "/sessions/s/finalize")
        *_, last = found["trajectories"]
        assert last["parent_branch"] == sent["rid"]
        assert [turn["request_id"] for turn in last["turns"]] == [sent["rid"], room.engine.log[-1][0]["rid"]]
        assert last["exact"]

    asyncio.run(work())


def test_a_turn_of_other_options_wins_over_the_beginning_of_one_of_these() -> None:
    """A sibling under the same options that begins alike is no reason to sample only its beginning again."""

    async def work() -> None:
        room = Room(chat_template=QWEN3)
        await room.open()
        path = "/sessions/s/v1/chat/completions"
        await ask(room, path, [user("Hello")], **thinking(False))
        room.engine.says("Yes, and no.")
        await ask(room, path, [user("Hello")], **thinking(True))
        mine = await ask(room, path, [user("Hello"), said("Yes."), user("And?")], **thinking(True))
        assert header(mine, "x-radix-reasons") == "setting, spliced"
        _, found = await room.call("POST", "/sessions/s/finalize")
        *_, last = found["trajectories"]
        assert last["parent_branch"] == room.engine.log[0][0]["rid"]

    asyncio.run(work())


def test_a_prompt_does_not_depend_on_the_options_of_other_requests() -> None:
    """Another router has not had them: it would send other ids."""

    async def sent(*, before: bool) -> Any:
        room = Room(history="template", chat_template=str(templates.folder() / "qwen3_5_think.jinja"))
        await room.open()
        if before:
            other = {"messages": [{"role": "user", "content": "?"}], "chat_template_kwargs": {"enable_thinking": False}}
            assert (await room.ask(other).answer())[0] == 200
        messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": ""}]
        room.engine.says("<think>", finish="length")
        continues = {"continue_final_message": True, "add_generation_prompt": False}
        assert (await room.ask({"messages": messages, **continues}).answer())[0] == 200
        messages[1] = {"role": "assistant", "content": "<think>"}
        client = room.ask({"messages": [*messages, {"role": "user", "content": "More"}]})
        assert (await client.answer())[0] == 200
        return room.engine.log[-1][0]["input_ids"], dict(client.out[0]["headers"]).get(b"x-radix-reasons")

    assert asyncio.run(sent(before=True)) == asyncio.run(sent(before=False))
