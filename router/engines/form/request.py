"""Bodies of `POST /generate` and of weight updates, as SGLang's Python frontend (0.5.23) takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from router.engines.form import media, request_checks, segments
from router.engines.form.fields import parse_object, read_ids, read_texts, typed
from router.engines.form.limits import LONGEST_NAME, PROMPT_LIMITS, AdapterPath, PromptLimits
from router.engines.form.segments import Segment
from router.engines.form.worker_request import WorkerRequest
from router.engines.json import JSON_ERRORS, NULL, is_list, is_null
from router.errors import BadRequestError

_LOGPROB_OPTIONS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")
UNRECORDABLE = {
    **dict.fromkeys(("image_data", "video_data", "audio_data"), "multimodal"),
    "session_params": "session_params",
}
"""Fields by which a worker reads more than the tokens of a prompt, with the reason why its reply is not recorded."""
_OURS = ("return_trajectory",)
_PROMPT = ("text", "input_ids", segments.FIELD)
_TYPED: dict[str, tuple[Any, str]] = {
    "stream": (bool, "true or false"),
    "return_trajectory": (bool, "true or false"),
    "routed_experts_start_len": (int, "an integer"),
    "rid": (str | list[str | None], "a string, or a list of them"),
    "lora_path": (AdapterPath | list[AdapterPath | None], "a string, or a list of them"),
}
T = TypeVar("T")


class PromptOptions(NamedTuple):
    """The options of a request for one of its prompts.

    Attributes:
        skips_special: `skip_special_tokens`.
        logprobs: `return_logprob`.
        rid: the client's request id; None with `n > 1`, where workers give every sample an id of its own.
        experts_from: `routed_experts_start_len`, the first token of which the worker reports the experts.
    """

    skips_special: bool
    logprobs: bool
    rid: str | None
    experts_from: int


class GenerateRequest(msgspec.Struct, frozen=True):
    """A body of `POST /generate`, checked as far as the router needs to understand it.

    One prompt or a batch of them, each sampled `samples` times: replies come prompt by prompt, `[p0s0, p0s1, p1s0, ...]`.

    Attributes:
        fields: the top level, raw.
        sampling: the raw `sampling_params` of every prompt; one entry if they share them, empty if there are none.
        texts: the prompts, if they came as text.
        ids: the prompts, if they came as ids (ids win over text, as with SGLang), or once their segments are `assembled`.
        segments: the prompts, if they came as segments.
        batch: whether the client sent a list of prompts; then the reply is a list, too.
        samples: `n`.
        wants_logprobs: whether the client asked for logprobs; one entry per prompt, or one for all.
        rids: the client's request ids as it gave them: one id, a list, or None.
        lora_paths: the adapters, in the same form.
        experts_from: `routed_experts_start_len`.
        prompts: the number of prompts; 0 if they are embeddings.
        listed: whether the reply is a list of generations.
        respelled: whether the worker gets other `sampling_params` than the client sent, see `_respelled`.
    """

    fields: dict[str, Raw]
    sampling: list[dict[str, Raw]]
    texts: list[str] | None
    ids: list[list[int]] | None
    segments: list[list[Segment]] | None
    batch: bool
    samples: int
    stream: bool
    wants_logprobs: list[bool]
    wants_trajectory: bool
    rids: str | list[str | None] | None = None
    lora_paths: str | list[str | None] | None = None
    experts_from: int = 0
    prompts: int = 0
    listed: bool = False
    respelled: bool = False

    @classmethod
    def parse(
        cls, body: bytes, limits: PromptLimits = PROMPT_LIMITS, *, vocabulary: int | None = None
    ) -> GenerateRequest:
        """Read a body. Raises TextTooLongError, and BadRequestError for a body outside of the workers' valid range.

        `vocabulary` is the number of the model's ids; without it nothing is refused for ids outside of the vocabulary.
        """
        fields = parse_object(body)
        texts, ids, parts, batch = _prompts(fields, limits)
        prompts = texts or ids or parts
        sampling = _sampling(fields, listed=batch or prompts is None)
        asked = None
        if "return_logprob" in fields:
            asked = typed(fields, "return_logprob", bool | list[bool], "true or false, or a list of them")
        logprobs = asked if isinstance(asked, list) and asked else [asked is True]
        count = None if prompts is None else len(prompts)
        request_checks.check(fields, sampling, count, batch=batch, logprobs=any(logprobs), vocabulary=vocabulary)
        samples = _samples(sampling)
        if samples * (count or 1) > 1:
            limits.check_replies(samples * (count or 1))
        given: dict[str, Any] = {}
        for key, expected in _TYPED.items():
            if key in fields:
                given[key] = typed(fields, key, *expected)
        rids = given.get("rid")
        if rids is not None:
            _check_rids(rids)
        return cls(
            fields,
            sampling,
            texts,
            ids,
            parts,
            batch,
            samples,
            bool(given.get("stream")),
            logprobs,
            bool(given.get("return_trajectory")),
            rids,
            given.get("lora_path"),
            given.get("routed_experts_start_len") or 0,
            prompts=count or 0,
            listed=batch or samples > 1,
            respelled=any(map(_needs_respelling, sampling)),
        )

    @property
    def unrecordable(self) -> str | None:
        """Why a reply to this request cannot be recorded; None if it can."""
        if not self.prompts:
            return "input_embeds"
        for key, reason in UNRECORDABLE.items():
            if key in self.fields and media.asks(self.fields, key):
                return reason
        return None

    def images(self) -> list[list[str]] | None:
        """Return the pictures of each prompt, as they were given; None if there are none. Raises BadRequestError."""
        return media.read(self.fields, self.prompts, batch=self.batch)

    def options(self, prompt: int) -> PromptOptions:
        """Return the options for a prompt."""
        rid = None if self.rids is None else self.rid(prompt)
        logprobs = _nth(self.wants_logprobs, prompt, False)
        return PromptOptions(self.skips_special(prompt), logprobs, rid, self.experts_from)

    def skips_special(self, prompt: int) -> bool:
        sampling: dict[str, Raw] = _nth(self.sampling, prompt, {})
        return "skip_special_tokens" not in sampling or (
            typed(sampling, "skip_special_tokens", bool, "true or false") is not False
        )

    def lora_path(self, prompt: int) -> str:
        """Return the adapter of a prompt; empty if it has none."""
        found = self.lora_paths
        return (_nth(found, prompt, None) if isinstance(found, list) else found) or ""

    def rid(self, prompt: int) -> str | None:
        """Return the client's request id of a prompt; None with `n > 1`, where workers give every sample an id of its own."""
        rid = self.rids
        if self.samples > 1 or (self.batch and isinstance(rid, str)):
            return None
        found = _nth(rid, prompt, None) if isinstance(rid, list) else rid
        return found if isinstance(found, str) else None

    def assembled(self, prompts: list[list[int]]) -> GenerateRequest:
        """Return the same request with the ids of its segments, as if it had come as ids."""
        return msgspec.structs.replace(self, ids=prompts)

    def passed_on(self, body: bytes) -> bytes:
        """Return the body that a worker gets of a request that is not recorded: unchanged where SGLang can take it.

        If there are ids and a text, the text is removed: SGLang would decide by the text whether the ids are a batch. Segments
        are replaced by their ids.
        """
        if self.segments is not None:
            assert self.ids is not None, "the segments are assembled"
            return self.with_ids(self.ids, force_logprobs=False)
        both = self.ids is not None and not is_null(self.fields.get("text"))
        if not both and not self.respelled:
            return body
        out = {key: value for key, value in self.fields.items() if key != "text" or not both}
        if self.respelled:
            out["sampling_params"] = self._respelled(out["sampling_params"])
        return msgspec.json.encode(out)

    def for_worker(
        self,
        prompts: Sequence[Sequence[int] | Raw],
        outer: WorkerRequest | None = None,
        *,
        force_logprobs: bool,
        further: Mapping[str, Raw] | None = None,
    ) -> tuple[bytes, WorkerRequest | None]:
        """Return the body that a worker gets of a recorded request, and its parsed form if there is one.

        Args:
            prompts: the ids of each, or a JSON list of them.
            outer: the request as parsed by an outer layer. If that layer made up the ids, no client has chosen them.
            force_logprobs: ask for logprobs, whatever the client asked for.
            further: fields of the router's own, in place of the client's.
        """
        fields = self._with_ids(prompts, force_logprobs=force_logprobs)
        if further is not None:
            fields |= further
        request = WorkerRequest.checked(
            fields, len(prompts), batch=self.batch, samples=self.samples, stream=self.stream
        )
        if request is None:
            return msgspec.json.encode(fields), None
        if outer is not None and request.rids == outer.rids:
            request.named = outer.named
        return request.body, request

    def with_ids(self, prompts: Sequence[Sequence[int] | Raw], *, force_logprobs: bool) -> bytes:
        """Return the body with the ids of every prompt in place of its text or segments."""
        return msgspec.json.encode(self._with_ids(prompts, force_logprobs=force_logprobs))

    def _with_ids(self, prompts: Sequence[Sequence[int] | Raw], *, force_logprobs: bool) -> dict[str, Raw]:
        out: dict[str, Raw] = {}
        ids = prompts if self.batch else prompts[0]
        encoded = ids if isinstance(ids, Raw) else Raw(msgspec.json.encode(ids))
        drop_options = force_logprobs and not any(self.wants_logprobs)
        for key, value in self.fields.items():
            if key in _PROMPT:
                out["input_ids"] = encoded
            elif key in _OURS or (drop_options and key in _LOGPROB_OPTIONS):
                continue
            elif key == "sampling_params" and self.respelled:
                out[key] = self._respelled(value)
            else:
                out[key] = value
        if force_logprobs:
            out["return_logprob"] = Raw(b"true")
        return out

    def biased(self, bias: Mapping[str, float]) -> Raw:
        """Return the `sampling_params` that a worker gets, with these biases (by token) beside the client's own."""
        given = self.fields.get("sampling_params", NULL)
        entries = self.sampling
        if self.respelled:
            printed = self._respelled(given)
            entries = (
                msgspec.json.decode(printed, type=list[dict[str, Raw]]) if is_list(given) else [parse_object(printed)]
            )
        kept = []
        for one in entries or [{}]:
            theirs = typed(one, "logit_bias", dict[str, float] | None, "a map") if "logit_bias" in one else None
            kept.append({**one, "logit_bias": Raw(msgspec.json.encode({**(theirs or {}), **bias}))})
        return Raw(msgspec.json.encode(kept if is_list(given) and kept else kept[0]))

    def _respelled(self, value: Raw) -> Raw:
        """Return the `sampling_params` without `"n": null`, which is no integer, and with -1 for a `top_k` of 0.

        Both mean all tokens: 0 to vLLM and to Hugging Face's generation, -1 to SGLang.
        """
        kept = [{key: raw for key, raw in one.items() if key != "n" or not is_null(raw)} for one in self.sampling]
        for one in kept:
            if "top_k" in one and request_checks.integers(one, "top_k") == [0]:
                one["top_k"] = Raw(b"-1")
        return Raw(msgspec.json.encode(kept if is_list(value) else kept[0]))


