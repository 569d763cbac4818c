"""The key of a session is taken out of its request, and the request is sent on to that session or refused."""

from __future__ import annotations

import asyncio

import pytest

from router.auth.keys import ApiKeys
from router.auth.session_key_check import SessionKeyCheck
from router.auth.session_keys import SessionKeys, digest_of, new_key, opens, read_key, written
from router.errors import BadRequestError, ForbiddenError, UnauthorizedError
from router.http.request_state import RequestRecord, first_state, request_state
from tests.router.conftest import EchoWorker, running
from tests.support.serving import serving

KEY = new_key("task-17")
BEARER = (b"authorization", b"Bearer " + written(KEY).encode())


def scope_of(path: str, *headers: tuple[bytes, bytes], method: str = "POST") -> dict[str, object]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": list(headers),
        "state": first_state({}, RequestRecord("r", method, path)),
    }


def check(*, served: bool = True) -> SessionKeyCheck:
    keys = SessionKeys()
    keys.served = served
    return SessionKeyCheck(keys)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/models/Qwen/Qwen3-8B",
        "/v1beta/models/m:generateContent",
        "/chat/completions",
        "/chat/completions/",
        "/responses",
        "/messages",
        "/messages/count_tokens",
        "/models",
        "/models/Qwen/Qwen3-8B",
        "/models/m:streamGenerateContent",
    ],
)
def test_a_path_at_the_root_becomes_that_of_the_session(path: str) -> None:
    scope = scope_of(path, (b"a", b"b"), BEARER, (b"x-api-key", b"other"))
    check()(scope)
    assert scope["path"] == f"/sessions/task-17{path}"
    assert scope["raw_path"] == f"/sessions/task-17{path}".encode()
    assert scope["headers"] == [(b"a", b"b"), (b"x-api-key", b"other")]
    caller = request_state(scope).caller
    assert (caller.session, caller.admin, caller.confined) == (KEY, False, True)


def test_a_request_without_such_a_key_stays_as_it_is() -> None:
    for header in ((b"authorization", b"Bearer one"), (b"x-api-key", b"sk-tit"), (b"cookie", BEARER[1])):
        scope = scope_of("/v1/messages", header)
        before = dict(scope)
        check()(scope)
        assert scope == before


@pytest.mark.parametrize("value", [b"Bearer %b", b"bearer   %b  ", b"Basic %b", b"%b"])
def test_a_key_is_taken_out_however_it_is_written(value: bytes) -> None:
    scope = scope_of("/health", (b"authorization", value % written(KEY).encode()), method="GET")
    check()(scope)
    assert scope["headers"] == []
    assert scope["path"] == "/health"


def test_without_sessions_it_is_refused() -> None:
    with pytest.raises(UnauthorizedError, match="no sessions"):
        check(served=False)(scope_of("/v1/messages", BEARER))


@pytest.mark.parametrize(
    "path",
    [
        "/sessions/task-17/finalize",
        "/sessions/task-17",
        "/sessions/task-170/v1/messages",
        "/sessions/task-1/v1/messages",
        "/sessions/task-17messages",
        "/v1",
        "/",
        "/finalize",
        "/trajectories",
        "/complete",
        "/reward_info",
        "/chat/completions/finalize",
        "/responses/finalize",
        "/model",
    ],
)
def test_other_paths_are_not_for_it(path: str) -> None:
    """The error says which base URL would be right: a library may have added its path to a wrong one."""
    with pytest.raises(ForbiddenError, match="http://ROUTER/v1"):
        check()(scope_of(path, BEARER))


def test_a_digest_opens_only_to_its_key() -> None:
    other = new_key("task-17")
    assert opens(KEY, digest_of(KEY))
    assert not opens(other, digest_of(KEY))
    assert not opens(KEY, b"")
    assert read_key(written(KEY)) == KEY
    assert KEY.secret.encode() not in digest_of(KEY)


def test_no_key_of_the_router_may_look_like_one() -> None:
    for given in ({"api_keys": [written(KEY)]}, {"api_keys": [f"a:{written(KEY)}"]}, {"admin_keys": [written(KEY)]}):
        with pytest.raises(BadRequestError, match="those of sessions"):
            ApiKeys(**given)


@pytest.mark.parametrize(
    ("keys", "admins", "owners"),
    [
        ((), (), ("",)),
        (("a:1", "b:2", "a:3"), (), ("a", "b")),
        (("a:1",), ("2",), ("", "a")),
        ((), ("2",), ("",)),
    ],
)
def test_a_session_may_be_of_all_who_can_make_one(
    keys: tuple[str, ...], admins: tuple[str, ...], owners: tuple[str, ...]
) -> None:
    assert ApiKeys(keys, admins).owners == owners


def test_a_router_that_only_routes_passes_it_to_no_worker() -> None:
    async def main() -> None:
        async with serving(EchoWorker()) as url, running([url]) as router:
            headers = {"authorization": f"Bearer {written(KEY)}"}
            async with router.client.post("/v1/chat/completions", json={}, headers=headers) as reply:
                assert reply.status == 401

    asyncio.run(main())
