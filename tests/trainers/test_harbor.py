"""Harbor: jobs of its own command line, with its own agents, each trial in a session; every token is compared.

The jobs run in an environment of their own, which `make test-trainers` installs (TITO_HUBS). What the tests of every commit
have of Harbor are stand-ins for the few names that the plugin imports.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from middleware_hub.client import Client, Session, Trajectory
from tests.integration.conftest import ROOT
from tests.support.stack import Stack
from worker.engine.records import GenerationRecord
from worker.worker import EmbeddedWorker

PYTHON = Path(os.environ.get("TITO_HUBS", "/nowhere")) / "harbor/bin/python"
real = pytest.mark.skipif(
    not PYTHON.exists(), reason="make test-trainers installs Harbor, for which it needs Python 3.12"
)
TALKER = ("--agent", "tests.trainers.harbor_rig:Talker", "--ak", "url={session_url}")
TERMINUS = ("--agent", "terminus-2", "--model", "openai/policy", "--ak", "record_terminal_session=false")
TEST = """\
there=$(cd "$(dirname "$0")/.." && pwd)
if [ -f "$there/app/hello.txt" ]; then echo 1; else echo 0; fi > "$there/logs/verifier/reward.txt"
"""


# -- jobs of Harbor itself -------------------------------------------------------------------------------------------------


class Job:
    """A folder of tasks, and the jobs that run on them."""

    def __init__(self, served: Stack, folder: Path) -> None:
        self.served = served
        self.folder = folder

    def task(self, name: str, *, steps: Sequence[str] = (), seconds: float = 60.0) -> None:
        """Add a task that wants a file hello.txt; with `steps`, one after the other."""
        folder = self.folder / "tasks" / name
        told = f"version = '1.0'\n[agent]\ntimeout_sec = {seconds}\n[verifier]\ntimeout_sec = 60.0\n"
        told += "".join(f"[[steps]]\nname = '{step}'\n" for step in steps)
        parts = {f"steps/{step}/": f"Step {step}." for step in steps} or {"": f"Write hello.txt. This is {name}."}
        files = {"task.toml": told, "environment/Dockerfile": "FROM scratch\n"}
        for place, instruction in parts.items():
            files |= {f"{place}instruction.md": instruction, f"{place}tests/test.sh": TEST}
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)

    def command(self, *arguments: str, router: str | None = None) -> list[str]:
        return [
            *(str(PYTHON), "-c", "from harbor.cli.main import app; app()", "run", "--yes", "--quiet"),
            *("--path", str(self.folder / "tasks"), "--jobs-dir", str(self.folder / "jobs"), "--job-name", "job"),
            *("--env", "tests.trainers.harbor_rig:LocalEnvironment"),
            *("--plugin", "middleware_hub.integrations.harbor:SessionPlugin"),
            *("--plugin-kwarg", f"router={router or self.served.url}"),
            *arguments,
        ]

    @property
    def environment(self) -> dict[str, str]:
        away = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
        return {**os.environ, **away, "PYTHONPATH": str(ROOT)}

    def run(self, *arguments: str) -> str:
        """Run a job to its end; return what it printed."""
        ran = subprocess.run(
            self.command(*arguments), env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results of all trials, as they are on disk, by task and time."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("jobs/job/*/result.json")]
        return sorted(found, key=lambda one: (one["task_name"], one["started_at"]))


@pytest.fixture
def job(served: Stack, tmp_path: Path) -> Job:
    return Job(served, tmp_path)


def turns(context: Mapping[str, Any]) -> list[tuple[str, list[int], list[int], list[float]]]:
    """The turns of an agent's result: name, prompt, completion, logprobs."""
    found = []
    for detail in context["rollout_details"]:
        columns = (
            detail["extra"]["request_ids"],
            detail["prompt_token_ids"],
            detail["completion_token_ids"],
            detail["logprobs"],
        )
        found += list(zip(*columns, strict=True))
    return found


def check(worker: EmbeddedWorker, told: Sequence[tuple[str, list[int], list[int], list[float]]]) -> None:
    """Every generation of the worker is told once, token by token."""
    assert len(told) == len({name for name, *_ in told}) == len(worker.log)
    for name, prompt, completion, logprobs in told:
        (record,) = (one for one in worker.log if one.body["rid"].startswith(name))
        assert prompt == record.input_ids
        assert completion == record.output_ids
        assert logprobs == record.logprobs


