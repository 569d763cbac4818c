"""slime and miles: what our generate functions put into their samples, and that their batches take it."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import pytest

from router.config import AbortConfig
from tests.support.client import call
from tests.support.programs import ROOT
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary
from tests.trainers import trainers
from tests.trainers.trainers import Trainer
from worker.worker import EmbeddedWorker

QUESTION = "Question: how long is the Elbe?\n"
PARAMS = {"max_new_tokens": 300, "temperature": 1.0}


@pytest.fixture(scope="module", params=["slime", "miles"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    with trainers.installed():
        trainers.tokenizer_folder(vocabulary("qwen"))
        yield Trainer(request.param)


def environment(*observations: str) -> Any:
    left = iter(observations)

    def act(_turn: str, _sample: Any) -> str | None:
        return next(left, None)

    return act


def say(worker: EmbeddedWorker, *texts: str, **more: Any) -> None:
    for text in texts:
        worker.script(text=text, **more)


def truth(worker: EmbeddedWorker, tokens: list[int]) -> tuple[list[int], list[float]]:
    """Mask and logprobs of a sequence, from the worker's log: the last reply ends it, the others are in its prompt."""
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    for record in worker.log:
        start, end = len(record.input_ids), len(record.input_ids) + len(record.output_ids)
        if tokens[:end] == record.input_ids + record.output_ids:
            mask[start:end], logprobs[start:end] = [1] * (end - start), record.logprobs
    return mask, logprobs


def check(worker: EmbeddedWorker, sample: Any) -> None:
    mask, logprobs = truth(worker, sample.tokens)
    start = len(sample.tokens) - sample.response_length
    assert start == mask.index(1)
    assert sample.loss_mask == mask[start:]
    assert sample.rollout_log_probs == logprobs[start:]
    assert not sample.remove_sample, sample.metadata


def test_a_text_rollout_is_exact(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "It is long. ", "1,094 km.")
    args = trainer.args(served.url)
    generate = trainer.module.text_rollout(environment("\nObservation: how long?\n"))
    sample = trainer.Sample(index=3, prompt=QUESTION)
    made = trainer.generate(generate, args, sample, PARAMS)
    assert made is sample
    check(worker, sample)
    assert sample.status is sample.Status.COMPLETED
    assert sample.response == "It is long. \nObservation: how long?\n1,094 km."
    assert sample.weight_versions == ["default"] * 2
    assert sample.prefix_cache_info.total_prompt_tokens == sum(len(record.input_ids) for record in worker.log)
    versions = sample.metadata["token_weight_versions"]
    assert [mark for _, low, high in versions for mark in sample.loss_mask[low:high]] == [1] * sum(sample.loss_mask)
    kept = sample.metadata["token_kv_versions"]
    assert [version for version, _, _ in kept] == ["default"] * 2
    assert [mark for _, low, high in kept for mark in sample.loss_mask[low:high]] == [1] * sum(sample.loss_mask)
    assert all(record.body["extra_key"] for record in worker.log), "nothing is sampled behind older weights' caches"
    trainer.batch(args, [sample])


def test_messages_are_a_prompt_too(trainer: Trainer, served: Stack) -> None:
    if trainers.REAL:
        pytest.skip("the tokenizer of the tests has no chat template")
    say(served.workers[0], "Hello.")
    sample = trainer.Sample(index=0, prompt=[{"role": "user", "content": "Hi"}])
    trainer.generate(trainer.module.text_rollout(environment()), trainer.args(served.url), sample, PARAMS)
    check(served.workers[0], sample)


def test_the_budget_is_the_response(trainer: Trainer, served: Stack) -> None:
    say(served.workers[0], "one two three four five six. ", finish="eos", times=9)
    args = trainer.args(served.url)
    sample = trainer.Sample(index=0, prompt=QUESTION)
    generate = trainer.module.text_rollout(environment(*["\nMore.\n"] * 9), max_turns=9)
    trainer.generate(generate, args, sample, {**PARAMS, "max_new_tokens": 30})
    assert sample.status is sample.Status.TRUNCATED
    assert sum(sample.loss_mask) <= 30 + 3
    trainer.batch(args, [sample])


