"""Appends to the store, for which replies wait. What the store does not take waits in a file and is handed over later.

    append --- acknowledged in time ---> saved
       |                                                          a second later, or with the next append
       +------ not ----> kept, in the spool (`store.spool`) -------------> handed over, in order ---> the spool is empty
       |                    while the spool has a batch, later ones go there too: they may build on it
       |                    no room there, either: in memory only, and nothing new is begun until there is
       +------ the store refuses it ---> refused: logged, counted as lost

An append ends in one of these three states (`AppendState`), and its caller is answered once. One that is not answered in time
is kept, and its task goes on in the background: it is *stuck*, and the hand-over finds what it did (`store.spool.handover`).
What is in the file is also in the memory of the process that recorded it, until it is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec.structs import replace

from middleware_hub.store.errors import MissingRecordError, StoreError, StoreUnreachableError
from middleware_hub.store.guarded import ANSWER_SECONDS, GuardedStore
from middleware_hub.store.media import MediaFile
from middleware_hub.store.protocol import Batch, OnDone, OnMissing, Store
from middleware_hub.store.spool.file import SpoolFile
from middleware_hub.store.spool.folder import SpoolFolder
from middleware_hub.store.spool.handover import GIVE_UP_SECONDS, Adoption, Another, Drain
from middleware_hub.store.spool.packing import pack
from router.http.time_limits import patience

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0
ADOPT_SECONDS: Final = 5.0
"""How often a router looks for spool files of dead routers."""
CLOSE_SECONDS: Final = 5.0
"""How long the shutdown waits for the hand-over."""
_LOOK_SECONDS: Final = 0.25
_FEW: Final = 16
"""Batches that an append hands over before its own instead of waiting for the next attempt."""
_LOG_EVERY: Final = 60.0
_MENDS: Final = 100


class Saving:
    """Appends batches in the background.

    Args:
        refuse: set by `--store-failure`: nothing new is recorded while the store does not answer.

    Attributes:
        saved, unsaved: replies that the store had acknowledged when they were sent, and the others.
        seconds: from a batch's recording to its acknowledgement, summed.
        beside: adds to a batch the files of pictures that its records name; None if the model reads no pictures.
    """

    def __init__(self, store: Store, *, refuse: bool = False) -> None:
        self._guarded = store if isinstance(store, GuardedStore) else GuardedStore(store)
        self._refuse = refuse
        self.beside: Callable[[Batch], Batch] | None = None
        self._folder: SpoolFolder | None = None
        self._spool = SpoolFile.anonymous()
        self._closed = False
        self._adoption: Adoption | None = None
        self._waited_for: dict[Append, None] = {}
        self._stuck: set[Append] = set()
        self._watching: asyncio.TimerHandle | None = None
        self._drain = Drain(self.store)
        self._handing = asyncio.Lock()
        self._trying: asyncio.Task[None] | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._since: float | None = None
        self._why = ""
        self._logged: dict[str, float] = {}
        self.saved = self.unsaved = self._lost = 0
        self.seconds = self._away_seconds = 0.0

    # Figures -----------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> GuardedStore:
        return self._guarded

    @property
    def waiting(self) -> int:
        """Return how many replies wait for the store, in files of this router."""
        return sum(waiting.replies for spool in self._spools for waiting in spool.waiting)

    @property
    def waiting_bytes(self) -> int:
        return sum(spool.waiting_bytes for spool in self._spools)

    @property
    def held_bytes(self) -> int:
        """Return how many bytes are in memory only, because the file has no room for them."""
        return self._spool.held_bytes

    @property
    def _spools(self) -> list[SpoolFile]:
        return [self._spool, *(() if self._adoption is None else self._adoption.left)]

    @property
    def handed_over(self) -> int:
        """Return how many replies were handed over later, also from files of dead routers."""
        return sum(one.handed_over for one in (self._drain, self._adoption) if one is not None)

    @property
    def lost(self) -> int:
        """Return how many replies were given up, because the store refused them."""
        return self._lost + sum(one.lost for one in (self._drain, self._adoption) if one is not None)

    @property
    def incomplete(self) -> bool:
        """Return whether the store is known to lack replies of a dead router: they may belong to any text."""
        return self._adoption is not None and bool(self._adoption.left)

    @property
    def away_seconds(self) -> float:
        """Return for how many seconds, summed, the store took no writes."""
        return self._away_seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    @property
    def away(self) -> bool:
        """Return whether the store is known not to answer."""
        return bool(self._spool.waiting) or self.store.away

    def admit(self) -> None:
        """Raise StoreUnreachableError if nothing new shall be recorded now. Call this before a worker is asked."""
        if self._spool.full:
            held = f"; {self.held_bytes} of them are in memory only: {self._spool.fault}" if self.held_bytes else ""
            raise StoreUnreachableError(
                "the store takes no writes, and there is no more room for what waits for it "
                f"({self._spool.waiting_bytes} bytes, --store-spool-max-bytes or the disk{held}): {self._why}"
            )
        if self._refuse and self.away:
            raise StoreUnreachableError(
                "the store does not answer, and this router does not go on without it (--store-failure refuse)"
                + (f": {self._why}" if self._why else "")
            )

    def complain(self, message: str, error: BaseException) -> None:
        """Log that something is wrong with the store, each message once a minute."""
        now = time.monotonic()
        if now - self._logged.get(message, -_LOG_EVERY) >= _LOG_EVERY:
            self._logged[message] = now
            logger.error(message, error)

    # The beginning and the end -----------------------------------------------------------------------------------------

    async def open(self, folder: SpoolFolder, another: Another) -> None:
        """Take a file in this folder, and hand over the files of dead routers, as far as the store takes them.

        This comes before the first request: an answer would lack the replies that wait there, without any sign of it.
        `another` makes a second object for the same store: what is appended there counts as written by others, so it is
        looked up. Raises BadRequestError if there can be no file.
        """
        empty, self._folder, self._spool = self._spool, folder, folder.make()
        empty.close()
        self._adoption = adoption = Adoption(folder.left_behind, another)
        try:
            await adoption.run()
        except StoreError as error:
            self.complain("what a dead router left has to wait: %s", error)
        self._adopting = asyncio.create_task(self._keep_adopting(adoption))

    async def close(self) -> None:
        """Wait until everything is appended. What the store still does not take waits in the file for the next router.

        A second call has no effect.
        """
        if self._closed:
            return
        self._closed = True
        while self._waited_for:
            await asyncio.wait([append.answered for append in self._waited_for])
            await asyncio.sleep(0)
        for task in (self._adopting, self._trying):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._adopting = self._trying = None
        done = not self._spool.waiting
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                done = await self.hand_over()
        if not done:
            count, path = self.waiting, self._spool.path
            where = (
                "are lost" if path is None else f"wait in {path} for the next router or `tito-router store handover`"
            )
            text = "%d replies could not be written to the store before the end, and %s (%s)"
            logger.error(text, count, where, self._why)
            if path is not None and not self._spool.settle():
                logger.error(
                    "%d bytes of them were in memory only, and are lost: %s", self.held_bytes, self._spool.fault
                )
        for stuck in self._stuck:
            stuck.cancel()
        for spool in self._spools:
            spool.close()
        if self._folder is not None:
            self._folder.leave()

    # Appending ---------------------------------------------------------------------------------------------------------

    def append(
        self,
        batch: Batch,
        *,
        on_missing: OnMissing | None = None,
        on_done: OnDone | None = None,
        on_refused: Callable[[], None] | None = None,
        parts: Sequence[Batch] = (),
    ) -> asyncio.Future[bool]:
        """Append a batch, or keep it in the spool; the future tells whether it was acknowledged in time, and never fails.

        Args:
            on_missing: for a batch whose conversation the store has forgotten.
            on_done: called when the batch is in the store, or given up.
            on_refused: called instead of giving up a batch that the store refuses, if its parts may still be appended.
            parts: the parts in which it waits in the spool, so that no part is refused later because of another part.
        """
        return self._begin(Append(batch, on_missing, on_done, on_refused, parts))

    async def save(self, batch: Batch, *, on_missing: OnMissing | None = None, on_done: OnDone | None = None) -> bool:
        """Append a batch, or keep it in the spool; return whether it was acknowledged in time.

        Raises what `Store.append` raises, except StoreUnreachableError.
        """
        return await self._begin(Append(batch, on_missing, on_done, raises=True))

    async def write(self, batch: Batch) -> None:
        """Append a batch. Raises what `Store.append` raises; a batch that is late may still get there."""
        if self._spool.waiting:
            await self._empty()
        try:
            async with patience(ANSWER_SECONDS):
                await self.store.append(batch)
        except TimeoutError:
            raise StoreUnreachableError(f"the store has not answered for {ANSWER_SECONDS:.0f} s") from None

    def with_media(self, batch: Batch) -> Batch:
        """Return a batch with the files of pictures that its records name, as far as they are here."""
        return batch if self.beside is None else self.beside(batch)

    def _mended(self, on_missing: OnMissing, batch: Batch, error: MissingRecordError) -> Batch | None:
        """Return what `on_missing` makes of a batch, with the files of both."""
        mended = on_missing(batch, error)
        return None if mended is None else self.with_media(replace(mended, media=batch.media))

    def _begin(self, one: Append) -> asyncio.Future[bool]:
        if self.beside is not None:
            one.batch = self.beside(one.batch)
            one.parts = [with_files(part, one.batch.media) for part in one.parts]
            if one.on_missing is not None:
                one.on_missing = partial(self._mended, one.on_missing)
        one.task = asyncio.get_running_loop().create_task(self._run(one))
        self._waited_for[one] = None
        if self._watching is None:
            self._watch()
        return one.answered

    async def _run(self, one: Append) -> None:
        error: Exception | None = None
        try:
            if self._spool.waiting:
                await self._empty()
            if one.state is AppendState.ASKED:
                await self._appended(one)
        except Exception as found:
            if not isinstance(found, StoreError | ValueError):
                logger.exception("the store failed")
            error = found
        finally:
            self._waited_for.pop(one, None)
            self._stuck.discard(one)
        if one.state is not AppendState.ASKED:
            return  # it was late
        if error is None:
            self.saved += one.replies
            self.seconds += one.replies * (time.monotonic() - one.begun)
            if one.on_done is not None:
                one.on_done(True)
            one.end(AppendState.SAVED)
        elif isinstance(error, StoreUnreachableError):
            self._keep(one, error)
        else:
            self._refused(one, error)

    async def _empty(self) -> None:
        """Hand over the spool, if that is quick. Raises StoreUnreachableError if anything still waits."""
        if not (self._stuck or self._handing.locked() or len(self._spool.waiting) > _FEW):
            await self.hand_over()
        if self._spool.waiting:
            raise StoreUnreachableError("what was recorded before is still waiting for the store")

    async def _appended(self, one: Append) -> None:
        batch = one.batch
        for more in reversed(range(_MENDS)):
            try:
                await self.store.append(batch)
                return
            except MissingRecordError as error:
                mended = one.on_missing(batch, error) if one.on_missing is not None and more else None
                if mended is None:
                    raise
                batch = mended

    def _watch(self) -> None:
        """Look again after a moment, as long as an append is waited for or stuck."""
        again = self._waited_for or self._stuck
        self._watching = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look) if again else None

    def _look(self) -> None:
        """Keep the batches of late appends, which go on and are stuck. Cancel appends that are stuck for too long."""
        now = time.monotonic()
        for one in list(self._waited_for):
            if now - one.begun < ANSWER_SECONDS:
                break
            del self._waited_for[one]
            self._stuck.add(one)
            self._keep(one, StoreUnreachableError(f"the store has not answered for {ANSWER_SECONDS:.0f} s"))
        for one in self._stuck:
            if now - one.begun > GIVE_UP_SECONDS:
                one.cancel()
        self._watch()

    def _keep(self, one: Append, error: StoreUnreachableError) -> None:
        """Put a batch into the spool."""
        self._why = error.message
        self.complain("replies are answered without being saved, and kept until the store takes writes: %s", error)
        on_done = after_all(len(one.parts), one.on_done)
        for at, part in enumerate(one.parts):
            try:
                if not self._spool.put(pack(part), replies_in(part), one.on_missing, on_done):
                    text = (
                        f"what waits for the store has no room in {self._spool.path or 'the spool'}: "
                        "it is kept in memory only, and new requests are refused until there is room: %s"
                    )
                    self.complain(text, OSError(self._spool.fault))
            except ValueError as fault:
                if not at:
                    return self._refused(one, fault)
                self._lose(part, fault)
                if on_done is not None:
                    on_done(False)
        self.unsaved += one.replies
        if self._since is None:
            self._since = time.monotonic()
        if self._trying is None or self._trying.done():
            self._trying = asyncio.get_running_loop().create_task(self._keep_trying())
        one.end(AppendState.KEPT)

    def _refused(self, one: Append, error: Exception) -> None:
        if one.on_refused is not None and not isinstance(error, StoreUnreachableError):
            one.on_refused()
            one.end(AppendState.REFUSED)
            return
        if not one.raises:
            self.unsaved += one.replies
            self._lose(one.batch, error)
        if one.on_done is not None:
            one.on_done(False)
        one.end(AppendState.REFUSED, error)

    def _lose(self, batch: Batch, error: Exception) -> None:
        self._lost += replies_in(batch)
        self.complain("a reply was not saved, and is lost with this process: %s", error)

    # Handing over ------------------------------------------------------------------------------------------------------

    async def hand_over(self) -> bool:
        """Append the spool, in order; return whether all of it is in the store."""
        async with self._handing:
            if not await self._drain.empty(self._spool):
                self._why = self._drain.why
                return False
            if self._since is not None:
                seconds, self._since = time.monotonic() - self._since, None
                self._away_seconds += seconds
                logger.warning("the store takes writes again, after %.1f s, and nothing waits for it any more", seconds)
            return True

    async def _keep_trying(self) -> None:
        while self._spool.waiting:
            await asyncio.sleep(RETRY_SECONDS)
            await asyncio.to_thread(self._spool.checkpoint)
            if self.held_bytes and self._spool.settle():
                logger.warning("there is room again: all that waits for the store is in %s", self._spool.path)
            if not self._stuck:
                try:
                    await self.hand_over()
                except OSError as error:
                    self.complain("what waits for the store cannot be read: %s", error)

    async def _keep_adopting(self, adoption: Adoption) -> None:
        while True:
            await asyncio.sleep(ADOPT_SECONDS)
            if not self.away:
                try:
                    await adoption.run()
                except (OSError, StoreError) as error:
                    self.complain("what a dead router left has to wait: %s", error)


class AppendState(enum.Enum):
    """See the top of this file."""

    ASKED = "asked"
    SAVED = "saved"
    KEPT = "kept"
    REFUSED = "refused"


_TRANSITIONS: Final = (
    (AppendState.ASKED, AppendState.SAVED),
    (AppendState.ASKED, AppendState.KEPT),
    (AppendState.ASKED, AppendState.REFUSED),
)
"""A tuple, because CPython 3.11 takes a call in Python for the hash of a state."""


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Append:
    """A batch on its way.

    Attributes:
        on_missing, on_done, on_refused, parts: see `Saving.append`.
        raises: whether the caller gets errors; else the answer is False.
        replies: how many are in the batch.
        state: ends with the answer.
        answered: whether the batch was acknowledged in time.
        task: appends it, and may go on after the answer.
    """

    batch: Batch
    on_missing: OnMissing | None = None
    on_done: OnDone | None = None
    on_refused: Callable[[], None] | None = None
    parts: Sequence[Batch] = ()
    raises: bool = False
    replies: int = 0
    begun: float = 0.0
    state: AppendState = AppendState.ASKED
    answered: asyncio.Future[bool] = field(default_factory=_future)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.parts = self.parts or (self.batch,)
        self.replies = replies_in(self.batch)
        self.begun = time.monotonic()

    def end(self, state: AppendState, error: Exception | None = None) -> None:
        """Answer the caller, if it is still there. Raises RuntimeError if that was done already."""
        if (self.state, state) not in _TRANSITIONS:
            raise RuntimeError(f"an append that is {self.state.value} cannot be {state.value}")
        self.state = state
        if self.answered.done():  # its caller was cancelled
            return
        if error is not None and self.raises:
            self.answered.set_exception(error)
            self.answered.exception()  # the caller may be gone
        else:
            self.answered.set_result(state is AppendState.SAVED)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


def with_files(batch: Batch, files: Sequence[MediaFile]) -> Batch:
    """Return a batch with those of the files that its records name."""
    named = {key for record in batch.records if record.media for key in record.files} if files else ()
    return replace(batch, media=[file for file in files if file.key in named]) if named else batch


def replies_in(batch: Batch) -> int:
    return len([1 for record in batch.records if record.versions is not None])


def after_all(count: int, on_done: OnDone | None) -> OnDone | None:
    """Return a function to be called at the end of each of `count` parts; it calls `on_done` at the end of the last one."""
    if on_done is None or count == 1:
        return on_done
    ends: list[bool] = []

    def each(saved: bool) -> None:
        ends.append(saved)
        if len(ends) == count:
            on_done(all(ends))

    return each
