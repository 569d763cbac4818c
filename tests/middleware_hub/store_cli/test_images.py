"""`tito-router store` on a store with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from middleware_hub.store.sqlite.file import connect
from tests.middleware_hub.store.test_media import CONTENTS, batch_of, file_of, showing
from tests.middleware_hub.store.world import World, address_of, with_store
from tests.middleware_hub.store_cli.running import status


def stored(address: str) -> None:
    """Two conversations of one tenant, which share an image, and one of another tenant."""
    world = World()
    for tenant, numbers in (("a", (2, 3)), ("a", (3,)), ("b", (3,))):
        turn = world.turn(None, f"{tenant} {numbers}", "y" * 9, namespace=(tenant, "", ""), own_context=True)
        batch = batch_of(showing(turn, numbers), *(file_of(tenant, one) for one in numbers))
        with_store(address, lambda store, batch=batch: store.append(batch))


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_stats_and_prune_count_images(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = address_of(kind, tmp_path)
    stored(address)
    assert status("stats", "--store", address, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["images"], told["image_bytes"], told["unnamed_images"]) == (3, 2 * 300_000 + 5_000, 0)
    assert told["bytes"] > told["image_bytes"]
    assert status("stats", "--store", address) == 0
    assert "image bytes      605,000 (590.8 KiB)" in capsys.readouterr().out
    assert status("prune", "--store", address, "--tenant", "a", "--unretrieved") == 0
    assert "removed 2 of 3 images\n" in capsys.readouterr().out
    assert status("verify", "--store", address) == 0
    assert status("prune", "--store", address, "--tenant", "b", "--unretrieved") == 0
    assert "removed 1 of 1 images\n" in capsys.readouterr().out


def test_what_no_record_names_is_told_and_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = address_of("sqlite", tmp_path)
    stored(address)
    connection = connect(tmp_path / "store.sqlite3")
    connection.execute("INSERT INTO media SELECT zeroblob(16), size, about, data FROM media LIMIT 1")
    connection.close()
    assert status("verify", "--store", address) == 1
    assert "is named by no record" in capsys.readouterr().out
    assert status("stats", "--store", address) == 0
    assert "unnamed images   1\n" in capsys.readouterr().out
    nothing = "--store", address, "--tenant", "nobody"
    assert status("prune", *nothing, "--dry-run") == 0
    assert "would remove 1 images that no record names\n" in capsys.readouterr().out
    assert status("prune", *nothing) == 0
    assert "removed 1 of 4 images; no record named 1 of them\n" in capsys.readouterr().out
    assert status("verify", "--store", address) == 0
    assert len(CONTENTS[3]) == 300_000
