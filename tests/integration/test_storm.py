"""A hundred conversations at once, or five hundred, while workers abort, pause, change weights and die, and clients leave.

`TITO_EXAMPLES=1` makes it five hundred, under another seed each time.

Nothing here is waited for by the clock: whoever has finished a turn may be the one who does the next bad thing. The order
in which threads get there is not the same in each run; what must hold afterwards is.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from router.config import AbortConfig, BreakerConfig, HealthConfig
from tests.conftest import MORE
from tests.support.asking import Asking, assert_kept, counted, outcomes, said_once, settle, until
from tests.support.client import call
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary
from worker.engine.records import GenerationRecord
from worker.options import StreamStyle
from worker.vocabulary import load_vocabulary
from worker.worker import EmbeddedWorker

CONVERSATIONS = 500 if MORE else 100
TURNS = 8 * (MORE or 1)
SHARE_OF_TROUBLE = 0.35
SHORT = {"text": "After it", "sampling_params": {"max_new_tokens": 2}}
BROKEN = (OSError, http.client.HTTPException)


@dataclass(frozen=True)
class Got:
    """A reply that a client got whole."""

    prompt: str
    text: str
    ids: list[int]
    logprobs: list[float]
    request_id: str
    finish: str


@dataclass
class Storm:
    """What all of them share."""

    served: Stack
    space: str
    random: random.Random
    lock: threading.Lock = field(default_factory=threading.Lock)
    training: threading.Lock = field(default_factory=threading.Lock)
    """One pauses at a time. If another call ended the pause, an update would wait for all that runs on a worker, which is never
    done on a slow machine, or paused by a third call, whose own update waits for the first."""
    got: list[Got] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    extra_samples: int = 0
    version: int = 0
    down: EmbeddedWorker | None = None
    calls: list[set[EmbeddedWorker]] = field(default_factory=list)
    """For each call to the fleet in flight, the workers that have been down since it began."""

    def draw(self) -> random.Random:
        """Chance for one conversation, drawn in its order."""
        with self.lock:
            return random.Random(self.random.random())

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """A call to the fleet is in flight: of the workers, at least one stays up until it is answered."""
        with self.lock:
            died = {self.down} if self.down is not None else set()
            self.calls.append(died)
        try:
            yield
        finally:
            with self.lock:
                self.calls = [call for call in self.calls if call is not died]

    def take_down(self, worker: EmbeddedWorker) -> bool:
        """Mark a worker as down, unless another one is, or a call in flight would be left without any worker."""
        with self.lock:
            fleet = {*self.served.workers, *self.served.prefills}
            if self.down is not None or any(call | {worker} == fleet for call in self.calls):
                return False
            self.down = worker
            for call in self.calls:
                call.add(worker)
            return True

    def note(self, what: str) -> None:
        with self.lock:
            self.did[what] += 1


def a_conversation(storm: Storm, number: int) -> None:
    """Some turns, each on top of all that came before; what went wrong is asked again."""
    chance = storm.draw()
    text, last = f"Conversation {number}: ", None
    for turn in range(TURNS):
        reply = a_turn(storm, chance, text)
        if reply is not None and reply.ids:
            text, last = text + reply.text, reply
            if reply.finish == "stop" or chance.random() < 0.5:
                text += f"\nObservation {turn}. "
        if chance.random() < SHARE_OF_TROUBLE:
            trouble(storm, chance)
    if last is not None:
        found = storm.served.retrieve(last.prompt + last.text, namespace=storm.space, request_id=last.request_id)
        assert found["exact"], (last, found["reasons"])


def a_turn(storm: Storm, chance: random.Random, text: str) -> Got | None:
    """One request of some kind, and the reply of it that goes on the conversation, if one came whole."""
    params: dict[str, Any] = {"max_new_tokens": chance.randint(1, 12)}
    body: dict[str, Any] = {"text": text, "sampling_params": params, "return_logprob": True}
    kind = chance.choices(("whole", "stream", "batch", "samples"), (4, 4, 1, 1))[0]
    leaves = chance.random() < 0.12
    if kind == "batch":
        body["text"] = [text, f"Aside {chance.random()}: "]
    elif kind == "samples":
        params["n"], leaves = 2, False
        with storm.lock:
            storm.extra_samples += 1
    elif chance.random() < 0.5:
        body["rid"] = f"{chance.getrandbits(128):032x}"
    body["stream"] = kind == "stream"
    headers = {"x-radix-namespace": storm.space, "x-abort-policy": chance.choice(("retry", "retry", "return"))}
    asking = Asking(storm.served.url, body, headers=headers)
    try:
        found = streamed(storm, asking, text, chance.randint(1, 6) if leaves else None) if kind == "stream" else None
        if kind != "stream":
            if leaves:
                storm.note("left")
                return None
            found = whole(asking, body["text"])
    except BROKEN as error:
        storm.note(f"broken: {type(error).__name__}")
        return None
    finally:
        asking.leave(rudely=chance.random() < 0.5)
    if not found:
        storm.note("no reply")
        return None
    if "rid" in body:
        assert found[0].request_id == body["rid"]
    with storm.lock:
        storm.got += found
    storm.note(f"{kind}, {found[0].finish}")
    return found[0]


def whole(asking: Asking, text: str | list[str]) -> list[Got]:
    """A reply in one piece."""
    answer = asking.answer()
    if answer.status != 200:
        assert answer.status in (502, 503), answer.content
        return []
    replies = answer.json()
    replies = replies if isinstance(replies, list) else [replies]
    prompts = text if isinstance(text, list) else [text] * len(replies)
    return [
        Got(prompt, reply["text"], reply["output_ids"], *_told(reply["meta_info"]))
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def _told(meta: dict[str, Any]) -> tuple[list[float], str, str]:
    return [entry[0] for entry in meta["output_token_logprobs"]], meta["id"], meta["finish_reason"]["type"]


def streamed(storm: Storm, asking: Asking, text: str, leave_after: int | None) -> list[Got]:
    """A stream, put together as its worker's style demands."""
    if asking.response.status != 200:
        return []
    url = asking.response.getheader("x-router-worker")
    style = next(worker.wire.stream_style for worker in storm.served.workers if worker.url == url)
    events: list[dict[str, Any]] = []
    while (event := asking.event()) is not None:
        if "error" in event:
            return []
        events.append(event)
        if len(events) == leave_after:
            storm.note("left a stream")
            return []
    told = [
        _told(event["meta_info"] | {"finish_reason": event["meta_info"]["finish_reason"] or {"type": ""}})
        for event in events
    ]
    assert {request_id for _, request_id, _ in told} == {told[-1][1]}
    return [Got(text, *_put_together(style, events, [logprobs for logprobs, _, _ in told]), *told[-1][1:])]


