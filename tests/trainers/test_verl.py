"""verl: what our agent loops return, and that its workers make a batch of it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.support.client import call
from tests.support.stack import Stack
from tests.support.vocabularies import vocabulary
from tests.trainers import trainers
from tests.trainers.test_samples import agent, extras, say

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
PROMPT = "user: How long?\nassistant: "
ROW = {"raw_prompt": [{"role": "user", "content": "How long?"}], "global_steps": 5, "uid": "u1", "session_id": 0}


@pytest.fixture(scope="module")
def loops() -> Iterator[ModuleType]:
    if trainers.REAL:
        pytest.importorskip("verl")
    with trainers.installed():
        yield importlib.import_module("middleware_hub.integrations.verl")


def act(*observations: Any) -> Any:
    left = iter(observations)
    return lambda _turn, _fields: next(left, None)


class Verl:
    """verl around our loops: `AgentLoopWorker`, which makes and runs them, or what it does with them."""

    def __init__(self, loops: ModuleType, router: str, *, length: int = 300, **changes: Any) -> None:
        self.loops = loops
        self.router = router
        self.folder: Path = changes.pop("folder", None) or vocabulary("qwen")
        self.processor = changes.pop("processor", None)
        trainer = changes.pop("trainer", {"use_v1": True, "v1": {"trainer_mode": "sync"}})
        self.config: Any = {
            "actor_rollout_ref": {
                "rollout": {
                    "name": "sglang",
                    "prompt_length": 40,
                    "response_length": length,
                    "enable_rollout_routing_replay": changes.pop("replay", False),
                    "agent": {"default_agent_loop": "ours"},
                },
                "model": {"path": str(self.folder)},
            },
            "data": {"apply_chat_template_kwargs": {}, "mm_processor_kwargs": {}},
            "trainer": trainer,
            **changes,
        }

    def run(self, name: str, *, v1: bool = True, row: dict[str, Any] | None = None, **options: Any) -> Any:
        """Run one rollout. Return the outputs, and the batch that verl makes of them."""
        given = {"router": self.router, "ray_workers": False, **options}
        fields = ROW if row is None else row
        return asyncio.run(
            self._and_close(
                self._real(name, given, fields, v1=v1) if trainers.REAL else self._bare(name, given, fields)
            )
        )

    async def _and_close(self, work: Any) -> Any:
        try:
            return await work
        finally:
            await importlib.import_module("middleware_hub.integrations.rollout").close_clients()

    async def _bare(self, name: str, given: dict[str, Any], row: dict[str, Any]) -> Any:
        config = _nested(self.config)
        loop = getattr(self.loops, name)(
            SimpleNamespace(config=config),
            tokenizer=trainers.Words(),
            processor=self.processor,
            data_config=SimpleNamespace(config=config["data"]),
            **given,
        )
        outputs = await loop.run({"temperature": 1.0, "logprobs": True}, **row)
        return outputs if isinstance(outputs, list) else [outputs], None

    async def _real(self, name: str, given: dict[str, Any], row: dict[str, Any], *, v1: bool) -> Any:
        own = importlib.import_module("verl.experimental.agent_loop.agent_loop")
        from omegaconf import OmegaConf
        from transformers import AutoTokenizer

        tq = importlib.import_module("verl.trainer.ppo.v1.agent_loop_tq")
        kind = tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class if v1 else own.AgentLoopWorker
        worker = kind.__new__(kind)
        worker.config = OmegaConf.create(self.config)
        worker.rollout_config = worker.config.actor_rollout_ref.rollout
        worker.tokenizer = AutoTokenizer.from_pretrained(str(self.folder))
        worker.tokenizer.chat_template = CHAT
        worker.tokenizer.pad_token_id = worker.tokenizer.pad_token_id or 0
        worker.llm_client = worker.reward_loop_worker_handles = None
        worker.processor = self.processor
        worker.dataset_cls = importlib.import_module("verl.utils.dataset.rl_dataset").RLHFDataset
        worker.hf_model_type, worker.tools, worker.distillation_enabled = None, [], False
        worker.mm_processor_kwargs = {}
        own._agent_loop_registry["ours"] = {
            "_target_": f"middleware_hub.integrations.verl.{name}",
            **{key: _as_path(value) if callable(value) else value for key, value in given.items()},
        }
        seen: list[Any] = []
        post = kind._agent_loop_postprocess

        async def watched(output: Any, validate: Any, **kwargs: Any) -> Any:
            seen.extend(output if isinstance(output, list) else [output])
            return await post(worker, output, validate, **kwargs)

        worker._agent_loop_postprocess = watched
        put: dict[str, Any] = {}

        async def kept(**fields: Any) -> None:
            put.update(fields)

        tq.tq.async_kv_batch_put = kept
        trajectory = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": False}
        found = await worker._run_agent_loop(
            {"temperature": 1.0, "logprobs": True}, trajectory, agent_name="ours", trace=False, **row
        )
        return seen, put if v1 else worker._postprocess([found])


def _nested(given: Any) -> Any:
    return trainers.Config({name: _nested(one) for name, one in given.items()}) if isinstance(given, dict) else given


def _as_path(value: Any) -> str:
    """hydra takes no functions: a name that can be imported."""
    plugin = sys.modules.setdefault("verl_plugin", ModuleType("verl_plugin"))
    name = f"f{len(vars(plugin))}"
    setattr(plugin, name, value)
    return f"verl_plugin.{name}"


def sequence(output: Any) -> list[int]:
    tokens: list[int] = output.prompt_ids + output.response_ids
    return tokens


def test_a_text_loop_is_exact(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Long. ", "1,094 km.")
    (output,), batch = Verl(loops, served.url).run("TextAgentLoop", act=act("\nA?\n"))
    last = worker.log[-1]
    assert sequence(output) == last.input_ids + last.output_ids
    assert sum(output.response_mask) == sum(len(record.output_ids) for record in worker.log)
    first = worker.log[0]
    assert output.prompt_ids == first.input_ids
    assert output.response_logprobs[: len(first.output_ids)] == first.logprobs
    assert output.num_turns == 4
    # The engines say `default`; a synchronous trainer trains step 5 on the weights of step 4.
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (4, 4)
    if batch is not None:
        (tag,) = batch["tags"]
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (4, 4)
        assert np.array([tag["min_global_steps"] for tag in batch["tags"]], dtype=int).tolist() == [4]
        assert batch["fields"]["responses"][0].tolist() == output.response_ids


@pytest.mark.parametrize("groups", [None, "run 1"])
def test_a_group_is_named_only_if_the_run_is(loops: ModuleType, served: Stack, groups: str | None) -> None:
    say(served.workers[0], "Long. ", "1,094 km.")
    row = {**ROW, "uid": "u7"}
    outputs, _ = Verl(loops, served.url).run("TextAgentLoop", row=row, act=act("How long?\n"), groups=groups)
    found = served.post("/trajectories/claim", {"group_size": 1}).json()
    if groups is None:
        assert not any(found["waiting"].values())
    else:
        assert [one["group_id"] for one in found["groups"]] == ["run 1/u7"]
        assert [one["tokens"] for one in found["samples"][0]["trajectories"]] == [sequence(outputs[0])]


def test_the_rollouts_of_a_prompt_have_one_routing_key(loops: ModuleType, served: Stack) -> None:
    """A policy may send them to one worker, which has their prompt."""
    say(served.workers[0], "Long. ", "1,094 km.")
    Verl(loops, served.url).run("TextAgentLoop", act=act("How long?\n"))
    assert [one.headers.get("x-smg-routing-key") for one in served.workers[0].log] == [ROW["uid"]] * 2


def test_the_older_trainer_takes_it_too(loops: ModuleType, served: Stack) -> None:
    say(served.workers[0], "Long. ", "1,094 km.")
    verl = Verl(loops, served.url, trainer={"use_v1": False})
    (output,), batch = verl.run("TextAgentLoop", v1=False, act=act("\nA?\n"))
    if batch is not None:
        mask = batch.batch["response_mask"][0].tolist()
        assert mask[: len(output.response_mask)] == output.response_mask
        assert batch.non_tensor_batch["min_global_steps"].tolist() == [4]
        assert batch.batch["rollout_log_probs"].shape == (1, 300)


def test_weights_that_change_within_a_rollout(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    worker.set_weight_version("7")
    say(worker, "Long", finish="abort")
    say(worker, ". ", "1,094 km.")

    def acting(turn: str, _fields: Any) -> str | None:
        worker.set_weight_version("8")
        return "\nA?\n" if turn == "Long. " else None

    verl = Verl(loops, served.url, trainer={"use_v1": True, "v1": {"trainer_mode": "separate_async"}})
    (output,), _ = verl.run("TextAgentLoop", act=acting)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (7, 8)
    assert [one[0] for one in output.extra_fields["token_weight_versions"]] == ["7", "8"]
    # Nobody told the router of the new weights: it learns of them from the last reply.
    assert [one[0] for one in output.extra_fields["token_kv_versions"]][1:] == ["7", "7"]
    assert len(worker.log) == 3  # the abort was continued


def test_an_asynchronous_trainer_wants_versions_that_are_steps(loops: ModuleType, served: Stack) -> None:
    say(served.workers[0], "Long.")
    verl = Verl(loops, served.url, trainer={"use_v1": True, "v1": {"trainer_mode": "colocate_async"}})
    with pytest.raises(RuntimeError, match="POST /update_weight_version"):
        verl.run("TextAgentLoop", act=act())


def test_what_is_too_long_is_cut_as_verl_cuts_it(loops: ModuleType, served: Stack) -> None:
    say(served.workers[0], "one two three four five six seven eight nine ten", times=3)
    (output,), _ = Verl(loops, served.url, length=14).run("TextAgentLoop", act=act("\nmany more words to read\n" * 3))
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) <= 14
    long = {**ROW, "raw_prompt": [{"role": "user", "content": "word " * 90}]}
    served.workers[0].forget_scripts()
    say(served.workers[0], "Yes.")
    (output,), _ = Verl(loops, served.url).run("TextAgentLoop", row=long, act=act())
    assert len(output.prompt_ids) == 40


def test_a_loop_that_strips_has_several_outputs(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "\n\n Long. \n", "\n\n 1,094 km. \n")
    outputs, batch = Verl(loops, served.url).run("TextAgentLoop", act=act("\nA?\n"), tidy=str.strip)
    assert len(outputs) == 2
    assert sum(sum(one.response_mask) for one in outputs) == sum(len(record.output_ids) for record in worker.log)
    assert sequence(outputs[-1]) == worker.log[-1].input_ids + worker.log[-1].output_ids
    if batch is not None:
        assert batch["keys"] == ["u1_0_0", "u1_0_1"]


def test_lost_history_is_masked_or_raised(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers

    def losing(turn: str, _fields: Any) -> str | None:
        call(f"{served.url}/remove_worker", {"url": worker.url})
        return None

    from middleware_hub.client import conversation

    say(worker, "Long.", times=2)
    take = conversation.Transcript.take

    def and_another(self: Any, reply: Any) -> None:
        take(self, reply)
        self.names.append("lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation.Transcript, "take", and_another)
        (output,), _ = Verl(loops, served.url).run("TextAgentLoop", act=act())
        assert sum(output.response_mask) == 0
        assert "unknown_reply" in output.extra_fields["reasons"]
        with pytest.raises(Exception, match="unknown_reply"):
            Verl(loops, served.url).run("TextAgentLoop", act=losing, inexact="raise")


def test_experts_are_rows_of_the_sequence(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    prompt = len(worker.vocabulary.encode_bare(PROMPT))
    worker.script(text="Long.", extra_meta=extras(worker, prompt, "Long."))
    (output,), _ = Verl(loops, served.url, replay=True).run("TextAgentLoop", act=act(), moe=[2, 3])
    assert output.routed_experts.shape == (len(sequence(output)) - 1, 2, 3)
    assert sum(output.response_mask) == len(output.response_ids)
    with pytest.raises(Exception, match="EXPERTS_PER_TOKEN"):
        Verl(loops, served.url, replay=True).run("TextAgentLoop", act=act())


def test_experts_of_a_prompt_that_is_too_long_are_cut_with_it(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    long = {**ROW, "raw_prompt": [{"role": "user", "content": "word " * 90}]}
    prompt = len(worker.vocabulary.encode_bare(f"user: {'word ' * 90}\nassistant: "))
    worker.script(text="Long.", extra_meta=extras(worker, prompt, "Long."))
    (output,), _ = Verl(loops, served.url, replay=True).run("TextAgentLoop", row=long, act=act(), moe=[2, 3])
    rows = output.routed_experts
    assert rows.shape == (len(sequence(output)) - 1, 2, 3)
    last = len(worker.log[-1].input_ids) + len(worker.log[-1].output_ids) - 1
    assert rows[-1].ravel().tolist() == (np.arange(6 * last - 6, 6 * last) % 60 + 1).tolist()


def test_versions_of_which_one_is_no_step_are_not_taken_for_steps(loops: ModuleType, served: Stack) -> None:
    """A synchronous trainer knows the step by itself."""
    (worker,) = served.workers
    say(worker, "Long. ", "1,094 km.")

    def acting(turn: str, _fields: Any) -> str | None:
        worker.set_weight_version("9")
        return "\nA?\n" if turn == "Long. " else None

    (output,), _ = Verl(loops, served.url).run("TextAgentLoop", act=acting)
    assert [one[0] for one in output.extra_fields["token_weight_versions"]] == ["default", "9"]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (4, 4)


def test_an_agents_branches_are_outputs(loops: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "Plan.", "Done.", "Good.")
    outputs, batch = Verl(loops, served.url).run("SessionAgentLoop", row={**ROW, "task": "t"}, agent=agent)
    assert [one.reward_score for one in outputs] == [0.5, 0.5]
    assert sum(sum(one.response_mask) for one in outputs) == sum(len(record.output_ids) for record in worker.log)
    assert all(one.extra_fields["min_global_steps"] == 4 for one in outputs)
    assert served.get("/sessions").json()["sessions"] == []
    if batch is not None:
        assert [tag["status"] for tag in batch["tags"]] == ["success"] * 2


def test_the_tasks_branches_alone_may_be_asked_for(loops: ModuleType, served: Stack) -> None:
    say(served.workers[0], "Plan.", "Done.", "Good.")
    row = {**ROW, "task": "t"}
    (output,), _ = Verl(loops, served.url).run("SessionAgentLoop", row=row, agent=agent, roots="head")
    assert output.num_turns == 4, "two turns of the planner; the critic has another system prompt"


def test_an_agents_session_is_kept_for_who_claims_it(loops: ModuleType, served: Stack) -> None:
    say(served.workers[0], "Plan.", "Done.", "Good.")
    row = {**ROW, "task": "t", "uid": "u7"}
    outputs, _ = Verl(loops, served.url).run("SessionAgentLoop", row=row, agent=agent, groups="run 1")
    found = served.post("/trajectories/claim", {"group_size": 1}).json()
    assert [(one["group_id"], one["reward"]) for one in found["samples"]] == [("run 1/u7", 0.5)]
    ids = [one["prompt_ids"] + one["response_ids"] for one in found["samples"][0]["trajectories"]]
    assert sorted(ids) == sorted(map(sequence, outputs))


@pytest.mark.parametrize("heard", [False, True], ids=["agent says nothing", "agent fails"])
def test_a_session_that_is_lost_breaks_no_batch(loops: ModuleType, served: Stack, heard: bool) -> None:
    """Its router restarted without a store, say. An agent that fails for another reason fails its rollout."""

    async def forgotten(base_url: str, **_more: Any) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.delete(base_url) as answer:
            assert answer.status == 200
        if heard:
            raise ValueError("404: there is no session")
        return {"reward": 0.25}

    async def broken(**_more: Any) -> dict[str, Any]:
        raise ValueError("no such tool")

    (output,), _ = Verl(loops, served.url).run("SessionAgentLoop", agent=forgotten)
    assert sum(output.response_mask) == 0
    assert "unknown_reply" in output.extra_fields["reasons"]
    with pytest.raises(Exception, match="unknown_reply"):
        Verl(loops, served.url).run("SessionAgentLoop", agent=forgotten, inexact="raise")
    with pytest.raises(Exception, match="no such tool"):
        Verl(loops, served.url).run("SessionAgentLoop", agent=broken)


def test_workers_are_registered_by_verls_names(
    loops: ModuleType, served: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = served.workers
    call(f"{served.url}/remove_worker", {"url": worker.url})

    def get_actor(name: str) -> Any:
        if name != "sglang_server_0_0":
            raise ValueError(name)

        async def address() -> tuple[str, int]:
            return "127.0.0.1", worker.port

        return SimpleNamespace(get_server_address=SimpleNamespace(remote=address))

    ray = sys.modules.get("ray") or ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray, "get_actor", get_actor, raising=False)
    say(worker, "Long.")
    (output,), _ = Verl(loops, served.url).run("TextAgentLoop", act=act(), ray_workers=True)
    assert output.extra_fields["exact"]


def test_addresses_of_servers_may_be_ipv6_and_are_asked_for_once_in_a_while(
    loops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["fd00::1", "10.0.0.1"]

    def get_actor(name: str) -> Any:
        number = int(name.split("_")[2])
        if number == len(hosts):
            raise ValueError(name)

        async def address() -> tuple[str, int]:
            return hosts[number], 30000

        return SimpleNamespace(get_server_address=SimpleNamespace(remote=address))

    ray = sys.modules.get("ray") or ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray, "get_actor", get_actor, raising=False)
    seen: list[str] = []

    async def run(operation: Any) -> None:
        seen.append(operation.call.body["url"])

    client = SimpleNamespace(run=run)
    for _ in range(2):
        asyncio.run(loops.add_workers(client))
    assert seen == ["http://[fd00::1]:30000", "http://10.0.0.1:30000"]
