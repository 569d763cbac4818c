"""The client's view of one generation: its sampled text, parsed piece by piece as it comes, and the final answer.

Parsing never touches tokens. If a parser fails, the rest of the text is passed on unparsed, so no reply is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter, itemgetter

from msgspec import Raw

from middleware_hub.chat.answer import Answer, SampledTokens, TokenLogprob, answer_of
from middleware_hub.chat.call_ids import call_id
from middleware_hub.chat.messages import ChatRequest, Message, Piece, Reasoning, SampledCall, Text, ToolCall
from middleware_hub.parsers.base import Plain, Sampled, SampledParser
from middleware_hub.sessions.prompt.echoes import content_of, same_calls
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.reply import Reply, further_fields
from router.engines.form.stream import StreamedReply

logger = logging.getLogger(__name__)

_PIECE, _TEXT = itemgetter(0), attrgetter("text")


class AnswerBuilder:
    """Builds the answer of one generation; see the top of this file.

    Args:
        generation_id: of the generation; the ids of its tool calls derive from it.
        short_ids: whether these have nine letters and digits.
    """

    def __init__(
        self,
        generation_id: str,
        request: ChatRequest,
        parser: SampledParser,
        vocabulary: Vocabulary,
        *,
        short_ids: bool = False,
    ) -> None:
        self._id = generation_id
        self._request = request
        self._parser = parser
        self._short_ids = short_ids
        self._wants_logprobs = request.logprobs
        self._tokens = SampledTokens(vocabulary.piece, request.top_logprobs if request.logprobs else None)
        self.calls: list[ToolCall] = []
        self.pieces: list[tuple[Piece, Sequence[TokenLogprob] | None]] = []
        """All pieces so far, in order; those of a stream with the logprobs of the tokens since the piece before."""

    def __repr__(self) -> str:
        return f"<AnswerBuilder of {self._id}: {len(self.pieces)} pieces, {len(self.calls)} calls>"

    def event(self, streamed: StreamedReply) -> bool:
        """Take what the last event of a stream adds; return whether it adds text."""
        text = self._tokens.event(streamed)
        if text:
            self._take(text, streamed)
        return bool(text)

    def _take(self, text: str | None, streamed: StreamedReply | None = None) -> None:
        """Parse the next piece of text, or the end (None)."""
        found: Sequence[Sampled]
        try:
            found = self._parser.finish() if text is None else self._parser.feed(text)
        except Exception:
            logger.exception("the parser of %s failed: the rest of its text is passed on unparsed", self._id)
            self._parser = Plain(())
            found = [Text(text)] if text else []
        for number, piece in enumerate(found):
            logprobs = None
            if self._wants_logprobs and streamed is not None and number == len(found) - 1:
                logprobs = self._tokens.news(streamed)
            shown: Piece
            if not isinstance(piece, SampledCall):
                shown = piece
            elif self._request.parallel_calls or not self.calls:
                shown = self._called(piece)
            elif logprobs is None:
                continue
            else:
                shown = Text("")  # the call is hidden, but its tokens were sampled
            self.pieces.append((shown, logprobs))

    def _called(self, call: SampledCall) -> ToolCall:
        """Give a call its id: the sampled one, to which the template's result will refer, unless this turn had it before."""
        chosen = call.id
        if not chosen or any(other.id == chosen for other in self.calls):
            chosen = call_id(self._id, len(self.calls), short=self._short_ids)
        made = ToolCall(chosen, call.name, call.arguments)
        self.calls.append(made)
        return made

    def spelled(self, reply: Reply, meta: dict[str, Raw]) -> list[TokenLogprob] | None:
        """Spell all tokens of a reply; None if the client wants no logprobs. May take a second; may run in a thread.

        `meta`: the `meta_info` of a reply in one piece; empty for a stream, whose alternatives of tokens have come already.
        """
        self._tokens.take_tops(meta, len(reply.ids))
        return self._tokens.all(reply)

    def begins_with(self, echo: Message, before: str = "") -> bool:
        """Whether an echo is `before` and the beginning of what has been sampled so far, which is not empty."""
        thought = "".join([piece.text for piece, _ in self.pieces if isinstance(piece, Reasoning)])
        shown: Message = {
            "content": before + "".join([piece.text for piece, _ in self.pieces if isinstance(piece, Text)]),
            "tool_calls": [call.as_openai() for call in self.calls],
        }
        reasoning = (echo.get("reasoning_content") or "").strip()
        read = (content_of(echo) or "").strip().removeprefix(before.strip())
        empty = not (reasoning or echo.get("tool_calls") or read.strip())
        return not empty and begins(shown, echo, thought)

    def answer(
        self,
        reply: Reply,
        fields: dict[str, Raw],
        meta: dict[str, Raw],
        *,
        prompt_tokens: int,
        prompt_ids: bytes = b"",
        cut_off: bool = False,
    ) -> Answer:
        """End the text, or take all of it if it did not stream, and return the whole answer without logprobs: see `spelled`.

        Args:
            fields, meta: its top level and its `meta_info`, raw.
            prompt_tokens: the length of the prompt that was sent.
            prompt_ids: its ids as a JSON list, which are in the answer if the client asked for token ids.
            cut_off: whether the generation was ended on purpose; its text came as a stream.
        """
        if not (self._request.stream or cut_off):
            self._take(reply.text)
        self._take(None)
        said: list[Piece] = []
        texts: dict[type[Piece], list[str]] = {Text: [], Reasoning: []}
        for kind, alike in groupby(map(_PIECE, self.pieces), type):
            if kind is ToolCall:
                said += alike
            elif text := "".join(map(_TEXT, alike)):
                texts[kind].append(text)
                if said and type(said[-1]) is kind:  # an empty piece of another kind was in between
                    text = getattr(said.pop(), "text", "") + text
                said.append(kind(text))
        further = further_fields(fields, meta)
        wants_ids = self._request.token_ids
        return answer_of(
            reply,
            meta,
            cut_off=cut_off,
            generation_id=self._id,
            content="".join(texts[Text]),
            reasoning="".join(texts[Reasoning]),
            pieces=said,
            ended=int(time.time()),
            tool_calls=tuple(self.calls),
            prompt_tokens=prompt_tokens,
            # Copies, because a slice would keep the whole reply in memory as long as the session lives.
            extra={name: value.copy() for name, value in further.items()} if further else {},
            ids=[*reply.ids] if wants_ids else None,
            prompt_ids=Raw(prompt_ids) if wants_ids else None,
        )


def begins(message: Message, echo: Message, thought: str) -> bool:
    """Whether an echo has the beginning of a message's text, calls, and reasoning (`thought`)."""
    whole, content = content_of(message), content_of(echo)
    called = len(echo.get("tool_calls") or ())
    first = {**message, "tool_calls": (message.get("tool_calls") or [])[:called]}
    return (
        echo["role"] == "assistant"
        and content is not None
        and (whole or "").strip().startswith(content.strip())
        and same_calls(first, echo, {})
        and thought.strip().startswith((echo.get("reasoning_content") or "").strip())
    )
