"""Which parsers a chat template asks for: it spells the tags that a model is to write."""

from __future__ import annotations

# In this order: some templates spell tags of another format, too. All tags of a line have to be there.
_CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>", "functions")),
    ("gemma4", ("<|tool_call>call:", '<|"|>')),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("glm", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen-coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "</tool_call>", "arguments")),
    ("llama3", ("<|start_header_id|>", '{"name": ', '"parameters": ')),
)
_REASONING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>analysis", "<|message|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("think", ("<think>", "</think>")),
)


def detect_calls(template: str) -> str:
    """The name of the call parser that this template asks for; `none` if it knows no tools."""
    return _first(_CALLS, template)


def detect_reasoning(template: str) -> str:
    """The name of the reasoning parser that this template asks for; `none` if it knows no thinking."""
    return _first(_REASONING, template)


def _first(rules: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    return next((name for name, tags in rules if all(tag in template for tag in tags)), "none")
