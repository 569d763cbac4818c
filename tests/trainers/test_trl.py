"""TRL: what our rollout functions return, and that GRPOTrainer trains on exactly that."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest
import tokenizers

from middleware_hub.client import NotUsableError, conversation
from tests.integration.conftest import ROOT
from tests.support import sglang_server
from tests.support.stack import Stack
from tests.support.vocabularies import vocabulary
from tests.trainers import trainers
from tests.trainers.test_samples import say
from worker.worker import EmbeddedWorker

QUESTION = "Question: how long is the Elbe?\n"
OBSERVATION = "Are you sure?"
"""What `examples/trl_grpo.py` appends to a first turn."""


@pytest.fixture(scope="module")
def ours() -> Iterator[ModuleType]:
    if trainers.REAL:
        pytest.importorskip("trl")
    with trainers.installed():
        yield importlib.import_module("middleware_hub.integrations.trl")


class Model(SimpleNamespace):
    """Saves itself, as a model of transformers does."""

    def save_pretrained(self, folder: Path, state_dict: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(state_dict))


def trainer(*, step: int = 0, training: bool = True, use_vllm: bool = False, **args: Any) -> Any:
    """What our functions read of a GRPOTrainer: one process, with the defaults of TRL 1.16."""
    model = Model(training=training)
    given = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 300,
        "generation_kwargs": None,
    }
    return SimpleNamespace(
        args=SimpleNamespace(**{**given, **args}),
        state=SimpleNamespace(global_step=step),
        model=model,
        model_wrapped=model,
        use_vllm=use_vllm,
        chat_template=None,
        chat_template_kwargs={},
        processing_class=trainers.Words(),
        accelerator=SimpleNamespace(
            num_processes=1,
            is_main_process=True,
            unwrap_model=lambda wrapped: wrapped,
            get_state_dict=lambda _wrapped: "state",
            wait_for_everyone=lambda: None,
        ),
    )


def act(*observations: str) -> Any:
    left = iter(observations)
    return lambda _turn, _fields: next(left, None)


def truth(worker: EmbeddedWorker, tokens: list[int]) -> tuple[list[int], list[float]]:
    """Mask and logprobs of a sequence, from the worker's log. Of a reply in the middle, its stop string may be left out."""
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    assert any(record.input_ids + record.output_ids == tokens for record in worker.log)
    best: dict[int, list[float]] = {}
    for record in worker.log:
        begin = len(record.input_ids)
        if record.input_ids == tokens[:begin]:
            pairs = zip(record.output_ids, tokens[begin:], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            # Of several samples of one prompt, take the one that goes on as this sequence does.
            best[begin] = max(best.get(begin, []), record.logprobs[:same], key=len)
    for begin, values in best.items():
        mask[begin : begin + len(values)], logprobs[begin : begin + len(values)] = [1] * len(values), values
    return mask, logprobs


def check(served: Stack, batch: dict[str, Any]) -> None:
    """Every sample is what the worker read and sampled, float for float."""
    (worker,) = served.workers
    for prompt, completion, logprobs, own in zip(
        batch["prompt_ids"], batch["completion_ids"], batch["logprobs"], batch["env_mask"], strict=True
    ):
        mask, sampled = truth(worker, prompt + completion)
        assert len(prompt) == mask.index(1)
        assert own == mask[len(prompt) :]
        assert logprobs == sampled[len(prompt) :]


def test_turns_of_text_are_exact(ours: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Long. ", "1,094 km.")
    seen: list[Any] = []

    def acting(turn: str, fields: dict[str, Any]) -> str | None:
        seen.append((turn, fields["prompt"]))
        fields["score"] = len(seen)
        return "\nA?\n" if len(seen) == 1 else None

    rollout = ours.text_rollout(served.url, acting, weights=None)
    batch = rollout([QUESTION], trainer(top_k=5, max_completion_length=200))
    check(served, batch)
    assert seen == [("Long. ", QUESTION), ("1,094 km.", QUESTION)]
    assert batch["score"] == [2]
    assert (batch["usable"], batch["reasons"], batch["finish"]) == ([True], [[]], ["stop"])
    (runs,) = batch["token_weight_versions"]
    assert sum(end - start for _, start, end in runs) == sum(batch["env_mask"][0])
    (kept,) = batch["token_kv_versions"]
    assert [end - start for _, start, end in kept] == [len(record.output_ids) for record in worker.log]
    assert all(record.body["extra_key"] for record in worker.log)
    asked = worker.log[0].body["sampling_params"]
    assert (asked["top_k"], asked["max_new_tokens"]) == (5, 200)


def test_messages_get_the_template(ours: ModuleType, served: Stack) -> None:
    rollout = ours.text_rollout(served.url, weights=None)
    chats = [[{"role": "user", "content": "How long?"}], [{"role": "user", "content": "How wide?"}]]
    batch = rollout(chats, trainer(max_completion_length=20))
    check(served, batch)
    (worker,) = served.workers
    prompts = [worker.vocabulary.decode(record.input_ids, skip_special_tokens=False) for record in worker.log]
    assert sorted(prompts) == ["user: How long?\nassistant: ", "user: How wide?\nassistant: "]
    image = [{"role": "user", "content": [{"type": "image", "image": None}]}]
    with pytest.raises(ValueError, match="no text"):
        rollout([image], trainer())


def test_an_aborted_turn_goes_on_under_new_weights(ours: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    worker.set_weight_version("7")
    say(worker, "Long", finish="abort")
    say(worker, ". ", "1,094 km.")

    def acting(turn: str, _fields: Any) -> str | None:
        worker.set_weight_version("8")
        return "\nA?\n" if turn == "Long. " else None

    batch = ours.text_rollout(served.url, acting, weights=None)([QUESTION], trainer())
    check(served, batch)
    assert [one[0] for one in batch["token_weight_versions"][0]] == ["7", "8"]


def test_an_evaluation_continues_nothing(ours: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    rollout = ours.text_rollout(served.url, weights=None)
    say(worker, "Long.", times=2)
    rollout([QUESTION], trainer())
    batch = rollout([QUESTION + "Long. And?\n"], trainer(training=False))
    assert worker.log[-1].input_ids == worker.vocabulary.encode_bare(QUESTION + "Long. And?\n")
    assert batch["usable"] == [True]
    assert not served.retrieve(QUESTION + "Long. And?\nLong.")["exact"]


def test_each_step_gives_the_engines_its_weights_once(ours: ModuleType, served: Stack, tmp_path: Path) -> None:
    (worker,) = served.workers
    rollout = ours.text_rollout(served.url, weights=tmp_path)
    versions = []
    for step in (0, 0, 3):
        batch = rollout([QUESTION], trainer(step=step, max_completion_length=10))
        versions.append(batch["token_weight_versions"][0][0][0])
    assert versions == ["0", "0", "3"]
    assert [path.name for path in tmp_path.iterdir()] == ["3"], "the files of earlier steps are removed"
    check(served, batch)
    adapter = trainer(step=4)
    adapter.model_wrapped.peft_config = {}
    with pytest.raises(ValueError, match="adapter"):
        rollout([QUESTION], adapter)
    assert len(worker.log) == 3


def test_with_vllm_trl_gives_the_weights_and_we_say_the_version(ours: ModuleType, served: Stack) -> None:
    rollout = ours.text_rollout(served.url, weights=None)
    rollout([QUESTION], trainer(step=5, use_vllm=True, max_completion_length=10))
    assert served.get("/radix_tree/stats").json()["weight_version"] == "5"


def test_an_agent_is_one_sequence(ours: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Plan.", "Done.", "Other.")

    async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
            create = client.chat.completions.create
            first = await create(
                model="policy", messages=[{"role": "user", "content": prompt}], extra_body=request_kwargs
            )
            said = {"role": "assistant", "content": first.choices[0].message.content}
            asked = [{"role": "user", "content": prompt}, said, {"role": "user", "content": "And?"}]
            await create(model="policy", messages=asked)
            await create(model="policy", messages=[{"role": "user", "content": "Another matter"}])
        return {"task_reward": 0.5}

    batch = ours.agent_rollout(served.url, agent, weights=None)(["How long?"], trainer())
    check(served, batch)
    last = worker.log[-1]
    assert batch["prompt_ids"] + batch["completion_ids"] == [last.input_ids, last.output_ids]
    assert batch["task_reward"] == [0.5]
    assert batch["branches_left_out"] == [1]
    assert served.get("/sessions").json()["sessions"] == []


def test_what_an_agent_asks_beside_its_task_is_not_the_sequence(ours: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Plan.", "A title.")

    async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
            create = client.chat.completions.create
            task = [{"role": "user", "content": prompt}]
            await create(model="policy", messages=task, extra_body=request_kwargs)
            await create(model="policy", messages=[{"role": "system", "content": "Name it."}, *task])
        return {}

    batch = ours.agent_rollout(served.url, agent, weights=None)(["How long?"], trainer())
    first = worker.log[-2]
    assert batch["prompt_ids"] + batch["completion_ids"] == [first.input_ids, first.output_ids]
    assert batch["branches_left_out"] == [1]


def test_an_agent_that_fails_keeps_its_tokens(ours: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Plan.", times=2)

    async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        if prompt != "nothing":
            async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
        raise RuntimeError("the tool is broken")

    batch = ours.agent_rollout(served.url, agent, weights=None)(["How long?", "nothing"], trainer())
    assert batch["usable"] == [True, False]
    assert batch["env_mask"][1] == [0]
    assert all("broken" in one for one in batch["agent_error"])


def test_an_agent_whose_session_is_lost_breaks_no_batch(ours: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Plan.", times=2)

    async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
        if prompt == "lost":
            assert served.exchange("DELETE", f"/sessions/{metadata['session_id']}").status == 200

    batch = ours.agent_rollout(served.url, agent, weights=None)(["lost", "How long?"], trainer())
    assert batch["usable"] == [False, True]
    assert "unknown_reply" in batch["reasons"][0]
    assert sum(batch["env_mask"][0]) == 0
    assert batch["branches_left_out"] == [0, 0]


def test_lost_history_is_masked_and_a_batch_of_it_refused(
    ours: ModuleType, served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = served.workers
    say(worker, "Long.", times=4)
    take = conversation.Transcript.take

    def losing(self: Any, reply: Any) -> None:
        take(self, reply)
        if "lost" in self.text:
            self.names.append("lost")

    monkeypatch.setattr(conversation.Transcript, "take", losing)
    rollout = ours.text_rollout(served.url, weights=None)
    batch = rollout(["Is it lost?\n", QUESTION], trainer())
    assert batch["usable"] == [False, True]
    assert sum(batch["env_mask"][0]) == 0
    assert "unknown_reply" in batch["reasons"][0]
    assert len(batch["logprobs"][0]) == len(batch["completion_ids"][0]) == len(batch["env_mask"][0])
    with pytest.raises(NotUsableError, match="unknown_reply"):
        rollout(["Is it lost?\n"], trainer())
    assert rollout(["Is it lost?\n"], trainer(training=False))["usable"] == [False]


# -- the trainer itself ------------------------------------------------------------------------------------------------


def grpo(url: str, model: Path, output: Path, *flags: str) -> list[dict[str, Any]]:
    """Two steps of GRPOTrainer, in a process where TRL is; returns each sample that reached its loss."""
    python = sglang_server.python_with("trl")
    if python is None:
        pytest.skip("no TRL: tests/sglang_cpu/setup.sh brings it")
    command = [python, "-m", "examples.trl_grpo", "--router", url, "--model", str(model), "--output", str(output)]
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--stop", "e", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **quiet},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert [one["step"] for one in samples] == [0] * 4 + [1] * 4
    decode = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).decode
    # The stop string may cut the only token of a first turn. Then the prompt reaches up to the second turn.
    assert any(OBSERVATION in decode(one["prompt_ids"] + one["completion_ids"]) for one in samples), "one turn each"
    assert all(0 in one["mask"] for one in samples if OBSERVATION in decode(one["completion_ids"]))
    return samples


@pytest.mark.slow
def test_what_reaches_the_loss_is_what_was_sampled(served: Stack, tmp_path: Path) -> None:
    samples = grpo(served.url, vocabulary("qwen"), tmp_path / "trl", "--random", "--weights", str(tmp_path / "weights"))
    check(
        served,
        {
            "prompt_ids": [one["prompt_ids"] for one in samples],
            "completion_ids": [one["completion_ids"] for one in samples],
            "logprobs": [one["logprobs"] for one in samples],
            "env_mask": [one["mask"] for one in samples],
        },
    )


@pytest.mark.slow
@pytest.mark.skipif("TITO_TRL_ROUTER" not in os.environ, reason="TITO_TRL_ROUTER names no router")
def test_the_routers_engine_sampled_it(tmp_path: Path) -> None:
    """At any router whose engines have the model in TITO_TRL_MODEL, of whatever kind: an own forward pass is the judge."""
    samples = grpo(os.environ["TITO_TRL_ROUTER"], Path(os.environ["TITO_TRL_MODEL"]), tmp_path / "trl")
    assert max(one["difference"] for one in samples) < float(os.environ.get("TITO_TRL_NOISE", "1e-4"))