def _needs_respelling(params: dict[str, Raw]) -> bool:
    return ("n" in params and is_null(params["n"])) or (
        "top_k" in params and request_checks.integers(params, "top_k") == [0]
    )


def _check_rids(given: str | list[str | None]) -> None:
    """Raise BadRequestError for an id that is too long."""
    for rid in given if isinstance(given, list) else (given,):
        if rid is not None and len(rid) > LONGEST_NAME:
            raise BadRequestError(f"`rid` is longer than {LONGEST_NAME} characters")


def _samples(sampling: list[dict[str, Raw]]) -> int:
    """Return `n`, which must be the same for all prompts. Raises BadRequestError."""
    counts: set[int] = set()
    for params in sampling:
        count = typed(params, "n", int, "an integer") if "n" in params else 1
        counts.add(1 if count is None else count)
    if min(counts, default=1) < 1:
        raise BadRequestError(f"`n` must be at least 1, not {min(counts)}")
    if len(counts) > 1:
        raise BadRequestError(f"`n` must be the same for all prompts of a batch, not {sorted(counts)}")
    return max(counts, default=1)


def _prompts(
    fields: dict[str, Raw], limits: PromptLimits
) -> tuple[list[str] | None, list[list[int]] | None, list[list[Segment]] | None, bool]:
    in_segments = segments.read(fields, limits) if segments.FIELD in fields else None
    if in_segments is not None:
        return None, None, *in_segments
    prompts, nested = read_ids(fields, "input_ids", limits) if "input_ids" in fields else (None, False)
    texts, listed = read_texts(fields, "text", limits) if "text" in fields else (None, False)
    if prompts is not None:
        if not all(prompts):
            raise BadRequestError("`input_ids` is empty, or has an empty prompt in it: give at least one token id")
        return None, prompts, None, nested
    if texts is not None:
        if not texts or not all(texts):
            raise BadRequestError("`text` is empty, or has an empty prompt in it: give at least one character")
        return texts, None, None, listed
    if is_null(fields.get("input_embeds")):
        raise BadRequestError(
            "a prompt is missing: give `text` (a string) or `input_ids` (a list of token ids), or `prompt_segments` "
            "(a list of both)"
        )
    return None, None, None, False


