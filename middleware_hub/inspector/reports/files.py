"""A branch, or a report, as a file: JSON, Parquet with a row for each token, or a page that needs nothing else.

Everything is made from windows, in a thread, so that no single step takes long, however long the branch is.

The page is the inspector's with its data in it. Modules of a file on a disk cannot import each other, so each becomes a `data:`
URL that an import map names. Only these scripts may run, and nothing may be fetched: the page says so itself, in its policy.
"""

from __future__ import annotations

import base64
import hashlib
import io
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw

from middleware_hub.inspector.conversations.chain import Chain
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.errors import BadRequestError

STATIC = Path(__file__).parents[1] / "static"
START = "main.js"
STYLES = ("style/base.css", "style/views.css", "style/tokens.css")
_IMPORT = re.compile(r'^(import .*? from |import )"(\.[^"]+)";$', re.MULTILINE)


def saved_page(data: Mapping[str, object]) -> bytes:
    """Return the page.

    Args:
        data: `saved` (1), `at` (seconds since 1970), and `answers`, which maps paths of the API to their answers: a
            conversation, its branches, and the `tokens` of each branch from its first to its last; or `/run`. Under
            `/media/{digest}` are the images as `data:` URLs, each once.
    """
    # In a script of a page, "<" could begin its end, or a comment. JSON may write it as an escape wherever it may stand.
    content = msgspec.json.encode(data).replace(b"<", b"\\u003c")
    before, behind = _frame()
    return before + content + behind


@lru_cache(maxsize=1)
def _frame() -> tuple[bytes, bytes]:
    """Return the parts of the page before and after the data."""
    names = {path.relative_to(STATIC).as_posix(): path.read_text() for path in sorted(STATIC.rglob("*.js"))}
    imports = {_named(name): _data_url(_resolved(name, source)) for name, source in names.items()}
    table = msgspec.json.encode({"imports": imports}).decode().replace("<", "\\u003c")
    start = f'import "{_named(START)}";'
    style = "\n".join((STATIC / name).read_text() for name in STYLES)
    policy = (
        f"default-src 'none'; script-src data: {_hash(table)} {_hash(start)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    before = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Inspector</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<script type="importmap">{table}</script>
</head>
<body>
<script type="application/json" id="data">"""
    return before.encode(), f'</script>\n<script type="module">{start}</script>\n</body>\n</html>\n'.encode()


def _named(name: str) -> str:
    return f"inspector/{name}"


def _resolved(name: str, source: str) -> str:
    """Return the source of a module with the names of the import map in its imports."""

    def full(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
        return f'{match[1]}"{_named(path)}";'

    return _IMPORT.sub(full, source)


def _data_url(source: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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


def as_page(conversation: _Json, head: _Json, tokens: Raw, pictures: Mapping[str, Raw]) -> bytes:
    """Return a branch as the page of the inspector with the data in it, and the images; see `Gallery.embedded`."""
    folder = f"/conversations/{conversation['id']}"
    branch = f"{folder}/branches/{head['id']}"
    answers = {folder: conversation, branch: head, f"{branch}/tokens": tokens, **pictures}
    return saved_page({"saved": 1, "at": time.time(), "answers": answers})


def report_page(report: _Json, pictures: Mapping[str, Raw]) -> bytes:
    """Return a run report as the page of the inspector with the data in it, and the images that it shows."""
    return saved_page({"saved": 1, "at": time.time(), "answers": {"/run": report, **pictures}})


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
