"""A disk of its own for the store: it can be filled, it can be slow, and it can hang."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import threading
from pathlib import Path

MEGABYTES = 6144
"""Of 30 minutes a store has about a third of that."""
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
_HELD, _LET = 0.25, 0.02


class NoDiskError(Exception):
    """This user may mount nothing; the message says why."""


class Disk:
    """A file system in a file, mounted at a folder; a part of the memory where that cannot be. It takes root.

    Attributes:
        hangs: whether it can hang and be slow: memory cannot.
    """

    def __init__(self, folder: Path) -> None:
        """Mount it. Raises NoDiskError."""
        if os.geteuid() != 0:
            raise NoDiskError("it takes root")
        self.folder = folder
        folder.mkdir(exist_ok=True)
        image = folder.with_name(f"{folder.name}.ext4")
        with image.open("wb") as file:
            file.truncate(MEGABYTES << 20)  # without blocks of its own until they are written
        try:
            _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
            _run("mount", "-o", "loop", str(image), str(folder))
            shutil.rmtree(folder / "lost+found")  # Redis reads its folder, and knows its files only
            self.hangs = True
        except NoDiskError:
            image.unlink()
            _run("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder))
            self.hangs = False
        self._frozen = False

    def fill(self) -> None:
        """Leave no room, until `empty`."""
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as filler:
            free = os.statvfs(self.folder)
            with contextlib.suppress(OSError):
                os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_bsize)
            filler.seek(0, os.SEEK_END)
            while True:
                filler.write(bytes(1 << 16))

    def empty(self) -> None:
        """Make room again."""
        (self.folder / "filler").unlink(missing_ok=True)

    def hang(self) -> None:
        """Let every write wait, until `go_on`. A process that writes cannot even be killed meanwhile."""
        self._control(_FREEZE)
        self._frozen = True

    def go_on(self) -> None:
        """Let what waits be written."""
        if self._frozen:
            self._frozen = False
            self._control(_THAW)

    def crawl(self, stopping: threading.Event, seconds: float) -> None:
        """Be slow for some seconds: let writes pass only now and then."""
        for _ in range(max(1, round(seconds / (_HELD + _LET)))):
            self.hang()
            stopping.wait(_HELD)
            self.go_on()
            if stopping.wait(_LET):
                return

    def _control(self, request: int) -> None:
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, request, 0)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Unmount it; what it held is gone."""
        self.go_on()
        _run("umount", "--lazy", str(self.folder))
        self.folder.with_name(f"{self.folder.name}.ext4").unlink(missing_ok=True)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        raise NoDiskError(f"{' '.join(command)}: {error} {said}".strip()) from error
