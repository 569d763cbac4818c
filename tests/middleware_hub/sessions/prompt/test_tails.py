"""A tail is rendered from the whole conversation where the template may look for something in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.middleware_hub.sessions.in_process import Room
from tests.support.templates import READING


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(("first", "asked"), [("Hello in JSON", "```json\n"), ("Hello again", "")])
def test_a_word_in_an_earlier_message_counts_although_its_kind_was_compared(
    tmp_path: Path, first: str, asked: str
) -> None:
    """A conversation of the same kind was compared, and found equal. It did not have the word."""
    file = tmp_path / "json_fence.jinja"
    file.write_text(READING["json_fence"])

    async def work() -> None:
        room = Room(chat_template=str(file), verify_rate=0.0)
        await room.open()
        for said in ("Hello", first):
            talk = [user(said)]
            assert (await room.ask({"messages": talk, "max_tokens": 20}).answer())[0] == 200
            talk += [{"role": "assistant", "content": "Yes."}, user("And?")]
            assert (await room.ask({"messages": talk, "max_tokens": 20}).answer())[0] == 200
        (before, sampled), (sent, _) = room.engine.log[-2:]
        chain = [*before["input_ids"], *sampled]
        assert sent["input_ids"][: len(chain)] == chain
        tail = room.engine.tokenizer.decode(sent["input_ids"][len(chain) :], skip_special_tokens=False)
        assert tail == f"\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n{asked}"

    asyncio.run(work())
