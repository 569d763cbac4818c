"""One `/generate` at a vLLM worker: a request for each prompt, and one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from router.engines.engine import EngineAnswer, EngineCall, EngineExchange, KnownWorker, UntranslatableError
from router.engines.events import DONE
from router.engines.form.reply import PLACES
from router.engines.json import JSON_ERRORS, is_null
from router.engines.vllm.images import was_missed
from router.engines.vllm.replies import (
    Body,
    Logprobs,
    VersionSpan,
    VllmChoice,
    VllmUsage,
    check_prompt,
    entries,
    finish,
    new_ids,
    printed_whole,
    read,
    versions,
)
from router.engines.vllm.requests import Asked, VllmPrompt

_NONE = Raw(b"null")
_NOTHING = VllmUsage()
_OK = 200
_OF_THE_REQUEST = frozenset({400, 500})
"""The statuses of a worker that cannot do what it is asked, and may with the files in place of names."""


class VllmGeneration:
    """The exchange for a body of `/generate`."""

    def __init__(
        self,
        asked: Asked,
        worker: KnownWorker,
        again: Callable[[bool], VllmGeneration],
        *,
        cumulative: bool,
        doubted: bool = False,
    ) -> None:
        """Make the exchange.

        Args:
            asked: the requests.
            worker: the worker that gets them.
            again: makes it anew, with what is known by then of the worker; whether `doubted` is its argument.
            cumulative: each event of a stream repeats all before it.
            doubted: the worker has failed at the same request with names in place of files, for a reason of its own.
        """
        self.calls: Sequence[EngineCall] = [prompt.call for prompt in asked.prompts]
        self.stream = asked.stream
        self._asked = asked
        self._worker = worker
        self._again = again
        self._doubted = doubted
        self._alone = frozenset[str]().union(*(prompt.alone for prompt in asked.prompts))
        self.over = False
        indexes = accumulate((len(one.rids) for one in asked.prompts[:-1]), initial=0)
        self._streams = [
            PromptStream(prompt, index if asked.listed else None, worker.version, cumulative=cumulative)
            for prompt, index in zip(asked.prompts, indexes, strict=True)
        ]

    def whole(self, answers: Sequence[EngineAnswer]) -> EngineAnswer | EngineExchange:
        """See `EngineExchange`. An error of the worker is passed on, unless it misses the bytes of a picture."""
        if len(answers) == 1 and answers[0].status != _OK:
            if self._alone and answers[0].status in _OF_THE_REQUEST:
                self._worker.images.forget(self._alone)
                return self._again(not was_missed(answers[0].body))
            return _error(answers[0])
        if self.stream:
            raise UntranslatableError("it is no stream, though one was asked for")
        replies = [
            reply
            for prompt, answer in zip(self._asked.prompts, answers, strict=True)
            for reply in self._replies(prompt, read(answer.body))
        ]
        for prompt in self._asked.prompts:
            self._answered(prompt)
        return EngineAnswer(_OK, msgspec.json.encode(replies if self._asked.listed else replies[0]))

    def event(self, number: int, data: bytes) -> bytes:
        """See `EngineExchange`. An error ends the stream: its other generations cannot be told apart from cut ones."""
        if self.over:
            return b""
        stream = self._streams[number]
        out = stream.event(data)
        if out and not stream.failed:
            self._answered(self._asked.prompts[number])
        self.over = stream.failed
        return out

    def _answered(self, prompt: VllmPrompt) -> None:
        """Remember that the worker knows the pictures of a prompt now."""
        if self._doubted or self._alone:
            self._worker.images.useful(yes=not self._doubted)
            self._doubted = False
        self._worker.images.note(prompt.images)

    def end(self) -> bytes:
        if not self.over and not all(stream.done for stream in self._streams):
            raise UntranslatableError("it ended before its [DONE]")
        return b"data: [DONE]\n\n"

    def _replies(self, prompt: VllmPrompt, body: Body) -> list[dict[str, Any]]:
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
                self._worker.version,
            )
            for choice in choices
        ]


class _ErrorFields(msgspec.Struct):
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def _error(answer: EngineAnswer) -> EngineAnswer:
    """Return a worker's error as SGLang would send it: an adapter that is not there is a bad request, not a missing page."""
    if answer.status != 404:
        return answer
    try:
        about = msgspec.json.decode(answer.body, type=_ErrorBody).error.param
    except JSON_ERRORS:
        return answer
    return EngineAnswer(400, answer.body.replace(b'"code":404', b'"code":400')) if about == "model" else answer


