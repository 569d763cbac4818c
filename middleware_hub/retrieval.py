"""`/retrieve_from_text`: a text in, the tokens that were consumed and sampled for it out."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.prefix_match import Cut
from middleware_hub.radix_node import Generation
from middleware_hub.radix_tree import Namespace, RadixTree
from middleware_hub.recording import ENGINE_MISMATCH
from middleware_hub.records import Recall
from middleware_hub.spans import flatten, pack_ids
from middleware_hub.tokenizer import Tokenizer
from router.beside import beside
from router.errors import BadRequestError, NotExactError, NotFoundError
from router.sglang.json import JSON_ERRORS, decode_object
from router.sglang.limits import PROMPT_LIMITS, PromptLimits
from router.sglang.request import read_texts

RETOKENIZED = "retokenized"
MANY_TOKENS = 50_000
"""From so many on, what is done with each of them is done beside the event loop."""


class RetrievalRequest(msgspec.Struct):
    """The body of `/retrieve_from_text`."""

    text: str | list[str]
    return_logp: bool = True
    strict: bool = False
    request_id: str | None = None
    max_staleness: int | None = None
    lora_path: str | None = None

    @classmethod
    def parse(cls, body: bytes, limits: PromptLimits = PROMPT_LIMITS) -> RetrievalRequest:
        """Raises BadRequestError with the field that is wrong; TextTooLongError."""
        try:
            fields = decode_object(body)
            texts, listed = read_texts(fields, "text", limits)
            if texts is not None:
                fields["text"] = Raw(b'""')  # it may be long, and it is read already
            request = msgspec.json.decode(msgspec.json.encode(fields), type=cls)
            request.text = (texts if listed else texts[0]) if texts else request.text
        except JSON_ERRORS as error:
            raise BadRequestError(
                f"the body must be {{'text': a string or a list of strings, ...}}: {error}"
            ) from error
        if not request.text or not all(request.text):
            raise BadRequestError("`text` is empty, or has an empty text in it")
        limits.check_replies(len(texts or ""))
        if request.max_staleness is not None and request.max_staleness < 0:
            raise BadRequestError(f"`max_staleness` must not be negative, got {request.max_staleness}")
        return request


async def retrieve(
    tree: RadixTree, tokenizer: Tokenizer, namespace: Namespace, text: str, request: RetrievalRequest
) -> dict[str, Any]:
    """One answer.

    Raises:
        NotFoundError: `request_id` is none of the recorded replies that this text begins with.
        NotExactError: `strict`, and something would have had to be encoded, or is older than `max_staleness`.
    """
    recall = tree.recall(namespace, text, request_id=request.request_id)
    if recall is None:
        raise NotFoundError(
            f"this text does not begin with a recorded reply of request_id {request.request_id!r}: with n > 1 workers give "
            "ids of their own (meta_info.id); it may be of another namespace, or evicted; POST /radix_tree/explain tells how "
            "far the text is known"
        )
    cut = recall.cut
    if cut.start < len(text) and request.strict:
        raise NotExactError(
            f"only the first {cut.start} of {len(text)} characters are recorded; POST /radix_tree/explain tells where "
            "the text leaves what was recorded",
            exact_chars=cut.start,
            reasons=[RETOKENIZED],
        )
    start, tail = cut.span is None, b""
    if cut.start < len(text):
        # The chain cannot go away meanwhile: spans are immutable, and `cut` holds them.
        tail = pack_ids(await tokenizer.encode(text[cut.start :], start=start))
    heavy = cut.tokens + len(tail) // 4 > MANY_TOKENS
    return await beside(heavy, _answer, tree, text, recall, cut, tail, request)


def trajectory(tree: RadixTree, generation: Generation, text: str) -> dict[str, Any]:
    """The answer for the text of a reply that was recorded just now, for `return_trajectory`."""
    recall = tree.recall_generation(generation)
    return _answer(tree, text, recall, recall.cut, b"", RetrievalRequest(text))


def _answer(
    tree: RadixTree, text: str, recall: Recall, cut: Cut, tail: bytes, request: RetrievalRequest
) -> dict[str, Any]:
    flat = flatten(cut.span, cut.take, tail)
    reasons = list(flat.reasons)
    if cut.recut and "cut_in_token" not in reasons:
        reasons.append("cut_in_token")
    if cut.start < len(text):
        reasons.append(RETOKENIZED)
    exact = recall.exact and ENGINE_MISMATCH not in reasons
    answer: dict[str, Any] = {
        "tokens": flat.token_ids.tolist(),
        "response": text,
        "loss_mask": flat.loss_mask.tolist(),
        "token_length": len(flat.token_ids),
        "loss_mask_length": len(flat.loss_mask),
        "rollout_logp": flat.logprobs.tolist() if request.return_logp and flat.logprobs is not None else None,
        "exact": exact,
        "exact_chars": cut.start,
        "reasons": reasons,
        "response_length": flat.response_length,
        "weight_versions": [{"version": v, "start": begin, "end": end} for v, begin, end in flat.weight_versions],
        "variants": len(recall.request_ids),
        "request_ids": list(recall.request_ids),
    }
    if request.max_staleness is not None:
        stale = [
            (v, end - begin) for v, begin, end in flat.weight_versions if tree.clock.distance(v) > request.max_staleness
        ]
        answer["stale_tokens"] = sum(count for _, count in stale)
        if stale and request.strict:
            raise NotExactError(
                f"{answer['stale_tokens']} sampled tokens are more than {request.max_staleness} weight versions old "
                f"(of {', '.join(sorted({v for v, _ in stale}))}; the current one is {tree.clock.current})",
                exact_chars=cut.start,
                stale_tokens=answer["stale_tokens"],
            )
    if request.strict and not exact:
        raise NotExactError(
            f"the recorded reply is not exact: {', '.join(reasons)}", exact_chars=cut.start, reasons=reasons
        )
    return answer


def explain(tree: RadixTree, namespace: Namespace, text: str) -> dict[str, Any]:
    """Where a text leaves the longest recorded chain, with ten characters of each on both sides."""
    departure = tree.departure(namespace, text)
    matched = departure.matched
    recorded = departure.recorded_after
    if matched == len(text):
        message = "the whole text is recorded"
        if recorded and not departure.replies:
            message += ", but it ends before the first reply does"
        elif recorded:
            message += ", and something recorded goes on behind it"
    elif matched == 0:
        message = "no recorded text begins like this one"
    elif not recorded:
        message = (
            f"the text goes on behind the end of what is recorded, at character {matched}: an observation that no worker "
            "was sent yet, if that is what stands there"
        )
    else:
        message = f"at character {matched} the text has {text[matched]!r} where {recorded[-1][:1]!r} is recorded"
        stripped = recorded[-1].lstrip()
        if (
            not text[matched].isspace()
            and recorded[-1][:1].isspace()
            and (not stripped or stripped[0] == text[matched])
        ):
            message += ": the recorded text has white space there, so something stripped it"
    return {
        "message": message,
        "matched_chars": matched,
        "text_length": len(text),
        "replies_matched": departure.replies,
        "text": {"before": text[max(0, matched - 10) : matched], "after": text[matched : matched + 10]},
        "recorded": {"before": departure.recorded_before, "after": recorded[-1] if recorded else ""},
        "other_recorded": list(recorded[:-1]),
    }
