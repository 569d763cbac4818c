"""`tito-router store stats|verify|prune`: what they print, and with which status they end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.persistence.weight_versions import VersionLog
from middleware_hub.spans.versions import VersionClock, WorkerVersions
from middleware_hub.store.protocol import Batch, Store
from middleware_hub.store.records import Event, Mark
from middleware_hub.store.spool.file import SpoolFile, SpoolHead
from middleware_hub.store.spool.folder import SpoolFolder, identity
from middleware_hub.store.spool.packing import pack
from middleware_hub.store.sqlite.file import log_of
from middleware_hub.store_cli.progress import bar
from tests.middleware_hub.store.dying import dies
from tests.middleware_hub.store.world import World, append_all, findings, sqlite, with_store
from tests.middleware_hub.store_cli.running import status

ROOT = Path(__file__).parents[3]
TEAM = ("team", "", "eval")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A conversation of three turns that was retrieved, hit last under version 1; one of a team, version 7; a lone one."""
    world = World()
    line = world.turn(None, "user", "reply", names=("first",))
    line = world.turn(line, "more", "answer", names=("second",))
    world.turn(line, "and on", "to the end", names=("third",))
    world.turn(None, "elsewhere", "untouched", namespace=TEAM, stamp="7")
    world.turn(None, "a lone prompt", "nobody asks for it", stamp="1")

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        for turn in world.turns[:4]:
            store.note([Mark(turn.reply.root, turn.reply.serial, turn.reply.stamp, retrieved=True)])

    with_store(sqlite(tmp_path), work)
    return world


def texts(folder: Path) -> set[str]:
    async def work(store: Store) -> set[str]:
        return {record.text async for record in store.scan() if record.sampled}

    found: set[str] = with_store(sqlite(folder), work, None)
    return found


ALL = {"reply", "answer", "to the end", "untouched", "nobody asks for it"}


def test_stats_for_people_and_for_programs(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    store = sqlite(tmp_path)
    assert status("stats", "--store", store) == 0
    shown = capsys.readouterr().out
    assert "conversations    3" in shown
    assert "records          10" in shown
    for line in (
        "turns            5",
        "sampled tokens   48",
        "namespaces       2",
        "sessions         0",
        "oldest ",
        "newest ",
    ):
        assert line in shown
    assert status("stats", "--store", store, "--quick", "--json") == 0
    assert json.loads(capsys.readouterr().out).keys() == {"store", "bytes", "conversations", "records", "logs"}
    assert status("stats", "--store", store, "--tokens", "--json") == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["bytes"] > 0
    assert (answer["conversations"], answer["records"], answer["turns"], answer["logs"]) == (3, 10, 5, 0)
    assert (
        answer["characters"]
        == answer["tokens"]
        == sum(len(t.reply.text) + len(t.context.text) for t in world.turns if t.context)
    )
    assert answer["sampled_tokens"] == sum(map(len, ALL))
    times = [datetime.fromtimestamp(turn.reply.serial // 10**9, UTC) for turn in world.turns]
    assert [datetime.fromisoformat(answer[name]) for name in ("oldest", "newest")] == [min(times), max(times)]
    assert answer["parts"] == [
        {"tenant": "", "lora_path": "", "namespace": "", "weight_version": "1", "turns": 4, "sampled_tokens": 39},
        {
            "tenant": "team",
            "lora_path": "",
            "namespace": "eval",
            "weight_version": "7",
            "turns": 1,
            "sampled_tokens": 9,
        },
    ]
    assert status("stats", "--store", store, "--tokens") == 0
    assert "tenant team, lora_path '', namespace eval, weight_version 7, turns 1" in capsys.readouterr().out


def test_versions_that_are_numbers_are_sorted_by_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    for version in ("10", "default", "9"):
        world.turn(None, f"version {version}", "reply", stamp=version)
    with_store(sqlite(tmp_path), lambda store: append_all(store, world.turns))
    assert status("stats", "--store", sqlite(tmp_path), "--tokens", "--json") == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert [part["weight_version"] for part in parts] == ["9", "10", "default"]


@pytest.mark.parametrize("base", [None, "elsewhere"])
@pytest.mark.parametrize("command", ["stats", "verify", "export"])
def test_what_waits_in_a_spool_is_told(
    tmp_path: Path,
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    base: str | None,
) -> None:
    """Whether its router lives or not; and the file stays as it is."""
    base = base and str(tmp_path / base)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = sqlite(tmp_path)
    flags = [command, "--store", store, *(["--out", str(tmp_path / "a.parquet")] if command == "export" else [])]
    flags += ["--spool", base] if base else []
    spool = SpoolFolder(base, identity(store), "toy", 1 << 20).make()
    assert status(*flags) == 0
    assert "not in the store yet" not in capsys.readouterr().err
    spool.put(pack(world.turns[0].batch), replies=2)
    spool.put(pack(Batch(events=[Event("log", "kind")])), replies=0)
    assert spool.path is not None
    before = spool.path.read_bytes()
    assert status(*flags) == 0
    told = capsys.readouterr().err
    assert f"not in the store yet: 2 replies and 1 other records, in {spool.path}." in told
    assert spool.path.read_bytes() == before
    spool.done(2)
    spool.close()


def test_verify_counts(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("verify", "--store", sqlite(tmp_path)) == 0
    assert capsys.readouterr().out == "10 records checked, nothing is wrong\n"


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (["--namespace", "eval"], {"untouched"}),
        (["--tenant", "team", "--lora-path", ""], {"untouched"}),
        (["--tenant", "team", "--lora-path", "other"], set()),
        (["--before-version", "2"], {"reply", "answer", "to the end"}),
        (["--before-version", "1"], set()),
        (["--before-version", "8"], ALL - {"nobody asks for it"}),
        (["--before-version", "2", "--unretrieved"], ALL - {"untouched"}),
        (["--unused-for", "1h"], set()),
        (["--unused-for", "2200-01-01", "--unretrieved", "--tenant", ""], ALL - {"untouched"}),
        (["--unused-for", "2200-01-01"], ALL - {"nobody asks for it"}),
    ],
    ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value),
)
def test_prune_forgets_whole_conversations(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], flags: list[str], gone: set[str]
) -> None:
    store = sqlite(tmp_path)
    assert status("prune", "--store", store, *flags, "--dry-run") == 0
    planned = capsys.readouterr().out.splitlines()
    assert texts(tmp_path) == ALL
    assert status("prune", "--store", store, *flags) == 0
    done = capsys.readouterr().out.splitlines()
    assert texts(tmp_path) == ALL - gone
    assert planned[:-1] == done[:-1]
    assert planned[-1].split()[2:] == done[-1].split(";")[0].split()[1:]
    assert with_store(store, findings) == []


