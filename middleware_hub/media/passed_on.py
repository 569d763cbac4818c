"""Checks bodies that go to a worker as their client wrote them: a worker opens addresses and paths, and it never gets one.

What is refused is the same as in requests that are served here: media that is no data (`media_url`), and fields that only the
router writes (`media_field`). The forms are those of all engines' own paths: parts of messages, items of responses, images of
`/api/chat`, instances of `/vertex_generate`. Whatever else is in a body is the engine's own, and is not looked at.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Mapping
from typing import Any, Final

from middleware_hub.media.errors import MediaError, MediaFieldError, MediaUrlError
from middleware_hub.media.fields import FIELDS, OF_PARTS
from middleware_hub.media.picture import is_digest, read_picture
from router.engines.json import JSON_ERRORS, decode_any, json_fault
from router.errors import BadRequestError

_PICTURES = frozenset("image_url input_image image images image_data".split())
_SOURCES = _PICTURES.union(
    "source file file_data file_url input_file document document_url video video_url video_data input_video "
    "audio audio_url audio_data input_audio".split()
)
"""The keys of media, which are the types of parts, too."""
_HOLDERS = frozenset(
    "messages content output instances requests system prompt text inputs documents query queries items data_1 data_2".split()
)
"""The keys of what may hold parts, and `input` of the body. A call's arguments hold none: an engine only prints them."""
_LABELS = frozenset(
    "type detail format media_type mime_type filename name title context text content citations cache_control id file_id "
    "voice transcript".split()
)
"""The keys of a medium that tell about it, and are not its source."""
_OF_ANY = FIELDS - {"uuid", "features"}
"""Refused wherever parts are; the others mean something else in a message, or in a part of text."""

_KEY = re.compile(b'"(?:%b)"' % b"|".join(name.encode() for name in sorted(_SOURCES | OF_PARTS)))
_ESCAPED = re.compile(rb"\\u00[2-7]")
_STEP: Final = 1 << 20
_LONGEST_KEY: Final = 64
_BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]*={0,2}\s*")
_LONGEST_PATH: Final = 4096
"""Characters: PATH_MAX of Linux."""


def check(body: bytes) -> None:
    """Refuse a body with media that is no data, or with fields of the router's.

    Raises MediaUrlError, MediaFieldError; BadRequestError if it may have media, and is no JSON: others may read it otherwise.
    """
    if not _may_have_media(body):
        return
    try:
        parsed = decode_any(body)
    except JSON_ERRORS as error:
        raise BadRequestError(f"the request body must be JSON: {json_fault(body, error)}") from error
    left: list[tuple[str, Any]] = [("", parsed)]
    if type(parsed) is dict:
        _refuse(FIELDS & parsed.keys(), parsed, "")
        left.append(("input", parsed.get("input")))
    while left:
        place, one = left.pop()
        if type(one) is list:
            left += [(f"{place}[{at}]", inner) for at, inner in enumerate(one)]
        elif type(one) is dict:
            _check_media(place, one)
            left += [(f"{place}.{key}" if place else key, one[key]) for key in _HOLDERS & one.keys()]
            source = one.get("source")
            if type(source) is dict and "content" in source:
                left.append((f"{place}.source.content", source["content"]))


def _may_have_media(body: bytes) -> bool:
    """Return whether a body has such a key, or one that is spelled with escapes or in UTF-16. A text costs no more than this.

    A search for all of it would hold up the event loop from a thread.
    """
    for at in range(0, len(body), _STEP):
        end = at + _STEP + _LONGEST_KEY
        if _KEY.search(body, at, end) or _ESCAPED.search(body, at, end):
            return True
    return b"\x00" in body


def _check_media(place: str, one: Mapping[str, Any]) -> None:
    kind = one.get("type")
    found = _SOURCES & one.keys()
    if (type(kind) is str and kind in _SOURCES) or (found and place):
        _refuse(OF_PARTS & one.keys(), one, place)
    elif place:
        _refuse(_OF_ANY & one.keys(), one, place)
    for key in found:
        given = one[key]
        if key == "source" and (type(given) is not dict and kind != "image"):
            continue  # what a result of a search is from
        if key == "source" and kind == "document" and given.get("type") == "text":
            continue
        picture = key in _PICTURES or kind in _PICTURES
        _check_source(f"{place}.{key}" if place else key, given, picture=picture)


def _check_source(name: str, source: Any, *, picture: bool) -> None:
    left = [source]
    while left:
        given = left.pop()
        if type(given) is str:
            if not _is_data(given, picture=picture):
                raise MediaUrlError(
                    f"`{name}`: media must be sent as base64 or as a data URL: no worker gets an address or a path",
                    param=name,
                )
        elif type(given) is list:
            left += given
        elif type(given) is dict:
            _refuse(OF_PARTS & given.keys(), given, name)
            left += [inner for key, inner in given.items() if key not in _LABELS]


def _is_data(given: str, *, picture: bool) -> bool:
    """Return whether this is a data URL, a digest or bare base64, and so neither an address nor a path."""
    if not given or given.startswith("data:") or is_digest(given):
        return True
    if not _BASE64.fullmatch(given[:_LONGEST_PATH]):
        return False
    if len(given) > _LONGEST_PATH:
        return True
    # Many paths are base64 as well.
    try:
        if picture:
            read_picture(given, _LONGEST_PATH)
        else:
            a2b_base64(given.encode(), strict_mode=True)
    except (MediaError, Base64Error):
        return False
    return picture or not given.startswith("/")


def _refuse(names: frozenset[str], given: Mapping[str, Any], place: str) -> None:
    """Raise MediaFieldError for the first of these fields that asks for something."""
    for name in sorted(names):
        if given[name] not in (None, False, []):
            where = f"{place}.{name}" if place else name
            raise MediaFieldError(f"`{where}` is built by the router: leave it out", param=where)
