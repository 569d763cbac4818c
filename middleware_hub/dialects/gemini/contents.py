"""The `contents` of a request, as messages.

A turn of the model's may be several contents: Google's library keeps each event of a stream as one. Results of calls are parts
of a user's content. Neither they nor the calls need an id: results without one belong to the calls of their names, in order.

    model     functionCall look, functionCall look      assistant   calls of the ids a, b
    user      functionResponse look (no id)             tool        result of a
              functionResponse look (no id), text       tool        result of b
                                                        user        text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from middleware_hub.chat.messages import Message
from middleware_hub.dialects.fields import check_depth, read_arguments, string, unsupported, wrong
from middleware_hub.dialects.gemini.spelling import listed, spelled
from middleware_hub.dialects.messages import (
    UnreadMediaError,
    assistant_message,
    rejoined,
    told,
    tool_call,
    without_billing,
    written,
)
from router.errors import BadRequestError

_ROLES = '"user" or "model"'
_USERS = (None, "", "user", "function", "tool")
"""`function` is the role of results in older clients; `tool` that of others' proxies."""
_SHOWN = frozenset("text inlineData fileData functionCall functionResponse".split())
_RUN_BY_GOOGLE = frozenset("executableCode codeExecutionResult toolCall toolResponse".split())
_LONE = ("output", "result", "error")
"""The keys of a response that is one value. Google's documents name the first and the last; its library writes `result`."""

_encode = msgspec.json.encode


def read_contents(contents: Any) -> list[Message]:
    """Return the messages of a conversation. Raises BadRequestError."""
    contents = listed(contents)
    if contents == []:
        raise BadRequestError("`contents` is empty: give at least one content", param="contents")
    if type(contents) is not list:
        raise wrong("contents", contents, "a list of at least one content")
    reader = _Reader()
    for at, content in enumerate(contents):
        reader.take(f"contents[{at}]", content, at)
    reader.end_turn()
    return [message for turn in rejoined([[one] for one in reader.messages]) for message in turn]


def read_system(place: str, given: Any) -> str:
    """Return a system prompt, with one line for each part of text. Raises BadRequestError."""
    if type(given) is str:
        return without_billing(given)
    if type(given) is not dict:
        raise wrong(place, given, "a content with parts of text")
    given = spelled(given)
    parts = [given] if "text" in given else _parts(place, given)
    texts = [
        string(f"{place}.parts[{at}].text", _one(f"{place}.parts[{at}]", part).get("text"))
        for at, part in enumerate(parts)
    ]
    return "\n".join(filter(None, map(without_billing, texts)))


class _Reader:
    """Reads contents one after the other into `messages`."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._in_turn = False
        self._open: list[tuple[str, str]] = []
        """The calls of the last turn whose results have not come: ids and names."""

    def take(self, place: str, content: Any, at: int) -> None:
        """Read the content of the number `at`. Raises BadRequestError."""
        if type(content) is not dict:
            raise wrong(place, content, "an object")
        content = spelled(content)
        role, parts = content.get("role"), _parts(place, content)
        place += ".parts"
        if role == "model":
            self._in_turn = True
            for number, part in enumerate(parts):
                self._said(f"{place}[{number}]", part, f"x{at:05d}{len(self._calls):03d}")
        elif role in _USERS:
            self.end_turn()
            self._heard(place, parts)
        else:
            raise wrong(f"{place.removesuffix('.parts')}.role", role, _ROLES)

    def end_turn(self) -> None:
        if self._in_turn:
            self.messages.append(assistant_message("".join(self._texts), "".join(self._reasoning), self._calls))
            self._open = [(call["id"], call["function"]["name"]) for call in self._calls]
            self._texts, self._reasoning, self._calls, self._in_turn = [], [], [], False

    def _said(self, place: str, part: Any, name: str) -> None:
        """Read a part of the model's. `name` is the id of a call that comes without one."""
        part = _one(place, part)
        if "functionCall" in part:
            given = part["functionCall"]
            if type(given) is not dict:
                raise wrong(f"{place}.functionCall", given, "an object")
            call = spelled(given)
            place += ".functionCall"
            arguments = read_arguments(f"{place}.args", call.get("args", ""))
            call_id = string(f"{place}.id", call.get("id") or name)
            self._calls.append(tool_call(call_id, string(f"{place}.name", call.get("name")), arguments))
        elif "text" in part:
            into = self._reasoning if part.get("thought") is True else self._texts
            into.append(string(f"{place}.text", part["text"]))
        elif (kind := _kind(part)) is not None:
            raise unsupported(f"`{place}` is `{kind}`: this model writes texts and calls only", place)

    def _heard(self, place: str, parts: Sequence[Any]) -> None:
        """Read a user's parts: a message for each result, and one for all else.

        A result that is there twice, id and all, is one: Gemini CLI doubles those of a conversation that it resumes.
        """
        rest: list[Any] = []
        results: list[tuple[str, dict[str, Any]]] = []
        for at, given in enumerate(parts):
            part, where = _one(f"{place}[{at}]", given), f"{place}[{at}]"
            if "functionResponse" not in part:
                rest.append(_shown(where, part))
                told(where, rest[-1:])  # checked in its own place, so that an error names it
                continue
            response = part["functionResponse"]
            if type(response) is not dict:
                raise wrong(f"{where}.functionResponse", response, "an object")
            response = spelled(response)
            for key in ("name", "id"):
                if key in response:
                    string(f"{where}.functionResponse.{key}", response[key])
            if not response.get("id") or all(response != known for _, known in results):
                results.append((f"{where}.functionResponse", response))
        named = {response.get("id") for _, response in results}
        left = [one for one in self._open if one[0] not in named]
        for where, response in results:
            self.messages.append(self._result(where, response, left))
        self._open = left
        said = told(place, rest)
        if said or not results:
            self.messages.append({"role": "user", "content": said or ""})

    def _result(self, place: str, response: dict[str, Any], left: list[tuple[str, str]]) -> Message:
        """Return a result. One without an id takes that of a call that is `left`."""
        name, call_id = response.get("name"), response.get("id")
        message: Message = {"role": "tool", "content": _output(place, response)}
        answered = None if call_id else next((one for one in left if one[1] == name), left[0] if left else None)
        if answered is not None:
            left.remove(answered)
            call_id = answered[0]
        if call_id:
            message["tool_call_id"] = call_id
        elif name:
            message["name"] = name
        given = response.get("response")
        if type(given) is dict and "error" in given and len(given) == 1:
            message["is_error"] = True
        return message


