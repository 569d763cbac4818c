"""The store is gone for a moment while replies are sampled: afterwards only those are inexact that passed over something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
import pytest

from router.config import StoreConfig
from tests.middleware_hub.store_cli.running import status
from tests.support.chat_models import chat_model
from tests.support.client import Answer, call
from tests.support.fleet import until
from tests.support.lives import Router
from tests.support.programs import Program
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack
from tests.support.usual import usual
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

CHAT = "/v1/chat/completions"
FEW = {"max_new_tokens": 6, "ignore_eos": True}


class Away(Protocol):
    """Takes the store away, and brings it back."""

    address: str

    def leave(self) -> None: ...

    def come_back(self) -> None: ...


class Killed:
    """A Redis that is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder / "redis", ("appendfsync", "always")).start()
        self.address = self.server.address

    def leave(self) -> None:
        self.server.kill()

    def come_back(self) -> None:
        self.server.start()

    def end(self) -> None:
        self.server.stop()


class Frozen(Killed):
    """A Redis that hangs."""

    def leave(self) -> None:
        self.server.freeze()

    def come_back(self) -> None:
        self.server.thaw()


class Moved:
    """A file that is moved away and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.address = f"sqlite:{self.folder}"

    def leave(self) -> None:
        self.folder.rename(self.folder.with_name("elsewhere"))

    def come_back(self) -> None:
        self.folder.with_name("elsewhere").rename(self.folder)

    def end(self) -> None:
        pass


KINDS = {"redis": Killed, "redis-hangs": Frozen, "sqlite": Moved}


@pytest.fixture(params=usual(KINDS, "redis"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Away]:
    made = KINDS[request.param](tmp_path)
    yield made
    made.end()


@pytest.fixture(params=usual(["qwen3", "qwen3_5_think", "gptoss", "glm4moe"], "qwen3"), scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    return chat_model(request.param)


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(folder, token_delay=0) as running:
        yield running


@pytest.fixture
def routers(store: Away, worker: EmbeddedWorker, folder: Path, tmp_path: Path) -> Iterator[list[Router]]:
    with ExitStack() as entered:
        made = []
        for number in range(2):
            config = StoreConfig(url=store.address, spool=f"{tmp_path}/spool{number}")
            made.append(Router(worker, config, folder=folder))
            entered.callback(made[-1].stop)
        yield made


@contextmanager
def blip(store: Away, *routers: Router) -> Iterator[None]:
    """The store is away inside, and afterwards all that waited was handed over."""
    store.leave()
    try:
        yield
    finally:
        store.come_back()
    until(lambda: not any(waits(one.stack) for one in routers), "all is handed over")


def waits(stack: Stack) -> bool:
    found = stack.get("/radix_tree/stats").json()["store"]
    return "error" in found or bool(found["waiting"])


def say(router: Router, text: str, name: str, **headers: str) -> str:
    """Return the text with a reply, which is streamed for odd names."""
    stream = name[-1] in "13579"
    sent = {f"x-radix-{key}": value for key, value in headers.items()}
    body = {"text": text, "rid": name, "sampling_params": FEW, "stream": stream}
    reply = router.stack.generate(body, headers=sent)
    last = reply.body[-1] if stream else reply.body
    spelled: str = last["text"]
    return text + spelled


def judged(router: Router, text: str, **options: Any) -> tuple[bool, list[str], list[str]]:
    found = router.stack.retrieve(text, **options)
    return found["exact"], found["reasons"], found.get("missed_request_ids", [])


INEXACT = (False, ["store_unreachable"], [])
EXACT = (True, [], [])


def test_a_reply_that_passed_over_nothing_is_exact_at_every_router(store: Away, routers: list[Router]) -> None:
    a, b = routers
    known = say(a, "You help. Why?", "before2") + " Go on."
    with blip(store, a, b):
        first = say(a, "A question. ", "r1")
        then = say(a, first + " And then? ", "r2", parent="r1")
        later = say(a, known, "after3")
        alone = say(b, "Another one. ", "s1", parent="none")
        assert judged(a, then) == INEXACT
    for one in (b, a, b):
        for text in (first, then, later, alone):
            assert judged(one, text) == EXACT
    after = say(b, then + " And now? ", "r4")
    for one in routers:
        assert judged(one, after, expect_request_ids=["r1", "r2", "r4"]) == EXACT
    for one in routers:
        one.restart()
        assert judged(one, after, expect_request_ids=["r1", "r2", "r4"]) == EXACT


def test_a_reply_that_passed_over_another_stays_inexact_and_says_which(store: Away, routers: list[Router]) -> None:
    a, b = routers
    known = say(a, "A question. ", "r1") + " And then? "
    with blip(store, a, b):
        then = say(b, known, "r2")
        both = say(a, "At once. ", "s1") + " And then? "
        late = say(b, both, "s2")
    after = say(a, then + " And now? ", "r3")
    for one in (a, b, a):
        assert judged(one, then) == (False, ["store_unreachable"], ["r1"])
        assert judged(one, after) == (False, ["store_unreachable"], ["r1"])
        assert judged(one, late) == (False, ["store_unreachable"], ["s1"])
    for one in routers:
        one.restart()
        assert judged(one, after) == (False, ["store_unreachable"], ["r1"])


def turn(router: Router, messages: list[dict[str, Any]], session: str = "", **headers: str) -> Answer:
    prefix = f"/sessions/{session}" if session else ""
    answer = router.stack.post(f"{prefix}{CHAT}", {"messages": messages, "max_tokens": 6}, headers=headers)
    assert answer.status == 200, answer.content
    return answer


def echoed(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def trajectories(router: Router, session: str, form: str = "json") -> list[dict[str, Any]]:
    answer = router.stack.get(f"/sessions/{session}/trajectories?format={form}")
    assert answer.status == 200, answer.content
    found: list[dict[str, Any]] = answer.json()["leaves" if form == "tree" else "trajectories"]
    return found


@pytest.mark.parametrize("form", ["json", "tree"])
def test_a_session_is_exact_if_its_turns_passed_over_nothing(store: Away, routers: list[Router], form: str) -> None:
    a, b = routers
    shown = [user("2+2?"), {"role": "assistant", "content": "4"}]  # of the client, so it was not sampled
    assert a.stack.post("/sessions", {"session_id": "s"}).status == 201
    turn(b, [user("Hello")], "s")  # now the other router has it, too
    with blip(store, a, b):
        asked = [*shown, user("3+3?")]
        first = turn(a, asked, "s")
        assert "store_unreachable" in first.headers["x-radix-reasons"]
        turn(a, [*asked, echoed(first), user("4+4?")], "s")
        assert trajectories(a, "s", form)[-1]["exact"] is False
    for one in (b, a):
        until(lambda one=one: len(trajectories(one, "s", form)) == 2, "both routers have all turns")
        assert [(found["exact"], [*found["reasons"]]) for found in trajectories(one, "s", form)] == [(True, [])] * 2
        assert all("missed_request_ids" not in found for found in trajectories(one, "s", form))
    b.restart()
    assert all(found["exact"] for found in trajectories(b, "s", form))
    a.stack.post("/sessions/s/finalize", {})
    assert all(found["exact"] for found in trajectories(a, "s", form))


@pytest.mark.parametrize("change", ["", " and more"])
def test_a_sessions_turn_that_passed_over_another_says_which(store: Away, routers: list[Router], change: str) -> None:
    """Also if the client changed that message: a part of it would have been kept."""
    a, b = routers
    assert a.stack.post("/sessions", {"session_id": "s"}).status == 201
    turn(b, [user("Hello")], "s")
    asked = [user("2+2?")]
    first = turn(a, asked, "s")  # the other router does not hear of it any more
    message = echoed(first)
    with blip(store, a, b):
        message["content"] = (message.get("content") or "") + change
        turn(b, [*asked, message, user("3+3?")], "s")
    name = first.headers["x-generation-id"]
    for one in (a, b):
        found = trajectories(one, "s")[-1]
        assert (found["exact"], found["reasons"][-1:]) == (False, ["store_unreachable"])
        assert found["missed_request_ids"] == [name]


def test_a_chat_without_a_session_is_exact_if_it_passed_over_nothing(store: Away, routers: list[Router]) -> None:
    a, b = routers
    before = turn(a, [user("1+1?")])
    with blip(store, a, b):
        asked = [user("2+2?")]
        first = turn(a, asked)
        second = turn(a, [*asked, echoed(first), user("3+3?")])
        passing = turn(b, [user("1+1?"), echoed(before), user("5+5?")])
    for one in routers:
        assert found_of(one, second) == EXACT
        exact, reasons, missed = found_of(one, passing)
        assert (exact, reasons) == (False, ["store_unreachable"])
        assert missed in ([inner(before)], [])  # templates write an earlier turn otherwise than it was sampled


def inner(answer: Answer) -> str:
    name: str = answer.json()["id"]
    return name.removeprefix("chatcmpl-")


def found_of(router: Router, answer: Answer) -> tuple[bool, list[str], list[str]]:
    """Return what a retrieval says of the whole text of a chat."""
    (sent,) = [one for worker in router.stack.workers for one in worker.log if one.rid == inner(answer)]
    text = router.hub.tokenizer.spell_prompt(sent.input_ids) + sent.text
    return judged(router, text, expect_request_ids=[inner(answer)])


def test_the_prompts_of_a_claim_are_asked_for_before_it_is_answered(store: Away, routers: list[Router]) -> None:
    """Samples of which nobody knew whether they are exact do not wait for a trainer that takes exact ones only."""
    a, b = routers
    known = say(a, "A question. ", "r2") + " And then? "
    member = {"x-group-id": "g", "x-group-size": "2"}
    with blip(store, a, b):
        for one, text, name in ((a, "Another. ", "exact"), (b, known, "inexact")):
            body = {"text": text, "rid": name, "sampling_params": FEW}
            one.stack.generate(body, headers={**member, "x-rollout-end": "true"})
    claim = {"exact_only": True, "allow_partial": True, "partial_after_seconds": 0}
    found = b.stack.post("/trajectories/claim", claim)
    assert found.status == 200, found.content
    (sample,) = found.json()["samples"]
    (sequence,) = sample["trajectories"]
    assert sequence["turns"][-1]["request_id"] == "exact"
    assert (sequence["exact"], sequence["reasons"]) == (True, [])


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_export_knows_what_was_passed_over(store: Away, routers: list[Router], form: str, tmp_path: Path) -> None:
    a, b = routers
    known = say(a, "A question. ", "r1") + " And then? "
    with blip(store, a, b):
        alone = say(a, say(a, "Another. ", "s1") + " And then? ", "s2")
        late = say(b, known, "r2")
    out = tmp_path / f"out.{form}"
    assert status("export", "--store", store.address, "--out", str(out)) == 0
    if form == "parquet":
        rows = {row["text"]: (row["exact"], row["reasons"]) for row in pq.read_table(out).to_pylist()}
        assert rows[alone] == (True, [])
        assert rows[late] == (False, ["store_unreachable"])
    else:
        leaves = [leaf for line in out.read_text().splitlines() for leaf in json.loads(line)["leaves"]]
        assert sorted(leaf["exact"] for leaf in leaves)[:2] == [False, True]


def test_the_inspector_knows_what_was_passed_over(store: Away, routers: list[Router]) -> None:
    a, b = routers
    known = say(a, "A question. ", "r1") + " And then? "
    with blip(store, a, b):
        then = say(a, say(a, "Another. ", "s1") + " And then? ", "s2")
        say(b, known, "r2")
    until(lambda: seen(a, "text:s1") == [True, True], lambda: str(seen(a, "text:s1")))
    assert seen(b, "text:s1") == [True, True]
    assert seen(b, "text:r2")[0] is False
    assert a.stack.post("/inspect/api/explain", {"text": then}).json()["exact"] is True


def seen(router: Router, name: str) -> list[bool]:
    """Return whether a conversation and each of its branches is exact."""
    answer = router.stack.get(f"/inspect/api/conversations/{name}")
    assert answer.status == 200, answer.content
    found = answer.json()
    return [found["exact"], *(one["exact"] for one in found["branches_list"])]


@pytest.mark.slow
def test_a_router_that_is_killed_before_it_hands_over_leaves_what_can_be_settled(tmp_path: Path) -> None:
    store = Killed(tmp_path)
    shared = ("--store-spool", str(tmp_path / "spool"))
    with ExitStack() as entered:
        entered.callback(store.end)
        worker = entered.enter_context(EmbeddedWorker(shipped_tokenizer(), token_delay=0))
        flags = ("--worker-urls", worker.url, "--tokenizer-path", str(shipped_tokenizer()))
        for name in "ab":
            (tmp_path / name).mkdir()
        a, b = (
            entered.enter_context(Program("router", *flags, "--store", store.address, *shared, folder=tmp_path / name))
            for name in "ab"
        )
        for one in (a, b):
            one.wait_until_up()
        first = call(f"{a.url}/generate", {"text": "A question. ", "rid": "r1", "sampling_params": FEW}).json()
        known = "A question. " + first["text"] + " And then? "
        store.leave()
        replies = [(a, "Another. ", "s1"), (b, known, "r2")]
        texts = []
        for one, text, name in replies:
            answer = call(f"{one.url}/generate", {"text": text, "rid": name, "sampling_params": FEW})
            assert answer.headers["x-radix-saved"] == "no"
            texts.append(text + answer.json()["text"])
        a.kill()
        store.come_back()

        def told(text: str) -> tuple[bool, list[str], list[str]]:
            found = call(f"{b.url}/retrieve_from_text", {"text": text}).json()
            return found["exact"], found["reasons"], found.get("missed_request_ids", [])

        name = {"expect_request_ids": ["s1"]}
        until(
            lambda: call(f"{b.url}/retrieve_from_text", {"text": texts[0], **name}).json()["exact"],
            "the other router hands over what the dead one left",
        )
        assert told(texts[1]) == (False, ["store_unreachable"], ["r1"])
