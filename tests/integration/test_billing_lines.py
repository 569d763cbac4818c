"""Claude Code's line about billing differs with every request: two turns that differ in it are one conversation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.test_late_system import WAYS, place, serve
from tests.support.agents import ids_of, system, user
from tests.support.stack import Stack
from tests.support.three_dialects import Message
from tests.support.usual import usual

LINE = "x-anthropic-billing-header: cc_version=2.1.3.NUMBER; cc_entrypoint=cli; cch=NUMBER;"
PROMPT = "You are Bob."


@pytest.fixture(
    scope="module", params=usual(["qwen3", "qwen3_5_think", "gptoss", "glm4moe", "gemma3"], "qwen3", "qwen3_5_think")
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Stack]]:
    with ExitStack() as entered:
        yield request.param, serve(entered, request.param)


def placed(where: str, number: int) -> list[Message]:
    """The first messages of a conversation, with the line somewhere."""
    line = LINE.replace("NUMBER", str(number))
    if where == "later":
        return [system(PROMPT), user("Hello"), system(f"{line}\nIt is late.")]
    if where == "user":
        return [user(f"{line}\n{PROMPT}\nHello")]
    return [system({"front": f"{line}\n{PROMPT}", "end": f"{PROMPT}\n{line}"}[where]), user("Hello")]


@pytest.mark.parametrize("where", ["front", "end", "later", "user"])
@pytest.mark.parametrize(("dialect", "stream", "session"), WAYS)
def test_the_conversation_goes_on(
    served: tuple[str, Stack], dialect: str, stream: bool, session: bool, where: str
) -> None:
    at = place(served, dialect, stream=stream, session=session)
    first = at.ask(placed(where, 1))
    assert "billing" not in at.text
    assert PROMPT in at.text
    chain = at.chain
    again = [at.reply(first), user(f"And {dialect} {stream} {session}?")]
    second = at.ask([*placed(where, 22), *again], says="Two.")
    assert "billing" not in at.text
    assert at.sent[: len(chain)] == chain
    assert second.headers["x-radix-reused-tokens"] == str(len(chain))
    if session:
        (only,) = at.served.post(f"/sessions/{at.session}/finalize", {}).json()["trajectories"]
        assert (only["exact"], ids_of(only)) == (True, at.chain)
