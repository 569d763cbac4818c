"""An echo that is not quite what was sampled: the prompt continues the sampled turn as far as the echo's text goes. Pure.

Agents strip replies, put thoughts back into the content, replace the ids of tool calls. Such a message is another one, and its
conversation forks there; but it keeps the tokens that spell what the two have in common (exactness.md, rule 5):

    sampled   hm</think>\\n\\n | The| answer| is| 4|.|\\n\\n|<|im_end|>          content: "The answer is 4.\\n\\n"
    echo      hm</think>\\n\\n | The| answer| is| 4|.|<|im_end|>\\n<|im_start|>...  content: "The answer is 4."
              `- kept, tokens as they were sampled ----' `- encoded
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.keys import said_by
from middleware_hub.chat.messages import Message
from middleware_hub.radix.node import common_length
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import ID_BYTES, SpanFlag, chain_ids, unpack_ids
from middleware_hub.tokenizer.vocabulary import Vocabulary

_SCAFFOLD = 64
"""Tokens of a prompt's end that hold all that a template writes in front of a turn."""


class Echo(NamedTuple):
    """An echo as it may be written behind the prompt of the turn that it echoes.

    Attributes:
        text: of the turn; or, where a template wrote it, of the turn and all that stands behind it.
        rendered: whether it is the latter.
    """

    text: str
    rendered: bool = False


class Kept(NamedTuple):
    """What an echo keeps of a sampled turn.

    Attributes:
        checkpoint: the turn.
        take: so many of its tokens.
        text: the rest of the echo, to be encoded behind them.
        rendered: whether that holds all that stands behind the turn, too.
        all: whether all that the client saw of the turn is kept. What follows then may close the turn, or go on with it.
    """

    checkpoint: Checkpoint
    take: int
    text: str
    rendered: bool
    all: bool


def echoes(checkpoint: Checkpoint, echo: Message, vocabulary: Vocabulary) -> list[Echo]:
    """How an echo may be written in the place of a sampled turn, with the thoughts that it does not show.

    An echo with other tool calls is not among them: only the template can write it.
    """
    said: Message = msgspec.json.decode(checkpoint.node.message)
    content, own = _content(echo), _content(said)
    if content is None or own is None or _calls(said) != _calls(echo):
        return []
    span = checkpoint.span
    if not shows_thought(checkpoint, echo):
        sampled = vocabulary.spell(unpack_ids(span.ids)[: span.visible])
        at = sampled.rfind(own)
        alike = own.strip() == content.strip() or common_length(own.strip(), content.strip(), 0)
        return [Echo(sampled[:at] + content + sampled[at + len(own) :])] if alike and at >= 0 else []
    if said.get("tool_calls"):
        return []
    # The template may have opened the thought already.
    opened = vocabulary.lossy(unpack_ids(chain_ids(span.parent, span.take)[-_SCAFFOLD * ID_BYTES :]))
    known = next((n for n in range(min(len(opened), len(content)), 0, -1) if opened.endswith(content[:n])), 0)
    return [Echo(content[known:])]


def keep(checkpoint: Checkpoint, echo: Echo, vocabulary: Vocabulary) -> Kept:
    """The tokens of a sampled turn that lie wholly in what an echo has in common with it."""
    span = checkpoint.span
    ids = unpack_ids(span.ids)[: span.visible]
    sampled = vocabulary.spell(ids)
    common: int | None = common_length(sampled, echo.text, 0)
    ends, take = vocabulary.counted(ids), 0
    while common is not None:
        take = int(ends.searchsorted(common, side="right"))
        while 0 < take < len(ids) and not vocabulary.piece(ids[take - 1]):
            take -= 1
        # Not inside of an added token that the echo spells: the rest of it would be encoded as something else.
        common = vocabulary.straddled(echo.text, int(ends[take - 1])) if take else None
    rest = echo.text[int(ends[take - 1]) if take else 0 :]
    return Kept(checkpoint, take, rest, echo.rendered, take == len(ids))


def manner(checkpoint: Checkpoint, echo: Message) -> str:
    """In which way an echo differs from what was sampled, in a word for a counter."""
    said: Message = msgspec.json.decode(checkpoint.node.message)
    content, own = _content(echo), _content(said)
    if shows_thought(checkpoint, echo):
        return "reasoning"
    if content == own and said.get("tool_calls") and _calls(said) == _calls(echo):
        return "call_ids"
    if content is not None and own is not None and content.strip() == own.strip():
        return "stripped"
    return "edited"


def shows_thought(checkpoint: Checkpoint, echo: Message) -> bool:
    """Whether the client put the thought of a turn into its content."""
    thought, content = checkpoint.reasoning.strip(), _content(echo)
    return bool(thought and content and thought in content)


def usable(checkpoint: Checkpoint) -> bool:
    """Whether it is known where the text of a turn ends in its ids."""
    return not checkpoint.span.flags & SpanFlag.MISMATCH and not checkpoint.shown


def prompt_of(checkpoint: Checkpoint, vocabulary: Vocabulary) -> str:
    """What the whole prompt of a turn spells."""
    span = checkpoint.span
    return vocabulary.spell(unpack_ids(chain_ids(span.parent, span.take)))


def _content(message: Message) -> str | None:
    """The content, if it is text."""
    content: Any = message.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        content = content[0].get("text")
    return content or "" if content is None or isinstance(content, str) else None


def _calls(message: Message) -> Sequence[Any]:
    """The calls of a message without their ids."""
    return [said_by(call)[1:] for call in message.get("tool_calls") or ()]
