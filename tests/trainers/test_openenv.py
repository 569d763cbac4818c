"""OpenEnv: the turns of an agent as its own models take them, compared with what the worker sampled, and TRL's worker on them.

The tests run on OpenEnv itself where it is installed (`make test-trainers`), else on stand-ins for the few names of it.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest

from middleware_hub.client.errors import NotUsableError
from middleware_hub.integrations import versions
from tests.support import templates
from tests.support.stack import Stack, stack

REAL = importlib.util.find_spec("openenv") is not None
SYSTEM = [{"role": "system", "content": "You answer."}, {"role": "user", "content": "1 + 1"}]


class Session(abc.ABC):  # noqa: B024 - as OpenEnv's
    """Stands for OpenEnv's `ResourceSession`."""


@dataclass
class Trace:
    """Stands for OpenEnv's `TrainingTrace`."""

    turns: list[Any]


def _standing_in() -> dict[str, ModuleType]:
    names = ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.training")
    modules = {name: ModuleType(name) for name in names}
    trainable = type("TrainableSession", (), {"fetch_training_trace": None})
    Trace.turns = []  # type: ignore[misc]  # a field that can be looked for
    harness: Any = modules["openenv.core.harness"]
    harness.ResourceSession = harness.ResourceSessionFactory = Session
    harness.TrainableSession, harness.TrainingTrace = trainable, Trace
    training: Any = modules["openenv.core.harness.training"]
    training.TrainingTurn = type("TrainingTurn", (SimpleNamespace,), {"per_token_logps": None})
    return modules


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported on OpenEnv or on the stand-ins."""
    if not REAL:
        monkeypatch.setattr(versions, "installed", lambda _: "0.10.0")
        for name, module in _standing_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "middleware_hub.integrations.openenv", raising=False)
    yield importlib.import_module("middleware_hub.integrations.openenv")
    sys.modules.pop("middleware_hub.integrations.openenv", None)


@pytest.fixture
def factory(plug: Any) -> Iterator[Any]:
    """Makes factories, which are closed at the end."""
    with contextlib.ExitStack() as ends:

        def made(*given: Any, **options: Any) -> Any:
            return ends.enter_context(contextlib.closing(plug.RecordedSessionFactory(*given, **options)))

        yield made


@pytest.fixture
def served() -> Iterator[Stack]:
    template = str(templates.folder() / "qwen2_5.jinja")
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": template}) as made:
        yield made
        assert made.idle()


@dataclass
class Environments:
    """An environment whose reward is given; it remembers what was asked of it."""

    plug: Any
    reward: float | None = 0.5
    closed: int = 0
    tasks: list[Any] = field(default_factory=list)

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Any:
        self.tasks.append((task, seed, episode_id))
        outer = self

        class Environment(self.plug.ResourceSession):  # type: ignore[misc, name-defined]
            def initial_messages(self) -> list[Any]:
                return SYSTEM

            def list_tools(self) -> list[Any]:
                return []

            def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
                return name, arguments

            def verify(self, transcript: list[Any], final_state: Any = None) -> Any:
                return SimpleNamespace(env_reward=outer.reward, transcript=transcript)

            def close(self) -> None:
                outer.closed += 1

        return Environment()


def talks(run: Any) -> int:
    """An agent at the router's own address, which knows its session by the key alone: two turns, and a title beside them."""
    root = run.base_url.partition("/sessions/")[0]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with openai.OpenAI(base_url=f"{root}/v1", api_key=run.key) as client:
        messages: list[Any] = list(run.initial_messages())
        for question in ("And 2 + 2?", None):
            reply = client.chat.completions.create(model="m", messages=messages, tools=tools, max_tokens=9)  # type: ignore[arg-type]
            messages.append(reply.choices[0].message)
            if question is not None:
                messages.append({"role": "user", "content": question})
        title = [{"role": "user", "content": "A title"}]
        client.chat.completions.create(model="m", messages=title, max_tokens=9, temperature=1.5)  # type: ignore[arg-type]
    return 0


