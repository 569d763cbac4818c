"""Messages and tools in the internal form, whatever their dialect.

The form is canonical with respect to what a client's SDK may change on a round trip: a reply that is sent back is the same
message as the one that was sampled. So a missing text is None with tool calls and `""` without them, keys without a value are
left out, a lone part of text is its string, the model's text is one string, and arguments are objects.

Several parts of other authors stay parts: rendering knows whether a template can show them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from middleware_hub.chat.call_ids import CallPlace, place_of
from middleware_hub.chat.memo import Memo, Recalled
from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.dialects.fields import RAWS, Fields, string, unsupported, wrong
from middleware_hub.media.errors import MediaError, MediaInvalidError
from middleware_hub.media.fields import check_part
from middleware_hub.media.part import ImagePart, given_in, is_image
from middleware_hub.media.picture import is_digest, read_picture
from router.engines.json import JSON_ERRORS, decode_any, json_fault
from router.errors import BadRequestError

BILLING = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts into its system prompt. It differs with every request."""
MOST_BYTES = 1 << 28
"""Of the file of a picture, where it is read; the limit of `--media-max-image-bytes` is checked later."""
_MEDIA = {"image_url", "input_image", "image", "video", "video_url", "audio", "audio_url", "input_audio", "input_video"}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts that are text, and the key of the text: clients mix the types of chats and of responses."""


class UnreadMediaError(BadRequestError):
    """A part is an image, sound or a video where only text is read. A model that sees has another word for it."""


class OpenedBody(NamedTuple):
    """A body taken apart.

    Attributes:
        rest: all fields except `messages`, or the request into which they were parsed earlier.
        listed: its messages, except those that are recalled. At least one is listed.
        recalled: the known part of its messages.
    """

    rest: Fields | ChatRequest
    listed: list[Raw]
    recalled: Recalled | None


def open_body(body: bytes, memo: Memo | None) -> OpenedBody:
    """Take a body apart. Raises BadRequestError."""
    recalled = None if memo is None else memo.recall(body)
    if recalled is not None:
        # If anything is wrong, reading the whole body reports the fault with its true place.
        with suppress(BadRequestError, *JSON_ERRORS):
            if recalled.request is not None:
                return OpenedBody(recalled.request, RAWS.decode(recalled.body), recalled)
            fields = Fields(recalled.body)
            listed = fields.need("messages", RAWS)
            if len(listed) > 1 and bytes(listed[0]) == recalled.mark:
                return OpenedBody(fields, listed[1:], recalled)
    fields = Fields(body)
    listed = fields.need("messages", RAWS)
    if not listed:
        raise BadRequestError("`messages` is empty: give at least one message", param="messages")
    return OpenedBody(fields, listed, None)


def each_message(
    opened: OpenedBody, read: Callable[[str, dict[str, Any]], Sequence[Message]]
) -> list[Sequence[Message]]:
    """Return the messages that `read` makes of each listed entry and its place."""
    found = []
    for at, raw in enumerate(opened.listed, 0 if opened.recalled is None else opened.recalled.items):
        place = f"messages[{at}]"
        try:
            wrote = decode_any(raw)
        except JSON_ERRORS as error:
            raise BadRequestError(f"`{place}` cannot be read: {json_fault(raw, error)}", param=place) from error
        if type(wrote) is not dict:
            raise wrong(place, wrote, "an object")
        found.append(read(place, wrote))
    return found


def whole_request(
    body: bytes,
    opened: OpenedBody,
    request: ChatRequest,
    read: Sequence[Sequence[Message]],
    *,
    memo: Memo | None,
    continue_final: bool,
) -> ChatRequest:
    """Return the request of a body with all of its messages: its own first, then the recalled and the listed messages.

    Args:
        request: the request of all other fields, as for `Memo.keep`.
        read: the messages of each listed entry.
    """
    read = rejoined(read)
    if memo is None:
        messages = [*request.messages, *chain.from_iterable(read)]
    else:
        messages = memo.keep(body, request, opened.listed, read, opened.recalled)
    return msgspec.structs.replace(request, messages=messages, continue_final=continue_final)


def rejoined(listed: Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return the messages of each entry of a request, with the calls of one turn in one message.

    Some harnesses write parallel calls one after the other, each with its result. Their ids say that they are one turn:

        a(call 1), result 1, a(call 2), result 2        becomes        a(call 1, call 2), result 1, result 2

    The first entry has the turn then, and the results up to its last call; the entries up to that have no message.
    """
    found = list(listed)
    for begin, messages in enumerate(found):
        if not messages or not messages[-1].get("tool_calls"):
            continue
        turn, place = messages[-1], place_of(messages[-1]["tool_calls"][-1].get("id"))
        results: list[Message] = []
        end, waiting = begin + 1, list[Message]()
        for at in range(begin + 1, len(found)):
            *before, last = found[at] or [{}]
            if last.get("role") == "tool" and all(one.get("role") == "tool" for one in before):
                waiting += found[at]
            elif place is None or before or not _goes_on(turn, last, place):
                break
            else:
                calls = [*turn["tool_calls"], *last["tool_calls"]]
                turn = {**turn, "content": turn.get("content") or last.get("content"), "tool_calls": calls}
                place = place_of(calls[-1].get("id"))
                results += waiting
                waiting, end = [], at + 1
        if end > begin + 1:
            found[begin] = [*messages[:-1], turn, *results]
            found[begin + 1 : end] = [()] * (end - begin - 1)
    return found


