"""Agent Lightning: its own gateway in front of the router; what it hands its trainer is compared with the worker's log.

The gateway runs in an environment of its own, which `make test-trainers` installs (TITO_HUBS).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest

from tests.support import templates
from tests.support.engine_server import free_port
from tests.support.stack import Stack, stack

SERVER = Path(os.environ.get("TITO_HUBS", "/nowhere")) / "agentlightning/bin/agl-server"
pytestmark = pytest.mark.skipif(
    not SERVER.exists(), reason="make test-trainers installs Agent Lightning, in a Python 3.12 as Harbor's"
)
ROLLOUTS, TURNS = 4, 4


class Gateway:
    """Agent Lightning's server, with the router as its only model server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{self.url}{path}", content, {"content-type": "application/json"}), timeout=60) as answer:
            return json.load(answer)

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(300):
            assert process.poll() is None
            try:
                self.call("/healthz")
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise TimeoutError("the gateway does not answer")

    def agent(self, rollout: str, question: str) -> None:
        """Ask and ask again, with the history as OpenAI's SDK gives it back."""
        base = f"{self.url}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1"
        messages: list[Any] = [{"role": "user", "content": question}]
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            for _ in range(TURNS):
                found = client.chat.completions.create(model="m", messages=messages, max_tokens=12)
                said = found.choices[0].message.model_dump(exclude_none=True, include={"role", "content"})
                messages += [said, {"role": "user", "content": "Go on."}]

    def triplets(self, rollout: str) -> list[dict[str, Any]]:
        """The turns as Agent Lightning's trainer asks for them."""
        events = self.call(f"/api/rollouts/{rollout}/events?format=triplet&event_type=model_request")
        return [one["data"] for one in events]


@pytest.fixture
def served() -> Iterator[Stack]:
    template = str(templates.folder() / "qwen2_5.jinja")
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": template}) as made:
        yield made
        assert made.idle()


@pytest.fixture
def gateway(served: Stack, tmp_path: Path) -> Iterator[Gateway]:
    port = free_port()
    command = [str(SERVER), "host=127.0.0.1", f"port={port}", "default_proxy.model_name=policy"]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
    try:
        made = Gateway(port)
        made.wait(process)
        made.call("/api/models", [{"model": "policy", "endpoint": f"{served.url}/v1"}])
        yield made
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_every_later_prompt_extends_what_was_sampled(gateway: Gateway, served: Stack) -> None:
    """So its trainer merges the turns of a rollout into one sequence; the worker samples ids that no tokenizer would choose."""
    (worker,) = served.workers
    made = gateway.call("/api/rollouts", [{"input": {"question": number}} for number in range(ROLLOUTS)])
    names = [one["rollout_id"] for one in made]
    with ThreadPoolExecutor(ROLLOUTS) as pool:
        list(pool.map(gateway.agent, names, [f"Question {number}?" for number in range(ROLLOUTS)]))
    log = {tuple(one.input_ids): one for one in worker.log}
    assert len(log) == len(worker.log) == ROLLOUTS * TURNS
    extended = 0
    for name in names:
        context: list[int] = []
        turns = gateway.triplets(name)
        assert len(turns) == TURNS
        for turn in turns:
            record = log.pop(tuple(turn["prompt_token_ids"]))
            assert turn["response_token_ids"] == record.output_ids
            assert turn["response_log_probs"] == pytest.approx(record.logprobs)
            assert turn["prompt_token_ids"][: len(context)] == context
            extended += bool(context)
            context = turn["prompt_token_ids"] + turn["response_token_ids"]
    assert not log
    assert extended == ROLLOUTS * (TURNS - 1)
