"""`tito-router store verify` prints every kind of damage that the tests of stores make, and ends with status 1."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from middleware_hub.store.protocol import Store
from middleware_hub.store.sqlite.store import SqliteStore
from middleware_hub.store.sqlite.verifying import SqliteVerifier
from tests.middleware_hub.store import test_damage
from tests.middleware_hub.store.world import World, sqlite, with_store
from tests.middleware_hub.store_cli.running import status

world = test_damage.world
(DAMAGE,) = (mark.args[1] for mark in test_damage.test_verify_finds_it.pytestmark)  # type: ignore[attr-defined]


def test_a_whole_store_is_whole(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("verify", "--store", sqlite(tmp_path)) == 0
    assert capsys.readouterr().out == "8 records checked, nothing is wrong\n"


@pytest.mark.parametrize(("kind", "damage"), DAMAGE)
def test_each_kind_is_printed(
    tmp_path: Path,
    world: World,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    damage: Callable[[Path, World], None],
) -> None:
    damage(tmp_path, world)
    assert status("verify", "--store", sqlite(tmp_path)) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert kind in {line.partition(": ")[0] for line in lines}
    assert re.fullmatch(rf"\d records checked, {len(lines)} findings", last)


@pytest.mark.parametrize("share", [0.0005, 0.1, 0.5, 0.9])
def test_a_cut_file_is_told(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], share: float) -> None:
    """Whether it opens or not."""
    path = tmp_path / "store.sqlite3"
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    assert status("verify", "--store", sqlite(tmp_path)) in (1, 2)
    printed = capsys.readouterr()
    assert re.search(
        r"^file: |error: .*(damaged|no SQLite file|something else)", printed.out + printed.err, re.MULTILINE
    )


def test_no_transaction_is_open_between_two_pages(tmp_path: Path, world: World) -> None:
    """It would keep routers from putting their log into the file, and would be an error when Ctrl-C ends the check."""
    with_store(sqlite(tmp_path), _pages_end_without_a_transaction, None)


async def _pages_end_without_a_transaction(store: Store) -> None:
    assert isinstance(store, SqliteStore)
    reader = store._open_readers()[1]
    verifier, more, pages = SqliteVerifier(reader), True, 0
    while more:
        _, more = verifier.page()
        pages += 1
        assert not reader.connection.in_transaction
    assert pages > 2


def test_a_torn_log_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Opening cuts it, so the second look finds nothing."""
    world = World()
    for number in range(20):
        world.turn(None, f"user {number}", "reply")
    copy = test_damage.cut_log(tmp_path, world)
    log = copy / "store.sqlite3-wal"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 100)
    assert status("verify", "--store", f"sqlite:{copy}") == 1
    assert "at the end of the log were torn, and were cut off on opening" in capsys.readouterr().out
    assert status("verify", "--store", f"sqlite:{copy}") == 0
