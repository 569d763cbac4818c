"""Variables for the chat template, from the fields that all dialects share."""

from __future__ import annotations

from typing import Any

from middleware_hub.dialects.fields import BOOLEAN, OBJECT, OBJECTS, Fields, Kind, check_depth, wrong
from router.errors import BadRequestError

_TAKEN = frozenset(
    "messages conversation tools chat_template tokenize add_generation_prompt continue_final_message "
    "return_tensors return_dict return_assistant_tokens_mask padding truncation max_length tokenizer_kwargs self".split()
)
"""Names that rendering uses itself. A client's own template would also run a client's program."""

_EFFORT: Kind[str | float] = Kind(str | float, "a string, or a number")
_SWITCHES = ("enable_thinking", "thinking")
"""The names in templates: Qwen, GLM and Nemotron have the first, DeepSeek and Kimi the second."""

_THINKING: Kind[bool | dict[str, Any]] = Kind(bool | dict[str, Any], "true or false, or an object with a `type`")


def read_variables(fields: Fields) -> dict[str, Any]:
    """Read `chat_template_kwargs`, and other fields meant for the template, which they override. Raises BadRequestError."""
    variables = read_kwargs(fields)
    enabled = fields.take("enable_thinking", BOOLEAN)
    if enabled is not None:
        switch_thinking(variables, enabled)
    effort = fields.take("reasoning_effort", _EFFORT)
    reasoning = fields.take("reasoning", OBJECT) or {}
    wanted = reasoning.get("effort", effort)
    if wanted is not None:
        if isinstance(wanted, bool) or not isinstance(wanted, str | int | float):
            raise wrong("reasoning.effort", wanted, _EFFORT.expected)
        variables.setdefault("reasoning_effort", wanted)
        switch_thinking(variables, wanted != "none")
    elif reasoning.get("enabled") is not None:
        switch_thinking(variables, reasoning["enabled"] is True)
    thinking = fields.take("thinking", _THINKING)
    if isinstance(thinking, bool):
        switch_thinking(variables, thinking)
    elif thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise wrong("thinking.type", kind, '"enabled", "disabled" or "adaptive"')
        switch_thinking(variables, kind != "disabled")
    documents = fields.take("documents", OBJECTS)
    if documents:
        check_depth("documents", documents)
        variables.setdefault("documents", documents)
    return variables


def read_kwargs(fields: Fields) -> dict[str, Any]:
    """Read `chat_template_kwargs`. Raises BadRequestError."""
    variables = fields.take("chat_template_kwargs", OBJECT) or {}
    for name in variables:
        if name in _TAKEN:
            raise BadRequestError(
                f"`chat_template_kwargs.{name}` cannot be set by a request", param=f"chat_template_kwargs.{name}"
            )
    check_depth("chat_template_kwargs", variables)
    return variables


def switch_thinking(variables: dict[str, Any], on: bool) -> None:
    """Set each of the names that templates use, unless the client has set that name itself."""
    for name in _SWITCHES:
        variables.setdefault(name, on)