def script(worker: EmbeddedWorker, *texts: str) -> None:
    for text in texts:
        worker.script(text=text)


def keys(text: str, *, complete: bool = False) -> str:
    """A turn of Terminus 2."""
    commands = [{"keystrokes": text, "duration": 0.1}] if text else []
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": complete})


@real
@pytest.mark.skipif(shutil.which("tmux") is None, reason="Terminus 2 types into a tmux, and there is none")
def test_terminus_2_is_recorded_token_by_token(job: Job) -> None:
    """Harbor's own agent, pointed at its session by its base URL, with its own numbers beside ours."""
    job.task("hello")
    (worker,) = job.served.workers
    script(worker, keys("echo hi > hello.txt\n"), keys("", complete=True), keys("", complete=True))
    job.run(*TERMINUS)
    (result,) = job.results
    assert result["exception_info"] is None
    assert result["verifier_result"] == {"rewards": {"reward": 1.0}}
    context = result["agent_result"]
    check(worker, turns(context))
    assert len(context["rollout_details"]) == 1
    assert context["n_output_tokens"] == sum(len(one.output_ids) for one in worker.log)
    assert context["metadata"]["n_episodes"] == 3
    assert context["metadata"]["tito"]["left_out"] == {}


@real
def test_the_attempts_at_a_task_are_a_group_with_the_verifiers_rewards(job: Job) -> None:
    for name in ("first", "second"):
        job.task(name)
    (worker,) = job.served.workers
    # Two trials of `first` write the file, and of `second` none does.
    script(worker, *["echo hi > hello.txt", "done"] * 2, *["true", "done"] * 2)
    job.run(*TALKER, "--n-attempts", "2", "--n-concurrent", "1", "--plugin-kwarg", "groups=run 7")
    results = job.results
    assert [one["agent_result"]["n_output_tokens"] for one in results] == [
        4
    ] * 4  # what the agent itself tells is there, too
    check(worker, [turn for one in results for turn in turns(one["agent_result"])])
    by_task: dict[str, list[float]] = {}
    for one in results:
        by_task.setdefault(one["task_name"], []).append(one["verifier_result"]["rewards"]["reward"])
    with Client(job.served.url) as client:
        claim = client.claim(groups=5, lease_seconds=60)
        assert sorted(group.group_id for group in claim.groups) == ["run 7/first", "run 7/second"]
        for group in claim.groups:
            assert sorted(sample.reward for sample in group.samples) == sorted(
                by_task[group.group_id.partition("/")[2]]
            )
            assert all(sample.exact for sample in group.samples)
        client.acknowledge(claim)


@real
def test_a_failed_attempt_is_dropped_as_harbor_drops_it(job: Job) -> None:
    """Harbor starts a failed trial again: the group has only the attempt that Harbor keeps."""
    job.task("hello")
    (worker,) = job.served.workers
    script(worker, "fail", "echo hi > hello.txt", "done")
    job.run(*TALKER, "--max-retries", "1")
    (result,) = job.results
    told = turns(result["agent_result"])
    del worker.log[0]
    check(worker, told)
    with Client(job.served.url) as client:
        (group,) = client.claim(lease_seconds=60).groups
        assert [sample.reward for sample in group.samples] == [1.0]
        assert sum(len(one.turns) for sample in group.samples for one in sample.trajectories) == 2


@real
def test_a_trial_that_fails_for_good_says_so_and_keeps_its_tokens(job: Job) -> None:
    """No verifier runs: the turns are in Harbor's file all the same, and the session tells the exception."""
    job.task("hello")
    (worker,) = job.served.workers
    script(worker, "true", "fail")
    job.run(*TALKER, "--disable-verification")
    (result,) = job.results
    assert result["exception_info"]["exception_type"] == "RuntimeError"
    check(worker, turns(result["agent_result"]))
    (session,) = job.served.get("/sessions").json()["sessions"]
    assert session["reward_info"] == {"exception": "RuntimeError"}
    assert session["phase"] == "finalized"


