"""Two real routers on one store are killed under load, again and again: whatever was answered is retrieved whole, from either.

Clients of every kind go on through it: plain replies, streams, batches, several samples, sessions. Each continues its
conversation at whichever router answers. What they were told, and what the worker says it was sent, is the truth.
It kills 10 times, or `TITO_KILLS` times.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.store.protocol import Store
from middleware_hub.tokenizer.tokenizer import Tokenizer
from tests.middleware_hub.store.world import with_store
from tests.support import templates
from tests.support.client import call, stream
from tests.support.programs import Program
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

pytestmark = pytest.mark.slow

MORE = 400
"""The most replies between two kills: while routers start slowly, clients would get ever more of them, all to be checked."""
KILLS = int(os.environ.get("TITO_KILLS", "10"))
TURNS = 5
Json = dict[str, Any]
GONE = (OSError, http.client.HTTPException)
TOLD = {"return_logprob": True, "return_prompt_token_ids": True}


@dataclass(frozen=True)
class Answered:
    """A reply that a client has read to its end."""

    text: str
    sent: list[int]
    sampled: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, prompt: str, reply: Json) -> Answered:
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        return cls(prompt + reply["text"], reply["prompt_token_ids"], reply["output_ids"], logprobs)

    @property
    def chain(self) -> list[int]:
        return self.sent + self.sampled

    def check(self, found: Json) -> None:
        assert found["tokens"] == self.chain, self.text
        assert found["exact"] is True, (found["reasons"], self.text)
        count = len(self.sampled)
        assert found["loss_mask"][-count:] == [1] * count
        assert found["rollout_logp"][-count:] == self.logprobs


@dataclass
class Clients:
    """They run until `stop`. Whoever gets no answer asks again, at any router."""

    urls: Sequence[str]
    answered: list[Answered] = field(default_factory=list)
    sessions: list[tuple[str, list[list[int]]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stopping: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    most: int = MORE
    """How many replies there are when they stop for a while."""

    @property
    def url(self) -> str:
        return random.choice(self.urls)

    def ask(self, kind: str, send: Callable[[str], Any]) -> Any:
        """Return what came from the first router that answered; None if it is time to stop."""
        while not self.stopping.is_set():
            if len(self.answered) >= self.most:
                time.sleep(0.01)  # whoever sets it knows of no waiting
                continue
            with contextlib.suppress(*GONE):
                found = send(self.url)
                if found is not None:
                    self.counts[kind] += 1
                    return found
            self.counts["unanswered"] += 1
            time.sleep(0.01)  # a router that was killed needs a moment
        return None

    def heard(self, before: Answered | None, prompt: str, reply: Json) -> Answered:
        """Note a reply. Its request began with the whole conversation before it, wherever that was answered."""
        found = Answered.of(prompt, reply)
        if before is not None:
            assert found.sent[: len(before.chain)] == before.chain
        self.answered.append(found)
        return found

    def plain(self, **body: Any) -> None:
        """Conversations, each turn of which is one request of several replies or of one; the first one is continued."""
        kind = "n" if "n" in body.get("sampling_params", {}) else "stream" if "stream" in body else "plain"
        while not self.stopping.is_set():
            line: Answered | None = None
            text = f"<|im_start|>user\nNumber {next(self.numbers)}: "
            for turn in range(TURNS):
                text += f"turn {turn}, 你好.<|im_end|>\n<|im_start|>assistant\n"
                asked = {"text": text, **TOLD, **body}
                found = self.ask(kind, lambda url, asked=asked: generated(url, asked))
                if found is None:
                    return
                replies = [self.heard(line, text, one) for one in (found if isinstance(found, list) else [found])]
                line = replies[0]
                text = line.text + "<|im_end|>\n<|im_start|>user\n"

    def batches(self) -> None:
        while not self.stopping.is_set():
            texts = [f"A text of a batch, number {next(self.numbers)}: " for _ in range(4)]
            lines: list[Answered | None] = [None] * len(texts)
            for _ in range(TURNS):
                asked = {"text": texts, **TOLD, "sampling_params": {"max_new_tokens": 12}}
                found = self.ask("batch", lambda url, asked=asked: generated(url, asked))
                if found is None:
                    return
                lines = [self.heard(*one) for one in zip(lines, texts, found, strict=True)]
                texts = [f"{line.text} and on: " for line in lines if line is not None]

    def chats(self) -> None:
        """Sessions: each turn begins with the one before it."""
        while not self.stopping.is_set():
            made = self.ask("session", lambda url: posted(f"{url}/sessions", {}))
            if made is None:
                return
            turns: list[list[int]] = []
            self.sessions.append((made["session_id"], turns))
            messages = [{"role": "user", "content": f"Number {next(self.numbers)}"}]
            for turn in range(TURNS):
                path = f"/sessions/{made['session_id']}/v1/chat/completions"
                asked = {"model": "m", "messages": messages, "max_tokens": 12, "return_prompt_token_ids": True}
                reply = self.ask("turn", lambda url, path=path, asked=asked: posted(url + path, asked))
                if reply is None:
                    return
                (choice,) = reply["choices"]
                turns.append(choice["meta_info"]["prompt_token_ids"])
                messages += [choice["message"], {"role": "user", "content": f"And {turn}?"}]

    def run(self, pool: ThreadPoolExecutor) -> list[Any]:
        short = {"max_new_tokens": 12}
        kinds: list[Callable[[], None]] = [
            self.plain,
            lambda: self.plain(sampling_params=short),
            lambda: self.plain(sampling_params={"max_new_tokens": 40}, stream=True),
            lambda: self.plain(sampling_params={**short, "n": 3}),
            self.batches,
            self.chats,
            self.chats,
        ]
        return [pool.submit(kind) for kind in kinds]


def posted(url: str, body: Any) -> Any:
    """Return a reply, or None for an error of the router's: it may be on its way up or down."""
    answer = call(url, body, timeout=30)
    assert answer.status < 300 or answer.status >= 500, answer.content
    assert answer.headers.get("x-radix-saved") is None
    return answer.json() if answer.status < 300 else None