def test_a_trace_has_each_turn_as_the_worker_sampled_it(plug: Any, factory: Any, served: Stack) -> None:
    """Prompt and reply id for id, with the engine's floats; the title is left out."""
    (worker,) = served.workers
    for text in ("Two.", "Four.", "Sums"):
        worker.script(text=text)
    environments = Environments(plug)
    run = factory(served.url, talks, environments, sampling={"temperature": 0.5, "top_k": 0}).create(
        "sums", seed=3, episode_id="e-1"
    )
    assert run.wait_for_completion(60) == 0
    trace = run.fetch_training_trace()
    assert len(worker.log) == 3
    assert worker.log[2].body["sampling_params"]["temperature"] == 0.5  # the agent cannot change it
    assert len(trace.turns) == 2
    for turn, record in zip(trace.turns, worker.log, strict=False):
        assert turn.prompt_token_ids == list(record.input_ids)
        assert turn.completion_token_ids == list(record.output_ids)
        assert turn.per_token_logps == list(record.logprobs)
        assert turn.loss_mask == [0] * len(record.input_ids) + [1] * len(record.output_ids)
        assert record.body["sampling_params"]["temperature"] == 0.5
    first, second = trace.turns
    assert first.response["choices"][0]["message"]["content"] == "Two."
    assert [one["role"] for one in second.request["messages"]] == ["system", "user", "assistant", "user"]
    assert first.node_id != second.node_id
    assert run.fetch_training_trace() == trace
    assert environments.tasks == [("sums", 3, "e-1")]
    assert run.verify([]).env_reward == 0.5
    assert served.get("/sessions").json()["sessions"][0]["reward_info"] == {"reward": 0.5}
    run.close()
    assert environments.closed == 1
    assert served.get("/sessions").json()["sessions"] == []


def test_everything_is_in_it_when_it_is_asked_for(plug: Any, factory: Any, served: Stack) -> None:
    run = factory(served.url, talks, Environments(plug), roots="all").create("t")
    assert run.wait_for_completion(60) == 0
    assert len(run.fetch_training_trace().turns) == 3
    run.close()


def test_an_agent_that_takes_too_long_or_fails(plug: Any, factory: Any, served: Stack) -> None:
    """What it has sampled by then is in the trace."""
    asked, go = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def slow(run: Any) -> int:
        with openai.OpenAI(base_url=run.base_url, api_key=run.key) as client:
            client.chat.completions.create(model="m", messages=SYSTEM, max_tokens=4)  # type: ignore[call-overload]
        threads.append(threading.current_thread())
        asked.set()
        go.wait(60)
        raise RuntimeError("it cannot")

    run = factory(served.url, slow, Environments(plug)).create("t")
    assert asked.wait(60)
    with pytest.raises(TimeoutError):
        run.wait_for_completion(0.01)
    assert threads[0].daemon, "an agent that never ends must not hold up the end of the trainer's process"
    assert len(run.fetch_training_trace().turns) == 1
    go.set()
    assert run.wait_for_completion(60) == 1
    run.close()


@pytest.mark.parametrize(("ended", "code"), [(None, 0), (0, 0), (3, 3), ("it cannot", 1)])
def test_an_agent_may_end_its_program(plug: Any, factory: Any, served: Stack, ended: Any, code: int) -> None:
    """The main function of a program calls `sys.exit`, which must not end the trainer's."""
    run = factory(served.url, lambda _run: sys.exit(ended), Environments(plug)).create("t")
    assert run.wait_for_completion(60) == code
    run.close()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 0.5])
def test_a_reward_that_the_session_cannot_have_is_still_the_environments(
    plug: Any, factory: Any, served: Stack, reward: float
) -> None:
    """It is no number of JSON's, or comes after the session was closed."""
    run = factory(served.url, talks, Environments(plug, reward=reward)).create("t")
    assert run.wait_for_completion(60) == 0
    assert str(run.verify([]).env_reward) == str(reward)
    shown = served.get(f"/sessions/{run.base_url.split('/')[-2]}").json()
    assert shown["reward_info"] == ({"reward": 0.5} if reward == 0.5 else {})
    run.close()
    assert str(run.verify([]).env_reward) == str(reward)


