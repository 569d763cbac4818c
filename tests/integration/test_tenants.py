"""What one tenant does is nothing to another: their calls on one router, and one tenant's alone on a second one, are compared.

Both tenants use the same texts, the same request ids, the same namespaces and adapters, and name each other's. Each reply is
scripted in a spelling of its own, with logprobs that nothing else has: a token that comes to the wrong one is known by them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.config import AbortConfig
from tests.conftest import DEAR, examples
from tests.support import client
from tests.support.asking import Asking
from tests.support.client import Answer
from tests.support.stack import Stack, events, stack

API_KEYS = ("a:key-of-a", "b:key-of-b", "b:key-of-bs-trainer")
A, B, TRAINER, ADMIN = (
    {"authorization": f"Bearer {key}"} for key in ("key-of-a", "key-of-b", "key-of-bs-trainer", "key-of-all")
)
KEY = {"a": A, "b": B}
THEIRS = -1000.0
"""Below it are the logprobs of what was sampled for `a`, above it those of `b`."""

BASES = ("Q: ", "Q: then ")
WORDS = ("summary", "hello there")
GLUE = "\nthen "
SPELLINGS = {
    "a": {"summary": ("s", "u", "m", "m", "a", "r", "y"), "hello there": ("hel", "lo", " th", "ere")},
    "b": {"summary": ("sum", "m", "ary"), "hello there": ("h", "e", "llo", " there")},
}
NAMES = ("x", "xy", "y")
LATEST = "(the id of a's latest reply)"

_ID = re.compile(r"[0-9a-f]{32}")
_OF_THE_MOMENT = ("date", "x-router-worker", "x-request-id", "content-length")


@pytest.fixture(scope="module", params=["with an admin", "without"])
def worlds(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, Stack]]:
    """A router for both tenants, and one that only `b` will use."""
    server = {"api_keys": API_KEYS, "admin_keys": ("key-of-all",) if request.param == "with an admin" else ()}
    with (
        stack("qwen", styles=("cumulative",), server=server) as both,
        stack("qwen", styles=("cumulative",), server=server) as alone,
    ):
        yield both, alone


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    """A router with tenants and an admin."""
    with stack("qwen", styles=("cumulative",), server={"api_keys": API_KEYS, "admin_keys": ("key-of-all",)}) as started:
        yield started


# -- calls -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A text of some turns, and the key under which it stands."""

    base: int
    turns: tuple[int, ...]
    namespace: str
    adapter: str

    def text(self, example: int) -> str:
        return f"{example}. {BASES[self.base]}" + "".join(WORDS[turn] + GLUE for turn in self.turns)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-radix-namespace": self.namespace} if self.namespace else {}

    @property
    def fields(self) -> dict[str, Any]:
        return {"lora_path": self.adapter} if self.adapter else {}


@dataclass(frozen=True)
class Generate:
    """One generation, or several."""

    who: str
    place: Place
    word: int
    form: str
    rid: str | None
    parent: str | None
    trajectory: bool


@dataclass(frozen=True)
class Retrieve:
    """The tokens of a text, or where it leaves what is known."""

    who: str
    place: Place
    word: int | None
    request_id: str | None
    strict: bool
    explain: bool


@dataclass(frozen=True)
class Abort:
    """Of something that is over, or was never there."""

    who: str
    rid: str


@dataclass(frozen=True)
class Clash:
    """Both generate at once, and one of them ends what it names, or leaves."""

    place: Place
    rids: tuple[str | None, str | None]
    stream: bool
    who: str
    how: str
    rid: str