@real
def test_each_step_of_a_task_has_its_own_turns(job: Job) -> None:
    job.task("hello", steps=["one", "two"])
    (worker,) = job.served.workers
    script(worker, "true", "done", "echo hi > hello.txt", "cat hello.txt", "done")
    job.run(*TALKER)
    (result,) = job.results
    steps = [turns(step["agent_result"]) for step in result["step_results"]]
    assert [len(step) for step in steps] == [2, 3]
    check(worker, [turn for step in steps for turn in step])


@real
def test_steps_keep_apart_without_a_verifier_and_agents_have_groups_of_their_own(job: Job) -> None:
    job.task("hello", steps=["one", "two"])
    (worker,) = job.served.workers
    script(worker, *["true", "done", "done"] * 2)
    models = ("--model", "openai/first", "--model", "openai/second")
    job.run(*TALKER, *models, "--disable-verification", "--n-concurrent", "1")
    steps = [turns(step["agent_result"]) for result in job.results for step in result["step_results"]]
    assert [len(step) for step in steps] == [2, 1, 2, 1]
    check(worker, [turn for step in steps for turn in step])
    with Client(job.served.url) as client:
        groups = client.claim(groups=5, lease_seconds=60).groups
    assert sorted((group.group_id, group.size) for group in groups) == [("job/hello/1", 1), ("job/hello/2", 1)]


@real
def test_without_groups_a_session_goes_with_its_trial_and_a_job_is_resumed(job: Job) -> None:
    """A resumed job compares its trials with what is on disk, which knows nothing of sessions."""
    job.task("hello")
    (worker,) = job.served.workers
    script(worker, "echo hi > hello.txt", "done")
    job.run(*TALKER, "--plugin-kwarg", "groups=off")
    before = job.results
    assert job.served.get("/sessions").json()["sessions"] == []
    job.run(*TALKER, "--plugin-kwarg", "groups=off")  # the same name: everything is there
    assert job.results == before
    check(worker, turns(before[0]["agent_result"]))


@real
def test_a_session_that_is_lost_is_told_in_the_result(job: Job) -> None:
    job.task("hello")
    (worker,) = job.served.workers
    script(worker, "curl -s -X DELETE $SESSION")
    job.run(*TALKER, "--agent-env", "SESSION={session_url}")
    (result,) = job.results
    assert result["exception_info"]["exception_type"] == "NotFoundError"
    context = result["agent_result"]
    assert not context["rollout_details"]
    assert "no session" in context["metadata"]["tito"]["left_out"]["session"][0]


@real
def test_an_agent_that_asks_no_model_is_left_alone(job: Job) -> None:
    job.task("hello")
    told = job.run("--agent", "nop")
    assert "takes no base URL" in told
    (result,) = job.results
    assert result["exception_info"] is None
    assert job.served.get("/sessions").json()["sessions"] == []


# -- the plugin itself, on stand-ins ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plugin() -> Iterator[ModuleType]:
    """The module, with the names that it imports of Harbor: plain classes and functions."""
    names: dict[str, dict[str, Any]] = {
        "harbor.job": {"Job": _with("on_trial_started on_agent_ended on_verification_started on_trial_ended")},
        "harbor.agents.factory": {"AgentFactory": object},
        "harbor.models.agent.context": {"AgentContext": _with("rollout_details")},
        "harbor.models.agent.rollout_detail": {"RolloutDetail": dict},
        "harbor.models.job.plugin": {"BaseJobPlugin": object},
        "harbor.models.trial.config": {"AgentConfig": _with("base_url"), "TrialConfig": _with("trials_dir")},
        "harbor.models.trial.result": {"TrialResult": _with("recorded_exceptions")},
    }
    before = set(sys.modules)
    for path, found in names.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        sys.modules[path].__dict__.update(found)
    yield importlib.import_module("middleware_hub.integrations.harbor")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "harbor" or name == "middleware_hub.integrations.harbor":
            del sys.modules[name]


def _with(attributes: str) -> type:
    return type("Stand", (), dict.fromkeys(attributes.split()))


def as_told(details: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int], list[int], list[float]]]:
    return turns({"rollout_details": details})


