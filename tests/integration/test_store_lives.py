"""Routers over one store answer as one that never died: what a client sees, over HTTP, whichever router it asks."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.errors import StoreUnreachableError
from router.config import StoreConfig
from tests.support.client import Answer
from tests.support.lives import Router, tokenizer_of
from tests.support.redis_server import empty_redis
from tests.support.stack import events
from tests.support.usual import usual
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

TIMES = ("e2e_latency", "cached_tokens", "queue_time", "response_sent_to_client_ts")
HEADERS = ("x-radix-recorded", "x-radix-reused-tokens", "x-radix-prompt-tokens", "x-radix-reasons", "x-radix-saved")


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(token_delay=0, weight_version="0") as running:
        yield running


@dataclass
class Said:
    text: str
    rid: str
    namespace: str
    reply: str


def without(value: Any, names: Sequence[str]) -> Any:
    """A value without the fields of these names, however deep."""
    if isinstance(value, dict):
        return {key: without(one, names) for key, one in value.items() if key not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


def visible(answer: Answer, names: Sequence[str], unlike: Sequence[str], *, stream: bool) -> Any:
    """All of an answer but for times and the fields in `unlike`, with the headers of these names."""
    assert answer.status in (200, 404, 409), answer.content
    headers = {name: answer.headers.get(name) for name in names}
    body = events(answer)[-1:] if stream else answer.json()
    return answer.status, headers, without(body, (*TIMES, *unlike))


def sent(body: dict[str, Any]) -> dict[str, Any]:
    """What a worker was sent, but for the names that a router makes up."""
    return {key: value for key, value in body.items() if key != "rid"}


class Client:
    """Makes the same requests of the router that never dies, and of one of those that do."""

    headers = HEADERS

    def __init__(self, seed: int, worker: EmbeddedWorker, one: Router, others: list[Router]) -> None:
        self.random = random.Random(seed)
        self.worker, self.one, self.others = worker, one, others
        self.said: list[Said] = []
        self.samples: list[str] = []
        self.count = 0

    def both(
        self, path: str, body: Any, headers: dict[str, str], *, stream: bool = False, unlike: Sequence[str] = ()
    ) -> Any:
        sides = []
        for router in (self.one, self.random.choice(self.others)):
            begin = len(self.worker.log)
            answer = visible(router.stack.post(path, body, headers=headers), self.headers, unlike, stream=stream)
            sides.append((answer, [sent(record.body) for record in self.worker.log[begin:]]))
        assert sides[1] == sides[0], json.dumps(body)[:1000]
        return sides[1][0][2]

    def step(self) -> None:
        rng = self.random
        kind = rng.choice(
            ["generate"] * 5 + ["ids", "batch", "several", "retrieve", "cover", "restart", "chat", "version"]
        )
        if kind == "restart":
            rng.choice(self.others).restart()
        elif kind == "version":
            self.worker.set_weight_version(str(int(self.worker.weight_version) + 1))
        elif kind == "several":
            self.several()
        elif kind == "chat":
            self.chat()
        elif kind in ("retrieve", "cover"):
            self.retrieve(cover=kind == "cover")
        else:
            self.generate(kind)

    def text(self) -> tuple[str, str]:
        """A prompt and its namespace: new, or on from one before, whole, edited, or cut."""
        rng = self.random
        namespace = rng.choice(["", "", "eval"])
        if not self.said or rng.random() < 0.2:
            begin = rng.choice(["You are an agent. " * 30, "", "Hello there. "])
            return begin + rng.choice(["What is 2+2?", "Where am I?", "Sing."]), namespace
        before = rng.choice(self.said)
        text = before.text + before.reply
        how = rng.random()
        if how < 0.5:
            text += rng.choice(["<|im_end|>\nAnd then?", " Go on.", "\nObservation: nothing. ", ""])
        elif how < 0.7:
            text = text[: -rng.randrange(1, 6)] + " no,"
        elif how < 0.85:
            text = before.text
        else:
            text = text.rstrip() + " Well."
        return text, before.namespace

    def generate(self, kind: str) -> None:
        rng, self.count = self.random, self.count + 1
        text, namespace = self.text()
        rid = f"r{self.count}"
        body: dict[str, Any] = {
            "text": text,
            "rid": rid,
            "sampling_params": {"max_new_tokens": rng.randrange(1, 12), "sampling_seed": rng.randrange(3)},
        }
        if (
            rng.random() < 0.25
        ):  # a stop string begins in a token, perhaps in the only one, or the only token is an end token
            pieces = rng.choice([[" nothing"], [" Go", " nothing"], [" Go", "."], []])
            encode = tokenizer_of(shipped_tokenizer()).encode_tail
            ids = [number for piece in pieces for number in encode(piece)]
            body["sampling_params"] = {
                "stop": ["hing"],
                "max_new_tokens": 12,
                "custom_params": {"script": {"ids": ids, "finish": "eos"}},
            }
        body |= self.options(body["sampling_params"])
        headers = {"x-radix-namespace": namespace} if namespace else {}
        if self.said and rng.random() < 0.3:
            headers["x-radix-parent"] = rng.choice([one.rid for one in self.said[-6:]] + ["none", "nobody"])
        if kind == "ids" and self.said:
            before = rng.choice(self.said)
            text = before.text + before.reply
            headers = {"x-radix-namespace": before.namespace} if before.namespace else {}
            found = self.both("/retrieve_from_text", {"text": text}, headers)
            ids = found["tokens"] + rng.choice([[], [100, 200], [32, 33]])
            body["input_ids"], body["text"] = ids, None
            del body["text"]
            text, namespace = tokenizer_of(shipped_tokenizer()).spell_prompt(ids), before.namespace
        elif kind == "batch":
            other, _ = self.text()
            body["text"], body["rid"] = [text, other], [rid, f"{rid}b"]
        elif rng.random() < 0.3:
            body["stream"] = True
        found = self.both("/generate", body, headers, stream=bool(body.get("stream")))
        if body.get("stream"):
            self.said.append(Said(text, rid, namespace, found[-1]["text"]))
        elif kind == "batch":
            for prompt, name, reply in zip(body["text"], body["rid"], found, strict=True):
                self.said.append(Said(prompt, name, namespace, reply["text"]))
        else:
            self.said.append(Said(text, rid, namespace, found["text"]))

    def options(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Add stops to the sampling parameters, and return what is asked for besides."""
        rng = self.random
        go: Sequence[int] = tokenizer_of(shipped_tokenizer()).encode_tail(" Go")
        sampling |= rng.choice([{}, {}, {"stop_regex": ["[.,]"]}, {"stop_regex": "o."}, {"stop_token_ids": [*go]}])
        sampling |= {name: True for name in ("no_stop_trim", "ignore_eos") if rng.random() < 0.2}
        return rng.choice([{}, {}, {"return_logprob": True}, {"return_logprob": True, "top_logprobs_num": 2}])

    def several(self) -> None:
        """Two samples of one prompt. Workers name them, so they are kept apart from all others."""
        rng = self.random
        text = rng.choice(["What is 2+2?", *self.samples]) + rng.choice([" Go on.", "<|im_end|>\n", ""])
        sampling = {"max_new_tokens": rng.randrange(1, 8), "sampling_seed": rng.randrange(3), "n": 2}
        headers = {"x-radix-namespace": "samples"}
        for reply in self.both("/generate", {"text": text, "sampling_params": sampling}, headers, unlike=("id",)):
            self.samples.append(text + reply["text"])
            body = {"text": text + reply["text"]}
            self.both("/retrieve_from_text", body, headers, unlike=("request_id", "request_ids"))

    def retrieve(self, *, cover: bool) -> None:
        if not self.said:
            return
        rng = self.random
        one = rng.choice(self.said)
        body: dict[str, Any] = {"text": one.text + one.reply}
        if cover or rng.random() < 0.3:
            body["expect_request_ids"] = [rng.choice(self.said).rid for _ in range(3)]
            body["cover"] = cover
        elif rng.random() < 0.3:
            body["request_id"] = rng.choice(self.said).rid
        elif rng.random() < 0.5:
            body["text"] = body["text"][: -rng.randrange(1, 9)] or "a"
        self.both("/retrieve_from_text", body, {"x-radix-namespace": one.namespace} if one.namespace else {})

    def chat(self) -> None:
        messages = [{"role": "user", "content": self.random.choice(["Hi", "Who are you?"])}]
        body = {"model": "m", "messages": messages, "max_tokens": 6, "seed": 1}
        for router in (self.one, self.random.choice(self.others)):
            assert router.stack.post("/v1/chat/completions", body).status == 200


