"""One `/generate` at a vLLM worker: a request for each prompt, and one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from router.engines.engine import Answer, Call, UntranslatableError
from router.engines.json import JSON_ERRORS, is_null
from router.engines.vllm.prompts import Asked, Prompt
from router.engines.vllm.replies import Body, printed_whole, read
from router.engines.vllm.streams import PromptStream

_OK = 200


class Generation:
    """The exchange for a body of `/generate`."""

    def __init__(self, asked: Asked, known: Callable[[], str | None], *, cumulative: bool) -> None:
        """`known`: the version that the router knows. `cumulative`: each event of a stream repeats all before it."""
        self.calls: Sequence[Call] = [prompt.call for prompt in asked.prompts]
        self.stream = asked.stream
        self._asked = asked
        self._known = known
        self.over = False
        indexes = accumulate((len(one.rids) for one in asked.prompts[:-1]), initial=0)
        self._streams = [
            PromptStream(prompt, index if asked.listed else None, known, cumulative=cumulative)
            for prompt, index in zip(asked.prompts, indexes, strict=True)
        ]

    def whole(self, answers: Sequence[Answer]) -> Answer:
        """See `Exchange`. An error of the worker is passed on."""
        if len(answers) == 1 and answers[0].status != _OK:
            return _error(answers[0])
        if self.stream:
            raise UntranslatableError("it is no stream, though one was asked for")
        replies = [
            reply
            for prompt, answer in zip(self._asked.prompts, answers, strict=True)
            for reply in self._replies(prompt, read(answer.body))
        ]
        return Answer(_OK, msgspec.json.encode(replies if self._asked.listed else replies[0]))

    def event(self, number: int, data: bytes) -> bytes:
        """See `Exchange`. An error ends the stream: its other generations cannot be told apart from cut ones."""
        if self.over:
            return b""
        stream = self._streams[number]
        out = stream.event(data)
        self.over = stream.failed
        return out

    def end(self) -> bytes:
        if not self.over and not all(stream.done for stream in self._streams):
            raise UntranslatableError("it ended before its [DONE]")
        return b"data: [DONE]\n\n"

    def _replies(self, prompt: Prompt, body: Body) -> list[dict[str, Any]]:
        if not is_null(body.error):
            raise UntranslatableError(
                f"it is an error with status 200: {bytes(body.error)[:200].decode(errors='replace')}"
            )
        choices = sorted(body.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(prompt.rids))):
            raise UntranslatableError(
                f"its choices are {[choice.index for choice in choices]}, and {len(prompt.rids)} were asked for"
            )
        above = body.prompt_token_ids
        return [
            printed_whole(
                choice,
                prompt,
                body,
                above if is_null(choice.prompt_token_ids) else choice.prompt_token_ids,
                self._known,
            )
            for choice in choices
        ]


class _ErrorFields(msgspec.Struct):
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def _error(answer: Answer) -> Answer:
    """Return a worker's error as SGLang would send it: an adapter that is not there is a bad request, not a missing page."""
    if answer.status != 404:
        return answer
    try:
        about = msgspec.json.decode(answer.body, type=_ErrorBody).error.param
    except JSON_ERRORS:
        return answer
    return Answer(400, answer.body.replace(b'"code":404', b'"code":400')) if about == "model" else answer
