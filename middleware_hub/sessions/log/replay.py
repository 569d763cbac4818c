"""A turn as an event, and the replay of a turn of another router by the code that commits."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from middleware_hub.sessions.events import TurnCommitted, as_json, message_of
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, MessageNode, NewTurn
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.hidden_tail import HiddenToken


def known_to_all(_: Checkpoint) -> bool:
    return True


def event_of(
    handle: BranchHandle,
    message: bytes,
    turn: NewTurn | Checkpoint,
    *,
    in_place: bool = False,
    known: Callable[[Checkpoint], bool] = known_to_all,
) -> TurnCommitted:
    """Return the event of a turn, without the records of its spans.

    Args:
        handle: of its generation, before the commit.
        message: the assistant's, as JSON.
        known: whether the event may name a sample, because that has an event, too.
    """
    node, parent, context = handle.node, handle.checkpoint, context_of(turn.span)
    behind, nodes = sampled_above(node, known)
    return TurnCommitted(
        generation=handle.generation_id,
        setting=node.setting,
        behind=None if behind is None else behind.id,
        messages=tuple([passed.message for passed in nodes]),
        message=message,
        in_place=in_place,
        parent=None if parent is None or not known(parent) else parent.id,
        apart=handle.apart,
        edited=turn.edited,
        span=b"",
        context=None,
        shared=False,
        listed=False,
        flags=0 if context is None else context.flags,
        finish=turn.finish,
        shown=turn.shown,
        reasoning=turn.reasoning,
        scaffold=turn.scaffold,
        reasons=turn.reasons,
        time=turn.time,
        asked=turn.asked,
    )


def logged(handle: BranchHandle, turn: NewTurn, *, shared: bool) -> TurnCommitted:
    """Return the complete event of a turn whose spans have records. `shared`: see `TurnCommitted`."""
    context = context_of(turn.span)
    return msgspec.structs.replace(
        event_of(handle, as_json(turn.message), turn, in_place=turn.in_place),
        span=turn.span.stored.id,
        context=None if context is None else context.stored.id,
        shared=shared,
        listed=any(one is context for one in handle.node.contexts or ()),
    )


def context_of(span: TokenSpan) -> TokenSpan | None:
    """Return the text that was encoded before a turn; None if there is none."""
    return span.parent if span.parent is not None and not span.parent.sampled else None


def sampled_above(
    node: MessageNode, known: Callable[[Checkpoint], bool]
) -> tuple[Checkpoint | None, list[MessageNode]]:
    """Return how to find a node again: the nearest known sample at it or above, and the nodes after that sample."""
    behind: list[MessageNode] = []
    for passed in node.ancestors():
        found = next((one for one in passed.samples or () if known(one)), None)
        if found is not None:
            return found, behind[::-1]
        behind.append(passed)
    return None, behind[::-1]


def commit(
    trie: MessageTrie, turn: TurnCommitted, span: TokenSpan, tail: tuple[HiddenToken, ...], lora: str = ""
) -> Checkpoint:
    """Commit a turn. Raises KeyError if the trie lacks the turn that it continues."""
    handle = trie.retrace(turn.setting, turn.behind, turn.messages, turn.generation)
    node, context = handle.node, span.parent
    if turn.listed and context is not None and all(one is not context for one in node.contexts or ()):
        node.contexts = [*(node.contexts or ()), context]
    handle.goes_on_from(None if turn.parent is None else trie.checkpoint(turn.parent), apart=turn.apart)
    sampled = NewTurn(
        message_of(turn.message),
        span,
        turn.finish,
        in_place=turn.in_place,
        tail=tail,
        shown=turn.shown,
        reasoning=turn.reasoning,
        scaffold=turn.scaffold,
        reasons=turn.reasons,
        edited=turn.edited,
        time=turn.time,
        asked=turn.asked,
        lora=lora,
    )
    return trie.commit(handle, sampled)