MATRIX = [
    (routers, budget, kind, seed)
    for routers, budget in [(1, None), (2, None), (1, 40), (2, 1), (3, 40)]
    for kind, seed in [("sqlite", 0), ("sqlite", 1), ("redis", 0), ("redis", 1)]
]


@pytest.mark.parametrize(
    ("routers", "budget", "kind", "seed"),
    usual(MATRIX, (2, 1, "redis", 1)),
)
def test_routers_over_a_store_answer_as_one_that_never_died(
    worker: EmbeddedWorker, tmp_path: Path, routers: int, budget: int | None, kind: str, seed: int
) -> None:
    store = StoreConfig(url=empty_redis() if kind == "redis" else f"sqlite:{tmp_path / 'store.sqlite3'}")
    one = Router(worker, None)
    others = [Router(worker, store, budget) for _ in range(routers)]
    client = Client(seed, worker, one, others)
    try:
        for _ in range(60):
            client.step()
        for said in client.said:
            headers = {"x-radix-namespace": said.namespace} if said.namespace else {}
            body = {"text": said.text + said.reply, "request_id": said.rid, "expect_request_ids": [said.rid]}
            client.both("/retrieve_from_text", body, headers)
        for router in others:
            router.restart()
        for namespace in {said.namespace for said in client.said}:
            of_it = [said for said in client.said if said.namespace == namespace]
            headers = {"x-radix-namespace": namespace} if namespace else {}
            names, last = [said.rid for said in of_it[::2]], of_it[-1]
            body = {"text": last.text + last.reply, "cover": True, "expect_request_ids": names}
            client.both("/retrieve_from_text", body, headers)
        stats = others[0].stack.get("/radix_tree/stats").json()
        assert stats["store"]["lost"] == stats["store"]["unsaved"] == 0
        assert "never_retrieved" not in stats["evictions"]
    finally:
        for router in [one, *others]:
            router.stop()


