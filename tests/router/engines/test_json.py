"""What is told of JSON that cannot be read."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.json import JSON_ERRORS, json_fault


def fault(data: bytes) -> str:
    with pytest.raises(JSON_ERRORS) as caught:
        msgspec.json.decode(data)
    return json_fault(data, caught.value)


HALVES = st.sampled_from(
    ["\\ud83d", "\\uDBFF", "\\ude00", "\\uDC00", "\\ud83d\\ud83d", "\\ude00\\ud83d", "\\ud83d\\u0041", "\\ud83d\\n"]
)
TEXTS = st.text(alphabet='ab\\ é😀"\n', max_size=40)


@given(TEXTS, HALVES, TEXTS)
def test_half_a_surrogate_pair_is_found_wherever_it_stands(before: str, half: str, after: str) -> None:
    front, back = (json.dumps(text)[1:-1] for text in (before, after))
    back = back if not back.startswith("\\u") else " " + back  # together, the two might be whole
    data = f'{{"a": ["{front}{half}{back}"]}}'.encode()
    found = fault(data)
    assert found.startswith("half a surrogate pair, \\u")
    at = int(found.split(" at byte ")[1].split(",")[0])
    begin = len(f'{{"a": ["{front}'.encode())
    assert begin <= at < begin + len(half)
    assert found.startswith(f"half a surrogate pair, {data[at : at + 6].decode()},")


@pytest.mark.parametrize(
    "data", [b'{"a": "\\ud83d\\ude00', b'{"a": "\\\\ud83d', b'{"a": "', b"", b'{"a": \xff}', b'["\\ud83d\\ude00", x]']
)
def test_what_else_is_wrong_is_told_as_the_decoder_says_it(data: bytes) -> None:
    assert "surrogate" not in fault(data)


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_nothing_is_not_called_truncated(data: bytes) -> None:
    assert fault(data) == "it is empty"
