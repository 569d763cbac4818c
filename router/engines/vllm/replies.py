"""Replies of a vLLM worker, read from either of its two endpoints, and printed as SGLang's worker would print them.

Ids that are missing or wrong make a reply unreadable. Logprobs that are missing or wrong become null, because the tokens are
still the sampled ones. A client that asked for logprobs sees that such a reply is not exact; no logprob is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from router.engines.engine import UntranslatableError
from router.engines.form.reply import DEFAULT_VERSION, PLACES
from router.engines.json import JSON_ERRORS, is_null
from router.engines.vllm.requests import VllmPrompt

_CLAMPED = -9999.0
"""vLLM prints this for a logprob that is infinite or not a number. The real one is unknown, so it becomes null."""
_ID_PREFIX = "token_id:"


class Content(msgspec.Struct):
    """One token's logprob, from `/inference/v1/generate`. `token`: its text, or `token_id:` and its id, by a worker's flag."""

    logprob: float | None = None
    token: str | None = None


class Logprobs(msgspec.Struct):
    """The logprobs of a choice: `content` from `/inference/v1/generate`, the rest from `/v1/completions`."""

    content: list[Content] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: Raw = Raw(b"null")
    top_logprobs: Raw = Raw(b"null")


class VersionSpan(msgspec.Struct):
    """A half-open run of sampled tokens, and the version they were sampled under."""

    version: str
    start: int
    end: int


class _PromptLogprob(msgspec.Struct):
    logprob: float | None = None
    rank: int | None = None


PromptLogprobs = list[dict[int, _PromptLogprob] | None]
"""The logprobs of the tokens of a prompt: for each, of itself and of others."""


class VllmChoice(msgspec.Struct):
    """One generation, or the new part of it in an event of a stream."""

    index: int
    text: str
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: Raw = Raw(b"null")
    prompt_logprobs: PromptLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class VllmUsage(msgspec.Struct):
    """The worker's own counts, of all samples together."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were cached; 0 if the worker does not tell (`--enable-prompt-tokens-details`)."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0

    def sampled(self, prompt: VllmPrompt, count: int) -> int:
        """Return `completion_tokens` for a reply with `count` tokens: by the worker's count, if that is of this reply alone.

        It shows whether a reply lost tokens on its way.
        """
        alone = len(prompt.rids) == 1 and not prompt.empty
        return self.completion_tokens if alone and self.completion_tokens is not None else count


class _Place(msgspec.Struct):
    offset: int
    length: int


class Body(msgspec.Struct):
    """A reply in one piece, or one event of a stream.

    What is about the prompt stands here in an answer of `/inference/v1/generate`, and in each choice in one of
    `/v1/completions`. `mm_placeholders`: where media are among the prompt's ids, by modality.
    """

    choices: list[VllmChoice] = []
    usage: VllmUsage | None = None
    prompt_token_ids: Raw = Raw(b"null")
    prompt_logprobs: PromptLogprobs | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None
    kv_transfer_params: Raw = Raw(b"null")
    ec_transfer_params: Raw = Raw(b"null")
    error: Raw = Raw(b"null")

    @property
    def transfers(self) -> dict[str, Raw]:
        """The fields by which another worker goes on with the caches of this one, if the request asked for that."""
        found = {"kv_transfer_params": self.kv_transfer_params, "ec_transfer_params": self.ec_transfer_params}
        return {key: value for key, value in found.items() if not is_null(value)}

    @property
    def places(self) -> list[tuple[int, int]]:
        """Offset and length of the run of ids of each picture, in order."""
        return [(one.offset, one.length) for found in (self.mm_placeholders or {}).values() for one in found]


_decode = msgspec.json.Decoder(Body).decode
_prompt_ids = msgspec.json.Decoder(list[int]).decode
_strings = msgspec.json.Decoder(list[str]).decode
_candidates = msgspec.json.Decoder(list[dict[str, float] | None]).decode


def read(data: bytes) -> Body:
    """Read a reply in one piece, or an event. Raises UntranslatableError."""
    try:
        return _decode(data)
    except JSON_ERRORS as error:
        raise UntranslatableError(str(error)) from error


