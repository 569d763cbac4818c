"""Which text of a chain must agree with the template's rendering, and which may differ."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.sessions.prompt.verifier import EXCERPT, ChainPart, Difference, differences

SPECIAL = re.compile(r"<\|im_start\|>|<\|im_end\|>")
USER = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def chain(*parts: tuple[str, bool]) -> list[ChainPart]:
    return [ChainPart(*part) for part in parts]


def kinds(expected: str, parts: Sequence[ChainPart], *, header: str = "") -> list[str]:
    found = differences(expected, parts, SPECIAL, header=header)
    return [difference.kind for difference in found]


ONE_TURN = chain((USER, False), ("Hello<|im_end|>", True), ("\n<|im_start|>user\nGo<|im_end|>\n", False))


def test_a_chain_that_spells_the_rendering_has_no_differences() -> None:
    assert differences("".join(part.text for part in ONE_TURN), ONE_TURN, SPECIAL) == []


def test_thinking_that_the_template_drops_is_soft() -> None:
    """It differs in the segment that the model wrote in, whose scaffold may be gone as well."""
    parts = chain((USER + "<think>\n", False), ("So.\n</think>\n\nHello<|im_end|>", True), ("\n", False))
    (difference,) = differences(USER + "Hello<|im_end|>\n", parts, SPECIAL)
    assert difference == Difference("assistant", 3, "assistant\nHello", "assistant\n<think>\nSo.\n</think>\n\nHello")
    assert not difference.hard


def test_a_scaffold_that_the_model_closed_at_once_is_soft() -> None:
    """It sampled no character, only the end."""
    parts = chain((USER + "<think>\n", False), ("<|im_end|>", True), ("\n", False))
    assert kinds(USER + "<think>\n\n</think>\n\n<|im_end|>\n", parts) == ["assistant"]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(chain((USER.replace("Hi", "Ho"), False), ("Hello<|im_end|>", True), ("\n", False)), id="user"),
        pytest.param(chain((USER, False), ("Hello<|im_end|>", True)), id="closing"),
        pytest.param(chain((USER, False), ("Hello<|im_end|>", True), ("\n\n", False)), id="behind it"),
    ],
)
def test_context_that_differs_is_hard(parts: list[ChainPart]) -> None:
    (difference,) = differences(USER + "Hello<|im_end|>\n", parts, SPECIAL)
    assert difference.kind == "context"
    assert difference.hard


def test_an_assistants_turn_that_was_not_sampled_is_context() -> None:
    """A warm start is shown to the model as the template writes it: as long as nobody knows what such a turn begins with."""
    parts = chain((USER + "Hullo<|im_end|>\n<|im_start|>user\nGo", False), ("x", True))
    assert kinds(USER + "Hello<|im_end|>\n<|im_start|>user\nGox", parts) == ["context"]


HEADER = "<|im_start|>assistant\n"


@pytest.mark.parametrize("asked", ["<think></think>", "", "<think>\n\n"])
def test_what_the_model_is_asked_with_is_hard(asked: str) -> None:
    """It begins as an assistant's turn does, and is none: nobody has said it."""
    before = USER + "Hello<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n" + HEADER
    parts = chain((USER, False), ("Hello<|im_end|>", True), (before[len(USER) + 15 :] + "<think>\n", False))
    assert kinds(before + "<think>\n", parts, header=HEADER) == []
    assert kinds(before + asked, parts, header=HEADER) == ["context"]
    gone_on = differences(before + asked, parts, SPECIAL, header=HEADER, asked=False)
    assert [difference.kind for difference in gone_on] == ["assistant"], "a turn that is gone on with"


def warm(thought: str, user: str = "Go") -> str:
    """A turn with a call that nobody sampled, and what stands behind it."""
    return f"{USER}{thought}Look.<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n{HEADER}"


class TestWarmStarts:
    def test_reasoning_that_is_dropped_from_a_turn_with_the_header_is_soft(self) -> None:
        parts = chain((warm("<think>\nHm.\n</think>\n\n"), False), ("Yes<|im_end|>", True))
        assert kinds(warm("") + "Yes<|im_end|>", parts, header=HEADER) == ["assistant"]

    def test_what_others_said_is_hard_all_the_same(self) -> None:
        parts = chain((warm("<think>\nHm.\n</think>\n\n", user="Stop"), False), ("Yes<|im_end|>", True))
        assert kinds(warm("") + "Yes<|im_end|>", parts, header=HEADER) == ["assistant", "context"]

    def test_it_is_soft_up_to_its_end_and_no_further(self) -> None:
        """What stands behind the token that ends the turn is the template's."""
        parts = chain((warm("").replace("Look.<|im_end|>\n", "Look.<|im_end|>\n\n"), False), ("Yes", True))
        assert kinds(warm("") + "Yes", parts, header=HEADER) == ["context"]

    @pytest.mark.parametrize("role", ["user", "assistants", "assistan"])
    @pytest.mark.parametrize("other", ["expected", "found"])
    def test_both_sides_must_begin_like_an_assistants_turn(self, role: str, other: str) -> None:
        sides = {"expected": warm("") + "Yes", "found": warm("") + "Yes"}
        sides[other] = sides[other].replace(HEADER + "Look", f"<|im_start|>{role}\nLook")
        assert kinds(sides["expected"], chain((sides["found"], False)), header=HEADER) == ["context"]

    def test_a_header_with_a_special_token_behind_the_role(self) -> None:
        """In the manner of Llama: the text of the turn has nothing of the role."""
        front = "<|im_start|>user<|im_end|>\n\n"
        header = front.replace("user", "assistant")
        told, found = (f"{front}Hi<|im_end|>{header}{text}<|im_end|>{header}" for text in ("Look.", "Hm. Look."))
        assert kinds(told, chain((found, False)), header=header) == ["assistant"]
        assert kinds(told, chain((found.replace("Hi", "Ho"), False)), header=header) == ["context", "assistant"]

    @pytest.mark.parametrize("header", ["Assistant:", "<|", ""])
    def test_a_header_without_a_special_token_proves_nothing(self, header: str) -> None:
        parts = chain((warm(header + "Hm."), False), ("Yes", True))
        assert kinds(warm(header) + "Yes", parts, header=header) == ["context"]

    def test_its_special_tokens_must_be_the_same_ones(self) -> None:
        parts = chain((warm("<|im_end|>"), False), ("Yes", True))
        assert kinds(warm("") + "Yes", parts, header=HEADER)[-1] == "special"