def _goes_on(turn: Message, message: Message, place: CallPlace) -> bool:
    """Whether a message has the next calls of a turn, and no words of its own."""
    if not message.get("tool_calls") or (message.get("content") or None) not in (None, turn.get("content")):
        return False
    following = place_of(message["tool_calls"][0].get("id"))
    return following == CallPlace(place.generation, place.number + 1)


def assistant_message(content: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()) -> Message:
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(call_id: str | None, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **call} if call_id else call


def told(place: str, content: Any) -> str | list[Message] | None:
    """Return the `content` of a system prompt or a user, as `written` does, without lines that are about billing.

    With them, no request would continue another one.
    """
    if type(content) is str:
        return without_billing(content) if BILLING in content else content
    parts = _with_images(place, content)
    if parts is not None:
        texts_left = [{**one, "text": without_billing(one["text"])} if "text" in one else one for one in parts]
        return [one for one in texts_left if one.get("text") != ""]
    texts = _texts(place, content)
    return None if texts is None else _parts(list(filter(None, map(without_billing, texts))))


def without_billing(text: str) -> str:
    """Return a text without Claude Code's lines about billing; all else stays.

    Lines at the end go with the end of the line before them. Lines are split, because a pattern would try each character, which
    takes fifty times as long.
    """
    if BILLING not in text:
        return text
    lines = text.split("\n")
    kept = [line for line in lines if not (BILLING in line and line.lstrip(" \t").startswith(BILLING))]
    if kept and kept[-1] != lines[-1]:
        kept[-1] = kept[-1].removesuffix("\r")
    return "\n".join(kept)


def written(place: str, content: Any) -> str | list[Message] | None:
    """Return the `content` of an author other than the model: a string, several parts of text, or None if it is empty.

    Raises BadRequestError for anything else; with the code `unsupported_content` for a part that is not text.
    """
    if type(content) is str:
        return content
    parts = _with_images(place, content)
    if parts is not None:
        return parts
    texts = _texts(place, content)
    return None if texts is None else _parts(texts)


def _with_images(place: str, content: Any) -> list[Message] | None:
    """Return the parts of a content with pictures; None if it has none. Raises BadRequestError for other parts."""
    if type(content) is not list or not any(map(is_image, content)):
        return None
    parts: list[Message] = []
    for at, part in enumerate(content):
        where = f"{place}[{at}]"
        if is_image(part):
            parts.append(_image(where, part))
        elif text := part_text(where, part):
            parts.append({"type": "text", "text": text})
    return parts


def _image(place: str, part: dict[str, Any]) -> ImagePart:
    """Read a picture: `image_url` of chats, `input_image` of responses, or Anthropic's `image`. See `ImagePart` for faults."""
    try:
        check_part(part)
        given = _given(part)
        if is_digest(given):
            return ImagePart(place, part["type"], given)
        picture = read_picture(given, MOST_BYTES)
    except MediaError as error:
        return ImagePart(place, part["type"], "", fault=type(error)(f"`{place}`: {error.message}", param=place))
    return ImagePart(place, part["type"], picture.digest, picture)


def _given(part: dict[str, Any]) -> str:
    """Return the data URL, the base64 or the digest of a picture."""
    given = given_in(part)
    if type(given) is not str:
        raise MediaInvalidError(
            'an image stands in "image_url" as a data URL, or in the "data" of a "source" of the type "base64"'
        )
    return given


def _parts(texts: list[str]) -> str | list[Message]:
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def said(place: str, content: Any) -> str:
    """Return the `content` of the model, joined to one text. Raises BadRequestError."""
    return content if type(content) is str else "".join(_texts(place, content) or ())


def part_text(place: str, part: Any) -> str:
    """Return the text of one part. Raises BadRequestError if it is not text."""
    if type(part) is not dict:
        raise wrong(place, part, 'an object like {"type": "text", "text": "..."}')
    kind = part.get("type")
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        if not isinstance(kind, str):
            raise wrong(f"{place}.type", kind, "a string")
        if kind in ("thinking", "reasoning"):
            raise unsupported(f"`{place}` is reasoning, and only messages of the assistant have some", place)
        text = f'`{place}` is of the type "{kind[:40]}": this model takes text only'
        raise (UnreadMediaError if kind in _MEDIA else BadRequestError)(text, param=place, code="unsupported_content")
    return string(f"{place}.{key}", part.get(key))


def _texts(place: str, content: Any) -> list[str] | None:
    """Return the texts of parts, without the empty ones; None without parts."""
    if content is None or content == []:
        return None
    if type(content) is not list:
        raise wrong(place, content, "a string, or a list of parts of text")
    return [text for at, part in enumerate(content) if (text := part_text(f"{place}[{at}]", part))]
