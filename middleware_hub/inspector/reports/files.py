"""A branch as a file: JSON, Parquet with a row for each token, or a page that needs nothing else.

Everything is made from windows, in a thread, so that no single step takes long, however long the branch is.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from middleware_hub.inspector.conversations.chain import Chain
from middleware_hub.inspector.saved import saved_page
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.errors import BadRequestError

WINDOW: Final = 2_000
MOST_TOKENS: Final = 1_000_000
"""The most tokens of a branch that is written to one file."""
COLUMNS: Final = ("ids", "texts", "special", "mask", "logprobs", "versions", "turns")
TYPES: Final = {
    "json": b"application/json",
    "parquet": b"application/vnd.apache.parquet",
    "html": b"text/html; charset=utf-8",
}
_encode = msgspec.json.Encoder().encode
_Json = Mapping[str, Any]


def windows(chain: Chain, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """Yield the columns of all tokens, window by window. Raises BadRequestError for a branch that is too long."""
    if chain.total > MOST_TOKENS:
        raise BadRequestError(f"a file has at most {MOST_TOKENS} tokens, and this branch has {chain.total}")
    for start in range(0, chain.total, WINDOW):
        yield chain.window(start, min(start + WINDOW, chain.total), vocabulary)


def tokens(chain: Chain, vocabulary: Vocabulary, drift: Sequence[_Json] | None) -> Raw:
    """Return the answer to `tokens` from the first to the last one, as JSON."""
    columns: dict[str, list[bytes]] = {name: [] for name in COLUMNS}
    broken: list[bytes] = []
    for window in windows(chain, vocabulary):
        for name in COLUMNS:
            _add(columns[name], _encode(window[name]))
        _add(broken, _encode(window["bytes"]))
    places: list[bytes] = []
    for at in range(0, len(drift or ()), WINDOW):
        _add(places, _encode((drift or ())[at : at + WINDOW]))
    head = _encode({"start": 0, "end": chain.total, "total": chain.total})[:-1]
    parts = [head, b',"bytes":{', b",".join(broken), b'},"drift":', b"null" if drift is None else b"["]
    if drift is not None:
        parts += [b",".join(places), b"]"]
    for name in COLUMNS:
        parts += [b',"%b":[' % name.encode(), b",".join(columns[name]), b"]"]
    return Raw(b"".join((*parts, b"}")))


def _add(parts: list[bytes], encoded: bytes) -> None:
    inner = encoded[1:-1]
    if inner:
        parts.append(inner)


def as_json(conversation: _Json, head: _Json, tokens: Raw) -> bytes:
    """Return a branch as one JSON object."""
    return _encode({"conversation": conversation, "branch": head, "tokens": tokens})


def as_page(conversation: _Json, head: _Json, tokens: Raw) -> bytes:
    """Return a branch as the page of the inspector with the data in it."""
    folder = f"/conversations/{conversation['id']}"
    branch = f"{folder}/branches/{head['id']}"
    answers = {folder: conversation, branch: head, f"{branch}/tokens": tokens}
    return saved_page({"saved": 1, "at": time.time(), "answers": answers})


def report_page(report: _Json) -> bytes:
    """Return a run report as the page of the inspector with the data in it."""
    return saved_page({"saved": 1, "at": time.time(), "answers": {"/run": report}})


def as_parquet(conversation: _Json, head: _Json, chain: Chain, vocabulary: Vocabulary) -> bytes:
    """Return a branch as Parquet: a row for each token. Raises BadRequestError without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise BadRequestError("`format` parquet needs pyarrow: pip install 'tito-router[export]'") from error
    kinds = [("position", pa.int32()), ("id", pa.int32()), ("text", pa.string()), ("bytes", pa.binary())]
    kinds += [("special", pa.bool_()), ("mask", pa.uint8()), ("logprob", pa.float64()), ("version", pa.string())]
    kinds += [("turn", pa.int32()), ("request_id", pa.string())]
    about = {"conversation": _encode(conversation), "branch": _encode(head)}
    schema = pa.schema(kinds, metadata=about)
    sink = io.BytesIO()
    with ParquetWriter(sink, schema) as writer:
        for window in windows(chain, vocabulary):
            columns = _rows(window, head, vocabulary)
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return sink.getvalue()


def _rows(window: _Json, head: _Json, vocabulary: Vocabulary) -> dict[str, Any]:
    start, end = window["start"], window["end"]
    versions, turns, special = head["versions"], head["turns"], frozenset(window["special"])
    return {
        "position": list(range(start, end)),
        "id": window["ids"],
        "text": window["texts"],
        "bytes": [vocabulary.piece(one) for one in window["ids"]],
        "special": [at in special for at in range(start, end)],
        "mask": window["mask"],
        "logprob": window["logprobs"],
        "version": [None if one < 0 else versions[one] for one in window["versions"]],
        "turn": window["turns"],
        "request_id": [None if one < 0 else turns[one]["request_id"] for one in window["turns"]],
    }
