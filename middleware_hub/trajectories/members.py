"""How a request names the group of its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from router.errors import BadRequestError

MOST_SIZE: Final = 65_536
MOST_NAME: Final = 128
HEADERS: Final = (b"x-group-id", b"x-group-size", b"x-rollout-end", b"x-rollout-id")


class GroupMembership(msgspec.Struct, frozen=True):
    """The group that a request names in headers: `x-group-id`, `x-group-size`, `x-rollout-id`, `x-rollout-end`."""

    group: str
    size: int | None = None
    rollout: str | None = None
    ends: bool = False


def memberships(headers: Mapping[bytes, bytes], prompts: int) -> list[GroupMembership | None]:
    """Return the membership of each prompt of a request. Raises BadRequestError.

    An id or end may be given once for all prompts, or once for each prompt, separated by commas.
    """
    given = {name: headers[name].decode("latin-1") for name in HEADERS if name in headers}
    if not given:
        return [None] * prompts
    if not given.get(b"x-group-id", "").strip():
        others = given.keys() - {b"x-group-id"}
        if not others:
            raise BadRequestError("x-group-id is empty: give the group that the rollout belongs to, or leave it out")
        raise BadRequestError(f"{min(others).decode()} needs x-group-id: the group that the rollout belongs to")
    groups = [_name(one, "x-group-id") for one in _each(given, b"x-group-id", prompts)]
    rollouts = [_name(one, "x-rollout-id") for one in _each(given, b"x-rollout-id", prompts)]
    ends = [_flag(one) for one in _each(given, b"x-rollout-end", prompts)]
    size = _size(given.get(b"x-group-size"))
    return [
        None if group is None else GroupMembership(group, size, rollout, end)
        for group, rollout, end in zip(groups, rollouts, ends, strict=True)
    ]


def _each(given: Mapping[bytes, str], name: bytes, prompts: int) -> Sequence[str]:
    values = [one.strip() for one in given.get(name, "").split(",")]
    if len(values) == 1:
        return values * prompts
    if len(values) != prompts:
        raise BadRequestError(
            f"{name.decode()} has {len(values)} values for {prompts} prompts: give one, or one for each"
        )
    return values


def _name(value: str, place: str) -> str | None:
    if len(value) > MOST_NAME or not value.isascii() or not value.isprintable():
        raise BadRequestError(f"{place} must be up to {MOST_NAME} visible ASCII characters, not {value[:140]!r}")
    return value or None


def _flag(value: str) -> bool:
    if value.lower() not in ("", "true", "1", "false", "0"):
        raise BadRequestError(f"x-rollout-end must be true or false, not {value[:140]!r}")
    return value.lower() in ("true", "1")


def _size(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 6 and 1 <= int(value) <= MOST_SIZE):
        raise BadRequestError(f"x-group-size must be 1 to {MOST_SIZE} samples, not {value[:140]!r}")
    return int(value)
