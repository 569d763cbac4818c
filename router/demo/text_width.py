"""How wide a text is on a terminal: characters of East Asia take two cells, and marks that go on others none."""

from __future__ import annotations

import unicodedata


def width(text: str) -> int:
    """In cells."""
    return sum(_cells(character) for character in text)


def padded(text: str, cells: int) -> str:
    """With spaces behind it up to this width."""
    return text + " " * (cells - width(text))


def shortened(text: str, cells: int) -> str:
    """As much of it as fits, with an ellipsis if that is not all."""
    if width(text) <= cells:
        return text
    used = 0
    for at, character in enumerate(text):
        used += _cells(character)
        if used > cells - 1:
            return text[:at].rstrip() + "…"
    return text


def folded(text: str, cells: int, lines: int) -> list[str]:
    """At most so many lines, broken between words; the last one shortened if that is not all."""
    found = [""]
    for word in text.split(" "):
        longer = f"{found[-1]} {word}" if found[-1] else word
        if width(longer) > cells and found[-1] and len(found) < lines:
            found.append(word)
        else:
            found[-1] = longer
    return [shortened(line, cells) for line in found]


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Cc", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
