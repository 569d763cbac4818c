"""Power cuts for SQLite: a file system layer that knows which bytes were synced.

SQLite reaches files through a "VFS", which is a table of functions. `recorded()` makes one the default that passes every call
on to the operating system, and at each `xSync` keeps what the file holds then. `Disk.cut` gives the files as a power cut may
leave them: what was synced, and of what was written after that any part, by sectors; a file that grew has any length between.

Not simulated: a disk that says it has synced and has not; a folder that loses a file's entry (the folder is synced by SQLite
when a log is made); sectors that are torn inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sqlite3
import threading
from collections.abc import Iterator
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_void_p
from pathlib import Path
from typing import Any

SECTOR = 512
OK = 0

_XOPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
_XSYNC = CFUNCTYPE(c_int, c_void_p, c_int)


class _Vfs(Structure):
    """The head of `sqlite3_vfs`; what follows is copied as it is."""

    _fields_ = (
        ("version", c_int),
        ("file_bytes", c_int),
        ("longest_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", _XOPEN),
        ("rest", c_void_p * 15),
    )


class _Methods(Structure):
    """`sqlite3_io_methods`."""

    _fields_ = (
        ("version", c_int),
        ("close", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("truncate", c_void_p),
        ("sync", _XSYNC),
        ("rest", c_void_p * 13),
    )


class _File(Structure):
    _fields_ = (("methods", POINTER(_Methods)),)


def _library() -> Any:
    """Return the SQLite that this Python uses, or None if it is no library of its own."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "libsqlite3" in line:
                return ctypes.CDLL(line.split()[-1])
    return None


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


@contextlib.contextmanager
def recorded() -> Iterator[Disk | None]:
    """Watch every file that SQLite opens meanwhile, in this process; None where that is not possible."""
    sqlite3.connect(":memory:").close()
    library = _library()
    if library is None:
        yield None
        return
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    library.sqlite3_vfs_find.argtypes = (c_char_p,)
    original = library.sqlite3_vfs_find(None)
    disk = Disk()
    paths: dict[int, Path] = {}
    made: dict[int, tuple[_Methods, Any]] = {}

    def methods_like(address: int, found: _Methods) -> _Methods:
        """Return a table of functions with another `xSync`; one for each of the operating system's tables."""
        if address not in made:
            copy = _Methods.from_buffer_copy(found)
            sync = _XSYNC(ctypes.cast(found.sync, c_void_p).value)

            def synced(file: int, flags: int) -> int:
                result = int(sync(file, flags))
                if result == OK and file in paths:
                    disk.synced(paths[file])
                return result

            copy.sync = callback = _XSYNC(synced)
            made[address] = copy, callback
        return made[address][0]

    open_file = _XOPEN(ctypes.cast(original.contents.open, c_void_p).value)

    def opened(_: int, name: int | None, file: int, flags: int, given: Any) -> int:
        result = int(open_file(ctypes.cast(original, c_void_p).value, name, file, flags, given))
        if result == OK and name:
            paths[file] = Path(ctypes.string_at(name).decode())
            head = _File.from_address(file)
            address = ctypes.addressof(head.methods.contents)
            head.methods = ctypes.pointer(methods_like(address, head.methods.contents))
        return result

    copy = _Vfs.from_buffer_copy(original.contents)
    copy.name, copy.next = b"watched", None
    copy.open = callback = _XOPEN(opened)
    library.sqlite3_vfs_register(ctypes.byref(copy), 1)
    try:
        yield disk
    finally:
        library.sqlite3_vfs_register(original, 1)
        library.sqlite3_vfs_unregister(ctypes.byref(copy))
        _ALIVE.append((copy, callback, made))


_ALIVE: list[Any] = []
"""Tables that a connection may still point to."""
