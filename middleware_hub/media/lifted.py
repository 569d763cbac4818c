"""A body without its pictures: each is taken out of the JSON text, and its digest stands in its place.

    body      {"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBOR..."}}]}]}
    outline   {"messages":[{"content":[{"type":"image_url","image_url":{"url":"MARK0"}}]}]}
    lifted    {"messages":[{"content":[{"type":"image_url","image_url":{"url":"sha256:3b5c..."}}]}]}

A digest means the same as the data, in every form of request. So all that comes later (the limits of text, parsers, memos)
works on a short body, whatever the pictures weigh, and the file is decoded and hashed once.

Long strings and addresses are cut out of the body before it is parsed: the outline has a mark in place of each. The mark is
random, so no client can write it. Where a picture can stand, the parsed outline tells. What stands elsewhere (a tool's
arguments) stays as it is. Malformed JSON raises nothing here: whoever parses the body reports it.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from middleware_hub.media.errors import MediaError
from middleware_hub.media.part import given_in, is_image
from middleware_hub.media.picture import Picture, is_digest, read_picture
from router.engines.form.media import IMAGES
from router.engines.json import JSON_ERRORS, decode_any
from router.engines.json_cost import LIGHT, behind_string

_LONG: Final = 128
"""Bytes of a string that may be a picture. A smaller one is left to the parser."""
MODERATE: Final = 8 * 1024 * 1024
"""Bytes of a body that may be passed over on the event loop, as often as it takes to find what it holds: a millisecond each."""
FEW: Final = 2_000
"""Strings to look at there, half a microsecond each: those of 250 messages."""
_QUOTE, _BACKSLASH = b'"', ord("\\")


class LiftedBody(NamedTuple):
    """A body, and what was lifted out of it.

    Attributes:
        body: with a digest in place of each picture.
        original: as it came.
        pictures: by digest.
    """

    body: bytes
    original: bytes
    pictures: Mapping[str, Picture]


class PictureString(NamedTuple):
    """A string of a body in which a picture stands: from `start` to `end`, `name` for errors."""

    start: int
    end: int
    name: str


class Outline(NamedTuple):
    """A body with the mark and a number in place of each long string, and where these begin and end in the body."""

    mark: str
    text: bytes
    strings: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, body: bytes) -> Outline:
        found = cls._of(body, sys.maxsize, sys.maxsize)
        assert found is not None
        return found

    @classmethod
    def light(cls, body: bytes) -> Outline | None:
        """Return the outline of a body that nearly all consists of a few long strings; None for any other.

        It is made in a millisecond or two, and the body itself can be parsed as fast as one of `LIGHT` bytes: a parser takes
        its time for each value, and copies strings.
        """
        return cls._of(body, FEW, LIGHT) if len(body) <= MODERATE else None

    @classmethod
    def _of(cls, body: bytes, most_strings: int, most_text: int) -> Outline | None:
        """Return the outline. None if the body has more strings, long or not, or the outline would be longer."""
        mark = secrets.token_hex(12)
        marked = mark.encode()
        parts, strings, done, at = list[bytes](), list[tuple[int, int]](), 0, 0
        left, passed = len(body), 0
        while (start := body.find(_QUOTE, at) + 1) > 0:
            end = body.find(_QUOTE, start)
            if end < 0:
                break
            if body[end - 1] == _BACKSLASH:
                end = behind_string(body, start) - 1
            passed += 1
            if passed > most_strings:
                return None
            if end - start > _LONG or body[start : start + 4].lower() == b"http":
                parts += (body[done:start], b"%b%d" % (marked, len(strings)))
                strings.append((start, end))
                left -= end - start
                done = end
            at = end + 1
        if left > most_text:
            return None
        return cls(mark, b"".join((*parts, body[done:])), strings)


def places(outline: Outline) -> list[PictureString]:
    """Return the strings of a body that are pictures by data or by address, in order; none if the body is no JSON object.

    Args:
        outline: that of the body of a chat in any dialect, or of one with `image_data`.
    """
    mark, strings, found = outline.mark, outline.strings, []
    if not strings:
        return []
    try:
        parsed = decode_any(outline.text)
    except JSON_ERRORS:
        return []
    for name, given in _pictures(parsed) if type(parsed) is dict else ():
        if type(given) is str and given.startswith(mark):
            found.append(PictureString(*strings[int(given[len(mark) :])], name))
    return sorted(found)


def address(body: bytes, place: PictureString) -> str | None:
    """Return the address that stands at a place; None if it is none."""
    if body[place.start : place.start + 5].lower() not in (b"http:", b"https"):
        return None
    try:
        return str(msgspec.json.decode(body[place.start - 1 : place.end + 1], type=str))
    except JSON_ERRORS:
        return None


def picture_at(body: bytes, place: PictureString, max_bytes: int) -> Picture | None:
    """Return the picture at a place; None if a digest stands there. Raises MediaError that names the place."""
    if body.startswith(b"sha256:", place.start) and is_digest(body[place.start : place.end].decode("latin-1")):
        return None
    try:
        if body.find(b"\\", place.start, place.end) >= 0:  # some encoders write \/ for the slashes of base64
            return read_picture(msgspec.json.decode(body[place.start - 1 : place.end + 1], type=str), max_bytes)
        return read_picture(memoryview(body)[place.start : place.end], max_bytes)
    except MediaError as error:
        raise type(error)(f"`{place.name}`: {error.message}", param=place.name) from None
    except JSON_ERRORS:
        return None


def without(body: bytes, found: Mapping[PictureString, Picture]) -> LiftedBody:
    """Return the body with the digests of these pictures in their places."""
    parts, done = list[bytes](), 0
    for place, picture in sorted(found.items(), key=lambda one: one[0].start):
        parts += (body[done : place.start], picture.digest.encode())
        done = place.end
    return LiftedBody(b"".join((*parts, body[done:])), body, {one.digest: one for one in found.values()})


def _pictures(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what names a picture, with its place, as clients write it."""
    given = body.get(IMAGES)
    for number, one in enumerate(given if type(given) is list else [given]):
        if type(one) is list:
            yield from ((f"{IMAGES}[{number}][{at}]", each) for at, each in enumerate(one))
        else:
            yield f"{IMAGES}[{number}]" if type(given) is list else IMAGES, one
    for name in ("messages", "input"):
        listed = body.get(name)
        for number, item in enumerate(listed if type(listed) is list else ()):
            for field in ("content", "output"):
                if type(item) is dict:
                    yield from _parts(f"{name}[{number}].{field}", item.get(field))
    for place, holder in (("", body), *((f"{field}.", body.get(field)) for field in _COUNTED)):
        contents = holder.get("contents") if isinstance(holder, dict) else None
        for number, content in enumerate(contents if type(contents) is list else [contents]):
            yield from _googles(f"{place}contents[{number}]", content)