def _sampling(fields: dict[str, Raw], *, listed: bool) -> list[dict[str, Raw]]:
    """Return the `sampling_params`, of which there may be several if `listed`. Raises BadRequestError."""
    raw = fields.get("sampling_params")
    if raw is None or raw == NULL:
        return []
    if not is_list(raw):
        return [parse_object(raw, "`sampling_params`")]
    entries = typed(fields, "sampling_params", list[Raw], "an object, or a list of objects")
    if not listed:
        raise BadRequestError(
            f"`sampling_params` is a list of {len(entries)}: give one object, for there is one prompt"
        )
    return [{} if is_null(entry) else parse_object(entry, "an entry of `sampling_params`") for entry in entries]


def _nth(values: list[T], index: int, default: T) -> T:
    """Return the value for one prompt: its own, or the one that all share."""
    if len(values) == 1:
        return values[0]
    return values[index] if index < len(values) else default


class _WeightUpdate(msgspec.Struct):
    new_version: str | None = None
    weight_version: str | None = None


def new_weight_version(body: bytes) -> str | None:
    """Return the version that a body of `/update_weight_version` or `/update_weights_from_*` brings; None if it brings none.

    Raises BadRequestError for a version that is longer than `LONGEST_NAME`.
    """
    try:
        update = msgspec.json.decode(body, type=_WeightUpdate)
    except JSON_ERRORS:
        return None
    version = update.weight_version if update.new_version is None else update.new_version
    if version is not None and len(version) > LONGEST_NAME:
        raise BadRequestError(f"the weight version is longer than {LONGEST_NAME} characters")
    return version
