"""A store in which the log of one session is damaged: the others are served, listed and exported, and `verify` names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from middleware_hub.store.sqlite.file import connect
from tests.integration.test_store_trouble import NAME, router
from tests.middleware_hub.store_cli.running import status
from tests.support import templates
from tests.support.client import Answer, call
from tests.support.programs import Program
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

SESSIONS = ("a", "b", "c")
_OF_B = "log = (SELECT log FROM logs WHERE name LIKE 'session//b/%')"
_LAST_OF_B = f"(SELECT max(number) FROM events WHERE {_OF_B})"
DAMAGE = {
    "an event": f"UPDATE events SET body = x'00' WHERE {_OF_B} AND number = {_LAST_OF_B}",
    "the first event": f"DELETE FROM events WHERE {_OF_B} AND number = 1",
}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Program]:
    template = str(templates.folder() / "qwen2_5.jinja")
    with (
        EmbeddedWorker(vocabulary("qwen"), token_delay=0) as worker,
        router(worker, f"{tmp_path}/store/", tmp_path, "--chat-template", template) as program,
    ):
        program.wait_until_up()
        for name in SESSIONS:
            assert call(f"{program.url}/sessions", {"session_id": name}).status == 201
            assert chat(program, name).status == 200
        program.terminate()
        assert program.exit_code() == 0
        yield program


def chat(made: Program, name: str) -> Answer:
    messages = [{"role": "user", "content": f"Hello, {name}"}]
    return call(f"{made.url}/sessions/{name}/v1/chat/completions", {"messages": messages, "max_tokens": 4})


def damage(path: Path, *statements: str) -> None:
    with closing(connect(path / "store" / NAME)) as file:
        for statement in statements:
            file.execute(statement)
            assert file.changes() > 0, statement


def last_record_of_b(path: Path) -> str:
    """Return the statement that removes the record of the sampled tokens of "b"."""
    with closing(connect(path / "store" / NAME)) as file:
        (body,) = file.execute(f"SELECT body FROM events WHERE {_OF_B} AND number = {_LAST_OF_B}").fetchone()
        ids = [row[0] for row in file.execute("SELECT id FROM records ORDER BY n DESC")]
    named = next(one for one in ids if one in body)
    return f"DELETE FROM records WHERE id = x'{named.hex()}'"


@pytest.mark.slow
@pytest.mark.parametrize("what", [*DAMAGE, "a record"])
def test_the_others_are_well(made: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    damage(tmp_path, last_record_of_b(tmp_path) if what == "a record" else DAMAGE[what])
    store = f"sqlite:{tmp_path}/store/"
    assert status("verify", "--store", store) == 1
    assert "session//b/" in capsys.readouterr().out
    rows = tmp_path / "trees.jsonl"
    status("export", "--store", store, "--out", str(rows))
    shown: list[dict[str, Any]] = [msgspec.json.decode(line) for line in rows.read_bytes().splitlines()]
    assert {"a", "c"} <= {one["session_id"] for one in shown}
    made.start()
    made.wait_until_up()
    found = call(f"{made.url}/sessions").json()
    assert [one["session_id"] for one in found["sessions"]] == ["a", "c"]
    assert found["damaged"] == ["b"]
    assert [chat(made, name).status for name in SESSIONS] == [200, 500, 200]
    refused = call(f"{made.url}/sessions/b").json()["error"]
    assert (refused["type"], "tito-router store verify" in refused["message"]) == ("store_damaged", True)
    assert "Traceback" not in made.log


@pytest.mark.slow
def test_a_damaged_log_of_weight_versions_stops_no_router(made: Program, tmp_path: Path) -> None:
    of_versions = "log = (SELECT log FROM logs WHERE name = 'weight_versions')"
    damage(tmp_path, f"UPDATE events SET body = x'00' WHERE {of_versions}")
    made.start()
    made.wait_until_up()
    assert "event 1 of the log 'weight_versions' is damaged" in made.log
    assert [chat(made, name).status for name in SESSIONS] == [200, 200, 200]
    assert status("prune", "--store", f"sqlite:{tmp_path}/store/", "--before-version", "x", "--dry-run") in (0, 2)
