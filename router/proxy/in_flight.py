"""The generations in flight: which worker has each, under which ids, and which of them a client has asked to end.

A client may give a generation an id, or read the id that a stream shows. A second attempt needs another id at the worker,
because a worker refuses an id that it has seen. Both ids are kept here.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from router.engines.form.worker_request import WorkerRequest
from router.errors import EndedInQueueError
from router.proxy.generate_call import GenerateCall
from router.workers.worker import Worker

RID_LENGTH = 32
"""Characters of an id that a worker makes up: a UUID in hexadecimal."""


_MANY_LENGTHS = 24
"""Of names, each of which is a look-up for each name of a request: a batch has thousands."""

_FEW = 4
"""Short ids of a request that are compared one after the other with all that is in flight. More are compared in order."""


class InFlight:
    """One request to `/generate`, from its first attempt to its last.

    Attributes:
        names: what the client calls each generation; empty where it cannot name them (`n > 1`).
        rids: what the worker calls them in the present attempt, by position in `names`, without those not sent again.
        renamed: whether a worker may have one of them under another id than its name.
        call: what is sent, in its first attempt; None where it does not matter.
        tenant: the owner.
        worker: the worker that has it, or had it last.
        prefill: the worker that prefills its prompt, while `worker` waits for that; None where one worker does both.
        replies: how many replies it asks for.
        whole: whether the client waits for a reply in one piece.
        body: the body of the present attempt.
        request: the same body as the router understands it; None if only a worker can decide what it means.
        positions: of an attempt that is not the first one, the generations that it asks for; None for all.
        some_to_end: positions of generations that are to end, if not all of them are.
        line: gets its lease, since it first waited for a worker with room.
    """

    def __init__(
        self,
        names: Sequence[str],
        rids: Sequence[str] | None = None,
        *,
        tenant: str = "",
        call: GenerateCall | None = None,
    ) -> None:
        """`rids`: the worker's ids, if they are not `names`."""
        self.names = tuple(names)
        given = self.names if rids is None else tuple(rids)
        self.rids = dict(enumerate(given))
        self.renamed = not self.names or given != self.names
        self.tenant = tenant
        self.worker: Worker | None = None
        self.prefill: Worker | None = None
        self.call = call
        self.body = b"" if call is None else call.body
        self.request = request = None if call is None else call.request
        self.replies = len(self.names) or (1 if request is None else request.replies)
        self.whole = request is not None and not request.stream
        self.positions: Sequence[int] | None = None
        self.line: asyncio.Future[Any] | None = None
        self.some_to_end: set[int] = set()
        self._all_to_end = False
        self._changed: asyncio.Event | None = None  # made when something waits for it

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that have it now."""
        return tuple(worker for worker in (self.prefill, self.worker) if worker is not None)

    def send_next(self, request: WorkerRequest, positions: Sequence[int]) -> None:
        """Make this the request of the next attempt. `positions`: its generations, in its order."""
        self.request, self.body, self.positions = request, request.body, positions
        self.rename(dict(zip(positions, request.rids, strict=True)))

    def rename(self, rids: dict[int, str]) -> None:
        """Note what the worker calls them from now on."""
        self.rids, self.renamed = rids, True

    def end(self, positions: Iterable[int] | None = None) -> None:
        """Stop sending these generations (None: all): a client or a call to all workers ended them."""
        if positions is None:
            self._all_to_end = True
        else:
            self.some_to_end.update(positions)
        if self._changed is not None:
            self._changed.set()
        if self.line is not None and self.unwanted and not self.line.done():
            self.line.set_exception(EndedInQueueError("the generation was aborted before a worker had room for it"))

    def to_end(self, position: int) -> bool:
        """Return whether a generation is to end."""
        return self._all_to_end or position in self.some_to_end

    @property
    def unwanted(self) -> bool:
        """Whether all generations of the request are to end."""
        return self._all_to_end or (bool(self.names) and len(self.some_to_end) == len(self.names))

    async def until_to_end(self, positions: Sequence[int]) -> None:
        """Wait until each of these generations is to end."""
        changed = self._changed = self._changed or asyncio.Event()
        while not all(self.to_end(position) for position in positions):
            changed.clear()
            await changed.wait()


class GenerationsInFlight:
    """All requests to `/generate` in flight, found by a whole name or by its beginning."""

    def __init__(self) -> None:
        self._all: set[InFlight] = set()
        self._by_name: dict[str, list[tuple[InFlight, int]]] = {}
        self._names: list[str] = []  # sorted
        self._lengths: Counter[int] = Counter()  # of them
        self._ending = 0

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, one: InFlight) -> None:
        """Add a request that was let in."""
        self._all.add(one)
        for position, name in enumerate(one.names):
            if name not in self._by_name:
                insort(self._names, name)
                self._lengths[len(name)] += 1
            self._by_name.setdefault(name, []).append((one, position))
        if self._ending:
            one.end()

    def over(self, one: InFlight) -> None:
        """Remove a request that has its reply, or whose client left."""
        self._all.discard(one)
        for position, name in enumerate(one.names):
            self._by_name[name].remove((one, position))
            if not self._by_name[name]:
                del self._by_name[name]
                del self._names[bisect_left(self._names, name)]
                self._lengths[len(name)] -= 1
                if not self._lengths[len(name)]:
                    del self._lengths[len(name)]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End what is in flight, and what begins in this block: workers are about to abort all that they have."""
        for one in self._all:
            one.end()
        self._ending += 1
        try:
            yield
        finally:
            self._ending -= 1

    def named(self, rid: str, tenant: str | None = None) -> list[tuple[InFlight, int]]:
        """Return the generations that an abort of this id means: the one of that name, or else all whose names begin with it.

        SGLang does the same. `tenant`: the owner of the generations; None for those of all tenants.
        """
        exact = self._of(tenant, self._by_name.get(rid, ()))
        return exact or [one for name in self._beginning(rid) for one in self._of(tenant, self._by_name[name])]

    def overlap(self, names: Iterable[str]) -> bool:
        """Return whether one of these names begins another one of them, or one in flight, or is begun by one.

        A worker aborts all generations whose ids begin with the id of the one that is to end. True also where it would take
        long to tell, because the names in flight have very many lengths.
        """
        mine = sorted(set(names))
        if any(after.startswith(name) for name, after in pairwise(mine)):
            return True
        return any(self._begins_or_is_begun(name) for name in mine)

    def _begins_or_is_begun(self, name: str) -> bool:
        names = self._names  # sorted: what begins with a name comes directly after it
        after = bisect_right(names, name)
        if after < len(names) and names[after].startswith(name):
            return True
        size, lengths = len(name), self._lengths
        return len(lengths) > _MANY_LENGTHS or any(name[:n] in self._by_name for n in lengths if n < size)

    def alone(self, rids: Iterable[str], worker: Worker) -> list[str]:
        """Return those of a request's ids whose abort ends no other generation of the same worker."""
        short: list[str] = []
        long: list[str] = []
        for rid in rids:
            (long if len(rid) >= RID_LENGTH else short).append(rid)
        found = [rid for rid in long if not self.shares_prefix(rid, worker)]
        if len(short) <= _FEW:
            return [*found, *(rid for rid in short if not self.shares_prefix(rid, worker))]
        # The rule of `shares_prefix`, for thousands of ids at once.
        there = [one for one in self._all if worker in (one.worker, one.prefill)]
        if all(one.names for one in there):
            others = sorted({other for one in there for other in one.rids.values()})
            for rid in short:
                after = bisect_right(others, rid)
                if after == len(others) or not others[after].startswith(rid):
                    found.append(rid)
        return found

    def shares_prefix(self, rid: str, worker: Worker) -> bool:
        """Return whether an abort of this id would (or might) end another generation of the same worker, too."""
        found = (entry for name in self._beginning(rid) for entry in self._by_name[name])
        if len(rid) >= RID_LENGTH:
            # Under the same name there may be a generation whose later attempt has a longer id.
            return any(worker in (one.worker, one.prefill) and one.rids.get(at) not in (None, rid) for one, at in found)
        for one, at in found:
            other = one.rids.get(at, rid)
            if other != rid and other.startswith(rid) and worker in (one.worker, one.prefill):
                return True
        # A short id may also begin an id that was made up, here for a later attempt or by the worker (`n > 1`).
        renamed = (one for one in self._all if one.renamed and worker in (one.worker, one.prefill))
        return any(
            not one.names or any(other != rid and other.startswith(rid) for other in one.rids.values())
            for one in renamed
        )

    @staticmethod
    def _of(tenant: str | None, found: Sequence[tuple[InFlight, int]]) -> list[tuple[InFlight, int]]:
        return [(one, position) for one, position in found if tenant is None or one.tenant == tenant]

    def _beginning(self, rid: str) -> list[str]:
        begin = end = bisect_left(self._names, rid)
        while end < len(self._names) and self._names[end].startswith(rid):
            end += 1
        return self._names[begin:end]
