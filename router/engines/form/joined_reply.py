"""The reply of a decode worker, joined with what only its prefill worker knows.

| field of `meta_info` | is |
|---|---|
| `input_token_logprobs` and its kin | the prefill worker's, then the decode worker's |
| `routed_experts`, `indexer_topk` | the prefill worker's rows, then the decode worker's from there on |
| `prefill_weight_version` | added where the prefill worker had other weights than those that the reply begins with |

All else is the decode worker's, byte for byte.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from router.engines.events import EventSplitter, event_data
from router.engines.form.outcome import was_aborted
from router.engines.json import JSON_ERRORS, decode_object, is_null, split_items

_OF_PROMPT = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_ROWS = ("routed_experts", "indexer_topk")
_EMPTY = frozenset({b"", b"[]", b"null"})


class _Span(msgspec.Struct):
    version: str


class _Versions(msgspec.Struct):
    weight_version: str | int | None = None
    weight_versions: list[_Span] | None = None

    @property
    def first(self) -> str | None:
        """The version at the first token."""
        if self.weight_versions:
            return self.weight_versions[0].version
        return None if self.weight_version is None else str(self.weight_version)


class _PrefillMeta(_Versions):
    input_token_logprobs: Raw = Raw()
    input_top_logprobs: Raw = Raw()
    input_token_ids_logprobs: Raw = Raw()
    routed_experts: Raw = Raw()
    indexer_topk: Raw = Raw()
    kv_transfer_params: Raw = Raw()


class _PrefillBody(msgspec.Struct):
    meta_info: _PrefillMeta
    index: int = 0


_body = msgspec.json.Decoder(_PrefillBody).decode


class PrefillReply(msgspec.Struct):
    """A prefill worker's reply to one prompt.

    Attributes:
        version: its weights; None if it did not tell.
        lists: its lists for the prompt that are not empty, as the inside of their JSON.
        rows: its rows for the prompt.
        aborted: whether it was aborted, so that no decode worker can go on.
        transfer: where a decode worker of vLLM finds the cache.
    """

    version: str | None
    lists: dict[str, bytes]
    rows: dict[str, bytes]
    aborted: bool
    transfer: Raw | None

    @classmethod
    def of(cls, reply: bytes | Raw) -> PrefillReply:
        """Read a reply. Raises JSON_ERRORS, ValueError."""
        meta = _body(reply).meta_info
        lists = {key: bytes(getattr(meta, key)).strip() for key in _OF_PROMPT}
        rows = {key: getattr(meta, key) for key in _ROWS}
        return cls(
            meta.first,
            {key: value[1:-1] for key, value in lists.items() if value not in _EMPTY},
            {key: _decoded(value) for key, value in rows.items() if bytes(value) not in _EMPTY},
            was_aborted(reply),
            None if bytes(meta.kv_transfer_params) in _EMPTY else meta.kv_transfer_params,
        )


UNTOLD = PrefillReply("", {}, {}, False, None)
"""Stands for the reply of a prefill worker that did not come: its weights are none that a decode worker has."""


def read_prefill(body: bytes, count: int, *, listed: bool, stream: bool) -> list[PrefillReply] | None:
    """Return the replies of a prefill worker to `count` prompts, None if they cannot be read. `stream`: they are events."""
    try:
        if not stream:
            found = [PrefillReply.of(one) for one in (split_items(body) if listed else [Raw(body)])]
            return found if len(found) == count else None
        last: dict[int, bytes] = {}
        for event in EventSplitter().feed(body):
            data = event_data(event)
            if data is not None and data.startswith(b"{"):
                last[_body(data).index] = data
        return [PrefillReply.of(last[index]) for index in range(count)]
    except (*JSON_ERRORS, KeyError, ValueError):
        return None


class _Indexed(msgspec.Struct):
    index: int = 0


class JoinedReply:
    """Joins a decode worker's reply with that of its prefill worker: an editor of a reply."""

    def __init__(self, prefilled: Sequence[PrefillReply], *, listed: bool, rows: bool) -> None:
        """`listed`: whether the reply is a list. `rows`: whether rows were asked for."""
        self._prefilled = prefilled
        self._listed = listed
        versions = {one.version for one in prefilled}
        plain = len(versions) == 1 and not rows and not any(one.lists for one in prefilled)
        version = msgspec.json.encode(prefilled[0].version) if plain and prefilled[0].version is not None else None
        self._same = (
            None if version is None else (b'"weight_versions":[{"version":' + version, b'"weight_version":' + version)
        )

    def event(self, data: bytes) -> bytes:
        """Return an event. One that cannot be read stays as it is."""
        if self._adds_nothing(data, 1):
            return data
        try:
            fields = decode_object(data)
            index = msgspec.json.decode(data, type=_Indexed).index if self._listed else 0
            return self._joined(fields, self._prefilled[index])
        except (*JSON_ERRORS, KeyError, IndexError, ValueError):
            return data

    def whole(self, status: int, body: bytes) -> bytes:
        """Return a reply that is no stream. One that cannot be read stays as it is."""
        if status != 200 or self._adds_nothing(body, len(self._prefilled)):
            return body
        try:
            replies = split_items(body) if self._listed else [Raw(body)]
            found = [
                self._joined(decode_object(reply), one) for reply, one in zip(replies, self._prefilled, strict=True)
            ]
        except (*JSON_ERRORS, KeyError, ValueError):
            return body
        return b"[%b]" % b",".join(found) if self._listed else found[0]

    def _adds_nothing(self, data: bytes, count: int) -> bool:
        """Return whether the usual is there: the same weights, and nothing to join. Quotes are escaped inside of strings."""
        if self._same is None:
            return False
        spans, alone = self._same
        if b'"weight_versions"' in data:
            return data.count(spans) == count
        return data.count(alone) == count

    @staticmethod
    def _joined(fields: dict[str, Raw], prefilled: PrefillReply) -> bytes:
        meta = decode_object(fields["meta_info"])
        for key, value in prefilled.lists.items():
            if key in meta or _OF_PROMPT[0] in meta:
                own = bytes(meta.get(key, Raw())).strip()
                inner = b"" if own in _EMPTY else own[1:-1]
                meta[key] = Raw(b"[%b]" % (b"%b,%b" % (value, inner) if inner else value))
        for key in _ROWS:
            if not is_null(meta.get(key)):
                before, own = prefilled.rows.get(key), _decoded(meta[key])
                if before is not None and len(before) <= len(own):
                    meta[key] = Raw(msgspec.json.encode(b64encode(before + own[len(before) :]).decode()))
                else:
                    del meta[key]  # the rows of the prompt are lost, and the decode worker's own are of nothing
        first = msgspec.json.decode(msgspec.json.encode(meta), type=_Versions).first
        if first is not None and prefilled.version is not None and first != prefilled.version:
            meta["prefill_weight_version"] = Raw(msgspec.json.encode(prefilled.version))
        fields["meta_info"] = Raw(msgspec.json.encode(meta))
        return msgspec.json.encode(fields)


def _decoded(raw: Raw) -> bytes:
    """Return the bytes of rows. Raises ValueError, JSON_ERRORS."""
    try:
        return b64decode(msgspec.json.decode(raw, type=str), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
