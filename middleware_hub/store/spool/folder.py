"""Where spool files are: a folder for each store, and in it a file for each router."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from middleware_hub.store.errors import DamagedRecordError, StoreError
from middleware_hub.store.spool.file import SUFFIX, SpoolFile, SpoolHead, set_aside
from middleware_hub.store.sqlite.file import place_of
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

_MAKING = 3


class SpoolFolder:
    """The spool files of one store and one tokenizer on this machine.

    Args:
        base: the value of `--store-spool`; None for a folder below the user's cache.
        store: its `identity`.
        fingerprint: of the tokenizer.
        max_bytes: the value of `--store-spool-max-bytes`.
    """

    def __init__(self, base: str | None, store: str, fingerprint: str | None, max_bytes: int) -> None:
        self._head = SpoolHead(store, fingerprint)
        name = blake2b(self._head.store.encode(), digest_size=8).hexdigest()
        self._base = default_base() if base is None else Path(base).expanduser()
        self._folder = self._base / name
        self._max_bytes = max_bytes

    def make(self) -> SpoolFile:
        """Return a new file for this router. Raises BadRequestError if there can be none."""
        for left in reversed(range(_MAKING)):
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                name = f"{os.getpid()}-{secrets.token_hex(4)}.spool{SUFFIX}"
                return SpoolFile.make(self._folder / name, self._head, self._max_bytes)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and left:
                    continue  # another router removed the empty folder meanwhile
                raise BadRequestError(
                    f"no spool file can be made in {self._folder} ({error}): name a folder on a disk of this machine, "
                    "that this user may write, with --store-spool"
                ) from error
        raise AssertionError

    def left_behind(self) -> Iterator[SpoolFile]:
        """Yield the files that dead routers left behind, locked."""
        for path in self.paths():
            try:
                found = SpoolFile.adopt(path, self._head)
            except (OSError, StoreError) as error:
                logger.error("the spool file %s cannot be read: %s", path, error)
                if isinstance(error, DamagedRecordError):
                    with suppress(OSError):  # another router was faster
                        set_aside(path)
                continue
            if found is None:
                continue
            if found.waiting:
                count = sum(waiting.replies for waiting in found.waiting)
                logger.warning("a router that died left %d replies in %s", count, path)
            if found.torn_bytes or found.damaged:
                text = "%s: %d bytes at the end were torn, and are cut off; %d replies within are damaged"
                logger.error(text, path, found.torn_bytes, found.damaged)
            yield found

    def warn_of_others(self) -> None:
        """Log which replies wait for stores of other addresses. A store that has moved gets nothing from under its old one.

        No file is locked for that, or a router of its store that starts at this moment would leave it out.
        """
        store, _, prefix = self._head.store.partition(" ")
        here = f"{store} --store-prefix {prefix}" if prefix else store
        for path in _found(self._base, "*/"):
            if path.parent == self._folder:
                continue
            try:
                head, waiting = SpoolFile.look_into(path)
            except (OSError, StoreError, msgspec.MsgspecError) as error:
                logger.info("the spool file %s cannot be read: %s", path, error)
                continue
            if waiting:
                text = (
                    "%d replies wait in %s for the store %s. If that is an older address of this store, hand them over: "
                    "tito-router store handover --store %s --any-store %s"
                )
                logger.warning(text, sum(one.replies for one in waiting), path, head.store, here, path)

    def paths(self) -> list[Path]:
        """Return all files, including those in use."""
        return _found(self._folder)

    def leave(self) -> None:
        """Remove the folder if nothing is in it."""
        with suppress(OSError):
            self._folder.rmdir()


def _found(folder: Path, below: str = "") -> list[Path]:
    """Return the files in a folder, or in those below it; those of earlier versions have no suffix more than `.spool`.

    Unlike `Path.glob`, it is not disturbed by a router that removes its folder meanwhile.
    """
    return sorted(folder / name for end in ("", SUFFIX) for name in glob(f"{below}*.spool{end}", root_dir=folder))


def default_base() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tito-router" / "spool"


def identity(address: str, prefix: str = "") -> str:
    """Return the address of a store in one spelling, without a password; `prefix` begins its keys (`--store-prefix`)."""
    scheme, _, rest = address.partition(":")
    if scheme == "sqlite":
        return f"sqlite:{place_of(rest).resolve()}"
    if not rest.startswith("//"):
        return address
    parts = urlsplit(address)
    return f"{parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()} {prefix}"
