"""Events of one stream that are alike: read by one pattern instead of being decoded.

An engine prints all events of a stream in the same way. Only the values in a few places grow, here between bars:

    data: {"text":"| It|","output_ids":[|1084|],"meta_info":{"id":"r","finish_reason":null,"prompt_tokens":4,
    "num_retractions":0,"output_token_logprobs":[|[-0.25,1084,null]|],"output_token_logprobs_length":|7|,"completion_tokens":|7|}}

If an event has the bytes of a decoded one outside of these places, and values of the same kinds in them, then it has the same
fields, and all other values are the same: it is no end, no error, and of the same weight version. What is left out for a client
is left out by its place, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from router.engines.events import FRAME
from router.engines.json import decode_object

TEXT, IDS, ENTRIES, COMPLETED = "text", "output_ids", "output_token_logprobs", "completion_tokens"
NUMBERS = COMPLETED, "output_token_logprobs_length", "reasoning_tokens"
GROWING = TEXT, IDS, ENTRIES, *NUMBERS
"""The names of the values that grow."""

_PATTERNS = 256
"""Layouts whose patterns are kept: a pattern takes .7 ms to make. An engine has a handful of layouts."""
_MOST_BYTES = 4096
"""The longest layout for which a pattern is made."""

_COUNT = rb"(0|[1-9][0-9]*)"
_SCALAR = rb'("[^"\\]*"|-?[0-9][0-9.eE+-]*)'
_ENTRY = rb"\[-?[0-9][0-9.eE+-]*,[0-9]+,null\]"
_KINDS = {
    TEXT: rb'([^"\\]*(?:\\.[^"\\]*)*)',
    IDS: rb"((?:[0-9]+(?:,[0-9]+)*)?)",
    ENTRIES: rb"((?:%b(?:,%b)*)?)" % (_ENTRY, _ENTRY),
    **dict.fromkeys(NUMBERS, _COUNT),
}
"""For each growing value its pattern: of a text the inside of its quotes, of a list that of its brackets."""
_is_scalar = re.compile(_SCALAR).fullmatch


class EventLayout(NamedTuple):
    """What the events of a layout have in common: `literals` around the values of these `names`, one more than those.

    The values are those that grow, and other strings and numbers of `meta_info`.
    """

    names: tuple[str, ...]
    literals: tuple[bytes, ...]


def layout_of(data: bytes) -> tuple[EventLayout, tuple[bytes, ...]] | None:
    """Return the layout of an event with this payload, and its values; None if engines print no white space where it has some.

    Raises one of JSON_ERRORS, or KeyError, for an event that cannot be read.
    """
    fields = decode_object(data)
    meta = decode_object(fields["meta_info"])
    data = FRAME % data
    if not (TEXT in fields and IDS in fields and COMPLETED in meta):
        return None
    found = []
    scalars = {name: raw for name, raw in meta.items() if name in GROWING or _is_scalar(raw)}
    for name, raw in chain(((name, fields[name]) for name in (TEXT, IDS)), scalars.items()):
        key, value = b'"%b":' % name.encode(), bytes(raw)
        begin = data.find(key) + len(key)
        # Quotes inside of strings are escaped. So a key that is there once is that of this value.
        if data.count(key) != 1 or not data.startswith(value, begin):
            if name in GROWING:
                return None
            continue
        end = begin + len(value)
        if name == TEXT or name in (IDS, ENTRIES):
            if value[:1] + value[-1:] != (b'""' if name == TEXT else b"[]"):
                return None
            begin, end = begin + 1, end - 1
        found.append((begin, end, name))
    found.sort()
    ends = [0, *(end for _, end, _ in found)]
    begins = [*(begin for begin, _, _ in found), len(data)]
    literals = tuple(data[end:begin] for end, begin in zip(ends, begins, strict=True))
    names, values = zip(*((name, data[begin:end]) for begin, end, name in found), strict=True)
    return EventLayout(names, literals), values


@lru_cache(_PATTERNS)
def _pattern(layout: EventLayout) -> re.Pattern[bytes]:
    kinds = (_KINDS.get(name, _SCALAR) for name in layout.names)
    pieces = chain.from_iterable(zip(map(re.escape, layout.literals), chain(kinds, (b"",)), strict=True))
    return re.compile(b"".join(pieces), re.DOTALL)


class EventShape:
    """The events of one stream that are like one of them.

    Attributes:
        names: of the values that grow, in the order of their places.
        text, ids, completed: the places of these values.
        entries: that of the logprobs; None if there are none.
        match: returns the match of an event of the same layout, as it is sent; None for any other event.
        growing, fixed: the groups of a match that grow, and those that have to be the same as `constants`.
    """

    def __init__(self, layout: EventLayout, values: tuple[bytes, ...]) -> None:
        """Make the shape of an event with this layout and these values."""
        numbers = range(len(layout.names))
        growing = [number for number in numbers if layout.names[number] in GROWING]
        fixed = [number for number in numbers if layout.names[number] not in GROWING]
        fixed.append(fixed[0])  # of a single group, a match returns no tuple
        self.names = tuple(layout.names[number] for number in growing)
        self.text, self.ids, self.completed = map(self.names.index, (TEXT, IDS, COMPLETED))
        self.entries = self.names.index(ENTRIES) if ENTRIES in self.names else None
        self.match = _pattern(layout).fullmatch
        self.growing = tuple(number + 1 for number in growing)
        self.fixed = tuple(number + 1 for number in fixed)
        self.constants = tuple(values[number] for number in fixed)
        self._layout = layout

    def __repr__(self) -> str:
        return f"<EventShape {' '.join(self._layout.names)}>"

    @classmethod
    def of(cls, layout: EventLayout, values: tuple[bytes, ...]) -> EventShape | None:
        """Return the shape of an event with this layout and these values; None if comparing would cost more than decoding."""
        named = any(name not in GROWING for name in layout.names)
        return cls(layout, values) if named and sum(map(len, layout.literals)) <= _MOST_BYTES else None

    def cut(self, edit: Callable[[bytes], bytes]) -> EventCut:
        """Return what makes of the values of an event the event with what `edit` makes of its payload.

        `edit` may leave out fields, and what it does depends on no value that grows.
        """
        names = self._layout.names
        marks = {name: _mark(name, number) for number, name in enumerate(self.names)}
        fixed = dict(zip((name for name in names if name not in GROWING), self.constants, strict=False))
        values = [marks[name] if name in marks else fixed[name] for name in names]
        pieces = zip(self._layout.literals, (*values, b""), strict=True)
        whole = b"".join(chain.from_iterable(pieces))
        before, after = FRAME.split(b"%b")
        edited = (FRAME % edit(whole.removeprefix(before).removesuffix(after))).replace(b"%", b"%%")
        shown = [number for number, name in enumerate(self.names) if marks[name] in edited]
        for mark in marks.values():
            edited = edited.replace(mark, b"%b")
        return EventCut(itemgetter(*shown), edited.__mod__)


class EventCut(NamedTuple):
    """An event without some of its fields is `print(choose(values))`: neither is a function of Python."""

    choose: Callable[[Sequence[bytes | bytearray]], Any]
    print: Callable[[Any], bytes]


def _mark(name: str, number: int) -> bytes:
    """Return a value of the kind of this name that stands nowhere else in an event."""
    digits = b"%d" % (8_070_450_532_247_928_832 + number)
    return b"[0.5,%b,null]" % digits if name == ENTRIES else digits
