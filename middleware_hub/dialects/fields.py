"""The top level of a request's body: each field is taken with its type, and the rest goes to the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Raw

from middleware_hub.media.errors import MultimodalUnsupportedError
from router.engines.form.fields import parse_object
from router.engines.form.limits import AdapterPath
from router.engines.json import JSON_ERRORS, decode_any, is_null, json_fault
from router.errors import BadRequestError

T = TypeVar("T")

MOST_SAMPLES = 128
MOST_TOP_LOGPROBS = 20

DEEPEST = 200
"""The deepest nesting of JSON for chat templates, because templates and JSON encoders recurse. A sampled
call may be nested as deeply, so that each can come back."""

_WRITTEN_HERE = frozenset(
    "rid stream return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs "
    "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64".split()
)
"""Fields of `/generate` that only this router may set, never a client of a chat: they shape the reply that is read here."""

_ONLY_SHOWN = frozenset(
    "stream_reasoning return_meta_info return_token_ids return_cached_tokens_details "
    "return_spec_tokens_details return_input_ids_in_sglext return_output_ids_in_sglext".split()
)
"""Fields of SGLang's own chat endpoint that shape its reply. `/generate` does not know them."""

_REASONING_SWITCHES = ("separate_reasoning", "include_reasoning")
"""SGLang's and vLLM's switches for how a chat completion shows reasoning; both are true by default."""

_EMPTY = (b"null", b"[]", b"{}", b'""')

_PROMPT = "the prompt of a chat is made of its `messages`"
_MEDIA = frozenset({"image_data", "video_data", "audio_data"})
_ONLY_IMAGES = (
    "the images of a chat are parts of its messages, those of a text are `image_data` of /generate, and this router records"
    " no other media"
)
_REFUSED = {
    "text": _PROMPT,
    "input_ids": _PROMPT,
    "input_embeds": _PROMPT,
    "prompt_segments": _PROMPT,
    "session_params": "a session is named by the path, or by `x-session-id`",
    "sampling_params": "write its fields at the top level of a chat request",
    "chat_template": "the template is the tokenizer's own; `chat_template_kwargs` are its variables",
}
"""Fields that would not do what their names say. Ignoring them silently would surprise the client."""


class Kind(Generic[T]):
    """A type that fields have, and its name in error messages.

    `whole`: its integers may also be written as floats (`8.0`, `1e3`), as by clients whose numbers are all doubles.
    """

    __slots__ = ("decode", "expected")

    def __init__(self, kind: Any, expected: str, *, whole: bool = False) -> None:
        decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self.decode: Callable[[bytes | Raw], T] = decoder.decode
        if whole:
            self.decode = partial(_decode_whole, kind, decoder)
        self.expected = expected


def _decode_whole(kind: Any, decoder: msgspec.json.Decoder[T], raw: bytes | Raw) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        if b'"' in bytes(raw):  # a decoder that is not strict reads numbers in strings, too
            raise
        return cast(T, msgspec.json.decode(raw, type=kind, strict=False))


BOOLEAN: Kind[bool] = Kind(bool, "true or false")
INTEGER: Kind[int] = Kind(int, "an integer", whole=True)
NUMBER: Kind[float] = Kind(float, "a number")
STRING: Kind[str] = Kind(str, "a string")
STRINGS: Kind[list[str]] = Kind(list[str], "a list of strings")
OBJECT: Kind[dict[str, Any]] = Kind(dict[str, Any], "an object")
ANYTHING: Kind[Any] = Kind(Any, "JSON")
RAW_OBJECT: Kind[dict[str, Raw]] = Kind(dict[str, Raw], "an object")
RAWS: Kind[list[Raw]] = Kind(list[Raw], "a list of objects")
OBJECTS: Kind[list[dict[str, Any]]] = Kind(list[dict[str, Any]], "a list of objects")
ADAPTER: Kind[str] = Kind(AdapterPath, "a string")
_ADAPTER: Kind[str | list[Any]] = Kind(AdapterPath | list[Any], "a string")


