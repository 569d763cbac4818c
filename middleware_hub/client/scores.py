"""What scorers say of sequences: a teacher's or a reference's logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from middleware_hub.client.errors import InconsistentAnswerError


class ScoreOptions(TypedDict, total=False):
    """The names of the scorers (default: all), and how many likeliest tokens they tell at each position (default: 0)."""

    workers: Sequence[str] | None
    top_logprobs: int | None


@dataclass(frozen=True)
class Scores:
    """What one scorer says of the tokens of a sequence from the position `start` on.

    Attributes:
        logprobs: of the tokens themselves, sampled ones and context alike: one for each. Mask them with the loss mask.
        top: for each of these tokens the likeliest ones, `(logprob, id)`, the likeliest first; None if they were not asked for.
    """

    start: int
    logprobs: list[float] = field(repr=False)
    top: list[list[tuple[float, int]]] | None = field(default=None, repr=False)


def scores_of(found: Mapping[str, Any], start: int, tokens: int) -> dict[str, Scores]:
    """Return the scores of an answer about a sequence of this many tokens, by the names of the scorers.

    Raises InconsistentAnswerError if there is not one for each token from `start` on.
    """
    scores = {}
    for key, numbers in found.items():
        name = key.removesuffix("_logprobs")
        if name == key or name == "response" or name.endswith("_top"):
            continue
        top = found.get(f"{name}_top_logprobs")
        for entries in (numbers, top):
            if entries is not None and len(entries) != tokens - start:
                raise InconsistentAnswerError(
                    f"scorer {name!r} tells {len(entries)} numbers of {tokens - start} tokens: the router's version does not "
                    "fit this client's"
                )
        pairs = None if top is None else [[(float(one), int(token)) for one, token in likeliest] for likeliest in top]
        scores[name] = Scores(start, numbers, pairs)
    return scores
