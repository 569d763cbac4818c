"""verifiers: evaluations of its own command line, in each of its dialects; every token of its traces is compared.

They run in an environment of their own, which `make test-trainers` installs (TITO_HUBS).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import ROOT
from tests.support.stack import Stack, stack
from worker.engine.records import GenerationRecord

PYTHON = Path(os.environ.get("TITO_HUBS", "/nowhere")) / "verifiers/bin/python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="make test-trainers installs verifiers, in a Python 3.12 as Harbor's"
)
EVAL = ("-c", "from verifiers.v1.cli.eval.main import main; main()")
OURS = ("-m", "middleware_hub.integrations.verifiers")


class Evaluation:
    """Evaluations by a router, in a folder of their own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder

    def start(self, *arguments: str, ask: str = "chat", program: tuple[str, ...] = OURS) -> subprocess.Popen[bytes]:
        """Start `vf-eval`, with our client in it unless another program is named."""
        command = [str(PYTHON), *program, "verifiers_rig", "--no-push", "--no-rich", "--model", "policy"]
        command += ["--client.base-url", f"{self.url}/v1", "--client.api-key-var", "NO_KEY"]
        command += ["--env.agent.runtime.type", "subprocess", *arguments]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/trainers")])
        # What it starts may live longer, with its pipes: so its words go into a file.
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": paths, "ASK": ask},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def run(self, *arguments: str, **more: Any) -> list[dict[str, Any]]:
        """Run one to its end; return its traces."""
        return self.end(self.start(*arguments, **more))

    def end(self, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        try:
            assert process.wait(timeout=300) == 0, (self.folder / "said").read_text()
        finally:
            process.kill()
        (path,) = self.folder.glob("outputs/*/traces.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [trace for row in rows for trace in row.get("traces", [row])]


@pytest.fixture
def evaluation(served: Stack, tmp_path: Path) -> Evaluation:
    return Evaluation(served.url, tmp_path)


def branches(trace: Mapping[str, Any]) -> Iterator[tuple[list[int], list[bool], list[float]]]:
    """Ids, mask, and logprobs of the sampled ids, of each path to a leaf."""
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    for leaf in set(range(len(nodes))) - parents:
        path: list[Any] = []
        at = leaf
        while at is not None:
            path.insert(0, nodes[at])
            at = nodes[at].get("parent")
        columns = ([one for node in path for one in node.get(name) or []] for name in ("token_ids", "mask", "logprobs"))
        ids, mask, logprobs = columns
        yield ids, mask, logprobs


def check(log: list[GenerationRecord], trace: Mapping[str, Any]) -> None:
    """The trace is one branch: what the last generation read and sampled. Traces on disk round logprobs to four digits."""
    ((ids, mask, logprobs),) = branches(trace)
    assert ids == log[-1].input_ids + log[-1].output_ids
    sampled = [False] * len(ids)
    values: list[float] = []
    for record in log:
        begin, end = len(record.input_ids), len(record.input_ids) + len(record.output_ids)
        assert ids[:end] == record.input_ids + record.output_ids
        sampled[begin:end] = [True] * (end - begin)
        values += [round(one, 4) for one in record.logprobs]
    assert mask == sampled
    assert logprobs == values


ASKS = ("chat", "chat_stream", "responses", "responses_stream", "messages", "messages_stream")


def test_rollouts_have_the_sampled_tokens_in_every_dialect(evaluation: Evaluation, served: Stack) -> None:
    (worker,) = served.workers
    for _ in ASKS:
        for text in "1,000 km.", "1,094 km.", "done: 1,094 km.":
            worker.script(text=text)
    traces = evaluation.run("--client.type", "train", "--max-concurrent", "1", ask=",".join(ASKS))
    assert [trace["task"]["data"]["name"] for trace in traces] == list(ASKS)
    for number, trace in enumerate(traces):
        assert trace["ok"], trace["errors"]
        log = worker.log[3 * number : 3 * number + 3]
        check(log, trace)
        assert trace["rewards"]["right"]["score"] == 1.0
        told = trace["info"]["tito"]
        assert told["session_id"] == trace["id"]
        assert [turn["reasons"] for turn in told["turns"]] == [[], [], []]
        versions = [[["default", 0, len(record.output_ids)]] for record in log]
        assert [turn["weight_versions"] for turn in told["turns"]] == versions
        for record, turn in zip(log, told["turns"], strict=True):
            assert record.body["rid"].startswith(turn["generation_id"])
    assert len(worker.log) == 3 * len(ASKS)


def test_rollouts_of_a_task_are_sessions_of_their_own(evaluation: Evaluation, served: Stack) -> None:
    (worker,) = served.workers
    for _ in range(3):
        worker.script(text="done.")
    traces = evaluation.run("--client.type", "train", "--num-rollouts", "3")
    assert len({trace["id"] for trace in traces}) == 3
    by_id = {record.body["rid"][:32]: record for record in worker.log}
    for trace in traces:
        assert trace["info"]["tito"]["session_id"] == trace["id"]
        (turn,) = trace["info"]["tito"]["turns"]
        check([by_id[turn["generation_id"]]], trace)


def test_what_is_not_exact_has_no_tokens_and_says_why(tmp_path: Path) -> None:
    """Without logprobs a turn cannot be trained on: nothing is made up for it."""
    with stack("qwen", styles=("cumulative",), radix={"force_logprobs": False}) as served:
        served.workers[0].script(text="done.")
        (trace,) = Evaluation(served.url, tmp_path).run("--client.type", "train")
        assert trace["ok"], trace["errors"]
        ((ids, mask, logprobs),) = branches(trace)
        assert (ids, mask, logprobs) == ([], [], [])
        (turn,) = trace["info"]["tito"]["turns"]
        assert "no_logprobs" in turn["reasons"]


@pytest.mark.parametrize("asks", [ASKS[:2], ASKS[2:4], ASKS[4:]], ids=["chat", "responses", "messages"])
def test_implicit_sessions_know_what_verifiers_sends(tmp_path: Path, asks: tuple[str, str]) -> None:
    """verifiers' own evaluating client, as it is: X-Session-ID names the trace, and the router has its tokens."""
    with stack("qwen", styles=("cumulative",), sessions={"implicit": True}) as served:
        (worker,) = served.workers
        for text in ("1,000 km.", "done.") * len(asks):
            worker.script(text=text)
        evaluation = Evaluation(served.url, tmp_path)
        traces = evaluation.run("--client.type", "eval", "--max-concurrent", "1", ask=",".join(asks), program=EVAL)
        assert [trace["task"]["data"]["name"] for trace in traces] == list(asks)
        for number, trace in enumerate(traces):
            log = worker.log[2 * number : 2 * number + 2]
            (one,) = served.get(f"/sessions/{trace['id']}/trajectories").json()["trajectories"]
            assert one["exact"], one["reasons"]
            assert one["prompt_ids"] + one["response_ids"] == log[-1].input_ids + log[-1].output_ids
            assert [turn["end"] - turn["start"] for turn in one["turns"]] == [len(record.output_ids) for record in log]
        assert len(worker.log) == 2 * len(asks)
        assert len(served.get("/sessions").json()["sessions"]) == len(asks)
