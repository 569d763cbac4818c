"""Contexts that equal requests share: the text after a chain is encoded, and held, once."""

from __future__ import annotations

from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.trie.prepared_turn import PreparedTurn
from middleware_hub.spans.chain import TokenSpan

_KEYED = {"role", "content", "name", "tool_call_id"}
"""The fields of a message that its key covers."""


def find(turn: PreparedTurn, request: ChatRequest, parent: TokenSpan | None) -> TokenSpan | None:
    """Return the context that an equal request was given after `parent`; None stands for the start of a prompt."""
    for span in turn.node.contexts or ():
        if span.parent is parent and _shareable(turn, request, parent):
            return span
    return None


def share(turn: PreparedTurn, request: ChatRequest, span: TokenSpan) -> TokenSpan:
    """Return the context that all generations of one prompt use: `span`, or an equal context that exists already."""
    if not _shareable(turn, request, span.parent):
        return span
    contexts = turn.node.contexts
    if contexts is None:
        contexts = turn.node.contexts = []
    for other in contexts:
        if other.parent is span.parent and other.take == span.take and other.ids == span.ids:
            return other
    contexts.append(span)
    return span


def _shareable(turn: PreparedTurn, request: ChatRequest, parent: TokenSpan | None) -> bool:
    """Whether equal keys mean equal renderings: whether the keys cover everything that a template could write."""
    if request.continue_final:
        return False
    for message in request.messages[0 if parent is None else turn.covered :]:
        if message["role"] == "assistant" or not message.keys() <= _KEYED:
            return False
    return True
