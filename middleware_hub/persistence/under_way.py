"""Batches on their way to the store, and their callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from middleware_hub.store.protocol import Batch, Mend, Over


class Append:
    """A batch on its way.

    Attributes:
        mend, over, apart, parts: see `Saving.append`.
        raises: whether the caller gets errors; else the answer is False.
        replies: how many are in the batch.
        answered: whether the batch was acknowledged in time.
        task: appends it, and may go on after the answer.
    """

    __slots__ = ("answered", "apart", "batch", "begun", "mend", "over", "parts", "raises", "replies", "task")

    def __init__(
        self,
        batch: Batch,
        mend: Mend | None,
        over: Over | None,
        apart: Callable[[], None] | None = None,
        parts: Sequence[Batch] = (),
        *,
        raises: bool,
    ) -> None:
        self.batch = batch
        self.mend = mend
        self.over = over
        self.apart = apart
        self.parts = parts or (batch,)
        self.raises = raises
        self.replies = replies_in(batch)
        self.begun = time.monotonic()
        self.answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    def answer(self, saved: bool, error: Exception | None = None) -> None:
        if self.answered.done():
            return
        if error is not None and self.raises:
            self.answered.set_exception(error)
            self.answered.exception()  # the caller may be gone
        else:
            self.answered.set_result(saved)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


def replies_in(batch: Batch) -> int:
    return len([1 for record in batch.records if record.versions is not None])


def after_all(count: int, over: Over | None) -> Over | None:
    """Return a function to be called at the end of each of `count` parts; it calls `over` at the end of the last one."""
    if over is None or count == 1:
        return over
    ends: list[bool] = []

    def each(saved: bool) -> None:
        ends.append(saved)
        if len(ends) == count:
            over(all(ends))

    return each


class UnderWay:
    """Batches that are not answered yet, or were answered before they ended.

    Args:
        late: called with a batch that has taken `answer` seconds. It goes on; after `give_up` seconds it is stuck, and
            cancelled.
        look: seconds between two checks of the time.
    """

    def __init__(self, late: Callable[[Append], None], answer: float, give_up: float, look: float) -> None:
        self._late = late
        self._answer = answer
        self._give_up = give_up
        self._look_every = look
        self._looking: asyncio.TimerHandle | None = None
        self.waited_for: dict[Append, None] = {}
        self.stuck: set[Append] = set()

    def add(self, one: Append) -> None:
        self.waited_for[one] = None
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(self._look_every, self._look)

    def over(self, one: Append) -> None:
        self.waited_for.pop(one, None)
        self.stuck.discard(one)

    async def answered(self) -> None:
        """Wait until every caller has been answered."""
        while self.waited_for:
            await asyncio.wait([one.answered for one in self.waited_for])
            await asyncio.sleep(0)

    def _look(self) -> None:
        now = time.monotonic()
        for one in list(self.waited_for):
            if now - one.begun < self._answer:
                break
            del self.waited_for[one]
            self.stuck.add(one)
            self._late(one)
        for one in self.stuck:
            if now - one.begun > self._give_up:
                one.cancel()
        again = self.waited_for or self.stuck
        self._looking = asyncio.get_running_loop().call_later(self._look_every, self._look) if again else None