def _parts(name: str, content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the pictures of a content, and of the results in it (Anthropic's)."""
    for at, part in enumerate(content if type(content) is list else ()):
        if is_image(part):
            yield f"{name}[{at}]", given_in(part)
        elif type(part) is dict and part.get("type") == "tool_result":
            yield from _parts(f"{name}[{at}].content", part.get("content"))


def _googles(name: str, content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the pictures of a content, and of the results in it (Google's), whose `parts` may be one part alone."""
    for place, part in _parts_of(name, content):
        yield from _blobs(place, part)
        for field in ("functionResponse", "function_response"):
            for inner, one in _parts_of(f"{place}.{field}", part.get(field)):
                yield from _blobs(inner, one)


def _parts_of(name: str, content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    parts = content.get("parts") if type(content) is dict else None
    for at, part in enumerate(parts if type(parts) is list else [parts]):
        if type(part) is dict:
            yield f"{name}.parts[{at}]", part


def _blobs(place: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for field, key, older in _BLOBS:
        blob = part.get(field)
        if type(blob) is not dict:
            continue
        if str(blob.get("mimeType", blob.get("mime_type", "image/"))).lower().startswith("image/"):
            yield f"{place}.{field}.{key}", blob.get(key, blob.get(older))


_COUNTED: Final = ("generateContentRequest", "generate_content_request")
"""The field of Google's `countTokens` that may have all of what is counted, in both spellings."""
_BLOBS: Final = (
    *((field, "data", "data") for field in ("inlineData", "inline_data")),
    *((field, "fileUri", "file_uri") for field in ("fileData", "file_data")),
)
"""What a picture stands in, and the field there that has it, in both spellings."""
