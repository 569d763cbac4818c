"""`tito-router store export`: its rows against an oracle that knows every character's token, its files, and what it leaves."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from middleware_hub.spans.chain import SpanFlag
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Serials, SpanRecord
from middleware_hub.store_cli import tables
from middleware_hub.store_cli.tables import RowWriter
from tests.middleware_hub.store.test_damage import change, flip
from tests.middleware_hub.store.world import EOS, Turn, World, append_all, query, sqlite, with_store
from tests.middleware_hub.store_cli.running import status
from tests.support.usual import usual

ROOT = Path(__file__).parents[3]
TEAM = ("team", "adapter", "eval")


def stored(folder: Path, world: World) -> str:
    with_store(sqlite(folder), lambda store: append_all(store, world.turns))
    return sqlite(folder)


def exported(store: str, folder: Path, *flags: str, suffix: str = "parquet") -> list[dict[str, Any]]:
    path = folder / f"rows.{suffix}"
    assert status("export", "--store", store, "--out", str(path), *flags) == 0
    assert not list(folder.glob("*.part"))
    return read(path.read_bytes(), suffix)


def read(data: bytes, suffix: str) -> list[dict[str, Any]]:
    if suffix == "parquet":
        return pq.read_table(io.BytesIO(data)).to_pylist()
    opened = pa.ipc.open_file(data) if suffix == "arrow" else pa.ipc.open_stream(data)
    return opened.read_all().to_pylist()


def grown(seed: int) -> tuple[World, dict[bytes, Turn | None], dict[bytes, tuple[Turn, int | None]]]:
    """Return random conversations: forks, forks inside a reply, samples of one prompt, equal texts, namespaces."""
    draw = random.Random(seed)
    world = World()
    lines: dict[bytes, tuple[Turn, int | None]] = {}
    above: dict[bytes, Turn | None] = {}
    for number in range(40):
        line = draw.choice([None, *world.turns]) if world.turns else None
        inside = None
        if line is not None and draw.random() < 0.2 and len(line.reply.text) > 1:
            inside = draw.randrange(1, len(line.reply.text))
        words = draw.choice(["Why?", "Ω and 한강 " * 3, "an observation " * 30])
        reply = draw.choice(["Because.", "yes", f"answer {number} " * draw.randrange(1, 40)])
        made = world.turn(
            line,
            words,
            reply,
            namespace=draw.choice([("", "", ""), TEAM]),
            inside=inside,
            names=(f"client-{number}", f"engine-{number}") if draw.random() < 0.9 else (),
            stamp=str(number // 10),
        )
        above[made.reply.id] = line
        if line is not None:
            lines[made.reply.id] = line, inside
    return world, above, lines


def path_of(turn: Turn, lines: dict[bytes, tuple[Turn, int | None]]) -> list[tuple[Turn, int]]:
    """Return the turns of a sequence, first one first, each with how many characters of its reply are in it."""
    found = [(turn, len(turn.reply.text))]
    while found[0][0].reply.id in lines:
        line, inside = lines[found[0][0].reply.id]
        found.insert(0, (line, len(line.reply.text) if inside is None else inside))
    return found


def expected(world: World, turn: Turn, lines: dict[bytes, tuple[Turn, int | None]]) -> dict[str, Any]:
    """Return the row that ends with a turn, where each token is one character and its id is the character's number."""
    mask, logprobs = [0] * len(turn.text), [0.0] * len(turn.text)
    turns: list[dict[str, Any]] = []
    for one, kept in path_of(turn, lines):
        start = one.reply.start
        mask[start : start + kept] = [1] * kept
        logprobs[start : start + kept] = [-(i % 7) / 8 for i in range(kept)]
        name = one.reply.request_ids[0] if one.reply.request_ids else ""
        turns.append(
            {
                "request_id": name,
                "start": start,
                "end": start + kept,
                "version": one.reply.stamp,
                "finish": "stop",
                "kv_version": one.reply.kv_version,
            }
        )
    same = [other for other in world.turns if other.text == turn.text and other.reply.namespace == turn.reply.namespace]
    tenant, lora_path, namespace = turn.reply.namespace
    return {
        "tenant": tenant,
        "lora_path": lora_path,
        "namespace": namespace,
        "session": None,
        "conversation": turn.reply.root.hex(),
        "request_id": turns[-1]["request_id"],
        "recorded_at": datetime.fromtimestamp(turn.reply.serial / 1e9, UTC),
        "text": turn.text,
        "response": turn.text,
        "tokens": [ord(character) for character in turn.text],
        "loss_mask": mask,
        "rollout_logp": logprobs,
        "token_length": len(mask),
        "loss_mask_length": len(mask),
        "response_length": len(mask) - mask.index(1),
        "exact": True,
        "exact_chars": len(turn.text),
        "reasons": [],
        "weight_versions": [{"version": t["version"], "start": t["start"], "end": t["end"]} for t in turns],
        "variants": len(same),
        "request_ids": [other.reply.request_ids[0] if other.reply.request_ids else "" for other in reversed(same)],
        "turns": turns,
    }


