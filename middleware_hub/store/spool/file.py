"""One file with the batches that wait for the store, in the order of recording.

    head | batch | batch | done up to here | batch | batch | zeros          each: length (4 bytes) | seal of (kind | data)

The data of a batch begins with the number of its replies (4 bytes).

A batch for which there is no room, on the disk or in the budget, stays in memory until there is: only the process that
recorded it can hand it over. Meanwhile the file counts as full, so that nothing new is begun.

The file is only ever appended to, and emptied when the store has everything. Its writer holds a lock on it (`flock`), which
ends with the process, so a file without a lock was left behind. A batch in the file survives SIGKILL once `put` has returned.
A kill may tear the batch that is being written, because Linux checks for it between pages, and a power cut may tear more: the
torn end is cut off and counted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from middleware_hub.store.errors import DamagedRecordError
from middleware_hub.store.records import FORMAT, seal, unseal

logger = logging.getLogger(__name__)

_HEAD: Final = b"H"
_BATCH: Final = b"B"
_DONE: Final = b"D"
_LENGTH: Final = 4
_COUNT: Final = 4
_AHEAD: Final = (4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10)
"""Bytes of the disk that are reserved, if there are so many: for the replies that are in flight when it is full."""
_PIECE: Final = 1 << 20
_FORMATS: Final = re.compile(re.escape(bytes((FORMAT,))))
"""What follows the length of each batch."""
_OVERDRAFT: Final = 64 << 20
"""Bytes over the budget for replies that were in flight when it was used up."""


class SpoolHead(msgspec.Struct, frozen=True):
    """The owner of the file: the store, without secrets, and the fingerprint of the tokenizer."""

    store: str
    fingerprint: str | None


class Waiting(msgspec.Struct):
    """A batch in the file; `on_missing` and `on_done` are those of its recorder in this process (see `handover`)."""

    offset: int
    """Where it begins; of one that is held, where the file ended when it came."""
    size: int
    replies: int = 0
    on_missing: Callable[..., Any] | None = None
    on_done: Callable[[bool], None] | None = None
    tried: int = -1
    """How many steps of the hand-over had been made when a record that this one builds on was missing."""
    held: bytes = b""
    """Its bytes, as they would be in the file, if they are in memory only."""


class SpoolFile:
    """See the top of this file. Its methods raise OSError if the disk fails.

    Attributes:
        waiting: the batches to hand over, in order.
        waiting_bytes: their bytes, in the file or in memory.
        held_bytes: those of batches that are in memory only.
        fault: why the last batch that is held could not be written.
        torn_bytes, damaged: what could not be read when the file was opened: bytes at its end, and batches within.
        cramped: whether the disk had no room to reserve.
    """

    def __init__(self, descriptor: int, path: Path | None, head: SpoolHead, max_bytes: int) -> None:
        self.path = path
        self.head = head
        self.waiting: deque[Waiting] = deque()
        self.waiting_bytes = self.held_bytes = self.torn_bytes = self.damaged = 0
        self.cramped = False
        self.fault = ""
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._begin = self._end = self._allocated = 0
        self._moved = self._reserves = False

    def __repr__(self) -> str:
        return f"<SpoolFile {self.path}: {len(self.waiting)} batches, {self.waiting_bytes} bytes>"

    @classmethod
    def anonymous(cls, max_bytes: int = 1 << 30) -> SpoolFile:
        """Return a file that ends with this process."""
        descriptor, name = tempfile.mkstemp(prefix="tito-spool-")
        os.unlink(name)
        return cls(descriptor, None, SpoolHead("", None), max_bytes)

    @classmethod
    def make(cls, path: Path, head: SpoolHead, max_bytes: int) -> SpoolFile:
        """Return a new file, locked."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                break
            os.close(descriptor)  # another router took the file for a leftover before it was locked
        made = cls(descriptor, path, head, max_bytes)
        made._begin = made._end = made._write(_framed(_HEAD, msgspec.json.encode(head)))
        made._reserves = True
        made._take_ahead(0)  # on a disk that is full later, what is in flight then still fits
        return made

    @classmethod
    def adopt(cls, path: Path, head: SpoolHead | None, *, look: bool = False) -> SpoolFile | None:
        """Return a file that was left behind, locked; None if it is in use, gone, or belongs to another store or tokenizer.

        Without a `head`, return it whatever its owner, or None if it is no spool file. With `look` it is not changed.
        """
        try:
            descriptor = os.open(path, (os.O_RDONLY if look else os.O_RDWR) | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        found = cls(descriptor, path, head or SpoolHead("", None), 0)
        ours = _is_at(descriptor, path) and found._scan(head)
        if not ours or (head is None and not (found._begin or found.waiting)):
            os.close(descriptor)
            return None
        if not look:
            os.ftruncate(descriptor, found._end)
        return found

    @classmethod
    def look_into(cls, path: Path) -> tuple[SpoolHead, list[Waiting]]:
        """Return whose a file is and what waits in it, and change nothing: its router may be at work.

        Without such a file, nothing waits.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return SpoolHead("", None), []
        try:
            found = cls(descriptor, path, SpoolHead("", None), 0)
            found._scan(None)
            return found.head, list(found.waiting)
        finally:
            os.close(descriptor)

    @property
    def full(self) -> bool:
        """Whether nothing new should be recorded: the budget is used up, or the disk."""
        return self.waiting_bytes >= self._max_bytes or (self.cramped and bool(self.waiting)) or bool(self.held_bytes)

    def put(
        self,
        data: bytes,
        replies: int = 1,
        on_missing: Callable[..., Any] | None = None,
        on_done: Callable[[bool], None] | None = None,
    ) -> bool:
        """Append a packed batch and its number of replies; return False if it is held in memory, see `fault`."""
        frame = _framed(_BATCH, replies.to_bytes(_COUNT, "big") + data)
        waiting = Waiting(self._end, len(frame), replies, on_missing, on_done, held=frame)
        self._add(waiting)
        self.held_bytes += waiting.size
        return self._settle(waiting)

    def settle(self) -> bool:
        """Write what is held, as far as there is room now; return whether nothing is held any more."""
        for waiting in self.waiting if self.held_bytes else ():
            if waiting.held:
                if not self._settle(waiting):
                    return False
                self._moved = self._moved or waiting is not self.waiting[-1]  # it stands behind later ones now
        return True

    def read(self, waiting: Waiting) -> memoryview:
        """Return a batch that waits. Raises DamagedRecordError."""
        return unseal(self._frame_of(waiting)[_LENGTH:])[1 + _COUNT :]

    def done(self, count: int = 1) -> list[Waiting]:
        """Remove the first batches, and return them. They are not handed over again, except after a power cut."""
        taken = [self.waiting.popleft() for _ in range(count)]
        self.waiting_bytes -= sum(one.size for one in taken)
        self.held_bytes -= sum(len(one.held) for one in taken)
        if not self.waiting:
            self._empty()
        elif not self._moved:
            with suppress(OSError):  # on a full disk they may be handed over once more, which changes nothing
                self._end = self._write(_framed(_DONE, self.waiting[0].offset.to_bytes(8, "big")))
        return taken

    def move_back(self) -> None:
        """Move the first batch after all others."""
        self._moved = True
        self.waiting.rotate(-1)

    def refuse(self) -> Path | None:
        """Keep the first batch, which no store takes, in a file beside this one; return that file."""
        if self.path is None:
            return None
        again = self.path.suffix == ".refused"
        beside = self.path.with_suffix(".refused.again" if again else ".refused")
        first = self.waiting[0]
        with open(beside, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            if not out.tell():
                out.write(_framed(_HEAD, msgspec.json.encode(self.head)))
            out.write(self._frame_of(first))
        return beside

    def close(self) -> None:
        """Release the file, and remove it if nothing waits in it. Its damaged parts are kept beside it."""
        if self._descriptor < 0:
            return
        if self.path is not None and not self.waiting:
            if self.damaged:
                self.path.replace(self.path.with_suffix(".damaged"))
            else:
                self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _add(self, waiting: Waiting) -> None:
        self.waiting.append(waiting)
        self.waiting_bytes += waiting.size

    def _frame_of(self, waiting: Waiting) -> bytes:
        return waiting.held or os.pread(self._descriptor, waiting.size, waiting.offset)

    def _settle(self, waiting: Waiting) -> bool:
        """Write a batch that is held, if there is room; return whether there was."""
        try:
            if self.waiting_bytes - self.held_bytes + waiting.size > self._max_bytes + _OVERDRAFT:
                raise OSError(f"it has more than the {self._max_bytes} bytes of --store-spool-max-bytes")
            if self.path is not None and not _is_at(self._descriptor, self.path):
                self._restore(self.path)
            self._take_ahead(waiting.size)
            offset, self._end = self._end, self._write(waiting.held)
        except OSError as error:
            self.fault = str(error)
            return False
        waiting.offset, waiting.held = offset, b""
        self.held_bytes -= waiting.size
        return True

    def _write(self, frame: bytes) -> int:
        """Write after the end, and return the new end."""
        left, at = memoryview(frame), self._end
        try:
            while left:
                written = os.pwrite(self._descriptor, left, at)
                left, at = left[written:], at + written
        except OSError:
            # The part that was written must not look like a beginning. What was reserved is for shorter batches.
            os.ftruncate(self._descriptor, self._end)
            self._allocated = self._end
            if self._reserves:
                self._take_ahead(0)
            raise
        return at

    def _restore(self, path: Path) -> None:
        """Write the file again: it was removed, and no later router would find what waits in it."""
        logger.error("the spool file %s was removed, and is written again", path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            at = 0
            while data := os.pread(self._descriptor, min(1 << 20, self._end - at), at):
                at += os.pwrite(descriptor, data, at)
        except OSError:
            path.unlink()
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._allocated = descriptor, self._end

    def _take_ahead(self, size: int) -> None:
        if self._end + size + _AHEAD[-1] <= self._allocated or not hasattr(os, "posix_fallocate"):
            return
        for ahead in _AHEAD:
            try:
                os.posix_fallocate(self._descriptor, self._end, size + ahead)
            except OSError:
                continue
            self._allocated = self._end + size + ahead
            self.cramped = False
            return
        self.cramped = True

    def _empty(self) -> None:
        if not self.damaged:
            os.ftruncate(self._descriptor, self._begin)
            self._end = self._allocated = self._begin
        self._moved = self.cramped = False
        if self._reserves:
            self._take_ahead(0)

    # What another process wrote ----------------------------------------------------------------------------------------

    def _scan(self, head: SpoolHead | None) -> bool:
        """Learn what waits in the file; return whether it belongs to this store."""
        size = os.fstat(self._descriptor).st_size
        at = 0
        while at < size:
            end, data = self._frame(at, size)
            if data is None:
                behind = self._whole_behind(at, size)
                if behind is None:
                    break
                self.damaged += 1
                end = behind
            elif data[:1] == _HEAD and not at:
                self.head = msgspec.json.decode(data[1:], type=SpoolHead)
                self._begin = end
                if head is not None and self.head != head:
                    return False
            elif data[:1] == _DONE:
                self._forget_before(int.from_bytes(data[1:], "big"))
            else:
                self._add(Waiting(at, end - at, int.from_bytes(data[1 : 1 + _COUNT], "big")))
            at = end
        self._end = self._allocated = at
        self.torn_bytes = self._torn(at, size)
        return True

    def _frame(self, at: int, size: int) -> tuple[int, bytes | None]:
        """Return where a batch ends and what is in it; None if it is not whole."""
        length = int.from_bytes(os.pread(self._descriptor, _LENGTH, at), "big")
        end = at + _LENGTH + length
        if length and end <= size:
            with suppress(DamagedRecordError):
                return end, bytes(unseal(os.pread(self._descriptor, length, at + _LENGTH)))
        return at, None

    def _whole_behind(self, at: int, size: int) -> int | None:
        """Return where the next whole batch begins. If there is none, the end is torn; otherwise something is damaged."""
        for piece in range(at, size, _PIECE):
            data = os.pread(self._descriptor, _PIECE + _LENGTH, piece)
            for found in _FORMATS.finditer(data, _LENGTH):
                begin = piece + found.start() - _LENGTH
                if begin > at and self._frame(begin, size)[1] is not None:
                    return begin
        return None

    def _forget_before(self, offset: int) -> None:
        while self.waiting and self.waiting[0].offset < offset:
            self.waiting_bytes -= self.waiting.popleft().size

    def _torn(self, at: int, size: int) -> int:
        """Return how many bytes after the end reach up to the last one that is not zero."""
        torn, start = 0, at
        while data := os.pread(self._descriptor, min(1 << 20, size - at), at):
            kept = len(data.rstrip(b"\0"))
            torn = at + kept - start if kept else torn
            at += len(data)
        return torn


def _framed(kind: bytes, data: bytes) -> bytes:
    sealed = seal(kind + data)
    return len(sealed).to_bytes(_LENGTH, "big") + sealed


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