class StreamOptions(msgspec.Struct):
    """`stream_options` of a chat or a completion."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


STREAM_OPTIONS: Kind[StreamOptions] = Kind(StreamOptions, "an object")


class Fields:
    """The fields of a body that have not been taken yet. Raises BadRequestError if it is not a JSON object."""

    def __init__(self, body: bytes | dict[str, Raw]) -> None:
        self._left = dict(body) if isinstance(body, dict) else parse_object(body)

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def present(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key in self._left]

    def take(self, key: str, kind: Kind[T]) -> T | None:
        """Take a field, typed; None if it is absent or null. Raises BadRequestError for another type."""
        raw = self._left.pop(key, None)
        if raw is None or (len(raw) == 4 and is_null(raw)):
            return None
        return decoded(key, raw, kind)

    def peek(self, key: str, kind: Kind[T]) -> T | None:
        """Return a field as `take` does, and leave it."""
        raw = self._left.get(key)
        return None if raw is None or is_null(raw) else decoded(key, raw, kind)

    def raw(self, key: str) -> Raw | None:
        """Return a field as it is written, and leave it; None if it is absent."""
        return self._left.get(key)

    def need(self, key: str, kind: Kind[T]) -> T:
        value = self.take(key, kind)
        if value is None:
            raise BadRequestError(f"`{key}` is missing: it must be {kind.expected}", param=key)
        return value

    def take_within(self, key: str, low: int, high: int) -> int | None:
        """Take an integer with limits, both included."""
        value = self.take(key, INTEGER)
        if value is not None and not low <= value <= high:
            raise wrong(key, value, f"an integer from {low} to {high}")
        return value

    def left(self) -> list[str]:
        return sorted(self._left)

    def drop(self, keys: Iterable[str]) -> None:
        """Discard fields that mean nothing here."""
        for key in keys:
            self._left.pop(key, None)

    def ignored(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Discard fields that have no effect here; return the names of those that are not empty."""
        given = [(key, self._left.pop(key)) for key in keys if key in self._left]
        return tuple(key for key, raw in given if not _is_empty(raw))

    def refuse_others(self, names: Mapping[str, str], dialect: str) -> None:
        """Raise BadRequestError for a field of another dialect, unless it is empty.

        Args:
            names: the fields, and in words what there is in their place.
            dialect: the dialect that is read, in words.
        """
        for key in self.present(names):
            if not _is_empty(self._left[key]):
                raise BadRequestError(f"`{key}` is not read in {dialect}: {names[key]}", param=key)

    def rest(self) -> dict[str, Raw]:
        """Return the remaining fields, for the worker. Raises BadRequestError for a field that no client may send it."""
        for key in _REASONING_SWITCHES:
            if self.take(key, BOOLEAN) is False:
                raise BadRequestError(
                    f"`{key}` is a switch of chat completions: here reasoning always has a place of its own. To have none,"
                    ' switch thinking off with `chat_template_kwargs`: {"enable_thinking": false}',
                    param=key,
                )
        rest: dict[str, Raw] = {}
        for key, raw in self._left.items():
            if key in _WRITTEN_HERE or key in _ONLY_SHOWN or is_null(raw):
                continue
            if key in _MEDIA:
                raise MultimodalUnsupportedError(f"`{key}` cannot be used here: {_ONLY_IMAGES}", param=key)
            if key in _REFUSED:
                raise BadRequestError(f"`{key}` cannot be used here: {_REFUSED[key]}", param=key)
            if key == "lora_path":  # what is remembered is kept apart by it
                decoded(key, raw, _ADAPTER)
            # A slice would keep the whole body in memory until the generation is over.
            rest[key] = raw.copy()
        return rest


def _is_empty(raw: Raw) -> bool:
    return bytes(raw).strip() in _EMPTY


def set_in(place: str, given: dict[str, Any], **usual: str) -> tuple[str, ...]:
    """Return the places of those fields of an object that are set to something else than their usual value."""
    return tuple(f"{place}.{key}" for key, value in usual.items() if given.get(key) and given[key] != value)


def decoded(key: str, raw: Raw, kind: Kind[T]) -> T:
    """Return the value of a field. Raises BadRequestError for another type."""
    try:
        return kind.decode(raw)
    except JSON_ERRORS as error:
        raise BadRequestError(f"`{key}` must be {kind.expected}: {json_fault(raw, error)}", param=key) from error


def wrong(place: str, value: object, expected: str) -> BadRequestError:
    """Return the error for a value of the wrong type."""
    return BadRequestError(f"`{place}` must be {expected}, not {_shown(value)}", param=place)


def unsupported(message: str, place: str) -> BadRequestError:
    """Return the error for well-formed content that a text model cannot handle."""
    return BadRequestError(message, param=place, code="unsupported_content")


def string(place: str, value: Any) -> str:
    """Return a value that is a string. Raises BadRequestError if it is not."""
    if type(value) is not str:
        raise wrong(place, value, "a string")
    return value


def read_arguments(place: str, given: Any) -> dict[str, Any] | str:
    """Return the arguments of a call, an object or its JSON text: as an object if templates can show it, else as the text.

    A client may have cut the text off, or have read something else than an object. Raises BadRequestError for one that is
    nested too deeply.
    """
    if type(given) is dict or type(given) is list:
        check_depth(place, given)
    if type(given) is dict:
        return given
    text = given if type(given) is str else msgspec.json.encode(given).decode()
    if not text or text.isspace():
        return {}
    try:
        found = decode_any(text)
    except JSON_ERRORS:
        return text
    if not isinstance(found, dict):
        return text
    # Fewer brackets than levels cannot be nested too deeply, and counting them is cheap.
    return text if text.count("{") + text.count("[") > DEEPEST and too_deep(found) else found


def check_depth(place: str, value: dict[str, Any] | list[Any]) -> None:
    """Raise BadRequestError if JSON is nested deeper than `DEEPEST`."""
    if too_deep(value):
        raise BadRequestError(f"`{place}` is nested more than {DEEPEST} levels deep", param=place)


def too_deep(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether JSON is nested deeper than `DEEPEST`. This goes level by level: recursion could fail in the same way."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    shown = msgspec.json.encode(value).decode()
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