WHO = st.sampled_from("ab")
PLACES = st.builds(
    Place,
    st.integers(0, 1),
    st.lists(st.integers(0, 1), max_size=2).map(tuple),
    st.sampled_from(("", "", "evaluation")),
    st.sampled_from(("", "", "adapter")),
)
CALLS = st.one_of(
    st.builds(
        Generate,
        WHO,
        PLACES,
        st.integers(0, 1),
        st.sampled_from(("whole", "stream", "ids", "batch", "samples")),
        st.none() | st.sampled_from(NAMES),
        st.none() | st.sampled_from((*NAMES, LATEST, "none")),
        st.booleans(),
    ),
    st.builds(
        Retrieve,
        WHO,
        PLACES,
        st.none() | st.integers(0, 1),
        st.none() | st.sampled_from((*NAMES, LATEST)),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Abort, WHO, st.sampled_from((*NAMES, LATEST, "z"))),
    st.builds(
        Clash,
        PLACES,
        st.tuples(*[st.none() | st.sampled_from(NAMES)] * 2),
        st.booleans(),
        WHO,
        st.sampled_from(("abort", "leave")),
        st.sampled_from(NAMES),
    ),
)


# -- worlds ------------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A router, and what one tenant has seen of it."""

    served: Stack
    example: int
    shown: dict[str, str] = field(default_factory=dict)  # ids that are random, and the names they have here
    theirs: list[str] = field(default_factory=lambda: [uuid.uuid4().hex])  # those that `a` was shown
    counts: ClassVar[Iterator[int]] = itertools.count()

    def script(self, who: str, word: int) -> dict[str, Any]:
        """A reply in a tenant's own spelling. Its logprobs tell whose it is, and not which."""
        ids = [number for piece in SPELLINGS[who][WORDS[word]] for number in self.served.spelling.encode_tail(piece)]
        begin = THEIRS - 1 if who == "a" else THEIRS / 2
        return {"ids": ids, "logprobs": [begin - at / 8 for at in range(len(ids) + 1)]}

    def body(self, call: Generate) -> dict[str, Any]:
        """The request; in a batch there is a second prompt."""
        text = call.place.text(self.example)
        params: dict[str, Any] = {"custom_params": {"script": self.script(call.who, call.word)}}
        body: dict[str, Any] = {"text": text, "sampling_params": params, "return_logprob": True, **call.place.fields}
        if call.form == "ids":
            body["input_ids"] = self.served.spelling.encode_start(body.pop("text"))
        elif call.form == "batch":
            body |= {"text": [text, f"{text}{WORDS[0]}"], "sampling_params": [params, params]}
        elif call.form == "samples":
            params["n"] = 2
        body["stream"] = call.form == "stream"
        if call.rid is not None:
            body["rid"] = [call.rid, f"{call.rid}-2"] if call.form == "batch" else call.rid
        if call.trajectory:
            body["return_trajectory"] = True
        return body

    def resolved(self, name: str) -> str:
        return self.theirs[-1] if name == LATEST else name

    def generate(self, call: Generate) -> tuple[Answer, list[list[int]]]:
        """The answer, and what the worker was sent."""
        headers = {**KEY[call.who], **call.place.headers}
        if call.parent is not None:
            headers["x-radix-parent"] = self.resolved(call.parent)
        worker = self.served.workers[0]
        before = len(worker.log)
        answer = self.served.post("/generate", self.body(call), headers=headers)
        return answer, [record.input_ids for record in worker.log[before:]]

    def retrieve(self, call: Retrieve) -> Answer:
        text = call.place.text(self.example) + ("" if call.word is None else WORDS[call.word])
        body: dict[str, Any] = {"text": text, **call.place.fields}
        if not call.explain:
            body |= {"strict": call.strict, "max_staleness": 0}
            if call.request_id is not None:
                body["request_id"] = self.resolved(call.request_id)
        path = "/radix_tree/explain" if call.explain else "/retrieve_from_text"
        return self.served.post(path, body, headers={**KEY[call.who], **call.place.headers})

    def abort(self, who: str, rid: str) -> Answer:
        return self.served.post("/abort_request", {"rid": self.resolved(rid)}, headers=KEY[who])

    def asks(self, who: str, clash: Clash) -> Asking:
        call = Generate(
            who, clash.place, 0, "stream" if clash.stream else "whole", clash.rids["ab".index(who)], None, False
        )
        return Asking(self.served.url, self.body(call), headers={**KEY[who], **call.place.headers})

    def clash(self, clash: Clash, present: str) -> dict[str, Answer]:
        """Each one's own, after one of them has ended something; of who is not present nothing happens."""
        worker = self.served.workers[0]
        worker.hold(after=1)
        with contextlib.ExitStack() as open_:
            asking = {who: self.asks(who, clash) for who in present}
            for one in asking.values():
                open_.callback(one.close)
            worker.wait_for_arrivals(len(present))
            answers = {}
            if clash.who in present and clash.how == "abort":
                answers["abort"] = self.abort(clash.who, clash.rid)
            elif clash.who in present:
                asking.pop(clash.who).leave()
                worker.wait_for(lambda: worker.in_flight == len(asking))
            worker.release()
            answers |= {who: one.answer() for who, one in asking.items()}
        worker.wait_until_idle()
        return answers

    def seen(self, answer: Answer) -> Any:
        """What a tenant sees: ids that are random are called by the order in which they were seen."""
        headers = {name: value for name, value in answer.headers.items() if name not in _OF_THE_MOMENT}
        if headers.get("content-type", "").startswith("text/event-stream"):
            found: Any = events(answer)
            found = [found[-1], sorted({event["meta_info"]["id"] for event in found})]
        else:
            found = answer.json() if answer.content else None
        told = json.dumps(_without_the_moment(found))
        return answer.status, headers, json.loads(_ID.sub(lambda match: self._called(match[0]), told))

    def _called(self, rid: str) -> str:
        return "(a's)" if rid in self.theirs else self.shown.setdefault(rid, f"#{len(self.shown)}")


