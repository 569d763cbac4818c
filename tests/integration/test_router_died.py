"""A real router with `--store`, killed by SIGKILL and started again: what was answered is there, whole."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.client import Answer, call
from tests.support.programs import ROOT, Program
from tests.support.vocabularies import vocabulary
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

SAMPLING = {"max_new_tokens": 24, "temperature": 1.0, "stop": ["\n"]}


class Town:
    """A router with a store, in front of two workers whose logs are the truth."""

    def __init__(self, folder: Path, workers: list[EmbeddedWorker]) -> None:
        self.store = f"sqlite:{folder / 'store'}"
        self.workers = workers
        flags = ["--tokenizer-path", str(shipped_tokenizer()), "--policy", "round_robin", "--store", self.store]
        self.router = Program("router", *flags, "--worker-urls", *(worker.url for worker in workers), folder=folder)

    def kill_and_start(self) -> None:
        self.router.kill()
        self.start()

    def start(self) -> None:
        self.router.start()
        self.router.wait_until_up()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        answer = call(
            f"{self.router.url}{path}", body, headers={name.replace("_", "-"): v for name, v in headers.items()}
        )
        assert answer.status == 200, answer.content
        return answer

    def generate(self, text: str, *, seed: int, **headers: str) -> dict[str, Any]:
        body = {"text": text, "return_logprob": True, "sampling_params": {**SAMPLING, "sampling_seed": seed}}
        found: dict[str, Any] = self.post("/generate", body, **headers).json()
        return found

    def retrieve(self, text: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.post("/retrieve_from_text", {"text": text, **options}).json()
        return found

    def read(self, ids: list[int]) -> bool:
        """Return whether a worker has consumed and sampled just these ids, in one generation."""
        return any(record.input_ids + record.output_ids == ids for worker in self.workers for record in worker.log)


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with EmbeddedWorker(seed=0) as first, EmbeddedWorker(seed=1) as second:
        found = Town(tmp_path, [first, second])
        try:
            found.start()
            yield found
        finally:
            found.router.stop()


def talk(town: Town, turns: int, *, die: bool, seed: int = 0) -> tuple[str, list[str]]:
    """Play a conversation, and kill the router after each turn, or never; return its text and its replies' names."""
    text, names = "Answer the question.", list[str]()
    for turn in range(turns):
        text += f"\nQuestion: How long is the river number {turn}?\nThought:"
        parent = {"x_radix_parent": names[-1]} if names else {}
        reply = town.generate(text, seed=100 * seed + turn, **parent)
        text += reply["text"]
        names.append(reply["meta_info"]["id"])
        if die:
            town.kill_and_start()
    return text, names


def test_a_conversation_lives_through_its_router(town: Town) -> None:
    """Killed after every turn, it is one sequence, which a worker has read whole; and no answer changes."""
    text, names = talk(town, 3, die=True)
    found = town.retrieve(text, expect_request_ids=names)
    assert found["exact"]
    assert found["reasons"] == []
    assert [turn["request_id"] for turn in found["turns"]] == names
    assert town.read(found["tokens"])
    sampled = [record for worker in town.workers for record in worker.log]
    logprobs = [value for record in sampled for value in record.logprobs]
    of_mask = [value for value, mask in zip(found["rollout_logp"], found["loss_mask"], strict=True) if mask]
    assert sorted(of_mask) == sorted(logprobs)
    town.kill_and_start()
    assert town.retrieve(text, expect_request_ids=names) == found


@pytest.mark.slow
def test_a_session_lives_through_its_router(town: Town) -> None:
    """Killed after every turn: the same id, one branch, which a worker has read whole, and the same export twice."""
    session = call(f"{town.router.url}/sessions", {"metadata": {"task": 7}}).json()["session_id"]
    path = f"/sessions/{session}"
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You answer in one line."}]
    for turn in range(3):
        messages.append({"role": "user", "content": f"How long is the river number {turn}?"})
        body = {"messages": messages, "max_tokens": 24, "seed": turn}
        messages.append(town.post(f"{path}/v1/chat/completions", body).json()["choices"][0]["message"])
        town.kill_and_start()
    assert call(f"{town.router.url}{path}").json()["metadata"] == {"task": 7}
    found = town.post(f"{path}/finalize", {}).content
    town.kill_and_start()
    assert town.post(f"{path}/finalize", {}).content == found
    (one,) = json.loads(found)["trajectories"]
    assert (one["exact"], one["num_turns"]) == (True, 3)
    assert town.read(one["prompt_ids"] + one["response_ids"])


