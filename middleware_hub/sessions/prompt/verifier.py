"""Compares the text of a chain with a rendering of the whole conversation.

A chain is assembled from sampled turns and rendered tails. Here it is compared, cut at its special tokens:

    <|im_start|> user\\nHi <|im_end|> \\n <|im_start|> assistant\\n<think>\\n Hmm.\\n</think>\\n\\nHello! <|im_end|> \\n ...
                -- context ----------- --               `- scaffold -----  `- sampled ------------------ - --

The special tokens must be the same in the same order, and so must all text of the context: a difference there means that text
was lost, doubled or folded (**hard**). A segment in which the model wrote, or whose scaffold it only closed, may differ:
templates drop earlier reasoning, trim, and write calls in a form of their own (soft). So may a segment that begins like an
assistant's turn, because templates rewrite turns that were not sampled here (a warm start) like any other. The generation
prompt at the end is not such a turn: it is compared like the rest.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.prompt.join import Join
from middleware_hub.sessions.prompt.splice import Splicer
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, TokenSpan, links
from middleware_hub.spans.media import media_of, spelled_keyed
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.engines.form.limits import TextTooLongError
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

EXCERPT = 60
"""Characters of either side that a difference shows."""

_LEAD = 12


class ChainPart(NamedTuple):
    """A run of a chain's tokens: their text, special tokens included, and whether the model sampled them."""

    text: str
    sampled: bool


class Difference(msgspec.Struct, frozen=True):
    """Where the two differ, and how: an excerpt of either side, for a line in a log.

    Attributes:
        kind: `special`: another special token, or none (nothing after it is compared); `context`: another text that was not
            sampled; `assistant`: another text in a segment with sampled tokens.
        index: the index of the special token or the segment: segment `i` precedes special token `i`.
    """

    kind: Literal["special", "context", "assistant"]
    index: int
    expected: str
    found: str

    @property
    def hard(self) -> bool:
        return self.kind != "assistant"


class PromptVerifier:
    """Compares chains with renderings of their whole conversations."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, splicer: Splicer) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._splicer = splicer
        vocabulary = tokenizer.vocabulary
        literals = sorted((vocabulary.literal(i) for i in vocabulary.special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, filter(None, literals))) or r"(?!)")

    def extends(self, checkpoint: Checkpoint, request: ChatRequest) -> bool:
        """Whether the rendering begins with the text of a checkpoint's chain."""
        spelled = "".join([part.text for part in self._parts(checkpoint.span, checkpoint.span.visible)])
        return any(
            whole.startswith(spelled)
            or self._tokenizer.spell_prompt(self._tokenizer.encode_start(whole)).startswith(spelled)
            for whole in self._splicer.texts(checkpoint, request)
        )

    def verify(self, span: TokenSpan, take: int, request: ChatRequest, checkpoint: Checkpoint, joined: Join) -> None:
        """Mark a context if the ids differ from a rendering of the whole in more than sampled text."""
        parts = self._parts(span, take)
        try:
            expected = self._template.conversation(request)
            found = self._hard_differences(expected, parts, request)
            if not found:
                return
            dated = [template.conversation(request) for template in self._splicer.other_days(checkpoint)]
        except (BadRequestError, RenderingError) as error:
            logger.warning("a turn could not be verified: %s", error)
            return
        if not all(self._hard_differences(text, parts, request) for text in dated):
            return
        # A template that drops reasoning may drop special tokens with it, while everything around the turns is unchanged.
        if self._splicer.keeps(checkpoint, joined, request):
            return
        # A tokenizer that normalizes (NFC) spells its own ids differently from the text that it was given.
        with suppress(TextTooLongError):
            for text in (expected, *dated):
                spelled = self._tokenizer.vocabulary.spell(self._tokenizer.encode_start(text))
                if not self._hard_differences(spelled, parts, request):
                    return
        shown = "; ".join(map(str, found[:3]))
        logger.warning("a turn is not what the chat template makes of its messages: %s", shown)
        span.flags |= SpanFlag.UNLIKE

    def _hard_differences(self, expected: str, parts: Sequence[ChainPart], request: ChatRequest) -> list[Difference]:
        header = self._template.header(request.tools, request.template)
        found = differences(expected, parts, self._special, header=header, asked=not request.continue_final)
        return [one for one in found if one.hard]

    def _parts(self, span: TokenSpan, take: int) -> Sequence[ChainPart]:
        spell = self._tokenizer.vocabulary.spell
        parts = [
            ChainPart(
                spelled_keyed(spell, part.ids, media_of(part))
                if part.media and count == part.count
                else spell(array("i", part.ids[: ID_BYTES * count])),
                part.versions is not None,
            )
            for part, count in links(span, take)
        ]
        parts.reverse()
        return parts


