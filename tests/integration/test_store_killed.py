"""A router that is killed under load, again and again: what it answered, the next one has."""

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

KILLS = 10
CLIENTS = 4


class Client(threading.Thread):
    """Has conversations until the router is gone, and keeps what was answered: text, name and sampled ids."""

    def __init__(self, url: str, seed: str) -> None:
        super().__init__(daemon=True)
        self._url = urlsplit(url)
        self._random = random.Random(seed)
        self._seed = seed
        self.answered: list[tuple[str, str, list[int]]] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=30)
        text, count = "", 0
        answer: http.client.HTTPResponse | None = None
        try:
            while True:
                if not text or len(text) > 2_000:
                    text = "You help. " * 30 + f"{self._seed} says: "
                count += 1
                name = f"{self._seed}-{count}"
                stream = self._random.random() < 0.5
                sampling = {"max_new_tokens": self._random.randrange(1, 24)}
                body = {"text": text, "rid": name, "stream": stream, "sampling_params": sampling}
                connection.request("POST", "/generate", json.dumps(body).encode(), {"content-type": "application/json"})
                answer = connection.getresponse()
                assert answer.status == 200
                reply = _read_stream(answer) if stream else json.loads(answer.read())
                self.answered.append((text + reply["text"], name, reply["output_ids"]))
                text += reply["text"] + "\nAnd then? "
        except (OSError, http.client.HTTPException, ValueError):
            return
        finally:
            if answer is not None:
                answer.close()
            connection.close()


def _read_stream(answer: http.client.HTTPResponse) -> dict[str, Any]:
    last: dict[str, Any] = {}
    while line := answer.readline():
        if line.strip() == b"data: [DONE]":
            answer.read()
            return last
        if line.startswith(b"data: "):
            last = json.loads(line[6:])
    raise ConnectionError("the stream was cut off")


@pytest.mark.parametrize(("kind", "durability"), [("sqlite", "process"), ("redis", "process")])
def test_what_was_answered_survives_every_kill(tmp_path: Path, kind: str, durability: str) -> None:
    with EmbeddedWorker(token_delay=0.0005) as worker:
        router = Program(
            "router",
            "--tokenizer-path",
            str(shipped_tokenizer()),
            "--worker-urls",
            worker.url,
            "--store",
            empty_redis() if kind == "redis" else f"sqlite:{tmp_path / 'store'}",
            "--durability",
            durability,
            folder=tmp_path,
        )
        answered: list[tuple[str, str, list[int]]] = []
        with router:
            router.wait_until_up()
            for number in range(KILLS):
                clients = [Client(router.url, f"c{number}{one}") for one in range(CLIENTS)]
                for client in clients:
                    client.start()
                while any(len(client.answered) < 2 for client in clients):
                    assert all(client.is_alive() for client in clients)
                    time.sleep(0.01)  # the first turn of a process takes longest
                time.sleep(random.Random(number).uniform(0, 0.6))
                router.kill()
                for client in clients:
                    client.join(30)
                    answered += client.answered
                router.start()
                router.wait_until_up()
                for text, name, ids in answered[-40:]:
                    _is_whole(router.url, text, name, ids)
            assert len(answered) > 5 * KILLS
            for text, name, ids in answered:
                _is_whole(router.url, text, name, ids)


def _is_whole(url: str, text: str, name: str, ids: list[int]) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    body = json.dumps({"text": text, "expect_request_ids": [name]}).encode()
    connection.request("POST", "/retrieve_from_text", body, {"content-type": "application/json"})
    found = json.loads(connection.getresponse().read())
    connection.close()
    assert found["exact"], (name, found["reasons"])
    assert found["tokens"][-len(ids) :] == ids
    assert found["turns"][-1]["request_id"] == name
    sampled = sum(found["loss_mask"])
    assert sampled == sum(turn["end"] - turn["start"] for turn in found["turns"])
    assert sampled > 0
