"""Echoes: messages that are the sampled turn, although their keys differ from its key. Pure.

A harness parses a reply and writes it again. What it changes on the way and the model would not see makes no other turn:

    as answered       {"old": "a", "new": "b"}      "I look."          hm | I look.
    as echoed         {..., "replace_all": false}   "\\nI look.\\n"      <think>hm</think> I look.
                      the schema's default          the template, or   the reasoning moved into
                                                    the router, hides  the content
                                                    such white space

    as answered       Write <|note|>.
    as echoed         Write <\\u200d|note|>.         lest an encoder reads a special token there

The conversation goes on below the sampled message then. Everything else is an edit, see `edited_turns`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from middleware_hub.chat import keys
from middleware_hub.chat.call_ids import is_of
from middleware_hub.chat.keys import call_ids, said_by
from middleware_hub.chat.messages import Message, Tool
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.spans.chain import unpack_ids
from middleware_hub.tokenizer.vocabulary import Vocabulary

_TAG = re.compile(r"</?think(?:ing)?>")
"""How clients mark reasoning in a content."""

PLACEHOLDERS = frozenset({"(no content)", "[System: Empty message content sanitised to satisfy protocol]"})
"""What clients write for a turn without text, because a server refuses empty ones: Claude Code 2.1, LiteLLM 1.80."""

_JOINER = re.compile(r"(?<=[<\[\]])[\u200b-\u200d\u2060\ufeff]")
"""What pydantic-ai 2 writes into each text that looks like a special token, behind its first character, and leaves out of the
answer: a zero-width joiner, for any zero-width character that the model may have written there."""

_DEEPEST = 16
"""Levels of a schema that are searched for defaults: a schema may refer to itself. Joiners are not looked for below, either."""


class StripsAlike(Protocol):
    """Says whether the template writes two contents of a turn alike that differ in the white space around them."""

    def __call__(self, one: str, other: str, /, *, reasoning: bool, calls: bool) -> bool:
        """`reasoning`, `calls`: whether the turn has any."""


def is_echo(
    node: MessageNode,
    echo: Message,
    *,
    calls_alone: bool,
    tools: Sequence[Tool] | None,
    vocabulary: Vocabulary,
    strips_alike: StripsAlike,
) -> bool:
    """Return whether a message is the sampled one of a node.

    Args:
        calls_alone: whether the ids of its calls identify a message, whatever became of its text.
        tools: of the request.
    """
    said: Message = msgspec.json.decode(node.message)
    samples, ids = node.samples or (), call_ids(echo)
    named = bool(ids) and (
        ids == call_ids(said) or any(all(is_of(name, sample.id) for name in ids) for sample in samples)
    )
    if not same_calls(said, echo, schemas_of(tools), named=named):
        return False
    if named and calls_alone:
        return True
    return any(same_text(said, echo, sample, vocabulary, strips_alike) for sample in reversed(samples))


def same_text(
    said: Message,
    echo: Message,
    sample: Checkpoint,
    vocabulary: Vocabulary,
    strips_alike: StripsAlike,
) -> bool:
    """Whether an echo has the text of a turn, as far as the model would see: `sample` is one of the turn's."""
    own, content = content_of(said), content_of(echo)
    if own is None or content is None:
        return False
    if own != content:
        own, content = _unjoined(own), _unjoined(content)
    if own == content:
        return True
    if moved := shows_reasoning(own, sample.reasoning, content):
        content = without_reasoning(content, sample.reasoning)
    if not own.strip() and content.strip() in PLACEHOLDERS:
        return True
    if not own and not content.strip():  # inspect-ai writes a newline before each text, also where there is none
        return True
    if moved or own.strip() != content.strip():
        return own.strip() == content.strip()
    content = _as_answered(own, content, sample, vocabulary)
    reasoning, calls = bool(sample.reasoning), bool(said.get("tool_calls"))
    return own == content or strips_alike(own, content, reasoning=reasoning, calls=calls)


