"""Rows as Parquet or Arrow: columns with the names of the fields of `/retrieve_from_text`, written in pieces."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from middleware_hub.store.media import MediaFile
from middleware_hub.store_cli.rows import Row
from middleware_hub.store_cli.selection import named, session_of
from router.errors import BadRequestError

FORMATS: Final = ("parquet", "arrow", "arrows")
"""Each is also the suffix of its files: Parquet, an Arrow file, an Arrow stream."""
TREE: Final = "tree"
"""A line of JSON for each conversation; its files end in `.jsonl`."""
ATIF: Final = "atif"
"""A line of JSON for each trajectory of a session; the format has to be named."""
LINES: Final = (TREE, ATIF)
STDOUT: Final = "-"
_PIECE_TOKENS: Final = 1 << 20
"""A row group of Parquet, or a record batch of Arrow, is written when it has this many tokens."""


def format_of(path: str, given: str | None) -> str:
    """Return the format of a file: the given one, or that of its suffix. Raises BadRequestError."""
    found = given or ("parquet" if path == STDOUT else Path(path).suffix.removeprefix("."))
    found = TREE if found == "jsonl" else found
    if found not in (*FORMATS, *LINES):
        raise BadRequestError(
            f"--out {path}: name a file that ends in .{', .'.join(FORMATS)}, or add --format {'|'.join((*FORMATS, *LINES))}"
        )
    return found


class _TableWriter:
    """Writes a table as its pieces come. Used in a `with` block, at whose end the file is complete."""

    def __init__(self, sink: BinaryIO, kind: str, schema_of: Callable[[Any], Any]) -> None:
        """Raises BadRequestError if the library is not installed."""
        try:
            import pyarrow as pa
        except ImportError as error:
            raise BadRequestError("an export needs pyarrow: pip install 'tito-router[export]'") from error
        self._schema = schema_of(pa)
        self._record_batch = pa.RecordBatch.from_pydict
        # Python's file, because Arrow's own files refuse a pipe; in a pipe, the only position is the length written so far.
        self._counted = _Counted(sink)
        self._sink = pa.PythonFile(self._counted, mode="w")
        if kind == "parquet":
            from pyarrow.parquet import ParquetWriter

            short = [name for name in self._schema.names if str(self._schema.field(name).type) == "string"]
            self._writer = ParquetWriter(
                self._sink,
                self._schema,
                compression="zstd",
                use_dictionary=[n for n in short if n not in ("text", "response")],
            )
        elif kind == "arrow":
            self._writer = pa.ipc.new_file(self._sink, self._schema)
        else:
            self._writer = pa.ipc.new_stream(self._sink, self._schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._counted.drop = True  # pyarrow writes an end in any case, at the latest when it is collected
        else:
            self._finish()
        self._writer.close()
        self._sink.flush()

    def _finish(self) -> None:
        """Write what is left."""

    def _put(self, columns: dict[str, list[Any]]) -> None:
        self._writer.write_batch(self._record_batch(columns, schema=self._schema))


class RowWriter(_TableWriter):
    """Writes rows. `images`: whether there is a column for them."""

    def __init__(self, sink: BinaryIO, kind: str, *, images: bool) -> None:
        super().__init__(sink, kind, partial(_schema, images=images))
        self._rows: list[Row] = []
        self._tokens = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Take some rows, and write a piece when there are enough."""
        for row in rows:
            self._rows.append(row)
            self._tokens += len(row.flat.token_ids)
            if self._tokens >= _PIECE_TOKENS:
                self._finish()

    def _finish(self) -> None:
        if self._rows:
            self._put(_columns(self._rows))
        self._rows = []
        self._tokens = 0


