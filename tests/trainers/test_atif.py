"""ATIF: Harbor's own models read what the router exports, and have the fields that the tests of every commit know.

Harbor is in an environment of its own, which `make test-trainers` installs (TITO_HUBS).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import templates
from tests.support.agents import TOOLS, AgentSession, call_text, system, tool, user
from tests.support.atif import MODELS
from tests.support.stack import Stack, stack

PYTHON = Path(os.environ.get("TITO_HUBS", "/nowhere")) / "harbor/bin/python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="make test-trainers installs Harbor, for which it needs Python 3.12"
)

FIELDS = """
import json
from harbor.models import trajectories
models = [getattr(trajectories, name) for name in trajectories.__all__]
print(json.dumps({
    one.__name__: {
        "fields": {name: field.is_required() for name, field in one.model_fields.items()},
        "extra": one.model_config["extra"],
    }
    for one in models
}))
"""
READ = """
import json, sys
from harbor.models.trajectories import Trajectory
for line in sys.stdin:
    print(json.dumps(Trajectory.model_validate_json(line).to_json_dict()))
"""


def harbor(program: str, given: str = "") -> str:
    done = subprocess.run([PYTHON, "-c", program], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_facts_are_those_of_harbors_models() -> None:
    found = json.loads(harbor(FIELDS))
    for name, (required, others) in MODELS.items():
        assert found[name]["extra"] == "forbid"
        fields = dict.fromkeys(required.split(), True) | dict.fromkeys(others.split(), False)
        assert found[name]["fields"] == fields, name


def exported(served: Stack) -> list[dict[str, Any]]:
    """A tool loop that forks, with an edited turn, and a session without tools."""
    agent = AgentSession.make(served, tools=TOOLS, metadata={"agent": {"name": "looker", "version": "1"}})
    opening = [system("Look."), user("Where?")]
    first = agent.must(*opening, says=f"<think>\nhm\n</think>\n\n{call_text('here')}")
    result = tool(first.message["tool_calls"][0], "nothing")
    second = agent.must(*opening, first.message, result, says="There is nothing. Nothing at all.")
    agent.must(*opening, first.message, result, second.message, user("And?"), says="No.")
    edited = {**second.message, "content": "There is nothing."}
    agent.must(*opening, first.message, result, edited, user("So?"), says="Yes.")
    other = AgentSession.make(served)
    other.must(user("1 + 1"), {"role": "assistant", "content": "2"}, user("1 + 2"), says="3")
    found = []
    for one in (agent, other):
        answer = served.post(f"{one.path}/finalize", {"format": "atif"})
        assert answer.status == 200, answer.content
        found += answer.json()["trajectories"]
    return found


def test_harbor_reads_every_trajectory_and_loses_nothing() -> None:
    template = str(templates.folder() / "qwen2_5.jinja")
    with stack("qwen", styles=("cumulative",), sessions={"chat_template": template}) as served:
        found = exported(served)
    assert len(found) == 3
    lines = harbor(READ, "".join(json.dumps(one) + "\n" for one in found)).splitlines()
    assert [_bare(json.loads(line)) for line in lines] == [_bare(one) for one in found]


def _bare(value: Any) -> Any:
    """Without fields that are null: Harbor leaves its own out."""
    if isinstance(value, dict):
        return {name: _bare(one) for name, one in value.items() if one is not None}
    return [_bare(one) for one in value] if isinstance(value, list) else value