class _ReadIds(NamedTuple):
    """The ids of a prompt as the worker read them, raw; their number; and the places of pictures among them."""

    ids: Raw = _NONE
    number: int | None = None
    places: Sequence[tuple[int, int]] = ()


class _Sample:
    """One generation of a stream, as far as it has come. Lists and texts are kept as the inside of their JSON."""

    def __init__(self, rid: str, index: int | None, *, cumulative: bool) -> None:
        self.rid = rid
        self.index = index
        self.count = 0
        self.finished = False
        self._shown = False
        self._last: int | None = None
        self._cumulative = cumulative
        self._text = b""
        self._ids = b""
        self._lists: dict[str, bytes] = {}

    def take(self, choice: VllmChoice, prompt: VllmPrompt) -> None:
        """Add the new part. Raise UntranslatableError."""
        if self.finished:
            raise UntranslatableError(f"choice {choice.index} goes on after its end")
        ids = new_ids(choice)
        lists = entries(choice, prompt, ids) if prompt.logprobs else {}
        if not self._cumulative:
            self._text = self._ids = b""
            self._lists = {}
        self._text += msgspec.json.encode(choice.text)[1:-1]
        self._ids = _joined(self._ids, ids)
        for key, value in lists.items():
            self._lists[key] = _joined(self._lists.get(key, b""), value)
        self.count += len(ids)
        self._last = ids[-1] if ids else self._last
        self.finished = choice.finish_reason is not None

    def empty(self) -> None:
        """Drop the token that vLLM sampled although none was wanted."""
        self.count, self._last, self._text, self._ids = 0, None, b"", b""
        self._lists = dict.fromkeys(self._lists, b"")

    def event(
        self,
        choice: VllmChoice,
        prompt: VllmPrompt,
        read_ids: _ReadIds,
        more: dict[str, Any],
        usage: VllmUsage,
    ) -> bytes:
        """Return an event with the tokens so far. `more`: for `meta_info`."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finish(choice, self.count, self._last) if self.finished else None,
            "prompt_tokens": read_ids.number,
            **more,
            "num_retractions": 0,
        }
        if prompt.logprobs:
            meta["input_token_logprobs"] = []
            meta |= {key: Raw(b"[" + value + b"]") for key, value in self._lists.items()}
            meta["output_token_logprobs_length"] = self.count
        counted = usage.sampled(prompt, self.count)
        meta |= {"reasoning_tokens": 0, "completion_tokens": counted, "cached_tokens": usage.cached}
        pieces = [
            b'data: {"text":"',
            self._text,
            b'","output_ids":[',
            self._ids,
            b'],"meta_info":',
            msgspec.json.encode(meta),
        ]
        if prompt.shows_prompt and not (prompt.images and self._shown and not self.finished):
            self._shown = True
            pieces += (b',"prompt_token_ids":', bytes(read_ids.ids))
            if prompt.images:
                pieces.append(b',"%b":%b' % (PLACES.encode(), msgspec.json.encode(read_ids.places)))
        if self.index is not None:
            pieces.append(b',"index":%d' % self.index)
        return b"".join((*pieces, b"}\n\n"))


class PromptStream:
    """The stream of one prompt: as many generations as it has samples.

    Attributes:
        done: whether `[DONE]` has come.
        failed: whether an error has come, which ends it.
    """

    def __init__(
        self, prompt: VllmPrompt, first_index: int | None, known: Callable[[], str | None], *, cumulative: bool
    ) -> None:
        """`first_index`: of the first sample in the whole reply; None if there is only one. `known`: see `versions`."""
        self._prompt = prompt
        self._known = known
        self._samples = [
            _Sample(rid, None if first_index is None else first_index + number, cumulative=cumulative)
            for number, rid in enumerate(prompt.rids)
        ]
        self._read_ids = _ReadIds()
        self._held: VllmChoice | None = None
        self._usage: VllmUsage | None = None
        self.done = False
        self.failed = False

    def event(self, data: bytes) -> bytes:
        """Return the events for the payload of one of vLLM's. Raise UntranslatableError."""
        if self.done:
            raise UntranslatableError("an event came after [DONE]")
        if data == DONE:
            self.done = True
            return self._end()
        body = read(data)
        if not is_null(body.error):
            self.failed = True
            return b"data: %b\n\n" % data
        out = b""
        for choice in body.choices:
            out += self._choice(choice, body)
        if not body.choices and body.usage is not None:
            self._usage = body.usage
            out += self._release(body.usage)
            self._check(body.usage)
        return out

    def _choice(self, choice: VllmChoice, body: Body) -> bytes:
        if not 0 <= choice.index < len(self._samples):
            raise UntranslatableError(f"there is no choice {choice.index}")
        if is_null(self._read_ids.ids):
            told = body.prompt_token_ids if is_null(choice.prompt_token_ids) else choice.prompt_token_ids
            self._read_ids = _ReadIds(told, check_prompt(self._prompt, told), body.places)
        sample = self._samples[choice.index]
        sample.take(choice, self._prompt)
        if self._prompt.empty:
            sample.empty()
            choice.finish_reason = "length" if sample.finished else None
        if not sample.finished:
            return sample.event(choice, self._prompt, self._read_ids, self._versions(None, 0), _NOTHING)
        if len(self._samples) == 1:
            self._held = choice  # the count of cached tokens follows it directly
            return b""
        return self._last(choice, _NOTHING)

    def _last(self, choice: VllmChoice, usage: VllmUsage) -> bytes:
        sample = self._samples[choice.index]
        spans = None if self._prompt.empty else choice.weight_versions
        return sample.event(choice, self._prompt, self._read_ids, self._versions(spans, sample.count), usage)

    def _versions(self, spans: Sequence[VersionSpan] | None, count: int) -> dict[str, Any]:
        return versions(spans, count, self._known, can_be_told=self._prompt.can_be_told)

    def _check(self, usage: VllmUsage) -> None:
        """Raise UntranslatableError if samples of a prompt have lost tokens: it is unknown which of them have."""
        count = sum(sample.count for sample in self._samples)
        told = usage.completion_tokens
        if len(self._samples) > 1 and not self._prompt.empty and told not in (None, count):
            raise UntranslatableError(f"it counts {told} tokens, and {count} have come")

    def _release(self, usage: VllmUsage) -> bytes:
        choice, self._held = self._held, None
        return b"" if choice is None else self._last(choice, usage)

    def _end(self) -> bytes:
        out = self._release(_NOTHING)
        if self.failed:
            return out
        unfinished = [number for number, sample in enumerate(self._samples) if not sample.finished]
        if unfinished and (self._usage is None or any(self._samples[number].count for number in unfinished)):
            raise UntranslatableError(f"choices {unfinished} have no end")
        for number in unfinished:
            out += self._aborted(VllmChoice(number, "", [], Logprobs(token_logprobs=[]), "abort"), self._usage)
        return out

    def _aborted(self, choice: VllmChoice, usage: VllmUsage | None) -> bytes:
        """Return the event for a generation that `/v1/completions` leaves out: it was aborted before its first token."""
        if self._read_ids.number is None and usage is not None:
            self._read_ids = _ReadIds(number=usage.prompt_tokens)
        self._samples[choice.index].take(choice, self._prompt)
        return self._last(choice, _NOTHING)


def _joined(known: bytes, new: object) -> bytes:
    """Return the inside of a JSON list, extended by another list."""
    inner = msgspec.json.encode(new)[1:-1]
    return b"".join((known, b",", inner)) if known and inner else known or inner