def _without_the_moment(value: Any) -> Any:
    if isinstance(value, Mapping):
        gone = ("response_sent_to_client_ts", "workers")
        return {key: _without_the_moment(one) for key, one in value.items() if key not in gone}
    return [_without_the_moment(one) for one in value] if isinstance(value, list) else value


def floats(value: Any) -> Iterator[float]:
    """All that are in there."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from floats(one)


def ids_shown(answer: Answer) -> list[str]:
    return _ID.findall(answer.content.decode()) if answer.status == 200 else []


# -- the property ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200, DEAR), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, max_size=12))
def test_a_tenant_sees_what_it_would_see_alone(worlds: tuple[Stack, Stack], calls: list[Any]) -> None:
    """Answers, headers, and the tokens that the worker gets; and nothing in them was sampled for the other one."""
    example = next(World.counts)
    both, alone = (World(served, example) for served in worlds)
    for call in calls:
        if isinstance(call, Clash):
            first, second = both.clash(call, "ab"), alone.clash(call, "b")
            if call.who == "b" and "a" in first:
                assert b'"abort"' not in first["a"].content, "b has ended what a generates"
            if call.who == "a":
                first.pop("abort", None)
            first.pop("a", None)
            assert compared(both, first) == compared(alone, second)
        elif call.who == "a":
            answer, _ = do(both, call)
            both.theirs += ids_shown(answer)
        else:
            (first, sent), (second, sent_alone) = do(both, call), do(alone, call)
            seen = both.seen(first)
            assert seen == alone.seen(second)
            assert sent == sent_alone
            assert all(number > THEIRS for number in floats(seen))
    for world in (both, alone):
        settle_quietly(world.served)


def compared(world: World, answers: Mapping[str, Answer]) -> dict[str, Any]:
    return {what: world.seen(answer) for what, answer in answers.items()}


def do(world: World, call: Any) -> tuple[Answer, list[list[int]]]:
    if isinstance(call, Generate):
        return world.generate(call)
    return (world.retrieve(call) if isinstance(call, Retrieve) else world.abort(call.who, call.rid)), []


def settle_quietly(served: Stack) -> None:
    for worker in served.workers:
        worker.release()
        worker.wait_until_idle()
        assert worker.out_of_range == []


# -- one by one --------------------------------------------------------------------------------------------------------


def scripted(served: Stack, *pieces: str) -> dict[str, Any]:
    ids = [number for piece in pieces for number in served.spelling.encode_tail(piece)]
    return {"custom_params": {"script": {"ids": ids}}}


def finish(reply: dict[str, Any]) -> str:
    return str(reply["meta_info"]["finish_reason"]["type"])


def test_two_keys_of_a_tenant_share_what_they_know(served: Stack, space: str) -> None:
    """The trainer retrieves, with its own key, what the workflow generated with another one; the other tenant does not."""
    space_of = {"x-radix-namespace": space}
    reply = served.generate(
        {"text": "A:", "sampling_params": scripted(served, "sum", "m", "ary")}, headers={**B, **space_of}
    )
    for key, exact in ((B, True), (TRAINER, True), (A, False)):
        found = served.post("/retrieve_from_text", {"text": "A:summary"}, headers={**key, **space_of}).json()
        assert found["exact"] is exact
        assert (found["tokens"] == reply.record.input_ids + reply.record.output_ids) is exact
        assert found["loss_mask"].count(1) == (len(reply.record.output_ids) if exact else 0)


def test_an_admin_acts_as_a_tenant(served: Stack, space: str) -> None:
    """It reads that tenant's texts, and writes among them; without the header it has a memory of its own."""
    body = {"text": "A:", "sampling_params": scripted(served, "sum", "m", "ary")}
    served.generate(body, headers={**B, "x-radix-namespace": space})
    for header, exact in (({}, False), ({"x-tenant": "a"}, False), ({"x-tenant": "b"}, True)):
        headers = {**ADMIN, **header, "x-radix-namespace": space}
        assert served.post("/retrieve_from_text", {"text": "A:summary"}, headers=headers).json()["exact"] is exact
    further = {"text": "A:summary!", "sampling_params": scripted(served, "y", "es")}
    served.generate(further, headers={**ADMIN, "x-tenant": "b", "x-radix-namespace": space})
    retrieved = served.post("/retrieve_from_text", {"text": "A:summary!yes"}, headers={**B, "x-radix-namespace": space})
    assert retrieved.json()["exact"]


