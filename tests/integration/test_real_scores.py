"""A real engine scores what another one of the same weights sampled, and finds each token as likely as that one did."""

from __future__ import annotations

import pytest

from tests.integration.conftest import RouterFor
from tests.support.client import call
from tests.support.engine_server import EngineServer
from tests.support.engines import Engine

ENGINES = ("sglang", "vllm")


def test_a_reference_of_the_same_weights_says_the_same(
    engine: Engine, workers: list[EngineServer], router_for: RouterFor
) -> None:
    """Of every sampled token of two turns, and the sampled token of a greedy turn is its likeliest one."""
    scheme = "vllm+" if engine.kit.name.lower() == "vllm" else ""
    url = router_for(0, flags=("--scorer", f"ref={scheme}{workers[1].url}"))
    name = call(f"{url}/sessions", {}).json()["session_id"]
    messages = [{"role": "user", "content": "Hello"}]
    for _ in range(2):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0.0}
        answer = call(f"{url}/sessions/{name}/v1/chat/completions", body)
        assert answer.status == 200, answer.content
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
    answer = call(f"{url}/trajectories/score", {"session_id": name, "top_logprobs": 4})
    assert answer.status == 200, answer.content
    (one,) = answer.json()["trajectories"]
    assert len(one["ref_logprobs"]) == len(one["ref_top_logprobs"]) == len(one["response_ids"])
    for at, sampled in enumerate(one["response_mask"]):
        top = one["ref_top_logprobs"][at]
        assert len(top) == 4
        assert top == sorted(top, key=lambda pair: -pair[0])
        if sampled:
            assert one["ref_logprobs"][at] == pytest.approx(one["response_logprobs"][at], abs=0.05)
            assert one["response_ids"][at] in [token for _, token in top]
    cut = {
        "sequences": [{"input_ids": [*one["prompt_ids"], *one["response_ids"]], "start": len(one["prompt_ids"]) + 3}]
    }
    answer = call(f"{url}/trajectories/score", cut)
    assert answer.json()["sequences"][0]["ref_logprobs"] == pytest.approx(one["ref_logprobs"][3:], abs=0.05)