def check_prompt(prompt: VllmPrompt, told: Raw) -> int | None:
    """Return the number of tokens that the worker read; None if it did not say. Raise UntranslatableError for other tokens.

    With pictures it read more than it was sent: the middleware, which knows how many, compares them.
    """
    if is_null(told):
        if prompt.ids is not None:
            raise UntranslatableError("it has no `prompt_token_ids`, which vLLM 0.10.2 and later give")
        return None
    if bytes(told) == bytes(prompt.ids or b""):
        return bytes(told).count(b",") + 1
    try:
        read_ids = _prompt_ids(told)
        sent = None if prompt.ids is None else _prompt_ids(prompt.ids)
    except JSON_ERRORS as error:
        raise UntranslatableError(f"`prompt_token_ids`: {error}") from error
    if sent is not None and sent != read_ids and not prompt.images:
        raise UntranslatableError(f"the worker read {len(read_ids)} prompt tokens that are not the {len(sent)} sent")
    return len(read_ids)


def new_ids(choice: VllmChoice) -> list[int]:
    """Return the sampled ids of a choice. Raise UntranslatableError."""
    ids = choice.token_ids
    if ids is None:
        raise UntranslatableError("it has no `token_ids`, which vLLM 0.10.2 and later give")
    if ids and min(ids) < 0:
        raise UntranslatableError("a token id is negative")
    return ids


def new_logprobs(choice: VllmChoice, count: int) -> list[float | None]:
    """Return the logprobs of the sampled ids of a choice, `count` of them; only nulls if fewer came.

    Raise UntranslatableError if more came: then ids are missing.
    """
    found = choice.logprobs
    values: list[float | None] = []
    if found is not None and found.content is not None:
        values = [one.logprob for one in found.content]
    elif found is not None and found.token_logprobs is not None:
        values = found.token_logprobs
    if len(values) > count:
        raise UntranslatableError(f"{len(values)} logprobs came with {count} token ids")
    if len(values) < count:
        return [None] * count
    return [_known(one) for one in values] if _CLAMPED in values else values


def _known(logprob: float | None) -> float | None:
    return None if logprob == _CLAMPED else logprob


