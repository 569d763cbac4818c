"""Real SGLang, and a router that is killed after each turn: the worker itself tells that the conversation is one sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_real_sglang import Truth, generate, retrieve, streamed, user
from tests.support import sglang_server, templates
from tests.support.client import call
from tests.support.programs import Program
from tests.support.sglang_server import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TURNS = 10


def routers(workers: list[SGLangServer], folder: Path, count: int = 1) -> list[Program]:
    template = str(templates.folder() / "qwen2_5.jinja")
    flags = ["--tokenizer-path", str(sglang_server.model_path()), "--chat-template", template, "--verify-rate", "1"]
    flags += ["--store", f"sqlite:{folder}/store/", "--worker-urls", workers[0].url]
    return [Program(f"router-{number}", *flags, folder=folder) for number in range(count)]


def again(router: Program) -> None:
    """Kill it, and start it again."""
    router.kill()
    router.start()
    router.wait_until_up()


def test_ten_turns_and_a_restart_after_each_are_one_sequence(
    sglang_workers: list[SGLangServer], tmp_path: Path
) -> None:
    """Its ids, and what it found in its own cache: all but the last token of the turn before."""
    text, truth = "<|im_start|>system\nA conversation that outlives its router.<|im_end|>\n", Truth()
    (router,) = routers(sglang_workers, tmp_path)
    with router:
        router.wait_until_up()
        for turn in range(TURNS):
            text += user(f"Turn {turn}: 你好 😀 naïve.")
            send = streamed if turn % 3 == 2 else generate
            reply = send(router.url, text, sampling_params={"max_new_tokens": 24})
            known = len(truth.tokens)
            truth = truth.after(reply)
            assert reply["meta_info"]["prompt_tokens"] == len(reply["prompt_token_ids"])
            assert reply["meta_info"]["cached_tokens"] >= known - 1
            text += reply["text"]
            again(router)
            truth.check(retrieve(router.url, text))
            text += "<|im_end|>\n"


def test_turns_at_two_routers_are_one_sequence(sglang_workers: list[SGLangServer], tmp_path: Path) -> None:
    text, truth = "<|im_start|>system\nA conversation at two routers.<|im_end|>\n", Truth()
    one, two = routers(sglang_workers, tmp_path, 2)
    with one, two:
        for router in (one, two):
            router.wait_until_up()
        for turn in range(TURNS):
            here, there = (one, two) if turn % 2 else (two, one)
            text += user(f"Turn {turn}")
            reply = generate(here.url, text, sampling_params={"max_new_tokens": 24})
            truth = truth.after(reply)
            text += reply["text"]
            truth.check(retrieve(there.url, text))
            text += "<|im_end|>\n"


def test_a_session_and_a_restart_after_each_turn_are_one_sequence(
    sglang_workers: list[SGLangServer], tmp_path: Path
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    chain: list[int] = []
    (router,) = routers(sglang_workers, tmp_path)
    with router:
        router.wait_until_up()
        root = f"{router.url}/sessions/{call(f'{router.url}/sessions', {}).json()['session_id']}"
        for turn in range(TURNS):
            body = {"model": "m", "messages": messages, "max_tokens": 24, "return_prompt_token_ids": True}
            answer = call(f"{root}/v1/chat/completions", body)
            assert answer.status == 200, answer.content
            reply = answer.json()
            (choice,) = reply["choices"]
            sent = choice["meta_info"]["prompt_token_ids"]
            assert sent[: len(chain)] == chain, f"turn {turn}"
            assert reply["usage"]["prompt_tokens"] == len(sent)
            if chain:
                assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(chain) - 1
            again(router)
            (branch,) = call(f"{root}/trajectories").json()["trajectories"]
            chain = [*branch["prompt_ids"], *branch["response_ids"]]
            assert chain[: len(sent)] == sent
            assert len(chain) == len(sent) + reply["usage"]["completion_tokens"]
            messages += [choice["message"], {"role": "user", "content": f"And {turn}?"}]
        (only,) = call(f"{root}/finalize", {}).json()["trajectories"]
        assert [*only["prompt_ids"], *only["response_ids"]] == chain
        assert only["exact"], only["reasons"]