def _put_together(
    style: StreamStyle, events: list[dict[str, Any]], logprobs: list[list[float]]
) -> tuple[str, list[int], list[float]]:
    """Text, ids and logprobs. After a pause that retracted it, the last event of an aborted stream says all of it again."""
    said, ids = [event["text"] for event in events], [event["output_ids"] for event in events]
    count = events[-1]["meta_info"]["completion_tokens"]
    if style == "cumulative":
        return said[-1], ids[-1], logprobs[-1]
    joined = list(chain.from_iterable(ids))
    if style == "mixed":
        return said[-1], joined if len(joined) == count else ids[-1], logprobs[-1]
    text = "".join(said)
    if len(joined) > count:
        text = said_once("".join(said[:-1]), said[-1])
    return text, joined[:count], list(chain.from_iterable(logprobs))[:count]


def trouble(storm: Storm, chance: random.Random) -> None:
    """Something that happens to a fleet."""
    served = storm.served
    worker = chance.choice([*served.workers, *served.prefills])
    what = chance.choices(
        ("abort", "abort all there", "abort all", "pause", "update", "update there", "death"), (3, 3, 1, 2, 2, 2, 1)
    )[0]
    storm.note(what)
    if what == "abort":
        rids = [rid for one in served.workers for rid in list(one.jobs)]
        if rids:
            assert served.post("/abort_request", {"rid": chance.choice(rids)}).status in (200, 207, 502)
    elif what == "abort all there":
        with contextlib.suppress(*BROKEN):
            call(worker.url + "/abort_request", {"abort_all": True})
    elif what == "abort all":
        tell_all(storm, "/abort_request", {"abort_all": True})
    elif what == "pause":
        mode = chance.choice(("abort", "retract", "in_place"))
        with storm.training:
            tell_all(storm, "/pause_generation", {"mode": mode})
            if chance.random() < 0.5:
                update(storm, "/update_weights_from_disk", "weight_version", abort=False)
            tell_all(storm, "/continue_generation", {})
    elif what == "update":
        update(storm, "/update_weight_version", "new_version", abort=chance.random() < 0.5)
    elif what == "update there":
        worker.set_weight_version(new_version(storm))
    else:
        death(storm, worker, chance)


