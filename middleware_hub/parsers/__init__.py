"""The parsers of sampled text by the names that options take, SGLang's and vLLM's own among them.

docs/development.md says how to add one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import cast

from middleware_hub.chat.messages import Tool
from middleware_hub.parsers.base import CallParser, CallParsing, Plain, ReasoningParser
from middleware_hub.parsers.formats.deepseek import DeepSeek
from middleware_hub.parsers.formats.deepseek_v32 import DeepSeekV32
from middleware_hub.parsers.formats.gemma4 import Gemma4
from middleware_hub.parsers.formats.glm import Glm
from middleware_hub.parsers.formats.harmony import Harmony
from middleware_hub.parsers.formats.hermes import Hermes
from middleware_hub.parsers.formats.kimi_k2 import KimiK2
from middleware_hub.parsers.formats.llama3 import Llama3
from middleware_hub.parsers.formats.minimax_m2 import MiniMaxM2
from middleware_hub.parsers.formats.mistral import Mistral
from middleware_hub.parsers.formats.pythonic import Lfm2, Pythonic
from middleware_hub.parsers.formats.qwen_coder import QwenCoder, SeedOss
from middleware_hub.parsers.grammar import GrammarParser
from middleware_hub.parsers.reply import ReplyParser
from middleware_hub.parsers.think import Gemma4Think, MistralThink, SeedThink, Think
from router.errors import BadRequestError

# In the order of detection: a template gets the first parser all of whose tags it spells, and some templates also spell tags of
# another format. Errors list the most common one first.
_CALL_PARSERS: tuple[type[GrammarParser] | type[Plain], ...] = (
    *(Harmony, Gemma4, DeepSeekV32, DeepSeek, KimiK2, MiniMaxM2, Mistral, SeedOss),
    *(Glm, QwenCoder, Hermes, Lfm2, Pythonic, Llama3, Plain),
)
_REASONING_PARSERS: tuple[type[Think], ...] = (Gemma4Think, MistralThink, SeedThink, Think)
_HARMONY = ("harmony", "gpt-oss", "openai_gptoss")
_CHANNELS = ("<|channel|>analysis", "<|message|>")
"""Tags of `harmony`, whose reasoning its call parser finds."""

NAMES: Mapping[str, type[CallParser]] = {
    **dict.fromkeys(Hermes.names, Hermes),
    **{name: parser for parser in _CALL_PARSERS for name in parser.names},
}

REASONING_NAMES: Mapping[str, type[ReasoningParser] | None] = {
    **dict.fromkeys(Think.names, Think),
    **{name: parser for parser in _REASONING_PARSERS for name in parser.names},
    **dict.fromkeys((*_HARMONY, "none")),
}
"""Reasoning parsers. `harmony` is None: its call parser finds both."""


def create(
    calls: str, reasoning: str, tools: Sequence[Tool] | None, *, starts_inside: bool
) -> CallParser | ReplyParser:
    """Return a parser for one sampled text.

    Args:
        calls: one of `NAMES`, or `pkg.mod:Class` of a `CallParser`.
        reasoning: one of `REASONING_NAMES`, or `pkg.mod:Class` of a `ReasoningParser`.
        tools: the tools that the model was offered. Without any there are no calls.
        starts_inside: whether the prompt ends inside reasoning that it opened, see `ReasoningParser.is_open`.

    Raises:
        BadRequestError: there is no such parser.
    """
    found, reasons = calls_beside(calls, reasoning), reasoning_parser(reasoning)
    if reasons is None:
        return found.of(tools)
    return ReplyParser(lambda: found.of(tools), reasons(starts_inside=starts_inside))


def calls_beside(calls: str, reasoning: str) -> CallParsing:
    """Return how calls are parsed next to a reasoning parser. Raises BadRequestError, see `create`."""
    if reasoning in _HARMONY and NAMES.get(calls) is not Harmony:
        # Channels have to be separated, although calls in them are not wanted.
        return CallParsing(Harmony, finds=False)
    return CallParsing(call_parser(calls), finds=True)


def call_parser(name: str) -> type[CallParser]:
    """Return the class of call parsers of this name. Raises BadRequestError with the known names."""
    if ":" in name:
        return cast("type[CallParser]", _load(name))
    if name not in NAMES:
        raise BadRequestError(
            f"there is no tool call parser {name!r}: choose one of {', '.join(NAMES)}, or pkg.mod:Class"
        )
    return NAMES[name]


def reasoning_parser(name: str) -> type[ReasoningParser] | None:
    """Return the class of reasoning parsers of this name, None for `none`. Raises BadRequestError with the known names."""
    if ":" in name:
        return cast("type[ReasoningParser]", _load(name))
    if name not in REASONING_NAMES:
        raise BadRequestError(
            f"there is no reasoning parser {name!r}: choose one of {', '.join(REASONING_NAMES)}, or pkg.mod:Class"
        )
    return REASONING_NAMES[name]


def detect_calls(template: str) -> str:
    """Return the name of the call parser for models of this template; `none` if it knows no tools."""
    return next(parser.names[0] for parser in _CALL_PARSERS if all(tag in template for tag in parser.template_tags))


def detect_reasoning(template: str) -> str:
    """Return the name of the reasoning parser for models of this template; `none` if it knows no reasoning."""
    if all(tag in template for tag in _CHANNELS):
        return "harmony"
    found = (one.names[0] for one in _REASONING_PARSERS if all(tag in template for tag in one.template_tags))
    return next(found, "none")


def _load(path: str) -> type:
    """Return the class at `pkg.mod:Class`. Raises BadRequestError with the part of the path that is wrong."""
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
