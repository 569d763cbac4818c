"""The parsers of sampled text by the names that options take, SGLang's own among them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import cast

from middleware_hub.chat.messages import Tool
from middleware_hub.parsers.base import CallParser, ReasoningParser
from middleware_hub.parsers.deepseek import DeepSeek
from middleware_hub.parsers.detection import detect_calls, detect_reasoning
from middleware_hub.parsers.gemma4 import Gemma4
from middleware_hub.parsers.glm import Glm
from middleware_hub.parsers.harmony import Harmony
from middleware_hub.parsers.hermes import Hermes
from middleware_hub.parsers.llama3 import Llama3
from middleware_hub.parsers.plain import Plain
from middleware_hub.parsers.qwen_coder import QwenCoder
from middleware_hub.parsers.reply import ReplyParser
from middleware_hub.parsers.think import Gemma4Think, Think
from router.errors import BadRequestError

__all__ = [
    "NAMES",
    "REASONING_NAMES",
    "call_parser",
    "create",
    "detect_calls",
    "detect_reasoning",
    "reasoning_parser",
]

NAMES: Mapping[str, type[CallParser]] = {
    "hermes": Hermes,
    "qwen-coder": QwenCoder,
    "llama3": Llama3,
    "glm": Glm,
    "deepseek": DeepSeek,
    "harmony": Harmony,
    "gemma4": Gemma4,
    "none": Plain,
    # SGLang's --tool-call-parser
    "qwen": Hermes,
    "qwen25": Hermes,
    "qwen3_coder": QwenCoder,
    "glm45": Glm,
    "glm47": Glm,
    "deepseekv3": DeepSeek,
    "deepseekv31": DeepSeek,
    "gpt-oss": Harmony,
}
"""Call parsers."""

REASONING_NAMES: Mapping[str, type[ReasoningParser] | None] = {
    "think": Think,
    "gemma4": Gemma4Think,
    "harmony": None,
    "none": None,
    # SGLang's --reasoning-parser
    "qwen3": Think,
    "qwen3-thinking": Think,
    "deepseek-r1": Think,
    "deepseek-v3": Think,
    "glm45": Think,
    "nemotron_3": Think,
    "gpt-oss": None,
}
"""Reasoning parsers. `harmony` is None here: its call parser finds both."""


def create(calls: str, reasoning: str, tools: Sequence[Tool] | None, *, starts_inside: bool) -> ReplyParser:
    """A parser for one sampled text.

    Args:
        calls: one of `NAMES`, or `pkg.mod:Class` of a `CallParser`.
        reasoning: one of `REASONING_NAMES`, or `pkg.mod:Class` of a `ReasoningParser`.
        tools: what the model was offered. Without any there are no calls.
        starts_inside: whether the prompt ends within a thought that it opened, see `ReasoningParser.is_open`.

    Raises:
        BadRequestError: there is no such parser.
    """
    thoughts = reasoning_parser(reasoning)
    if thoughts is None and reasoning in ("harmony", "gpt-oss") and NAMES.get(calls) is not Harmony:
        # Channels are to be told apart, though calls in them are not wanted.
        return ReplyParser(Harmony(()))
    parser = call_parser(calls)(tools or ())
    return ReplyParser(parser, None if thoughts is None else thoughts(starts_inside=starts_inside))


def call_parser(name: str) -> type[CallParser]:
    """The class of call parsers of this name. BadRequestError lists the names that there are."""
    if ":" in name:
        return cast("type[CallParser]", _load(name))
    try:
        return NAMES[name]
    except KeyError:
        raise BadRequestError(
            f"there is no tool call parser {name!r}: choose one of {', '.join(NAMES)}, or pkg.mod:Class"
        ) from None


def reasoning_parser(name: str) -> type[ReasoningParser] | None:
    """The class of reasoning parsers of this name; None for no such parser. BadRequestError lists the names."""
    if ":" in name:
        return cast("type[ReasoningParser]", _load(name))
    try:
        return REASONING_NAMES[name]
    except KeyError:
        raise BadRequestError(
            f"there is no reasoning parser {name!r}: choose one of {', '.join(REASONING_NAMES)}, or pkg.mod:Class"
        ) from None


def _load(path: str) -> type:
    """The class at `pkg.mod:Class`. BadRequestError tells which part of the path is wrong."""
    module_name, _, name = path.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise BadRequestError(f"the parser {path!r} is not of the form pkg.mod:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadRequestError(f"the parser {path}: cannot import {module_name}: {error}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise BadRequestError(f"the parser {path}: {module_name} has no class {name}")
    missing = [member for member in ("needs_special", "feed", "finish") if not hasattr(found, member)]
    if missing:
        raise BadRequestError(f"the parser {path}: it has no {', '.join(missing)}")
    return found
