"""`docs/openapi.json` describes the routes that a router has, and the fields that it reads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.routes import SAMPLED_ELSEWHERE
from middleware_hub.sessions import controls, exports, scoring
from middleware_hub.trajectories import calls
from router.app import create_app
from router.config import RadixConfig, RouterConfig, WorkersConfig
from scripts import make_openapi, openapi_bodies, openapi_calls
from tests.fuzz.parts import routes
from tests.fuzz.workers import embedded_workers
from tests.support.openapi import DescribedRoutes
from tests.support.serving import serve
from worker.models.ngram import shipped_tokenizer


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return make_openapi.description()


def test_the_file_is_what_the_routes_say() -> None:
    assert make_openapi.PAGE.read_bytes() == make_openapi.made(), "docs/openapi.json is out of date: run `make openapi`"


def test_every_route_of_a_router_is_described(described: dict[str, Any]) -> None:
    """A router is walked through for its routes, so that one which is in no table is found, too."""
    found = routes(create_app(RouterConfig(radix=RadixConfig(tokenizer_path=str(shipped_tokenizer())))))
    workers = {*SAMPLED_ELSEWHERE, "/inspect/{rest:rest}"} - described["paths"].keys()
    own = {path.replace("{key:rest}", "{id}"): methods for path, methods in found.items() if path not in workers}
    assert own.keys() - described["paths"].keys() == set()
    assert len(own) > 40
    for path, methods in own.items():
        if path != "/inspect":  # its handler looks at the methods itself
            assert {method.lower() for method in methods} <= described["paths"][path].keys(), path


def test_a_route_without_a_row_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_openapi.hub.SCORES, "/trajectories/judge", {"POST": "judge"})
    with pytest.raises(KeyError, match="judge"):
        make_openapi.description()


def test_no_row_is_left_over(described: dict[str, Any]) -> None:
    rows = {(method.lower(), path) for method, path in openapi_calls.CALLS}
    assert rows <= {(method, path) for path, methods in described["paths"].items() for method in methods}


def test_references_lead_somewhere_and_every_part_is_used(described: dict[str, Any]) -> None:
    parts = described["components"]
    there = {f"#/components/{kind}/{name}" for kind in parts for name in parts[kind] if kind != "securitySchemes"}
    assert set(re.findall(r'"(#/components/[^"]+)"', make_openapi.made().decode())) == there


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (openapi_bodies.SessionBody, {*controls._OWN_FIELDS, "stream_interval"}),
        (openapi_bodies.FinalizeBody, exports._FINALIZE_FIELDS | {"score"}),
        (openapi_bodies.ScoreBody, scoring.FIELDS),
        (openapi_bodies.RewardBody, calls._REWARD | {"rewards"}),
    ],
)
def test_the_fields_are_those_that_are_read(body: Any, read: set[str]) -> None:
    assert set(body.__struct_fields__) == read


def test_a_body_has_a_field_for_what_it_takes(described: dict[str, Any]) -> None:
    retrieval = described["components"]["schemas"]["RetrievalRequest"]
    assert retrieval["required"] == ["text"]
    assert "ignored" not in retrieval["properties"]
    assert retrieval["properties"]["strict"]["description"].startswith("whether to answer 409")
    assert retrieval["properties"]["image_data"]["default"] is None


def test_keys_are_asked_for_where_they_are_needed(described: dict[str, Any]) -> None:
    free = described["paths"]["/health"]["get"]
    assert free["security"] == []
    assert "401" not in free["responses"]
    asked = described["paths"]["/workers"]["get"]
    assert "security" not in asked
    assert {"401", "403"} <= asked["responses"].keys()


@pytest.mark.parametrize(
    ("method", "path", "status", "workers", "wrong"),
    [
        ("GET", "/health", 200, False, None),
        ("HEAD", "/health", 503, False, None),
        ("GET", "/health", 404, False, "404 is not described for get_health"),
        ("DELETE", "/health", 405, False, None),  # no such operation
        ("GET", "/workers/http://127.0.0.1:1/x", 404, False, None),
        ("GET", "/workers/x", 409, False, "409 is not described for get_workers_id"),
        ("POST", "/generate", 418, True, None),
        ("POST", "/generate", 418, False, "418 is not described for post_generate"),
        ("GET", "/health", 418, True, "418 is not described for get_health"),
        ("POST", "/v1beta/models/a/b:countTokens", 200, False, None),
        ("POST", "/v1beta/models/a/b:countTokens", 207, False, "207 is not described for post_v1beta_models_model_countTokens"),
    ],
)  # fmt: skip
def test_an_answer_is_compared_with_its_route(
    method: str, path: str, status: int, workers: bool, wrong: str | None
) -> None:
    """The judge of the fuzz, which sees the answers of all routes, is judged here."""
    assert DescribedRoutes().complaint(method, path, status, workers=workers) == wrong


_LEFT_TO_THE_FUZZ = (
    "add_worker|remove_worker|workers|pause|sleep|resume|wake_up|flush|reset|release|update|begin|end|load|unload|init|start"
    "|finish|collective|abort|v1/load|v1/unload|trajectories/claim"
)
"""What would leave the others without a worker, and a claim, which may wait for minutes."""


@pytest.mark.slow
def test_a_tool_finds_no_status_that_is_not_described(tmp_path: Path) -> None:
    """Schemathesis makes requests out of the file alone: what it may send, what it may not, and the like."""
    with embedded_workers() as workers:
        config = RouterConfig(
            workers=WorkersConfig(urls=tuple(worker.url for worker in workers)),
            radix=RadixConfig(tokenizer_path=str(shipped_tokenizer())),
        )
        with serve(create_app(config)) as url:
            command = [
                *(sys.executable, "-m", "schemathesis.cli", "run", str(make_openapi.PAGE), "--url", url),
                *("--checks", "not_a_server_error,status_code_conformance", "--phases", "coverage,fuzzing"),
                *("--max-examples", "5", "--generation-deterministic", "--workers", "1"),
                *("--request-timeout", "60", "--no-color", "--exclude-path-regex", f"^/({_LEFT_TO_THE_FUZZ})"),
            ]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    counted = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert counted is not None
    assert int(counted[1]) == int(counted[2]) > 1000
