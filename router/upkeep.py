"""What is done for a policy that remembers prompts: loaded at the start, cut back while it runs, saved at the end."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from router.config import CacheAwareConfig
from router.policies.base import Policy
from router.policies.cache_aware import CacheAware
from router.policies.prefix_snapshot import SnapshotError

logger = logging.getLogger(__name__)

_AT_ONCE = 1 << 14
"""Units that are forgotten without letting anybody else have a turn: of short prompts three milliseconds."""


class PolicyUpkeep:
    """From the start of an application to its end, as a context. Nothing for a policy that remembers nothing."""

    def __init__(self, policy: Policy, config: CacheAwareConfig) -> None:
        self._policy = policy if isinstance(policy, CacheAware) else None
        self._config = config
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PolicyUpkeep:
        if self._policy is not None:
            if self._config.snapshot is not None:
                read_snapshot(self._policy, self._config.snapshot)
            self._task = asyncio.create_task(self._trim(self._policy))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._policy is not None and self._config.snapshot is not None:
            write_snapshot(self._policy, self._config.snapshot)

    async def _trim(self, policy: CacheAware) -> None:
        while True:
            await asyncio.sleep(self._config.eviction_interval)
            while policy.trim(_AT_ONCE):  # noqa: ASYNC110 - others get their turn in between
                await asyncio.sleep(0)


def read_snapshot(policy: CacheAware, path: Path) -> None:
    """Remember what a file says. One that is not there or cannot be read is no reason to fail: begin with nothing."""
    try:
        policy.load(path.read_bytes())
    except FileNotFoundError:
        logger.info("%s is not there yet: it is written at the end", path)
    except (OSError, SnapshotError) as error:
        logger.warning("%s is not used, and nothing is remembered of prompts: %s", path, error)
    else:
        logger.info("%s: %d characters and %d ids of prompts are remembered", path, policy.texts.size, policy.ids.size)


def write_snapshot(policy: CacheAware, path: Path) -> None:
    """Replace the file, or leave it as it is: there is never half of one."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(policy.dump())
        os.replace(partial, path)
    except OSError as error:
        logger.warning("%s is not written, and prompts are forgotten: %s", path, error)
