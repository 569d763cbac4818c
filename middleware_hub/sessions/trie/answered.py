"""A message as it was answered, in the place of its echo: what templates are shown of it does not depend on the client."""

from __future__ import annotations

from typing import Any

import msgspec

from middleware_hub.chat.call_ids import is_of
from middleware_hub.chat.keys import call_ids
from middleware_hub.chat.messages import KeyedMessage, Message, MessageKey
from middleware_hub.sessions.trie.nodes import MessageNode

_decode = msgspec.json.decode


def as_answered(node: MessageNode, key: MessageKey, echo: Message) -> dict[str, str]:
    """Write what a node's message says over an echo of it; return the new ids of its calls, by those that the client gave them.

    `key` is the echo's; if it is the node's, only ids are written over.
    """
    answered: Message = _decode(node.message)
    if key != node.key:
        _write_over(node, answered, echo)
    names, ids = call_ids(echo), call_ids(answered)
    samples = node.samples or ()
    if names == ids or len(names) != len(ids) or any(is_of(names[0], sample.id) for sample in samples):
        return {}
    renamed = {}
    for call, name, own in zip(echo["tool_calls"], names, ids, strict=True):
        if own is not None:
            call["id"] = own
            if name is not None:
                renamed[name] = own
    return renamed


def _write_over(node: MessageNode, answered: Message, echo: Message) -> None:
    content = echo.get("content")
    if isinstance(content, str) and not echo.get("reasoning_content"):
        moved = (one.reasoning for one in reversed(node.samples or ()) if one.reasoning.strip())
        thought = next((text for text in moved if text.strip() in content), None)
        if thought is not None:
            echo["reasoning_content"] = thought
    echo["content"] = answered.get("content")
    for call, own in zip(echo.get("tool_calls") or (), answered.get("tool_calls") or (), strict=False):
        call["function"] = {**own["function"], "arguments": _parsed(own["function"].get("arguments"))}
    if isinstance(echo, KeyedMessage):
        echo.key, echo.looked_at = node.key, None


def _parsed(arguments: Any) -> Any:
    """Return arguments as templates are shown them: an object if their text is one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = _decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
