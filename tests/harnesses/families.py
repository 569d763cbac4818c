"""Families of models, by the form in which they think, speak and call: how one writes a turn, and how its reply ends.

The vocabulary is one of thousands of entries, with the added tokens of the family: its template and its parser depend on which
of its marks are one token, and which of those are special.
"""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import AddedToken, Tokenizer

from tests.harnesses.plan import Call, Turn
from tests.support import templates
from tests.support.chat_models import markers_of
from tests.support.vocabularies import vocabulary


def odd(arguments: dict[str, Any]) -> str:
    """Return JSON with a model's white space, and an escape that no serializer writes."""
    text = json.dumps(arguments, separators=(" ,  ", ":"))
    return re.sub(r'":"(\w)', lambda found: f'":"\\u{ord(found[1]):04x}', text, count=1)


class Family(ABC):
    """How models of a family write; the prompt ends as its template ends it.

    Attributes:
        name: in ids of tests, and in the table.
        template: its name in the wheel of templates.
        ends: tokens that end a reply, beside the EOS.
        is_parallel: whether a reply can have several calls.
    """

    name: ClassVar[str]
    template: ClassVar[str]
    ends: ClassVar[tuple[str, ...]] = ()
    is_parallel: ClassVar[bool] = True

    @abstractmethod
    def call(self, name: str, arguments: dict[str, Any], *, is_odd: bool = False) -> Call:
        """Return a call as the template writes it, or if `is_odd` as a model also may."""

    @abstractmethod
    def broken(self, name: str) -> str:
        """Return a call of a tool that cannot be read as one."""

    @abstractmethod
    def reply(self, turn: Turn) -> str:
        """Return a turn as it is sampled. It ends with one of `ends`, or else with the EOS."""

    def tokenizer(self, folder: Path) -> Path:
        """Write the folder of a tokenizer with the family's tokens and template, and return it."""
        source, markers = vocabulary("qwen"), markers_of(self.template)
        made = Tokenizer.from_file(str(source / "tokenizer.json"))
        special = [one for one in (markers.bos, markers.eos, *markers.special) if one]
        made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
        made.add_tokens([AddedToken(one, special=False, normalized=False) for one in markers.plain])
        made.save(str(folder / "tokenizer.json"))
        shutil.copy(source / "tokenizer_config.json", folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config |= {"eos_token": markers.eos, "chat_template": templates.source(self.template)}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        ends = {"eos_token_id": [made.token_to_id(one) for one in (markers.eos, *self.ends)]}
        (folder / "generation_config.json").write_text(json.dumps(ends))
        return folder


class Qwen3(Family):
    """Thoughts in tags, calls as JSON in tags."""

    name = "qwen3"
    template = "qwen3"

    def call(self, name: str, arguments: dict[str, Any], *, is_odd: bool = False) -> Call:
        text = odd(arguments) if is_odd else json.dumps(arguments)
        return Call(name, text, f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>')

    def broken(self, name: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": \n</tool_call>'

    def reply(self, turn: Turn) -> str:
        parts = [turn.text, turn.broken, *(call.written for call in turn.calls)]
        return f"<think>\n{turn.thought}\n</think>\n\n" + "\n".join(part for part in parts if part)


class Qwen35(Family):
    """Arguments in tags, too. The prompt opens the thought. An odd call has no line for a value, and one without its end."""

    name = "qwen3.5"
    template = "qwen3_5_think"

    def call(self, name: str, arguments: dict[str, Any], *, is_odd: bool = False) -> Call:
        edge, close = ("", "") if is_odd else ("\n", "\n</parameter>\n")
        values = "".join(f"<parameter={key}>{edge}{plain(value)}{close}" for key, value in arguments.items())
        written = f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
        return Call(name, json.dumps(arguments), written)

    def broken(self, name: str) -> str:
        return f"<tool_call>\n<function={name}>\n<parameter=a\n</tool_call>"

    def reply(self, turn: Turn) -> str:
        calls = "\n".join(filter(None, [turn.broken, *(call.written for call in turn.calls)]))
        return f"{turn.thought}\n</think>\n\n" + "\n\n".join(part for part in (turn.text, calls) if part)


class Glm(Family):
    """Arguments in tags of their own; the mark of who speaks next ends a reply. An odd call is written without newlines."""

    name = "glm4.5"
    template = "glm4moe"
    ends = ("<|user|>", "<|observation|>")

    def call(self, name: str, arguments: dict[str, Any], *, is_odd: bool = False) -> Call:
        line = "" if is_odd else "\n"
        values = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{plain(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        return Call(name, json.dumps(arguments), f"<tool_call>{name}{line}{values}</tool_call>")

    def broken(self, name: str) -> str:
        return f"<tool_call>{name}\n<arg_key>a</tool_call>"

    def reply(self, turn: Turn) -> str:
        parts = [f"<think>{turn.thought}</think>", turn.text, turn.broken, *(call.written for call in turn.calls)]
        return "\n" + "\n".join(part for part in parts if part) + self.ends[bool(turn.calls)]


class GptOss(Family):
    """Messages in channels, of which a call is the last; an odd one names its tool behind the channel, in odd JSON."""

    name = "gpt-oss"
    template = "gptoss"
    ends = ("<|call|>",)
    is_parallel = False
    begin: ClassVar[str] = "<|start|>assistant"
    """Of each message; the prompt has the first one."""

    def call(self, name: str, arguments: dict[str, Any], *, is_odd: bool = False) -> Call:
        text = odd(arguments) if is_odd else json.dumps(arguments)
        to = f" to=functions.{name}"
        header = f"<|channel|>commentary{to} <|constrain|>json" if is_odd else f"{to}<|channel|>commentary json"
        return Call(name, text, f"{self.begin}{header}<|message|>{text}{self.ends[0]}")

    def broken(self, name: str) -> str:
        return f'{self.begin}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{"a": \n<|end|>'

    def reply(self, turn: Turn) -> str:
        end = "<|end|>" if turn.calls else ""
        channel = "commentary" if turn.calls else "final"
        thought = f"{self.begin}<|channel|>analysis<|message|>{turn.thought}<|end|>" if turn.thought else ""
        text = f"{self.begin}<|channel|>{channel}<|message|>{turn.text}{end}" if turn.text else ""
        messages = thought + text + turn.broken + "".join(call.written for call in turn.calls)
        return messages.removeprefix(self.begin)


FAMILIES: Sequence[Family] = (Qwen3(), Qwen35(), Glm(), GptOss())
"""The first one is that of all harnesses."""


def plain(value: Any) -> str:
    """Return a value as tags hold it: a string as it is, else its JSON."""
    return value if isinstance(value, str) else json.dumps(value)