def _as_answered(own: str, content: str, sample: Checkpoint, vocabulary: Vocabulary) -> str:
    """Return an echo without the white space that the model sampled around its text, and the router left out of the answer."""
    text, sampled = content.strip(), sampled_text(sample, vocabulary)
    thought = sampled.find(sample.reasoning.strip())
    at = sampled.find(text, max(thought, 0) + len(sample.reasoning.strip()))
    if not text or at < 0:
        return content
    (front, _, back), (own_front, _, own_back) = content.partition(text), own.partition(text)
    if front.endswith(own_front) and sampled[:at].endswith(front):
        front = own_front
    if back.startswith(own_back) and sampled[at + len(text) :].startswith(back):
        back = own_back
    return f"{front}{text}{back}"


def sampled_text(sample: Checkpoint, vocabulary: Vocabulary) -> str:
    """Return the text of a turn as it was sampled, special tokens spelled, up to the last character that the client saw."""
    span = sample.span
    return vocabulary.spell(unpack_ids(span.ids)[: span.visible]) + sample.shown


def content_of(message: Message) -> str | None:
    """Return the content if it is text; an absent content is empty text."""
    content: Any = message.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        content = content[0].get("text")
    return content or "" if content is None or isinstance(content, str) else None


def shows_reasoning(own: str, reasoning: str, content: str) -> bool:
    """Whether a client put the reasoning of a turn into its content, which may have had the same words before."""
    return bool(reasoning.strip()) and content.count(reasoning.strip()) > own.count(reasoning.strip())


def without_reasoning(content: str, reasoning: str) -> str:
    return _TAG.sub("", content.replace(reasoning.strip(), "", 1)).strip()


def same_calls(said: Message, echo: Message, schemas: Mapping[str, Any], *, named: bool = False) -> bool:
    """Whether two messages have the same calls: names, and arguments but for the defaults of their schemas.

    `named`: whether the ids of the echo's calls say whose they are. Then arguments that are no JSON object any more are those
    that the client has cut.
    """
    ours, theirs = said.get("tool_calls") or (), echo.get("tool_calls") or ()
    return len(ours) == len(theirs) and all(
        same_call(one, other, schemas) or (named and _cut(one, other)) for one, other in zip(ours, theirs, strict=True)
    )


def _cut(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    function, echoed = one.get("function") or {}, other.get("function") or {}
    return function.get("name") == echoed.get("name") and isinstance(echoed.get("arguments"), str)


def same_call(one: Mapping[str, Any], other: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    """Whether two entries of `tool_calls` have the same name, and the same arguments but for the defaults of their schema."""
    (name, given), (echoed, back) = said_by(one), said_by(other)
    if name != echoed:
        return False
    if given == back:
        return True
    given, back = (_undefaulted(one, schemas.get(name)) for one in (given, back))
    return bool(given == back or _unjoined(given) == _unjoined(back))


def _unjoined(value: Any, depth: int = 0) -> Any:
    """Return a text, or the texts of arguments, without joiners in what looks like a special token."""
    if isinstance(value, str):
        return _JOINER.sub("", value)
    if depth < _DEEPEST and isinstance(value, list):
        return [_unjoined(one, depth + 1) for one in value]
    if depth < _DEEPEST and isinstance(value, dict):
        return {_unjoined(name): _unjoined(one, depth + 1) for name, one in value.items()}
    return value


def _undefaulted(value: Any, schema: Any) -> Any:
    """Return arguments without the values that equal the default of their schema."""
    return _without_defaults(value or {}, schema, schema, 0)


def _without_defaults(value: Any, schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _DEEPEST or not isinstance(value, dict | list):
        return value
    schema = _resolved(schema, root)
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(name) or ():
            value = _without_defaults(value, one, root, depth + 1)
    if isinstance(value, list):
        return [_without_defaults(one, schema.get("items"), root, depth + 1) for one in value]
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return value
    found = {}
    for name, one in value.items():
        below = properties.get(name)
        left = _without_defaults(one, below, root, depth + 1)
        if not (isinstance(below, dict) and "default" in below and left == _default(below, root, depth)):
            found[name] = left
    return found


def _default(schema: dict[str, Any], root: Any, depth: int) -> Any:
    return _without_defaults(keys.as_read(schema["default"]), schema, root, depth + 1)


def _resolved(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Resolve a reference of a schema within its document (`#/$defs/Name`); without one, return the schema itself."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = root
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else schema


def schemas_of(tools: Sequence[Tool] | None) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}
