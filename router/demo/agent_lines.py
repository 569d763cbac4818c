"""What the agents' model is told to say: tool calls word for word, of answers the first words.

The shipped language model looks back three tokens. It writes sentences of a sort, but nobody can rely on it for a tool call.
So each request tells it what to begin with, as `custom_params` that only the embedded engine understands. It scores what it
was told to say (the logprobs are its own), and where a line is `free` it goes on by itself until it ends the turn.

A line is spelled as the model itself spells: here and there a token is taken apart, and the ids are not those that encoding
the text would give.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from router.embedded.models.ngram import respell, spellings

TEMPERATURE = 0.7
MAX_TOKENS = 160


@dataclass(frozen=True)
class Line:
    """The beginning of a turn, or all of it.

    Attributes:
        text: what it is told to say.
        seed: of how that is spelled, and of what is drawn behind it.
        free: whether anything is drawn behind it.
    """

    text: str
    seed: int
    free: bool = False


def tool_call(name: str, **arguments: str) -> str:
    """A call as the shipped chat template spells it, in the manner of Hermes."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


class Prompter:
    """Makes the fields of a request out of a line. Knows the shipped tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ways = spellings(tokenizer)

    def ids(self, line: Line) -> list[int]:
        """The line as the model is to spell it."""
        encoded = self._tokenizer.encode(line.text, add_special_tokens=False).ids
        return respell(encoded, self._ways, random.Random(line.seed))

    def told(self, line: Line) -> int:
        """How many tokens that is. The end of a turn counts where it is told, too."""
        return len(self.ids(line)) + (not line.free)

    def fields(self, line: Line) -> dict[str, Any]:
        """For `extra_body`, in either dialect."""
        script = {"ids": self.ids(line), "finish": None if line.free else "eos"}
        return {"seed": line.seed, "temperature": TEMPERATURE, "custom_params": {"script": script}}
