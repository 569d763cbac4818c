"""A turn that was committed elsewhere, committed here by the code that commits."""

from __future__ import annotations

from middleware_hub.sessions.log.events import TurnCommitted, message_of
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.hidden_tail import HiddenToken


def commit(trie: MessageTrie, turn: TurnCommitted, span: TokenSpan, tail: tuple[HiddenToken, ...]) -> Checkpoint:
    """Commit a turn. Raises KeyError if the trie lacks what it continues."""
    handle = trie.retrace(turn.setting, turn.behind, turn.messages, turn.generation)
    node, context = handle.node, span.parent
    if turn.listed and context is not None and all(one is not context for one in node.contexts or ()):
        node.contexts = [*(node.contexts or ()), context]
    handle.goes_on_from(None if turn.parent is None else trie.checkpoint(turn.parent), apart=turn.apart)
    return trie.commit(
        handle,
        message_of(turn.message),
        span,
        in_place=turn.in_place,
        finish=turn.finish,
        tail=tail,
        shown=turn.shown,
        reasoning=turn.reasoning,
        scaffold=turn.scaffold,
        reasons=turn.reasons,
        edited=turn.edited,
        time=turn.time,
    )
