"""The cost of parsing a JSON body, estimated before it is parsed.

A decoder makes an object of every value, in one call that nothing interrupts: thirty million characters of text take it a
fiftieth of a second, thirty million characters of `{},{},{},` ten seconds, in which the router serves no other request. So it
estimates large bodies first, in steps of milliseconds: how many names, brackets and commas stand outside of strings.
"""

from __future__ import annotations

import re

from router.engines.json import MAX_ITEMS
from router.errors import BodyTooLargeError

LIGHT = 256 * 1024
"""Bytes up to which a body is parsed at once: any content takes only milliseconds."""

MAX_NAMES = 50_000
"""Names of fields, in all objects together: half a microsecond each."""

MAX_CONTAINERS = 100_000
"""Lists and objects, and as many strings: a tenth of a microsecond each."""

_STEP = 1 << 20
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def check_weight(body: bytes, *, ids: bool = False) -> None:
    """Raise BodyTooLargeError for a body with more values than can be parsed without holding up other requests.

    `ids`: it may hold any number of token ids. Call this in a thread if the body is larger than `LIGHT`.
    """
    if len(body) <= LIGHT:
        return
    most_items = len(body) if ids else MAX_ITEMS
    # Nearly all bodies pass this, although it counts the insides of strings, too.
    names = containers = items = 0
    for at in range(0, len(body), _STEP):
        names += body.count(b":", at, at + _STEP)
        items += body.count(b",", at, at + _STEP)
        containers += _brackets(body, at, at + _STEP)
    if names <= MAX_NAMES and items <= MAX_CONTAINERS and containers <= MAX_CONTAINERS:
        return
    names = containers = items = strings = at = 0
    while at < len(body):
        quote = body.find(b'"', at)
        end = len(body) if quote < 0 else quote
        names += body.count(b":", at, end)
        items += body.count(b",", at, end)
        containers += _brackets(body, at, end)
        strings += 1
        if names > MAX_NAMES or items > most_items or containers > MAX_CONTAINERS or strings > MAX_CONTAINERS:
            raise BodyTooLargeError(
                f"the request body has too many values in it: at most {MAX_NAMES} names of fields, {MAX_CONTAINERS} lists and "
                f"objects, {MAX_CONTAINERS} strings, and {MAX_ITEMS} items other than token ids can be read at once"
            )
        at = behind_string(body, end + 1)


def _brackets(body: bytes, start: int, end: int) -> int:
    return body.count(b"[", start, end) + body.count(b"{", start, end)


def behind_string(body: bytes, at: int) -> int:
    """Return the index after the string that began before `at`; that of the end if it has none."""
    while at < len(body):
        found = _INSIDE.match(body, at, at + _STEP)
        assert found is not None
        at = found.end()
        if body[at : at + 1] == b'"':
            return at + 1
        if found.end() == found.start():
            at += 2  # the window ends between a backslash and the character that it escapes
    return at
