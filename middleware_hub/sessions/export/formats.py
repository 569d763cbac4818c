"""Trajectories as JSON, in pieces, so that the event loop can serve other requests in between; and in other formats.

Binary formats hold arrays, which trainers load without parsing a hundred megabytes of numbers. Each needs a library that is
an extra (`pip install 'tito-router[arrow]'`, `[safetensors]`), imported on first use. Everything but the arrays (messages,
rewards, versions, ...) is JSON: one string for each trajectory.

    safetensors   tensors "0.prompt_ids", "0.response_ids", "0.response_mask", "0.response_logprobs", "1.prompt_ids", ...
                  and "0.routed_experts", [rows, width], where it could be joined (see `per_token`)
                  and "media.sha256:...", uint8, the file of each image once, with `media=inline`
                  metadata {"session": "{...}", "0": "{...}", "1": "{...}"}
    arrow         a stream of one record batch: a row for each trajectory, list columns of the same names, and `json`
                  `routed_experts` is flat, or null: its shape is in the JSON
                  `images`, if some trajectory has any: a list of structs, the fields of `multi_modal_data` but for the bytes
                  schema metadata {"session": "{...}"}
                  behind it, with `media=inline`, a second stream: a row for each image, once, with its file
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from middleware_hub.media.images_json import has_files, images_json
from middleware_hub.sessions.export.atif import as_atif
from middleware_hub.sessions.export.trajectories import ARRAYS, BranchTrajectory
from middleware_hub.sessions.export.tree import tree
from middleware_hub.spans.per_token import ROW_FIELDS, TOP_P
from router.errors import BadRequestError

CHUNK = 8_192
"""Numbers that are encoded at once: about half a millisecond."""


def as_json(found: Iterable[BranchTrajectory], head: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield `{...head, "trajectories": [...]}` in pieces, each of which takes little time."""
    opening = msgspec.json.encode(head)[:-1]
    yield opening + (b"," if head else b"") + b'"trajectories":['
    for number, trajectory in enumerate(found):
        if number:
            yield b","
        yield from trajectory_json(trajectory)
    yield b"]}"


