"""What a generation looks like to whoever sends it again: its items, their ids, and which of its replies were aborted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Raw

from router.engines.sglang.json import JSON_ERRORS, decode_object, is_null
from router.engines.sglang.limits import PROMPT_LIMITS, PromptLimits
from router.engines.sglang.reply import UnreadableReplyError, edit_meta, split_list
from router.engines.sglang.stream import event_data
from router.http.json_cost import check_weight

_LIST = re.compile(rb"\s*\[")
_NESTED = re.compile(rb"\s*\[\s*\[")


ATTEMPT = "attempt"
"""Key in `scope["state"]` under which whoever made a body leaves it with what is known of it, as `(body, Attempt)`."""


def new_rid() -> str:
    """A request id of the form that SGLang itself gives; no other one begins with it (aborts match by prefix)."""
    return uuid4().hex


def later_rid(rid: str) -> str:
    """An id for a further attempt: it begins with the first one, by which an abort at the worker finds it too."""
    return f"{rid}-{new_rid()}"


class Attempt(msgspec.Struct, frozen=True):
    """A body of `POST /generate` on its way to a worker.

    Attributes:
        fields: its top level, raw.
        prompts: how many there are.
        batch: whether they came as a list.
        samples: `n`.
        stream: whether the reply is one.
        rids: the worker's id for each prompt; none where `n > 1`, for then workers make up their own.
    """

    fields: dict[str, Raw]
    prompts: int
    batch: bool
    samples: int
    stream: bool
    rids: tuple[str, ...]

    @classmethod
    def first(cls, body: bytes, limits: PromptLimits = PROMPT_LIMITS) -> Attempt | None:
        """The request as the client wrote it, with ids where it gave none; None if only a worker can tell what it means.

        Raises BadRequestError for more replies than one request may ask for, and BodyTooLargeError.
        """
        try:
            fields = decode_object(body)
            for name in ("text", "sampling_params", "rid"):
                check_weight(bytes(fields.get(name, b"")))
            key = next((key for key in ("input_ids", "text") if not is_null(fields.get(key))), None)
            if key is None:
                return None
            batch = (_NESTED if key == "input_ids" else _LIST).match(fields[key]) is not None
            prompts = _count(fields[key], ids=key == "input_ids") if batch else 1
            samples = _samples(fields.get("sampling_params"))
            if prompts * samples > 1:
                limits.check_replies(prompts * samples)
            stream = msgspec.json.decode(fields.get("stream", Raw(b"null")), type=bool | None)
            rids = _rids(fields.get("rid"), prompts, batch=batch)
        except JSON_ERRORS:
            return None
        return cls(fields, prompts, batch, samples, bool(stream), () if samples > 1 else rids)

    @classmethod
    def single(cls, fields: dict[str, Raw], rid: str, *, stream: bool) -> Attempt:
        """A request of our own making for one reply to one prompt."""
        return cls(fields, 1, False, 1, stream, (rid,))

    @property
    def listed(self) -> bool:
        """Whether the reply is a list."""
        return self.batch or self.samples > 1

    @property
    def replies(self) -> int:
        """How many replies there will be."""
        return self.prompts * self.samples

    def again(self, replies: Sequence[int]) -> Attempt:
        """The request for some of the replies only, under ids that no worker has seen and that begin with the first ones."""
        chosen = [reply // self.samples for reply in replies]
        fields = dict(self.fields)
        if self.listed:
            fields = {key: self._of(key, value, chosen) for key, value in fields.items()}
            fields["sampling_params"] = _one_sample(fields.get("sampling_params"))
        rids = tuple(later_rid(self.rids[prompt]) if self.rids else new_rid() for prompt in chosen)
        return Attempt(fields, len(chosen), self.listed, 1, self.stream, rids)

    def encode(self) -> bytes:
        """The body."""
        if not self.rids:
            return msgspec.json.encode(self.fields)
        rid = msgspec.json.encode(self.rids if self.batch else self.rids[0])
        return msgspec.json.encode({**self.fields, "rid": Raw(rid)})

    def _of(self, key: str, value: Raw, chosen: list[int]) -> Raw:
        """What a field has to say about some of the prompts: a list with one entry a prompt is a list of theirs."""
        if key in ("input_ids", "text") and not self.batch:
            return Raw(b"[" + b",".join([bytes(value)] * len(chosen)) + b"]")
        if not self.batch or not _LIST.match(value) or (key == "token_ids_logprob" and not _NESTED.match(value)):
            return value
        entries = msgspec.json.decode(value, type=list[Raw])
        if len(entries) != self.prompts:
            return value
        return Raw(b"[" + b",".join(bytes(entries[prompt]) for prompt in chosen) + b"]")


def _count(raw: Raw, *, ids: bool) -> int:
    """How many prompts there are in a batch. Of ids there are too many to look at each."""
    return bytes(raw).count(b"[") - 1 if ids else len(msgspec.json.decode(raw, type=list[Raw]))


def _samples(raw: Raw | None) -> int:
    if is_null(raw) or raw is None:
        return 1
    entries = msgspec.json.decode(raw, type=list[_Sampling | None] if _LIST.match(raw) else _Sampling)
    first = entries[0] if isinstance(entries, list) and entries else entries
    return (first.n or 1) if isinstance(first, _Sampling) else 1


class _Sampling(msgspec.Struct):
    n: int | None = None


def _one_sample(raw: Raw | None) -> Raw:
    if raw is None or is_null(raw):
        return Raw(b"{}")
    listed = _LIST.match(raw) is not None
    entries = msgspec.json.decode(raw, type=list[dict[str, Raw] | None]) if listed else [decode_object(raw)]
    kept = [{key: value for key, value in (entry or {}).items() if key != "n"} for entry in entries]
    return Raw(msgspec.json.encode(kept if listed else kept[0]))


def _rids(raw: Raw | None, prompts: int, *, batch: bool) -> tuple[str, ...]:
    """The client's ids, or new ones; none if they do not fit, which is for the worker to refuse."""
    if raw is None or is_null(raw):
        return tuple(new_rid() for _ in range(prompts))
    given = msgspec.json.decode(raw, type=str | list[str])
    if isinstance(given, str):
        # SGLang's own way with one id for a batch.
        return tuple(f"{given}_{number}" for number in range(prompts)) if batch else (given,)
    return tuple(given) if batch and len(given) == prompts == len(set(given)) else ()