class MediaWriter(_TableWriter):
    """Writes the files of images, a row for each."""

    def __init__(self, sink: BinaryIO, kind: str) -> None:
        super().__init__(sink, kind, _media_schema)

    def add(self, files: Sequence[MediaFile]) -> None:
        """Write some files."""
        names = [name for name in self._schema.names if name != "bytes"]
        self._put(
            {name: [getattr(one, name) for one in files] for name in names} | {"bytes": [one.data for one in files]}
        )


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open the file of an export for the length of the block. The file gets its name once it is complete.

    A pipe or a device is written to as it is. Raises BadRequestError for a terminal, and for a file that cannot be made.
    """
    if path == STDOUT:
        if sys.stdout.isatty():
            raise BadRequestError("--out -: an export is binary, send it to a file or a program")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = os.path.realpath(path)  # a link stays one
    special = os.path.exists(path) and not os.path.isfile(path)
    # Two exports to one name have a part each: the last one that is complete gets the name.
    part = Path(path if special else f"{path}.{secrets.token_hex(4)}.part")
    try:
        sink = part.open("wb" if special else "xb")
    except OSError as error:
        raise BadRequestError(f"--out {path}: {error.strerror}") from error
    try:
        with sink:
            yield sink
        if not special:
            os.replace(part, path)
    except OSError as error:
        error.filename = error.filename or path  # a full disk says only that it is full
        raise
    finally:
        if not special:
            part.unlink(missing_ok=True)


class _Counted:
    """A file that only grows, with a position: a pipe has none. With `drop`, nothing more is written to it."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._at = 0
        self.closed = self.drop = False

    def write(self, data: Any) -> int:
        if not self.drop:
            self._sink.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        if not self.drop:
            self._sink.flush()

    def close(self) -> None:
        self.closed = True


def _media_schema(pa: Any) -> Any:
    text, count = pa.string(), pa.int32()
    about = [("tenant", text), ("digest", text), ("mime", text), ("width", count), ("height", count)]
    return pa.schema([*about, ("bytes", pa.large_binary())])


def _schema(pa: Any, *, images: bool) -> Any:
    text, count = pa.string(), pa.int32()
    runs = [("version", text), ("start", count), ("end", count)]
    turns = [("request_id", text), ("start", count), ("end", count), ("version", text), ("finish", text)]
    turns += [("kv_version", text)]
    return pa.schema(
        [
            ("tenant", text),
            ("lora_path", text),
            ("namespace", text),
            ("session", text),
            ("conversation", text),
            ("request_id", text),
            ("recorded_at", pa.timestamp("us", tz="UTC")),
            ("text", text),
            ("response", text),
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int32())),
            ("rollout_logp", pa.list_(pa.float64())),
            ("token_length", count),
            ("loss_mask_length", count),
            ("response_length", count),
            ("exact", pa.bool_()),
            ("exact_chars", count),
            ("reasons", pa.list_(text)),
            ("weight_versions", pa.list_(pa.struct(runs))),
            ("variants", count),
            ("request_ids", pa.list_(text)),
            ("turns", pa.list_(pa.struct(turns))),
            *(
                [("images", pa.list_(pa.struct([("digest", text), ("start", count), ("end", count)])))]
                if images
                else []
            ),
        ]
    )


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    names = [named(row.record.namespace) for row in rows]
    return {
        "tenant": [name[0] for name in names],
        "lora_path": [name[1] for name in names],
        "namespace": [name[2] for name in names],
        "session": [session_of(row.record.namespace) or None for row in rows],
        "conversation": [row.record.root.hex() for row in rows],
        "request_id": [row.record.request_ids[0] if row.record.request_ids else "" for row in rows],
        "recorded_at": [datetime.fromtimestamp(row.record.serial / 1e9, UTC) for row in rows],
        "text": [row.text for row in rows],
        "response": [row.text for row in rows],
        "tokens": [row.flat.token_ids for row in rows],
        "loss_mask": [row.flat.loss_mask for row in rows],
        "rollout_logp": [row.flat.logprobs for row in rows],
        "token_length": [len(row.flat.token_ids) for row in rows],
        "loss_mask_length": [len(row.flat.loss_mask) for row in rows],
        "response_length": [row.flat.response_length for row in rows],
        "exact": [row.exact for row in rows],
        "exact_chars": [None if row.text is None else len(row.text) for row in rows],
        "reasons": [row.flat.reasons for row in rows],
        "weight_versions": [[dict(zip(_RUN, run, strict=True)) for run in row.flat.weight_versions] for row in rows],
        "variants": [len(row.request_ids) for row in rows],
        "request_ids": [row.request_ids for row in rows],
        "turns": [[turn.described() for turn in row.flat.turns] for row in rows],
        "images": [
            [{"digest": digest, "start": start, "end": start + length} for start, length, digest in row.media]
            for row in rows
        ],
    }


_RUN: Final = ("version", "start", "end")
