"""SkyRL: what our generator returns, in SkyRL's own trainer up to its batch; every token is compared with the worker's log.

The tests run on SkyRL itself where it is installed (`make test-trainers`), else on stand-ins for the few names of it.
"""

from __future__ import annotations

import abc
import asyncio
import importlib
import importlib.util
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typing_extensions

from middleware_hub.client.images import MultiModalData, SequenceImage
from middleware_hub.client.trajectory import Trajectory, Turn
from middleware_hub.integrations import versions
from middleware_hub.integrations.rollout import close_clients
from tests.support.stack import Stack
from tests.trainers.misbehaving import misbehave
from tests.trainers.test_samples import ask, truth
from worker.worker import EmbeddedWorker

REAL = importlib.util.find_spec("skyrl") is not None
MODULE = "middleware_hub.integrations.skyrl"
SAMPLING = {
    "min_tokens": 1,
    "max_tokens": 64,
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": -1,
    "logprobs": 1,
    "stop": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
}
"""As SkyRL's `get_vllm_sampling_params` makes them."""


class Interface(abc.ABC):
    """Stands for SkyRL's `GeneratorInterface`."""

    @abc.abstractmethod
    async def generate(self, input_batch: Any) -> Any: ...


@dataclass
class Name:
    """Stands for SkyRL's `TrajectoryID`."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class Batch:
    """Stands for SkyRL's `BatchMetadata`."""

    global_step: int
    training_phase: str


def _standing_in() -> dict[str, ModuleType]:
    names = (
        "skyrl",
        "skyrl.train",
        "skyrl.train.generators",
        "skyrl.train.generators.base",
        "skyrl.train.generators.utils",
    )
    modules = {name: ModuleType(name) for name in names}
    base: Any = modules["skyrl.train.generators.base"]
    base.GeneratorInterface, base.TrajectoryID, base.BatchMetadata = Interface, Name, Batch
    base.GeneratorInput = base.GeneratorOutput = dict
    utils: Any = modules["skyrl.train.generators.utils"]
    utils.get_rollout_metrics = lambda _responses, _rewards, **_more: {}
    return modules


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported on SkyRL or on the stand-ins."""
    if REAL:
        # SkyRL is for Python 3.12. With an earlier one, pydantic takes only this class of its dictionaries with types.
        monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        importlib.import_module("skyrl.train.trainer")
    else:
        monkeypatch.setattr(versions, "installed", lambda _: "0.4.0")
        for name, module in _standing_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def batch(*prompts: str, each: int = 1, phase: str = "train", **changes: Any) -> Any:
    """A batch as SkyRL's `prepare_generator_input` makes it: `each` trajectories of every prompt."""
    base: Any = sys.modules["skyrl.train.generators.base"]
    rows = [(prompt, number) for prompt in prompts for number in range(each)]
    return {
        "prompts": [[{"role": "user", "content": prompt}] for prompt, _ in rows],
        "env_classes": ["agent"] * len(rows),
        "env_extras": [{"task": prompt} for prompt, _ in rows],
        "sampling_params": SAMPLING,
        "trajectory_ids": [base.TrajectoryID(prompt, number) for prompt, number in rows],
        "batch_metadata": base.BatchMetadata(3, phase),
        **changes,
    }