def entries(choice: VllmChoice, prompt: VllmPrompt, ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `meta_info` with logprobs of a choice's sampled tokens."""
    values = new_logprobs(choice, len(ids))
    texts: Sequence[str | None] = [None] * len(ids)
    found = choice.logprobs or Logprobs()
    tokens, top, content = found.tokens, found.top_logprobs, found.content
    try:
        if prompt.texts and ids:
            told = _strings(tokens) if content is None else [one.token or "" for one in content]
            texts = told if len(told) == len(ids) else texts
        out: dict[str, Any] = {"output_token_logprobs": list(zip(values, ids, texts, strict=True))}
        if prompt.top:
            out["output_top_logprobs"] = [_top(one, prompt.top) for one in _per_token(top, len(ids))]
        if prompt.token_ids:
            wanted = prompt.token_ids
            out["output_token_ids_logprobs"] = [_of_ids(one, wanted) for one in _per_token(top, len(ids))]
    except (*JSON_ERRORS, ValueError) as error:
        raise UntranslatableError(f"logprobs: {error!r}") from error
    return out


def _per_token(raw: bytes | Raw, count: int) -> list[dict[int, float | None]]:
    """Return the candidates of each token; none if they are for another number of tokens."""
    found = (_candidates(raw) if count else None) or []
    if len(found) != count:
        return [{} for _ in range(count)]
    return [
        {int(key.removeprefix(_ID_PREFIX)): _known(one) for key, one in (candidates or {}).items()}
        for candidates in found
    ]


def _top(candidates: dict[int, float | None], count: int) -> list[tuple[float | None, int, None]]:
    """Return the best candidates. vLLM puts the sampled token before them if it is not among them."""
    pairs = list(candidates.items())
    pairs = pairs[1:] if len(pairs) > count else pairs
    ranked = sorted(pairs, key=lambda pair: _CLAMPED if pair[1] is None else pair[1], reverse=True)
    return [(one, token, None) for token, one in ranked]


def _of_ids(candidates: dict[int, float | None], wanted: Sequence[int]) -> list[tuple[float | None, int, None]]:
    return [(candidates.get(token), token, None) for token in wanted]


def prompt_entries(
    choice: VllmChoice, prompt: VllmPrompt, told_ids: Raw, found: PromptLogprobs | None
) -> dict[str, Any]:
    """Return the fields of `meta_info` with logprobs of the prompt's own tokens. `told_ids`: as the worker read them."""
    if prompt.prompt_from is None:
        return {"input_token_logprobs": []}
    told = found or []
    try:
        ids = _prompt_ids(told_ids)
    except JSON_ERRORS as error:
        raise UntranslatableError(f"`prompt_token_ids`: {error!r}") from error
    if choice.finish_reason == "abort" and len(told) < len(ids):
        return {"input_token_logprobs": []}  # it ended before the prompt was read
    if len(told) != len(ids):
        told = [None] * len(ids)
    # SGLang gives none for the first one: nothing it has computed stands before it.
    pairs = list(zip(ids, told, strict=True))[prompt.prompt_from :]
    pairs[:1] = [(token, None) for token, _ in pairs[:1]]
    out: dict[str, Any] = {"input_token_logprobs": [(_of_prompt(one, token), token, None) for token, one in pairs]}
    if prompt.top:
        out["input_top_logprobs"] = [one and _best(one, prompt.top) for _, one in pairs]
    return out


def _of_prompt(candidates: dict[int, _PromptLogprob] | None, token: int) -> float | None:
    found = (candidates or {}).get(token)
    return None if found is None else _known(found.logprob)


def _best(candidates: dict[int, _PromptLogprob], count: int) -> list[tuple[float | None, int, None]]:
    known = [(_known(one.logprob), token, None) for token, one in candidates.items()]
    return sorted(known, key=lambda one: _CLAMPED if one[0] is None else one[0], reverse=True)[:count]


def finish(choice: VllmChoice, tokens: int, last: int | None) -> dict[str, Any]:
    """Return SGLang's `finish_reason`. `tokens`: how many were sampled; `last`: the last of them."""
    if choice.finish_reason == "length":
        return {"type": "length", "length": tokens}
    if choice.finish_reason == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    # At EOS there is no `stop_reason`.
    return {"type": "stop", "matched": last if choice.stop_reason is None else choice.stop_reason}


def versions(
    spans: Sequence[VersionSpan] | None, tokens: int, known: Callable[[], str | None], *, can_be_told: bool
) -> dict[str, Any]:
    """Return the fields of `meta_info` with weight versions. Raise UntranslatableError.

    `can_be_told`: whether the worker accepts a weight version. A worker that does not always reports `default`; then the
    version that this router knows holds. From a worker that does, `default` is the version that sampled the tokens.
    """
    named = known()
    told = [(one.version, one.start, one.end) for one in spans or ()]
    nothing_said = not can_be_told and {one[0] for one in told} == {DEFAULT_VERSION}
    if not told or (nothing_said and named not in (None, DEFAULT_VERSION)):
        return {"weight_version": named or DEFAULT_VERSION}
    at = 0
    for _, start, end in told:
        if start != at or end < start:
            raise UntranslatableError(f"`weight_versions` do not follow each other: {told}")
        at = end
    if at != tokens:
        raise UntranslatableError(f"`weight_versions` are of {at} tokens, and there are {tokens}")
    return {
        "weight_version": told[-1][0],
        "weight_versions": [{"version": one, "start": start, "end": end} for one, start, end in told],
    }


def printed_whole(
    choice: VllmChoice, prompt: VllmPrompt, body: Body, told_ids: Raw, known: Callable[[], str | None]
) -> dict[str, Any]:
    """Return SGLang's reply for a finished choice of a body, to be printed. Raise UntranslatableError.

    `told_ids`: the ids of the prompt, as the worker read them.
    """
    usage = body.usage
    read_tokens = check_prompt(prompt, told_ids)
    ids = new_ids(choice)
    if choice.finish_reason is None:
        raise UntranslatableError("it is not finished")
    if prompt.empty:
        choice = VllmChoice(
            choice.index, "", [], Logprobs(token_logprobs=[]), "length", None, told_ids, choice.prompt_logprobs
        )
        ids = []
    meta: dict[str, Any] = {
        "id": prompt.rids[choice.index],
        "finish_reason": finish(choice, len(ids), ids[-1] if ids else None),
        "prompt_tokens": usage.prompt_tokens if read_tokens is None and usage is not None else read_tokens,
        **versions(choice.weight_versions, len(ids), known, can_be_told=prompt.can_be_told),
        "num_retractions": 0,
    }
    if prompt.logprobs:
        meta |= {
            **prompt_entries(choice, prompt, told_ids, choice.prompt_logprobs or body.prompt_logprobs),
            **entries(choice, prompt, ids),
            "output_token_logprobs_length": len(ids),
        }
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(ids) if usage is None else usage.sampled(prompt, len(ids)),
        "cached_tokens": 0 if usage is None else usage.cached,
        **body.transfers,
    }
    reply: dict[str, Any] = {"text": choice.text, "output_ids": ids, "meta_info": meta}
    if prompt.shows_prompt:
        reply["prompt_token_ids"] = told_ids
        if prompt.images:
            reply[PLACES] = body.places
    return reply
