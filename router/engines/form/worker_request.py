"""A body of `POST /generate` on its way to a worker, which is parsed once and printed once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Raw

from router.engines.form import media
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.engines.json import JSON_ERRORS, decode_object, is_list, is_nested, is_null
from router.engines.json_cost import LIGHT, check_weight

new_rid = partial(secrets.token_hex, 16)
"""Returns a request id of the form that SGLang itself gives. No other id begins with it (aborts match by prefix)."""


def later_rid(rid: str) -> str:
    """Return an id for a later attempt. It begins with the first id, so an abort of that id at the worker finds it too."""
    return f"{rid}-{new_rid()}"


class WorkerRequest(msgspec.Struct, eq=False):
    """What one `/generate` asks a worker for. Never changed; `body` is printed when it is first read.

    Attributes:
        fields: the top level of the body, raw. `rids` takes the place of `rid`.
        prompts: the number of prompts.
        batch: whether they came as a list.
        samples: `n`.
        stream: whether the reply is a stream.
        rids: the worker's id for each prompt. Empty where `n > 1`, for which workers make up ids, and where the client's ids
            do not fit, which the worker refuses.
        named: whether the client chose the ids.
    """

    fields: dict[str, Raw]
    prompts: int = 1
    batch: bool = False
    samples: int = 1
    stream: bool = False
    rids: tuple[str, ...] = ()
    named: bool = True
    _printed: bytes = b""

    @classmethod
    def parse(cls, body: bytes, limits: PromptLimits = PROMPT_LIMITS) -> WorkerRequest | None:
        """Return the request as the client wrote it; None if only a worker can decide what it means.

        Raises BadRequestError for more replies than one request may ask for, and BodyTooLargeError.
        """
        try:
            fields = decode_object(body)
            _check_weights(fields)
            key = next((key for key in ("input_ids", "text") if not is_null(fields.get(key))), None)
            if key is None:
                return None
            batch = (is_nested if key == "input_ids" else is_list)(fields[key])
            prompts = _count(fields[key], ids=key == "input_ids") if batch else 1
            samples = _samples(fields.get("sampling_params"))
            if samples < 1:
                return None
            if prompts * samples > 1:
                limits.check_replies(prompts * samples)
            stream = "stream" in fields and _flag(fields["stream"]) is True
            return cls._with_ids_of_client(fields, prompts, batch, samples, stream=stream)
        except JSON_ERRORS:
            return None

    @classmethod
    def checked(
        cls, fields: dict[str, Raw], prompts: int, *, batch: bool, samples: int, stream: bool
    ) -> WorkerRequest | None:
        """Return a request with well-formed fields; None if only a worker can decide whether its ids are valid."""
        if "rid" not in fields:
            return cls(fields, prompts, batch, samples, stream, _new_rids(prompts, samples), named=False)
        try:
            _check_weights(fields)
            return cls._with_ids_of_client(fields, prompts, batch, samples, stream=stream)
        except JSON_ERRORS:
            return None

    @classmethod
    def _with_ids_of_client(
        cls, fields: dict[str, Raw], prompts: int, batch: bool, samples: int, *, stream: bool
    ) -> WorkerRequest:
        raw = fields.get("rid")
        if raw is not None and not is_null(raw):
            rids = _rids(raw, prompts, batch=batch)
            return cls(fields, prompts, batch, samples, stream, () if samples > 1 else rids)
        return cls(fields, prompts, batch, samples, stream, _new_rids(prompts, samples), named=False)

    @property
    def body(self) -> bytes:
        """The body as it is sent: the same object each time."""
        if not self._printed:
            fields = self.fields
            if self.rids:
                fields = {**fields, "rid": Raw(msgspec.json.encode(self.rids if self.batch else self.rids[0]))}
            self._printed = _printed(fields) if media.IMAGES in fields else msgspec.json.encode(fields)
        return self._printed

    @property
    def listed(self) -> bool:
        """Whether the reply is a list."""
        return self.batch or self.samples > 1

    @property
    def replies(self) -> int:
        """The number of replies."""
        return self.prompts * self.samples

    @property
    def adapter(self) -> str:
        """The adapter of the first prompt; empty for the base model, and for a value that the worker refuses."""
        try:
            given = _adapters(self.fields.get("lora_path", _ABSENT))
        except JSON_ERRORS:
            return ""
        return (given if isinstance(given, str) or not given else given[0]) or ""

    def ended_in_queue(self, names: Sequence[str]) -> bytes:
        """Return the reply to a request that was aborted before a worker had it, as a worker answers from its own queue.

        `names`: what the client calls the generations; empty where it cannot name them.
        """
        replies = self.ended_replies(names or [new_rid() for _ in range(self.replies)])
        if self.stream:
            return b"".join(b"data: %b\n\n" % reply for reply in replies) + b"data: [DONE]\n\n"
        return b"[%b]" % b",".join(replies) if self.listed else replies[0]

    def ended_replies(self, names: Sequence[str]) -> list[bytes]:
        """Return such a reply for each generation: an event in a stream, else an entry of the reply."""
        meta: dict[str, Any] = {
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "completion_tokens": 0,
        }
        if b"true" in bytes(self.fields.get("return_logprob", b"")):
            meta |= {"input_token_logprobs": [], "output_token_logprobs": []}
        replies = []
        for index, name in enumerate(names):
            reply = {"text": "", "output_ids": [], "meta_info": {"id": name, **meta}}
            replies.append(msgspec.json.encode({**reply, "index": index} if self.stream and self.listed else reply))
        return replies

    def with_rids(self, rids: tuple[str, ...]) -> WorkerRequest:
        """Return the same request under other ids."""
        return msgspec.structs.replace(self, rids=rids, named=False, _printed=b"")

    def without_rid(self) -> WorkerRequest:
        """Return the same request without the client's `rid`."""
        fields = {key: value for key, value in self.fields.items() if key != "rid"}
        return msgspec.structs.replace(self, fields=fields, named=False, _printed=b"")

    def again(self, replies: Sequence[int]) -> WorkerRequest:
        """Return the request for some of the replies only, under new ids that begin with the first ones."""
        chosen = [reply // self.samples for reply in replies]
        fields = dict(self.fields)
        if self.listed:
            fields = {key: self._of(key, value, chosen) for key, value in fields.items()}
            fields["sampling_params"] = _one_sample(fields.get("sampling_params"))
        rids = tuple(later_rid(self.rids[prompt]) if self.rids else new_rid() for prompt in chosen)
        return WorkerRequest(fields, len(chosen), self.listed, 1, self.stream, rids, named=False)

    def only(self, prompts: Sequence[int]) -> WorkerRequest:
        """Return a batch without its other prompts. These keep their ids."""
        return self.again(prompts).with_rids(tuple(self.rids[prompt] for prompt in prompts))

    def _of(self, key: str, value: Raw, chosen: list[int]) -> Raw:
        """Return a field for some of the prompts: a list with one entry per prompt is cut to their entries."""
        if key in _PROMPT_FIELDS and not self.batch:
            return Raw(b"[" + b",".join([bytes(value)] * len(chosen)) + b"]")
        if not self.batch or not is_list(value) or (key == "token_ids_logprob" and not is_nested(value)):
            return value
        entries = msgspec.json.decode(value, type=list[Raw])
        if len(entries) != self.prompts:
            return value
        return Raw(b"[" + b",".join(bytes(entries[prompt]) for prompt in chosen) + b"]")


_PROMPT_FIELDS = frozenset({"input_ids", "text", media.IMAGES, media.HASHES})
"""Fields that are a list of prompts' where the prompts are a list."""


def _printed(fields: dict[str, Raw]) -> bytes:
    """Return an object as JSON. Pictures are copied once: an encoder's buffer grows, and copies them several times."""
    parts: list[bytes | Raw] = []
    for name, value in fields.items():
        parts += (b"," if parts else b"{", msgspec.json.encode(name), b":", value)
    return b"".join((*parts, b"}"))


_flag = msgspec.json.Decoder(bool | None).decode


def _check_weights(fields: dict[str, Raw]) -> None:
    for name in ("text", "sampling_params", "rid"):
        raw = fields.get(name)
        if raw is not None and len(memoryview(raw)) > LIGHT:
            check_weight(bytes(raw))


def _count(raw: Raw, *, ids: bool) -> int:
    """Return the number of prompts in a batch. Lists of ids are counted by their brackets: decoding them takes too long."""
    return bytes(raw).count(b"[") - 1 if ids else len(msgspec.json.decode(raw, type=list[Raw]))


class _SampleCount(msgspec.Struct):
    n: int | None = None


_sample_count = msgspec.json.Decoder(_SampleCount).decode
_sample_counts = msgspec.json.Decoder(list[_SampleCount | None]).decode


def _samples(raw: Raw | None) -> int:
    if raw is None or is_null(raw):
        return 1
    entries = (_sample_counts if is_list(raw) else _sample_count)(raw)
    first = entries[0] if isinstance(entries, list) and entries else entries
    return (first.n or 1) if isinstance(first, _SampleCount) else 1


def _one_sample(raw: Raw | None) -> Raw:
    if raw is None or is_null(raw):
        return Raw(b"{}")
    listed = is_list(raw)
    entries = msgspec.json.decode(raw, type=list[dict[str, Raw] | None]) if listed else [decode_object(raw)]
    kept = [{key: value for key, value in (entry or {}).items() if key != "n"} for entry in entries]
    return Raw(msgspec.json.encode(kept if listed else kept[0]))


def _new_rids(prompts: int, samples: int) -> tuple[str, ...]:
    """Return an id for each prompt; none for groups of samples, for which the worker makes up ids."""
    if samples > 1:
        return ()
    return (new_rid(),) if prompts == 1 else tuple([new_rid() for _ in range(prompts)])


def _rids(raw: Raw, prompts: int, *, batch: bool) -> tuple[str, ...]:
    """Return the client's ids; none if they do not fit the prompts, which the worker refuses."""
    given = msgspec.json.decode(raw, type=str | list[str])
    if isinstance(given, str):
        # SGLang itself numbers one id of a batch this way.
        return tuple(f"{given}_{number}" for number in range(prompts)) if batch else (given,)
    return tuple(given) if batch and len(given) == prompts == len(set(given)) else ()


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_texts = msgspec.json.Decoder(str | list[str] | None)
_ids = msgspec.json.Decoder(list[_Id | list[_Id]] | None)
_adapters = msgspec.json.Decoder(str | list[str | None] | None).decode
_ABSENT = Raw(b"null")


class RoutePrompt(NamedTuple):
    """The prompt of a request, for the choice of its worker; of a batch, the first prompt.

    Text or ids are None if they are missing or cannot be read: nothing is checked here. `alone`: the request is no batch.
    """

    text: str | None = None
    ids: Sequence[int] | None = None
    alone: bool = False


def route_prompt(body: bytes, request: WorkerRequest | None = None) -> RoutePrompt:
    """Return the prompt of a body. `request` is the parsed body, if there is one."""
    try:
        fields = decode_object(body) if request is None else request.fields
        texts = _texts.decode(fields.get("text", _ABSENT))
        given = _ids.decode(fields.get("input_ids", _ABSENT))
    except JSON_ERRORS:
        return RoutePrompt()
    text = texts if isinstance(texts, str) or not texts else texts[0]
    alone = text is texts
    ids: list[int] | None = None
    if given and isinstance(given[0], list):
        ids, alone = given[0], False  # its first item shows that it is a batch
    elif given:
        ids = [one for one in given if isinstance(one, int)]
        ids = ids if len(ids) == len(given) else None
    return RoutePrompt(text or None, ids or None, alone)
