"""What the radix tree knows of a chat without a session: replies that were sampled for its text, and for no chat.

chat        user -- assistant *1 -- user -- assistant -- user       only *1 is known by its messages
/generate   the text of all that, up to the second reply            the tree knows that reply by its text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.prompt.join import Join
from middleware_hub.sessions.trie.nodes import Checkpoint, PreparedTurn
from middleware_hub.spans.chain import chain_ids, unpack_ids
from middleware_hub.tokenizer.tokenizer import Tokenizer


class KnownText(msgspec.Struct, frozen=True, gc=False):
    """A text whose last reply is none of the chat's own.

    Attributes:
        ids: of the whole text, packed.
        reply: the name of that reply.
        reused: how many of the ids were remembered.
    """

    ids: bytes
    reply: str
    reused: int


class EncodeStart(Protocol):
    """Encodes whole prompts as they are remembered.

    Attributes:
        reply: the name of the last complete reply that the last prompt continues; empty without one.
        replied: how many tokens there are up to the end of it.
    """

    reply: str
    replied: int

    async def __call__(self, text: str) -> tuple[Sequence[int], int]:
        """Return the ids of a prompt and how many of them were remembered."""

    async def behind(self, generation_id: str, text: str) -> KnownText | None:
        """Return the ids of a generation's text and `text` after it, if that has a later reply that is remembered."""


async def known_behind(
    checkpoint: Checkpoint,
    joined: Join,
    tail: str,
    turn: PreparedTurn,
    request: ChatRequest,
    start: EncodeStart,
    tokenizer: Tokenizer,
) -> KnownText | None:
    """Return the remembered ids of the text after a checkpoint, if a later turn was sampled for that text.

    Args:
        joined: how the tail goes on from the checkpoint's chain.
        tail: the text that the template writes after the checkpoint.
    """
    if all(message["role"] != "assistant" for message in request.messages[turn.covered :]):
        return None
    known, chain = await start.behind(checkpoint.id, tail), chain_ids(checkpoint.span, joined.take)
    if known is None or not known.ids.startswith(chain):
        return None
    spell = tokenizer.vocabulary.spell
    spelled = spell(unpack_ids(known.ids[len(chain) :]))
    if spelled != joined.text and spelled != spell(await tokenizer.encode(joined.text, start=False)):
        return None  # it has an end of turn that the template does not write
    return known