@pytest.mark.parametrize("seed", usual(range(6), 0, 1))
def test_rows_are_what_was_recorded(tmp_path: Path, seed: int) -> None:
    """Every reply is the end of a row, or inside that of another one."""
    world, _, lines = grown(seed)
    store = stored(tmp_path, world)
    rows = exported(store, tmp_path, "--rows", "replies")
    assert rows == [expected(world, turn, lines) for turn in world.turns]
    whole = {line.reply.id for line, inside in lines.values() if inside is None or inside == len(line.reply.text)}
    leaves = exported(store, tmp_path)
    assert leaves == [row for row, turn in zip(rows, world.turns, strict=True) if turn.reply.id not in whole]


@pytest.mark.parametrize("suffix", ["arrow", "arrows"])
def test_arrow_has_the_same_rows(tmp_path: Path, suffix: str) -> None:
    store = stored(tmp_path, grown(1)[0])
    assert exported(store, tmp_path, suffix=suffix) == exported(store, tmp_path)


def test_pieces_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path, grown(2)[0])
    whole = exported(store, tmp_path)
    monkeypatch.setattr(tables, "_PIECE_TOKENS", 200)
    assert exported(store, tmp_path) == whole
    assert pq.ParquetFile(tmp_path / "rows.parquet").num_row_groups > 3
    assert exported(store, tmp_path, suffix="arrows") == whole


@pytest.mark.parametrize("suffix", usual(["parquet", "arrow", "arrows"], "parquet"))
def test_standard_output_has_the_file_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    store = stored(tmp_path, grown(3)[0])
    command = [sys.executable, "-m", "router", "store", "export", "--store", store, "--out", "-", "--format", suffix]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.split()[1:] == [b"rows"]
    assert read(done.stdout, suffix) == exported(store, tmp_path)


