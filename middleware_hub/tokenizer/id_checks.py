"""Refuses requests with ids, or numbers of ids, outside of the vocabulary."""

from __future__ import annotations

from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.request import GenerateRequest
from router.engines.form.request_checks import held_back
from router.errors import BadRequestError

_LARGEST = 2**31 - 1
"""The largest id that spans can hold."""


def check_ids(vocabulary: Vocabulary, ids: list[int], name: str = "input_ids") -> None:
    _check(ids, vocabulary.size, vocabulary.size, name)


def check_unmatched(vocabulary: Vocabulary, ids: list[int], name: str = "input_ids") -> None:
    """Raise BadRequestError for an id outside of the vocabulary, before it is known which part of the prompt is recorded.

    A model pads its vocabulary, and without its config.json nothing but what workers sampled shows how far. So ids that may be
    such pass; they are checked again when the store has been asked.
    """
    _check(ids, vocabulary.size if vocabulary.certain else _LARGEST + 1, vocabulary.size, name)


def _check(ids: list[int], limit: int, size: int, name: str) -> None:
    if min(ids) < 0 or max(ids) >= limit:
        wrong = next(i for i in ids if not 0 <= i < limit)
        raise BadRequestError(f"`{name}` has {wrong} in it, and the vocabulary is 0 to {size - 1}")


def check_options(vocabulary: Vocabulary, request: GenerateRequest) -> None:
    """Raise BadRequestError for stop ids, or a number of top logprobs, outside of the vocabulary."""
    limit = vocabulary.size
    if "top_logprobs_num" in request.fields and request.most_top_logprobs > limit:
        raise BadRequestError(
            f"`top_logprobs_num` is {request.most_top_logprobs}, and the vocabulary has {limit} tokens"
        )
    held = held_back(request.sampling)
    if held and not 0 <= min(held) <= max(held) < limit:
        wrong = next(token for token in held if not 0 <= token < limit)
        raise BadRequestError(f"`stop_token_ids` has {wrong} in it, and the vocabulary is 0 to {limit - 1}")
