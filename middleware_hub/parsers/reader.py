"""Text that arrives in pieces, and grammars that wait at its end.

A grammar is a generator. It reads with the methods here, and stops at a `yield` where the text so far is not enough to
decide; it is resumed when there is more. It leaves unread what it cannot accept, and raises `Malformed`:

    read, kept in `taken()`         unread: at most the start of a token, when a grammar waits
    <tool_call>{"name": "f", "argum|ents
    ^ begin()                       ^ at
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A piece of grammar: waits for text at each `yield`, and returns the part that it read."""

WHITE = " \t\r\n"
LONGEST_RUN = 256

_WHITE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text that was read does not match the grammar, or only a part of it does."""


class Tags:
    """Literals to separate from other text. None of them may be the beginning of another one."""

    def __init__(self, *tags: str) -> None:
        self.tags = tags
        # One search finds what comes first: a whole tag, or the beginning of a tag at the end of the text.
        begun = "|".join(_beginning(tag) for tag in tags if len(tag) > 1)
        whole = "|".join(map(re.escape, tags))
        self.pattern = re.compile(rf"({whole})" + (rf"|(?:{begun})\Z" if begun else ""))

    def __repr__(self) -> str:
        return f"Tags{self.tags}"

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """Return the first tag, or beginning of one, from `at` on."""
        if len(self.tags) == 1:
            # `find` passes over other text ten times as fast as a pattern. If no tag is whole, one may begin at the end.
            (tag,) = self.tags
            place = text.find(tag, at)
            at = place if place >= 0 else max(at, len(text) - len(tag) + 1)
        return self.pattern.search(text, at)


def _beginning(tag: str) -> str:
    """Return a pattern of the beginnings of a tag, from its first character up to all but its last."""
    pattern = ""
    for char in reversed(tag[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(tag[0]) + pattern


class TextReader:
    """Reads text that arrives in pieces, see the module."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._begin = 0
        self._kept: list[str] = []

    def __repr__(self) -> str:
        return f"TextReader(unread={self.text[self.at :]!r}, ended={self.ended})"

    def feed(self, text: str) -> None:
        """Add text. The part that was read leaves the window, so that a long call is not copied for every piece."""
        if self._begin < self.at:
            self._kept.append(self.text[self._begin : self.at])
        self.text = self.text[self.at :] + text
        self._begin = self.at = 0

    def end(self) -> None:
        self.ended = True

    def begin(self) -> None:
        """Forget the text that was read."""
        self._kept.clear()
        self._begin = self.at

    def taken(self) -> str:
        """Return everything that was read since `begin`."""
        return "".join(self._kept) + self.text[self._begin : self.at]

    def more(self) -> Reading[None]:
        """Wait for text. Raises Malformed at its end."""
        if self.ended:
            raise Malformed
        yield

    def at_end(self) -> Reading[bool]:
        """Return whether the whole text has been read and no more will come."""
        while self.at == len(self.text):
            if self.ended:
                return True
            yield
        return False

    def white(self) -> Reading[str]:
        pieces = []
        while True:
            found = _WHITE.match(self.text, self.at)
            assert found is not None, "it also matches the empty string"
            pieces.append(found[0])
            self.at = found.end()
            if self.ended or self.at < len(self.text):
                return "".join(pieces)
            yield

    def maybe(self, tags: Tags) -> Reading[str]:
        """Read the next tag. If no tag comes next, return an empty string and read nothing."""
        while True:
            found = tags.pattern.match(self.text, self.at)
            if found is not None and found[1]:
                self.at = found.end()
                return found[1]
            if self.ended or (found is None and self.at < len(self.text)):
                return ""
            yield

    def expect(self, tags: Tags) -> Reading[str]:
        """Read the next tag. If no tag comes next, raise Malformed and read nothing."""
        found = yield from self.maybe(tags)
        if not found:
            raise Malformed
        return found

    def comes(self, tags: Tags) -> Reading[bool]:
        """Return whether white space and then one of these tags comes next, or the end of the text. Reads nothing."""
        while True:
            white = _WHITE.match(self.text, self.at)
            assert white is not None, "it also matches the empty string"
            found = tags.pattern.match(self.text, white.end())
            if found is not None and found[1]:
                return True
            if white.end() == len(self.text):
                if self.ended:
                    return True
            elif self.ended or found is None:
                return False
            yield

    def run(self, pattern: re.Pattern[str], longest: int = LONGEST_RUN) -> Reading[str]:
        """Read one or more characters of a class. If there are none or too many, raise Malformed and read nothing."""
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
        """Read the text that certainly precedes the next tag. Return it, and the tag if it is complete; the tag is not read."""
        found = tags.search(self.text, self.at)
        tag = "" if found is None else found[1] or ""
        end = len(self.text) if found is None or (self.ended and not tag) else found.start()
        before = self.text[self.at : end]
        self.at = end
        return before, tag

    def until(self, tags: Tags) -> Reading[str]:
        """Read everything before the next tag. Raises Malformed if there is none."""
        pieces = []
        while True:
            before, tag = self.ahead(tags)
            pieces.append(before)
            if tag:
                return "".join(pieces)
            yield from self.more()
