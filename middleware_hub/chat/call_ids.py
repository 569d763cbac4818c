"""Ids of tool calls. An id that the router makes names the generation that called, and the place of the call in it.

    call_ 5f1d0c77a2b94e2d81aa 3c90                 of the template's choice, as Mistral's demands: nine letters and digits
          `- the generation -' `- the place         5f1d0c 3c9

The place is the number of the call, scrambled with the generation, so an id that a client has made is hardly ever taken for one
of the router's. Harnesses send ids back unchanged, whatever they do with a turn's text, so an id shows which of several equal
samples a client goes on from, and that calls which a client wrote apart are of one turn.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

_LONG, _SHORT = (20, 4), (6, 3)
"""The hexadecimal digits of the generation and of the place."""
_STEP = 0x9E5
"""An odd number: no two of the first 4,096 calls of a generation have the same place."""
_FIRST = 1000
"""Scrambles the first call, too: one digit throughout is no id of the router's."""
_HEX = frozenset("0123456789abcdef")
MOST_CALLS = 256
"""How many calls of a turn are recognized by their ids."""


class CallPlace(NamedTuple):
    """The meaning of an id: a digest of the generation, and the number of the call in it, from 0."""

    generation: str
    number: int


def call_id(generation_id: str, number: int, *, short: bool = False) -> str:
    """Return the id of the `number`-th call of a generation. `short`: of nine letters and digits."""
    length, more = _SHORT if short else _LONG
    generation = _hex(generation_id, length)
    place = (int(generation, 16) + (number + _FIRST) * _STEP) % 16**more
    return f"{'' if short else 'call_'}{generation}{place:0{more}x}"


def place_of(name: object) -> CallPlace | None:
    """Return the meaning of an id, if the router made it."""
    if not isinstance(name, str):
        return None
    digits = name.removeprefix("call_")
    length, more = _SHORT if digits is name else _LONG
    if len(digits) != length + more or not _HEX.issuperset(digits):
        return None
    generation, size = digits[:length], 16**more
    number = ((int(digits[length:], 16) - int(generation, 16)) * pow(_STEP, -1, size) - _FIRST) % size
    return CallPlace(generation, number) if number < MOST_CALLS else None


def is_of(name: object, generation_id: str) -> bool:
    """Whether a generation has made a call of this id."""
    place = place_of(name)
    return place is not None and place.generation == _hex(generation_id, len(place.generation))


def _hex(text: str, length: int) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()[:length]
