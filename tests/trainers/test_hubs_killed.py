"""A router that is killed in the middle of a Harbor job, or of rollouts of verifiers, and comes back with its store.

What was answered before it died is trained on once, and nothing is lost. The turn that it was killed in is sampled again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import until
from tests.support.programs import Program
from tests.support.vocabularies import vocabulary
from tests.trainers import test_harbor, test_verifiers
from worker.worker import EmbeddedWorker

WORDS = "one two three four five six seven eight nine ten"
"""A second turn that lasts two seconds."""


@pytest.fixture
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(vocabulary("qwen"), token_delay=0.2) as found:
        yield found


@pytest.fixture
def router(worker: EmbeddedWorker, tmp_path: Path) -> Iterator[Program]:
    flags = ("--tokenizer-path", str(vocabulary("qwen")), "--worker-urls", worker.url, "--abort-policy", "return")
    with Program("router", *flags, "--store", f"sqlite:{tmp_path / 'store'}/", folder=tmp_path) as found:
        found.wait_until_up()
        yield found


def killed_in_the_second_turn(
    worker: EmbeddedWorker, router: Program, start: Callable[[], subprocess.Popen[bytes]], *texts: str
) -> subprocess.Popen[bytes]:
    """Start a run, and kill and restart its router while its second turn is sampled."""
    for text in texts:
        worker.script(text=text)
    process = start()
    # The worker records a reply when it begins, also the one that the router dies in.
    until(lambda: (len(worker.log) == 2 and worker.in_flight) or process.poll() is not None, 200)
    assert process.poll() is None
    router.kill()
    until(lambda: not worker.in_flight)
    router.start()
    router.wait_until_up()
    return process


def check(worker: EmbeddedWorker, told: Sequence[tuple[str, list[int], list[int]]]) -> None:
    """Each reply that was whole is told once, as it was sampled; each prompt has all replies before it."""
    whole = [record for record in worker.log if not record.disconnected]
    assert [record.disconnected for record in worker.log] == [False, True, False, False]
    by_name = {record.body["rid"][:32]: record for record in whole}
    assert [name for name, *_ in told] == list(by_name)
    before: list[int] = []
    for name, prompt, completion in told:
        assert (prompt, completion) == (by_name[name].input_ids, by_name[name].output_ids)
        assert prompt[: len(before)] == before
        before = prompt + completion


@test_verifiers.pytestmark
def test_a_rollout_of_verifiers_outlives_its_router(worker: EmbeddedWorker, router: Program, tmp_path: Path) -> None:
    evaluation = test_verifiers.Evaluation(router.url, tmp_path)
    process = killed_in_the_second_turn(
        worker, router, lambda: evaluation.start("--client.type", "train"), "First.", WORDS, "Again.", "done."
    )
    (trace,) = evaluation.end(process)
    assert trace["ok"], trace["errors"]
    ((ids, mask, _),) = test_verifiers.branches(trace)
    told: list[tuple[str, list[int], list[int]]] = []
    names = iter(turn["generation_id"] for turn in trace["info"]["tito"]["turns"])
    at = 0
    while True in mask[at:]:
        begin = mask.index(True, at)
        at = mask.index(False, begin) if False in mask[begin:] else len(mask)
        told.append((next(names), ids[:begin], ids[begin:at]))
    assert next(names, None) is None
    check(worker, told)


@test_harbor.real
def test_a_trial_of_harbor_outlives_its_router(worker: EmbeddedWorker, router: Program, tmp_path: Path) -> None:
    class At:
        url = router.url

    served: Any = At()
    job = test_harbor.Job(served, tmp_path)
    job.task("hello")

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "said").open("wb") as said:
            return subprocess.Popen(
                job.command(*test_harbor.TALKER), env=job.environment, cwd=tmp_path, stdout=said, stderr=said
            )

    texts = ("echo hi > hello.txt", f"echo {WORDS}", "cat hello.txt", "done")
    process = killed_in_the_second_turn(worker, router, start, *texts)
    try:
        assert process.wait(timeout=200) == 0, (tmp_path / "said").read_text()
    finally:
        process.kill()
    (result,) = job.results
    assert result["exception_info"] is None
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}}
    assert result["agent_result"]["metadata"]["tito"]["left_out"] == {}
    check(worker, [turn[:3] for turn in test_harbor.turns(result["agent_result"])])
