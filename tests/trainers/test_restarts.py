"""A router that is killed between two turns of an agent: with a store the agent goes on, without one nothing is made up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from middleware_hub.client import UnknownReplyError
from tests.support.programs import Program
from tests.support.vocabularies import vocabulary
from tests.trainers.test_openenv import Environments
from tests.trainers.test_openenv import plug as openenv  # noqa: F401  # a fixture
from tests.trainers.test_samples import ask
from tests.trainers.test_skyrl import Trainer, batch, check, sampled
from tests.trainers.test_skyrl import plug as skyrl  # noqa: F401  # a fixture
from worker.worker import EmbeddedWorker

USER = [{"role": "user", "content": "How long is the Elbe?"}]


@pytest.fixture
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(vocabulary("qwen")) as found:
        yield found


@pytest.fixture
def router(request: pytest.FixtureRequest, worker: EmbeddedWorker, tmp_path: Path) -> Iterator[Program]:
    """With a store, unless the test's own parameter says otherwise."""
    flags = ["--tokenizer-path", str(vocabulary("qwen")), "--worker-urls", worker.url]
    if getattr(request, "param", True):
        flags += ["--store", f"sqlite:{tmp_path / 'store'}/"]
    with Program("router", *flags, folder=tmp_path) as found:
        found.wait_until_up()
        yield found


def killed(router: Program) -> None:
    router.kill()
    router.start()
    router.wait_until_up()


def test_a_trajectory_of_skyrl_goes_on(
    skyrl: Any,  # noqa: F811
    worker: EmbeddedWorker,
    router: Program,
) -> None:
    async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        reply = await ask(base_url, prompt)
        await asyncio.to_thread(killed, router)
        await ask(base_url, [*prompt, reply["choices"][0]["message"], {"role": "user", "content": "Sure?"}])
        return {"reward": 1.0}

    output = Trainer(skyrl.AgentGenerator(router.url, agent)).run(batch("How long is the Elbe?"))
    (told,) = output["env_metrics"]
    assert (told["reasons"], told["turns"]) == ([], 2)
    assert check(worker, output, 0) == sampled(worker)


@pytest.mark.parametrize("router", [False], indirect=True, ids=["without a store"])
def test_a_run_of_openenv_that_is_lost_says_so(
    openenv: Any,  # noqa: F811
    router: Program,
) -> None:
    """The agent sees that its key is none, there is no trace, and the environment's reward is what it is."""

    def agent(run: Any) -> int:
        with openai.OpenAI(base_url=run.base_url, api_key=run.key) as client:
            said = client.chat.completions.create(model="m", messages=USER, max_tokens=9)  # type: ignore[call-overload]
            killed(router)
            more = [*USER, said.choices[0].message, {"role": "user", "content": "Sure?"}]
            with pytest.raises(openai.AuthenticationError, match="no session of this key"):
                client.chat.completions.create(model="m", messages=more, max_tokens=9)
        return 7

    with contextlib.closing(openenv.RecordedSessionFactory(router.url, agent, Environments(openenv))) as factory:
        run = factory.create("t")
        assert run.wait_for_completion(100) == 7
        assert run.verify([]).env_reward == 0.5
        with pytest.raises(UnknownReplyError):
            run.fetch_training_trace()
        run.close()
