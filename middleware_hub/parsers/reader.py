"""Text that comes in pieces, and grammars that wait where it ends.

A grammar is a generator. It reads with the methods here, straight on, and stops at a `yield` where the text that has come is
not enough to decide; it is resumed when there is more. What it cannot accept it leaves unread, and raises `Malformed`:

    read, kept in `taken()`         unread: the start of a token at most, when a grammar waits
    <tool_call>{"name": "f", "argum|ents
    ^ begin()                       ^ at
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A piece of grammar: waits for text at each `yield`, and returns what it read."""

WHITE = " \t\r\n"
LONGEST_RUN = 256

_WHITE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """What has been read is not, or not the whole of, what the grammar describes."""


class Tags:
    """Literals to be told from other text. None of them may be the beginning of another one."""

    def __init__(self, *tags: str) -> None:
        self.tags = tags
        # One search finds whichever comes first: a whole tag, or at the very end of the text the beginning of one.
        begun = "|".join(_beginning(tag) for tag in tags if len(tag) > 1)
        whole = "|".join(map(re.escape, tags))
        self.pattern = re.compile(rf"({whole})" + (rf"|(?:{begun})\Z" if begun else ""))

    def __repr__(self) -> str:
        return f"Tags{self.tags}"


def _beginning(tag: str) -> str:
    """A pattern of the beginnings of a tag, from its first character up to all but its last."""
    pattern = ""
    for char in reversed(tag[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(tag[0]) + pattern


class Reader:
    """See the module."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._begin = 0
        self._kept: list[str] = []

    def __repr__(self) -> str:
        return f"Reader(unread={self.text[self.at :]!r}, ended={self.ended})"

    def feed(self, text: str) -> None:
        """More has come. What was read leaves the window, so that a long call is not copied at every piece."""
        if self._begin < self.at:
            self._kept.append(self.text[self._begin : self.at])
        self.text = self.text[self.at :] + text
        self._begin = self.at = 0

    def end(self) -> None:
        """No more will come."""
        self.ended = True

    def begin(self) -> None:
        """Forget what was read."""
        self._kept.clear()
        self._begin = self.at

    def taken(self) -> str:
        """All that was read since `begin`."""
        return "".join(self._kept) + self.text[self._begin : self.at]

    def more(self) -> Reading[None]:
        """Wait. Malformed if the text is over."""
        if self.ended:
            raise Malformed
        yield

    def at_end(self) -> Reading[bool]:
        """Whether all has been read that there will ever be."""
        while self.at == len(self.text):
            if self.ended:
                return True
            yield
        return False

    def white(self) -> Reading[str]:
        """White space, if there is any."""
        pieces = []
        while True:
            found = _WHITE.match(self.text, self.at)
            assert found is not None, "it matches nothing, too"
            pieces.append(found[0])
            self.at = found.end()
            if self.ended or self.at < len(self.text):
                return "".join(pieces)
            yield

    def maybe(self, tags: Tags) -> Reading[str]:
        """The tag that comes next; empty if none does, and then nothing is read."""
        while not (yield from self.at_end()):
            found = tags.pattern.match(self.text, self.at)
            if found is not None and found[1]:
                self.at = found.end()
                return found[1]
            if found is None or self.ended:
                return ""
            yield
        return ""

    def expect(self, tags: Tags) -> Reading[str]:
        """The tag that comes next. Malformed if none does, and then nothing is read."""
        found = yield from self.maybe(tags)
        if not found:
            raise Malformed
        return found

    def run(self, pattern: re.Pattern[str], longest: int = LONGEST_RUN) -> Reading[str]:
        """What matches: one or more of a class of characters. Malformed if there are none or too many: nothing is read."""
        while not (yield from self.at_end()):
            found = pattern.match(self.text, self.at)
            if found is None or found.end() - self.at > longest:
                raise Malformed
            if self.ended or found.end() < len(self.text):
                self.at = found.end()
                return found[0]
            yield
        raise Malformed

    def ahead(self, tags: Tags) -> tuple[str, str]:
        """What certainly stands before the next tag, which is read; and that tag, which is not, if all of it is there."""
        found = tags.pattern.search(self.text, self.at)
        tag = "" if found is None else found[1] or ""
        end = len(self.text) if found is None or (self.ended and not tag) else found.start()
        before = self.text[self.at : end]
        self.at = end
        return before, tag

    def until(self, tags: Tags) -> Reading[str]:
        """All that stands before the next tag, which is not read. Malformed if there is none."""
        pieces = []
        while True:
            before, tag = self.ahead(tags)
            pieces.append(before)
            if tag:
                return "".join(pieces)
            yield from self.more()
