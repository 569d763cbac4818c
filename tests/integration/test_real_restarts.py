"""A real engine, and a router that is killed after each turn: the worker itself tells that the conversation is one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.integration.test_real_sglang import Truth, generate, retrieve, streamed, user
from tests.support import templates
from tests.support.client import Answer, call
from tests.support.engine_server import EngineServer
from tests.support.engines import Engine
from tests.support.programs import Program
from tests.support.redis_server import empty_redis

ENGINES = ("sglang", "vllm")

TURNS = 10


def routers(
    engine: Engine,
    workers: list[EngineServer],
    folder: Path,
    count: int = 1,
    kind: Literal["sqlite", "redis"] = "sqlite",
) -> list[Program]:
    template = str(templates.folder() / "qwen2_5.jinja")
    flags = ["--tokenizer-path", str(engine.kit.model), "--chat-template", template, "--verify-rate", "1"]
    store = empty_redis() if kind == "redis" else f"sqlite:{folder}/store/"
    flags += ["--store", store, "--store-spool", f"{folder}/spool", "--worker-urls", workers[0].url]
    return [Program(f"router-{number}", *flags, folder=folder) for number in range(count)]


def again(router: Program) -> None:
    """Kill it, and start it again."""
    router.kill()
    router.start()
    router.wait_until_up()


def continued(answer: Answer, chain: list[int]) -> list[int]:
    """Return what a turn goes on from: not the token that the turn before stopped with, if the template writes another one."""
    return chain[:-1] if "left_out" in answer.headers.get("x-radix-reasons", "") else chain


def test_ten_turns_and_a_restart_after_each_are_one_sequence(
    engine: Engine, workers: list[EngineServer], tmp_path: Path
) -> None:
    """Its ids, and what it found in its own cache: all but the last token of the turn before."""
    text, truth = "<|im_start|>system\nA conversation that outlives its router.<|im_end|>\n", Truth()
    (router,) = routers(engine, workers, tmp_path)
    with router:
        router.wait_until_up()
        for turn in range(TURNS):
            text += user(f"Turn {turn}: 你好 😀 naïve.")
            send = streamed if turn % 3 == 2 else generate
            reply = send(router.url, text, sampling_params={"max_new_tokens": 24})
            known = len(truth.tokens)
            truth = truth.after(reply)
            assert reply["meta_info"]["prompt_tokens"] == len(reply["prompt_token_ids"])
            assert reply["meta_info"]["cached_tokens"] >= engine.cached(known)
            text += reply["text"]
            again(router)
            truth.check(retrieve(router.url, text))
            text += "<|im_end|>\n"


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_turns_at_two_routers_are_one_sequence(
    engine: Engine, workers: list[EngineServer], tmp_path: Path, kind: Literal["sqlite", "redis"]
) -> None:
    """Told by the worker: what it was sent, and what it found in its own cache."""
    text, truth = "<|im_start|>system\nA conversation at two routers.<|im_end|>\n", Truth()
    one, two = routers(engine, workers, tmp_path, 2, kind)
    with one, two:
        for router in (one, two):
            router.wait_until_up()
        for turn in range(TURNS):
            here, there = (one, two) if turn % 2 else (two, one)
            text += user(f"Turn {turn}: 你好 😀 naïve.")
            send = streamed if turn % 3 == 2 else generate
            reply = send(here.url, text, sampling_params={"max_new_tokens": 24})
            known = len(truth.tokens)
            truth = truth.after(reply)
            assert reply["meta_info"]["prompt_tokens"] == len(reply["prompt_token_ids"])
            assert reply["meta_info"]["cached_tokens"] >= engine.cached(known)
            text += reply["text"]
            truth.check(retrieve(there.url, text))
            text += "<|im_end|>\n"


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_session_at_two_routers_is_one_sequence(
    engine: Engine, workers: list[EngineServer], tmp_path: Path, kind: Literal["sqlite", "redis"]
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    chain: list[int] = []
    one, two = routers(engine, workers, tmp_path, 2, kind)
    with one, two:
        for router in (one, two):
            router.wait_until_up()
        path = f"/sessions/{call(f'{one.url}/sessions', {}).json()['session_id']}"
        for turn in range(TURNS):
            here, there = (one, two) if turn % 2 else (two, one)
            body = {"model": "m", "messages": messages, "max_tokens": 24, "return_prompt_token_ids": True}
            answer = call(f"{here.url}{path}/v1/chat/completions", body)
            assert answer.status == 200, answer.content
            (choice,) = answer.json()["choices"]
            sent, known = choice["meta_info"]["prompt_token_ids"], continued(answer, chain)
            assert sent[: len(known)] == known, f"turn {turn}"
            (branch,) = call(f"{there.url}{path}/trajectories").json()["trajectories"]
            chain = [*branch["prompt_ids"], *branch["response_ids"]]
            assert chain[: len(sent)] == sent
            messages += [choice["message"], {"role": "user", "content": f"And {turn}?"}]
        (only,) = call(f"{two.url}{path}/finalize", {}).json()["trajectories"]
        assert [*only["prompt_ids"], *only["response_ids"]] == chain
        assert only["exact"], only["reasons"]


def test_a_session_and_a_restart_after_each_turn_are_one_sequence(
    engine: Engine, workers: list[EngineServer], tmp_path: Path
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    chain: list[int] = []
    (router,) = routers(engine, workers, tmp_path)
    with router:
        router.wait_until_up()
        root = f"{router.url}/sessions/{call(f'{router.url}/sessions', {}).json()['session_id']}"
        for turn in range(TURNS):
            body = {"model": "m", "messages": messages, "max_tokens": 24, "return_prompt_token_ids": True}
            answer = call(f"{root}/v1/chat/completions", body)
            assert answer.status == 200, answer.content
            reply = answer.json()
            (choice,) = reply["choices"]
            sent, known = choice["meta_info"]["prompt_token_ids"], continued(answer, chain)
            assert sent[: len(known)] == known, f"turn {turn}"
            assert reply["usage"]["prompt_tokens"] == len(sent)
            if chain:
                assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= engine.cached(len(known))
            again(router)
            (branch,) = call(f"{root}/trajectories").json()["trajectories"]
            chain = [*branch["prompt_ids"], *branch["response_ids"]]
            assert chain[: len(sent)] == sent
            assert len(chain) == len(sent) + reply["usage"]["completion_tokens"]
            messages += [choice["message"], {"role": "user", "content": f"And {turn}?"}]
        (only,) = call(f"{root}/finalize", {}).json()["trajectories"]
        assert [*only["prompt_ids"], *only["response_ids"]] == chain
        assert only["exact"], only["reasons"]
