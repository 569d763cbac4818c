"""Files in the user's cache folder that make the next start faster.

A file's key is a fingerprint of everything from which its content was made, so a key's content never changes, and content made
from anything else is never found. A file begins with the hash of the rest: a partial or damaged file is ignored. It is written
beside its place and then moved there. A cache folder that cannot be written or read costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from blake3 import blake3

logger = logging.getLogger(__name__)

MOST_FILES = 8
"""More files are removed, the least recently used first. A file has up to 40 MB."""
MOST_BYTES = 256 << 20
"""Limit of a folder's files that are read for its fingerprint."""
TEMPLATES = "additional_chat_templates"
"""The only folder in a tokenizer's folder that is read."""
LARGE_FILE = 64 << 20
"""Larger files are weights: of these the size and the time of the last change count, not the content."""


def cache_folder() -> Path | None:
    """Return where files are kept; None for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "tito-router" / "tokenizers"
    except RuntimeError:
        return None


def fingerprint(folder: Path, libraries: Iterable[str], version: int) -> str | None:
    """Return the key of the tokenizer that `libraries` make of a folder's files; None if it cannot be found cheaply.

    `version` is the caller's own: another version has another key.
    """
    digest = blake3(f"{version} {sys.version}".encode())
    for name in libraries:
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"\0{name} {metadata.version(name)}".encode())
    read = 0
    try:
        inside = [*folder.iterdir(), *(folder / TEMPLATES).glob("*")]
        for path in sorted(each for each in inside if each.is_file()):
            about = path.stat()
            digest.update(f"\0{path.relative_to(folder)}\0{about.st_size}\0".encode(errors="surrogateescape"))
            if about.st_size > LARGE_FILE:
                digest.update(str(about.st_mtime_ns).encode())
                continue
            read += about.st_size
            if read > MOST_BYTES:
                return None
            digest.update(path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


def get(key: str) -> bytes | None:
    """Return the content under a key; None if there is no file, or no whole file."""
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / key
    try:
        head, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head.decode("ascii", "replace") != blake3(key.encode() + content).hexdigest():
        logger.warning("%s is not as it was written, and is not used", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def put(key: str, content: bytes) -> None:
    """Keep a content under its key, and remove surplus files."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside, name = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with open(beside, "wb") as file:
                file.write(blake3(key.encode() + content).hexdigest().encode() + b"\n" + content)
            os.replace(name, folder / key)
        except BaseException:
            os.unlink(name)
            raise
        kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in kept[MOST_FILES:]:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.info(
            "the next start will load the tokenizer from its files: nothing can be kept in %s: %s", folder, error
        )
