"""What a worker's refusal is to a client of a chat or a completion."""

from __future__ import annotations

import pytest

from middleware_hub.chat.refusals import refusal


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (400, 400),
        (401, 401),
        (403, 403),
        (404, 502),
        (405, 502),
        (408, 504),
        (422, 400),
        (429, 429),
        (500, 502),
        (503, 503),
    ],
)
def test_a_requests_own_fault_stays_a_400_and_the_workers_is_a_5xx(status: int, told: int) -> None:
    error = refusal(status, b'{"error": {"message": "oops"}}')
    assert error.status == told
    assert "oops" in error.message