def test_observations_use_up_the_budget_too(trainer: Trainer, served: Stack) -> None:
    """A reply for which nothing is left is not asked for."""
    (worker,) = served.workers
    say(worker, "It is long. ")
    observation = "\nObservation: how long?\n"
    observed = len(worker.vocabulary.encode_bare(observation) if trainers.REAL else observation.split())
    budget = len(worker.vocabulary.encode_bare("It is long. ")) + 1 + observed
    sample = trainer.Sample(index=0, prompt=QUESTION)
    generate = trainer.module.text_rollout(environment(observation))
    trainer.generate(generate, trainer.args(served.url), sample, {**PARAMS, "max_new_tokens": budget})
    assert sample.status is sample.Status.TRUNCATED
    assert len(worker.log) == 1


def test_a_sample_that_was_removed_stays_removed(trainer: Trainer, served: Stack) -> None:
    say(served.workers[0], "It is long.")
    sample = trainer.Sample(index=0, prompt=QUESTION, remove_sample=True)
    trainer.generate(trainer.module.text_rollout(environment()), trainer.args(served.url), sample, PARAMS)
    assert sample.metadata["exact"]
    assert sample.remove_sample


def test_speculative_decoding_is_counted(trainer: Trainer, served: Stack) -> None:
    told = {"spec_verify_ct": 3, "spec_accept_token_num": 2, "spec_draft_token_num": 5}
    say(served.workers[0], "It is long.", extra_meta=told)
    sample = trainer.Sample(index=0, prompt=QUESTION)
    args = trainer.args(served.url, sglang_speculative_algorithm="EAGLE")
    trainer.generate(trainer.module.text_rollout(environment()), args, sample, PARAMS)
    assert sample.spec_info != type(sample.spec_info)()


@pytest.mark.parametrize("masked", [False, True])
def test_an_aborted_sample_goes_on_in_the_next_step(trainer: Trainer, served: Stack, masked: bool) -> None:
    (worker,) = served.workers
    args = trainer.args(served.url, partial_rollout=True, mask_offpolicy_in_partial_rollout=masked)
    generate = trainer.module.text_rollout(environment("\nObservation: more?\n"))
    say(worker, "It is", finish="abort")
    sample = trainer.Sample(index=3, prompt=QUESTION)
    trainer.generate(generate, args, sample, PARAMS)
    assert sample.status is sample.Status.ABORTED
    early = sample.response_length
    assert sum(sample.loss_mask) == early > 0
    worker.set_weight_version("1")
    say(worker, " long.", "1,094 km.")
    trainer.generate(generate, args, sample, PARAMS)
    assert sample.status is sample.Status.COMPLETED
    assert sample.weight_versions == ["default", "1", "1"]
    assert sample.loss_mask[:early] == [0 if masked else 1] * early
    sample.loss_mask[:early] = [1] * early
    check(worker, sample)
    assert "tito" not in sample.metadata
    trainer.batch(args, [sample])


