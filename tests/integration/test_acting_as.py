"""An admin that acts as a tenant may do to generations what that tenant may, and no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.asking import Asking, calls
from tests.support.stack import Stack, stack

A, ADMIN = {"authorization": "Bearer key-of-a"}, {"authorization": "Bearer key-of-all"}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    server = {"api_keys": ("a:key-of-a", "b:key-of-b"), "admin_keys": ("key-of-all",)}
    with stack("qwen", styles=("cumulative",), server=server) as started:
        yield started


def test_it_ends_its_tenants_generations_and_nobody_elses(served: Stack, asks: list[Asking], space: str) -> None:
    (worker,) = served.workers
    worker.hold(after=1)
    body = {"text": "A:", "rid": space, "sampling_params": {"max_new_tokens": 5}}
    asks.append(Asking(served.url, body, headers={**A, "x-abort-policy": "return"}))
    worker.wait_for_arrivals(1)
    told = len(calls(worker, "/abort_request"))
    # Neither by its name nor by a name that nobody has: workers are not asked about what is not this tenant's.
    for rid in (space, space[:8], "nobody"):
        answer = served.post("/abort_request", {"rid": rid}, headers={**ADMIN, "x-tenant": "b"})
        assert (answer.status, len(calls(worker, "/abort_request"))) == (200, told)
    assert worker.in_flight == 1
    assert served.post("/abort_request", {"rid": space}, headers={**ADMIN, "x-tenant": "a"}).status == 200
    assert len(calls(worker, "/abort_request")) == told + 1
    assert asks[0].answer().json()["meta_info"]["finish_reason"]["type"] == "abort"
    worker.release()
    worker.wait_until_idle()