def _fails(*_: Any, **__: Any) -> Any:
    raise StoreUnreachableError("the disk is full: make room")


def test_a_reply_is_sent_although_the_store_takes_no_writes_and_is_handed_over_later(
    worker: EmbeddedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(worker, StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}"))
    try:
        sampling = {"max_new_tokens": 5, "sampling_seed": 1}
        with monkeypatch.context() as broken:
            broken.setattr(router.store, "append", _fails)
            first = router.stack.post("/generate", {"text": "One, two,", "rid": "a", "sampling_params": sampling})
            text = "One, two," + first.json()["text"]
            second = router.stack.post("/generate", {"text": text + " so", "rid": "b", "sampling_params": sampling})
            assert first.headers["x-radix-saved"] == second.headers["x-radix-saved"] == "no"
            stream = {"text": text + " then", "rid": "c", "stream": True, "sampling_params": sampling}
            assert events(router.stack.post("/generate", stream))
            counts = router.stack.get("/radix_tree/stats").json()["store"]
            assert (counts["saved"], counts["unsaved"], counts["waiting"]) == (0, 3, 3)
        router.restart()
        whole = text + " so" + second.json()["text"]
        found = router.stack.retrieve(whole)
        assert found["exact"]
        assert [turn["request_id"] for turn in found["turns"]] == ["a", "b"]
    finally:
        router.stop()


def test_versions_that_only_sessions_saw_have_their_order_at_another_router(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}")
    with EmbeddedWorker(token_delay=0, weight_version="before") as worker:
        routers = [Router(worker, store)]
        try:
            assert routers[0].stack.post("/sessions", {"session_id": "s"}).status == 201
            messages: list[Any] = [{"role": "user", "content": "One?"}]
            for version in ("before", "after"):  # not the order of the alphabet
                worker.set_weight_version(version)
                body = {"model": "m", "messages": messages, "max_tokens": 4}
                reply = routers[0].stack.post("/sessions/s/v1/chat/completions", body).json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
            routers.append(Router(worker, store))
            known = [one.stack.get("/radix_tree/stats").json()["weight_versions"] for one in routers]
            assert known == [["default", "before", "after"]] * 2
        finally:
            for one in routers:
                one.stop()


def test_a_router_that_refuses_without_its_store_samples_nothing_while_a_reply_waits_for_it(
    worker: EmbeddedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store can be read all the time: only writes fail."""
    router = Router(worker, StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}", failure="refuse"))
    try:
        body = {"text": "One, two,", "sampling_params": {"max_new_tokens": 5}}
        with monkeypatch.context() as broken:
            broken.setattr(router.store, "append", _fails)
            first = router.stack.post("/generate", body)
            assert (first.status, first.headers["x-radix-saved"]) == (200, "no")
            asked = len(worker.log)
            second = router.stack.post("/generate", body)
            assert (second.status, len(worker.log)) == (503, asked)
            assert "the disk is full" in second.json()["error"]["message"]
    finally:
        router.stop()


def test_what_cannot_be_looked_up_is_not_exact(
    worker: EmbeddedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(worker, StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}"))
    try:
        sampling = {"max_new_tokens": 5, "sampling_seed": 1}
        first = router.stack.post("/generate", {"text": "One, two,", "sampling_params": sampling}).json()
        text = "One, two," + first["text"]
        router.restart()
        with monkeypatch.context() as broken:
            broken.setattr(router.store, "find", _fails)
            found = router.stack.retrieve(text)
            assert not found["exact"]
            assert "store_unreachable" in found["reasons"]
            named = router.stack.retrieve(text, request_id=first["meta_info"]["id"])
            assert not named["exact"]
            assert {*named["reasons"]} == {*found["reasons"], "unknown_reply"}, "the store may have it"
            second = router.stack.post("/generate", {"text": text + " so", "sampling_params": sampling})
            assert second.headers["x-radix-reasons"] == "store_unreachable"
        found = router.stack.retrieve(text)
        assert found["exact"]
        assert found["reasons"] == []
        found = router.stack.retrieve(text + " so" + second.json()["text"])
        assert not found["exact"], "its prompt was encoded without what was sampled of it"
        assert found["reasons"] == ["store_unreachable"]
    finally:
        router.stop()


def test_a_router_that_does_not_know_where_a_text_leaves_a_prompt_says_so(
    worker: EmbeddedWorker, tmp_path: Path
) -> None:
    router = Router(worker, StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}"))
    try:
        text, asked = "Where am I?", "\nObservation: a room. And now?"
        for more in ("", asked):
            body = {"text": text + more, "sampling_params": {"max_new_tokens": 5, "sampling_seed": 1}}
            before, text = text, text + more + router.stack.post("/generate", body).json()["text"]
        other = before + asked.replace("room", "hall")
        known = router.stack.post("/radix_tree/explain", {"text": other}).json()
        assert known["recorded"]["after"].startswith("room.")
        router.restart()
        restored = router.stack.post("/radix_tree/explain", {"text": other}).json()
        assert restored["matched_chars"] == len(before)
        assert "was sent through another router" in restored["message"]
    finally:
        router.stop()


def test_a_router_logs_its_store_at_its_start_without_a_password(
    worker: EmbeddedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    address = empty_redis()
    with caplog.at_level(logging.INFO):
        router = Router(worker, StoreConfig(url=address.replace("//", "//default:topsecret@")))
        router.stop()
    assert [line for line in caplog.messages if line.startswith("the store is ")] == [
        f"the store is {address.replace('//', '//***@')}"
    ]
    assert "topsecret" not in caplog.text


def test_a_router_logs_how_much_is_in_its_store(
    worker: EmbeddedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt path, or another working directory, begins with an empty store."""
    monkeypatch.chdir(tmp_path)
    told = f"conversations in sqlite:{tmp_path.resolve()}/runs/store.sqlite3: "
    with caplog.at_level(logging.INFO):
        for expected in "0 (it is empty)", "1":
            router = Router(worker, StoreConfig(url="sqlite:runs"))
            try:
                router.stack.generate({"text": "Hello", "sampling_params": {"max_new_tokens": 2}})
            finally:
                router.stop()
            assert [line for line in caplog.messages if line.startswith("conversations in ")][-1] == told + expected
