"""The tools that Anthropic defines and the client runs. A request gives their types only; models of others need their schemas.

The types end in dates, by which Anthropic's own models know them: `bash_20250124`. The fields are those of
https://docs.claude.com/en/docs/agents-and-tools/tool-use (bash tool, text editor tool, memory tool).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class ClientTool(NamedTuple):
    """A tool as a prompt shows it."""

    description: str
    parameters: dict[str, Any]


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to view, from 1; -1 is the end of the file.",
}
_EDITS = {
    "path": _text("The path of a file or a directory."),
    "file_text": _text("For `create`: the content of the new file."),
    "old_str": _text("For `str_replace`: the text to replace, which must be there exactly once."),
    "new_str": _text("For `str_replace`: the text in its place."),
    "insert_line": {
        "type": "integer",
        "description": "For `insert`: the line behind which to insert; 0 is the beginning.",
    },
    "insert_text": _text("For `insert`: the text to insert."),
    "view_range": _RANGE,
}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


CLIENT_TOOLS = {
    "bash": ClientTool(
        "Runs a command in a shell that stays open between calls.",
        {
            "type": "object",
            "properties": {
                "command": _text("The command to run; required unless `restart` is true."),
                "restart": {"type": "boolean", "description": "Whether to start the shell again."},
            },
        },
    ),
    "text_editor": ClientTool(
        "Views, creates and edits files.",
        {
            "type": "object",
            "properties": {"command": _commands("view", "create", "str_replace", "insert", "undo_edit"), **_EDITS},
            "required": ["command", "path"],
        },
    ),
    "memory": ClientTool(
        "Views and edits the files of a memory that outlives the conversation.",
        {
            "type": "object",
            "properties": {
                "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
                **_EDITS,
                "old_path": _text("For `rename`: the path before."),
                "new_path": _text("For `rename`: the path behind."),
            },
            "required": ["command"],
        },
    ),
}
"""By their types without the date."""
