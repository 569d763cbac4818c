"""From what a client wrote to the ids a worker gets: match, and encode only what is not remembered."""

from __future__ import annotations

import msgspec

from middleware_hub.prefix_match import PrefixMatch
from middleware_hub.radix_tree import Namespace, RadixTree
from middleware_hub.records import Context
from middleware_hub.spans import SpanFlag, chain_ids, pack_ids, unpack_ids
from middleware_hub.tokenizer import Tokenizer
from router.errors import BadRequestError
from router.sglang import GenerateRequest
from router.tracing import OFF, Tracer


class Prompt(msgspec.Struct, frozen=True):
    """The ids to send, and how they came about.

    Attributes:
        match: pinned; whoever made the prompt unpins it.
        context: what was put behind the matched chain; None if the chain is the whole prompt.
        ids: all of them.
        encoded: how many of them were encoded now.
    """

    match: PrefixMatch
    context: Context | None
    ids: list[int]
    encoded: int

    @property
    def reused(self) -> int:
        """Tokens taken from memory."""
        return self.match.cut.tokens


async def from_text(
    tree: RadixTree, tokenizer: Tokenizer, namespace: Namespace, text: str, parent: str | None, tracer: Tracer = OFF
) -> Prompt:
    """The prompt of a request with text. Raises BadRequestError if the text encodes to no token at all."""
    with tracer.span("match", characters=len(text)) as span:
        match = tree.match(namespace, text, parent=parent)
        span.set(tokens=match.cut.tokens)
    tree.pin(match)
    try:
        cut = match.cut
        packed, context, encoded = chain_ids(cut.span, cut.take), None, 0
        if cut.start < len(text):
            start, rest = cut.span is None, text[cut.start :]
            with tracer.span("encode", characters=len(rest)) as span:
                tail, alignment = await tokenizer.encode_aligned(rest, start=start)
                encoded = len(tail)
                span.set(tokens=encoded)
            context = Context(pack_ids(tail), alignment.flags, alignment.ends)
            packed += context.ids
        if not packed:
            raise BadRequestError("`text` encodes to no token at all: there is nothing to send to a worker")
    except BaseException:
        tree.unpin(match)
        raise
    return Prompt(match, context, unpack_ids(packed), encoded)


def check_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Raises BadRequestError for an id that the model does not have; sent on, it would kill the worker."""
    limit = tokenizer.vocabulary_size
    if min(ids) < 0 or max(ids) >= limit:
        wrong = next(i for i in ids if not 0 <= i < limit)
        raise BadRequestError(f"`input_ids` has {wrong} in it, and the vocabulary is 0 to {limit - 1}")


def check_options(tokenizer: Tokenizer, request: GenerateRequest) -> None:
    """Raises BadRequestError for more top logprobs than there are tokens, and for stop ids to be held back that are none.

    Each of them would kill the worker, too.
    """
    limit = tokenizer.vocabulary_size
    if request.most_top_logprobs > limit:
        raise BadRequestError(
            f"`top_logprobs_num` is {request.most_top_logprobs}, and the vocabulary has {limit} tokens"
        )
    wrong = next((token for token in request.stop_ids_held_back if not 0 <= token < limit), None)
    if wrong is not None:
        raise BadRequestError(
            f"`stop_token_ids` has {wrong} in it, and the vocabulary is 0 to {limit - 1}: with `min_new_tokens` that ends the "
            "worker's process"
        )


def from_ids(
    tree: RadixTree,
    tokenizer: Tokenizer,
    namespace: Namespace,
    ids: list[int],
    parent: str | None,
    tracer: Tracer = OFF,
) -> Prompt:
    """The prompt of a request that came as (checked) ids: they are sent as they are, whatever is remembered."""
    text, packed = tokenizer.spell_prompt(ids), pack_ids(ids)

    def width(count: int) -> int:
        return len(tokenizer.spell_prompt(ids[:count]))

    with tracer.span("match", characters=len(text)) as span:
        match = tree.match_ids(namespace, text, packed, width, parent=parent)
        span.set(tokens=match.cut.tokens)
    rest = ids[match.cut.tokens :]
    context = None
    if rest or match.cut.start < len(text):
        alignment = tokenizer.align(rest, text[match.cut.start :], start=match.cut.span is None)
        context = Context(pack_ids(rest), alignment.flags | SpanFlag.GIVEN, alignment.ends)
    tree.pin(match)
    return Prompt(match, context, ids, 0)
