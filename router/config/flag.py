"""Fields of the configuration that flags of the command line set.

The field is the only source of its flag: `router/flags.py` makes the parser from it, and `scripts/make_reference.py` the
table in the documentation. Limits hold for every configuration, also for one that is made in code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from router.errors import BadRequestError

T = TypeVar("T")

_KEY = "flag"


@dataclass(frozen=True)
class Limit:
    """A condition on a number, and the words for a number that fails it, as in `--port must be 0 to 65535, not 70000`."""

    holds: Callable[[float], bool]
    words: str
    metavar: str = ""


def at_least(low: int) -> Limit:
    return Limit(lambda number: low <= number < math.inf, f"must be at least {low}, not")


def between(low: int, high: int) -> Limit:
    return Limit(lambda number: low <= number <= high, f"must be {low} to {high}, not")


NOT_NEGATIVE = at_least(0)
SHARE = replace(between(0, 1), metavar="SHARE")
FACTOR = replace(at_least(1), metavar="X")
UNLIMITED = Limit(lambda _: True, "")

_POSITIVE = {int: at_least(1), float: Limit(lambda number: 0 < number < math.inf, "must be a positive number, not")}


@dataclass(frozen=True)
class FlagSpec:
    """The flag of a field.

    Attributes:
        name: with its dashes.
        help: without the default, which the parser appends.
        metavar: the placeholder for the value; empty for the one of its limit or type.
        unset: the effect of its absence, where the default (None, or empty) does not say it.
        scale: units of the flag in one unit of the field: 1000 for a flag in milliseconds and a field in seconds.
        limit: the condition on a number; None means positive.
        many: whether one use takes several values. A flag for a tuple can be repeated in any case.
    """

    name: str
    help: str
    metavar: str = ""
    unset: str = ""
    scale: int = 1
    limit: Limit | None = None
    many: bool = False


def flag(name: str, default: T, help: str, *, repr: bool = True, **options: Any) -> T:
    """Return a dataclass field with a flag. `options`: see `FlagSpec`; `repr=False` keeps a secret out of logs."""
    return field(default=default, repr=repr, metadata={_KEY: FlagSpec(name, help, **options)})


def flag_of(metadata: Mapping[str, Any]) -> FlagSpec | None:
    """Return the flag in the metadata of a dataclass field, None if the field has no flag."""
    return metadata.get(_KEY)


def share(name: str, limit: int, number: int, count: int, least: int = 1) -> int:
    """Return the share of a limit that one of `count` processes gets, counted from 1.

    Raises:
        BadRequestError: the limit, which the flag `name` sets, is less than `least` for each.
    """
    if limit < least * count:
        raise BadRequestError(f"{name} {limit} is divided among --processes {count}: it must be at least {count}")
    return limit // count + (number <= limit % count)


@dataclass(frozen=True)
class Section:
    """A part of the configuration. Its numbers are within their limits. `TITLE` heads its flags in `--help`."""

    TITLE: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            value, known = getattr(self, each.name), flag_of(each.metadata)
            if known is not None and type(value) in _POSITIVE:
                limit = known.limit or _POSITIVE[type(value)]
                if not limit.holds(value):
                    raise BadRequestError(f"{known.name} {limit.words} {value}")
