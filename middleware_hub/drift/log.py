"""The log of a loop: one reply in each line, as text and as the ids that were sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from router.engines.json import JSON_ERRORS
from router.errors import BadRequestError

MAX_ID: Final = 2**31 - 1


@dataclass(frozen=True)
class LoggedReply:
    """One reply.

    Attributes:
        line: its number in the file, from 1.
        conversation: the name of its conversation in the log; empty without one.
        prompt: the text that was sent. Empty if ids were sent.
        text: the reply's.
        ids: the sampled ids.
    """

    line: int
    conversation: str
    prompt: str
    text: str
    ids: list[int]

    @property
    def whole(self) -> str:
        return self.prompt + self.text


def read_log(lines: Iterable[bytes]) -> Iterator[LoggedReply]:
    """Read lines of JSON. Raises BadRequestError with the number of a line that is not JSON, or that lacks a field."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _reply(number, msgspec.json.decode(line))
        except (*JSON_ERRORS, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadRequestError(
                f"line {number}: {error!r}. A line is {{'prompt': text, 'text': the reply, 'output_ids': [ids]}}, or a body "
                "and an answer of /generate: {'request': {'text': ...}, 'response': {'text': ..., 'output_ids': [...]}}"
            ) from error


def _reply(number: int, fields: dict[str, Any]) -> LoggedReply:
    answer = fields.get("response", fields)
    prompt = fields["request"].get("text", "") if "request" in fields else fields.get("prompt", "")
    meta = answer.get("meta_info") or {}
    ids = answer.get("output_ids")
    if ids is None:
        ids = [pair[1] for pair in meta["output_token_logprobs"]]
    if not isinstance(prompt, str) or not isinstance(answer["text"], str):
        raise TypeError("`prompt` and `text` are one text each: write a line for each reply of a batch")
    if not all(type(one) is int and 0 <= one <= MAX_ID for one in ids):
        raise TypeError(f"`output_ids` are numbers from 0 to {MAX_ID}")
    return LoggedReply(number, str(fields.get("conversation", "")), prompt, answer["text"], ids)
