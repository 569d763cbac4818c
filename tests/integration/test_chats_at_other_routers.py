"""Chats without a session, at routers over one store: what a worker is sent is what one router that never died would send."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.radix.records import NO_PARENT
from middleware_hub.sessions.log import chat_notes
from middleware_hub.store.errors import StoreUnreachableError
from middleware_hub.store.look_up import MOST_NAMED
from router.config import StoreConfig
from tests.middleware_hub.store_cli.running import status
from tests.support.agents import TOOLS, system, user
from tests.support.asking import until
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.lives import Router
from tests.support.redis_server import empty_redis, shared
from tests.support.stack import events
from tests.support.usual import usual
from worker.worker import EmbeddedWorker

HEADERS = (
    *("x-radix-recorded", "x-radix-reused-tokens", "x-radix-prompt-tokens", "x-radix-reasons", "x-radix-saved"),
    "x-radix-spliced-turns",
)
PATH = "/v1/chat/completions"
Message = dict[str, Any]


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(chat_model("qwen3"), token_delay=0) as running:
        yield running


@dataclass
class Said:
    """A conversation up to a reply, and the reply's ids at the router that never dies and at the others."""

    prompt: list[Message]
    reply: Message
    names: tuple[str, str]
    options: dict[str, Any]
    namespace: str


def spelled(worker: EmbeddedWorker, text: str) -> list[int]:
    """Letter by letter: encoding the text gives other ids."""
    return [one for letter in text for one in worker.vocabulary.encode_bare(letter)]


class Client:
    """Asks the router that never dies, and then one of the others, the same."""

    def __init__(self, seed: int, worker: EmbeddedWorker, one: Router, others: list[Router]) -> None:
        self.random = random.Random(seed)
        self.worker, self.one, self.others = worker, one, others
        self.said: list[Said] = []
        self.kept = 0

    def ask(
        self,
        messages: list[Message],
        ids: list[int],
        options: dict[str, Any],
        *,
        namespace: str = "",
        parent: tuple[str, str] | None = None,
        router: Router | None = None,
    ) -> Said:
        body = {"model": "m", "messages": messages, **options}
        sides, names = [], []
        for side, asked in enumerate((self.one, router or self.random.choice(self.others))):
            headers = {"x-radix-namespace": namespace} if namespace else {}
            if parent is not None:
                headers["x-parent-generation"] = parent[side]
            self.worker.script(ids)
            begin = len(self.worker.log)
            answer = asked.stack.post(PATH, body, headers=headers)
            assert answer.status == 200, answer.content
            (record,) = self.worker.log[begin:]
            told = {name: answer.headers.get(name) for name in HEADERS}
            sides.append((told, list(record.input_ids), record.body["sampling_params"], message_of(answer, body)))
            names.append(answer.headers["x-generation-id"])
        assert sides[1] == sides[0], json.dumps(body)
        self.kept += int(sides[1][0]["x-radix-reused-tokens"])
        made = Said(messages, sides[0][3], (names[0], names[1]), options, namespace)
        self.said.append(made)
        return made

    def step(self) -> None:
        rng = self.random
        if rng.random() < 0.15:
            rng.choice(self.others).restart()
        thought = rng.choice(["", "<think>\nhm\n</think>\n\n", "<think>\noh\n</think>\n\n"])
        ids = spelled(self.worker, thought + rng.choice(["Yes.", "No.", " Well,  then. "]))
        if not self.said or rng.random() < 0.2:
            options: dict[str, Any] = rng.choice([{}, {"tools": TOOLS}])
            messages = [*rng.choice([[], [system("Be brief.")]]), user(rng.choice(["Hi", "Who?"]))]
            self.ask(messages, ids, options, namespace=rng.choice(["", "", "eval"]))
            return
        before = rng.choice(self.said[-8:])
        options = dict(before.options)
        if rng.random() < 0.15:
            options = rng.choice([{}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}])
        if rng.random() < 0.3:
            options["stream"] = not options.get("stream", False)
        if rng.random() < 0.15:
            self.ask(before.prompt, ids, options, namespace=before.namespace)
            return
        messages = [*before.prompt, echo(rng, before.reply), user(rng.choice(["And?", "Why?"]))]
        parent = rng.choices([None, before.names, (NO_PARENT, NO_PARENT)], [6, 3, 1])[0]
        self.ask(messages, ids, options, namespace=before.namespace, parent=parent)