def test_a_sample_that_was_aborted_in_the_queue_is_as_it_was(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    worker.hold()
    sample = trainer.Sample(index=3, prompt=QUESTION)
    generate = trainer.module.text_rollout(environment())
    args = trainer.args(served.url, partial_rollout=True)
    with ThreadPoolExecutor(1) as other:
        running = other.submit(trainer.generate, generate, args, sample, PARAMS)
        worker.wait_for_arrivals(1)
        call(f"{worker.url}/abort_request", {"abort_all": True})
        worker.release()
        running.result()
    assert sample.status is sample.Status.ABORTED
    assert sample.tokens == []
    say(worker, "1,094 km.")
    trainer.generate(generate, args, sample, PARAMS)
    check(worker, sample)


def test_a_loop_that_strips_trains_on_all_it_sampled(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    args = trainer.args(served.url, n_samples_per_prompt=2)
    say(worker, "\n\n It is long. \n", "\n\n Yes. \n", "\n\n 1,094 km. \n")
    generate = trainer.module.text_rollout(environment("\nA?\n", "\nB?\n"), tidy=str.strip)
    sample = trainer.Sample(index=3, group_index=0, prompt=QUESTION)
    made = trainer.generate(generate, args, sample, PARAMS)
    assert len(made) == 3
    assert {one.rollout_id for one in made} == {3}
    assert sum(sum(one.loss_mask) for one in made) == sum(len(record.output_ids) for record in worker.log)
    assert not any(one.remove_sample for one in made)
    assert all(one.response == "It is long.\nA?\nYes.\nB?\n\n\n 1,094 km. \n" for one in made)
    batch = trainer.batch(args, [made])
    assert len(batch["tokens"]) == 3


def test_with_partial_rollouts_one_sample_comes_back_and_what_is_left_out_is_told(
    trainer: Trainer, served: Stack
) -> None:
    say(served.workers[0], "\n\n It is long. \n", "\n\n Yes. \n")
    generate = trainer.module.text_rollout(environment("\nA?\n"), tidy=str.strip)
    sample = trainer.Sample(index=3, prompt=QUESTION)
    made = trainer.generate(generate, trainer.args(served.url, partial_rollout=True), sample, PARAMS)
    assert made is sample
    assert sample.metadata["replies_left_out"] == 1
    assert not sample.remove_sample, sample.metadata["reasons"]
    assert sum(sample.loss_mask) == len(served.workers[0].log[-1].output_ids)


def test_lost_history_removes_the_sample_and_breaks_no_batch(trainer: Trainer, served: Stack) -> None:
    """A router that was restarted without a store between two steps."""
    args = trainer.args(served.url, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    generate = trainer.module.text_rollout(environment("\nObservation: more?\n"))
    say(served.workers[0], "It is a long river, and", finish="abort")
    sample = trainer.Sample(index=3, prompt=QUESTION)
    trainer.generate(generate, args, sample, PARAMS)
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(policy="return")) as other:
        say(other.workers[0], " more.", "1,094 km.")
        again = trainer.args(other.url, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
        trainer.generate(generate, again, sample, PARAMS)
    assert sample.status is sample.Status.COMPLETED
    assert sample.remove_sample
    assert "unknown_reply" in sample.metadata["reasons"]
    batch = trainer.batch(again, [sample])
    assert sum(batch["loss_masks"][0]) == 0


def told(numbers: Any) -> str:
    return base64.b64encode(np.asarray(numbers, "<i4").tobytes()).decode()


def extras(worker: EmbeddedWorker, prompt: int, text: str) -> dict[str, Any]:
    """What an engine tells of a reply behind so many tokens: rows of 2 layers and 3 experts, and sets of two."""
    count = len(worker.vocabulary.encode_bare(text)) + 1  # and the token that ends it
    rows = np.arange((prompt + count - 1) * 6) % 60 + 1
    return {
        "routed_experts": told(rows),
        "top_p_token_ids": told(np.arange(2 * count) + 7),
        "top_p_token_offsets": told(np.arange(count + 1) * 2),
    }


@pytest.mark.parametrize("complete", [True, False])
def test_what_is_replayed_fits_the_tokens(trainer: Trainer, served: Stack, complete: bool) -> None:
    (worker,) = served.workers
    args = trainer.args(served.url, rollout_top_p=0.9, use_rollout_routing_replay=True)
    prompt = len(worker.vocabulary.encode_bare(QUESTION))
    worker.script(text="It is long.", extra_meta=extras(worker, prompt, "It is long."))
    first = len(worker.vocabulary.encode_bare("It is long.")) + 1
    observed = len(worker.vocabulary.encode_bare("\nA?\n"))
    more = extras(worker, prompt + first + observed, "Yes.") if complete else {}
    worker.script(text="Yes.", extra_meta=more)
    sample = trainer.Sample(index=3, prompt=QUESTION)
    params = {**PARAMS, "custom_params": {"return_top_p_token_ids": True}}
    trainer.generate(trainer.module.text_rollout(environment("\nA?\n")), args, sample, params)
    assert sample.remove_sample is not complete
    rows = np.asarray(sample.rollout_routed_experts)
    assert rows.shape == (len(sample.tokens) - 1, 2, 3)
    assert rows.min() >= 0
    if complete:
        assert rows.ravel().tolist() == (np.arange(rows.size) % 60 + 1).tolist()
    if trainer.name == "slime":
        offsets = np.asarray(sample.rollout_top_p_token_offsets)
        assert len(offsets) == sample.response_length + 1
        if complete:
            assert np.diff(offsets).tolist() == [2 * one for one in sample.loss_mask]
    trainer.batch(args, [sample])


@pytest.mark.parametrize("complete", [True, False])
def test_the_rows_of_an_indexer_are_replayed_too(trainer: Trainer, served: Stack, complete: bool) -> None:
    if trainer.name == "slime":
        pytest.skip("slime replays no indexer")
    (worker,) = served.workers
    count = len(worker.vocabulary.encode_bare(QUESTION))
    for text in ("It is long.", "Yes."):
        count += len(worker.vocabulary.encode_bare(text)) + 1
        rows = np.arange((count - 1) * 4) % 60
        say(worker, text, extra_meta={"indexer_topk": told(rows)} if complete or text != "Yes." else {})
        count += len(worker.vocabulary.encode_bare("\nA?\n"))
    args = trainer.args(served.url, use_rollout_indexer_replay=True)
    sample = trainer.Sample(index=3, prompt=QUESTION, metadata={"indexer_layers": 2})
    trainer.generate(trainer.module.text_rollout(environment("\nA?\n")), args, sample, PARAMS)
    assert np.asarray(sample.rollout_indexer_topk).shape == (len(sample.tokens) - 1, 2, 2)
    assert sample.remove_sample is not complete
    assert ("indexer_topk_missing" in sample.metadata["reasons"]) is not complete


def test_an_evaluation_replays_nothing_and_is_kept_apart(trainer: Trainer, served: Stack) -> None:
    say(served.workers[0], "It is long.")
    args = trainer.args(served.url, rollout_top_p=0.9, use_rollout_routing_replay=True)
    sample = trainer.Sample(index=3, prompt=QUESTION)
    trainer.generate(trainer.module.text_rollout(environment()), args, sample, PARAMS, evaluation=True)
    check(served.workers[0], sample)
    assert sample.rollout_routed_experts is None
    assert not served.retrieve(QUESTION + "It is long.")["exact"]


# -- agents ------------------------------------------------------------------------------------------------------------


async def ask(base_url: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/v1/chat/completions", json={"messages": messages, **fields}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def agent(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """A planner that asks twice, and a critic with a system prompt of its own."""
    messages = [{"role": "user", "content": str(prompt)}]
    for _ in range(2):
        reply = await ask(base_url, messages, **request_kwargs)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    await ask(base_url, [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Good?"}])
    return {"reward": 0.5, "task": metadata["task"]}


@pytest.fixture
def sessions() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(policy="return")) as made:
        made.workers[0].script(text="Plan.", times=1)
        made.workers[0].script(text="Done.", times=1)
        made.workers[0].script(text="Good.", times=1)
        yield made
        assert made.idle()


def test_an_agents_branches_become_samples(trainer: Trainer, sessions: Stack) -> None:
    (worker,) = sessions.workers
    args = trainer.args(sessions.url)
    sample = trainer.Sample(index=4, group_index=1, prompt="Plan it.", metadata={"task": "t"})
    made = trainer.generate(trainer.module.agent_rollout(agent), args, sample, PARAMS)
    assert [one.rollout_id for one in made] == [4, 4]
    assert [one.reward for one in made] == [0.5, 0.5]
    assert [one.metadata["task"] for one in made] == ["t", "t"]
    assert [one.response for one in made] == ["Done.", "Good."]
    assert {one.status for one in made} == {sample.Status.COMPLETED}
    for one in made:
        check(worker, one)
    assert sum(sum(one.loss_mask) for one in made) == sum(len(record.output_ids) for record in worker.log)
    assert sessions.get("/sessions").json()["sessions"] == []
    trainer.batch(args, [made])


def test_the_tasks_branches_alone_may_be_asked_for(trainer: Trainer, sessions: Stack) -> None:
    """The critic has another system prompt than the planner."""
    sample = trainer.Sample(index=4, group_index=1, prompt="Plan it.", metadata={"task": "t"})
    rollout = trainer.module.agent_rollout(agent, roots="head")
    (one,) = trainer.generate(rollout, trainer.args(sessions.url), sample, PARAMS)
    assert one.response == "Done."
    check(sessions.workers[0], one)


def test_an_agent_may_give_its_reward_to_the_session(trainer: Trainer, sessions: Stack) -> None:
    """Without one a sample keeps what the trainer gave it."""

    async def scored(base_url: str, prompt: Any, metadata: dict[str, Any], **_more: Any) -> None:
        await ask(base_url, [{"role": "user", "content": str(prompt)}])
        if metadata["scored"]:
            body = {"reward_info": {"score": 0.75}}
            async with aiohttp.ClientSession() as http, http.post(f"{base_url}/reward_info", json=body) as answer:
                assert answer.status == 200

    generate = trainer.module.agent_rollout(scored)
    for number, reward in ((True, 0.75), (False, 0.25)):
        sample = trainer.Sample(index=4, prompt="Plan it.", reward=0.25, metadata={"scored": number})
        (one,) = trainer.generate(generate, trainer.args(sessions.url), sample, PARAMS)
        assert one.reward == reward
    sessions.workers[0].forget_scripts()


def test_what_is_over_counts_although_the_trainer_has_enough(
    trainer: Trainer, sessions: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    from middleware_hub.integrations import samples

    async def quick(base_url: str, prompt: Any, **_more: Any) -> None:
        await ask(base_url, [{"role": "user", "content": str(prompt)}])

    monkeypatch.setattr(samples, "POLL", 60.0)
    args = trainer.args(sessions.url, aborted=True)
    sample = trainer.Sample(index=4, prompt="Plan it.")
    (one,) = trainer.generate(trainer.module.agent_rollout(quick), args, sample, PARAMS)
    assert one.status is one.Status.COMPLETED
    check(sessions.workers[0], one)
    sessions.workers[0].forget_scripts()


# -- groups ------------------------------------------------------------------------------------------------------------


def claimed(served: Stack, namespace: str = "") -> Any:
    answer = served.post("/trajectories/claim", {}, headers={"x-radix-namespace": namespace} if namespace else {})
    assert answer.status == 200, answer.content
    return answer.json()


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("groups", [None, "run 1"])
def test_a_group_is_named_only_if_the_run_is(
    trainer: Trainer, served: Stack, groups: str | None, evaluation: bool
) -> None:
    """One that nobody claims would stay in memory, so the router hears of none by itself, and of no evaluation."""
    (worker,) = served.workers
    args, made = trainer.args(served.url), []
    for number in range(2):
        say(worker, "It is long. ", f"1,09{number} km.")
        generate = trainer.module.text_rollout(environment("\nHow long?\n"), groups=groups)
        sample = trainer.Sample(index=number, group_index=7, prompt=QUESTION, reward=None if number else 0.5)
        made.append(trainer.generate(generate, args, sample, PARAMS, evaluation))
    found = claimed(served, "evaluation" if evaluation else "")
    if groups is None or evaluation:
        assert found["claim_id"] is None
        assert not any(found["waiting"].values())
        return
    assert [one["group_id"] for one in found["groups"]] == ["run 1/7"]
    assert not found["groups"][0]["partial"]
    assert [one["reward"] for one in found["samples"]] == [0.5, None]
    for one, sample in zip(found["samples"], made, strict=True):
        (only,) = one["trajectories"]
        assert only["tokens"] == sample.tokens


def test_a_reward_that_is_no_finite_number_is_none(trainer: Trainer, served: Stack) -> None:
    say(served.workers[0], "It is long.")
    args = trainer.args(served.url, n_samples_per_prompt=1)
    sample = trainer.Sample(index=0, group_index=7, prompt=QUESTION, reward=float("nan"))
    trainer.generate(trainer.module.text_rollout(environment(), groups="run 1"), args, sample, PARAMS)
    found = served.post("/trajectories/claim", {"allow_partial": True}).json()
    assert [one["reward"] for one in found["samples"]] == [None]


def test_a_rollout_that_samples_nothing_is_in_no_group(trainer: Trainer, served: Stack) -> None:
    sample = trainer.Sample(index=0, group_index=7, prompt=QUESTION)
    args = trainer.args(served.url, n_samples_per_prompt=1)
    generate = trainer.module.text_rollout(environment(), groups="run 1")
    trainer.generate(generate, args, sample, {**PARAMS, "max_new_tokens": 0})
    assert sample.remove_sample
    assert "nothing_sampled" in sample.metadata["reasons"]
    assert not any(claimed(served)["waiting"].values())


def test_a_rollout_that_rewrites_its_history_is_one_sample_of_its_group(trainer: Trainer, served: Stack) -> None:
    (worker,) = served.workers
    say(worker, "It is long. ", "1,094 km.")
    act = environment("\nHow long?\n")
    generate = trainer.module.text_rollout(act, tidy=str.strip, groups="run 1")
    args = trainer.args(served.url, n_samples_per_prompt=1)
    sample = trainer.Sample(index=0, group_index=7, prompt=QUESTION)
    trainer.generate(generate, args, sample, PARAMS)
    (only,) = claimed(served)["samples"]
    assert sum(sum(one["loss_mask"]) for one in only["trajectories"]) == sum(len(one.output_ids) for one in worker.log)


def test_an_agents_session_is_kept_for_who_claims_it(trainer: Trainer, sessions: Stack) -> None:
    args = trainer.args(sessions.url, n_samples_per_prompt=1)
    sample = trainer.Sample(index=4, group_index=1, prompt="Plan it.", metadata={"task": "t"})
    made = trainer.generate(trainer.module.agent_rollout(agent, groups="run 1"), args, sample, PARAMS)
    found = claimed(sessions)
    assert [one["group_id"] for one in found["groups"]] == ["run 1/1"]
    (only,) = found["samples"]
    assert only["reward"] == 0.5
    ids = [one["prompt_ids"] + one["response_ids"] for one in only["trajectories"]]
    assert sorted(ids) == sorted(one.tokens for one in made)
    assert sessions.post("/trajectories/ack", {"claim_id": found["claim_id"]}).status == 200


@pytest.mark.parametrize("complete", [True, False])
def test_an_agents_turns_are_replayed_too(trainer: Trainer, served: Stack, complete: bool) -> None:
    """Each turn tells the sets of its own tokens; a branch has them one behind the other, and none for context."""
    if trainer.name == "miles":
        pytest.skip("miles replays no sets")
    (worker,) = served.workers

    async def asking(base_url: str, prompt: Any, **_more: Any) -> None:
        messages = [{"role": "user", "content": str(prompt)}]
        for _ in range(2):
            reply = await ask(base_url, messages)
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]

    for text in ("Plan.", "Done."):
        told = {name: value for name, value in extras(worker, 1, text).items() if name != "routed_experts"}
        worker.script(text=text, extra_meta=told if complete or text == "Plan." else {})
    args = trainer.args(served.url, rollout_top_p=0.9)
    made = trainer.generate(
        trainer.module.agent_rollout(asking), args, trainer.Sample(index=4, prompt="Plan it."), PARAMS
    )
    (one,) = made
    assert one.remove_sample is not complete
    offsets = np.asarray(one.rollout_top_p_token_offsets)
    if complete:
        assert np.diff(offsets).tolist() == [2 * mask for mask in one.loss_mask]
        counts = [len(record.output_ids) for record in worker.log]
        assert one.rollout_top_p_token_ids == [7 + number for count in counts for number in range(2 * count)]
    trainer.batch(args, [made])


def test_an_agent_that_fails_loses_no_tokens(trainer: Trainer, sessions: Stack) -> None:
    async def broken(base_url: str, prompt: Any, **_more: Any) -> None:
        await ask(base_url, [{"role": "user", "content": str(prompt)}])
        raise RuntimeError("no such tool")

    args = trainer.args(sessions.url)
    made = trainer.generate(
        trainer.module.agent_rollout(broken), args, trainer.Sample(index=4, prompt="Plan it."), PARAMS
    )
    (one,) = made
    assert "no such tool" in one.metadata["agent_error"]
    check(sessions.workers[0], one)
    sessions.workers[0].forget_scripts()


def test_an_agent_that_was_cancelled_by_others_cancels_no_trainer(trainer: Trainer, sessions: Stack) -> None:
    """As when a tool server's library gives up a task for which the agent waits."""

    async def broken(base_url: str, prompt: Any, **_more: Any) -> None:
        await ask(base_url, [{"role": "user", "content": str(prompt)}])
        given_up = asyncio.ensure_future(asyncio.sleep(60))
        given_up.cancel()
        await given_up

    args = trainer.args(sessions.url)
    made = trainer.generate(
        trainer.module.agent_rollout(broken), args, trainer.Sample(index=4, prompt="Plan it."), PARAMS
    )
    (one,) = made
    assert "CancelledError" in one.metadata["agent_error"]
    check(sessions.workers[0], one)
    sessions.workers[0].forget_scripts()


def test_an_agent_ends_with_its_rollout(trainer: Trainer, sessions: Stack) -> None:
    """A trainer cancels what it does not want any more. An agent that went on would use its tools, and the workers."""
    ended: list[str] = []

    async def waiting(**_more: Any) -> None:
        whole.cancel()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("agent")
            raise

    rollout = trainer.module.agent_rollout(waiting)

    async def cancelled(*given: Any, **more: Any) -> Any:
        nonlocal whole
        whole = asyncio.ensure_future(rollout(*given, **more))
        with suppress(asyncio.CancelledError):
            await whole
        await asyncio.sleep(0)
        assert whole.cancelled()
        ended.append("rollout")
        raise RuntimeError("it was cancelled")

    whole: asyncio.Future[Any]
    with pytest.raises(RuntimeError, match="it was cancelled"):
        trainer.generate(cancelled, trainer.args(sessions.url), trainer.Sample(index=4, prompt="Plan it."), PARAMS)
    assert ended == ["agent", "rollout"]
    assert sessions.get("/sessions").json()["sessions"] == []


def test_an_agent_that_asks_nothing_is_one_sample_that_nothing_is_trained_on(trainer: Trainer, sessions: Stack) -> None:
    async def idle(**_more: Any) -> dict[str, Any]:
        return {"reward": 0.25}

    args = trainer.args(sessions.url)
    made = trainer.generate(trainer.module.agent_rollout(idle), args, trainer.Sample(index=4, prompt="x"), PARAMS)
    (one,) = made
    assert one.status is one.Status.FAILED
    assert one.reward == one.metadata["reward"] == 0.25
    assert sum(trainer.batch(args, [made])["loss_masks"][0]) == 0
    sessions.workers[0].forget_scripts()


@pytest.mark.parametrize("groups", [None, "run 1"])
def test_a_session_that_is_lost_breaks_no_batch(trainer: Trainer, sessions: Stack, groups: str | None) -> None:
    """Its router restarted without a store, say. A step has many other samples."""

    async def forgotten(base_url: str, prompt: Any, **_more: Any) -> dict[str, Any]:
        await ask(base_url, [{"role": "user", "content": str(prompt)}])
        async with aiohttp.ClientSession() as http, http.delete(base_url) as answer:
            assert answer.status == 200
        return {"reward": 0.25}

    args = trainer.args(sessions.url)
    sample = trainer.Sample(index=4, group_index=1, prompt="x")
    made = trainer.generate(trainer.module.agent_rollout(forgotten, groups=groups), args, sample, PARAMS)
    (one,) = made
    assert one.status is one.Status.FAILED
    assert one.remove_sample
    assert "unknown_reply" in one.metadata["reasons"]
    assert sum(trainer.batch(args, [made])["loss_masks"][0]) == 0
    sessions.workers[0].forget_scripts()


def test_agents_and_partial_rollouts_exclude_each_other(trainer: Trainer, sessions: Stack) -> None:
    args = trainer.args(sessions.url, partial_rollout=True)
    with pytest.raises(ValueError, match="leave --partial-rollout off"):
        trainer.generate(trainer.module.agent_rollout(agent), args, trainer.Sample(index=4, prompt="x"), PARAMS)
    sessions.workers[0].forget_scripts()


def test_a_trainer_that_has_enough_stops_its_agents(trainer: Trainer, sessions: Stack) -> None:
    (worker,) = sessions.workers
    worker.hold(after=1)

    async def slow(base_url: str, prompt: Any, **_more: Any) -> None:
        await ask(base_url, [{"role": "user", "content": str(prompt)}])

    args = trainer.args(sessions.url, aborted=True)
    made = trainer.generate(
        trainer.module.agent_rollout(slow), args, trainer.Sample(index=4, prompt="Plan it."), PARAMS
    )
    assert made.status is made.Status.ABORTED
    worker.release()
    worker.forget_scripts()


# -- rewards, versions --------------------------------------------------------------------------------------------------


def test_a_rollout_with_many_samples_counts_once_in_its_group(trainer: Trainer) -> None:
    if trainer.name == "miles":
        pytest.skip("miles centres rewards by rollout itself")
    args = trainer.args("http://h:1", grpo_std_normalization=False)
    rows = [(0, 1, 1.0), (0, 1, 1.0), (0, 1, 1.0), (0, 2, 0.0), (7, 3, 5.0), (7, 4, 5.0)]
    found = [trainer.Sample(group_index=group, index=rollout, reward=reward) for group, rollout, reward in rows]
    raw, centred = trainer.module.rewards_by_group(args, found)
    assert raw == [row[2] for row in rows]
    assert centred == [0.5, 0.5, 0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [1.0 / (2**0.5 + 1e-6), -1.0 / (2**0.5 + 1e-6)]),
        ("reinforce_plus_plus_baseline", [1.0, -1.0]),
        ("ppo", [2.0, 0.0]),
    ],
)
def test_an_estimator_centres_rewards_and_perhaps_scales_them(
    trainer: Trainer, estimator: str, expected: list[float]
) -> None:
    if trainer.name == "miles":
        pytest.skip("miles centres rewards by rollout itself")
    args = trainer.args("http://h:1", advantage_estimator=estimator)
    found = [trainer.Sample(group_index=0, index=number, reward=reward) for number, reward in enumerate((2.0, 0.0))]
    raw, made = trainer.module.rewards_by_group(args, found)
    assert raw == [2.0, 0.0]
    assert made == pytest.approx(expected)


@pytest.mark.skipif(trainers.REAL, reason="it takes the trainer away")
@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_trainer_that_does_not_fit_says_so_at_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    with trainers.installed():
        bare = ModuleType(f"{name}.utils.types")
        bare.Sample = type("Sample", (), {"tokens": None})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{name}.utils.types", bare)
        sys.modules.pop(f"middleware_hub.integrations.{name}", None)
        with pytest.raises(ImportError, match=rf"is for {name} .* which lacks .*Sample.rollout_id"):
            importlib.import_module(f"middleware_hub.integrations.{name}")


def test_versions_outside_of_the_range_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from middleware_hub.integrations import versions

    monkeypatch.setitem(versions.SUPPORTED, "pytest", ((0, 1), (0, 2)))
    with pytest.warns(UserWarning, match=r"tested with pytest 0\.1 or later, before 0\.2"):
        versions.require("pytest", ["pytest:raises"])
    with pytest.raises(ImportError, match="lacks pytest:nothing_of_this_name"):
        versions.require("pytest", ["pytest:nothing_of_this_name"])
    monkeypatch.setitem(versions.SUPPORTED, "no_such_trainer", ((0, 1), (0, 2)))
    with pytest.raises(ImportError, match=r"is for no_such_trainer .*, and .*python\S* has no no_such_trainer$"):
        versions.require("no_such_trainer", ["no_such_trainer:Sample"])


def test_a_trainer_that_is_not_installed_is_named_and_not_what_it_needs() -> None:
    from middleware_hub.integrations import versions

    code = f"""if True:
        import importlib.util, sys
        sys.modules["torch"] = None
        for name in {[*versions.SUPPORTED]!r}:
            if importlib.util.find_spec(name) is not None:
                continue
            try:
                importlib.import_module(f"middleware_hub.integrations.{{name}}")
            except ImportError as error:
                assert f"has no {{name}}" in str(error), error
            else:
                raise AssertionError(name)
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
