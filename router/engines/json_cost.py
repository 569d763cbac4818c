"""The cost of parsing a JSON body, estimated before it is parsed.

A decoder makes an object of every value, in one call that nothing interrupts: thirty million characters of text take it a
fiftieth of a second, thirty million characters of `{},{},{},` ten seconds, in which the router serves no other request. So it
estimates large bodies first, in steps of milliseconds: how many names, brackets and commas stand outside of strings.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from router.engines.json import MAX_ITEMS
from router.errors import BodyTooLargeError

LIGHT = 256 * 1024
"""Bytes up to which a body is parsed at once: any content takes only milliseconds."""

MAX_NAMES = 50_000
"""Names of fields, in all objects together: half a microsecond each."""

MAX_CONTAINERS = 100_000
"""Lists and objects, and as many strings: a tenth of a microsecond each."""

_BACKSLASH: Final = ord("\\")
_STEP = 1 << 20
_FAR = 1 << 24
"""Bytes in which to look for a quote at once, which takes a fraction of a millisecond for each million."""

_FEW = 256
"""Strings to jump over before anything is counted, and one more for each `_LONG` bytes of a body."""
_LONG = 1024


def check_weight(body: bytes, *, ids: bool = False) -> None:
    """Raise BodyTooLargeError for a body with more values than can be parsed without holding up other requests.

    `ids`: it may hold any number of token ids. Call this in a thread if the body is larger than `LIGHT`.
    """
    if len(body) <= LIGHT:
        return
    # To jump over a long string takes a hundredth of the time that it takes to count in it, and images are long strings.
    weight = _outside_of_strings(body, _FEW + len(body) // _LONG)
    if weight is None:
        # Nearly all bodies pass this, although it counts the insides of strings, too.
        names = containers = items = 0
        for at in range(0, len(body), _STEP):
            names += body.count(b":", at, at + _STEP)
            items += body.count(b",", at, at + _STEP)
            containers += _brackets(body, at, at + _STEP)
        if names <= MAX_NAMES and items <= MAX_CONTAINERS and containers <= MAX_CONTAINERS:
            return
        weight = _outside_of_strings(body, MAX_CONTAINERS)
    if (
        weight is None
        or weight.names > MAX_NAMES
        or weight.items > (len(body) if ids else MAX_ITEMS)
        or weight.containers > MAX_CONTAINERS
    ):
        raise BodyTooLargeError(
            f"the request body has too many values in it: at most {MAX_NAMES} names of fields, {MAX_CONTAINERS} lists and "
            f"objects, {MAX_CONTAINERS} strings, and {MAX_ITEMS} items other than token ids can be read at once"
        )


class _Weight(NamedTuple):
    names: int
    items: int
    containers: int


def _outside_of_strings(body: bytes, most: int) -> _Weight | None:
    """Return what stands outside of strings; None if there are more strings than `most`."""
    names = containers = items = strings = at = 0
    while at < len(body):
        quote = body.find(b'"', at)
        end = len(body) if quote < 0 else quote
        for step in range(at, end, _STEP):
            until = min(step + _STEP, end)
            names += body.count(b":", step, until)
            items += body.count(b",", step, until)
            containers += _brackets(body, step, until)
        strings += 1
        if strings > most:
            return None
        at = behind_string(body, end + 1)
    return _Weight(names, items, containers)


def _brackets(body: bytes, start: int, end: int) -> int:
    return body.count(b"[", start, end) + body.count(b"{", start, end)


def behind_string(body: bytes, at: int) -> int:
    """Return the index after the string that began before `at`; that of the end if it has none."""
    begin = at
    while at < len(body):
        quote = body.find(b'"', at, at + _FAR)
        if quote < 0:
            at += _FAR
            continue
        escapes = quote
        while escapes > begin and body[escapes - 1] == _BACKSLASH:
            escapes -= 1
        if (quote - escapes) % 2 == 0:
            return quote + 1
        at = quote + 1
    return len(body)
