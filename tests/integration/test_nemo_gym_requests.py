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
SAID = f"<think>\nI look it up, and up again.\n</think>\n\nLet me see...\n{CALL}"
ROLLOUTS, TURNS = 4, 3

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
        reasoning = said["reasoning_content"]
        (call,) = said["tool_calls"]
        echo = {"role": "assistant", "content": said["content"], "tool_calls": [call], **turn}
        echo |= {"reasoning_content": reasoning, "reasoning": reasoning}
        messages = [*messages, echo, {"role": "tool", "tool_call_id": call["id"], "content": '{"value":386}'}]
    return turns


@pytest.mark.parametrize("interface", ["vllm", "sglang"])
def test_rollouts_that_say_the_same_in_other_tokens(interface: Any) -> None:
    """All at once, and of one prompt: the id of a call says which of them goes on."""
    template = str(templates.folder() / "qwen3.jinja")
    with stack("qwen", styles=("incremental",), sessions={"chat_template": template}, interface=interface) as served:
        (worker,) = served.workers
        chance = random.Random(interface)
        for _ in range(ROLLOUTS * TURNS):
            worker.script(spelled(served.spelling, SAID, chance))
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
