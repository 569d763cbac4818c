"""Ids and options of requests that would end a worker's process, because the model's vocabulary lacks them."""

from __future__ import annotations

from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.sglang.hazards import held_back
from router.engines.sglang.request import GenerateRequest
from router.errors import BadRequestError


def check_ids(vocabulary: Vocabulary, ids: list[int], name: str = "input_ids") -> None:
    """Raise BadRequestError for an id that the model lacks; it would kill the worker."""
    limit = vocabulary.size
    if min(ids) < 0 or max(ids) >= limit:
        wrong = next(i for i in ids if not 0 <= i < limit)
        raise BadRequestError(f"`{name}` has {wrong} in it, and the vocabulary is 0 to {limit - 1}")


def check_options(vocabulary: Vocabulary, request: GenerateRequest) -> None:
    """Raise BadRequestError for options that would kill the worker: ids or numbers of top logprobs beyond the vocabulary."""
    limit = vocabulary.size
    if "top_logprobs_num" in request.fields and request.most_top_logprobs > limit:
        raise BadRequestError(
            f"`top_logprobs_num` is {request.most_top_logprobs}, and the vocabulary has {limit} tokens"
        )
    held = held_back(request.sampling)
    if held and not 0 <= min(held) <= max(held) < limit:
        wrong = next(token for token in held if not 0 <= token < limit)
        raise BadRequestError(
            f"`stop_token_ids` has {wrong} in it, and the vocabulary is 0 to {limit - 1}: with `min_new_tokens` that ends the "
            "worker's process"
        )
