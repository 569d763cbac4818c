"""Splicing: a conversation is rendered again, and earlier turns keep the ids that were sampled. Pure.

A template that is not append-only writes earlier turns differently from how the model was asked for them and wrote them: it
drops their reasoning or their `<think>` tags, or prints calls in a form of its own. But the text *between* these turns is
mostly unchanged. So the whole is rendered once with a sentinel in each turn that was sampled here, and cut at the sentinels:

    rendered  ...user\\nHi<|im_end|>\\n [<|im_start|>assistant\\n SENTINEL] <|im_end|>\\n<|im_start|>user\\n ...
    recorded  ...user\\nHi<|im_end|>\\n <|im_start|>assistant\\n<think>\\n | Hm.</think>Hello!<|im_end|> | \\n<|im_start|> ...
              `- the piece ----------- `- scaffold -----------------   `- sampled --------------   `- the next piece

A turn is spliced if the piece before it, followed by a generation prompt instead of what opens the turn in history, equals what
was sent before it when it was sampled, and the same holds for every earlier piece. Then its logprobs hold, and all of it is in
the worker's cache. The comparison is the proof; no other knowledge about a template is trusted. The first piece that differs
(an edited message, other tools) ends the splicing: what follows is encoded as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from middleware_hub.sessions.prompt.join import Codec, join
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, links, unpack_ids


class Splice(NamedTuple):
    """How many of the first messages keep their ids, and why no more do; the reason is empty if all of them do."""

    messages: int
    reason: str = ""


def sampled_messages(turns: Sequence[Checkpoint]) -> list[Sequence[Checkpoint]]:
    """Group the turns of a lineage by message: a message has several turns if later ones continued it in place."""
    return [list(found) for _, found in groupby(turns, key=lambda turn: turn.node.depth)]


def splice(pieces: Sequence[str], turns: Sequence[Checkpoint], scaffolds: Sequence[str], codec: Codec) -> Splice:
    """Compare what is rendered between sampled messages with what was sent there.

    Args:
        pieces: what is rendered before each message, from the end of the previous one, without what opens it.
        turns: a lineage, first turn first.
        scaffolds: the generation prompts that may have been sent, for turns whose own is unknown.
        codec: of the model.

    Returns:
        The messages that keep their ids, with the reason `divergence` (another text) or `unfaithful` (the sampled tokens may
        not be what the client was shown).
    """
    before: Checkpoint | None = None
    messages = sampled_messages(turns)
    for number, (piece, message) in enumerate(zip(pieces, messages, strict=True)):
        if any(turn.span.flags & SpanFlag.MISMATCH for turn in message):
            return Splice(number, "unfaithful")
        sent = _sent_between(before, message[0])
        if sent is None or not any(
            _same(before, sent, piece + scaffold, codec) for scaffold in (message[0].scaffold, *scaffolds)
        ):
            return Splice(number, "divergence")
        before = message[-1]
    return Splice(len(messages))


class _SentContext(NamedTuple):
    """What was sent between two turns: `ids`, after the first `take` tokens of the first turn (0 if there is none)."""

    take: int
    ids: bytes


def _sent_between(before: Checkpoint | None, turn: Checkpoint) -> _SentContext | None:
    parts: list[bytes] = []
    for span, count in links(turn.span.parent, turn.span.take):
        if before is not None and span is before.span:
            return _SentContext(count, b"".join(reversed(parts)))
        if span.sampled:
            return None
        parts.append(span.ids[: ID_BYTES * count])
    return _SentContext(0, b"".join(reversed(parts))) if before is None else None


def _same(before: Checkpoint | None, sent: _SentContext, text: str, codec: Codec) -> bool:
    """Whether a text is what was sent. Spelling is cheaper than encoding, and enough for most tokenizers."""
    ids = unpack_ids(sent.ids)
    if before is None:
        return (codec.plain_starts and codec.spell(ids) == text) or list(codec.encode_start(text)) == ids
    joined = join(before, text, codec)
    if joined.take != sent.take:
        return False
    return codec.spell(ids) == joined.text or list(codec.encode_tail(joined.text)) == ids
