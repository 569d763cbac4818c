"""`tool_choice: required`, or the name of a tool: a grammar for the worker that allows nothing but calls.

Where the prompt ends inside reasoning, this grammar, like any that a client gives, holds behind the reasoning.

It is a structural tag as XGrammar reads it (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html), which SGLang takes as
`sampling_params.structural_tag`. The worker must have a grammar backend, as it has by default.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from middleware_hub.chat.messages import Tool
from middleware_hub.parsers.formats.glm import Glm
from middleware_hub.parsers.formats.hermes import Hermes
from middleware_hub.parsers.formats.qwen_coder import QwenCoder
from router.engines.json import JSON_ERRORS, decode_any
from router.errors import BadRequestError


class _Form(NamedTuple):
    """How a family of models writes a call.

    Attributes:
        begin: everything before the name of the tool.
        named: what stands between the name and the arguments.
        end: everything behind the arguments.
        style: how the arguments are written: `style` of XGrammar's `json_schema`. `json` has the name as JSON, too.
        gap: what the model writes between its reasoning and a call.
    """

    begin: str
    named: str
    end: str
    style: str = "json"
    gap: str = ""

    def tag(self, function: dict[str, Any]) -> dict[str, Any]:
        """Return the grammar of a call of one tool."""
        name, content = function["name"], {"type": "json_schema", "json_schema": function.get("parameters") or _ANY}
        if self.style == "json":
            name = json.dumps(name, ensure_ascii=False)
        else:
            content["style"] = self.style
        return {"type": "tag", "begin": f"{self.begin}{name}{self.named}", "content": content, "end": self.end}


_ANY = {"type": "object"}
_REASONING = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
XGRAMMAR_FIELDS = {"json_schema": "json_schema", "regex": "pattern", "ebnf": "grammar"}
"""The parameters that are a grammar, and where XGrammar has them: in a format of the type `grammar` for `ebnf`."""
_FORMS = {
    Hermes.names: _Form('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"),
    QwenCoder.names: _Form("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "qwen_xml", "\n\n"),
    Glm.names: _Form("<tool_call>", "", "</tool_call>", "glm_xml", "\n"),
}
"""By the names of the parser. XGrammar allows white space around the arguments of `qwen_xml` and `glm_xml`."""


def structural_tag(
    parser: str, tools: Sequence[Tool], choice: str, allowed: Sequence[str] = (), *, parallel: bool, reasoning: bool
) -> str:
    """Return the JSON text of the grammar.

    Args:
        parser: the name of the parser that will read the calls.
        tools: all tools of the request.
        choice: `required`, the name of one of them, or `auto` if some of them are not allowed.
        allowed: the names of the tools that may be called; empty for all of them.
        parallel: whether several calls are allowed.
        reasoning: whether the prompt ends inside reasoning, which is then completed first.

    Raises:
        BadRequestError: calls of this form cannot be forced.
    """
    form = next((form for names, form in _FORMS.items() if parser in names), None)
    if form is None:
        raise BadRequestError(
            f'`tool_choice` {choice!r} cannot be enforced with the tool call parser {parser!r}: use "auto" and say in'
            " the prompt that a tool has to be called",
            param="tool_choice",
            code="unsupported_tool_choice",
        )
    named = [
        tool["function"]
        for tool in tools
        if choice in ("auto", "required", tool["function"]["name"])
        and (not allowed or tool["function"]["name"] in allowed)
    ]
    if choice == "auto":  # text, and behind it calls of these tools
        free = {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [form.tag(function) for function in named],
        }
        return json.dumps({"type": "structural_tag", "format": {**free, "stop_after_first": False}}, ensure_ascii=False)
    calls: dict[str, Any] = {
        "type": "tags_with_separator",  # `triggered_tags` would allow any text after the first call
        "tags": [form.tag(function) for function in named],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    if reasoning:
        gap = [{"type": "const_string", "value": form.gap}] if form.gap else []
        calls = {"type": "sequence", "elements": [_REASONING, *gap, calls]}
    return json.dumps({"type": "structural_tag", "format": calls}, ensure_ascii=False)


def after_reasoning(name: str, grammar: Any) -> str | None:
    """Return the JSON text of a grammar that first lets the model end its reasoning.

    None for what is no grammar of this kind: the worker says so, or reads it in its own way (SGLang's `$$ANY$$`).

    Args:
        name: one of `XGRAMMAR_FIELDS`.
        grammar: its value.
    """
    if not isinstance(grammar, str):
        return None
    content: Any = grammar
    if name == "json_schema":
        try:
            content = decode_any(grammar)
        except JSON_ERRORS:
            return None
    then = {"type": "grammar" if name == "ebnf" else name, XGRAMMAR_FIELDS[name]: content}
    form = {"type": "sequence", "elements": [_REASONING, then]}
    return msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