def test_a_turn_that_is_not_exact_is_context(plug: Any, factory: Any, served: Stack) -> None:
    """What was sampled stays to be read, and is not trained on."""

    def names_nobody(run: Any) -> None:
        with openai.OpenAI(base_url=run.base_url, api_key=run.key) as client:
            headers = {"x-parent-generation": "nobody"}
            client.chat.completions.create(model="m", messages=SYSTEM, max_tokens=4, extra_headers=headers)  # type: ignore[call-overload]

    run = factory(served.url, names_nobody, Environments(plug)).create("t")
    assert run.wait_for_completion(60) == 0
    (turn,) = run.fetch_training_trace().turns
    assert len(turn.completion_token_ids) == 4
    assert not any(turn.loss_mask)
    assert turn.metadata["reasons"] == ["unknown_parent"]
    run.close()


def test_replies_without_logprobs_are_refused(plug: Any, factory: Any) -> None:
    template = str(templates.folder() / "qwen2_5.jinja")
    with stack(
        "qwen", styles=("cumulative",), sessions={"chat_template": template}, radix={"force_logprobs": False}
    ) as bare:
        run = factory(bare.url, talks, Environments(plug)).create("t")
        assert run.wait_for_completion(60) == 0
        with pytest.raises(NotUsableError, match="no logprobs"):
            run.fetch_training_trace()
        run.close()


@pytest.mark.skipif(not REAL, reason="make test-trainers installs OpenEnv")
def test_it_is_what_openenv_asks_for(plug: Any, factory: Any, served: Stack) -> None:
    """By its own check of a session, and its own validator of the numbers."""
    from openenv.core.harness import LoopOwningSession, TrainableSession, TrainingTrace

    run = factory(served.url, talks, Environments(plug)).create("t")
    assert isinstance(run, TrainableSession)
    assert not isinstance(run, LoopOwningSession)
    run.wait_for_completion(60)
    trace = run.fetch_training_trace()
    assert isinstance(trace, TrainingTrace)
    read = TrainingTrace.from_entries(trace.to_trace_entries())
    assert [one.node_id for one in read.turns] == [one.node_id for one in trace.turns]
    spoilt = trace.model_dump()
    spoilt["turns"][0]["per_token_logps"].pop()
    with pytest.raises(ValueError, match="logprob_misalign"):
        TrainingTrace.model_validate(spoilt)
    run.close()


@pytest.mark.skipif(not REAL, reason="make test-trainers installs OpenEnv and TRL")
def test_trls_worker_trains_on_it(plug: Any, factory: Any, served: Stack, tmp_path: Path) -> None:
    """Its loop makes the session, waits, and assembles one row: the ids of the last turn, masked by turn."""
    harness = pytest.importorskip("trl.experimental.async_grpo.openenv_harness")
    (worker,) = served.workers
    for text in ("Two.", "Four.", "Sums"):
        worker.script(text=text)
    loop = object.__new__(harness._HarnessRolloutLoop)
    loop._adapter = loop._rollout_reward_fn = None
    loop._factory = factory(served.url, talks, Environments(plug), sampling={"temperature": 1.0})
    loop._live_sessions, loop._stop_event, loop._fork_threshold_tokens = set(), threading.Event(), 0
    (completion, ids, sequences, *_, reward), metrics = loop._run_session("sums", 7)
    first, second = worker.log[:2]
    assert ids == [*first.output_ids, *second.output_ids]
    assert reward == 0.5
    assert completion[-1]["content"] == "Four."
    assert (metrics["turns"], metrics["tally"]["clean"]) == (2, 1.0)
    (row,) = sequences
    assert [*row.input_ids] == [*second.input_ids, *second.output_ids]
    assert sum(row.completion_mask) == len(ids)
    assert served.get("/sessions").json()["sessions"] == []
