"""The scripted part of the agents' replies: tool calls word for word, and the first words of answers.

The shipped language model looks back three tokens, and cannot write a tool call. So each request scripts how its reply
begins, in `custom_params` of the embedded engine; the logprobs are the model's own. A line is spelled as the model spells: here
and there a token is split.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from worker.models.ngram import respell, spellings


@dataclass(frozen=True)
class Line:
    """The beginning of a turn. After one that is `free` the model goes on by itself."""

    text: str
    seed: int  # for spelling and for sampling
    free: bool = False


def tool_call(name: str, **arguments: str) -> str:
    """Return a call as the shipped chat template spells it, in the manner of Hermes."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


class Prompter:
    """Turns lines into fields of a request, with the shipped tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ways = spellings(tokenizer)

    def ids(self, line: Line) -> list[int]:
        encoded = self._tokenizer.encode(line.text, add_special_tokens=False).ids
        return respell(encoded, self._ways, random.Random(line.seed))

    def fields(self, line: Line) -> tuple[dict[str, Any], int]:
        """Return the fields for `extra_body`, in either dialect, and how many tokens are scripted, with a scripted end."""
        ids = self.ids(line)
        script = {"ids": ids, "finish": None if line.free else "eos"}
        fields = {"seed": line.seed, "temperature": 0.7, "custom_params": {"script": script}}
        return fields, len(ids) + (not line.free)