def test_every_turn_of_a_forked_session_is_told_once(plugin: ModuleType, served: Stack) -> None:
    """Branches share turns, and a title is asked for beside the task: each turn is in one detail, the task's first."""
    (worker,) = served.workers
    script(worker, "A title.", "First.", "Second.", "Other.", "First.")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    with Client(served.url) as client, Session(client) as session:
        session.chat([{"role": "user", "content": "Name this."}])
        asked = [{"role": "user", "content": "Go."}]
        first = session.chat(asked, tools=tools)["choices"][0]["message"]
        for word in "One?", "Two?":
            session.chat([*asked, first, {"role": "user", "content": word}], tools=tools)
        session.chat(asked, tools=tools)  # best of two: the same words, another sample
        found = session.finalize().trajectories
    placed: set[str] = set()
    details = plugin.details_of(found, placed)
    check(worker, as_told(details))
    assert placed == {name for detail in details for name in detail["extra"]["request_ids"]}
    assert len(details[0]["completion_token_ids"]) == 2  # the task's longest, not the title
    assert plugin.details_of(found, placed) == []


def test_a_turn_is_whole_where_an_edited_branch_has_only_its_beginning(plugin: ModuleType, served: Stack) -> None:
    (worker,) = served.workers
    script(worker, "One two three four five.", "End.", "Six.")
    with Client(served.url) as client, Session(client) as session:
        asked = [{"role": "user", "content": "Count."}]
        whole = session.chat(asked)["choices"][0]["message"]
        for said in ({"role": "assistant", "content": "One two three"}, whole):  # the branch that has less comes first
            session.chat([*asked, said, {"role": "user", "content": "So?"}])
        found = session.finalize().trajectories
    assert len(found) == 2
    told = as_told(plugin.details_of(found, set()))
    log: list[GenerationRecord] = list(worker.log)
    assert sorted(completion for _, _, completion, _ in told) == sorted(one.output_ids for one in log)


def test_what_is_not_exact_is_left_out_and_logprobs_are_not_made_up(plugin: ModuleType) -> None:
    parts: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 1], "extra_fields": {}}
    parts |= {"weight_versions": [{"version": "7", "start": 0, "end": 2}], "finish_reason": "stop", "reasons": []}
    turn = {"request_id": "a", "start": 0, "end": 2, "version": "7", "finish": "stop"}
    found = [
        Trajectory.of_branch({**parts, "response_logprobs": None, "exact": True, "turns": [turn]}),
        Trajectory.of_branch(
            {**parts, "response_logprobs": [0.0, 0.0], "exact": False, "turns": [{**turn, "request_id": "b"}]}
        ),
    ]
    (detail,) = plugin.details_of(found, set())
    assert detail == {
        "prompt_token_ids": [[1]],
        "completion_token_ids": [[2, 3]],
        "extra": {"request_ids": ["a"], "finish_reasons": ["stop"], "weight_versions": [[("7", 0, 2)]]},
    }


def test_rewards_and_addresses(plugin: ModuleType) -> None:
    assert plugin._reward_info(None) == {}
    assert plugin._reward_info({"pass": 0.5}) == {"pass": 0.5, "reward": 0.5}
    assert plugin._reward_info({"a": 1, "b": 0}) == {"a": 1, "b": 0}
    assert plugin._reward_info({"pass": float("nan"), "b": 1}) == {"pass": "nan", "b": 1}
    url = "http://r/sessions/s"
    assert plugin._addressed({"x": ["{session_url}/v1"], "n": 1}, url) == ({"x": [f"{url}/v1"], "n": 1}, True)
    assert plugin._addressed({"x": "y"}, url) == ({"x": "y"}, False)


def test_a_router_must_be_named(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TITO_ROUTER", raising=False)
    with pytest.raises(ValueError, match="TITO_ROUTER"):
        plugin.SessionPlugin()
    retry = SimpleNamespace(max_retries=1, is_retryable=lambda kind: kind == "RuntimeError")
    made = plugin.SessionPlugin(router="http://127.0.0.1:1")
    made._retry = retry
    once, twice = SimpleNamespace(attempts=1), SimpleNamespace(attempts=2)
    errors = [SimpleNamespace(exception_type="RuntimeError")]
    assert made._goes_again(once, errors)
    assert not made._goes_again(twice, errors)
    assert not made._goes_again(once, [*errors, SimpleNamespace(exception_type="CancelledError")])