@pytest.mark.slow
def test_a_restart_changes_no_prompt(town: Town) -> None:
    """The same conversation with and without deaths: the workers read the same ids."""
    talk(town, 3, die=False)
    lived = [record.input_ids for worker in town.workers for record in worker.log]
    for worker in town.workers:
        worker.log.clear()
    town.router.kill()
    Path(town.store.removeprefix("sqlite:")).rename(Path(town.store.removeprefix("sqlite:") + "-before"))
    town.start()
    talk(town, 3, die=True)
    died = [record.input_ids for worker in town.workers for record in worker.log]
    assert sorted(died) == sorted(lived)


@pytest.mark.slow
def test_whatever_was_answered_before_it_died_is_there(town: Town) -> None:
    """Killed with eight clients in mid-turn: each answered reply is retrieved whole, by its text and by its name."""
    answered: list[tuple[str, dict[str, Any]]] = []
    enough = threading.Event()

    def client(number: int) -> None:
        text = f"Client {number} asks."
        for turn in range(50):
            text += f"\nQuestion: {turn}?\nThought:"
            try:
                reply = town.generate(text, seed=1_000 * number + turn)
            except (OSError, http.client.HTTPException):
                return
            text += reply["text"]
            answered.append((text, reply))
            if len(answered) > 60:
                enough.set()

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client, number) for number in range(8)]
        assert enough.wait(60)
        town.router.kill()
        for one in running:
            one.result()
    town.start()
    for text, reply in answered:
        found = town.retrieve(text, request_id=reply["meta_info"]["id"])
        assert found["exact"]
        count = len(reply["output_ids"])
        assert found["tokens"][-count:] == reply["output_ids"]
        assert found["loss_mask"][-count:] == [1] * count
        assert found["rollout_logp"][-count:] == [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


@pytest.mark.slow
def test_offline_commands_agree_with_the_router(town: Town, tmp_path: Path) -> None:
    """Beside the router, and after its death: `verify` finds nothing, `export` has what is retrieved."""
    texts = dict(talk(town, 3, die=False, seed=seed) for seed in range(3))

    def store(*arguments: str) -> str:
        command = [sys.executable, "-m", "router", "store", *arguments, "--store", town.store]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for _ in range(2):
        assert "nothing is wrong" in store("verify")
        assert json.loads(store("stats", "--json"))["conversations"] >= 1
        store("export", "--out", str(tmp_path / "rows.parquet"))
        rows = {row["text"]: row for row in pq.read_table(tmp_path / "rows.parquet").to_pylist()}
        assert rows.keys() == texts.keys()
        for text, names in texts.items():
            found = town.retrieve(text, request_id=names[-1])
            for name in ("tokens", "loss_mask", "rollout_logp", "exact", "weight_versions", "turns", "request_ids"):
                assert rows[text][name] == found[name], name
        town.kill_and_start()


@pytest.mark.slow
def test_a_store_of_another_tokenizer_is_refused_at_the_start(town: Town, tmp_path: Path) -> None:
    """Exit status 2, and the log says what to do."""
    talk(town, 1, die=False)
    town.router.terminate()
    assert town.router.exit_code() in (0, -signal.SIGTERM)
    flags = ["--tokenizer-path", str(vocabulary("qwen")), "--store", town.store, "--worker-urls", town.workers[0].url]
    other = Program("other", *flags, folder=tmp_path)
    other.start()
    assert other.exit_code() == 2
    assert "name another path with --store" in other.log
