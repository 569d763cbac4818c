"""Splicing: a conversation is rendered again, and earlier turns keep the ids that were sampled.

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

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.prompt.join import Codec, Join, join
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, links, unpack_ids
from middleware_hub.spans.media import MediaSpan, chain_media, digests_in, spelled_keyed
from middleware_hub.templates.chat_template import ChatTemplate, CutRendering
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

LONG_TURN = 3600
"""Seconds that a turn may take."""


class Resident(NamedTuple):
    """The turns of a lineage that have kept their place in a new rendering: a worker has them in its cache.

    Attributes:
        messages: the number of their messages.
        last: the last of these turns.
        tail: the text rendered after it.
        reason: why these are not all turns; empty if they are.
    """

    messages: int
    last: Checkpoint | None
    tail: str
    reason: str


class Splicer:
    """Renders conversations again, and says which turns keep their place; see the top of this file.

    Attributes:
        codec: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._template = template
        self.codec = codec_of(tokenizer, template.stop_literals({}))

    def texts(self, checkpoint: Checkpoint, request: ChatRequest) -> list[str]:
        """Render a conversation that contains a checkpoint: with today's date, and with the dates of its beginning.

        Empty if the template cannot write it, or refuses it.
        """
        with suppress(BadRequestError, RenderingError):
            return [template.conversation(request) for template in (self._template, *self.other_days(checkpoint))]
        return []

    def residents(self, checkpoint: Checkpoint, request: ChatRequest) -> Resident:
        """Return the turns of a lineage that keep their place when everything is rendered again."""
        found: list[Resident] = []
        for template in (self._template, *self.other_days(checkpoint)):
            found.append(self._residents(template, checkpoint, request))
            if found[-1].last is checkpoint:
                return found[-1]
        return max(found, key=lambda one: one.messages)

    def _residents(self, template: ChatTemplate, checkpoint: Checkpoint, request: ChatRequest) -> Resident:
        messages = sampled_messages(_unedited(checkpoint))
        reason = ""
        while messages:
            marked = [turns[-1].node.depth - 1 for turns in messages]
            try:
                pieces, tail = _transcript(template, request, marked)
            except BadRequestError as error:  # the template refuses sentinels in the place of these turns
                logger.info("earlier turns are not spliced: %s", error)
                return Resident(0, None, "", "template_error")
            except RenderingError as error:
                logger.info("earlier turns are not spliced: %s", error)
                messages, reason = messages[: error.turns], error.reason
                continue
            turns = [turn for one in messages for turn in one]
            found = splice(pieces, turns, self._template.scaffolds(request.tools, request.template), self.codec)
            if not found.reason:
                read = self._tail_behind(template, request, marked, tail)
                if read is None:
                    return Resident(0, None, "", "divergence")
                return Resident(len(messages), messages[-1][-1], read, reason)
            messages, reason = messages[: found.messages], found.reason
        return Resident(0, None, "", reason)

    def _tail_behind(
        self, template: ChatTemplate, request: ChatRequest, marked: Sequence[int], tail: str
    ) -> str | None:
        """Return the text rendered after the turns themselves, if the template reads them: `tail` follows sentinels.

        None if it cannot be told apart from the turns.
        """
        if not tail or not template.reads([request.messages[at] for at in marked]):
            return tail
        try:
            whole = template.conversation(request)
            if not whole.endswith(tail):
                tail = template.tail_of(request, marked[-1] + 1, whole=True)
            return tail if whole.endswith(tail) else None
        except (BadRequestError, RenderingError):
            return None

    def keeps(self, checkpoint: Checkpoint, joined: Join, request: ChatRequest) -> bool:
        """Whether every sampled turn can be spliced into a rendering of the whole, with the same text after it.

        Behind an edited turn only the text after the last one counts: no rendering has the edited turn as it was sampled, and
        what precedes it was compared when it was sent.
        """
        if len(_unedited(checkpoint)) == sum(1 for _ in checkpoint.lineage()):
            found = self.residents(checkpoint, request)
            tail = found.tail if found.last is checkpoint else ""
        else:
            marked = [checkpoint.node.depth - 1]
            try:
                _, behind = _transcript(self._template, request, marked)
            except (BadRequestError, RenderingError):
                return False
            tail = self._tail_behind(self._template, request, marked, behind) or ""
        return bool(tail) and join(checkpoint, tail, self.codec) == joined

    def other_days(self, checkpoint: Checkpoint) -> Iterator[ChatTemplate]:
        """Yield the template as it was when the conversation began, if it writes the date and that was another one.

        A checkpoint has the time of its commit. Its prompt may have been rendered the day before.
        """
        *_, first = checkpoint.lineage()
        return self._template.on_other_days((first.time, first.time - LONG_TURN))


