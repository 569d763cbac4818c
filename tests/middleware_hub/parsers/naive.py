"""The same formats read the plain way: all of the text at once, by recursion, with nothing that waits.

A grammar raises `Fault` where it does not fit, and leaves `at` there: what it went over is text, and reading goes on at `at`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from middleware_hub.chat.messages import SampledCall, Text
from middleware_hub.parsers.base import Sampled

WHITE = " \t\r\n"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPE = re.compile(r'\\(["\\/bfnrt]|u([0-9a-fA-F]{4}))')


class Fault(Exception):
    pass


class Naive:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.trailer = ""
        self.further = ""
        self.again = False

    def has(self, *tags: str) -> str:
        """Goes over the tag that is here."""
        for tag in tags:
            if self.text.startswith(tag, self.at):
                self.at += len(tag)
                return tag
        return ""

    def need(self, *tags: str) -> str:
        found = self.has(*tags)
        if not found:
            raise Fault
        return found

    def char(self) -> str:
        return self.text[self.at : self.at + 1]

    def white(self) -> str:
        begin = self.at
        while self.char() and self.char() in WHITE:
            self.at += 1
        return self.text[begin : self.at]

    def word(self, accepts: Callable[[str], bool]) -> str:
        end = self.at
        while end < len(self.text) and accepts(self.text[end]):
            end += 1
        if not 0 < end - self.at <= 256:
            raise Fault
        begin, self.at = self.at, end
        return self.text[begin:end]

    def name(self, besides: str = "") -> str:
        return self.word(lambda char: not char.isspace() and char not in '<>{}"' + besides)

    def until(self, *tags: str) -> str:
        """Up to and over the first of these tags, which must be the first one named. It is not given back."""
        text, tag = self.up_to(*tags)
        if tag != tags[0]:
            raise Fault
        return text

    def up_to(self, *tags: str) -> tuple[str, str]:
        """The text up to the first of these tags, and the tag."""
        found = [(place, tag) for tag in tags if (place := self.text.find(tag, self.at)) >= 0]
        if not found:
            self.at = len(self.text)
            raise Fault
        place, tag = min(found)
        begin, self.at = self.at, place + len(tag)
        return self.text[begin:place], tag

    def comes(self, *tags: str) -> bool:
        rest = self.text[self.at :].lstrip(WHITE)
        return not rest or rest.startswith(tags)

    def json(self, depth: int = 0) -> str:
        begin = self.at
        if self.char() == '"':
            self.string()
        elif self.char() in ("{", "["):
            if depth == 200:
                raise Fault
            brace = self.need("{", "[")
            close = "}" if brace == "{" else "]"
            self.white()
            while not self.has(close):
                if brace == "{":
                    if self.char() != '"':
                        raise Fault
                    self.string()
                    self.white()
                    self.need(":")
                    self.white()
                self.json(depth + 1)
                self.white()
                if self.has(close):
                    break
                self.need(",")
                self.white()
                if self.char() == close:
                    raise Fault
        elif self.char() and self.char() in "-+.0123456789eE":
            end = self.at
            while end < len(self.text) and self.text[end] in "-+.0123456789eE":
                end += 1
            if end - self.at > 1000 or not NUMBER.fullmatch(self.text, self.at, end):
                raise Fault
            self.at = end
        else:
            self.need("true", "false", "null")
        return self.text[begin : self.at]

    def string(self) -> str:
        self.need('"')
        begin = self.at
        while not self.has('"'):
            if self.char() == "\\":
                escape = ESCAPE.match(self.text, self.at)
                if not escape:
                    raise Fault
                after = escape.end()
                unit = int(escape[2] or "0", 16)
                if 0xD800 <= unit < 0xDC00:
                    low = ESCAPE.match(self.text, after)
                    if not low or not low[2] or not 0xDC00 <= int(low[2], 16) < 0xE000:
                        raise Fault
                    after = low.end()
                elif 0xDC00 <= unit < 0xE000:
                    raise Fault
                self.at = after
            elif not self.char() or self.char() < " ":
                raise Fault
            else:
                self.at += 1
        return self.text[begin : self.at - 1]

    def object(self) -> str:
        if self.char() != "{":
            raise Fault
        return self.json()


def parse(
    text: str,
    call: Callable[[Naive], SampledCall],
    openings: Sequence[str],
    trailer: str | tuple[str, ...] = "",
    bare: str = "",
    further: str = "",
) -> list[Sampled]:
    """All of it. `bare`: what opens a call only at the beginning, or behind another one. `further`: what opens one only behind
    another one, when no trailer came between. A call may say both `trailer` and `further` itself, or that one comes `again`."""
    read, stretches, fresh, inside = Naive(text), list[str | SampledCall]([""]), True, False

    def say(more: str) -> None:
        assert isinstance(stretches[-1], str)
        stretches[-1] += more

    while read.at < len(text):
        begin = read.at
        again = inside and read.again
        if fresh and bare and read.char() in WHITE and not again:
            say(read.white())
            continue
        opens = any(text.startswith(tag, begin) for tag in openings) or (fresh and bare and read.char() == bare)
        more = further or read.further
        opens = opens or again or (inside and more != "" and text.startswith(more, begin))
        fresh = inside = False
        read.again = again
        if not opens:
            read.at += 1
            say(text[begin : read.at])
            continue
        try:
            found = call(read)
        except Fault:
            say(text[begin : read.at])
            continue
        stretches += [found, ""]
        fresh = inside = True
        ends = (trailer,) if isinstance(trailer, str) else trailer
        ends = tuple(filter(None, (*ends, read.trailer)))
        if ends:
            white = read.white()
            inside = not read.has(*ends)
            if inside:
                say(white)
    return without_margins(stretches)


def without_margins(stretches: Sequence[str | SampledCall]) -> list[Sampled]:
    found: list[Sampled] = []
    for number, stretch in enumerate(stretches):
        if isinstance(stretch, SampledCall):
            found.append(stretch)
            continue
        last = number == len(stretches) - 1
        if not stretch.strip(WHITE) and len(stretches) > 1:
            continue
        said = stretch if last else stretch.rstrip("\r\n")
        if said:
            found.append(Text(said))
    return found


def think(text: str, begin: str, end: str, *, inside: bool) -> tuple[str, str]:
    """Reasoning and text."""
    bare = text.lstrip(WHITE)
    if bare.startswith(begin):
        text = bare[len(begin) :]
    elif not inside:
        return "", text
    thought, found, said = text.partition(end)
    thought = thought.lstrip("\r\n")
    return thought.rstrip("\r\n") if found else thought, said.lstrip("\r\n")
