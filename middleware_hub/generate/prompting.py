"""From a client's prompt to the ids that a worker gets: match the recorded prefix, and encode only the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from middleware_hub.chat.errors import ContextLengthError
from middleware_hub.media.picture import Picture
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.records import Context, Namespace
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, chain_ids, pack_ids
from middleware_hub.spans.media import Encoded, MediaSpan, Pictures, chain_media, collapsed, learned
from middleware_hub.tokenizer.id_checks import check_ids, check_unmatched
from middleware_hub.tokenizer.tokenizer import LONG_TEXT, Tokenizer
from middleware_hub.tokenizer.vocabulary import Vocabulary
from middleware_hub.trajectories.members import GroupMembership
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.engines.form.segments import FIELD, Segment, place
from router.errors import BadRequestError
from router.http.offload import offload
from router.observability.tracing import Tracer, untraced

MANY_TOKENS = 20_000
"""Prompts of more ids than this are handled in a thread, off the event loop."""

_SEGMENT_COST = 64
"""The cost of a segment to the event loop apart from its text, in characters of text."""


class Prompt(msgspec.Struct, frozen=True):
    """The ids to send, and where they come from.

    Attributes:
        match: pinned; the maker of the prompt unpins it.
        context: what was encoded after the matched chain; None if the chain is the whole prompt.
        packed: all ids, as spans keep them.
        reused: how many of them were taken from memory.
        encoded: how many of them were encoded now.
        reasons: how the prompt was made, as answers and counters name it.
        member: the group that its replies belong to.
        media: the media spans among `packed`.
        tail: the compact form of `context`, if it has pictures.
        unknown: the digests of pictures whose length no engine has told yet. They have one id in `packed`.
        pictures: the files of its pictures, which are held until its replies are recorded.
    """

    match: PrefixMatch
    context: Context | None
    packed: bytes
    reused: int
    encoded: int
    reasons: tuple[str, ...]
    member: GroupMembership | None = None
    media: tuple[MediaSpan, ...] = ()
    tail: Encoded | None = None
    unknown: frozenset[str] = frozenset()
    pictures: Sequence[Picture] = ()

    def learned(
        self, returned: bytes, least: int, places: Sequence[tuple[int, int]] | None = None
    ) -> tuple[Prompt, dict[str, int]]:
        """Return the prompt as an engine computed it, and the lengths of pictures that were unknown.

        Args:
            returned: the packed ids that the engine computed with.
            least: the fewest ids that a picture can have.
            places: offset and length of each picture, as the engine tells them; None if it does not.

        Raises:
            UnlikePromptError: the engine computed with other ids than it was sent.
        """
        lengths = learned(self.packed, self.media, self.unknown, returned, least, places)
        if not lengths or self.tail is None:
            return self, lengths
        known = {one.digest: one.length for one in self.media if one.digest not in self.unknown} | lengths
        reused = self.match.cut.tokens
        context, media = _expanded(self.tail, known, reused)
        kept = [one for one in self.media if one.start < reused]
        packed = self.packed[: ID_BYTES * reused] + context.ids
        found = msgspec.structs.replace(
            self, context=context, packed=packed, media=(*kept, *media), unknown=frozenset[str]()
        )
        return found, lengths

    @property
    def sent(self) -> bytes:
        """The packed ids that a worker is sent: one for each picture."""
        return collapsed(self.packed, self.media) if self.media else self.packed

    @property
    def ids(self) -> Sequence[int]:
        """All ids: a view of `packed`."""
        return memoryview(self.packed).cast("i")


def _expanded(tail: Encoded, lengths: Mapping[str, int], offset: int) -> tuple[Context, list[MediaSpan]]:
    """Return a context with these lengths of pictures, and its media spans in the chain, `offset` tokens on."""
    ids, ends, media = tail.expanded(lengths)
    return Context(ids, tail.flags, ends, media), [one._replace(start=one.start + offset) for one in media]


async def from_text(
    tree: RadixTree,
    tokenizer: Tokenizer,
    namespace: Namespace,
    text: str,
    parent: str | None,
    tracer: Tracer | None = None,
    memory: Memory | None = None,
    pictures: Pictures | None = None,
) -> Prompt:
    """Make the prompt of a request with text. Raises BadRequestError if the text encodes to no token.

    `memory` fills the tree from a store, if there is one. `pictures` are those of a keyed text.
    """
    with untraced if tracer is None else tracer.span("match", characters=len(text)) as span:
        match = tree.match(namespace, text, parent=parent)
        if memory is not None:
            match = await memory.matched(match, parent, lambda: tree.match(namespace, text, parent=parent))
        cut = match.cut
        reused = 0 if cut.span is None else cut.span.offset + cut.take
        if span is not None:
            span.set(tokens=reused)
    tree.pin(match)
    before = chain_media(cut.span, cut.take) if pictures is not None else []
    keyed, media, lengths = None, list[MediaSpan](), dict[str, int]()
    try:
        packed, context, encoded = chain_ids(cut.span, cut.take), None, 0
        if cut.start < len(text):
            start, rest = cut.span is None, text[cut.start :]
            with untraced if tracer is None else tracer.span("encode", characters=len(rest)) as span:
                if pictures is None:
                    tail, alignment = await tokenizer.encode_aligned(rest, start=start)
                    context = Context(tail, alignment.flags, alignment.ends)
                else:
                    keyed = await tokenizer.encode_keyed(rest, pictures.placeholder, start=start)
                    lengths = {**pictures.lengths, **{one.digest: one.length for one in before}}
                    context, media = _expanded(keyed, lengths, reused)
                encoded = len(context.ids) // ID_BYTES
                if span is not None:
                    span.set(tokens=encoded)
            packed += context.ids
        if not packed:
            raise BadRequestError("`text` encodes to no token at all: there is nothing to send to a worker")
    except BaseException:
        tree.unpin(match)
        raise
    if pictures is None:
        return Prompt(match, context, packed, reused, encoded, match.reasons)
    spans = (*before, *media)
    unknown = frozenset(one.digest for one in media if one.digest not in lengths)
    return Prompt(match, context, packed, reused, encoded, match.reasons, media=spans, tail=keyed, unknown=unknown)


async def from_ids(
    tree: RadixTree,
    tokenizer: Tokenizer,
    namespace: Namespace,
    ids: list[int],
    parent: str | None,
    tracer: Tracer | None = None,
    encoded: Sequence[range] = (),
    memory: Memory | None = None,
) -> Prompt:
    """Make the prompt of a request that came as ids: they are sent unchanged, whatever is remembered.

    Args:
        encoded: the ranges of ids that were encoded here, from segments.
        memory: fills the tree from a store, if there is one.
    """
    heavy = len(ids) > MANY_TOKENS
    text, packed = await offload(heavy, lambda: (tokenizer.spell_prompt(ids), pack_ids(ids)))

    def width(count: int) -> int:
        return len(tokenizer.spell_prompt(ids[:count]))

    with untraced if tracer is None else tracer.span("match", characters=len(text)) as span:
        match = tree.match_ids(namespace, text, packed, width, parent=parent)
        if memory is not None:
            match = await memory.matched(
                match, parent, lambda: tree.match_ids(namespace, text, packed, width, parent=parent)
            )
        reused = match.cut.tokens
        if span is not None:
            span.set(tokens=reused)
    tree.pin(match)
    rest, start = ids[reused:], match.cut.span is None
    context = None
    try:
        if rest or match.cut.start < len(text):
            alignment = await offload(heavy, tokenizer.align, rest, text[match.cut.start :], start=start)
            context = Context(pack_ids(rest), alignment.flags | SpanFlag.GIVEN, alignment.ends)
    except BaseException:
        tree.unpin(match)
        raise
    new = sum(len(run[max(0, reused - run.start) :]) for run in encoded)
    return Prompt(match, context, packed, reused, new, match.reasons)


async def from_ids_with_pictures(
    tree: RadixTree,
    tokenizer: Tokenizer,
    namespace: Namespace,
    ids: list[int],
    parent: str | None,
    pictures: Pictures,
    tracer: Tracer | None = None,
    memory: Memory | None = None,
) -> Prompt:
    """Make the prompt of compact ids, as many of which are placeholders as there are pictures: they are sent unchanged.

    A chain is found by their keyed text, and continued if the ids begin with it.
    """
    text, tail = await offload(len(ids) > MANY_TOKENS, tokenizer.spell_keyed, ids, pictures)
    with untraced if tracer is None else tracer.span("match", characters=len(text)) as span:
        match = tree.match(namespace, text, parent=parent)
        if memory is not None:
            match = await memory.matched(match, parent, lambda: tree.match(namespace, text, parent=parent))
        before = chain_media(match.cut.span, match.cut.take)
        chain = chain_ids(match.cut.span, match.cut.take)
        sent = collapsed(chain, before)
        if not tail.ids.startswith(sent):
            match, before, chain, sent = PrefixMatch(namespace, text, unknown_parent=match.unknown_parent), [], b"", b""
        if span is not None:
            span.set(tokens=match.cut.tokens)
    tree.pin(match)
    lengths = {**pictures.lengths, **{one.digest: one.length for one in before}}
    rest = tail.after(len(sent) // ID_BYTES, match.cut.start)
    if not rest.ids and match.cut.start == len(text):
        return Prompt(match, None, chain, match.cut.tokens, 0, match.reasons, media=tuple(before))
    context, media = _expanded(rest, lengths, match.cut.tokens)
    unknown = frozenset(one.digest for one in media if one.digest not in lengths)
    return Prompt(
        match,
        context,
        chain + context.ids,
        match.cut.tokens,
        0,
        match.reasons,
        media=(*before, *media),
        tail=rest,
        unknown=unknown,
    )


def check_rest(
    vocabulary: Vocabulary,
    prompt: Prompt,
    ids: list[int],
    segments: list[Segment] | None,
    encoded: Sequence[range],
    number: int | None,
) -> None:
    """Check the ids of a prompt that are not recorded, if `check_unmatched` may have let some pass. Raises BadRequestError.

    Args:
        number: that of the prompt; None outside of a batch.
        segments: the segments that made `ids`, if there were any.
        encoded: the ranges of ids that were encoded from their texts.
    """
    if vocabulary.certain:
        return
    if segments is None:
        if rest := ids[prompt.reused :]:
            check_ids(vocabulary, rest)
        return
    begin, texts = 0, iter(encoded)
    for at, segment in enumerate(segments):
        if isinstance(segment, str):
            begin = next(texts).stop
            continue
        if given := segment[max(0, prompt.reused - begin) :]:
            check_ids(vocabulary, given, f"{place(number or 0, at, batch=number is not None)}.ids")
        begin += len(segment)


class Assembled(msgspec.Struct, frozen=True):
    """A prompt that came in segments: its ids, and the ranges of them that were encoded."""

    ids: list[int]
    encoded: list[range]


async def assemble(
    tokenizer: Tokenizer,
    prompts: list[list[Segment]],
    *,
    batch: bool,
    limits: PromptLimits = PROMPT_LIMITS,
    max_context: int | None = None,
    tracer: Tracer | None = None,
) -> list[Assembled]:
    """Return the ids of prompts that came in segments: the first one is a start, each further one a continuation (rule 7).

    Each text is encoded by itself, because the client decides how a prompt is cut.

    Args:
        batch: whether they came as a batch, for the names in errors.
        limits: those of a whole prompt, too.
        max_context: tokens that the model takes; None if the worker is to check it.
        tracer: gets a span for each prompt with a text in it.

    Raises:
        BadRequestError: an id that the model lacks; a prompt of no tokens, or of too many.
        TextTooLongError: a prompt of more tokens than `limits` allow.
    """
    for number, segments in enumerate(prompts):
        for at, segment in enumerate(segments):
            if not isinstance(segment, str):
                check_unmatched(tokenizer.vocabulary, segment, f"{place(number, at, batch=batch)}.ids")
    found = []
    held = 0
    for segments in prompts:
        ids: list[int] = []
        encoded: list[range] = []
        characters = sum(len(segment) for segment in segments if isinstance(segment, str))
        with untraced if tracer is None or not characters else tracer.span("encode", characters=characters) as span:
            for at, segment in enumerate(segments):
                if isinstance(segment, str):
                    tail = await tokenizer.encode(segment, start=at == 0)
                    encoded.append(range(len(ids), len(ids) + len(tail)))
                    ids += tail
                    held += len(segment)
                else:
                    ids += segment
                limits.check_tokens(len(ids))
                held += _SEGMENT_COST
                if held >= LONG_TEXT:
                    held = 0
                    await asyncio.sleep(0)
            if span is not None:
                span.set(tokens=sum(map(len, encoded)))
        if not ids:
            raise BadRequestError(f"`{FIELD}` encodes to no token at all: there is nothing to send to a worker")
        if max_context is not None and len(ids) >= max_context:
            raise ContextLengthError(max_context, len(ids))
        found.append(Assembled(ids, encoded))
    return found