def test_prune_keeps_what_nobody_retrieved_and_says_so(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("prune", "--store", sqlite(tmp_path), "--before-version", "9") == 0
    assert "never retrieved or exported, so kept: 1" in capsys.readouterr().out


def test_names_of_versions_have_the_order_in_which_routers_saw_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    names = ("default", "z-first", "b-second", "a-third")
    for stamp in names:
        world.turn(None, stamp, f"reply under {stamp}", stamp=stamp)

    async def work(store: Store) -> None:
        await append_all(store, world.turns)
        clock = VersionClock()
        log = VersionLog(store, clock, WorkerVersions())
        for name in names:
            clock.observe(name)
        await log.write()

    with_store(sqlite(tmp_path), work)
    assert status("prune", "--store", sqlite(tmp_path), "--before-version", "c-never-seen", "--unretrieved") == 2
    assert "no router that used this store has seen it; known are default, z-first" in capsys.readouterr().err
    # These look like integers, and are names to the clock: an unknown name would be newer than everything.
    for unknown in ("20260401120000000000", "²"):
        assert status("prune", "--store", sqlite(tmp_path), "--before-version", unknown, "--unretrieved") == 2
    assert status("prune", "--store", sqlite(tmp_path), "--before-version", "b-second", "--unretrieved") == 0
    assert texts(tmp_path) == {"reply under b-second", "reply under a-third"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune"], "say what to forget"),
        (["prune", "--before-version", "new"], "no router that used this store has seen it; known are none"),
        (["prune", "--unused-for", "soon"], "neither an age"),
        (["export", "--out", "steps.csv"], "parquet"),
        (["export", "--out", "/no/such/folder/rows.parquet"], "No such file"),
        (["stats", "--no-such-flag"], "unrecognized"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_wrong_flag_says_what_to_write(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert status(*arguments, "--store", sqlite(tmp_path)) == 2
    assert words in capsys.readouterr().err
    assert texts(tmp_path) == ALL


def test_where_nothing_waits_it_is_said(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("handover", "--store", sqlite(tmp_path), "--spool", str(tmp_path / "spool")) == 0
    assert f"below {tmp_path / 'spool'} no router has left a file" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--any-store"], ["--any-store", "--dry-run"]], ids=" ".join)
@pytest.mark.parametrize("content", [b"", b"my notes\n" * 500], ids=["empty", "notes"])
def test_a_file_that_is_no_spool_file_is_not_touched(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], content: bytes, flags: list[str]
) -> None:
    other = tmp_path / "other"
    other.write_bytes(content)
    assert status("handover", "--store", sqlite(tmp_path), *flags, str(other)) == 2
    assert "is no spool file" in capsys.readouterr().err
    assert other.read_bytes() == content


def left_behind(path: Path, store: str) -> bytes:
    """Make the file of a router that was killed while it wrote; return its bytes."""
    turn = World().turn(None, "waiting", "its reply")
    spool = SpoolFile.make(path, SpoolHead(identity(store, "tito:"), "toy"), 1 << 20)
    spool.put(pack(turn.batch))
    dies(spool)
    with log_of(path).open("ab") as log:
        log.write(b"torn")
    return path.read_bytes() + log_of(path).read_bytes()


def test_a_dry_run_of_a_handover_changes_no_file(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before = left_behind(tmp_path / "a.spool", sqlite(tmp_path))
    assert status("handover", "--store", sqlite(tmp_path), "--dry-run", str(tmp_path / "a.spool")) == 0
    assert "1 replies" in capsys.readouterr().out
    assert (tmp_path / "a.spool").read_bytes() + (tmp_path / "a.spool-wal").read_bytes() == before
    assert texts(tmp_path) == ALL


def test_a_handover_of_a_damaged_file_is_no_success(tmp_path: Path, world: World) -> None:
    store, path = sqlite(tmp_path), tmp_path / "a.spool"
    left_behind(path, store)
    spool = SpoolFile.adopt(path, None)
    assert spool is not None
    spool.put(b"a batch")
    spool.close()
    path.write_bytes(path.read_bytes().replace(b"a batch", b"a botch"))
    assert status("handover", "--store", store, "--any-store", str(path)) == 1
    assert texts(tmp_path) == {*ALL, "its reply"}
    assert not path.exists()
    assert path.with_suffix(".damaged").exists()


def test_a_command_is_named_or_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status() == 2
    assert "COMMAND" in capsys.readouterr().err
    assert status("--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("stats", "verify", "export", "prune"))


@pytest.mark.parametrize(
    "command", [["stats"], ["verify"], ["export", "--out", "-"], ["prune", "--tenant", "x"]], ids=str
)
def test_a_store_that_is_not_there_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert status(*command, "--store", f"sqlite:{tmp_path / 'none'}") == 2
    assert "there is no store at" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("these are notes, and no store of anything at all\n" * 100)
    assert status("verify", "--store", f"sqlite:{tmp_path / 'notes.txt'}") == 2
    assert "name another path" in capsys.readouterr().err
    assert status("verify", "--store", "mysql://127.0.0.1") == 2
    assert "sqlite:PATH, redis://HOST:PORT/DB" in capsys.readouterr().err


def test_it_is_a_command_of_the_router_and_quiet_without_a_terminal(tmp_path: Path, world: World) -> None:
    command = [sys.executable, "-m", "router", "store", "verify", "--store", sqlite(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10 records checked, nothing is wrong\n", "")


@pytest.mark.parametrize("command", ["stats", "verify", "export --out -"])
def test_a_closed_output_is_said(tmp_path: Path, world: World, command: str) -> None:
    line = f"{sys.executable} -m router store {command} --store {sqlite(tmp_path)} >&-"
    done = subprocess.run(line, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("error: standard output is closed\n")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_and_nowhere_else(tmp_path: Path, world: World) -> None:
    """A terminal as standard error sees bars; what is printed stays clean."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "router", "store", "stats", "--tokens", "--json", "--store", sqlite(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=follower, env={**os.environ, "TERM": "xterm"}, timeout=60
    )
    os.close(follower)
    shown = os.read(leader, 1 << 16)
    os.close(leader)
    assert b"reading" in shown
    assert json.loads(done.stdout)["turns"] == 5


def test_a_bar_is_never_full_while_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if there is more to do than was said: a router goes on to append."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with bar("half", 10) as advance:
        advance(5)
    assert "50%" in terminal.getvalue()
    with bar("whole", 10) as advance:
        advance(10)
        advance(1)
    assert "whole" in terminal.getvalue()
    assert "100%" not in terminal.getvalue()


@pytest.mark.slow
def test_commands_run_beside_a_writer(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A router goes on to append; nothing that it appended is called damage, and nothing of it is forgotten."""
    store = sqlite(tmp_path)
    command = [sys.executable, "-m", "tests.middleware_hub.store.appender", store, "busy", "100000"]
    with (tmp_path / "acknowledged").open("w") as log:
        appender = subprocess.Popen(command, cwd=ROOT, stdout=log)
    try:
        while (tmp_path / "acknowledged").read_text().count("\n") < 20:
            time.sleep(0.01)  # a poll of another process: there is nothing to wait on
        for _ in range(4):
            assert status("verify", "--store", store) == 0, capsys.readouterr().out
            assert status("prune", "--store", store, "--tenant", "team") == 0
            assert status("export", "--store", store, "--out", str(tmp_path / "rows.parquet")) == 0
    finally:
        appender.kill()
        appender.wait()
    told = [line.split()[0] for line in (tmp_path / "acknowledged").read_text().splitlines()[1:-1]]

    async def missing(store: Store) -> set[str]:
        return set(told) - {record.id.hex() async for record in store.scan()}

    assert with_store(store, missing, None) == set()
    assert texts(tmp_path) >= ALL - {"untouched"}