def _transcript(template: ChatTemplate, request: ChatRequest, marked: Sequence[int]) -> CutRendering:
    """Render a conversation with a sentinel in each marked message; see `ChatTemplate.transcript`."""
    return template.transcript(
        request.messages, marked, request.tools, request.template, continue_final=request.continue_final
    )


def codec_of(tokenizer: Tokenizer, stop_literals: Sequence[str] = ()) -> Codec:
    """Return the functions and ids of a tokenizer that joins and splices use. `stop_literals` end a template's turns."""
    spell, start = tokenizer.vocabulary.spell, tokenizer.encode_start("x")
    literals = {*stop_literals, tokenizer.special_tokens_map.get("eos_token")}
    stops = [i for i in tokenizer.vocabulary.special_ids if tokenizer.vocabulary.literal(i) in literals]
    return Codec(
        tokenizer.encode_start,
        tokenizer.encode_tail,
        spell,
        tokenizer.vocabulary.special_ids,
        frozenset(stops),
        plain_starts=tokenizer.encode_start(spell(start)) == start,
    )


class Splice(NamedTuple):
    """How many of the first messages keep their ids, and why no more do; the reason is empty if all of them do."""

    messages: int
    reason: str = ""


def sampled_messages(turns: Sequence[Checkpoint]) -> list[Sequence[Checkpoint]]:
    """Group the turns of a lineage by message: a message has several turns if later ones continued it in place."""
    return [list(found) for _, found in groupby(turns, key=lambda turn: turn.node.depth)]


def splice(pieces: Sequence[str], turns: Sequence[Checkpoint], scaffolds: Sequence[str], codec: Codec) -> Splice:
    """Compare the text rendered between sampled messages with the text that was sent there.

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
    media: tuple[MediaSpan, ...] = ()


def _sent_between(before: Checkpoint | None, turn: Checkpoint) -> _SentContext | None:
    parts: list[bytes] = []
    begin, after = turn.span.offset, 0
    for span, count in links(turn.span.parent, turn.span.take):
        if before is not None and span is before.span:
            after = count
            break
        if span.sampled:
            return None
        begin = span.offset
        parts.append(span.ids[: ID_BYTES * count])
    else:
        if before is not None:
            return None
    media = chain_media(turn.span.parent, turn.span.take)
    own = tuple([one._replace(start=one.start - begin) for one in media if one.start >= begin])
    return _SentContext(after, b"".join(reversed(parts)), own)


def _same(before: Checkpoint | None, sent: _SentContext, text: str, codec: Codec) -> bool:
    """Whether a text gives the ids that were sent. Spelling is cheaper than encoding, and enough for most tokenizers."""
    if sent.media or digests_in(text):
        joined_text = text if before is None else (joined := join(before, text, codec)).text
        same_take = before is None or joined.take == sent.take
        return same_take and spelled_keyed(codec.spell, sent.ids, sent.media) == joined_text
    ids = unpack_ids(sent.ids)
    if before is None:
        return (codec.plain_starts and codec.spell(ids) == text) or list(codec.encode_start(text)) == ids
    joined = join(before, text, codec)
    if joined.take != sent.take:
        return False
    return codec.spell(ids) == joined.text or list(codec.encode_tail(joined.text)) == ids


def _unedited(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Return the turns of a lineage, first turn first, up to the first turn that the client has edited since."""
    turns: list[Checkpoint] = []
    for turn in list(checkpoint.lineage())[::-1]:
        if turn.edited and turn.apart:
            return turns[:-1]
        turns.append(turn)
    return turns
