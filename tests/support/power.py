"""Power cuts for SQLite: a file system layer that knows which bytes were synced.

SQLite reaches files through a "VFS". `recorded()` makes one the default that passes every call on to the operating system,
and at each `xSync` keeps what the file holds then. `Disk.cut` gives the files as a power cut may
leave them: what was synced, and of what was written after that any part, by sectors; a file that grew has any length between.

Not simulated: a disk that says it has synced and has not; a folder that loses a file's entry (the folder is synced by SQLite
when a log is made); sectors that are torn inside.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw

SECTOR = 512


class Disk:
    """What is on it for sure."""

    def __init__(self) -> None:
        self._synced: dict[Path, bytes] = {}
        self._lock = threading.Lock()
        self.syncs = 0

    def synced(self, path: Path) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            self.syncs += 1
            self._synced[path] = path.read_bytes()

    def cut(self, folder: Path, into: Path, dice: random.Random | None = None) -> None:
        """Write the files of a folder as a power cut leaves them now. Without `dice` nothing is there that was not synced."""
        into.mkdir()
        with self._lock:
            kept = {path: data for path, data in self._synced.items() if path.parent == folder}
            now = {path: path.read_bytes() for path in kept if path.exists()}
        for path, data in now.items():
            old = kept[path]
            (into / path.name).write_bytes(old if dice is None else _mixed(old, data, dice))


def _mixed(old: bytes, new: bytes, dice: random.Random) -> bytes:
    size = dice.randint(*sorted((len(old), len(new))))
    share = dice.random()
    parts = []
    for at in range(0, size, SECTOR):
        some = new if dice.random() < share else old
        parts.append(some[at : min(at + SECTOR, size)].ljust(min(SECTOR, size - at), b"\0"))
    return b"".join(parts)


class _Watched(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._base = apsw.vfs_names()[0]  # the default one
        super().__init__("watched", self._base, makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _WatchedFile(self._disk, self._base, name, flags)


class _WatchedFile(apsw.VFSFile):
    def __init__(self, disk: Disk, base: str, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(base, name, flags)
        self._disk = disk
        self._path = None if name is None else Path(name if isinstance(name, str) else name.filename())

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        if self._path is not None:
            self._disk.synced(self._path)


@contextlib.contextmanager
def recorded() -> Iterator[Disk]:
    """Watch every file that SQLite opens meanwhile, in this process."""
    disk = Disk()
    watched = _Watched(disk)
    try:
        yield disk
    finally:
        watched.unregister()