def new_version(storm: Storm) -> str:
    with storm.lock:
        storm.version += 1
        return str(storm.version)


def tell_all(storm: Storm, path: str, body: dict[str, Any]) -> None:
    """Call the fleet. Not all workers die while it is in flight, so it is done by one worker at least."""
    with storm.calling():
        answer = storm.served.post(path, body)
    assert answer.status in (200, 207), answer.content


def update(storm: Storm, path: str, name: str, *, abort: bool) -> None:
    body = {name: new_version(storm), "abort_all_requests": abort, "model_path": "x"}
    tell_all(storm, path, body)


def death(storm: Storm, worker: EmbeddedWorker, chance: random.Random) -> None:
    """Kill a worker for as long as a turn takes; one at a time, so that there are others."""
    if not storm.take_down(worker):
        return
    worker.kill()
    storm.note("killed")
    try:
        a_turn(storm, chance, f"Without {worker.port}, {chance.random()}: ")
    finally:
        worker.restart()
        with storm.lock:
            storm.down = None


@pytest.fixture(params=[{}, {"apart": True}, {"dp_size": 3}], ids=["together", "apart", "ranks"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Three workers, or three that decode and three that prefill, or three with three ranks each.

    A worker that died and came back gets requests again in the storm, not after it: a breaker is open for a moment only.
    """
    found = load_vocabulary(str(vocabulary("qwen")))
    with stack(
        "qwen",
        abort=AbortConfig(attempts=4, wait=0.01),
        workers={"breaker": BreakerConfig(timeout=0.05, success_threshold=1), "health": HealthConfig(interval=0.5)},
        **request.param,
        sample_from=found.crumbs,
        eos_share=0.1,
        weight_version="0",
    ) as started:
        yield started


@pytest.mark.slow
def test_in_a_storm_nothing_is_lost_and_nothing_is_counted_twice(served: Stack) -> None:
    seed = random.SystemRandom().getrandbits(32) if MORE else 7
    storm = Storm(served, uuid.uuid4().hex, random.Random(seed))
    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        for one in [pool.submit(a_conversation, storm, number) for number in range(CONVERSATIONS)]:
            one.result(240)
    settle(served)
    assert all(not worker.out_of_range for worker in (*served.workers, *served.prefills))
    prompts = sum(
        counted(served, "tito_radix_matches_total").get(f'{{kind="{kind}"}}', 0) for kind in ("fresh", "continued")
    )
    until(lambda: sum(outcomes(served).values()) == prompts + storm.extra_samples, f"seed {seed}, {storm.did}")
    logged: dict[tuple[Any, ...], list[GenerationRecord]] = {}
    for worker in served.workers:
        for record in worker.log:
            logged.setdefault((*record.output_ids, *record.logprobs), []).append(record)
    print(seed, len(storm.got), sorted(storm.did.items()))
    assert len(storm.got) > CONVERSATIONS, storm.did
    for got in storm.got:
        if not got.ids:
            continue
        (record,) = logged[(*got.ids, *got.logprobs)]
        assert got.text == record.text, seed
        found = served.retrieve(got.prompt + got.text, namespace=storm.space, request_id=got.request_id)
        assert_kept(found, record)
        assert found["request_ids"].count(got.request_id) == 1, "recorded twice"
    for record in (record for records in logged.values() for record in records):
        assert not record.from_text
    assert served.idle(), served.inflight()
    for told in call(f"{served.url}/workers").json()["workers"]:
        assert not any(target["load"] for target in told["targets"]), told
        assert told["rank_mismatches"] == 0
    each_rank_serves(served)


def each_rank_serves(served: Stack) -> None:
    """The storm has left no rank out: once all breakers are closed, each gets one of as many requests as there are ranks."""
    until(lambda: all(one["state"] == "healthy" for one in served.get("/workers").json()["workers"]))
    until(lambda: served.generate(SHORT) and closed(served), lambda: served.get("/workers").content)
    before = [len(worker.log) for worker in served.workers]
    for _ in range(sum(worker.ranks for worker in served.workers)):
        served.generate(SHORT)
    for worker, start in zip(served.workers, before, strict=True):
        assert sorted(record.rank for record in worker.log[start:]) == list(range(worker.ranks)), "each has its part"


def closed(served: Stack) -> bool:
    return all(one["circuit_breaker"] == "closed" for one in served.get("/workers").json()["workers"])