async def agent(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Asks twice, or with `again` begins a second conversation of the task; the reward is the number at the prompt's end."""
    assert prompt == [{"role": "user", "content": metadata["task"]}]
    messages = [{"role": "system", "content": "You answer."}, *prompt]
    for _ in range(2):
        reply = await ask(base_url, messages, temperature=0.9, **request_kwargs)
        if "again" in metadata["task"]:
            messages = [*messages[:2], {"role": "user", "content": "Anew."}]
        else:
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return {"reward": float(metadata["task"][-1])}


class Trainer:
    """SkyRL's trainer around a generator, or without SkyRL only what the generator returns."""

    def __init__(self, generator: Any, *, each: int = 1, merged: bool = False) -> None:
        self.generator = generator
        self.metrics: dict[str, Any] = {}
        self.batch: Any = None
        self.advantages: Any = None
        self.each = each
        self.merged = merged

    def run(self, given: Any) -> Any:
        """Return the generator's output. With SkyRL its trainer has checked it, and `batch` has its tensors."""
        return asyncio.run(self._run(given))

    async def _run(self, given: Any) -> Any:
        try:
            if not REAL:
                output = await self.generator.generate(given)
                self.metrics = output.pop("rollout_metrics")
                return output
            trainer = self._trainer(len(given["prompts"]))
            output = await trainer.generate(given)
            self.metrics = trainer.all_metrics
            kept = {name: list(value) if isinstance(value, list) else value for name, value in output.items()}
            of = output["trajectory_ids"] or given["trajectory_ids"]
            done, uids = trainer.postprocess_generator_output(output, [one.instance_id for one in of])
            self.batch = trainer.convert_to_training_input(done, uids)
            self.batch["values"] = None
            self.advantages = trainer.compute_advantages_and_returns(self.batch)["advantages"]
            return kept
        finally:
            await close_clients()

    def _trainer(self, prompts: int) -> Any:
        own = importlib.import_module("skyrl.train.trainer").RayPPOTrainer
        config = importlib.import_module("skyrl.train.config").SkyRLTrainConfig()
        config.generator.step_wise_trajectories = self.generator.step_wise
        config.generator.merge_stepwise_output = self.merged
        config.generator.n_samples_per_prompt = self.each
        config.trainer.train_batch_size = prompts // self.each
        config.trainer.policy_mini_batch_size = prompts // self.each
        trainer = object.__new__(own)
        trainer.cfg, trainer.generator, trainer.all_metrics = config, self.generator, {}
        trainer.tokenizer = SimpleNamespace(pad_token_id=0)
        trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
        return trainer


def check(worker: EmbeddedWorker, output: Any, at: int) -> int:
    """A row has mask 1 and logprobs where the worker sampled, and nowhere else. Return how many tokens are trained on."""
    prompt, response = output["prompt_token_ids"][at], output["response_ids"][at]
    mask, logprobs = truth(worker, prompt + response)
    assert mask.index(1) == len(prompt)
    assert output["loss_masks"][at] == mask[len(prompt) :]
    assert output["rollout_logprobs"][at] == logprobs[len(prompt) :]
    return sum(mask)


def sampled(worker: EmbeddedWorker) -> int:
    return sum(len(one.output_ids) for one in worker.log)


def prompt_text(worker: EmbeddedWorker, output: Any, at: int) -> str:
    return worker.vocabulary.decode(output["prompt_token_ids"][at], skip_special_tokens=False)


def test_a_batch_is_what_the_worker_sampled(plug: Any, served: Stack) -> None:
    """In the batch's order, whatever order the workers answer in."""
    (worker,) = served.workers
    trainer = Trainer(plug.AgentGenerator(served.url, agent), each=2)
    output = trainer.run(batch("first 1", "second 0", each=2))
    assert sum(check(worker, output, at) for at in range(4)) == sampled(worker) > 0
    assert len(worker.log) == 8
    for at, task in enumerate(("first 1", "first 1", "second 0", "second 0")):
        assert task in prompt_text(worker, output, at)
        assert output["env_metrics"][at]["turns"] == 2
    assert output["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert output["stop_reasons"] == [_finish(worker, output, at) for at in range(4)]
    assert len(output["trajectory_generation_times"]) == 4
    assert {one.body["sampling_params"]["temperature"] for one in worker.log} == {0.5}  # the agent cannot change it
    assert {one.body["sampling_params"]["max_new_tokens"] for one in worker.log} == {64}
    assert output["is_last_step"] is output["trajectory_ids"] is None
    assert trainer.metrics["generate/rows_not_trained_on"] == trainer.metrics["generate/sequences_left_out"] == 0
    assert served.get("/sessions").json()["sessions"] == []


def _finish(worker: EmbeddedWorker, output: Any, at: int) -> str:
    tokens = output["prompt_token_ids"][at] + output["response_ids"][at]
    (last,) = [one for one in worker.log if one.input_ids + one.output_ids == tokens]
    return str((last.finish_reason or {})["type"])


@pytest.mark.skipif(not REAL, reason="make test-trainers installs SkyRL")
def test_the_tensors_of_skyrl_are_these(plug: Any, served: Stack) -> None:
    """Its trainer checks the output, turns rewards into those of tokens, pads, and computes advantages."""
    trainer = Trainer(plug.AgentGenerator(served.url, agent), each=2)
    output = trainer.run(batch("first 1", "second 0", each=2))
    made = trainer.batch
    for at, (prompt, response) in enumerate(zip(output["prompt_token_ids"], output["response_ids"], strict=True)):
        assert made["sequences"][at][made["attention_mask"][at].bool()].tolist() == prompt + response
        assert made["response_mask"][at].sum() == len(response)
        trained = made["loss_mask"][at].bool()
        told = [one for one, mark in zip(output["rollout_logprobs"][at], output["loss_masks"][at], strict=True) if mark]
        assert made["rollout_logprobs"][at][trained].tolist() == pytest.approx(told)
        assert made["rewards"][at].sum() == output["rewards"][at]
    with pytest.raises(AssertionError, match="loss masks must have the same length"):
        _validate(1, {**_row(output), "loss_masks": [[1]]})


def _row(output: Any) -> Any:
    return {name: value[:1] if isinstance(value, list) else value for name, value in output.items()}


def _validate(*given: Any) -> None:
    importlib.import_module("skyrl.train.utils.trainer_utils").validate_generator_output(*given)


@pytest.mark.parametrize("merged", [False, True])
def test_all_branches_are_steps_of_their_trajectory(plug: Any, served: Stack, merged: bool) -> None:
    """Each sampled token once, rows of a trajectory side by side, and its advantage for all of them."""
    (worker,) = served.workers
    trainer = Trainer(plug.AgentGenerator(served.url, agent, step_wise=True), each=2, merged=merged)
    given = batch("again 1", "plain 0", each=2)
    given["env_extras"][1]["task"] = given["prompts"][1][0]["content"] = "again 0"  # of the same group
    output = trainer.run(given)
    assert [(one.instance_id, one.repetition_id) for one in output["trajectory_ids"]] == [
        *[("again 1", 0)] * 2,
        *[("again 1", 1)] * 2,
        ("plain 0", 0),
        ("plain 0", 1),
    ]
    assert output["is_last_step"] == [False, True, False, True, True, True]
    assert output["rewards"] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert sum(check(worker, output, at) for at in range(6)) == sampled(worker)
    assert "Anew." in prompt_text(worker, output, 1)
    if not REAL:
        return
    assert trainer.batch["loss_mask"].sum() == sampled(worker)
    gains = trainer.advantages
    assert all(gains[at].max() > 0 for at in (0, 1))
    assert all(gains[at].min() < 0 for at in (2, 3))
    assert not gains[4:].any()


def test_without_steps_the_other_branches_are_left_out_and_told(plug: Any, served: Stack) -> None:
    (worker,) = served.workers
    trainer = Trainer(plug.AgentGenerator(served.url, agent))
    output = trainer.run(batch("again 1"))
    assert check(worker, output, 0) == len(worker.log[-1].output_ids)
    assert "Anew." in prompt_text(worker, output, 0)
    assert trainer.metrics["generate/sequences_left_out"] == 1


async def breaks(base_url: str, prompt: Any, request_kwargs: Any, metadata: dict[str, Any]) -> Any:
    """Fails in the way that the task names, or does not."""
    how = metadata["task"]
    if how not in ("silent", "inexact"):
        await ask(base_url, prompt)
    await misbehave(base_url, how, prompt)
    if how == "number":
        return 1.0  # in place of a dictionary with it
    return {} if how == "no_reward" else {"reward": 1.0}


def test_what_must_not_be_trained_on_has_no_loss(plug: Any, served: Stack) -> None:
    """The others of the batch are trained on, and SkyRL takes it."""
    (worker,) = served.workers
    expected = {
        "whole": [],
        "scored": [],
        "raises": ["no_reward"],
        "exits": ["no_reward"],
        "number": ["no_reward"],
        "no_reward": ["no_reward"],
        "inexact": ["unknown_parent"],
        "silent": ["nothing_sampled"],
        "lost": ["unknown_reply", "nothing_sampled"],
    }
    trainer = Trainer(plug.AgentGenerator(served.url, breaks))
    output = trainer.run(batch(*expected))
    for at, (how, reasons) in enumerate(expected.items()):
        told = output["env_metrics"][at]
        assert told["reasons"] == reasons, how
        assert any(output["loss_masks"][at]) == (how in ("whole", "scored"))
        assert len(output["loss_masks"][at]) == len(output["response_ids"][at]) == len(output["rollout_logprobs"][at])
        assert ("agent_error" in told) == (how in ("raises", "exits", "number")), how
    assert check(worker, output, 0) > 0
    assert check(worker, output, 1) > 0
    assert output["rewards"] == [1.0, 0.25, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert trainer.metrics["generate/rows_not_trained_on"] == 7
    assert served.get("/sessions").json()["sessions"] == []


def test_a_sequence_with_images_has_no_loss(plug: Any) -> None:
    image = SequenceImage("sha256:0", None, None, None, (0, 1), 0, 0, None)
    turn = Turn("a", 2, 3, "1", "stop")
    text = Trajectory([7, 7, 8], [0, 0, 1], [0.0, 0.0, -1.0], 2, (), (turn,), "", True, 0, (), "stop", {}, None, {})
    assert plug.Row.of(text, 1.0, None).mask == [1]
    seen = plug.Row.of(replace(text, multi_modal_data=MultiModalData((image,))), 1.0, None)
    assert (seen.mask, seen.metrics["reasons"]) == ([0], ["multimodal"])


def test_evaluations_are_apart(plug: Any, served: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    own = plug.client_for

    def seen(router: str, *, evaluation: bool) -> Any:
        asked.append(evaluation)
        return own(router, evaluation=evaluation)

    monkeypatch.setattr(plug, "client_for", seen)
    for phase in ("eval", "train"):
        Trainer(plug.AgentGenerator(served.url, agent)).run(batch("first 1", phase=phase))
    assert asked == [True, False]


def test_mistakes_are_told(plug: Any, served: Stack) -> None:
    with pytest.raises(TypeError, match="responce_budget"):
        plug.AgentGenerator(served.url, agent, responce_budget=9)
    for name in ("session_id", "sampling_params", "pin", "group_id"):
        with pytest.raises(TypeError, match=f"`{name}` cannot be given"):
            plug.AgentGenerator(served.url, agent, **{name: None})
    with pytest.raises(ValueError, match="trajectory_ids"):
        asyncio.run(plug.AgentGenerator(served.url, agent, step_wise=True).generate(batch("a 1", trajectory_ids=None)))


def test_parameters_get_the_names_of_the_router(plug: Any) -> None:
    assert plug.sampling_params({**SAMPLING, "seed": 4}) == {
        "min_new_tokens": 1,
        "max_new_tokens": 64,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "skip_special_tokens": True,
        "sampling_seed": 4,
    }


@pytest.mark.skipif(REAL, reason="it takes SkyRL away")
def test_another_version_says_so_at_import(plug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: "0.5.0")
    monkeypatch.delitem(sys.modules, MODULE)
    with pytest.warns(UserWarning, match=r"skyrl 0\.4 or later, before 0\.5, and here is 0\.5\.0"):
        importlib.import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.delattr(sys.modules["skyrl.train.generators.base"], "TrajectoryID")
    with pytest.raises(ImportError, match=r"which lacks skyrl.*TrajectoryID"):
        importlib.import_module(MODULE)
