"""Every form of POST /generate: the client sees what it would see of the worker itself, and what was sampled is kept.

The table is a covering set: every two features that go together do so in a row. Each row runs on the embedded engine, where
all is compared byte for byte, and on a real engine, if that can be brought to it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import pytest

from router.config import AbortConfig
from tests.integration.conftest import RouterFor
from tests.support.client import Answer, call
from tests.support.engine_server import EngineServer
from tests.support.engines import SGLANG, VLLM, Engine
from tests.support.forms import BATCHES, FAULTS, Form, Json, Prompt, replies, table, view
from tests.support.oracle import Speller, versions_of
from tests.support.sglang_contract import contract
from tests.support.stack import STYLES, Stack, stack
from tests.support.usual import usual
from worker.engine.records import GenerationRecord
from worker.vocabulary import load_vocabulary
from worker.worker import EmbeddedWorker

ENGINES = ("sglang", "vllm")

# shape, prompt, delivery, logprobs, end, trim, rid, params, pace, vocabulary: see `Form`.
FORMS = table("""
single text cumulative  all     eos     special   named   shared 3 tekken
single text incremental all     eos     verbatim  unnamed shared 3 tekken
one    text plain       texts   eos     special   stem    each   1 tekken
one    text incremental texts   eos     trimmed   unnamed shared 3 tekken
one    text mixed       start   eos     untrimmed named   each   3 mistral-v1
list   text plain       all     eos     trimmed   unnamed shared 1 qwen
list   text cumulative  some    eos     special   named   shared 3 qwen
list   text incremental none    eos     trimmed   stem    shared 1 qwen
n      ids  plain       chosen  eos     untrimmed unnamed shared 1 tekken
n      text mixed       top     eos     untrimmed named   shared 3 mistral-v1
list-n ids  plain       asked   eos     verbatim  unnamed shared 1 tekken
list-n ids  cumulative  top     eos     trimmed   named   each   1 mistral-v1
list-n ids  mixed       unasked eos     trimmed   stem    shared 1 qwen
single ids  plain       chosen  stop_id untrimmed named   shared 1 tekken
single text cumulative  asked   stop_id untrimmed unnamed shared 3 mistral-v1
one    ids  cumulative  start   stop_id special   stem    shared 3 qwen
one    ids  incremental some    stop_id verbatim  unnamed each   3 mistral-v1
one    ids  mixed       asked   stop_id special   named   each   1 qwen
list   text plain       texts   stop_id untrimmed named   shared 1 tekken
list   text cumulative  some    stop_id trimmed   stem    shared 1 qwen
list   ids  incremental all     stop_id trimmed   unnamed each   1 qwen
n      text cumulative  none    stop_id untrimmed unnamed shared 3 tekken
n      ids  incremental start   stop_id special   named   shared 1 mistral-v1
list-n text plain       unasked stop_id verbatim  named   shared 1 mistral-v1
list-n ids  cumulative  top     stop_id verbatim  stem    shared 3 mistral-v1
list-n ids  mixed       unasked stop_id special   unnamed shared 3 tekken
single text plain       top     stop    trimmed   named   shared 1 mistral-v1
single text incremental none    stop    verbatim  unnamed shared 1 tekken
one    ids  plain       none    stop    verbatim  unnamed each   1 tekken
one    text cumulative  all     stop    trimmed   named   each   1 mistral-v1
one    text incremental unasked stop    trimmed   stem    each   3 tekken
list   ids  plain       start   stop    special   named   shared 1 qwen
list   text cumulative  some    stop    untrimmed unnamed shared 1 qwen
list   text mixed       top     stop    trimmed   stem    each   3 mistral-v1
n      ids  cumulative  asked   stop    untrimmed unnamed shared 3 mistral-v1
n      ids  mixed       all     stop    trimmed   named   shared 3 qwen
list-n text plain       all     stop    verbatim  stem    shared 1 qwen
list-n text incremental chosen  stop    untrimmed named   shared 3 tekken
list-n ids  mixed       texts   stop    verbatim  unnamed shared 1 tekken
single text cumulative  none    regex   verbatim  named   shared 1 tekken
single ids  incremental none    regex   special   unnamed shared 3 tekken
one    text plain       all     regex   verbatim  stem    shared 1 mistral-v1
one    text cumulative  texts   regex   special   unnamed each   3 qwen
one    ids  mixed       chosen  regex   trimmed   named   each   3 tekken
list   text cumulative  some    regex   verbatim  unnamed each   1 mistral-v1
list   ids  incremental asked   regex   trimmed   stem    each   3 qwen
list   ids  mixed       some    regex   untrimmed named   each   1 qwen
n      text plain       start   regex   special   named   shared 1 mistral-v1
n      text cumulative  top     regex   special   unnamed shared 3 mistral-v1
list-n ids  cumulative  chosen  regex   trimmed   stem    shared 3 qwen
list-n ids  incremental unasked regex   special   named   each   1 qwen
list-n text mixed       top     regex   untrimmed unnamed each   3 qwen
single text cumulative  start   length  verbatim  unnamed shared 3 tekken
single text incremental texts   length  untrimmed named   shared 3 qwen
one    text cumulative  texts   length  special   named   shared 1 qwen
one    text incremental some    length  special   unnamed shared 3 tekken
one    ids  mixed       all     length  trimmed   stem    shared 3 tekken
list   text plain       top     length  untrimmed unnamed shared 1 mistral-v1
list   ids  cumulative  chosen  length  verbatim  named   each   1 tekken
list   text incremental unasked length  special   stem    each   1 tekken
n      ids  plain       unasked length  untrimmed named   shared 1 mistral-v1
n      text cumulative  asked   length  trimmed   unnamed shared 1 tekken
list-n text cumulative  top     length  untrimmed named   shared 3 tekken
list-n text incremental none    length  untrimmed unnamed each   3 qwen
list-n ids  mixed       top     length  trimmed   stem    each   3 qwen
single text plain       unasked update  trimmed   named   shared 1 qwen
single ids  incremental none    update  special   unnamed shared 3 tekken
one    text cumulative  top     update  special   stem    shared 1 mistral-v1
one    text incremental start   update  trimmed   unnamed each   3 mistral-v1
one    text mixed       asked   update  untrimmed named   shared 3 tekken
list   text plain       some    update  verbatim  unnamed shared 1 mistral-v1
list   ids  cumulative  asked   update  verbatim  named   shared 3 tekken
list   ids  incremental chosen  update  untrimmed stem    shared 1 qwen
n      text plain       none    update  special   named   shared 1 tekken
n      text mixed       chosen  update  trimmed   unnamed shared 1 tekken
list-n text plain       all     update  special   stem    each   1 tekken
list-n ids  incremental all     update  untrimmed named   each   3 qwen
list-n ids  mixed       texts   update  untrimmed unnamed shared 1 mistral-v1
single ids  cumulative  unasked aborted untrimmed unnamed shared 1 qwen
single ids  mixed       none    aborted untrimmed named   shared 3 qwen
one    text plain       all     aborted special   named   each   1 mistral-v1
one    ids  incremental chosen  aborted verbatim  unnamed each   1 qwen
one    text mixed       all     aborted special   stem    shared 3 mistral-v1
list   ids  plain       some    aborted verbatim  stem    shared 1 qwen
list   ids  cumulative  texts   aborted untrimmed unnamed each   3 tekken
list   text incremental asked   aborted special   named   each   3 tekken
n      ids  plain       none    aborted verbatim  unnamed shared 1 qwen
n      ids  cumulative  all     aborted verbatim  named   shared 3 mistral-v1
list-n text plain       start   aborted trimmed   stem    each   1 mistral-v1
list-n ids  incremental top     aborted verbatim  named   each   3 qwen
list-n text mixed       top     aborted untrimmed unnamed each   3 tekken
single text cumulative  asked   queued  verbatim  unnamed shared 3 qwen
single text mixed       texts   queued  trimmed   named   shared 1 mistral-v1
one    ids  plain       chosen  queued  verbatim  named   shared 1 mistral-v1
one    ids  cumulative  chosen  queued  special   stem    each   3 qwen
one    text mixed       unasked queued  trimmed   unnamed shared 3 mistral-v1
list   text plain       top     queued  verbatim  unnamed each   1 tekken
list   ids  cumulative  top     queued  special   named   each   1 qwen
list   ids  incremental some    queued  untrimmed stem    shared 3 qwen
n      ids  cumulative  none    queued  special   named   shared 1 mistral-v1
n      ids  incremental start   queued  untrimmed unnamed shared 1 tekken
list-n ids  plain       texts   queued  verbatim  stem    each   1 mistral-v1
list-n ids  cumulative  all     queued  verbatim  unnamed each   3 mistral-v1
list-n text mixed       all     queued  verbatim  named   each   1 qwen
single ids  plain       unasked busy    trimmed   unnamed shared 1 qwen
single text cumulative  asked   busy    untrimmed named   shared 3 qwen
one    ids  plain       texts   busy    trimmed   stem    each   1 tekken
one    text cumulative  some    busy    untrimmed named   shared 1 tekken
one    text mixed       chosen  busy    untrimmed unnamed each   1 qwen
list   text plain       start   busy    special   stem    shared 1 qwen
list   ids  cumulative  chosen  busy    trimmed   named   shared 1 mistral-v1
list   ids  mixed       all     busy    special   unnamed each   3 mistral-v1
n      text plain       all     busy    untrimmed unnamed shared 1 mistral-v1
n      text incremental top     busy    verbatim  named   shared 1 qwen
list-n ids  plain       none    busy    verbatim  stem    shared 1 tekken
list-n text cumulative  unasked busy    verbatim  unnamed each   3 tekken
list-n text incremental asked   busy    trimmed   named   each   1 tekken
single ids  cumulative  top     error   untrimmed named   shared 1 mistral-v1
single ids  incremental all     error   untrimmed unnamed shared 3 qwen
one    ids  incremental some    error   special   named   each   3 mistral-v1
one    text mixed       asked   error   trimmed   stem    shared 3 qwen
list   text cumulative  chosen  error   verbatim  unnamed shared 3 qwen
list   ids  incremental chosen  error   untrimmed stem    shared 1 mistral-v1
list   text mixed       unasked error   verbatim  named   shared 3 tekken
n      ids  cumulative  start   error   untrimmed named   shared 1 tekken
n      ids  incremental texts   error   special   unnamed shared 3 qwen
list-n text cumulative  none    error   untrimmed named   each   1 mistral-v1
list-n text mixed       top     error   trimmed   stem    each   3 mistral-v1
single ids  incremental top     undone  trimmed   named   shared 1 mistral-v1
single text mixed       texts   undone  untrimmed unnamed shared 1 mistral-v1
one    text cumulative  asked   undone  trimmed   stem    each   1 tekken
one    text incremental unasked undone  untrimmed unnamed shared 3 qwen
one    text mixed       none    undone  verbatim  named   each   1 qwen
list   ids  cumulative  texts   undone  untrimmed stem    shared 3 tekken
list   text incremental some    undone  trimmed   named   each   3 qwen
list   ids  mixed       start   undone  untrimmed unnamed shared 1 qwen
n      text cumulative  all     undone  trimmed   named   shared 3 qwen
n      ids  mixed       asked   undone  special   unnamed shared 3 qwen
list-n text cumulative  unasked undone  untrimmed stem    shared 3 qwen
list-n ids  incremental chosen  undone  special   unnamed shared 1 mistral-v1
""")


def together(some: Mapping[str, str]) -> bool:
    """Whether features can be in one row."""
    shape, plain = some.get("shape"), some.get("delivery") == "plain"
    if shape is not None and shape not in BATCHES and (some.get("params") == "each" or some.get("rid") == "stem"):
        return False
    if some.get("logprobs") == "some" and shape not in (None, "one", "list"):
        return False  # SGLang takes no lists of options with n > 1
    return not (plain and (some.get("end") in ("error", "undone") or some.get("pace") == "3"))


def test_every_two_features_that_go_together_do_so_in_a_row() -> None:
    names = [field.name for field in fields(Form)]
    values = {name: sorted({getattr(form, name) for form in FORMS}) for name in names}
    found = {
        (one, getattr(form, one), two, getattr(form, two))
        for form in FORMS
        for one, two in itertools.combinations(names, 2)
    }
    missing = [
        (one, first, two, second)
        for one, two in itertools.combinations(names, 2)
        for first, second in itertools.product(values[one], values[two])
        if together({one: first, two: second}) and (one, first, two, second) not in found
    ]
    assert missing == []


# -- on the embedded engine --------------------------------------------------------------------------------------------------

PIECES = (
    ("Hel", "lo", " w", "or", "ld"),
    ("sum", "mary", "é", "e", " x"),
    ("你", "好", "\n", "\n", "z"),
    ("😀", "<", "think", ">", " s"),
)
SPECIAL = {"qwen": "<|endoftext|>", "mistral-v1": "<unk>", "tekken": "[INST]"}
LOGPROBS = (-0.0, -1.1920928955078125e-07, -3.3467748165130615, -11.25, -0.6931471824645996, -1e-05, -7.0, -2.5)
HELD_AT = {"aborted": 3, "queued": 0, "update": 3}


class Stacks:
    """A router for each vocabulary, with the one worker of three that streams as a form wants it."""

    def __init__(self, entered: ExitStack, **radix: Any) -> None:
        self._entered = entered
        self._radix = radix
        self._started: dict[str, tuple[Stack, list[EmbeddedWorker]]] = {}

    def __call__(self, form: Form) -> tuple[Stack, EmbeddedWorker]:
        name: Any = form.vocabulary
        if name not in self._started:
            served = self._entered.enter_context(
                stack(name, styles=STYLES, radix=self._radix, abort=AbortConfig(wait=0), weight_version="1")
            )
            self._started[name] = served, served.workers
        served, workers = self._started[name]
        worker = workers[STYLES.index(form.style)]
        assert served.post(f"/add_worker?url={worker.url}", {}).status == 200
        for url in served.get("/list_workers").json()["urls"]:
            if url != worker.url:
                assert served.post(f"/remove_worker?url={url}", {}).status == 200
        # All of them have the weights of the last row.
        served.set_weight_version(str(max(int(one.weight_version) for one in workers)))
        return served, worker

    def check(self) -> None:
        for served, workers in self._started.values():
            assert served.idle(), served.inflight()
            assert [worker.out_of_range for worker in workers] == [[]] * len(workers)


@pytest.fixture(scope="module")
def stacks() -> Iterator[Stacks]:
    with ExitStack() as entered:
        started = Stacks(entered)
        yield started
        started.check()


@pytest.fixture(scope="module")
def unforced() -> Iterator[Stacks]:
    """With `--force-logprobs off`."""
    with ExitStack() as entered:
        started = Stacks(entered, force_logprobs=False)
        yield started
        started.check()


class OnEmbedded:
    """A form on the embedded engine: asked of the worker, or through the router, with the same outcome prepared."""

    def __init__(self, form: Form, served: Stack, worker: EmbeddedWorker) -> None:
        self.form = form
        self.served = served
        self.worker = worker
        self.spelling: Speller = served.spelling
        self.headers = {"x-abort-policy": "return", "x-radix-namespace": str(form)}
        starts = [f"Form {number} 你好:" for number in range(form.prompts)]
        self.prompts: list[Prompt] = list(starts)
        if form.prompt == "ids":
            self.prompts = [self.spelling.encode_start(one) + self._ids("sum", "mary", " ") for one in starts]
        self.texts = [one if isinstance(one, str) else self.spelling.text_of_request(one) for one in self.prompts]

    def ask(self, url: str, version: str) -> tuple[Answer, list[GenerationRecord]]:
        """The answer, and what the worker did."""
        self.served.set_weight_version(version)
        for number in range(self.form.replies):
            self._script(number)
        before = len(self.worker.log)
        held = HELD_AT.get(self.form.end)
        if held is not None:
            self.worker.hold(held)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(call, f"{url}/generate", self.body, headers=self.headers, may_break=True)
            if held is not None:
                self.worker.wait_for_arrivals(self.form.replies)
                self._interrupt(url, version)
                self.worker.release()
            answer = asked.result()
        self.worker.wait_until_idle()
        return answer, self.worker.log[before:]

    @property
    def body(self) -> Json:
        stop_id = self._ids("q")[-1]
        params: dict[str, Json] = {
            "stop_id": {"stop_token_ids": [stop_id]},
            "stop": {"stop": ["TO", "never"]},
            "regex": {"stop_regex": "T[NO]"},
            "length": {"max_new_tokens": 6},
        }
        return self.form.body(self.prompts, {"max_new_tokens": 64, **params.get(self.form.end, {})})

    def retrieve(self, text: str, **options: Any) -> Answer:
        return self.served.post("/retrieve_from_text", {"text": text, **options}, headers=self.headers)

    def _script(self, number: int) -> None:
        pieces = PIECES[number]
        special = self.spelling.start.token_to_id(SPECIAL[self.form.vocabulary])
        assert special is not None
        # "TO" ends inside the second of these, and begins inside the first.
        end = {"stop": self._ids("ST", "OP", "x"), "regex": self._ids("ST", "OP", "x"), "stop_id": self._ids("q")}
        ids = [*self._ids(*pieces[:2]), special, *self._ids(*pieces[2:]), *end.get(self.form.end, [])]
        fault = FAULTS.get(self.form.end) if number == 0 else None
        self.worker.script(ids, logprobs=LOGPROBS[number:] + LOGPROBS, fault=fault)

    def _interrupt(self, url: str, version: str) -> None:
        names = self.form.rids()
        if self.form.end == "update":
            body: Json = {"new_version": str(int(version) + 1), "abort_all_requests": False}
            answer = call(f"{url}/update_weight_version", body)
        elif names:
            answer = call(f"{url}/abort_request", {"rid": names[0]})  # one of several
        else:
            answer = call(f"{self.worker.url}/abort_request", {"abort_all": True})  # behind the router's back
        assert answer.status == 200

    def _ids(self, *pieces: str) -> list[int]:
        return [token for piece in pieces for token in self.spelling.encode_tail(piece)]


def recorded_header(form: Form, found: Mapping[int, Json]) -> str:
    """What `x-radix-recorded` has to say of these replies."""
    if form.streams:
        return "no; worker error: status 503" if not found else "pending"
    if form.end == "busy":
        return "no; worker error: status 503"
    kept = sum(bool(reply["output_ids"]) for reply in found.values())
    if kept == form.replies:
        return "exact"
    return f"inexact; {kept} of {form.replies} replies are exact" if kept else "no; no tokens were sampled: abort"


def check_kept(row: OnEmbedded, number: int, reply: Json, record: GenerationRecord, *, logprobs: bool) -> None:
    """What is retrieved for prompt + reply is what was sent and what was sampled, as far as the client got it."""
    sampled = reply["output_ids"]
    count, context = len(sampled), len(record.input_ids)
    assert sampled == record.output_ids[:count]
    assert count == len(record.output_ids) or not row.form.complete
    name, text = reply["meta_info"]["id"], row.texts[number // row.form.samples] + reply["text"]
    if not count:
        # Nothing was sampled, and so nothing is remembered.
        assert row.retrieve(text, request_id=name).status == 404
        assert set(row.retrieve(text).json()["loss_mask"]) == {0}
        return
    answer = row.retrieve(text, request_id=name)
    assert answer.status == 200, answer.content
    found = answer.json()
    assert found["tokens"] == record.input_ids + sampled
    assert found["loss_mask"] == [0] * context + [1] * count
    expected = [0.0] * context + record.logprobs[:count] if logprobs else None
    assert json.dumps(found["rollout_logp"]) == json.dumps(expected)
    assert dict(versions_of(found["weight_versions"])) == {
        context + at: version for at, version in enumerate(record.versions[:count])
    }
    assert found["exact"] is True
    assert found["exact_chars"] == len(text)
    assert found["reasons"] == ([] if logprobs else ["no_logprobs"])
    assert name in found["request_ids"]


def check_form(form: Form, stacks: Stacks, *, forced: bool) -> None:
    row = OnEmbedded(form, *stacks(form))
    version = row.worker.weight_version
    answer, records = row.ask(row.served.url, version)
    direct, truth = row.ask(row.worker.url, version)

    # A client of the router need not look for [DONE].
    assert (answer.broken, direct.broken) == (form.end == "undone", False)
    seen = view(answer)
    assert seen.comparable == view(direct).comparable
    assert [record.input_ids for record in records] == [record.input_ids for record in truth]
    for record in records:
        sent = {key: value for key, value in record.body.items() if key != "rid"}
        ids = [one.input_ids for one in records[:: form.samples]]
        assert sent == form.sent(row.body, ids, forced=forced)

    found = replies(form, seen)
    check_end(form, found)
    assert answer.headers["x-radix-recorded"] == recorded_header(form, found)
    assert answer.headers["x-router-worker"] == row.worker.url
    for number, reply in found.items():
        logprobs = forced or form.wants_logprobs(number)
        check_kept(row, number, reply, records[number], logprobs=logprobs)
    for name in set(form.rids()) - {reply["meta_info"]["id"] for reply in found.values()}:
        assert [row.retrieve(text, request_id=name).status for text in row.texts] == [404] * form.prompts
    assert not any(row.served.inflight().values())


def check_end(form: Form, found: Mapping[int, Json]) -> None:
    """That a row is what its name says."""
    if form.end == "busy" and not form.streams:
        assert not found
        return
    reason = found[0]["meta_info"]["finish_reason"]
    kind = {"length": "length", "aborted": "abort", "queued": "abort", "busy": "abort"}.get(form.end, "stop")
    assert (reason or {}).get("type") == (None if form.end in ("error", "undone") else kind)
    matched = {"eos": int, "stop_id": int, "stop": str, "regex": str}.get(form.end)
    assert matched is None or isinstance(reason["matched"], matched)


@pytest.mark.parametrize("form", usual(FORMS, *FORMS[::2]), ids=str)
def test_the_client_sees_the_worker_and_the_tokens_are_kept(form: Form, stacks: Stacks) -> None:
    check_form(form, stacks, forced=True)


@pytest.mark.parametrize("form", usual([form for form in FORMS if form.vocabulary == "qwen"], *FORMS[::3]), ids=str)
def test_without_forced_logprobs_they_are_kept_if_the_client_asks(form: Form, unforced: Stacks) -> None:
    check_form(form, unforced, forced=False)


# -- SGLang's own contract, without an engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", usual(FORMS, *FORMS[::4]), ids=str)
def test_requests_and_replies_are_what_sglang_specifies(form: Form, stacks: Stacks) -> None:
    """What the router sends, what the embedded engine says, and what a client gets of it through the router."""
    types = contract()
    row = OnEmbedded(form, *stacks(form))
    version = row.worker.weight_version
    answer, records = row.ask(row.served.url, version)
    direct, _ = row.ask(row.worker.url, version)
    for record in records:
        sent = types.GenerateRequest.from_json_value(record.body)
        assert (sent.text, sent.return_logprob) == (None, True)
    for seen in (view(answer), view(direct)):
        for event in seen.rest:
            if event.startswith(b"data: {"):
                assert types.GenerateStreamError.from_json_value(json.loads(event[6:])).error is not None
        if seen.status != 200:
            assert types.ErrorBody.from_json_value(json.loads(seen.parts[0][0])).message
            continue
        for part in itertools.chain.from_iterable(seen.parts.values()):
            found = json.loads(part)
            for reply in found if isinstance(found, list) else [found]:
                judged = types.GenerateResponse.from_json_value(reply)
                assert (judged.text, judged.meta_info.id) == (reply["text"], reply["meta_info"]["id"])


# -- on the real engine --------------------------------------------------------------------------------------------------

REAL = [
    form
    for form in FORMS
    if form.delivery != "mixed" and form.end in ("eos", "stop_id", "stop", "regex", "length", "aborted")
]
RANDOM = {"e2e_latency", "cached_tokens", "cached_tokens_details"}


class OnEngine:
    """A form on a real worker, which samples greedily, and so says the same twice."""

    def __init__(self, form: Form, engine: Engine, worker: EngineServer) -> None:
        vocabulary = load_vocabulary(str(engine.kit.model))
        self.engine = engine
        self.form = form
        self.headers = {"x-abort-policy": "return", "x-radix-namespace": str(form)}
        self.worker = worker
        self._vocabulary = vocabulary
        self._abort_every = 0.2
        self.texts = [f"<|im_start|>user\nForm {number} 你好: {form} sum" for number in range(form.prompts)]
        self._prompts: list[Prompt] = list(self.texts)
        if form.prompt == "ids":
            self._prompts = [vocabulary.encode(text) + vocabulary.encode("mary") for text in self.texts]
            self.texts = [text + "mary" for text in self.texts]

    def ask(self, url: str, name: str) -> dict[int, Json]:
        """The replies; a request has another name each time, for SGLang ends who takes that of a stream just over."""
        answer = self.answer(url, name)
        assert answer.status == 200, answer.content
        found = replies(self.form, view(answer))
        if url != self.worker.url:
            assert answer.headers["x-radix-recorded"] == recorded_header(self.form, found)
        return found

    def ask_until_aborted(self, url: str, name: str) -> tuple[str, dict[int, Json]]:
        """As `ask`, and the name of the request. An abort may come too late: an engine runs ahead of its own HTTP server.

        That of vLLM answers an abort after the events that wait to be written, so the first one has to come early.
        """
        waits = [0.2] * 5 if self.engine is SGLANG else [0.05, 0.03, 0.02, 0.1, 0.2] * 3
        for attempt, self._abort_every in enumerate(waits):
            tried = f"{name} {attempt}"
            found = self.ask(url, tried)
            if self.form.end != "aborted" or found[0]["meta_info"]["finish_reason"]["type"] != "length":
                break
        return tried, found

    def answer(self, url: str, name: str) -> Answer:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(call, f"{url}/generate", self._body(name), headers=self.headers)
            if self.form.end == "aborted":
                self._abort(url, name, asked)
            return asked.result()

    def _body(self, name: str) -> Json:
        the, eos = self._vocabulary.encode(" the")[0], self._vocabulary.eos_id
        always = {"logit_bias": {str(the): 100}}
        params: dict[str, Json] = {
            "eos": {"min_new_tokens": 3, "logit_bias": {str(eos): 100}},
            "stop_id": {"min_new_tokens": 3, "stop_token_ids": [the], **always},
            "stop": {"stop": ["e th", "never"], **always},
            "regex": {"stop_regex": "e [t]h", **always},
            "length": {"max_new_tokens": 6},
            "aborted": {"max_new_tokens": 3000, "ignore_eos": True},
        }
        # To be asked twice, it has to say the same twice. vLLM takes no `n` with it, and is asked once.
        greedy = {"temperature": 0} if self.engine is SGLANG else {}
        params = {**greedy, "max_new_tokens": 64, **params.get(self.form.end, {})}
        return {**self.form.body(self._prompts, params, name), "return_prompt_token_ids": True}

    def _abort(self, url: str, name: str, asked: Future[Answer]) -> None:
        bodies = [{"rid": rid} for rid in self.form.rids(name)] or [{"abort_all": True}]
        while not wait([asked], timeout=self._abort_every).done:  # nobody tells when it has begun
            for body in bodies:
                assert call(f"{url}/abort_request", body).status == 200


def same(one: Any, two: Any) -> bool:
    """Equal, in the same order, but for what is random by nature; of logprobs the last digits are."""
    if isinstance(one, float) and isinstance(two, float):
        return one == pytest.approx(two, rel=1e-5, abs=1e-5)
    if isinstance(one, dict) and isinstance(two, dict):
        return list(one) == list(two) and all(key in RANDOM or same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


def unnamed(found: Mapping[int, Json]) -> list[Json]:
    """Replies without what differs from one request to the next, or with the events of a stream."""
    metas = [
        {key: value for key, value in reply["meta_info"].items() if key not in ("id", "response_sent_to_client_ts")}
        for reply in found.values()
    ]
    return [{**reply, "meta_info": meta} for reply, meta in zip(found.values(), metas, strict=True)]


def keys(reply: Json) -> tuple[list[str], list[str]]:
    return list(reply), list(reply["meta_info"])


def check_kept_of_engine(row: OnEngine, url: str, number: int, reply: Json) -> None:
    """What is retrieved for prompt + reply is what the worker says it read and sampled."""
    sent, sampled, meta = reply["prompt_token_ids"], reply["output_ids"], reply["meta_info"]
    body = {"text": row.texts[number // row.form.samples] + reply["text"], "request_id": meta["id"]}
    answer = call(f"{url}/retrieve_from_text", body, headers=row.headers)
    if not sampled:
        assert answer.status == 404
        return
    assert answer.status == 200, answer.content
    found = answer.json()
    assert found["tokens"] == sent + sampled
    assert found["loss_mask"] == [0] * len(sent) + [1] * len(sampled)
    assert len(found["rollout_logp"]) == len(found["tokens"])
    if row.form.wants_logprobs(number):
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        assert json.dumps(found["rollout_logp"]) == json.dumps([0.0] * len(sent) + logprobs)
    if row.engine is VLLM and "weight_versions" not in meta:  # it tells none together with logprobs of other tokens
        spans = [{"version": meta["weight_version"], "start": 0, "end": len(sampled)}]
    else:
        spans = meta["weight_versions"]
    assert dict(versions_of(found["weight_versions"])) == {
        len(sent) + at: version for at, version in versions_of(spans)
    }
    assert (found["exact"], found["exact_chars"]) == (True, len(body["text"]))
    assert found["reasons"] == []


def refused(form: Form) -> str | None:
    """The name of what a vLLM worker is not asked for; None if the form can be had there."""
    if form.end == "regex":
        return "stop_regex"
    if form.logprobs in ("start", "all", "some") and form.streams:
        return "logprob_start_len"
    return "token_ids_logprob" if form.logprobs == "all" else None


@pytest.mark.parametrize("form", REAL, ids=str)
def test_so_it_is_on_a_real_engine(
    form: Form, engine: Engine, router_for: RouterFor, workers: list[EngineServer]
) -> None:
    """With SGLang as the worker itself would answer; with vLLM in the same words, or refused by name."""
    place = int(form.delivery == "incremental")
    worker, flags = workers[place], ()
    if engine is VLLM and form.delivery == "incremental":
        flags = ("--incremental-streaming-output",)
    url = router_for(place, flags=flags)
    row = OnEngine(form, engine, worker)
    if engine is VLLM and (name := refused(form)) is not None:
        answer = row.answer(url, f"refused {form}")
        assert (answer.status, f"`{name}`" in answer.content.decode()) == (400, True), answer.content
        return
    name, found = row.ask_until_aborted(url, f"routed {form}")
    if form.rids():
        assert [reply["meta_info"]["id"] for reply in found.values()] == form.rids(name)
    check_end(form, found)
    for number, reply in found.items():
        check_kept_of_engine(row, url, number, reply)
    if engine is SGLANG:
        _, expected = row.ask_until_aborted(worker.url, f"direct {form}")
        if form.end == "aborted":  # how far they came is another thing each time
            assert list(map(keys, found.values())) == list(map(keys, expected.values()))
        else:
            assert same(unnamed(found), unnamed(expected)), (found, expected)
