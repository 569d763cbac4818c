"""A router that is killed under agents: their sessions go on in the next one, and nothing that was answered is lost."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.programs import Program
from tests.support.redis_server import empty_redis
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

pytestmark = pytest.mark.slow

KILLS = 3
AGENTS = 4


def call(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request(method, path, json.dumps(body or {}).encode(), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers.get("x-generation-id", "")
    finally:
        connection.close()


class Agent:
    """Talks in one session, from one router to the next, and keeps the ids of all turns that were answered."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self.name = name
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are {name}."}]
        self.answered: list[str] = []
        self.failed: Any = None

    def talk(self) -> threading.Thread:
        """Talk until the router is gone."""
        thread = threading.Thread(target=self._talk, daemon=True)
        thread.start()
        return thread

    def _talk(self) -> None:
        while True:
            asked = [*self._messages, {"role": "user", "content": f"And {len(self.answered)}?"}]
            body = {"messages": asked, "max_tokens": 12}
            try:
                status, reply, generation = call(self._url, "POST", f"/sessions/{self.name}/v1/chat/completions", body)
            except (OSError, http.client.HTTPException, ValueError):
                return
            if status != 200:
                self.failed = status, reply
                return
            self.answered.append(generation)
            self._messages = [*asked, {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_sessions_go_on_after_every_kill(tmp_path: Path, kind: str) -> None:
    with EmbeddedWorker(token_delay=0.0005) as worker:
        router = Program(
            "router",
            "--tokenizer-path",
            str(shipped_tokenizer()),
            "--worker-urls",
            worker.url,
            "--store",
            empty_redis() if kind == "redis" else f"sqlite:{tmp_path / 'store'}",
            folder=tmp_path,
        )
        with router:
            router.wait_until_up()
            agents = [Agent(router.url, f"agent-{number}") for number in range(AGENTS)]
            for agent in agents:
                assert call(router.url, "POST", "/sessions", {"session_id": agent.name})[0] == 201
            for number in range(KILLS):
                before = [len(agent.answered) for agent in agents]
                talking = [agent.talk() for agent in agents]
                while any(len(agent.answered) < 3 + old for agent, old in zip(agents, before, strict=True)):
                    assert all(thread.is_alive() for thread in talking)
                    time.sleep(0.01)  # the first turn of a process takes longest
                time.sleep(random.Random(number).uniform(0, 0.3))
                router.kill()
                for thread in talking:
                    thread.join(30)
                assert [agent.failed for agent in agents] == [None] * AGENTS
                router.start()
                router.wait_until_up()
            sampled = {record.rid: list(record.output_ids) for record in worker.log}
            for agent in agents:
                assert len(agent.answered) > KILLS
                status, found, _ = call(router.url, "POST", f"/sessions/{agent.name}/finalize")
                assert status == 200
                whole = {trajectory["branch"]: trajectory for trajectory in found["trajectories"]}
                # A turn that was in the store when its answer was lost is a branch of its own, or the end of this one.
                (line,) = [one for one in whole.values() if agent.answered[-1] in ids_in(one)]
                assert line["exact"]
                assert ids_in(line)[: len(agent.answered)] == agent.answered
                for turn in line["turns"]:
                    ids = line["response_ids"][turn["start"] : turn["end"]]
                    assert ids == sampled[turn["request_id"]]


def ids_in(trajectory: dict[str, Any]) -> list[str]:
    return [turn["request_id"] for turn in trajectory["turns"]]
