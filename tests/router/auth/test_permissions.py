"""Which key a path wants: every route of ours is somewhere in the table, and nothing dangerous of a worker's is open."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from router.auth.permissions import OWN_ADMIN, USE, Right, needed
from tests.support import sglang_server
from tests.test_docs import CALLS, routes

HARMLESS_THERE = frozenset({"/abort_request"})
"""A worker asks for its admin key; this router looks into the body."""


def test_every_own_route_was_thought_of() -> None:
    """What is for admins is so by intention, and not because it was forgotten."""
    for path in routes():
        right = needed("GET", path)
        assert (right is Right.ADMIN) is (path in OWN_ADMIN), (
            f"{path} belongs into a list of router/auth/permissions.py"
        )
    assert routes() >= OWN_ADMIN


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("GET", "/liveness", Right.FREE),
        ("GET", "/readiness", Right.FREE),
        ("GET", "/health", Right.FREE),
        ("POST", "/generate", Right.USE),
        ("PUT", "/generate", Right.USE),
        ("POST", "/v1/chat/completions", Right.USE),
        ("POST", "/v1/messages", Right.USE),
        ("GET", "/v1/models/Qwen/Qwen3-8B", Right.USE),
        ("POST", "/retrieve_from_text", Right.USE),
        ("GET", "/metrics", Right.READ),
        ("GET", "/workers", Right.READ),
        ("HEAD", "/workers", Right.READ),
        ("GET", "/workers/42903d095d88", Right.READ),
        ("GET", "/workers/http://10.0.0.1:30001", Right.READ),
        ("POST", "/workers", Right.ADMIN),
        ("DELETE", "/workers/42903d095d88", Right.ADMIN),
        ("PUT", "/workers/42903d095d88", Right.ADMIN),
        ("POST", "/add_worker", Right.ADMIN),
        ("GET", "/debug/requests", Right.ADMIN),
        ("POST", "/update_weights_from_disk", Right.ADMIN),
        ("GET", "/server_info", Right.ADMIN),
        ("GET", "/get_server_info", Right.ADMIN),
        ("POST", "/open_session", Right.ADMIN),
        ("GET", "/v1/responses/resp_1", Right.ADMIN),
        ("POST", "/what/is/this", Right.ADMIN),
        # Other spellings of what is known are not known.
        ("POST", "/generate/", Right.ADMIN),
        ("POST", "//generate", Right.ADMIN),
        ("POST", "/Generate", Right.ADMIN),
        ("POST", "generate", Right.ADMIN),
        ("GET", "/liveness/../server_info", Right.ADMIN),
        ("GET", "/v1/models/../../server_info", Right.ADMIN),
        ("POST", "/sessions/s/../../add_worker", Right.ADMIN),
        ("GET", "/metricsomething", Right.ADMIN),
        ("POST", "/workersomething", Right.ADMIN),
        ("GET", "", Right.ADMIN),
    ],
)
def test_what_a_path_wants(method: str, path: str, right: Right) -> None:
    assert needed(method, path) is right


def test_what_is_open_is_documented() -> None:
    """Each path of a worker that tenants may use stands in docs/http-api/."""
    text = "".join(page.read_text() for page in CALLS)
    missing = [path for path in USE if f"`{path}`" not in text and f"`{path.removeprefix('/v1/')}`" not in text]
    assert [path for path in missing if path not in routes()] == []


def guarded(source: str) -> set[str]:
    """The paths for which SGLang itself has a notion of an admin."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AsyncFunctionDef) and any("auth_level" in ast.unparse(d) for d in node.decorator_list):
            for decorator in node.decorator_list:
                found |= set(re.findall(r"^\w+\.\w+\('(/[^']*)'", ast.unparse(decorator)))
    return found


def test_what_a_worker_keeps_for_admins_is_theirs_here() -> None:
    """Read off the installed SGLang, if there is one."""
    (sources,) = [*Path(sglang_server.sglang_dir()).glob("venv/lib/*/site-packages/sglang/srt/entrypoints")] or [None]
    if sources is None:
        pytest.skip("no SGLang")
    paths = {path for file in ("http_server.py", "elastic_ep.py") for path in guarded((sources / file).read_text())}
    assert len(paths) > 40
    assert {path for path in paths if needed("POST", path) is not Right.ADMIN} == HARMLESS_THERE
