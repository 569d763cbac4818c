"""Splicing: a conversation is rendered anew, and earlier turns keep the ids that were sampled. Pure.

A template that is not append-only writes earlier turns in another way than the model was asked for them, and wrote them: it
drops their thinking, or their `<think>` tags, or prints calls in a form of its own. But what stands *between* these turns is
mostly what it was. So the whole is rendered once with a sentinel in each turn that was sampled here, and cut at the sentinels:

    rendered  ...user\\nHi<|im_end|>\\n [<|im_start|>assistant\\n SENTINEL] <|im_end|>\\n<|im_start|>user\\n ...
    recorded  ...user\\nHi<|im_end|>\\n <|im_start|>assistant\\n<think>\\n | Hm.</think>Hello!<|im_end|> | \\n<|im_start|> ...
              `- the piece ----------- `- scaffold -----------------   `- sampled --------------   `- the next piece

A turn is spliced if the piece in front of it, with a generation prompt in the place of whatever opens the turn in history, is
what was sent in front of it when it was sampled, and so is every piece before: then its logprobs hold, and all of it is in the
worker's cache. The comparison is the proof; nothing that is found out about a template is trusted further than that. Where a
piece differs (an edited message, other tools), the first one that does ends the splicing: what follows is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from middleware_hub.sessions.prompt.join import Codec, seam
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, links, unpack_ids


class Splice(NamedTuple):
    """How many messages keep their ids, first ones first, and why no more do; empty if all of them do."""

    messages: int
    reason: str = ""


def sampled_messages(turns: Sequence[Checkpoint]) -> list[Sequence[Checkpoint]]:
    """The messages that a lineage was sampled for, each with its turns: one, or several that went on with it in place."""
    return [list(found) for _, found in groupby(turns, key=lambda turn: turn.node.depth)]


def splice(pieces: Sequence[str], turns: Sequence[Checkpoint], scaffolds: Sequence[str], codec: Codec) -> Splice:
    """Compare what is rendered between sampled messages with what was sent there.

    Args:
        pieces: what is rendered in front of each message, from the end of the one before, without what opens it.
        turns: a lineage, first one first.
        scaffolds: generation prompts, any of which may have been what a model was asked with: for turns that do not know
            what was sent.
        codec: of the model.

    Returns:
        Why not all: `divergence`: another text; `unfaithful`: what was sampled is not surely what the client was shown.
    """
    before: Checkpoint | None = None
    messages = sampled_messages(turns)
    for number, (piece, message) in enumerate(zip(pieces, messages, strict=True)):
        if any(turn.span.flags & SpanFlag.MISMATCH for turn in message):
            return Splice(number, "unfaithful")
        recorded = _between(before, message[0])
        asked = (message[0].scaffold, *scaffolds)
        if recorded is None or not any(_same(before, recorded, piece + one, codec) for one in asked):
            return Splice(number, "divergence")
        before = message[-1]
    return Splice(len(messages))


class _Context(NamedTuple):
    """What was sent between two turns: behind so many tokens of the first one (0: there is none), these ids."""

    take: int
    ids: bytes


def _between(before: Checkpoint | None, turn: Checkpoint) -> _Context | None:
    parts: list[bytes] = []
    for span, count in links(turn.span.parent, turn.span.take):
        if before is not None and span is before.span:
            return _Context(count, b"".join(reversed(parts)))
        if span.sampled:
            return None
        parts.append(span.ids[: ID_BYTES * count])
    return _Context(0, b"".join(reversed(parts))) if before is None else None


def _same(before: Checkpoint | None, recorded: _Context, text: str, codec: Codec) -> bool:
    """Whether a text is what was sent. Spelling is cheaper than encoding, and for most tokenizers it is enough."""
    ids = unpack_ids(recorded.ids)
    if before is None:
        return (codec.plain_starts and codec.spell(ids) == text) or list(codec.encode_start(text)) == ids
    place = seam(before, text, codec)
    if place.take != recorded.take:
        return False
    return codec.spell(ids) == place.text or list(codec.encode_tail(place.text)) == ids
