"""`tito-router store` on a store in Redis, beside a router that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event, Mark
from tests.middleware_hub.store.world import World, address_of, append_all, findings, with_store
from tests.middleware_hub.store_cli.running import status


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_every_command(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = address_of(kind, tmp_path)
    world = World()
    line = None
    for number in range(5):
        line = world.turn(line, f"user {number} ", f"reply {number}", names=(f"r{number}",), stamp="1")
    other = world.turn(None, "elsewhere", "another", stamp="7")

    async def fill(store: Store) -> None:
        await append_all(store, world.turns)
        store.note([Mark(other.reply.root, other.reply.serial, "7", retrieved=True)])

    with_store(address, fill)
    assert status("stats", "--store", address, "--tokens", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["conversations"], told["records"], told["turns"]) == (2, 12, 6)
    assert status("verify", "--store", address) == 0
    assert capsys.readouterr().out == "12 records checked, nothing is wrong\n"
    out = tmp_path / "rows.parquet"
    assert status("export", "--store", address, "--out", str(out)) == 0
    rows = pq.read_table(out).to_pylist()
    assert sorted(row["text"] for row in rows) == sorted([world.turns[4].text, other.text])
    assert max(len(row["turns"]) for row in rows) == 5
    capsys.readouterr()
    assert status("prune", "--store", address, "--before-version", "5") == 0
    assert "forgot 1 of 2 conversations, 10 records" in capsys.readouterr().out
    assert with_store(address, findings, None) == []


def test_a_password_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = address_of("redis", tmp_path)
    with_store(address, lambda store: store.stats())
    assert status("stats", "--store", f"{address}?username=default") == 0
    assert "username" not in capsys.readouterr().out
    assert status("stats", "--store", address.replace("//", "//default:topsecret@")) == 0
    told = capsys.readouterr()
    assert "topsecret" not in told.out + told.err
    assert "***@" in told.out


@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_a_store_inside_the_prefix_of_another_is_left_out(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = address_of(kind, tmp_path)
    for prefix in ("tito:", "tito:l:", "tito:r:x:"):
        world = World()
        turn = world.turn(None, "user", "reply", names=("rid",))

        async def fill(store: Store, world: World = world, log: str = turn.text) -> None:
            await append_all(store, world.turns)
            await store.append(Batch(events=[Event(log, "made", b"data")]))

        with_store(f"{address}?prefix={prefix}", fill)
    for prefix in ("tito:", "tito:l:", "tito:r:x:"):
        assert status("verify", "--store", f"{address}?prefix={prefix}") == 0
        assert capsys.readouterr().out == "2 records checked, nothing is wrong\n"
