"""What layers leave for each other: every layer sees what those outside of it have left, and nothing else."""

from __future__ import annotations

from typing import Any

from router.http.request_state import ANYBODY, Caller, RequestRecord, RouteHint, first_state, request_state, with_state


def test_without_a_state_a_request_is_anybodys() -> None:
    state = request_state({"type": "http", "method": "GET", "path": "/x"})
    assert (state.caller, state.body_read, state.hint) == (ANYBODY, False, None)
    assert (state.record.method, state.record.path) == ("GET", "/x")


def test_what_a_layer_adds_is_seen_inside_only() -> None:
    """Also where a layer sends several requests inward; what the server keeps in the state stays."""
    record = RequestRecord("id", "POST", "/generate")
    scope: dict[str, Any] = {"type": "http", "path": "/generate", "state": {"of_the_server": 1}}
    outer = {**scope, "state": first_state(scope, record)}
    first = with_state(outer, caller=Caller("a"), body_read=True)
    second = with_state(first, hint=RouteHint("text"), body_read=False)
    assert (request_state(outer).caller, request_state(outer).body_read) == (ANYBODY, False)
    assert (request_state(first).body_read, request_state(first).hint) == (True, None)
    assert (request_state(second).caller.tenant, request_state(second).body_read) == ("a", False)
    assert {request_state(one).record.id for one in (outer, first, second)} == {"id"}
    assert all(one["state"]["of_the_server"] == 1 for one in (outer, first, second))
    assert scope["state"] == {"of_the_server": 1}
