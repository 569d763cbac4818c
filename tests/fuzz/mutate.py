"""From a good body to a bad one, a few microseconds each: a step is a change of the JSON, or of its bytes."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import msgspec

from tests.fuzz.atoms import ATOMS, Json

_KINDS = [kind for _, kind in ATOMS]
_SHARES = [share for share, _ in ATOMS]
_DEEP_ENOUGH = 0.35  # how often a container is changed itself and not what is in it
_MARKS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\x00", b"\n", b"e9", b"-")
_LARGEST = 400_000  # bytes; the limit of the applications that are tried is below that


def atom(rng: random.Random) -> Json:
    """Any value."""
    found = rng.choice(rng.choices(_KINDS, _SHARES)[0])
    return copy.deepcopy(found) if isinstance(found, list | dict) else found


class Mutator:
    """Changes bodies.

    Args:
        words: keys that mean something, somewhere.
        bodies: others that may stand inside of one, as JSON.
    """

    def __init__(self, words: Sequence[str], bodies: Sequence[bytes]) -> None:
        self._words = list(words)
        self._bodies = list(bodies)

    def json(self, value: Json, rng: random.Random, steps: int) -> Json:
        """So many changes; what is given may be changed in place."""
        for _ in range(steps):
            if not isinstance(value, dict | list) or not value or rng.random() < 0.04:
                value = self._other(value, rng)
            else:
                self._inside(value, rng)
        return value

    def _inside(self, holder: Json, rng: random.Random) -> None:
        """One change, somewhere in a container that is not empty."""
        while True:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = rng.choice(keys)
            child = holder[key]
            if not isinstance(child, dict | list) or not child or rng.random() < _DEEP_ENOUGH:
                break
            holder = child
        way = rng.random()
        if way < 0.62:
            holder[key] = self._other(child, rng)
        elif way < 0.72:
            del holder[key]
        elif way < 0.92 and isinstance(holder, dict):
            holder[rng.choice(self._words)] = atom(rng)
        elif isinstance(holder, dict):
            other = rng.choice(keys)
            holder[key], holder[other] = holder[other], holder[key]
        elif way < 0.92:
            holder.insert(rng.randint(0, len(holder)), atom(rng) if rng.random() < 0.6 else child)
        else:
            holder *= rng.choice((2, 3, 7))

    def _other(self, value: Json, rng: random.Random) -> Json:
        """Something in the place of a value."""
        way = rng.random()
        if way < 0.5:
            return atom(rng)
        if way < 0.58:
            return [value]
        if way < 0.62:
            return {rng.choice(self._words): value}
        if way < 0.68:
            return msgspec.json.decode(rng.choice(self._bodies))
        if way < 0.72:
            return str(value)
        if isinstance(value, str):
            return self._text(value, rng)
        if isinstance(value, bool) or value is None:
            return not value
        if isinstance(value, int | float):
            return rng.choice((value + 1, value - 1, -value, value * 2, value + 0.5, value * 2**31, float(value)))
        if isinstance(value, list) and value:
            return rng.choice((value[0], value[:1], value[1:], value[::-1], value * 2))
        if isinstance(value, dict) and value:
            return rng.choice((list(value), list(value.values()), [value, value]))
        return atom(rng)

    def _text(self, text: str, rng: random.Random) -> str:
        at = rng.randint(0, len(text))
        piece = atom(rng)
        return rng.choice(
            (text[:at], text[at:], text + text, text[:at] + (piece if isinstance(piece, str) else "�") + text[at:])
        )

    def written(self, value: Json, rng: random.Random) -> bytes:
        """As JSON. Rarely with a key that is there twice, or with more space than it needs."""
        written = msgspec.json.encode(value)
        way = rng.random()
        if way < 0.04 and isinstance(value, dict) and value:
            again = msgspec.json.encode({rng.choice(list(value)): atom(rng)})
            first, second = rng.sample((written, again), 2)
            return first[:-1] + b"," + second[1:]
        return written.replace(b",", b" ,\r\n\t") if way < 0.06 else written

    def bytes(self, body: bytes, rng: random.Random) -> bytes:
        """One change of the bytes."""
        size = len(body)
        begin = rng.randint(0, size)
        end = min(size, begin + rng.choice((1, 1, 1, 2, 8, 100)))
        match rng.randrange(14):
            case 0 | 1:
                return body[:begin]
            case 2 | 3:
                return body[:begin] + bytes([rng.randrange(256)]) + body[begin + 1 :]
            case 4:
                flipped = bytearray(body)
                for _ in range(rng.choice((1, 2, 20)) if size else 0):
                    flipped[rng.randrange(size)] ^= 1 << rng.randrange(8)
                return bytes(flipped)
            case 5:
                return body[:begin] + rng.randbytes(rng.choice((1, 2, 4, 64))) + body[begin:]
            case 6:
                return body[:begin] + body[end:]
            case 7:
                return body[:end] + body[begin:]
            case 8:
                return body[:begin] + rng.choice(_MARKS) + body[begin:]
            case 9:
                return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b" " * 300, b"\x1e", b"//\n", b")]}'\n")) + body
            case 10:
                return body + rng.choice((body[:_LARGEST], b"\n", b"\x00", b"}", b"]", b"x", b" " * 300))
            case 11:
                return body.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-16-le", "utf-32")))
            case 12:
                return rng.choice((b"", b"null", b"[]", b"{}", b'""', b"0", b"text=a&b=c", b"[" + body + b"]"))
            case _:
                return body[begin:]