@pytest.mark.slow
def test_who_stops_reading_ends_it(tmp_path: Path) -> None:
    world = World()
    world.turn(None, "user", "".join(chr(0x4E00 + random.Random(1).randrange(9_000)) for _ in range(10)))
    for number in range(300):
        draw = random.Random(number)
        world.turn(None, "user", "".join(chr(0x4E00 + draw.randrange(9_000)) for _ in range(400)))
    store = stored(tmp_path, world)
    command = (
        f"{sys.executable} -m router store export --store {store} --out - --format arrows | head -c 10 > /dev/null"
    )
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ([], {0, 1, 2, 3}),
        (["--tenant", "team"], {1}),
        (["--lora-path", "adapter", "--namespace", "eval"], {1}),
        (["--tenant", ""], {0, 2, 3}),
        (["--version", "7"], {2}),
        (["--version", "7", "--version", "3"], {1, 2}),
        (["--since", "2001-09-09T01:46:40"], {0, 1, 2, 3}),
        (["--since", "2001-09-09T01:46:42Z"], {2, 3}),
        (["--since", "1h"], set()),
    ],
    ids=str,
)
def test_filters_are_about_the_end_of_a_row(tmp_path: Path, flags: list[str], left: set[int]) -> None:
    class Clock(Serials):
        def next(self) -> int:
            """Two for each turn: a second each, from 2001 on."""
            self._last = (self._last or 10**18 - 10**9) + 500_000_000
            return self._last

    world = World(Clock())
    world.turn(None, "a", "one", stamp="1")
    world.turn(None, "b", "two", stamp="3", namespace=TEAM)
    first = world.turn(None, "c", "three", stamp="1")
    world.turn(first, "more", "four", stamp="7")
    world.turn(None, "d", "five", stamp="9")
    ends = [world.turns[at].text for at in (0, 1, 3, 4)]
    rows = exported(stored(tmp_path, world), tmp_path, *flags)
    assert {row["text"] for row in rows} == {ends[at] for at in left}


def test_hidden_tails_flags_and_missing_logprobs(tmp_path: Path) -> None:
    world = World()
    first = world.turn(None, "user", "reply", tail=(EOS,))
    world.turn(first, "user", "second", tail=(EOS,), flags=SpanFlag.UNCERTAIN)
    wrong = world.turn(None, "user", "spelled otherwise", flags=SpanFlag.MISMATCH)
    bare = world.turn(None, "user", "without")
    world.turns[-1] = Turn(_without_logprobs(bare.reply), bare.context, bare.text)
    leaf, mismatch, unsaid = exported(stored(tmp_path, world), tmp_path)
    reply = [ord(character) for character in "reply"] + [0]
    assert leaf["tokens"][4:10] == reply
    assert leaf["text"] == "userreply<|im_end|>usersecond"
    assert (leaf["loss_mask"], leaf["exact"], leaf["reasons"]) == (
        [0] * 4 + [1] * 6 + [0] * 4 + [1] * 7,
        True,
        ["version_uncertain"],
    )
    assert (mismatch["exact"], mismatch["reasons"], mismatch["text"]) == (False, ["engine_mismatch"], wrong.text)
    assert (unsaid["rollout_logp"], unsaid["exact"], unsaid["reasons"]) == (None, True, ["no_logprobs"])


def _without_logprobs(record: SpanRecord) -> SpanRecord:
    import msgspec

    return msgspec.structs.replace(record, logprobs=None)


def marks_of(folder: Path, world: World) -> list[tuple[bool, int, str]]:
    async def work(store: Store) -> list[tuple[bool, int, str]]:
        marks = [(await store.find(query(turn.text))).marks[turn.reply.root] for turn in world.turns]
        return [(mark.retrieved, mark.tick, mark.stamp) for mark in marks]

    found: list[tuple[bool, int, str]] = with_store(sqlite(folder), work, None)
    return found


def test_what_was_exported_counts_as_retrieved_and_stays_as_old_as_it_was(tmp_path: Path) -> None:
    world = World()
    world.turn(None, "a", "one", stamp="1")
    world.turn(None, "b", "two", stamp="2")
    store = stored(tmp_path, world)
    before = marks_of(tmp_path, world)
    exported(store, tmp_path, "--keep-marks")
    assert marks_of(tmp_path, world) == before
    exported(store, tmp_path, "--version", "2")
    assert marks_of(tmp_path, world) == [before[0], (True, *before[1][1:])]


@pytest.mark.parametrize("kind", ["parquet", "tree"])
def test_an_export_that_failed_does_not_count_as_one(tmp_path: Path, kind: str) -> None:
    world = World()
    world.turn(None, "a", "one", stamp="1")
    store = stored(tmp_path, world)
    before = marks_of(tmp_path, world)
    assert status("export", "--store", store, "--out", "/dev/full", "--format", kind) == 1
    assert marks_of(tmp_path, world) == before