@pytest.mark.parametrize("key", [A, TRAINER])
def test_nobody_else_acts_as_a_tenant(served: Stack, key: dict[str, str]) -> None:
    """Not even as itself: whoever sends the header believes to be an admin."""
    answer = served.post("/retrieve_from_text", {"text": "A:"}, headers={**key, "x-tenant": "b"})
    assert answer.status == 403
    assert "--admin-key" in answer.json()["error"]["message"]


def test_a_tenant_that_there_is_not(served: Stack) -> None:
    answer = served.post("/retrieve_from_text", {"text": "A:"}, headers={**ADMIN, "x-tenant": "c"})
    assert answer.status == 400
    assert "a, b" in answer.json()["error"]["message"]


@pytest.mark.parametrize("rid", ["mine", "mi", "nobodys"])
def test_an_abort_means_nobody_elses(served: Stack, asks: list[Asking], rid: str) -> None:
    """By the same name, by how it begins, or by any: the answer is the one for an id that there is not."""
    worker = served.workers[0]
    worker.hold(after=1)
    body = {"text": "A:", "rid": "mine", "sampling_params": scripted(served, "sum", "mary")}
    asks.append(Asking(served.url, body, headers=A))
    worker.wait_for_arrivals(1)
    called = len(worker.calls)
    answer = served.post("/abort_request", {"rid": rid}, headers=B)
    assert (answer.status, answer.json()["workers"]) == (200, [])
    assert [call.path for call in worker.calls[called:]] == []
    worker.release()
    assert finish(asks[0].answer().json()) == "stop"


@pytest.mark.parametrize("key", [A, ADMIN])
def test_an_abort_by_its_owner_or_an_admin(served: Stack, asks: list[Asking], key: dict[str, str]) -> None:
    worker = served.workers[0]
    worker.hold(after=1)
    body = {"text": "A:", "rid": "mine", "sampling_params": scripted(served, "sum", "mary")}
    asks += [Asking(served.url, body, headers=owner) for owner in (A, B)]
    worker.wait_for_arrivals(2)
    assert served.post("/abort_request", {"rid": "mine"}, headers=key).status == 200
    worker.release()
    ended = [finish(asking.answer().json()) for asking in asks]
    assert ended == ["abort", "stop" if key is A else "abort"]


