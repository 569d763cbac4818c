"""Checks whether a trainer's version fits a module here: at import, not at the end of the first rollout."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterable
from importlib import metadata

SUPPORTED = {
    "slime": ((0, 3, 1), (0, 4)),
    "verl": ((0, 9, 0), (0, 10)),
    "miles": ((0, 1, 0), (0, 2)),
    "trl": ((1, 0, 0), (1, 17)),
    "harbor": ((0, 26), (0, 27)),
    "openenv": ((0, 10, 0), (0, 11)),
    "verifiers": ((0, 4), (0, 5)),
    "skyrl": ((0, 4), (0, 5)),
    "areal": ((1, 0), (1, 1)),
}
"""The first release that fits, and the first that may not."""


def require(trainer: str, names: Iterable[str], *, strict: bool = False) -> None:
    """Check that a trainer is installed in a version that fits.

    Args:
        trainer: its name in `SUPPORTED`.
        names: the names used of it, as `module:name`, `module:Class.attribute`; a field of a dataclass counts as an attribute.
        strict: whether to refuse an earlier version that has the names but lacks something without a name.

    Raises:
        ImportError: it is not installed, or does not have one of the names. A version outside the range with all of the names
            only causes a warning: trainers are often run from a checkout between two releases.
    """
    first, end = SUPPORTED[trainer]
    fits = f"{_text(first)} or later, before {_text(end)}"
    if trainer not in sys.modules and importlib.util.find_spec(trainer) is None:
        raise ImportError(f"this module is for {trainer} {fits}, and {sys.executable} has no {trainer}")
    missing = [name for name in names if not _has(name)]
    version = installed(trainer)
    if missing:
        raise ImportError(
            f"this module is for {trainer} {fits}; here is {version or 'one without a version'}, which lacks "
            f"{', '.join(missing)}: install a release that fits, or a tito-router that is newer"
        )
    if strict and version is not None and parsed(version) < first:
        raise ImportError(f"this module is for {trainer} {fits}; here is {version}: install a release that fits")
    if version is not None and not first <= parsed(version) < end:
        warnings.warn(
            f"this module was tested with {trainer} {fits}, and here is {version}: it has every name that is used, but compare "
            "a first batch with what the trainer's own function makes",
            stacklevel=3,
        )


def installed(trainer: str) -> str | None:
    """Return the version of a package; None if it is not installed as one (a checkout on the path)."""
    try:
        return metadata.version(trainer)
    except metadata.PackageNotFoundError:
        return None


def parsed(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)


def _has(name: str) -> bool:
    path, _, attributes = name.partition(":")
    try:
        found = importlib.import_module(path)
    except ImportError as error:
        if error.name is not None and path.startswith(error.name):
            return False
        raise
    for attribute in attributes.split("."):
        fields = (getattr(found, "__dataclass_fields__", None), getattr(found, "model_fields", None))
        if any(isinstance(one, dict) and attribute in one for one in fields):
            return True
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True