def message_of(answer: Answer, body: dict[str, Any]) -> Message:
    if not body.get("stream"):
        found: Message = answer.json()["choices"][0]["message"]
        return {"role": "assistant", **{key: value for key, value in found.items() if value and key != "role"}}
    whole: Message = {"role": "assistant"}
    for event in events(answer):
        for choice in event["choices"]:
            for key in ("content", "reasoning_content"):
                if piece := choice["delta"].get(key):
                    whole[key] = whole.get(key, "") + piece
    return whole


def said(content: str) -> Message:
    return {"role": "assistant", "content": content}


def echo(rng: random.Random, reply: Message) -> Message:
    """A reply as a client may send it back: as it came, without the thought, stripped, or edited."""
    how = rng.random()
    content = reply.get("content", "")
    if how < 0.4:
        return reply
    if how < 0.7:
        return said(content)
    if how < 0.85:
        return said(content.strip())
    return said(content + rng.choice(["", " Indeed."]))


def store_of(kind: str, folder: Path) -> StoreConfig:
    return StoreConfig(url=empty_redis() if kind == "redis" else f"sqlite:{folder / 'store.sqlite3'}")


MATRIX = [
    (routers, budget, kind, seed)
    for routers, budget in [(1, None), (2, None), (3, 40)]
    for kind in ("sqlite", "redis")
    for seed in range(4)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routers", "budget", "kind", "seed"),
    usual(MATRIX, (3, 40, "sqlite", 3)),
)
def test_routers_over_a_store_answer_as_one_that_never_died(
    worker: EmbeddedWorker, tmp_path: Path, routers: int, budget: int | None, kind: str, seed: int
) -> None:
    folder, store = chat_model("qwen3"), store_of(kind, tmp_path)
    one = Router(worker, None, folder=folder)
    others = [Router(worker, store, budget, session_tokens=budget and 8 * 300, folder=folder) for _ in range(routers)]
    client = Client(seed, worker, one, others)
    try:
        for _ in range(50):
            client.step()
        assert client.kept > 1000, "or nothing was continued"
        stats = others[0].stack.get("/radix_tree/stats").json()
        assert stats["store"]["lost"] == stats["store"]["unsaved"] == 0
    finally:
        for router in [one, *others]:
            router.stop()


def turn(router: Router, messages: list[Message], **headers: str) -> Answer:
    answer = router.stack.post(PATH, {"model": "m", "messages": messages}, headers=headers)
    assert answer.status == 200, answer.content
    return answer


def fails(*_: Any, **__: Any) -> Any:
    raise StoreUnreachableError("the disk is full: make room")


@pytest.fixture
def router(worker: EmbeddedWorker, tmp_path: Path) -> Iterator[Router]:
    running = Router(worker, store_of("sqlite", tmp_path), folder=chat_model("qwen3"))
    yield running
    running.stop()


@pytest.mark.parametrize("thought", [" 0 ", "0"], ids=["as it was", "stripped"])
def test_of_many_equal_replies_the_client_means_the_one_with_its_thought(
    worker: EmbeddedWorker, router: Router, thought: str
) -> None:
    opening = [user("Hello")]
    chains = []
    for number in range(MOST_NAMED + 2):
        worker.script(spelled(worker, f"<think>\n {number} \n</think>\n\nHi."))
        turn(router, opening)
        chains.append([*worker.log[-1].input_ids, *worker.log[-1].output_ids])
    router.restart()
    turn(router, [*opening, {**said("Hi."), "reasoning_content": thought}, user("And?")])
    assert list(worker.log[-1].input_ids)[: len(chains[0])] == chains[0]


def test_a_long_chat_is_asked_for_in_parts(
    worker: EmbeddedWorker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_notes, "_AT_ONCE", 3)
    messages = [user("Hello")]
    for number in range(9):
        worker.script(spelled(worker, f"<think>\nhm\n</think>\n\nReply {number}."))
        turn(router, messages)
        messages = [*messages, said(f"Reply {number}."), user("And?")]
    chain = [*worker.log[-1].input_ids, *worker.log[-1].output_ids]
    router.restart()
    assert "x-radix-reasons" not in turn(router, messages).headers
    assert list(worker.log[-1].input_ids)[: len(chain)] == chain