@pytest.mark.parametrize("body", [{"abort_all": True}, {}, {"rid": ""}, {"rid": None}, {"rid": "x", "abort_all": 1}])
def test_an_end_of_everything_is_an_admins(served: Stack, body: dict[str, Any]) -> None:
    assert served.post("/abort_request", body, headers=B).status == 403
    assert served.post("/abort_request", body, headers=ADMIN).status != 403


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "rid", "shown"),
    [
        ("A:", "mine", ["mine"]),
        ("A:", 'a "quoted" \u00fc', ['a "quoted" \u00fc']),
        (["A:", "B:"], "mine", ["mine_0", "mine_1"]),
        (["A:", "B:"], ["one", "two"], ["one", "two"]),
    ],
)
def test_names_come_back(served: Stack, prompt: Any, rid: Any, shown: list[str], stream: bool) -> None:
    """The worker has other ids, and the client never sees them; a name is good for a retrieval."""
    params = scripted(served, "sum", "mary")
    space = uuid.uuid4().hex
    body = {"text": prompt, "rid": rid, "stream": stream, "sampling_params": params}
    if isinstance(prompt, list):
        body["sampling_params"] = [params] * len(prompt)
    reply = served.generate(body, headers={**A, "x-radix-namespace": space})
    replies = reply.body if isinstance(reply.body, list) else [reply.body]
    assert {one["meta_info"]["id"] for one in replies} == set(shown)
    for record in reply.records:
        assert record.rid not in shown
        assert record.rid not in reply.answer.content.decode()
    asked = {"text": "A:summary", "request_id": shown[0], "strict": True}
    assert served.post("/retrieve_from_text", asked, headers={**A, "x-radix-namespace": space}).status == 200


def test_a_name_that_does_not_fit_is_refused(served: Stack) -> None:
    """It would reach the worker as it is."""
    for prompt, rid in (("A:", ["x"]), (["A:", "B:"], ["x"]), (["A:", "B:"], ["x", "x"]), ("A:", 7)):
        answer = served.post("/generate", {"text": prompt, "rid": rid}, headers=A)
        assert answer.status == 400, rid
        assert "rid" in answer.json()["error"]["message"]


def test_a_group_has_no_name(served: Stack) -> None:
    """Its samples get ids of the worker's own, as everywhere; but the name does not reach the worker at all."""
    params = {"n": 2, **scripted(served, "sum", "mary")}
    reply = served.generate({"text": "A:", "rid": "mine", "sampling_params": params}, headers=A)
    assert {record.rid for record in reply.records} == {one["meta_info"]["id"] for one in reply.body}
    assert b"mine" not in reply.answer.content


def test_a_second_attempt_keeps_the_name(asks: list[Asking]) -> None:
    """And an abort by that id finds it."""
    with stack(
        "qwen", styles=("cumulative",), server={"api_keys": API_KEYS}, abort=AbortConfig(attempts=2, wait=0)
    ) as served:
        worker = served.workers[0]
        worker.hold(after=1)
        body = {"text": "A:", "rid": "mine", "sampling_params": scripted(served, "sum", "mary")}
        asks.append(Asking(served.url, body, headers=A))
        worker.wait_for_arrivals(1)
        assert client.call(worker.url + "/abort_request", {"abort_all": True}).status == 200  # behind the router's back
        worker.wait_for(lambda: len(worker.log) == 2)
        worker.wait_for_arrivals(1)
        assert served.post("/abort_request", {"rid": "mine"}, headers=B).json()["workers"] == []
        assert len(served.post("/abort_request", {"rid": "mine"}, headers=A).json()["workers"]) == 1
        worker.release()
        reply = asks[0].answer().json()
        assert (reply["meta_info"]["id"], finish(reply)) == ("mine", "abort")
        assert len(worker.log) == 2
