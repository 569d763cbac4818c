"""Arguments in a notation that is not JSON but nests as JSON does, translated into JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from middleware_hub.parsers.json_text import DEEPEST
from middleware_hub.parsers.reader import Malformed, Reading, Tags, TextReader


class Notation(NamedTuple):
    """How keys and values are written.

    Attributes:
        openings: the tags that begin a value other than a bare word: braces, brackets and quotes.
        key: reads the key of a member, up to its value, in something that ends with this closer; returns JSON text.
        scalar: reads the value that this opening has begun, or a bare word if there was none; returns JSON text.
        closes: the tags that may end an object or a list.
        follows: the tags of `closes`, and the comma.
    """

    openings: Tags
    closes: Tags
    follows: Tags
    key: Callable[[TextReader, str], Reading[str]]
    scalar: Callable[[TextReader, str], Reading[str]]


def nested(reader: TextReader, closer: str, notation: Notation) -> Reading[str]:
    """Return the JSON text of the object whose opening has been read, and which ends with this closer."""
    spelled, closers = ["{"], [closer]
    first = True
    while closers:
        yield from reader.white()
        closer = ""
        if first:
            closer = yield from reader.maybe(notation.closes)
        if not closer:
            if closers[-1] != "]":
                spelled.append((yield from notation.key(reader, closers[-1])) + ": ")
                yield from reader.white()
            opened = yield from reader.maybe(notation.openings)
            if opened in ("{", "["):
                if len(closers) == DEEPEST:
                    raise Malformed
                spelled.append(opened)
                closers.append("}" if opened == "{" else "]")
                first = True
                continue
            spelled.append((yield from notation.scalar(reader, opened)))
        # After a value, or in something empty: close everything that ends here.
        while closers:
            if not closer:
                yield from reader.white()
                closer = yield from reader.expect(notation.follows)
            if closer == ",":
                spelled.append(", ")
                break
            if closer != closers.pop():
                raise Malformed
            spelled.append("}" if closer == ")" else closer)
            closer = ""
        first = False
    return "".join(spelled)
