"""AReaL: episodes of our workflow in AReaL's own executor, with its checks; every token is compared with the worker's log.

They run where AReaL is installed (`make test-trainers`): without torch there is nothing of it to test.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from middleware_hub.integrations import versions
from middleware_hub.integrations.rollout import close_clients
from tests.support.stack import Stack
from tests.trainers.misbehaving import misbehave
from tests.trainers.test_samples import ask, truth
from worker.worker import EmbeddedWorker

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("areal") is None or importlib.util.find_spec("torch") is None,
    reason="make test-trainers installs AReaL",
)
MODULE = "middleware_hub.integrations.areal"
SAMPLING = {"temperature": 0.5, "max_new_tokens": 64}


@pytest.fixture
def plug() -> Any:
    return importlib.import_module(MODULE)


@pytest.fixture
def numbered(served: Stack) -> Stack:
    served.set_weight_version("3")
    return served


async def agent(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """Asks twice, and does something else where the row's `how` says so."""
    how = metadata["how"]
    messages = list(prompt)
    for _ in range(0 if how in ("silent", "inexact") else 2):
        reply = await ask(base_url, messages, temperature=0.9, **request_kwargs)
        if how == "branches":
            messages = [*prompt, {"role": "user", "content": "Anew."}]
        else:
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    await misbehave(base_url, how, prompt)
    if how == "number":
        return 1.0  # in place of a dictionary with it
    return None if how in ("scored", "no_reward") else {"reward": 1.0}


class Executor:
    """AReaL's `WorkflowExecutor`, with an engine that has nothing but a version."""

    def __init__(self) -> None:
        config = importlib.import_module("areal.api.cli_args").InferenceEngineConfig
        own = importlib.import_module("areal.infra.workflow_executor").WorkflowExecutor
        engine = SimpleNamespace(get_version=lambda: 3)
        self.own = own(config(consumer_batch_size=8, max_head_offpolicyness=8, check_trajectory_format=True), engine)

    def run(self, workflow: Any, *hows: str, is_eval: bool = False) -> list[Any]:
        """Return what each episode gave, in the order of the rows."""
        self.own.initialize(train_data_parallel_size=1)
        try:
            tasks = [self.own.submit(row(how), workflow, is_eval=is_eval) for how in hows]
            return [self.own.wait_for_task(task, timeout=60) for task in tasks]
        finally:
            self.own.destroy()


def row(how: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"How {how} is it?"}], "how": how}


def check(worker: EmbeddedWorker, made: Any, at: int = 0) -> int:
    """A row is what the worker read and sampled. Return how many tokens are trained on."""
    seen = made["attention_mask"][at].bool()
    tokens = made["input_ids"][at][seen].tolist()
    mask, logprobs = truth(worker, tokens)
    assert made["loss_mask"][at][seen].tolist() == mask
    assert made["logprobs"][at][seen].tolist() == pytest.approx(logprobs)
    assert made["versions"][at][seen].tolist() == [3 if one else -1 for one in mask]
    assert not made["loss_mask"][at][~seen].any()
    return sum(mask)


def sampled(worker: EmbeddedWorker) -> int:
    return sum(len(one.output_ids) for one in worker.log)


def test_episodes_are_what_the_worker_sampled(plug: Any, numbered: Stack) -> None:
    (worker,) = numbered.workers
    whole, scored, branches = Executor().run(
        plug.SessionWorkflow(numbered.url, agent, sampling=SAMPLING), "whole", "scored", "branches"
    )
    assert [len(one["input_ids"]) for one in (whole, scored, branches)] == [1, 1, 2]
    assert whole["rewards"].tolist() == [1.0]
    assert scored["rewards"].tolist() == [0.25]
    assert branches["rewards"].tolist() == [1.0, 1.0]
    trained = check(worker, whole) + check(worker, scored) + check(worker, branches, 0) + check(worker, branches, 1)
    assert trained == sampled(worker) > 0
    assert {one.body["sampling_params"]["temperature"] for one in worker.log} == {0.5}  # the agent cannot change it
    assert {one.body["sampling_params"]["max_new_tokens"] for one in worker.log} == {64}
    assert numbered.get("/sessions").json()["sessions"] == []


def test_the_form_is_that_of_areals_own_workflows(plug: Any, numbered: Stack) -> None:
    import torch

    (made,) = Executor().run(plug.SessionWorkflow(numbered.url, agent, sampling=SAMPLING), "whole")
    kinds = {name: (value.dtype, value.dim()) for name, value in made.items()}
    whole, number = torch.int32, torch.float32
    assert kinds == {
        "input_ids": (whole, 2),
        "loss_mask": (whole, 2),
        "logprobs": (number, 2),
        "versions": (whole, 2),
        "attention_mask": (torch.bool, 2),
        "rewards": (number, 1),
    }


async def _alone(workflow: Any, data: dict[str, Any]) -> Any:
    try:
        return await workflow.arun_episode(None, data)
    finally:
        await close_clients()


@pytest.mark.parametrize("how", ["raises", "exits", "number", "no_reward", "inexact", "silent", "lost"])
def test_what_must_not_be_trained_on_is_rejected(plug: Any, numbered: Stack, how: str) -> None:
    executor, workflow = Executor(), plug.SessionWorkflow(numbered.url, agent, sampling=SAMPLING)
    assert executor.run(workflow, how) == [None]
    assert executor.own.staleness_manager.get_stats().rejected == 1
    assert asyncio.run(_alone(workflow, row(how))) is None  # it is no error that the executor turned into this
    assert numbered.get("/sessions").json()["sessions"] == []


def test_evaluations_are_apart(plug: Any, numbered: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    own = plug.client_for

    def seen(router: str, *, evaluation: bool) -> Any:
        asked.append(evaluation)
        return own(router, evaluation=evaluation)

    monkeypatch.setattr(plug, "client_for", seen)
    for is_eval in (True, False):
        Executor().run(plug.SessionWorkflow(numbered.url, agent, sampling=SAMPLING), "whole", is_eval=is_eval)
    assert asked == [True, False]


def test_mistakes_are_told(plug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="responce_budget"):
        plug.SessionWorkflow("http://h:1", agent, responce_budget=9)
    with pytest.raises(TypeError, match="`sampling_params` cannot be given"):
        plug.SessionWorkflow("http://h:1", agent, sampling_params={})
    from middleware_hub.client.trajectory import Trajectory, Turn, VersionRun

    run, turn = VersionRun("default", 1, 2), Turn("a", 1, 2, "default", "stop")
    found = Trajectory([7, 8], [0, 1], [0.0, -1.0], 1, (run,), (turn,), "", True, 0, (), "stop", {}, None, {})
    with pytest.raises(ValueError, match="'default', which are no numbers"):
        plug.tensors(found, 1.0)


def test_another_version_says_so_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: "1.1.0")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.warns(UserWarning, match=r"areal 1\.0 or later, before 1\.1, and here is 1\.1\.0"):
        importlib.import_module(MODULE)


@pytest.fixture(autouse=True)
def connections() -> Iterator[None]:
    """The executor's loop ends with its thread: nothing closes what a client opened in it."""
    yield
    importlib.import_module("middleware_hub.integrations.rollout")._CLIENTS.clear()
