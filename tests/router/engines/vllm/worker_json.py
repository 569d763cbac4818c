"""What a vLLM worker prints (0.32), from a generation that a test made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from router.engines.vllm.requests import COMPLETIONS, GENERATE

Json = dict[str, Any]
ENDPOINTS = (COMPLETIONS, GENERATE)


@dataclass(frozen=True)
class Piece:
    """What one event of a stream adds."""

    text: str
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Sample:
    """One generation."""

    pieces: list[Piece]
    finish: str = "length"
    stop_reason: int | str | None = None
    version: str = "default"

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [one for piece in self.pieces for one in piece.ids]

    @property
    def logprobs(self) -> list[float]:
        return [one for piece in self.pieces for one in piece.logprobs]


def logprobs(endpoint: str, ids: list[int], values: list[float]) -> Json:
    if endpoint == GENERATE:
        return {"content": [{"token": "x", "logprob": one, "bytes": [1], "top_logprobs": []} for one in values]}
    tops = [{f"token_id:{token}": one} for token, one in zip(ids, values, strict=True)]
    return {
        "text_offset": [0] * len(ids),
        "token_logprobs": values,
        "tokens": [str(token) for token in ids],
        "top_logprobs": tops,
    }


def choice(endpoint: str, index: int, piece: Piece, asked: bool = True) -> Json:
    return {
        "index": index,
        "text": piece.text,
        "logprobs": logprobs(endpoint, piece.ids, piece.logprobs) if asked else None,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": piece.ids,
    }


def ended(endpoint: str, sample: Sample) -> Json:
    spans = {"weight_versions": [{"version": sample.version, "start": 0, "end": len(sample.ids)}]}
    return {
        "finish_reason": sample.finish,
        "stop_reason": sample.stop_reason,
        **(spans if endpoint == GENERATE and sample.ids else {}),
    }


def whole(endpoint: str, prompt: list[int], samples: list[Sample], asked: bool = True) -> bytes:
    choices = []
    for index, sample in enumerate(samples):
        all_of_it = Piece(sample.text, sample.ids, sample.logprobs)
        above = {"prompt_token_ids": prompt} if endpoint == COMPLETIONS else {}
        choices.append({**choice(endpoint, index, all_of_it, asked), **ended(endpoint, sample), **above})
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 3}}
    top = {"prompt_token_ids": prompt} if endpoint == GENERATE else {}
    return msgspec.json.encode({"id": "cmpl-x", "choices": choices, "usage": usage, **top})


def events(endpoint: str, prompt: list[int], samples: list[Sample], asked: bool = True) -> list[Json]:
    """The payloads of a stream, without `[DONE]`: the samples take turns."""
    found: list[Json] = []
    for step in range(max(len(sample.pieces) for sample in samples)):
        for index, sample in enumerate(samples):
            if step >= len(sample.pieces):
                continue
            one = choice(endpoint, index, sample.pieces[step], asked)
            if step == len(sample.pieces) - 1:
                one |= ended(endpoint, sample)
            event: Json = {"choices": [one]}
            if endpoint == COMPLETIONS and step == 0:
                one["prompt_token_ids"] = prompt
            if endpoint == GENERATE and not found:
                event["prompt_token_ids"] = prompt
            found.append(event)
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 3}}
    return [*found, {"choices": [], "usage": usage}]


def stream(endpoint: str, prompt: list[int], samples: list[Sample], asked: bool = True) -> bytes:
    payloads = [msgspec.json.encode(event) for event in events(endpoint, prompt, samples, asked)]
    return b"".join(b"data: %b\n\n" % data for data in [*payloads, b"[DONE]"])


LOGPROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False).filter(lambda one: one != -9999.0)
IDS = st.integers(0, 2**31 - 1)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    ids = draw(st.lists(IDS, max_size=4))
    values = draw(st.lists(LOGPROBS, min_size=len(ids), max_size=len(ids)))
    return Piece(draw(st.text(max_size=6)), ids, values)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    parts = draw(st.lists(pieces(), min_size=1, max_size=5))
    for number, part in enumerate(parts):
        if part.ids:
            break
        parts[number] = Piece("", [], [])  # no text comes before its first token
    finish = draw(st.sampled_from(["length", "stop", "abort"]))
    reason = draw(st.one_of(st.none(), st.text(min_size=1, max_size=3), IDS)) if finish == "stop" else None
    return Sample(parts, finish, reason, draw(st.sampled_from(["default", "7"])))


PROMPTS = st.lists(IDS, min_size=1, max_size=8)
