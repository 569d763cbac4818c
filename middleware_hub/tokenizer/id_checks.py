"""Refuses prompts with ids outside of the vocabulary."""

from __future__ import annotations

from middleware_hub.tokenizer.vocabulary import Vocabulary
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
