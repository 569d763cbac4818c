"""The message trie of a session as JSON, for a reader who wants to see its shape."""

from __future__ import annotations

from typing import Any

import msgspec

from middleware_hub.sessions.trie.trie import MessageTrie


def topology(trie: MessageTrie) -> list[dict[str, Any]]:
    """Return every message with its samples, parents before children."""
    nodes = list(trie.each_node())
    numbers = {id(node): number for number, node in enumerate(nodes)}
    return [
        {
            "node": number,
            "parent": numbers.get(id(node.parent)),
            "depth": node.depth,
            "role": node.role,
            "pending": not node.committed,
            "in_flight": node.handles,
            "excerpt": _excerpt(node.message),
            "samples": [
                {
                    "generation_id": sample.id,
                    "parent_generation": None if sample.parent is None else sample.parent.id,
                    "finish_reason": sample.finish,
                    "tokens": len(sample.span),
                    "terminal": sample.terminal,
                }
                for sample in node.samples or ()
            ],
        }
        for number, node in enumerate(nodes)
    ]


def _excerpt(message: bytes, characters: int = 80) -> str:
    said = msgspec.json.decode(message)
    content = said.get("content") or ""
    calls = [call["function"]["name"] for call in said.get("tool_calls") or ()]
    text = content if isinstance(content, str) else str(content)
    return (text + "".join(f" [{name}]" for name in calls))[:characters]
