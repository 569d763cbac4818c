"""The requests of NeMo Gym 0.7.0, as its `vllm_model` server sent them: every turn extends the tokens of its own rollout.

It was run by hand, because it asks for Python 3.13.14: docs/trainers.md. Each message of the model comes back with reasoning
under two names, and with the ids and logprobs that NeMo Gym keeps; the tokens so far come in `required_prefix_token_ids`.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support import templates
from tests.support.oracle import Speller
from tests.support.stack import Stack, stack

TOOL = {"type": "function", "function": {"name": "value", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "value", "arguments": {}}\n</tool_call>'
SAID = "<think>\nI look it up, and up again.\n</think>\n\nLet me see..."
CALLED = f"{SAID}\n{CALL}"
ROLLOUTS, TURNS = 4, 3
QWEN3 = str(templates.folder() / "qwen3.jinja")

Said = dict[str, Any]


def spelled(speller: Speller, text: str, chance: random.Random) -> list[int]:
    """Tokens of a text, of which some are cut in two: an encoder would choose others."""
    ids: list[int] = []
    for number in speller.encode_tail(text):
        piece = speller.spell([number], skip_special=False).text
        cut = 0 if number in speller.added or len(piece) < 3 else chance.choice([0, 0, 1, 2])
        ids += speller.encode_tail(piece[:cut]) + speller.encode_tail(piece[cut:]) if cut else [number]
    assert speller.spell(ids, skip_special=False).text == text
    return ids


def rollout(served: Stack) -> list[Said]:
    """One rollout, with the turns' tokens as NeMo Gym reads them out of the replies."""
    messages: list[Said] = [{"role": "user", "content": "What is it worth?"}]
    turns: list[Said] = []
    for _ in range(TURNS):
        body: Said = {"model": "policy", "messages": messages, "tools": [TOOL], "parallel_tool_calls": False}
        body |= {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
        if turns:
            body["required_prefix_token_ids"] = turns[-1]["prompt_token_ids"] + turns[-1]["generation_token_ids"]
        reply = served.post("/v1/chat/completions", body).json()
        (choice,) = reply["choices"]
        said, listed = choice["message"], choice["logprobs"]["content"]
        assert choice["token_ids"] == [int(one["token"].removeprefix("token_id:")) for one in listed]
        turn = {"prompt_token_ids": reply["prompt_token_ids"], "generation_token_ids": choice["token_ids"]}
        turn["generation_log_probs"] = [one["logprob"] for one in listed]
        turns.append(turn)
        reasoning, calls = said["reasoning_content"], said.get("tool_calls") or []
        echo = {"role": "assistant", "content": said["content"], "tool_calls": calls, **turn}
        echo |= {"reasoning_content": reasoning, "reasoning": reasoning}
        messages = [*messages, echo, {"role": "user", "content": "Go on."}]
        for call in calls:
            messages[-1] = {"role": "tool", "tool_call_id": call["id"], "content": '{"value":386}'}
    return turns


@pytest.mark.parametrize("text", [CALLED, SAID], ids=["calls", "texts"])
@pytest.mark.parametrize("interface", ["vllm", "sglang"])
def test_rollouts_that_say_the_same_in_other_tokens(interface: Any, text: str) -> None:
    """All at once, and of one prompt: the id of a call says which of them goes on, or the tokens that the message tells."""
    with stack("qwen", styles=("incremental",), sessions={"chat_template": QWEN3}, interface=interface) as served:
        (worker,) = served.workers
        chance = random.Random(interface)
        for _ in range(ROLLOUTS * TURNS):
            worker.script(spelled(served.spelling, text, chance))
        with ThreadPoolExecutor(ROLLOUTS) as pool:
            rollouts = list(pool.map(rollout, [served] * ROLLOUTS))
        log = {(tuple(one.input_ids), tuple(one.output_ids)): one for one in worker.log}
        assert len(log) == len(worker.log) == ROLLOUTS * TURNS
        for turns in rollouts:
            context: list[int] = []
            for turn in turns:
                record = log.pop((tuple(turn["prompt_token_ids"]), tuple(turn["generation_token_ids"])))
                assert turn["generation_log_probs"] == pytest.approx(record.logprobs)
                assert turn["prompt_token_ids"][: len(context)] == context
                context = turn["prompt_token_ids"] + turn["generation_token_ids"]
        assert not log
        assert served.idle()


@pytest.mark.parametrize("told", ["abc", [1.5], ["1"], [2**40], [-1], [], None, [[1]]])
def test_what_is_told_of_tokens_and_is_none_counts_nothing(told: Any) -> None:
    """The newest of the equal replies goes on."""
    with stack("qwen", styles=("incremental",), sessions={"chat_template": QWEN3}) as served:
        (worker,) = served.workers
        chance = random.Random(1)
        for _ in range(3):
            worker.script(spelled(served.spelling, SAID, chance))
        asked: list[Said] = [{"role": "user", "content": "What is it worth?"}]
        for _ in range(2):
            said = served.post("/v1/chat/completions", {"messages": asked}).json()["choices"][0]["message"]
        echo = {**said, "prompt_token_ids": told, "generation_token_ids": told}
        answer = served.post(
            "/v1/chat/completions", {"messages": [*asked, echo, {"role": "user", "content": "Go on."}]}
        )
        assert answer.status == 200, answer.content
        newest = worker.log[1].input_ids + worker.log[1].output_ids
        assert worker.log[2].input_ids[: len(newest)] == newest