@pytest.mark.parametrize(
    ("expected", "kind"),
    [
        pytest.param(USER + "Hello<|im_end|><|im_end|>\n<|im_start|>user\nGo<|im_end|>\n", "special", id="one more"),
        pytest.param(USER + "Hello\n<|im_start|>user\nGo<|im_end|>\n", "special", id="one less"),
        pytest.param(USER + "Hello<|im_start|>\n<|im_start|>user\nGo<|im_end|>\n", "special", id="another"),
        pytest.param(USER + "Hello<|im_end|>\n<|im_start|>user\nGo", "special", id="none at the end"),
        pytest.param(USER + "Hello", "special", id="ends"),
    ],
)
def test_special_tokens_must_be_the_same_ones(expected: str, kind: str) -> None:
    difference = differences(expected, ONE_TURN, SPECIAL)[-1]
    assert difference.kind == kind
    assert difference.hard


def test_differences_in_text_before_another_special_token_are_reported_too() -> None:
    expected = USER.replace("Hi", "Ho") + "Hello<|im_end|>\nno<|im_start|>"
    assert kinds(expected, ONE_TURN) == ["context", "context", "special"]


def test_a_literal_across_two_parts_is_text() -> None:
    """The chain has no such token there, the rendering would make one: it must not pass."""
    parts = chain(("<|im_start|>user\n<|im_", False), ("end|>", True))
    assert kinds("<|im_start|>user\n<|im_end|>", parts) == ["special"]


def test_excerpts_are_short_and_show_where_the_texts_part() -> None:
    long = "a" * 1000
    (difference,) = differences(long + "b" + long, chain((long + "c" + long, False)), SPECIAL)
    assert "b" in difference.expected
    assert "c" in difference.found
    assert max(len(difference.expected), len(difference.found)) <= EXCERPT


def test_nothing_agrees_with_nothing() -> None:
    assert differences("", [], SPECIAL) == []
    assert kinds("x", []) == ["context"]
    assert kinds("<|im_end|>", []) == ["special"]


# Against a naive reading of the rule ---------------------------------------------------------------------------------------

# Characters are texts, brackets are special tokens.
TOKENS = re.compile(r"[\[\]]")
PIECES = st.lists(st.tuples(st.text(alphabet="ab[]", max_size=4), st.booleans()), max_size=6)


def naive(expected: str, parts: list[tuple[str, bool]], header: str = "") -> bool:
    """Whether the difference is hard, character by character."""
    found = "".join(text for text, _ in parts)
    sampled = [flag for text, flag in parts for _ in text]
    tokens = [c for c in expected if c in "[]"]
    if tokens != [c for c in found if c in "[]"]:
        return True
    ours: list[tuple[str, bool]] = [("", False)]
    for character, flag in zip(found, sampled, strict=True):
        text, soft = ours[-1]
        ours[-1] = (text + character, soft or flag) if character not in "[]" else (text, soft or flag)
        if character in "[]":
            ours.append(("", False))
    theirs = re.split(r"[\[\]]", expected)
    begins = [0, *(at + 1 for at, character in enumerate(expected) if character in "[]")]
    shown = re.split(r"(?<=[\[\]])", header)[-1]
    for (text, soft), wanted, begin in zip(ours, theirs, begins, strict=True):
        front = expected[:begin] + shown
        known = header != shown and front.endswith(header) and text.startswith(shown) and wanted.startswith(shown)
        if text != wanted and not soft and not known:
            return True
    return False


@given(PIECES, st.text(alphabet="ab[]", max_size=12), st.text(alphabet="ab[]", max_size=3))
def test_a_difference_is_hard_when_the_rule_says_so(parts: list[tuple[str, bool]], expected: str, header: str) -> None:
    found = differences(expected, chain(*parts), TOKENS, header=header)
    assert any(difference.hard for difference in found) == naive(expected, parts, header)


@given(PIECES, st.text(alphabet="ab", max_size=4), st.sampled_from(["[", "[a", "]", "[a]", "[]b"]), st.data())
def test_a_turn_with_the_header_may_say_anything(
    parts: list[tuple[str, bool]], says: str, header: str, data: st.DataObject
) -> None:
    """Of two chains that differ in one turn's text alone, and nothing of that is sampled."""
    at = data.draw(st.integers(0, len(parts)))
    turns = [[*parts[:at], (header + text + "]", False), *parts[at:]] for text in (says, "")]
    told = "".join(text for text, _ in turns[1])
    assert not any(one.hard for one in differences(told, chain(*turns[0]), TOKENS, header=header))


@given(PIECES, st.data())
def test_one_changed_character_is_found(parts: list[tuple[str, bool]], data: st.DataObject) -> None:
    """Hard in the context, soft where the model wrote."""
    text = "".join(part for part, _ in parts)
    assert differences(text, chain(*parts), TOKENS) == []
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + "c" + text[at + 1 :]
    found = differences(changed, chain(*parts), TOKENS)
    assert found
    assert any(difference.hard for difference in found) == naive(changed, parts)