def test_a_chat_that_could_not_be_saved_says_so_and_is_known_after_the_store_is_back(
    worker: EmbeddedWorker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = [user("Hello")]
    with monkeypatch.context() as broken:
        broken.setattr(router.store, "append", fails)
        worker.script(spelled(worker, "<think>\nhm\n</think>\n\nHi."))
        first = turn(router, opening)
        assert first.headers["x-radix-saved"] == "no"
    chain = [*worker.log[-1].input_ids, *worker.log[-1].output_ids]
    router.restart()
    second = turn(router, [*opening, said("Hi."), user("And?")])
    assert list(worker.log[-1].input_ids)[: len(chain)] == chain
    assert "x-radix-saved" not in second.headers


def test_a_chat_that_could_not_be_looked_up_says_so(
    worker: EmbeddedWorker, router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each answer says it. The log says it once: a store that is away for ten minutes would fill it."""
    opening = [user("Hello")]
    worker.script(spelled(worker, "<think>\nhm\n</think>\n\nHi."))
    turn(router, opening)
    chain = [*worker.log[-1].input_ids, *worker.log[-1].output_ids]
    router.restart()
    again = [*opening, said("Hi."), user("And?")]
    with monkeypatch.context() as broken:
        broken.setattr(router.store, "find", fails)
        blind = turn(router, again)
        assert "store_unreachable" in blind.headers["x-radix-reasons"]
        assert list(worker.log[-1].input_ids)[: len(chain)] != chain
        assert "store_unreachable" in turn(router, [*opening, said("Hi."), user("Or?")]).headers["x-radix-reasons"]
    assert caplog.text.count("this process knows chats only as far as it served them") == 1
    sighted = turn(router, again)
    assert "x-radix-reasons" not in sighted.headers
    assert list(worker.log[-1].input_ids)[: len(chain)] == chain


def test_a_chat_is_known_although_redis_has_lost_it(worker: EmbeddedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router that knows it writes it again, a few notes at a time, and the next one finds it by its messages."""
    monkeypatch.setattr(chat_notes, "_WRITTEN_AT_ONCE", 2)
    running = Router(worker, StoreConfig(url=empty_redis()), folder=chat_model("qwen3"))
    try:
        messages = [user("Hello")]
        for number in range(5):
            worker.script(spelled(worker, f"<think>\nhm\n</think>\n\nReply {number}."))
            turn(running, messages)
            messages = [*messages, said(f"Reply {number}."), user("And?")]
        chain = [*worker.log[-1].input_ids, *worker.log[-1].output_ids]
        assert shared().say("FLUSHALL").startswith("+OK")
        until(lambda: "x-radix-saved" not in turn(running, [user("Is it back?")]).headers)
        running.restart()
        turn(running, messages)
        assert list(worker.log[-1].input_ids)[: len(chain)] == chain
    finally:
        running.stop()


def test_the_store_commands_see_replies_and_no_notes(
    worker: EmbeddedWorker, router: Router, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note has no tokens: it is no row of an export, hides none, is in order for `verify`, and goes with its conversation."""
    opening = [user("Hello")]
    worker.script(spelled(worker, "Hi."), times=2)
    turn(router, opening)
    turn(router, [*opening, said("Hi."), user("And?")])
    router.stop()
    url = f"sqlite:{tmp_path / 'store.sqlite3'}"
    out = tmp_path / "rows.jsonl"
    assert status("export", "--store", url, "--out", str(out), "--format", "tree") == 0
    (line,) = out.read_text().splitlines()
    assert line.count('"mask":1') == 2, line
    assert status("verify", "--store", url) == 0
    capsys.readouterr()
    assert status("stats", "--store", url, "--tokens", "--json") == 0
    assert json.loads(capsys.readouterr().out)["turns"] == 2
    assert status("prune", "--store", url, "--unused-for", "0s", "--unretrieved") == 0
    capsys.readouterr()
    assert status("stats", "--store", url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["records"] == 0
    router.start()
