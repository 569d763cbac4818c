"""Prompts of chats without a session, which may be known by their text if they are not known by their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.generate import prompting
from middleware_hub.generate.prompting import Prompt
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.node import Generation
from middleware_hub.radix.tree import RadixTree
from middleware_hub.sessions.prompt.known_text import KnownText
from middleware_hub.spans.chain import TokenSpan, links, unpack_ids
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.http.headers import HeaderList, first_values
from router.observability.tracing import Tracer


class Remembering(Protocol):
    """Remembers texts, see `Hub`."""

    tokenizer: Tokenizer
    tree: RadixTree | None
    memory: Memory | None


@dataclass(slots=True)
class RememberedText:
    """Encodes the whole prompts of one request as the radix tree remembers their text; see `prompting.from_text`.

    Attributes:
        knew_parent: whether the tokens of the parent, the reply that the request names, are in the prompt.
        reply, replied: see `EncodeStart`.
    """

    _tree: RadixTree
    _tokenizer: Tokenizer
    _namespace: tuple[str, str, str]
    _parent: str | None
    _tracer: Tracer | None
    _memory: Memory | None = None
    knew_parent: bool = False
    reply: str = ""
    replied: int = 0

    @classmethod
    def of(
        cls,
        hub: Remembering,
        tracer: Tracer | None,
        tenant: str,
        request: ChatRequest,
        headers: HeaderList,
        parent: str | None,
    ) -> RememberedText | None:
        """Return the encoder of a request; None if nothing remembers texts."""
        lora = request.lora
        if hub.tree is None or lora is None:
            return None
        namespace = first_values(headers).get(b"x-radix-namespace", b"").decode("latin-1")
        return cls(hub.tree, hub.tokenizer, (tenant, lora, namespace), parent, tracer, hub.memory)

    async def __call__(self, text: str) -> tuple[Sequence[int], int]:
        """Return the ids of a prompt and how many of them were remembered."""
        prompt = await self._prompt(text)
        known = unpack_ids(prompt.packed)
        if self._tokenizer.spell_prompt(known) != text:
            # A hidden end of turn stays in a text that continues after it; a template that writes none there means none.
            ids = await self._tokenizer.encode(text, start=True)
            if self._tokenizer.spell_prompt(ids) != self._tokenizer.spell_prompt(known):
                self.reply, self.replied = "", 0
                return ids, 0
        self.knew_parent = self._parent is not None and not prompt.match.unknown_parent
        return known, prompt.reused

    async def behind(self, generation_id: str, text: str) -> KnownText | None:
        """Return the ids of a generation's text and `text` after it, if that has a later reply that is remembered."""
        reply = self._tree.reply(self._namespace, generation_id)
        if reply is None:
            return None
        prompt = await self._prompt(self._tree.text_of(reply) + text)
        line = prompt.match.continues
        if line is None or not self.reply or all(part is not reply.span for part, _ in links(*_before(line))):
            self.reply, self.replied = "", 0
            return None
        self.knew_parent = self._parent is not None and not prompt.match.unknown_parent
        return KnownText(prompt.packed, self.reply, prompt.reused)

    async def _prompt(self, text: str) -> Prompt:
        prompt = await prompting.from_text(
            self._tree, self._tokenizer, self._namespace, text, self._parent, self._tracer, self._memory
        )
        self._tree.unpin(prompt.match)
        self.reply, self.replied = "", 0
        line = prompt.match.continues
        if line is not None and line.request_ids:
            self.reply, self.replied = line.request_ids[0], line.span.offset + line.span.visible
        return prompt


def _before(reply: Generation) -> tuple[TokenSpan | None, int]:
    """Return the chain that is the prompt of a reply."""
    return reply.span.parent, reply.span.take
