"""Two steps of the trainers' own rollouts: over-sampling, their abort, and partial rollouts across new weights."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from router.config import AbortConfig
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary
from tests.trainers import trainers
from tests.trainers.test_samples import environment, truth
from tests.trainers.trainers import Trainer

pytestmark = pytest.mark.skipif(not trainers.REAL, reason="it is the trainer's own code")

GROUPS, EACH = 2, 2
ARGS: dict[str, Any] = {
    "partial_rollout": True,
    "rollout_batch_size": GROUPS,
    "n_samples_per_prompt": EACH,
    "over_sampling_batch_size": 2 * GROUPS,
    "rollout_global_dataset": True,
    "rollout_max_response_len": 120,
    "dynamic_sampling_filter_path": None,
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
    "use_distributed_post": False,
    "use_miles_router": False,
    "eval_num_gpus": 0,
}


@pytest.fixture(scope="module", params=["slime", "miles"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    with trainers.installed():
        trainers.tokenizer_folder(vocabulary("qwen"))
        yield Trainer(request.param)


@pytest.fixture
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(policy="return"), token_delay=0.02) as made:
        yield made


class Anything(SimpleNamespace):
    """Flags: those that nobody set are off."""

    def __getattr__(self, _name: str) -> None:
        return None


class Source:
    """Prompts, and what came back from an aborted step, first."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._numbers = itertools.count()
        self.buffer: list[list[Any]] = []

    def get(self, count: int) -> list[list[Any]]:
        found, self.buffer = self.buffer[:count], self.buffer[count:]
        return found + [self._group() for _ in range(count - len(found))]

    def _group(self) -> list[Any]:
        group = next(self._numbers)
        prompt = f"Question {group}: how long is it?\n"
        return [
            self._trainer.Sample(index=EACH * group + number, group_index=group, prompt=prompt)
            for number in range(EACH)
        ]


async def _nothing(_args: Any) -> None:
    pass


async def step(trainer: Trainer, args: Any, number: int, source: Source) -> list[list[Any]]:
    """One rollout, as the trainer makes it."""
    http = importlib.import_module(f"{trainer.name}.utils.http_utils")
    http.init_http_client(args)
    try:
        if trainer.name == "slime":
            own = importlib.import_module("slime.rollout.sglang_rollout")
            found, aborted = await own.generate_rollout_async(args, number, source.get)
        else:
            common = importlib.import_module("miles.rollout.inference_rollout.inference_rollout_common")
            own = importlib.import_module("miles.rollout.inference_rollout.inference_rollout_train")
            own.dumper_utils.configure_sglang = _nothing  # SGLang's debugging
            found, aborted = await own.generate_rollout_async(common.GenerateState(args), number, source.get)
        source.buffer += aborted
        return list(found.samples)
    finally:
        await importlib.import_module("middleware_hub.integrations.rollout").close_clients()


def test_two_steps(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    trainer.forget()
    plugin = ModuleType("trainers_generate")
    plugin.__dict__.update(generate=trainer.module.text_rollout(environment()), reward=_reward)
    sys.modules["trainers_generate"] = plugin
    args = Anything(**vars(trainer.args(served.url, **ARGS)))
    source = Source(trainer)

    async def both() -> tuple[list[Any], list[Any]]:
        worker.script(text="Yes.", times=GROUPS * EACH)  # the others run until they are aborted
        first = await step(trainer, args, 0, source)
        assert len(source.buffer) == GROUPS
        assert all(
            one.status is one.Status.ABORTED and "tito" in one.metadata for one in itertools.chain(*source.buffer)
        )
        worker.set_weight_version("1")
        return first, await step(trainer, args, 1, source)

    first, second = asyncio.run(both())
    nothing = SimpleNamespace(input_ids=[], output_ids=[], logprobs=[])
    for one in itertools.chain(*first, *second):
        mask, _ = truth(worker, one.tokens)
        start = len(one.tokens) - one.response_length
        assert one.loss_mask == mask[start:]
        assert not one.remove_sample
        # Equal replies are different samples: the logprobs are those of the one or the other.
        sampled = [
            [*begun.logprobs, *ended.logprobs]
            for begun, ended in itertools.product([nothing, *worker.log], worker.log)
            if begun.input_ids + begun.output_ids in ([], ended.input_ids)
            if ended.input_ids + ended.output_ids == one.tokens
        ]
        assert one.rollout_log_probs in sampled
    assert all(one.weight_versions == ["default", "1"] for one in itertools.chain(*second))
    assert len(trainer.batch(args, list(itertools.chain(*second)))["tokens"]) == GROUPS * EACH


async def _reward(_args: Any, sample: Any, **_more: Any) -> Any:
    return [1.0 for _ in sample] if isinstance(sample, list) else 1.0
