"""Programs of Debian that tests need: those of this machine, or fetched into the cache, without root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tito-router" / "debian"
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
_DEPENDS = (
    *("depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks"),
    *("--no-replaces", "--no-enhances", "--no-pre-depends"),
)


@cache
def fonts(package: str) -> Path:
    """Return a folder with the fonts of a package of Debian, fetched into the cache. RuntimeError if that cannot be."""
    folder = CACHE / package
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(folder, [package], f"fonts of {package}", package)
    return folder / "usr" / "share" / "fonts"


@cache
def program(name: str, package: str | None = None) -> Path:
    """Return the path of a program, `package` being what Debian has it in.

    It is looked for on the PATH and where root's programs are. If it is not there, the package and what it needs are fetched
    into the cache and unpacked, which takes apt, and no root. RuntimeError if that cannot be.
    """
    found = shutil.which(name, path=_PATH)
    return _fetched(name, package or name) if found is None else Path(found)


def _fetched(name: str, package: str) -> Path:
    starter = CACHE / "bin" / name
    starter.parent.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at once
        if not starter.exists():
            _fetch(starter, package)
    return starter


def _fetch(starter: Path, package: str) -> None:
    folder = CACHE / package
    _unpack(folder, None, starter.name, package)
    # What a package has in a folder of its own comes first: in usr/bin is a script that expects to be installed.
    places = [folder / place / starter.name for place in (f"usr/lib/{package}", "usr/bin", "usr/sbin")]
    unpacked = next((place for place in places if place.exists()), None)
    if unpacked is None:
        raise RuntimeError(f"Debian's package {package} has no {starter.name}")
    libraries = sorted({str(path.parent) for path in folder.rglob("*.so*")})
    starter.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{":".join(libraries)}" exec "{unpacked}" "$@"\n')
    starter.chmod(0o755)


def _unpack(folder: Path, packages: list[str] | None, what: str, package: str) -> None:
    """Fetch packages, or `package` and what it lacks, and unpack them into a folder that is there only when it is whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    try:
        _run(*_apt("apt-get"), "-qq", "update", folder=CACHE)
        _run(*_apt("apt-get"), "-qq", "download", *(packages or _lacking(package)), folder=partial)
        for archive in partial.glob("*.deb"):
            _run("dpkg", "-x", str(archive), str(partial), folder=partial)
            archive.unlink()
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        raise RuntimeError(f"these tests need {what}: install Debian's package {package} ({error}) {said}") from error
    partial.rename(folder)


def _apt(command: str) -> list[str]:
    """Return a command of apt that has its lists in the cache: those of the machine may be missing, and are root's."""
    state = CACHE / "apt"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (state / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "true",
    }
    return [command, *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]


def _lacking(package: str) -> list[str]:
    """Return the package, and those that it needs and this machine does not have."""
    lines = _run(*_apt("apt-cache"), *_DEPENDS, package, folder=CACHE).splitlines()
    names = {line for line in lines if line and line[0].isalnum()} | {package}
    return [name for name in sorted(names) if name == package or not _installed(name)]


def _installed(package: str) -> bool:
    asked = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True)
    return asked.stdout.endswith(" installed")


def _run(*command: str, folder: Path) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
