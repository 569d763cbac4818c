"""What is remembered of the options that clients choose does not grow with their length."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from middleware_hub.templates.turn_forms import options_key
from tests.middleware_hub.sessions.in_process import Room
from tests.support.usual import usual

LONG = 300_000
TURNS = 8
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "variable": lambda text: {"chat_template_kwargs": {"of_the_task": text}},
    "name": lambda text: {"chat_template_kwargs": {text: 1}},
    "field": lambda text: {"of_the_worker": text},
    "grammar": lambda text: {"regex": "a|" + text},
}


@pytest.mark.parametrize("kind", usual(OPTIONS, "variable"))
def test_long_options_are_not_kept(kind: str) -> None:
    async def scenario() -> int:
        room = Room()
        held = 0
        for number in range(TURNS + 2):
            if number == 2:  # what is made at the first use is there
                gc.collect()
                tracemalloc.start()
            body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 4}
            body |= OPTIONS[kind](f"{number:08}" + "x" * LONG)
            await room.call("POST", "/sessions", {"session_id": "s"})
            status, answer = await room.ask(body).answer()
            assert status == 200
            again = [*body["messages"], answer["choices"][0]["message"], {"role": "user", "content": "b"}]
            assert (await room.ask({**body, "messages": again}).answer())[0] == 200
            await room.call("DELETE", "/sessions/s")
            room.engine.log.clear()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        return held

    try:
        held = asyncio.run(scenario())
    finally:
        tracemalloc.stop()
    assert held < TURNS * LONG / 2, f"{TURNS} options of {LONG} characters left {held} bytes behind"


def test_long_options_are_told_apart() -> None:
    one, other = ({"a": "x" * LONG + end} for end in ("1", "2"))
    assert options_key(one) == options_key(dict(one)) != options_key(other)
    assert options_key({"a": "\ud800" * 100}) != options_key({"a": "\ud801" * 100})
