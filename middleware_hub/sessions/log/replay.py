"""A turn as an event, and the replay of a turn of another router by the code that commits."""

from __future__ import annotations

from middleware_hub.sessions.log.events import SampledTurn, TurnCommitted, as_json, message_of
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.hidden_tail import HiddenToken


def event_of(trie: MessageTrie, turn: SampledTurn, *, shared: bool) -> TurnCommitted:
    """Return the complete event of a turn whose spans have records. `shared`: see `TurnCommitted`."""
    handle, span = turn.handle, turn.span
    context = span.parent if span.parent is not None and not span.parent.sampled else None
    behind, nodes = trie.trace(handle.node)
    return TurnCommitted(
        generation=handle.generation_id,
        setting=handle.node.setting,
        behind=behind,
        messages=tuple(node.message for node in nodes),
        message=as_json(turn.message),
        in_place=turn.in_place,
        parent=None if handle.checkpoint is None else handle.checkpoint.id,
        apart=handle.apart,
        span=span.stored.id,
        context=None if context is None else context.stored.id,
        shared=shared,
        listed=any(one is context for one in handle.node.contexts or ()),
        flags=0 if context is None else context.flags,
        **{
            name: turn.details[name]
            for name in ("time", "edited", "finish", "shown", "reasoning", "scaffold", "reasons")
        },
    )


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
