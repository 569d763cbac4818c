"""When two messages are the same one: what a key has to tell apart, and what it must not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Raw

from middleware_hub.chat.keys import adapter_of, answered_by, canonical, load, setting_of, strict
from middleware_hub.chat.messages import ChatRequest
from router.errors import BadRequestError


def calls(*given: tuple[Any, str, Any]) -> list[dict[str, Any]]:
    return [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in given]


LOOK = calls(("c1", "look", {"where": "here", "times": 1}))
APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tool_call_id": (
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
    ),
    "the place of a tool_call_id and the place as a text": (
        {"role": "tool", "tool_call_id": "0", "content": "x"},
        {"role": "tool", "tool_call_id": None, "content": "x"},
    ),
    "no tool_call_id": ({"role": "tool", "tool_call_id": "c1", "content": "x"}, {"role": "tool", "content": "x"}),
    "role": ({"role": "user", "content": "x"}, {"role": "system", "content": "x"}),
    "name": ({"role": "user", "name": "a", "content": "x"}, {"role": "user", "name": "b", "content": "x"}),
    "name and tool_call_id": ({"role": "tool", "name": "c1"}, {"role": "tool", "tool_call_id": "c1"}),
    "white space in content": ({"role": "user", "content": "x"}, {"role": "user", "content": "x "}),
    "two parts and one": (
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "user", "content": "xy"},
    ),
    "an image and its text": (
        {"role": "user", "content": [{"type": "image_url", "text": "x"}]},
        {"role": "user", "content": "x"},
    ),
    "a call's name": (
        {"role": "assistant", "tool_calls": LOOK},
        {"role": "assistant", "tool_calls": calls(("c1", "see", {"where": "here", "times": 1}))},
    ),
    "a call's argument": (
        {"role": "assistant", "tool_calls": LOOK},
        {"role": "assistant", "tool_calls": calls(("c1", "look", {"where": "there", "times": 1}))},
    ),
    "a number and its text": (
        {"role": "assistant", "tool_calls": LOOK},
        {"role": "assistant", "tool_calls": calls(("c1", "look", {"where": "here", "times": "1"}))},
    ),
    "the order of calls": (
        {"role": "assistant", "tool_calls": calls(("a", "f", {}), ("b", "g", {}))},
        {"role": "assistant", "tool_calls": calls(("b", "g", {}), ("a", "f", {}))},
    ),
    "a call more": (
        {"role": "assistant", "tool_calls": LOOK},
        {"role": "assistant", "tool_calls": LOOK + calls(("c2", "look", {}))},
    ),
}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing in four spellings": (
        {"role": "assistant", "content": None, "tool_calls": [], "name": "", "tool_call_id": None},
        {"role": "assistant", "content": "", "refusal": None},
    ),
    "a lone text part": (
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": "x"},
    ),
    "reasoning": (
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
        {"role": "assistant", "content": "x"},
    ),
    "arguments as text, in another order": (
        {"role": "assistant", "tool_calls": LOOK},
        {"role": "assistant", "tool_calls": calls(("c1", "look", '{ "times": 1.0,\n "where": "here" }'))},
    ),
    "numbers inside of objects and lists": (
        {"role": "assistant", "tool_calls": calls(("c1", "look", {"at": [1, {"x": -2e3}, 0.5]}))},
        {"role": "assistant", "tool_calls": calls(("c1", "look", '{"at": [1.0, {"x": -2000}, 0.50]}'))},
    ),
    "the ids of calls": (
        {"role": "assistant", "tool_calls": LOOK},
        {"role": "assistant", "tool_calls": calls(("c2", "look", {"where": "here", "times": 1}))},
    ),
    "the name of an assistant": (
        {"role": "assistant", "content": "x", "name": "coder"},
        {"role": "assistant", "content": "x"},
    ),
    "a number that no double holds": (
        {"role": "assistant", "tool_calls": calls(("c1", "look", '{"times": 1e400}'))},
        {"role": "assistant", "tool_calls": calls(("c1", "look", '{"times": null}'))},
    ),
    "the same, as Python writes it": (
        {"role": "assistant", "tool_calls": calls(("c1", "look", '{"times": 1e400}'))},
        {"role": "assistant", "tool_calls": calls(("c1", "look", '{"times": Infinity}'))},
    ),
    "a number that a double rounds": (
        {"role": "assistant", "tool_calls": calls(("c1", "look", {"at": [{"x": 12345678901234567890}]}))},
        {"role": "assistant", "tool_calls": calls(("c1", "look", '{"at": [{"x": 12345678901234567000}]}'))},
    ),
    "no arguments": (
        {"role": "assistant", "tool_calls": calls(("c1", "look", {}))},
        {"role": "assistant", "tool_calls": calls(("c1", "look", "{}"))},
    ),
}


@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_two_messages_that_differ_have_different_keys(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, other = pair
    assert canonical(one) != canonical(other)
    assert strict(one) != strict(other)


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_what_an_echo_may_change(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, other = pair
    assert canonical(one) == canonical(other)
    assert strict(one) != strict(other)


def test_a_result_is_that_of_a_place_whatever_the_calls_are_named() -> None:
    results = [{"role": "tool", "tool_call_id": name, "content": "x"} for name in ("a", "b")]
    renamed = [{"role": "tool", "tool_call_id": name, "content": "x"} for name in ("b", "c")]
    ours = [canonical(one, ["a", "b"]) for one in results]
    assert ours == [canonical(one, ["b", "c"]) for one in renamed]
    assert len({*ours, *map(canonical, results)}) == 4


def test_a_result_has_the_name_of_its_call() -> None:
    """Hermes Agent sends it while it runs, and not when it resumes."""
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    assert canonical({**result, "name": "look"}, ["a"]) == canonical(result, ["a"])
    assert canonical({**result, "name": "look"}, ["b"]) != canonical(result, ["b"])


def test_a_result_answers_the_last_calls_before_it() -> None:
    messages = [
        {"role": "assistant", "tool_calls": calls(("a", "f", {}))},
        {"role": "tool", "tool_call_id": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls(("b", "f", {}), ("c", "f", {}))},
        {"role": "tool", "tool_call_id": "b"},
        {"role": "tool", "tool_call_id": "c"},
        {"role": "user", "content": "x"},
    ]
    assert [list(answered_by(messages, at)) for at in (1, 4, 5)] == [["a"], ["b", "c"], []]


def test_the_order_of_fields_never_counts() -> None:
    one, other = {"role": "user", "content": "x"}, {"content": "x", "role": "user"}
    assert (canonical(one), strict(one)) == (canonical(other), strict(other))


class TestSettings:
    """The adapter, the tools and the options that a conversation is rendered with."""

    def request(self, **given: Any) -> ChatRequest:
        return ChatRequest(messages=[], **given)

    @pytest.mark.parametrize(
        "given",
        [
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            {"template": {"enable_thinking": False}},
            {"extra": {"lora_path": Raw(b'"x"')}},
        ],
    )
    def test_each_of_them_is_another_setting(self, given: dict[str, Any]) -> None:
        assert setting_of(self.request(**given)) != setting_of(self.request())

    def test_only_the_adapter_is_looked_at_for_the_adapter(self) -> None:
        plain, x, y = (
            setting_of(self.request(extra={"lora_path": Raw(name)} if name else {})) for name in (b"", b'"x"', b'"y"')
        )
        x_thinking = setting_of(self.request(extra={"lora_path": Raw(b'"x"')}, template={"enable_thinking": True}))
        assert adapter_of(x) == adapter_of(x_thinking)
        assert x != x_thinking
        assert adapter_of(x) != adapter_of(y)
        assert adapter_of(plain) != adapter_of(x)


@pytest.mark.parametrize("name", ["best", ":", "json:", ":loads", ".json:loads"])
def test_what_names_no_function_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match="--session-match must be"):
        load(name)
