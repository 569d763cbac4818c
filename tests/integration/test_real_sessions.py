"""Agent sessions against real workers, with real clients: what is exported is what workers say they read and said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from tests.integration.conftest import RouterFor
from tests.support import templates
from tests.support.client import call
from tests.support.engines import Engine

ENGINES = ("sglang", "vllm")

TOLD: dict[str, Any] = {"return_prompt_token_ids": True, "return_token_ids": True}
Json = dict[str, Any]


@pytest.fixture
def root(router_for: RouterFor) -> str:
    """A session's own URL, in front of one worker: its cache is the witness."""
    flags = ("--chat-template", str(templates.folder() / "qwen2_5.jinja"), "--verify-rate", "1")
    url = router_for(0, flags=flags)
    made = call(f"{url}/sessions", {})
    assert made.status == 201, made.content
    return f"{url}/sessions/{made.json()['session_id']}"


def finalize(root: str) -> list[Json]:
    answer = call(f"{root}/finalize", {})
    assert answer.status == 200, answer.content
    found: list[Json] = answer.json()["trajectories"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client(engine: Engine, root: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{root}/v1", api_key="none")
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chain: list[int] = []
    sampled = 0
    for number in range(4):
        options: Any = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0.8, "extra_body": TOLD}
        if stream:
            chunks = list(
                client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
            )
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            choice, usage = chunks[-2].choices[0], chunks[-1].usage
        else:
            reply = client.chat.completions.create(**options)
            choice, usage, content = reply.choices[0], reply.usage, reply.choices[0].message.content
        sent = choice.model_extra["meta_info"]["prompt_token_ids"]
        assert sent[: len(chain)] == chain, f"turn {number}"
        assert usage.prompt_tokens == len(sent)
        if chain:
            # The engine's own word for it: all but the last token of the turn before was in its cache.
            assert usage.prompt_tokens_details.cached_tokens >= engine.cached(len(chain))
        (branch,) = call(f"{root}/trajectories").json()["trajectories"]
        chain = [*branch["prompt_ids"], *branch["response_ids"]]
        assert chain[: len(sent)] == sent
        assert len(chain) == len(sent) + usage.completion_tokens
        assert [*choice.prompt_token_ids, *choice.token_ids] == chain
        sampled += usage.completion_tokens
        if choice.finish_reason == "stop" and chain[-1] not in sent:
            break  # a special token with which the template ends no turn: the next prompt would be without it
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"And {number}?"}]
    (only,) = finalize(root)
    assert [*only["prompt_ids"], *only["response_ids"]] == chain
    assert sum(only["response_mask"]) == sampled
    assert only["exact"], only["reasons"]


def test_anthropics_client(root: str) -> None:
    client = anthropic.Anthropic(base_url=root, api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    chain: list[int] = []
    for number in range(3):
        with client.messages.stream(
            model="m", max_tokens=24, system="Be brief.", messages=messages, extra_body=TOLD
        ) as stream:
            message = stream.get_final_message()
        (branch,) = call(f"{root}/trajectories").json()["trajectories"]
        ids = [*branch["prompt_ids"], *branch["response_ids"]]
        assert ids[: len(chain)] == chain
        assert ids[-message.usage.output_tokens :] == branch["response_ids"][-message.usage.output_tokens :]
        chain = ids
        said = [block for block in message.content if block.type == "text" and block.text]
        messages.append({"role": "assistant", "content": said or "..."})
        if not said:
            break  # nothing but special tokens: what is sent back is not what was said
        if message.stop_reason == "end_turn" and chain[-1] not in chain[:-1]:
            break  # as above
        messages.append({"role": "user", "content": f"And {number}?"})
    assert all(one["exact"] for one in finalize(root))


def test_best_of_many_and_equal_requests_stay_apart(root: str) -> None:
    client = openai.OpenAI(base_url=f"{root}/v1", api_key="none")

    def ask(_: int) -> Any:
        return client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0, n=2
        )

    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(ask, range(8)))
    names = {choice.model_extra["meta_info"]["generation_id"] for reply in replies for choice in reply.choices}
    found = finalize(root)
    assert {one["branch"] for one in found} == names
    assert len(names) == 16


def test_errors_of_a_worker_come_in_the_dialect(root: str) -> None:
    client = openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], extra_body={"lora_path": "nobody"}
        )
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 50_000}])
    assert caught.value.code == "context_length_exceeded"
    assert call(root).json()["nodes"] == 0
