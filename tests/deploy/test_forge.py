"""What a public forge reads: workflows, forms of issues, the citation. Their linters need no network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def lint(program: str, *arguments: str | Path) -> tuple[int, str]:
    """Returns the exit status and what was printed."""
    linter = shutil.which(program, path=str(Path(sys.executable).parent))
    assert linter is not None, "pip install 'tito-router[deploy]'"
    done = subprocess.run([linter, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FORGE / "workflows" / f"{name}.yml").read_text())["jobs"]
    return found


def test_commands_of_workflows_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        text = path.read_text()
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
        for named in re.findall(r"\b(?:deploy|docs)/[\w./-]+", text):
            assert (ROOT / named).exists(), named


def test_every_python_that_is_named_is_tested() -> None:
    """Each one of the classifiers, and the next one, which may fail."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d", one)]
    for workflow, job in (("test", "test"), ("release", "try")):
        assert jobs(workflow)[job]["strategy"]["matrix"]["python"] == [*named, "3.15"]


def test_nothing_is_published_untested() -> None:
    """What publishes waits for the tests and for a trial of the built files, and holds no password of a registry."""
    release = jobs("release")
    for name in ("pypi", "image"):
        assert release[name]["needs"] == ["test", "try"]
    assert release["chart"]["needs"] == "image"
    assert release["try"]["needs"] == "build"
    secrets = {one for path in WORKFLOWS for one in re.findall(r"secrets\.(\w+)", path.read_text())}
    assert secrets == {"GITHUB_TOKEN"}


@pytest.mark.slow
def test_workflows_are_safe() -> None:
    """No injection, no right that a job does not need, and each action is pinned by commit."""
    status, printed = lint("zizmor", "--offline", "--no-progress", FORGE)
    assert status == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [FORGE / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [FORGE / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_have_the_form_that_the_forge_reads(schema: str, files: list[Path]) -> None:
    status, printed = lint("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    assert status == 0, printed