def _output(place: str, response: dict[str, Any]) -> str | list[Message]:
    """Return the content of a result: its only value, or all of it as JSON, and the pictures beside it."""
    given = response.get("response")
    if given is not None and type(given) is not dict:
        raise wrong(f"{place}.response", given, "an object")
    given = given or {}
    check_depth(f"{place}.response", given)
    only = next((given[key] for key in _LONE if key in given), given) if len(given) == 1 else given
    text = only if type(only) is str else _encode(only).decode() if given else ""
    parts = listed(response.get("parts", []))
    if type(parts) is not list:
        raise wrong(f"{place}.parts", parts, "a list of parts")
    shown = [_shown(f"{place}.parts[{at}]", _one(f"{place}.parts[{at}]", part)) for at, part in enumerate(parts)]
    if not shown:
        return text
    return written(f"{place}.parts", [{"type": "text", "text": text}, *shown] if text else shown) or ""


def _parts(place: str, content: dict[str, Any]) -> list[Any]:
    parts = listed(content.get("parts"))
    if parts is None and content.get("role") == "model":
        return []
    if type(parts) is not list or (not parts and content.get("role") != "model"):
        raise wrong(f"{place}.parts", parts, "a list of at least one part")
    return parts


def _one(place: str, part: Any) -> dict[str, Any]:
    if type(part) is not dict:
        raise wrong(place, part, 'an object like {"text": "..."}')
    return spelled(part)


def _kind(part: dict[str, Any]) -> str | None:
    """Return the field that holds what a part says; None if it says nothing, as one with a signature alone."""
    return next((key for key in part if key in _SHOWN or key in _RUN_BY_GOOGLE), None)


def _shown(place: str, part: dict[str, Any]) -> dict[str, Any]:
    """Return a user's part of text, or a picture, in the form that all dialects share. Raises BadRequestError."""
    kind = _kind(part)
    if kind == "text":
        return {"type": "text", "text": string(f"{place}.text", part["text"])}
    if kind not in ("inlineData", "fileData"):
        if kind is None:
            raise wrong(place, part, 'an object like {"text": "..."}')
        raise unsupported(f"`{place}` is `{kind}`, which a user does not write", place)
    given = part[kind]
    if type(given) is not dict:
        raise wrong(f"{place}.{kind}", given, "an object")
    given = spelled(given)
    mime = string(f"{place}.{kind}.mimeType", given.get("mimeType") or ("image/*" if kind == "fileData" else None))
    if not mime.lower().startswith("image/"):  # RFC 2045: types are the same in capitals
        raise UnreadMediaError(
            f"`{place}` is of the type {mime[:40]!r}: this model takes text only",
            param=place,
            code="unsupported_content",
        )
    if kind == "fileData":
        return {"type": "image_url", "image_url": {"url": string(f"{place}.fileData.fileUri", given.get("fileUri"))}}
    return {
        "type": "image",
        "source": {"type": "base64", "data": string(f"{place}.inlineData.data", given.get("data"))},
    }
