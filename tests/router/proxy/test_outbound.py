"""What a client's request is for the proxy: who waits in which line, what may be repeated, what is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from router.http.headers import first_values
from router.http.request_state import Caller, RequestRecord, RouteHint, with_state
from router.proxy.generate_call import GenerateCall
from router.proxy.in_flight import InFlight
from router.proxy.outbound import OutboundRequest, RequestReader


def read(
    method: str = "POST",
    path: str = "/generate",
    headers: dict[str, str] | None = None,
    *,
    hint: RouteHint | None = None,
    tenant: str = "",
) -> OutboundRequest:
    given = {"content-type": "application/json", "content-length": "2", **(headers or {})}
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    reader = RequestReader(max_body_bytes=1000, forward_authorization=True, reads_prompts=False)
    if path == "/generate":
        record = RequestRecord("", method, path)
        named = first_values(scope["headers"])
        call = GenerateCall(
            b"{}", None, scope["headers"], record, Caller(tenant=tenant), hint, method=method, named=named
        )
        return reader.generation(InFlight((), call=call))
    return asyncio.run(reader.read(with_state(scope, hint=hint, caller=Caller(tenant=tenant)), receive))


@pytest.mark.parametrize(
    ("headers", "hint", "key"),
    [
        ({}, None, ""),
        ({"x-session-id": "s"}, None, "s"),
        ({"x-session-id": "s", "x-smg-routing-key": "k"}, None, "k"),
        ({"x-session-id": "s"}, RouteHint(routing_key="h"), "h"),
        ({"x-session-id": "s"}, RouteHint(), "s"),
    ],
)
def test_each_tenant_has_a_line_for_each_routing_key(headers: dict[str, str], hint: RouteHint | None, key: str) -> None:
    """Nobody's many requests are in front of those of others."""
    for tenant in ("", "a", "b"):
        found = read(headers=headers, hint=hint, tenant=tenant)
        assert found.key == (tenant, key)
        assert (found.query.routing_key or "", found.query.tenant) == (key, tenant)


@pytest.mark.parametrize(
    ("method", "path", "repeatable", "limited"),
    [
        ("POST", "/generate", True, True),
        ("PUT", "/generate", True, True),
        ("POST", "/v1/chat/completions", False, True),
        ("PUT", "/other", False, True),
        ("GET", "/server_info", True, False),
        ("HEAD", "/server_info", True, False),
        ("DELETE", "/other", False, False),
    ],
)
def test_work_waits_for_room_and_only_what_does_no_harm_is_sent_twice(
    method: str, path: str, repeatable: bool, limited: bool
) -> None:
    found = read(method, path)
    assert (found.repeatable, found.limited) == (repeatable, limited)
    assert found.ends_with_done == (path in ("/generate", "/v1/chat/completions"))
