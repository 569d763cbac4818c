"""Earlier turns that keep their ids, on a real engine: what its cache holds is the witness."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.conftest import RouterFor
from tests.support import templates
from tests.support.client import call
from tests.support.engines import Engine

ENGINES = ("sglang", "vllm")


@pytest.mark.parametrize(
    ("template", "history", "in_session"),
    [
        ("qwen3_5_think", "template", True),
        ("qwen3_5_think", "template", False),
        ("qwen3_5_think", "keep", False),
        ("qwen2_5", "template", False),
    ],
)
def test_a_turn_meets_what_the_one_before_left_in_the_cache(
    engine: Engine, router_for: RouterFor, template: str, history: str, in_session: bool
) -> None:
    """`cached_tokens` of turn k + 1 are at least prompt and output of turn k, less the token that nothing was computed behind.

    The template opens a thought, and the random model never closes it: nothing of a reply is left in the next rendering.
    """
    chosen = str(templates.folder() / f"{template}.jinja")
    url = router_for(0, flags=("--chat-template", chosen, "--history", history, "--verify-rate", "1"))
    root = f"/sessions/{call(f'{url}/sessions', {}).json()['session_id']}" if in_session else ""
    messages: list[Any] = [{"role": "user", "content": f"Hello, {template} {history} {in_session}"}]
    chain: list[int] = []
    finish = ""
    for number in range(4):
        # The seed: a random model may sample a special token in mid-reply, and the template then writes another turn.
        body: dict[str, Any] = {"messages": messages, "max_tokens": 20, "temperature": 0.8, "seed": number}
        body |= {"return_prompt_token_ids": True, **({} if in_session else {"return_trajectory": True})}
        answer = call(f"{url}{root}/v1/chat/completions", body)
        assert answer.status == 200, answer.content
        (choice,), usage = answer.json()["choices"], answer.json()["usage"]
        told = choice["meta_info"]
        sent = told["prompt_token_ids"]
        if answer.headers.get("x-radix-reasons") == "left_out":
            # A random model may stop with a token that the template does not end turns with: such a reply is left out.
            assert finish == "stop"
            assert chain[-1] != sent[len(chain) - 1]
            chain = chain[:-1]
        assert sent[: len(chain)] == chain, f"turn {number}: {answer.headers.get('x-radix-reasons')}"
        if chain:
            assert usage["prompt_tokens_details"]["cached_tokens"] >= engine.cached(len(chain))
            rewritten = template == "qwen3_5_think" and history == "template"
            assert answer.headers.get("x-radix-spliced-turns") == (str(number) if rewritten else None)
        if in_session:
            found = call(f"{url}{root}/trajectories?export_all_checkpoints=1").json()["trajectories"]
            (one,) = [one for one in found if one["branch"] == told["generation_id"]]
            chain = one["prompt_ids"] + one["response_ids"]
        else:
            chain = told["trajectory"]["tokens"]
            assert told["trajectory"]["exact"], told["trajectory"]["reasons"]
        assert chain[: len(sent)] == sent
        assert len(chain) == len(sent) + usage["completion_tokens"]
        message, finish = choice["message"], choice["finish_reason"]
        messages += [{"role": "assistant", "content": message["content"] or ""}, {"role": "user", "content": "Go on."}]
