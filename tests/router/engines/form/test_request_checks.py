"""Patterns are faulty exactly if Python cannot compile them."""

from __future__ import annotations

import random
import re
import warnings

import pytest

from router.engines.form.request_checks import pattern_fault

PIECES = (
    *(
        "a",
        "b",
        "(",
        ")",
        "(?<=",
        "(?<!",
        "(?:",
        "(?=",
        "(?!",
        "(?>",
        "|",
        "*",
        "+",
        "?",
        "*+",
        ".",
        "^",
        "$",
        "\\",
        "\\d",
        "\\b",
    ),
    *(
        "{2}",
        "{1,3}",
        "{4,5}",
        "{5,4}",
        "{4,}",
        "[ab]",
        "[^a",
        "[[a]",
        "]",
        "(?P<n>",
        "(?P=n)",
        "(?i)",
        "(?i:",
        "(?(1)",
        "\\1",
    ),
)


def compiles(pattern: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(pattern)
        except re.error:
            return False
    return True


def test_a_pattern_that_does_not_compile_has_a_fault() -> None:
    chance = random.Random(7)
    patterns = ["".join(chance.choices(PIECES, k=chance.randint(1, 7))) for _ in range(20_000)]
    good = [pattern for pattern in patterns if compiles(pattern)]
    assert len(good) > 1_000
    assert [pattern for pattern in patterns if pattern_fault(pattern) is None] == good


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "unterminated subpattern at position 0"),
        ("*", "nothing to repeat"),
        ("a{99999999999}", "too large"),
        ("(?<=a+)b", "fixed-width"),
        ("(" * 5000, "deep"),
        ("\\", "bad escape"),
    ],
)
def test_a_fault_has_a_reason(pattern: str, says: str) -> None:
    assert says in str(pattern_fault(pattern))


def test_a_warning_is_no_fault() -> None:
    assert pattern_fault("[[a]") is None
