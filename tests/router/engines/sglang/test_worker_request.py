"""The prompt of a worker request, as a routing policy gets it."""

from __future__ import annotations

import pytest

from router.engines.sglang.worker_request import route_prompt


@pytest.mark.parametrize(
    ("body", "text", "ids"),
    [
        (b'{"text": "a"}', "a", None),
        (b'{"text": ["a", "b"]}', "a", None),
        (b'{"input_ids": [1, 2]}', None, [1, 2]),
        (b'{"input_ids": [2147483648, 4294967295]}', None, [1 << 31, (1 << 32) - 1]),
        (b'{"input_ids": [[1, 2], [3]], "other": {}}', None, [1, 2]),
        (b'{"input_ids": [1, [2]]}', None, None),
        (b'{"input_ids": [[], [1]]}', None, None),
        (b'{"input_ids": [4294967296]}', None, None),
        (b'{"input_ids": [-1]}', None, None),
        (b'{"text": "", "input_ids": []}', None, None),
        (b'{"text": []}', None, None),
        (b'{"text": 5}', None, None),
        (b'{"text": "\xff"}', None, None),
        (b"[" * 100_000, None, None),
        (b"", None, None),
    ],
)
def test_the_prompt_of_a_body(body: bytes, text: str | None, ids: list[int] | None) -> None:
    assert route_prompt(body)[:2] == (text, ids)


@pytest.mark.parametrize(
    ("body", "alone"),
    [
        (b'{"text": "a"}', True),
        (b'{"text": ["a", "b"]}', False),
        (b'{"text": ["a"]}', False),
        (b'{"input_ids": [1, 2]}', True),
        (b'{"input_ids": [[1, 2]]}', False),
    ],
)
def test_whether_a_prompt_is_the_only_one(body: bytes, alone: bool) -> None:
    assert route_prompt(body).alone is alone