def test_damage_costs_its_own_rows_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    first = world.turn(None, "user", "reply")
    world.turn(first, "more", "answer")
    world.turn(None, "another", "whole")
    store = stored(tmp_path, world)
    change(tmp_path, "DELETE FROM records WHERE id = ?", first.reply.id)
    path = tmp_path / "rows.parquet"
    assert status("export", "--store", store, "--out", str(path)) == 1
    assert "1 rows, 1 could not be read" in capsys.readouterr().err
    assert [row["text"] for row in read(path.read_bytes(), "parquet")] == ["anotherwhole"]
    flip(tmp_path, "records", "id = ?", world.turns[2].reply.id)
    assert status("export", "--store", store, "--out", str(path)) == 1


def test_a_failed_export_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path, grown(1)[0])
    path = tmp_path / "rows.parquet"
    path.write_text("an older one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowWriter, "add", full)
    assert status("export", "--store", store, "--out", str(path)) == 1
    assert path.read_text() == "an older one"
    assert sorted(one.name for one in tmp_path.glob("rows*")) == ["rows.parquet"]


def test_sigterm_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for number in range(100):
        world.turn(None, f"user {number}", "reply")
    store = stored(tmp_path, world)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the command has a handler of its own
    monkeypatch.setattr(RowWriter, "add", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert status("export", "--store", store, "--out", str(tmp_path / "rows.parquet")) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("rows*"))


def test_two_exports_to_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins and ends while the other writes: neither damages the other's file."""
    store = stored(tmp_path, grown(1)[0])
    flags = ["export", "--store", store, "--out", str(tmp_path / "rows.parquet")]
    whole = exported(store, tmp_path)
    add = RowWriter.add

    def interrupted(writer: RowWriter, rows: Any) -> None:
        monkeypatch.setattr(RowWriter, "add", add)
        subprocess.run([sys.executable, "-m", "router", "store", *flags], cwd=ROOT, check=True, timeout=60)
        assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == whole
        add(writer, rows)

    monkeypatch.setattr(RowWriter, "add", interrupted)
    assert status(*flags) == 0
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == whole
    assert sorted(one.name for one in tmp_path.glob("rows*")) == ["rows.parquet"]


def test_a_pipe_with_a_name_stays_one(tmp_path: Path) -> None:
    store = stored(tmp_path, grown(1)[0])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        try:
            assert status("export", "--store", store, "--out", str(pipe), "--format", "parquet") == 0
            assert pipe.is_fifo()
            assert read(reader.communicate()[0], "parquet") == exported(store, tmp_path)
        finally:
            reader.kill()


def test_a_missing_library_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = stored(tmp_path, grown(1)[0])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert status("export", "--store", store, "--out", str(tmp_path / "rows.parquet")) == 2
    assert "pip install 'tito-router[export]'" in capsys.readouterr().err
    assert not list(tmp_path.glob("rows*"))


def test_an_empty_store_is_an_empty_file(tmp_path: Path) -> None:
    rows = exported(stored(tmp_path, World()), tmp_path)
    assert rows == []
    assert pq.read_schema(tmp_path / "rows.parquet").names[:3] == ["tenant", "lora_path", "namespace"]


def test_a_namespace_in_utf_8_and_a_link_as_the_target(tmp_path: Path) -> None:
    """A header's value reaches the store as Latin-1, which can hold the bytes of any name."""
    world = World()
    world.turn(None, "a", "one", namespace=("", "", "日本".encode().decode("latin-1")))
    world.turn(None, "b", "two", namespace=("", "", "caf\u00e9"))
    target, link = tmp_path / "kept.parquet", tmp_path / "rows.parquet"
    link.symlink_to(target)
    store = stored(tmp_path, world)
    for name in ("日本", "caf\u00e9"):
        (row,) = exported(store, tmp_path, "--namespace", name)
        assert row["namespace"] == name
        assert link.is_symlink()
        assert target.stat().st_size
