"""The answer of one generation, in the types of all dialects, and how it is made of a worker's reply.

The `id` of a chat or completion is made of its generation's id, so it names that sample wherever one is meant: as a parent, for
a reward, in a list of replies. With several choices there is no such sample. Their `id` says so by its form, which any router
knows, at any time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from middleware_hub.chat.messages import Piece, Reasoning, Text, ToolCall
from router.engines.form.reply import LogprobEntry, Reply, UnreadableReplyError, Usage
from router.engines.form.stream import StreamedReply
from router.engines.json import JSON_ERRORS
from router.errors import BadRequestError

Finish = Literal["stop", "length", "tool_calls", "abort"]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token: its id, its bytes, its logprob, and the best alternatives as `(id, bytes, logprob)`.

    A logprob is None where the worker sent null: workers have no other word for one that is infinite, or not a number.
    """

    token_id: int
    spelled: bytes
    logprob: float | None
    top: Sequence[tuple[int, bytes, float | None]] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One finished generation, as a client sees it.

    Attributes:
        generation_id: its name in this router.
        content: text for the reader; empty if there is none.
        ended: when it was whole, in seconds since 1970.
        pieces: reasoning, texts and calls in the order in which they were sampled, neighbours of one kind joined; none if the
            order is unknown.
        matched: the stop string (or stop token id) that ended it, if any.
        completion_tokens: the number of sampled tokens, hidden ones included.
        logprobs: the logprobs of all sampled tokens; None if the client did not ask for them.
        extra: further fields of the worker's reply, raw, under their own names (`routed_experts`, `hidden_states`, ...).
        ids: the sampled ids, and in `prompt_ids` the sent ones, as a JSON list; None if the client did not ask for them.
    """

    generation_id: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"
    matched: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    weight_version: str | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    extra: dict[str, Raw] = {}
    ids: Sequence[int] | None = None
    prompt_ids: Raw | None = None
    pieces: Sequence[Piece] = ()
    ended: int = 0

    @property
    def said(self) -> Sequence[Piece]:
        """Return all that was said, in its order, for dialects that have one: a whole reply is what its stream adds up to."""
        if self.pieces:
            return self.pieces
        texts: list[Piece] = [Reasoning(self.reasoning)] if self.reasoning else []
        texts += [Text(self.content)] if self.content else []
        return [*texts, *self.tool_calls]


class ReplyHead(msgspec.Struct, frozen=True):
    """The head of every reply: its id, its time (seconds since 1970), and the name of the model."""

    id: str
    created: int
    model: str


_SEVERAL: Final = re.compile(r"(?:chatcmpl-|cmpl-)?[0-9a-f]{32}-n([0-9]+)")


def of_several(name: str, count: int) -> str:
    """Return the name of all `count` choices of a reply, made of a generation's id; of one choice, just that."""
    return name if count == 1 else f"{name}-n{count}"


def check_one(name: str, what: str) -> None:
    """Raise BadRequestError if a name, given as `what`, is that of several choices."""
    found = _SEVERAL.fullmatch(name)
    if found is not None:
        raise BadRequestError(
            f"{what} {name!r} is the id of a reply with {found[1]} choices, and one sample is meant: name that by its own id, "
            "choices[i].meta_info.generation_id"
        )


_Tops = list[list[LogprobEntry] | None]
_decode_tops = msgspec.json.Decoder(_Tops | None).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_usage = msgspec.json.Decoder(Usage).decode


class SampledTokens(msgspec.Struct, eq=False):
    """Spells the sampled tokens of one generation, whole or as its stream comes.

    Args:
        piece: returns the bytes of a token.
        alternatives: the number of alternatives for each token that the client wants; None if it wants no logprobs.
    """

    _piece: Callable[[int], bytes]
    _alternatives: int | None
    _tops: _Tops = []
    _spelled: int = 0

    def all(self, reply: Reply) -> list[TokenLogprob] | None:
        """Spell all tokens of a reply; None if the client wants no logprobs."""
        if self._alternatives is None:
            return None
        return self._spell([*zip(reply.logprobs or (), reply.logprob_ids or (), strict=False)], 0)

    def event(self, streamed: StreamedReply) -> str:
        """Take the last event of a stream, and return the text that it adds. Raises UnreadableReplyError."""
        if self._alternatives:
            self.take_tops(streamed.last_meta, len(streamed.logprobs))
        added = streamed.added or []
        try:
            text = _decode_text(added[0]) if len(added) == 1 else "".join([_decode_text(piece) for piece in added])
        except JSON_ERRORS as error:
            raise UnreadableReplyError(f"a text that is none: {error}") from error
        added.clear()
        return text

    def news(self, streamed: StreamedReply) -> list[TokenLogprob] | None:
        """Spell the tokens of a stream since the last call; None if the client wants no logprobs."""
        if self._alternatives is None:
            return None
        found = self._spell(streamed.logprobs, self._spelled)
        self._spelled = len(streamed.logprobs)
        return found

    def take_tops(self, meta: dict[str, Raw], tokens: int) -> None:
        """Take the alternatives of a reply or an event: of all `tokens` so far, or of the new tokens.

        Raises UnreadableReplyError.
        """
        raw = meta.get("output_top_logprobs") if self._alternatives else None
        if raw is None:
            return
        try:
            new = _decode_tops(raw) or []
        except JSON_ERRORS as error:
            raise UnreadableReplyError(f"output_top_logprobs: {error}") from error
        if len(new) == tokens:
            self._tops = new
        else:
            self._tops += new

    def _spell(self, entries: Sequence[Any], begin: int) -> list[TokenLogprob]:
        """Spell `entries`, which begin with `[logprob, id]`, from index `begin` on."""
        piece, tops = self._piece, self._tops
        found = []
        for number in range(begin, len(entries)):
            logprob, token, *_ = entries[number]
            best = (tops[number] if number < len(tops) else None) or []
            top: list[Any] = [(one[1], piece(one[1]), one[0]) for one in best[: self._alternatives]]
            found.append(TokenLogprob(token, piece(token), logprob, top))
        return found


def answer_of(reply: Reply, meta: dict[str, Raw], *, cut_off: bool = False, **fields: Any) -> Answer:
    """Return the answer for a worker's reply.

    Args:
        meta: its `meta_info`, raw.
        cut_off: whether the generation was ended on purpose.
        fields: fields of the answer that the reply lacks, or that the caller knows better.
    """
    # In OpenAI's words, but `abort` is SGLang's: OpenAI has no word for half a reply.
    finish = "abort" if cut_off or reply.finish_type not in ("stop", "length") else reply.finish_type
    if finish == "stop" and fields.get("tool_calls"):
        finish = "tool_calls"
    counted = {key: meta[key] for key in Usage.__struct_fields__ if key in meta}
    try:
        usage = _decode_usage(msgspec.json.encode(counted))
    except JSON_ERRORS:  # no token depends on what the engine counts besides
        usage = Usage()
    found: dict[str, Any] = {
        "finish": finish,
        "generation_id": reply.request_id or "",
        "matched": reply.matched,
        "prompt_tokens": reply.prompt_tokens or 0,
        "completion_tokens": len(reply.ids),
        "cached_tokens": usage.cached_tokens or 0,
        "reasoning_tokens": usage.reasoning_tokens or 0,
        "weight_version": reply.version,
    }
    return Answer(**{**found, **fields})