def generated(url: str, body: Json) -> Any:
    if not body.get("stream"):
        return posted(f"{url}/generate", body)
    found: Json | None = None
    for event in stream(f"{url}/generate", body, timeout=30):
        found = event
    return found


def retrieve_all(url: str, answered: Sequence[Answered]) -> None:
    for at in range(0, len(answered), 64):
        some = answered[at : at + 64]
        found = call(f"{url}/retrieve_from_text", {"text": [one.text for one in some], "return_logp": True})
        assert found.status == 200, found.content
        for one, retrieved in zip(some, found.json(), strict=True):
            one.check(retrieved)


def check_sessions(url: str, sessions: Sequence[tuple[str, list[list[int]]]], worker: EmbeddedWorker) -> None:
    """Each is one chain with all turns that were answered; what is behind the last was answered too late for its client."""
    sampled = {tuple(record.input_ids): record.output_ids for record in list(worker.log)}
    for name, turns in sessions:
        answer = call(f"{url}/sessions/{name}/trajectories")
        assert answer.status == 200, (name, answer.content)
        chains = [[*one["prompt_ids"], *one["response_ids"]] for one in answer.json()["trajectories"]]
        for sent in turns:
            assert any(chain[: len(sent)] == sent for chain in chains), name
        if turns:
            last = [*turns[-1], *sampled[tuple(turns[-1])]]
            assert any(chain[: len(last)] == last for chain in chains), name


def router(name: str, worker: str, store: Path, folder: Path) -> Program:
    template = str(templates.folder() / "qwen2_5.jinja")
    flags = ["--tokenizer-path", str(vocabulary("qwen")), "--chat-template", template, "--store", f"sqlite:{store}/"]
    return Program(name, "--worker-urls", worker, *flags, "--verify-rate", "1", folder=folder)


def test_answered_is_remembered(tmp_path: Path) -> None:
    dice = random.Random(KILLS)
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(EmbeddedWorker(vocabulary("qwen"), stream_style="cumulative"))
        routers = [router(name, worker.url, tmp_path / "store", tmp_path) for name in ("one", "two")]
        for one in routers:
            stack.enter_context(one).wait_until_up()
        clients = Clients([one.url for one in routers])
        pool = stack.enter_context(ThreadPoolExecutor(8))
        stack.callback(clients.stopping.set)
        running = clients.run(pool)
        checked = 0
        for _ in range(KILLS):
            clients.most = len(clients.answered) + MORE
            time.sleep(dice.uniform(0.05, 0.6))
            victim, other = dice.sample(routers, 2)
            known = len(clients.answered)
            victim.kill()
            # All that was answered before the kill, by either of them, is at the one that lives.
            retrieve_all(other.url, clients.answered[checked:known])
            checked = known
            victim.start()
            victim.wait_until_up()
            for one in running:
                if one.done():
                    one.result()
        clients.stopping.set()
        for one in running:
            one.result(60)
        print(dict(clients.counts), len(clients.answered), "replies", len(clients.sessions), "sessions")
        assert all(clients.counts[kind] for kind in ("plain", "stream", "n", "batch", "session", "turn", "unanswered"))
        for one in routers:
            one.kill()
            one.start()
        for one in routers:
            one.wait_until_up()
            retrieve_all(one.url, clients.answered)
            check_sessions(one.url, clients.sessions, worker)
        sampled = {(tuple(record.input_ids), tuple(record.output_ids)): tuple(record.logprobs) for record in worker.log}
    check_store(tmp_path / "store", {ids: list(floats) for ids, floats in sampled.items()})


def check_store(folder: Path, sampled: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]]) -> None:
    """Nothing is in the store twice, and no reply that the worker did not give; all of it is whole."""

    async def work(store: Store) -> None:
        names: Counter[str] = Counter()
        given = {output for _, output in sampled}
        async for record in store.scan():
            if record.sampled:
                names.update(record.request_ids)
                ids = tuple(memoryview(record.ids).cast("i"))
                assert ids in given, record
        assert names
        assert max(names.values()) == 1, names.most_common(3)
        assert [one async for one in store.verify() if one.kind != "file"] == []

    with_store(f"sqlite:{folder}/", work, Tokenizer.load(str(vocabulary("qwen"))).fingerprint)
