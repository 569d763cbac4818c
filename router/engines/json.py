"""Reading JSON only as far as needed.

Objects are decoded into their keys and raw values, so what is passed on is byte for byte what came, except for fields that are
taken out or put in. No float is parsed and printed again on its way through. Long lists of numbers become arrays.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

try:
    import simdjson
except ImportError:  # it has no wheel for this version of Python
    simdjson = None  # type: ignore[assignment]

decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
decode_any = msgspec.json.Decoder().decode
NULL = Raw(b"null")

MAX_ITEMS = 500_000
"""Commas. Lists of token ids have more; they have a limit of their own and are parsed one by one."""

_LIST = re.compile(rb"\s*\[")
_NESTED = re.compile(rb"\s*\[\s*\[")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of decoding bytes that are not JSON, not UTF-8, or nested too deeply."""

_PLACE = re.compile(r"\(byte (\d+)\)")
_HIGH = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_NEAR = 32
"""Bytes around the place that a decoder names, within which the escape stands that it cannot read."""
_SHOWN = 24


def json_fault(data: bytes | Raw, error: Exception) -> str:
    """Return the meaning of one of JSON_ERRORS for these bytes, for a person.

    Half a surrogate pair (a client cut a string between the two escapes of one character) is named with its place: decoders
    say of it that the data is truncated.
    """
    said = str(error)
    found = _PLACE.search(said)
    data = bytes(data)
    if not data.strip():
        return "it is empty"
    end = int(found[1]) if found else len(data)
    for half in _HALF.finditer(data, max(0, end - _NEAR), min(len(data), end + _NEAR)):
        escape, at = half[0].decode(), half.start()
        if escape[3] in "cdefCDEF" and _HIGH.fullmatch(data, max(0, at - len(escape)), at):
            continue  # the second half of a pair
        if (at - len(data[:at].rstrip(b"\\"))) % 2:
            continue  # its backslash is escaped itself
        before = data[max(0, at - _SHOWN) : at].decode("utf-8", "replace").lstrip("\ufffd")
        return (
            f"half a surrogate pair, {escape}, at byte {at}, behind {before!r}: a character beyond U+FFFF is written as two"
            " such escapes, so send both of them, or none"
        )
    return said


def split_items(data: bytes) -> list[Raw]:
    """Return the items of a JSON list as they came, also items that are no JSON because of a NaN or Infinity in them.

    Raises one of JSON_ERRORS.
    """
    valid = data.replace(b"NaN", b"0.0").replace(b"Infinity", b"10000000")  # in strings, too: only the places count
    items = _decode_items(valid)
    if valid is data:
        return items
    found, end = [], 0
    for item in items:
        begin = valid.index(item, end)
        end = begin + len(item)
        found.append(Raw(data[begin:end]))
    return found


_decode_items = msgspec.json.Decoder(list[Raw]).decode


def is_null(raw: Raw | None) -> bool:
    """Return whether a field is absent or null."""
    return raw is None or raw == NULL


def is_list(raw: Raw | bytes | None) -> bool:
    """Return whether a value looks like a list."""
    return raw is not None and _LIST.match(raw) is not None


def is_nested(raw: Raw | bytes | None) -> bool:
    """Return whether a value looks like a list whose first item is a list."""
    return raw is not None and _NESTED.match(raw) is not None


# Lists of numbers --------------------------------------------------------------------------------------------------------

# It keeps its buffers, which saves allocating them each time. A second thread gets an error, never the numbers of the first.
_parser = simdjson.Parser() if simdjson else None
_decode_ints = msgspec.json.Decoder(list[int]).decode
_decode_floats = msgspec.json.Decoder(list[float]).decode


class NotNumbersError(Exception):
    """The JSON is not a list of such numbers."""


def read_list(raw: bytes | bytearray, kind: Literal["i", "d"]) -> NDArray[Any]:
    """Read a JSON list of integers (`i`, as int64) or of any numbers (`d`, as the floats that Python reads).

    simdjson does it without a Python object for each number, and ignores brackets inside the list. Raises NotNumbersError.
    """
    try:
        if _parser is None:
            return np.array(_decode_ints(raw), np.int64) if kind == "i" else np.array(_decode_floats(raw), np.float64)
        found = _parser.parse(raw)
        if isinstance(found, simdjson.Array):
            return np.frombuffer(found.as_buffer(of_type=kind), dtype=np.int64 if kind == "i" else np.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError, msgspec.MsgspecError) as error:
        raise NotNumbersError(str(error)) from error
    raise NotNumbersError("not a list")


_SEPARATOR = b",null],["
_BLANK = b",       "
_SIZE = len(_SEPARATOR)


def read_pairs(raw: memoryview) -> NDArray[np.float64]:
    """Read a list like `[[-3.25,13,null],[-0.5,7,null]]`, whose first and last brackets are there. Return a row for each pair.

    Raises NotNumbersError if anything else stands between the numbers. They become one list, in which only the last number is
    followed by a bracket:

        [[-3.25,13,null],[-0.5,7,null]]
         [-3.25,13,       -0.5,7]
    """
    flat = bytearray(raw[1:-6])
    flat[-1] = ord("]")
    begins = (np.frombuffer(flat, dtype=np.uint8) == ord("[")).nonzero()[0][1:]
    begins -= _SIZE - 1
    if len(begins):
        # One item for each place of the text: as many bytes from there on as a separator has.
        places: NDArray[np.bytes_] = np.ndarray((len(flat) - _SIZE + 1,), f"S{_SIZE}", flat, strides=(1,))
        if begins[0] < 0 or places[begins].tobytes() != _SEPARATOR * len(begins):
            raise NotNumbersError("not a list of pairs")
        places[begins] = _BLANK
    numbers = read_list(flat, "d")
    if len(numbers) % 2 or not len(numbers):
        raise NotNumbersError("a number without another")
    return numbers.reshape(-1, 2)
