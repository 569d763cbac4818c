"""Edited echoes: a message that differs a little from the sampled one still keeps the tokens they have in common. Pure.

Agents strip replies, put reasoning back into the content, and replace the ids of tool calls. Such a message is another message,
and its conversation forks there. But it keeps the tokens that spell what the two have in common (exactness.md, rule 5):

    sampled   hm</think>\\n\\n | The| answer| is| 4|.|\\n\\n|<|im_end|>          content: "The answer is 4.\\n\\n"
    echo      hm</think>\\n\\n | The| answer| is| 4|.|<|im_end|>\\n<|im_start|>...  content: "The answer is 4."
              `- kept, tokens as they were sampled ----' `- encoded
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.keys import said_by
from middleware_hub.chat.messages import Message
from middleware_hub.radix.node import common_length
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, chain_ids, unpack_ids
from middleware_hub.tokenizer.vocabulary import Vocabulary

_TAG = re.compile(r"</?think(?:ing)?>")
"""How clients mark reasoning in a content."""

_SCAFFOLD = 64
"""Tokens at the end of a prompt that contain everything that a template writes before a turn."""


class Echo(NamedTuple):
    """An echo as it may be written after the prompt of the turn that it echoes.

    Attributes:
        text: the text of the turn; if a template wrote it, with everything after the turn.
        rendered: whether a template wrote it.
    """

    text: str
    rendered: bool = False


class KeptEcho(NamedTuple):
    """The part of a sampled turn that an echo keeps.

    Attributes:
        checkpoint: the turn.
        take: how many of its tokens are kept.
        text: the rest of the echo, to encode after them.
        rendered: whether `text` contains everything after the turn as well.
        all: whether everything that the client saw of the turn is kept. The text then either closes the turn or continues it.
    """

    checkpoint: Checkpoint
    take: int
    text: str
    rendered: bool
    all: bool


def echoes(checkpoint: Checkpoint, echo: Message, vocabulary: Vocabulary) -> list[Echo]:
    """Return how an echo may be written in the place of a sampled turn, with the reasoning that it does not show.

    None of them is for an echo with other tool calls: only the template can write that.
    """
    said: Message = msgspec.json.decode(checkpoint.node.message)
    content, own = content_of(echo), content_of(said)
    if content is None or own is None or calls_of(said) != calls_of(echo):
        return []
    span = checkpoint.span
    sampled = vocabulary.spell(unpack_ids(span.ids)[: span.visible]) + checkpoint.shown
    if not shows_reasoning(checkpoint, echo):
        at = sampled.rfind(own)
        alike = own.strip() == content.strip() or common_length(own.strip(), content.strip(), 0)
        if not alike and not content.strip():  # the client stopped a stream after its reasoning
            alike = (echo.get("reasoning_content") or "").strip() == checkpoint.reasoning.strip() != ""
        if said.get("tool_calls"):
            if content == own or not (content.strip() or own):
                return [Echo(sampled)]
            at = _before_calls(sampled, checkpoint.reasoning.strip(), own, calls_of(said))
        return [Echo(sampled[:at] + content + sampled[at + len(own) :])] if alike and at >= 0 else []
    if _TAG.sub("", content.replace(checkpoint.reasoning.strip(), "", 1)).strip() == own.strip():
        return [Echo(sampled)]  # the reasoning has moved, and nothing else has changed
    if said.get("tool_calls"):
        return []
    # The template may have opened the reasoning already.
    opened = vocabulary.lossy(unpack_ids(chain_ids(span.parent, span.take)[-_SCAFFOLD * ID_BYTES :]))
    known = next((n for n in range(min(len(opened), len(content)), 0, -1) if opened.endswith(content[:n])), 0)
    return [Echo(content[known:])]


def _before_calls(sampled: str, reasoning: str, content: str, calls: Sequence[Any]) -> int:
    """Return where the content of a turn with calls is; -1 if that is uncertain: a call may have the same words."""
    thought = sampled.find(reasoning)
    at = sampled.find(content, thought + len(reasoning) if thought >= 0 else 0)
    rest = sampled[at + len(content) :]
    return at if content not in rest and all(str(name) in rest for name, _ in calls) else -1


def keep(checkpoint: Checkpoint, echo: Echo, vocabulary: Vocabulary) -> KeptEcho:
    """Return the tokens of a sampled turn that lie wholly in the text that an echo shares with it."""
    span = checkpoint.span
    ids = unpack_ids(span.ids)[: span.visible]
    sampled = vocabulary.spell(ids)
    common: int | None = common_length(sampled, echo.text, 0)
    ends, take = vocabulary.counted(ids), 0
    while common is not None:
        take = int(ends.searchsorted(common, side="right"))
        while 0 < take < len(ids) and not vocabulary.piece(ids[take - 1]):
            take -= 1
        # Do not cut inside an added token that the echo spells: its rest would be encoded as something else.
        common = vocabulary.straddled(echo.text, int(ends[take - 1])) if take else None
    rest = echo.text[int(ends[take - 1]) if take else 0 :]
    return KeptEcho(checkpoint, take, rest, echo.rendered, take == len(ids) and not checkpoint.shown)


def manner(checkpoint: Checkpoint, echo: Message) -> str:
    """Return how an echo differs from what was sampled, as a word for a counter."""
    said: Message = msgspec.json.decode(checkpoint.node.message)
    content, own = content_of(echo), content_of(said)
    if shows_reasoning(checkpoint, echo):
        return "reasoning"
    if content == own and said.get("tool_calls") and calls_of(said) == calls_of(echo):
        return "call_ids"
    if content is not None and own is not None and content.strip() == own.strip():
        return "stripped"
    return "edited"


def shows_reasoning(checkpoint: Checkpoint, echo: Message) -> bool:
    """Whether the client put the reasoning of a turn into its content, which may have had the same words before."""
    reasoning, content = checkpoint.reasoning.strip(), content_of(echo)
    own = content_of(msgspec.json.decode(checkpoint.node.message)) or ""
    return bool(reasoning and content and content.count(reasoning) > own.count(reasoning))


def usable(checkpoint: Checkpoint) -> bool:
    """Whether it is known which ids spell a turn's text."""
    return not checkpoint.span.flags & SpanFlag.MISMATCH


def prompt_of(checkpoint: Checkpoint, vocabulary: Vocabulary) -> str:
    span = checkpoint.span
    return vocabulary.spell(unpack_ids(chain_ids(span.parent, span.take)))


def content_of(message: Message) -> str | None:
    """Return the content if it is text; an absent content is empty text."""
    content: Any = message.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        content = content[0].get("text")
    return content or "" if content is None or isinstance(content, str) else None


def calls_of(message: Message) -> Sequence[Any]:
    return [said_by(call)[1:] for call in message.get("tool_calls") or ()]
