"""The snapshots and the trimming of a policy during the lifetime of an application."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from router.policies import snapshots
from router.policies.cache_aware import CacheAware, CacheAwareParameters, PolicyCopy
from router.policies.least_inflight import LeastInflight
from router.policies.snapshots import PolicySnapshots, read_snapshot, write_snapshot
from router.workers.policy import RouteQuery
from router.workers.worker import Target, Worker

WORKERS = (Target(Worker("http://a:1")), Target(Worker("http://b:1")))


def filled(config: CacheAwareParameters | None = None) -> CacheAware:
    policy = CacheAware(config)
    for number in range(50):
        policy.select(WORKERS, RouteQuery(text=f"{number} " * 50))
    return policy


def copied(policy: CacheAware) -> PolicyCopy:
    copy = policy.copy()
    while copy.step(7):
        pass
    return copy


def test_a_policy_is_trimmed_while_it_runs_and_saved_at_the_end(tmp_path: Path) -> None:
    config = CacheAwareParameters(eviction_interval=0.001, max_tree_size=500, snapshot=tmp_path / "policy")

    async def main() -> None:
        policy = filled(config)
        async with asyncio.timeout(30), PolicySnapshots(policy):
            while policy.texts.size > 500:  # noqa: ASYNC110 - a tree has no notification of changes
                await asyncio.sleep(0.001)
        again = CacheAware(config)
        async with PolicySnapshots(again):
            assert again.dump() == policy.dump()

    asyncio.run(main())


def test_other_policies_get_no_snapshot(tmp_path: Path) -> None:
    async def main() -> None:
        async with PolicySnapshots(LeastInflight()):
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_atomically(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "policy"
    write_snapshot(copied(filled()), path)
    before = path.read_bytes()
    (tmp_path / "policy.partial").mkdir()  # makes writing fail
    write_snapshot(copied(CacheAware()), path)
    assert path.read_bytes() == before
    assert str(path) in caplog.text


def test_an_unreadable_or_missing_file_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, policy = tmp_path / "policy", CacheAware()
    with caplog.at_level(logging.WARNING):
        read_snapshot(policy, path)
        assert not caplog.records
        write_snapshot(copied(filled()), path)
        data = path.read_bytes()
        at = data.index(b"PFXT")
        path.write_bytes(data[: at + 4] + b"\xff\x00" + data[at + 6 :])
        read_snapshot(policy, path)
    assert "version 255" in caplog.text
    assert policy.dump() == CacheAware().dump()


def test_a_policy_is_saved_while_it_runs_if_something_is_new(tmp_path: Path) -> None:
    """So a killed router does not lose everything."""
    path = tmp_path / "policy"
    config = CacheAwareParameters(snapshot=path, snapshot_interval=0.001)

    async def main() -> None:
        policy = filled(config)
        async with asyncio.timeout(30), PolicySnapshots(policy):
            policy.select(WORKERS, RouteQuery(text="a new one " * 50))
            expected = policy.dump()
            while not path.exists():  # noqa: ASYNC110 - a file has no notification
                await asyncio.sleep(0.001)
            assert path.read_bytes() == expected
            path.unlink()
            await asyncio.sleep(0.05)
            assert not path.exists()
            policy.select(WORKERS, RouteQuery(text="another one " * 50))
            while not path.exists():  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_two_writes_never_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CacheAwareParameters(snapshot=tmp_path / "policy", snapshot_interval=0.001)
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def slowly(copy: PolicyCopy, path: Path) -> None:
        order.append("begun")
        if not begun.is_set():
            begun.set()
            go_on.wait(30)
        write_snapshot(copy, path)
        order.append("done")

    monkeypatch.setattr(snapshots, "write_snapshot", slowly)

    async def main() -> None:
        policy = filled(config)
        async with PolicySnapshots(policy):
            await asyncio.to_thread(begun.wait, 30)
            threading.Timer(0.05, go_on.set).start()

    asyncio.run(main())
    assert order == ["begun", "done"] * 2


def test_the_end_waits_for_a_write_in_progress(tmp_path: Path) -> None:
    """Then it writes what is new: never two writes at once, and never the older one last."""
    path = tmp_path / "policy"
    config = CacheAwareParameters(snapshot=path, snapshot_interval=0.0001)

    async def main() -> None:
        for number in range(20):
            policy = filled(config)
            async with PolicySnapshots(policy):
                for step in range(number):
                    policy.select(WORKERS, RouteQuery(text=f"{number} {step} " * 50))
                    await asyncio.sleep(0)
            again = CacheAware(config)
            read_snapshot(again, path)
            assert again.dump() == policy.dump()
            assert not path.with_name("policy.partial").exists()
            path.unlink()

    asyncio.run(main())
