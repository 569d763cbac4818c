"""Snapshots of a policy that remembers prompts: read at the start, written while the router runs and at the end."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from router.policies.cache_aware import CacheAware, PolicyCopy
from router.prefix_tree.snapshot import SnapshotError
from router.workers.policy import Policy

logger = logging.getLogger(__name__)

_UNITS_PER_STEP = 1 << 14
"""Units that one step forgets. With short prompts, this blocks the event loop for three milliseconds."""

_NODES_PER_STEP = 500
"""Nodes that one step copies: about a millisecond."""


class PolicySnapshots:
    """A context for the lifetime of an application: trims the prompts of a policy, and keeps its snapshot up to date.

    It does nothing for a policy other than `cache_aware`.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy if isinstance(policy, CacheAware) else None
        self._tasks: list[asyncio.Task[None]] = []
        self._writing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> PolicySnapshots:
        if self._policy is not None:
            self._tasks.append(asyncio.create_task(self._trim(self._policy)))
            if (path := self._policy.parameters.snapshot) is not None:
                read_snapshot(self._policy, path)
                self._tasks.append(asyncio.create_task(self._save(self._policy, path)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        if self._policy is not None and (path := self._policy.parameters.snapshot) is not None:
            copy = self._policy.copy()
            while copy.step(_NODES_PER_STEP):
                pass
            write_snapshot(copy, path)

    async def _trim(self, policy: CacheAware) -> None:
        while True:
            await asyncio.sleep(policy.parameters.eviction_interval)
            while policy.trim(_UNITS_PER_STEP):  # noqa: ASYNC110 - requests get their turn between the steps
                await asyncio.sleep(0)

    async def _save(self, policy: CacheAware, path: Path) -> None:
        """Write a snapshot at every interval in which something changed, so that a killed router loses no more than that."""
        saved, loop = -1, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(policy.parameters.snapshot_interval)
            ticks = policy.ticks
            if ticks == saved:
                continue
            copy = policy.copy()
            while copy.step(_NODES_PER_STEP):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            self._writing = loop.run_in_executor(None, write_snapshot, copy, path)
            await asyncio.shield(self._writing)  # two writes must not overlap, so `__aexit__` waits for this one
            saved = ticks


def read_snapshot(policy: CacheAware, path: Path) -> None:
    """Load a snapshot into a policy. A missing or unreadable file is logged, and the policy starts empty."""
    try:
        policy.load(path.read_bytes())
    except FileNotFoundError:
        logger.info("%s does not exist yet: the router writes it while it runs", path)
    except (OSError, SnapshotError) as error:
        logger.warning("%s is not used, and the policy starts empty: %s", path, error)
    else:
        logger.info("%s: %d characters and %d ids of prompts are remembered", path, policy.texts.size, policy.ids.size)


def write_snapshot(copy: PolicyCopy, path: Path) -> None:
    """Replace the file atomically. On an error, log it and keep the old file."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(copy.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        logger.warning("%s is not written, and its new prompts will be lost: %s", path, error)
