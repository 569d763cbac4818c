"""The run report of a tenant's memory, computed in the background, a branch at a time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from middleware_hub.inspector.conversations.conversation import Branch, Conversation
from middleware_hub.inspector.reports.drifts import Drifts
from middleware_hub.inspector.reports.tally import Tally
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.errors import NotFoundError, RouterError
from router.http.offload import offload

FRESH = 30.0
"""Seconds for which a report is answered again although something was recorded since."""
TELL = 0.5
"""Seconds between two looks at a report that is being computed."""
MOST_REPORTS = 16
"""Tenants whose reports are kept."""
HEAVY = 2_000


class _Running:
    """One report, finished or being computed."""

    def __init__(self, tally: Tally, change: int) -> None:
        self.tally = tally
        self.change = change
        self.began = time.monotonic()
        self.partial = tally.report(progress=0.0)
        self.report: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None


class RunReports:
    """See the top of this file."""

    def __init__(self, vocabulary: Vocabulary, drifts: Drifts, behind: Callable[[str], int]) -> None:
        self._vocabulary = vocabulary
        self._drifts = drifts
        self._behind = behind
        self._of: OrderedDict[str, _Running] = OrderedDict()

    async def report(
        self, tenant: str, change: int, conversations: Callable[[], tuple[int, Iterable[Conversation]]]
    ) -> dict[str, Any]:
        """Return the report so far. Begin a new one if something was recorded since the last.

        `conversations` returns their number, and all of them.
        """
        running = self._of.pop(tenant, None)
        if running is not None and running.report is not None and running.change != change:
            running = None if time.monotonic() - running.began > FRESH else running
        if running is None:
            running = _Running(Tally(self._vocabulary, self._behind), change)
            running.task = asyncio.create_task(self._compute(running, *conversations()))
        self._of[tenant] = running
        if len(self._of) > MOST_REPORTS:
            _, oldest = self._of.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()
        assert running.task is not None
        await asyncio.wait([running.task], timeout=0.05)
        if running.task.done() and running.report is None:
            self._of.pop(tenant, None)  # it failed: the next look begins a new one
            running.task.result()
        return running.report or running.partial

    async def _compute(self, running: _Running, total: int, conversations: Iterable[Conversation]) -> None:
        tally, told = running.tally, time.monotonic()
        for done, conversation in enumerate(conversations):
            for branch in conversation.branches():
                try:
                    chain = branch.chain()
                except NotFoundError:
                    break  # it was deleted meanwhile
                try:
                    drift = await self._drifts.of(chain)
                except RouterError:
                    drift = None  # a text that is too long to be encoded
                await offload(
                    len(chain) > HEAVY,
                    tally.add,
                    conversation.id,
                    chain,
                    drift,
                    branch.reasons(chain),
                    key=_itself,
                    moment=_moments(conversation, branch),
                )
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # it may have no branch
            if time.monotonic() - told > TELL:
                running.partial = await offload(True, tally.report, progress=min(0.999, done / max(1, total)))
                told = time.monotonic()
        running.report = await offload(tally.sampled > HEAVY, tally.report, progress=1.0)


def _itself(span: TokenSpan) -> Hashable:
    return span


def _moments(conversation: Conversation, branch: Branch) -> Callable[[TokenSpan], float]:
    """Return the time at which a reply of a branch was recorded; if that is unknown, the end of the branch."""
    return lambda span: conversation.moment(span) or branch.time