class _ChainSegment(NamedTuple):
    """The text before a special token (None: the end), and who wrote it."""

    text: str
    special: str | None
    assistants: bool


def differences(
    expected: str,
    chain: Sequence[ChainPart],
    special: re.Pattern[str],
    *,
    header: str = "",
    asked: bool = True,
) -> list[Difference]:
    """Compare a chain with the text that it should spell, in one pass over both.

    Args:
        expected: the rendering of the whole conversation.
        chain: the text of the chain. A special token never lies across two parts.
        special: matches one special token.
        header: the text with which an assistant's turn begins; empty if unknown.
        asked: whether the chain ends with a generation prompt, and not in an assistant's turn that is continued.

    Returns:
        All differences in text up to the first difference in special tokens, which comes last.
    """
    found: list[Difference] = []
    theirs, ours = _cut(expected, special), _segments(chain, special)
    for index, ((wanted, wanted_token), segment) in enumerate(zip(theirs, ours, strict=False)):
        if wanted_token != segment.special:
            found.append(
                Difference("special", index, _named(wanted, wanted_token), _named(segment.text, segment.special))
            )
            break
        if wanted != segment.text:
            # A generation prompt begins like an assistant's turn, but nothing may rewrite it.
            said = segment.special is not None or not asked
            soft = segment.assistants or (said and _open(theirs[:index], (wanted, segment.text), header, special))
            kind: Literal["assistant", "context"] = "assistant" if soft else "context"
            found.append(Difference(kind, index, *_excerpts(wanted, segment.text)))
    return found


_Cut = tuple[str, str | None]
"""A text, and the special token after it; None at the end."""


def _open(before: Sequence[_Cut], texts: Sequence[str], header: str, special: re.Pattern[str]) -> bool:
    """Whether texts begin an assistant's turn, by themselves and by the special tokens before them."""
    *_, last = [0, *[match.end() for match in special.finditer(header)]]
    near = ""
    for text, token in reversed(before):
        if len(near) >= last:
            break
        near = text + (token or "") + near
    opened = bool(last) and near.endswith(header[:last])
    return opened and all(text.startswith(header[last:]) for text in texts)


def _cut(text: str, special: re.Pattern[str]) -> list[_Cut]:
    found: list[_Cut] = []
    at = 0
    for match in special.finditer(text):
        found.append((text[at : match.start()], match[0]))
        at = match.end()
    found.append((text[at:], None))
    return found


def _segments(chain: Sequence[ChainPart], special: re.Pattern[str]) -> list[_ChainSegment]:
    """Return the chain's segments. Parts are cut one by one: a literal that crosses two parts is text, not a token."""
    found: list[_ChainSegment] = []
    pieces: list[str] = []
    assistants = False  # this segment has a sampled character
    for part in chain:
        for text, token in _cut(part.text, special):
            pieces.append(text)
            assistants = assistants or (part.sampled and bool(text))
            if token is not None:
                # A model that stops at once has sampled no character of the segment, but the segment is still its own.
                found.append(_ChainSegment("".join(pieces), token, assistants or part.sampled))
                pieces, assistants = [], False
    found.append(_ChainSegment("".join(pieces), None, assistants))
    return found


def _excerpts(expected: str, found: str) -> tuple[str, str]:
    """Return both sides from a little before the point where they differ."""
    length = min(len(expected), len(found))
    parting = next((i for i in range(length) if expected[i] != found[i]), length)
    begin = max(0, parting - _LEAD)
    return expected[begin : begin + EXCERPT], found[begin : begin + EXCERPT]


def _named(text: str, token: str | None) -> str:
    """Return a special token with a little of the text before it."""
    return text[-_LEAD:] + (token if token is not None else "")
