"""What is done for a policy that remembers prompts: loaded at the start, cut back and saved while it runs, saved at the end."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from router.config import CacheAwareConfig
from router.policies.base import Policy
from router.policies.cache_aware import CacheAware, PolicyCopy
from router.prefix_tree.snapshot import SnapshotError

logger = logging.getLogger(__name__)

_AT_ONCE = 1 << 14
"""Units that are forgotten without letting anybody else have a turn: of short prompts three milliseconds."""

_COPIED_AT_ONCE = 500
"""Nodes that are copied without letting anybody else have a turn: about a millisecond."""


class PolicyUpkeep:
    """From the start of an application to its end, as a context. Nothing for a policy that remembers nothing."""

    def __init__(self, policy: Policy, config: CacheAwareConfig) -> None:
        self._policy = policy if isinstance(policy, CacheAware) else None
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._writing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> PolicyUpkeep:
        if self._policy is not None:
            self._tasks.append(asyncio.create_task(self._trim(self._policy)))
            if self._config.snapshot is not None:
                read_snapshot(self._policy, self._config.snapshot)
                self._tasks.append(asyncio.create_task(self._save(self._policy, self._config.snapshot)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        if self._policy is not None and self._config.snapshot is not None:
            copy = self._policy.copy()
            while copy.step(_COPIED_AT_ONCE):
                pass
            write_snapshot(copy, self._config.snapshot)

    async def _trim(self, policy: CacheAware) -> None:
        while True:
            await asyncio.sleep(self._config.eviction_interval)
            while policy.trim(_AT_ONCE):  # noqa: ASYNC110 - others get their turn in between
                await asyncio.sleep(0)

    async def _save(self, policy: CacheAware, path: Path) -> None:
        """Again and again, where there is anything new: a router that is killed has not forgotten more than that."""
        saved, loop = -1, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._config.snapshot_interval)
            ticks = policy.ticks
            if ticks == saved:
                continue
            copy = policy.copy()
            while copy.step(_COPIED_AT_ONCE):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            self._writing = loop.run_in_executor(None, write_snapshot, copy, path)
            await asyncio.shield(self._writing)  # two must not write at once, so the end has to wait for it
            saved = ticks


def read_snapshot(policy: CacheAware, path: Path) -> None:
    """Remember what a file says. One that is not there or cannot be read is no reason to fail: begin with nothing."""
    try:
        policy.load(path.read_bytes())
    except FileNotFoundError:
        logger.info("%s is not there yet: it is written while the router runs", path)
    except (OSError, SnapshotError) as error:
        logger.warning("%s is not used, and nothing is remembered of prompts: %s", path, error)
    else:
        logger.info("%s: %d characters and %d ids of prompts are remembered", path, policy.texts.size, policy.ids.size)


def write_snapshot(copy: PolicyCopy, path: Path) -> None:
    """Replace the file, or leave it as it is: there is never half of one."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(copy.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        logger.warning("%s is not written, and what is new in it will be forgotten: %s", path, error)
