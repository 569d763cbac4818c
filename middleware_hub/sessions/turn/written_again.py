"""The reply to a request that was sent again, written anew from its turn: by another router of the store, or after a restart.

The router that sent a reply keeps it byte for byte for a while (`kept_replies`). Everybody else has the turn: its message, its
tokens, and a digest of the request that it answers. What a turn does not have is left out of the reply: the stop string that
matched, what the engine counted besides tokens, and which worker it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from middleware_hub import affinity
from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob, of_several
from middleware_hub.chat.call_ids import call_id
from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.messages import ChatRequest, Message, ToolCall
from middleware_hub.sessions.exchange import KEPT_SECONDS
from middleware_hub.sessions.log.replay import context_of
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.spans.chain import SpanFlag, chain_ids, reasons_of, unpack_ids, unpack_logprobs, version_names
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.http.headers import HeaderList

_INEXACT = SpanFlag.MISMATCH | SpanFlag.SPLIT | SpanFlag.UNCERTAIN


def turns_of(prompt: MessageNode, asked: bytes, request: ChatRequest) -> list[Checkpoint]:
    """Return the turns that answered an equal request a moment ago, one for each sample; none if that is not certain.

    It is not if several equal requests were answered, if any turn was continued, or if a turn does not have all that the reply
    needs.

    Args:
        prompt: the last message of the request.
        asked: the request's digest (`RequestKey.digest`).
    """
    if request.continue_final or request.top_logprobs:
        return []
    children = (prompt.children or {}).values()
    found = [one for node in children for one in node.samples or () if one.asked == asked]
    if len(found) != request.samples:
        return []
    for one in found:
        known = not request.logprobs or one.span.logprobs is not None
        if one.users or not known or time.time() - one.time > KEPT_SECONDS:
            return []
    return sorted(found, key=lambda one: one.serial)


def reply(
    turns: Sequence[Checkpoint], dialect: Dialect, request: ChatRequest, session: Session, word: bytes, voc: Vocabulary
) -> tuple[HeaderList, bytes]:
    """Return the headers and the body of the reply that these turns are; of a stream, all of its events.

    `word` is the value of `x-router-affinity`.
    """
    first = turns[0]
    answers = [_answer(one, request, voc) for one in turns]
    head = ReplyHead(of_several(first.id, len(turns)), int(first.time), request.model or "default")
    context = context_of(first.span)
    inexact = [reason for one in turns for reason in reasons_of(one.span.flags & _INEXACT)]
    recorded = "pending" if request.stream else f"inexact; {inexact[0]}" if inexact else "exact"
    headers: HeaderList = [
        (b"x-generation-id", ", ".join([one.id for one in turns]).encode("latin-1")),
        (b"x-radix-reused-tokens", b"%d" % (first.span.offset - (0 if context is None else context.count))),
        (b"x-radix-prompt-tokens", b"%d" % first.span.offset),
        (b"x-radix-recorded", recorded.encode("latin-1")),
        (affinity.HEADER, word),
    ]
    if session.lasting:
        headers.append((b"x-session-id", session.id.encode("latin-1")))
    if first.reasons:
        headers.append((b"x-radix-reasons", ", ".join(first.reasons).encode("latin-1")))
    if not request.stream:
        return headers, dialect.whole(request, head, answers)
    stream = dialect.stream(request, head)
    out = [stream.begin(first.span.offset)]
    for index, answer in enumerate(answers):
        pieces = answer.said
        out += [
            stream.piece(index, piece, answer.logprobs if number == len(pieces) else None)
            for number, piece in enumerate(pieces, 1)
        ]
        out.append(stream.finish(index, answer))
    out.append(stream.end(answers))
    return [(b"content-type", stream.content_type), (b"cache-control", b"no-cache"), *headers], b"".join(out)


def _answer(turn: Checkpoint, request: ChatRequest, voc: Vocabulary) -> Answer:
    message: Message = msgspec.json.decode(turn.node.message)
    span, logprobs, ids = turn.span, None, unpack_ids(turn.span.ids)
    if request.logprobs and span.logprobs is not None:
        values = unpack_logprobs(span.logprobs, span.count).tolist()
        logprobs = [TokenLogprob(token, voc.piece(token), value) for token, value in zip(ids, values, strict=True)]
    prompt = msgspec.json.encode(unpack_ids(chain_ids(span.parent, span.take))) if request.token_ids else b""
    return Answer(
        generation_id=turn.id,
        content=message.get("content") or "",
        reasoning=turn.reasoning,
        tool_calls=_calls(turn, message),
        finish=turn.finish,  # type: ignore[arg-type]  # as it was told the first time
        prompt_tokens=span.offset,
        completion_tokens=span.count,
        weight_version=next(reversed(version_names(span.versions)), None),
        logprobs=logprobs,
        extra=turn.extra,
        ids=ids if request.token_ids else None,
        prompt_ids=Raw(prompt) if request.token_ids else None,
        ended=int(turn.time),
    )


def _calls(turn: Checkpoint, message: Message) -> tuple[ToolCall, ...]:
    """Return the calls of a turn. Equal samples have one message, which has the ids of the first one's calls."""
    made, first = [], (turn.node.samples or [turn])[0].id
    for at, one in enumerate(message.get("tool_calls") or ()):
        own = {call_id(first, at, short=short): call_id(turn.id, at, short=short) for short in (False, True)}
        made.append(ToolCall(own.get(one["id"], one["id"]), **one["function"]))
    return tuple(made)
