"""Forms of POST /generate: a row of words names one, and here is its request, how a worker is made to end it so, and its view.

A client's view of an answer is kept as bytes, but for what is another one each time: the id of a generation that the
client gave none, and the moment of sending.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.client import Answer
from worker.engine.script import Fault
from worker.options import StreamStyle

Json = dict[str, Any]
Prompt = str | list[int]

NAME = "a form"
BATCHES = ("one", "list", "list-n")
TRIMS: dict[str, Json] = {
    "trimmed": {},
    "untrimmed": {"no_stop_trim": True},
    "special": {"skip_special_tokens": False},
    "verbatim": {"no_stop_trim": True, "skip_special_tokens": False},
}
FAULTS: dict[str, Fault] = {"busy": "abort_503", "error": "error_event", "undone": "no_done"}

_OPTIONS: Json = {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 7]}
_LOGPROBS: dict[str, Json] = {
    "none": {},
    "unasked": {**_OPTIONS, "return_text_in_logprobs": True},
    "asked": {"return_logprob": True},
    "start": {"return_logprob": True, "logprob_start_len": 2},
    "top": {"return_logprob": True, "top_logprobs_num": 2},
    "chosen": {"return_logprob": True, "token_ids_logprob": [5, 7]},
    "texts": {"return_logprob": True, "return_text_in_logprobs": True},
    "all": {"return_logprob": True, **_OPTIONS, "return_text_in_logprobs": True},
    "some": {"return_logprob": [True, False], "top_logprobs_num": [2, 1], "logprob_start_len": [0, 1]},
}


@dataclass(frozen=True)
class Form:
    """One row.

    Attributes:
        shape: `single`; `one` (a list of one); `list`; `n` (one prompt, several samples); `list-n` (both).
        prompt: `text` or `ids`.
        delivery: `plain`, or the style of the stream.
        logprobs: what of them the client asks for; `unasked`: only options without `return_logprob`; `some`: of the first
            prompt only.
        end: `eos`, `stop_id`, `stop`, `regex`, `length`; `update` (new weights in the middle, then EOS); `aborted` while
            running; `queued` (aborted in the queue); `busy` (503, in a stream an abort with that status code); `error` (an
            error event); `undone` (a stream without [DONE]).
        trim: `no_stop_trim` and `skip_special_tokens`, see `TRIMS`.
        rid: `unnamed`; `named` by the client; `stem` (one string for a batch).
        params: `shared` by all prompts of a batch, or a list of them, one for `each`.
        pace: tokens per event of a stream.
        vocabulary: of the embedded engine.
    """

    shape: str
    prompt: str
    delivery: str
    logprobs: str
    end: str
    trim: str
    rid: str
    params: str
    pace: str
    vocabulary: str

    def __str__(self) -> str:
        return "-".join(vars(self).values())

    @property
    def batch(self) -> bool:
        return self.shape in BATCHES

    @property
    def prompts(self) -> int:
        return 2 if self.shape in ("list", "list-n") else 1

    @property
    def samples(self) -> int:
        """Per prompt."""
        return 2 if self.shape in ("n", "list-n") else 1

    @property
    def replies(self) -> int:
        return self.prompts * self.samples

    @property
    def listed(self) -> bool:
        return self.batch or self.samples > 1

    @property
    def streams(self) -> bool:
        return self.delivery != "plain"

    @property
    def style(self) -> StreamStyle:
        found: dict[str, StreamStyle] = {"incremental": "incremental", "mixed": "mixed"}
        return found.get(self.delivery, "cumulative")

    def rids(self, name: str = NAME) -> list[str]:
        """The names that the client knows beforehand, one for each prompt; with several samples they are lost."""
        if self.samples > 1 or self.rid == "unnamed":
            return []
        return [f"{name}_{number}" for number in range(self.prompts)] if self.batch else [name]

    @property
    def complete(self) -> bool:
        """Whether the client gets all that was sampled."""
        return self.end not in FAULTS

    def wants_logprobs(self, reply: int) -> bool:
        if self.logprobs == "some":
            return reply // self.samples == 0
        return self.logprobs not in ("none", "unasked")

    def sent(self, body: Json, input_ids: Sequence[list[int]], *, forced: bool) -> Json:
        """What a worker gets of a request, but for its name: ids for the text, and no options that nobody asked for."""
        options = ("rid", "text", *(_LOGPROBS["unasked"] if forced and self.logprobs == "unasked" else ()))
        sent = {key: value for key, value in body.items() if key not in options}
        sent["input_ids"] = list(input_ids) if self.batch else input_ids[0]
        return {**sent, "return_logprob": True} if forced else sent

    def body(self, prompts: Sequence[Prompt], params: Json, name: str = NAME) -> Json:
        """The request."""
        body: Json = {"text" if self.prompt == "text" else "input_ids": list(prompts) if self.batch else prompts[0]}
        params = {**params, **TRIMS[self.trim]}
        if self.samples > 1:
            params["n"] = self.samples
        if self.pace != "1":
            params["stream_interval"] = int(self.pace)
        body["sampling_params"] = [params] * self.prompts if self.params == "each" else params
        if self.rid != "unnamed":
            # One string for a batch is a stem: SGLang makes the same names of it.
            named = [f"{name}_{number}" for number in range(self.prompts)]
            body["rid"] = named if self.batch and self.rid == "named" else name
        if self.streams:
            body["stream"] = True
        options = _LOGPROBS[self.logprobs]
        if self.logprobs == "some":
            options = {key: values[: self.prompts] for key, values in options.items()}
        return {**body, **options}


def table(rows: str) -> list[Form]:
    """Forms, a line each."""
    return [Form(*line.split()) for line in rows.strip().splitlines()]


_MOMENT = re.compile(rb'("response_sent_to_client_ts":)[0-9.e+]+')
_ID = re.compile(rb'("id":")[0-9a-f]{32}"')


@dataclass(frozen=True)
class View:
    """What a client sees of an answer.

    Attributes:
        parts: the replies to a request, or for each of them its events, as they came.
        rest: events that belong to none of them: an error, `[DONE]`.
    """

    status: int
    content_type: str
    parts: dict[int, list[bytes]]
    rest: list[bytes]

    @property
    def comparable(self) -> tuple[Any, ...]:
        """All of it, but for what is random by nature."""
        parts = {number: [_masked(part) for part in found] for number, found in self.parts.items()}
        return self.status, self.content_type, parts, self.rest


def _masked(part: bytes) -> bytes:
    return _MOMENT.sub(rb"\1now", _ID.sub(rb'\1an id"', part))


def view(answer: Answer) -> View:
    """The view of an answer; of a stream without its order among the samples."""
    parts: dict[int, list[bytes]] = {}
    rest: list[bytes] = []
    content_type = answer.headers["content-type"]
    if not content_type.startswith("text/event-stream"):
        return View(answer.status, content_type, {0: [answer.content]}, [])
    for event in answer.content.split(b"\n\n"):
        payload = event.removeprefix(b"data: ")
        if payload.startswith(b'{"text"'):
            parts.setdefault(json.loads(payload).get("index", 0), []).append(payload)
        elif event:
            rest.append(event)
    return View(answer.status, content_type, dict(sorted(parts.items())), rest)


def replies(form: Form, seen: View) -> dict[int, Json]:
    """The last state of each reply, by its number: a stream's events put together."""
    if seen.status != 200:
        return {}
    if not form.streams:
        found = json.loads(seen.parts[0][0])
        return dict(enumerate(found if form.listed else [found]))
    return {
        number: last_state(form.style, [json.loads(event) for event in events]) for number, events in seen.parts.items()
    }


def last_state(style: StreamStyle, events: Sequence[Json]) -> Json:
    """The events of one sample as one reply."""
    whole = {**events[-1], "meta_info": dict(events[-1]["meta_info"])}
    if style == "cumulative":
        return whole
    whole["output_ids"] = [token for event in events for token in event["output_ids"]]
    if style == "incremental":
        whole["text"] = "".join(event["text"] for event in events)
        for key in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            if key in whole["meta_info"]:
                whole["meta_info"][key] = [entry for event in events for entry in event["meta_info"][key]]
    return whole