def trajectory_json(trajectory: BranchTrajectory) -> Iterator[bytes]:
    """Yield one trajectory in pieces."""
    fields = described(trajectory)
    images = fields.pop("multi_modal_data")
    for name in trajectory.per_token:
        del fields["extra_fields"][name]
    # `extra_fields` comes last and is never empty, so both objects stay open for the long arrays.
    yield msgspec.json.encode(fields)[:-2]
    for name, array in trajectory.per_token.items():
        yield b',"%b":%b,"base64":"' % (name.encode(), msgspec.json.encode(array.described())[:-1])
        yield from array.as_base64()
        yield b'"}'
    yield b'},"multi_modal_data":'
    if images is None:
        yield b"null"
    else:
        yield from images_json(images["images"])
    for name in ARRAYS:
        numbers = getattr(trajectory, name)
        yield b',"%b":' % name.encode()
        if numbers is None:
            yield b"null"
        else:
            yield from _numbers(numbers)
    for name, entries in trajectory.scores.items():
        yield b',"%b":[' % name.encode()
        each = 1 + 2 * len(entries[0]) if entries and isinstance(entries[0], list) else 1
        step = max(1, CHUNK // each)
        for begin in range(0, len(entries), step):
            inner = msgspec.json.encode(entries[begin : begin + step])[1:-1]
            yield b"," + inner if begin else inner
        yield b"]"
    yield b"}"


def described(trajectory: BranchTrajectory) -> dict[str, Any]:
    """Return everything but the arrays of a trajectory, ready to be encoded as JSON."""
    begin = len(trajectory.prompt_ids)
    return {
        "branch": trajectory.branch,
        "parent_branch": trajectory.parent_branch,
        "root": trajectory.root,
        "system_digest": trajectory.system_digest,
        "tools_digest": trajectory.tools_digest,
        "side_request": trajectory.side_request,
        "lora_path": trajectory.lora,
        "messages": [Raw(message) for message in trajectory.messages],
        "weight_versions": [{"version": v, "start": low, "end": high} for v, low, high in trajectory.weight_versions],
        "num_turns": len(trajectory.turns),
        "turns": [turn.described(begin) for turn in trajectory.turns],
        "finish_reason": trajectory.finish_reason,
        "reward_info": trajectory.reward_info,
        "multi_modal_data": {"images": trajectory.images} if trajectory.images else None,
        "exact": trajectory.exact,
        "reasons": trajectory.reasons,
        **({"missed_request_ids": trajectory.missed} if trajectory.missed else {}),
        "extra_fields": {
            "turns": [
                {"generation_id": turn.request_id, "start": turn.start - begin, "end": turn.end - begin}
                for turn in trajectory.turns
            ],
            **{
                name: [{"generation_id": i, "value": value} for i, value in values]
                for name, values in trajectory.extra.items()
            },
            **({} if trajectory.sets is None else {TOP_P: trajectory.sets}),
            **{name: array.described() for name, array in trajectory.per_token.items()},
        },
    }


def _numbers(array: NDArray[Any]) -> Iterator[bytes]:
    yield b"["
    for begin in range(0, len(array), CHUNK):
        inner = msgspec.json.encode(array[begin : begin + CHUNK].tolist())[1:-1]
        yield b"," + inner if begin else inner
    yield b"]"


def safetensors(found: Sequence[BranchTrajectory], head: Mapping[str, Any]) -> bytes:
    """Return a safetensors file. Raises BadRequestError if the library is not installed."""
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise _missing("safetensors") from error
    tensors = {
        f"{number}.{name}": np.ascontiguousarray(array)
        for number, one in enumerate(found)
        for name in ARRAYS
        if (array := getattr(one, name)) is not None
    }
    for number, one in enumerate(found):
        tensors.update({f"{number}.{name}": array.array() for name, array in one.per_token.items()})
    tensors.update({f"media.{name}": np.frombuffer(data, np.uint8) for name, (_, data) in _files(found).items()})
    rest = {str(number): _json(described(_without_files(one))) for number, one in enumerate(found)}
    metadata = {"session": _json(head), **rest}
    return bytes(save(tensors, metadata))


def arrow(found: Sequence[BranchTrajectory], head: Mapping[str, Any]) -> bytes:
    """Return an Arrow stream. Raises BadRequestError if the library is not installed."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise _missing("arrow") from error
    kinds = dict(zip(ARRAYS, (pa.int32(), pa.int32(), pa.uint8(), pa.float64()), strict=True))
    columns = {name: pa.array([getattr(one, name) for one in found], pa.list_(kinds[name])) for name in ARRAYS}
    for name in ROW_FIELDS:
        flat = [one.per_token[name].array().ravel() if name in one.per_token else None for one in found]
        if any(array is not None for array in flat):
            # `large_list`: 32-bit offsets end at two billion numbers of all trajectories together.
            columns[name] = pa.array(flat, pa.large_list(pa.int32()))
    if any(one.images for one in found):
        columns["images"] = pa.array([_spans(one) for one in found], pa.list_(pa.struct(_image_fields(pa))))
    columns["json"] = pa.array([_json(described(_without_files(one))) for one in found], pa.string())
    batches = [pa.record_batch(columns).replace_schema_metadata({"session": _json(head)})]
    if files := _files(found):
        rows = [{**{name: image[name] for name in _OF_FILE}, "bytes": data} for image, data in files.values()]
        kinds = {**dict(_image_fields(pa)), "bytes": pa.large_binary()}
        schema = pa.schema([(name, kinds[name]) for name in (*_OF_FILE, "bytes")])
        batches.append(pa.RecordBatch.from_pylist(rows, schema=schema))
    sink = pa.BufferOutputStream()
    for batch in batches:
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


_OF_FILE = ("digest", "mime", "width", "height")


def _image_fields(pa: Any) -> list[tuple[str, Any]]:
    number, text = pa.int32(), pa.string()
    sides = [("width", number), ("height", number), ("start", number), ("end", number)]
    return [("digest", text), ("mime", text), *sides, ("message", number), ("part", number)]


def _spans(trajectory: BranchTrajectory) -> list[dict[str, Any]]:
    """Return the images of a trajectory as rows without their files; `start` and `end` are their span."""
    names = (*_OF_FILE, "message", "part")
    return [
        {**{name: one[name] for name in names}, "start": one["span"][0], "end": one["span"][1]}
        for one in trajectory.images
    ]


def _files(found: Iterable[BranchTrajectory]) -> dict[str, tuple[Mapping[str, Any], bytes]]:
    """Return the images whose files are asked for and held, each once: an entry, and the file."""
    shown = {image["digest"]: image for one in found for image in one.images if image["bytes"] is not None}
    return {digest: (image, image["bytes"]) for digest, image in shown.items()}


def _without_files(trajectory: BranchTrajectory) -> BranchTrajectory:
    """Return a trajectory whose images lack their files, which stand elsewhere, once."""
    if not has_files(trajectory.images):
        return trajectory
    return msgspec.structs.replace(trajectory, images=[{**one, "bytes": None} for one in trajectory.images])


STREAMED: Mapping[str, Callable[[Iterable[BranchTrajectory], Mapping[str, Any]], Iterator[bytes]]] = {
    "json": as_json,
    "atif": as_atif,
}
"""Formats that are JSON in pieces, each of which takes little time."""

FORMATS: Mapping[str, tuple[bytes, Callable[[Sequence[BranchTrajectory], Mapping[str, Any]], bytes]]] = {
    "safetensors": (b"application/x-safetensors", safetensors),
    "arrow": (b"application/vnd.apache.arrow.stream", arrow),
    "tree": (b"application/json", tree),
}
"""The content type and the encoder of each format, by name."""


def _missing(extra: str) -> BadRequestError:
    return BadRequestError(
        f"`format` {extra} needs a library that is not installed: pip install 'tito-router[{extra}]'"
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