class _Finish(msgspec.Struct):
    type: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None


class _Head(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None
    object: Any = None


_head = msgspec.json.Decoder(_Head)


def was_aborted(reply: bytes | Raw) -> bool:
    """Whether a generation was aborted, and not because something was wrong with it."""
    if b'"abort"' not in bytes(reply):
        return False
    try:
        meta = _head.decode(reply).meta_info
    except JSON_ERRORS:
        return False
    finish = None if meta is None else meta.finish_reason
    return finish is not None and finish.type == "abort" and finish.status_code is None


def refusal_status(event: bytes) -> int | None:
    """The HTTP status that a first event stands for, if it says that nothing will come of its stream; else None.

    The stream's own status is 200 all the same. `event` is its payload, or the beginning of the stream.
    """
    if b'"error"' not in event and b'"abort"' not in event:
        return None
    try:
        head = _head.decode(event_data(event.partition(b"\n\n")[0]) or event)
    except JSON_ERRORS:
        return None
    finish = None if head.meta_info is None else head.meta_info.finish_reason
    if head.error is not None:
        return _code(head.error)
    return finish.status_code if finish is not None and finish.type == "abort" else None


def was_refused(event: bytes) -> bool:
    """Whether an event says that nothing will come of its stream."""
    return refusal_status(event) is not None


def is_error(body: bytes) -> bool:
    """Whether a reply is an error as engines write it, and not that of some web server in front of them or in their place."""
    try:
        head = _head.decode(body)
    except JSON_ERRORS:
        return False
    return isinstance(head.error, dict) or head.object == "error"


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def aborted_replies(body: bytes, attempt: Attempt) -> tuple[list[Raw], list[int]]:
    """The replies of a body, and which of them were aborted; nothing if it cannot be read."""
    try:
        replies = split_list(body, attempt.replies) if attempt.listed else [Raw(body)]
    except UnreadableReplyError:
        return [], []
    return replies, [number for number, reply in enumerate(replies) if was_aborted(reply)]


def renamed(reply: bytes | Raw, rid: str) -> bytes:
    """A reply under the id that the client knows."""
    try:
        return edit_meta(reply, add={"id": msgspec.json.encode(rid)})
    except UnreadableReplyError:
        return bytes(reply)
