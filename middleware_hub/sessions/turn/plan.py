"""What the generations of one turn share: the conversation, its prompt, and how it is sampled."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Scope

from middleware_hub.chat.answer import Answer
from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.trie.prepared_turn import PreparedTurn
from middleware_hub.sessions.trie.trie import MessageTrie


class TurnPlan(msgspec.Struct):
    """A turn on its way to the workers.

    Attributes:
        session_id: empty for a chat without a session.
        trie: of the session.
        scope: of the client's request.
        request: the client's request.
        turn: what its conversation met in the trie.
        prompt: the ids to send.
        sampling: `sampling_params`, complete; empty until they are worked out.
    """

    session_id: str
    trie: MessageTrie
    scope: Scope
    request: ChatRequest
    turn: PreparedTurn
    prompt: ComposedPrompt
    sampling: dict[str, Any] = {}

    @property
    def lasting(self) -> bool:
        """Whether the session will be exported (see `Session`). If not, the layers inside record the replies."""
        return bool(self.session_id)

    @property
    def parent(self) -> str | None:
        """The generation behind whose chain the layers inside record the replies."""
        return self.turn.named if self.turn.unknown_parent else self.prompt.parent

    @property
    def lost_parent(self) -> bool:
        """Whether the request named a generation that nobody here remembers."""
        named = self.turn.named
        return self.turn.unknown_parent and named is not None and self.trie.checkpoint(named) is None

    def message(self, answer: Answer) -> Message:
        """Return the assistant's message: what was sampled, behind the last message if the turn continues that one."""
        content = answer.content
        if self.request.continue_final:
            before = self.request.messages[-1].get("content")
            content = (before if isinstance(before, str) else "") + content
        message: Message = {"role": "assistant", "content": content}
        if answer.tool_calls:
            message["tool_calls"] = [call.as_openai() for call in answer.tool_calls]
        return message

    def reasoning_before(self) -> str:
        """Return the reasoning of the message that the turn continues: as it was sampled, else as the client has it."""
        checkpoint = self.prompt.checkpoint
        if checkpoint is not None and checkpoint.node is self.turn.node:
            return checkpoint.reasoning
        found = self.request.messages[-1].get("reasoning_content")
        return found if isinstance(found, str) else ""
