"""What a client is told of a generation: its sampled text taken apart, piece by piece as it comes, and the answer in the end.

Tokens are not touched here. Where a parser fails, the rest is told as the text that it is: a reply is never lost to one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.chat.keys import call_id
from middleware_hub.chat.messages import (
    Answer,
    Call,
    ChatRequest,
    Finish,
    Message,
    Piece,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCall,
)
from middleware_hub.parsers.base import Sampled
from middleware_hub.parsers.plain import Plain
from middleware_hub.parsers.reply import ReplyParser
from middleware_hub.sessions.trie.nodes import MessageNode
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.sglang import Reply, StreamedReply
from router.engines.sglang.reply import Usage

logger = logging.getLogger(__name__)


class Told:
    """See the top of this file.

    Args:
        generation_id: whose it is.
        request: what the client wants to be told.
        node: the last message of the prompt: the ids of calls are made from where they stand.
        parser: takes the sampled text apart; made for this generation.
        vocabulary: spells tokens, for their logprobs.
    """

    def __init__(
        self, generation_id: str, request: ChatRequest, node: MessageNode, parser: ReplyParser, vocabulary: Vocabulary
    ) -> None:
        self._id = generation_id
        self._request = request
        self._node = node
        self._parser = parser
        self._vocabulary = vocabulary
        self._tops: list[Any] = []
        self._shown = 0
        self._ended = False
        self.calls: list[ToolCall] = []
        self.pieces: list[tuple[Piece, Sequence[TokenLogprob] | None]] = []
        """All so far, in order; of a stream, as it came, with the logprobs of the tokens since the piece before."""

    def __repr__(self) -> str:
        return f"<Told of {self._id}: {len(self.pieces)} pieces, {len(self.calls)} calls>"

    # As it comes -------------------------------------------------------------------------------------------------------

    def whole(self, text: str, meta: dict[str, Raw]) -> None:
        """All of it, of a reply in one piece."""
        if self._request.top_logprobs:
            self._tops = _top_logprobs(meta)
        self._take(self._parsed(text), None)

    def event(self, streamed: StreamedReply) -> bool:
        """What the last event of a stream has added; whether there is something new to be told."""
        if self._request.top_logprobs:
            _join_tops(self._tops, _top_logprobs(streamed.last_meta), len(streamed.logprobs))
        added = streamed.added or []
        text = "".join([msgspec.json.decode(piece, type=str) for piece in added])
        added.clear()
        if text:
            self._take(self._parsed(text), streamed)
        return bool(text)

    def end(self) -> None:
        """The text is over. May be called twice."""
        if not self._ended:
            self._ended = True
            self._take(self._parsed(None), None)

    def _parsed(self, text: str | None) -> Sequence[Sampled]:
        """What a parser makes of the next piece of text, or of the end (None)."""
        try:
            return self._parser.finish() if text is None else self._parser.feed(text)
        except Exception:
            logger.exception("the parser of %s failed: the rest of its text is told as it is", self._id)
            self._parser = ReplyParser(Plain(()))
            return [Text(text)] if text else []

    def _take(self, found: Sequence[Sampled], streamed: StreamedReply | None) -> None:
        for number, piece in enumerate(found):
            logprobs = None
            if streamed is not None and self._request.logprobs and number == len(found) - 1:
                logprobs = self._spelled(streamed.logprobs[self._shown :], self._tops[self._shown :])
                self._shown = len(streamed.logprobs)
            shown: Piece
            if isinstance(piece, Call):
                if self.calls and not self._request.parallel_calls:
                    continue
                shown = self._called(piece)
            else:
                shown = piece
            self.pieces.append((shown, logprobs))

    def _called(self, call: Call) -> ToolCall:
        node, number = self._node, len(self.calls)
        made = ToolCall(call_id(node.key, node.depth, number, call.name, call.arguments), call.name, call.arguments)
        self.calls.append(made)
        return made

    # All of it ---------------------------------------------------------------------------------------------------------

    @property
    def content(self) -> str:
        """What was said so far."""
        return "".join([piece.text for piece, _ in self.pieces if isinstance(piece, Text)])

    @property
    def reasoning(self) -> str:
        """What was thought so far."""
        return "".join([piece.text for piece, _ in self.pieces if isinstance(piece, Reasoning)])

    def add_calls(self, message: Message) -> None:
        """Put the calls into an assistant's message."""
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]

    def finish(self, reply: Reply) -> Finish:
        """How it ended, in a client's words."""
        if reply.finish_type == "length":
            return "length"
        if reply.finish_type != "stop":
            return "abort"
        return "tool_calls" if self.calls else "stop"

    def answer(self, reply: Reply, meta: dict[str, Raw], extra: dict[str, Raw], *, prompt_tokens: int) -> Answer:
        """The whole; `meta` is the reply's `meta_info`, `extra` what the client gets of it as it is."""
        usage = msgspec.json.decode(msgspec.json.encode(meta), type=Usage)
        logprobs = None
        if self._request.logprobs:
            entries = list(zip(reply.logprobs or (), reply.logprob_ids or (), strict=False))
            logprobs = self._spelled(entries, self._tops)
        return Answer(
            generation_id=self._id,
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=tuple(self.calls),
            finish=self.finish(reply),
            matched=reply.matched,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(reply.ids),
            cached_tokens=usage.cached_tokens or 0,
            reasoning_tokens=usage.reasoning_tokens or 0,
            weight_version=reply.version,
            logprobs=logprobs,
            extra=extra,
        )

    def _spelled(self, entries: Sequence[Any], tops: Sequence[Any]) -> list[TokenLogprob]:
        """`entries` begin with `[logprob, id]`; `tops` are the alternatives of each, as far as there are any."""
        piece = self._vocabulary.piece
        found = []
        for number, entry in enumerate(entries):
            best = tops[number] if number < len(tops) else ()
            found.append(
                TokenLogprob(
                    entry[1], piece(entry[1]), entry[0], [(one[1], piece(one[1]), one[0]) for one in best or ()]
                )
            )
        return found


def _top_logprobs(meta: dict[str, Raw]) -> list[Any]:
    raw = meta.get("output_top_logprobs")
    found: list[Any] = [] if raw is None else msgspec.json.decode(raw) or []
    return found


def _join_tops(tops: list[Any], new: list[Any], tokens: int) -> None:
    """Alternatives of an event: of all tokens so far, or of those that are new."""
    if len(new) == tokens:
        tops[:] = new
    else:
        tops += new
