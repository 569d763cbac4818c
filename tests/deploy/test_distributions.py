"""The two distributions: one version, and what a stranger gets who installs them by name, without a clone and a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from router.version import __version__

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, *"-m pip --disable-pip-version-check --no-input --quiet".split()]
WORK = {"audit", "bench", "deploy", "docs", "frameworks", "lint", "routing", "slow", "test"}
"""The extras that are for work on the project, not for its users."""


def beside(program: str) -> Path:
    """Return a program of the environment that runs the tests."""
    return Path(sys.executable).with_name(program)


def project(folder: str = ".") -> dict[str, Any]:
    described: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    return described["project"] | {"hatch": described["tool"]["hatch"]}


def test_the_version_is_written_once() -> None:
    """Files that cannot read it from the package say the same."""
    for folder in (".", "worker"):
        assert project(folder)["dynamic"] == ["version"]
        path = Path(ROOT / folder / project(folder)["hatch"]["version"]["path"]).resolve()
        assert path == ROOT / "router" / "version.py"
    chart = yaml.safe_load((ROOT / "deploy/helm/tito-router/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for name in ("deploy/Dockerfile", "deploy/compose.yaml"):
        assert set(re.findall(r"tito-router:(\d[\w.]*)", (ROOT / name).read_text())) == {__version__}, name
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert f"\ntito-router {__version__}\n" in (ROOT / "docs/command-line.md").read_text()
    assert re.search(rf"^## \[{re.escape(__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs/install.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert rows == project()["optional-dependencies"].keys() - WORK
    (others,) = re.findall(r"^The others \(([^)]*)\)", page, re.MULTILINE)
    assert set(re.findall(r"\w+", others)) == WORK


class Shelf:
    """A folder with distributions, and environments that know of no other place to install from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV", "MAKE"))
        } | {
            "HOME": str(folder),  # no configuration, and no cache
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
            "UV_OFFLINE": "1",
            "UV_NO_INDEX": "1",
            "UV_FIND_LINKS": str(self.wheels),
            "UV_PYTHON": sys.executable,
        }

    def run(self, *command: str | Path) -> str:
        """Return what a command prints, run away from the clone."""
        done = subprocess.run(command, cwd=self.folder, env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Both distributions, built out of their sdists, and what they need, which comes from a registry."""
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    needed = ["hatchling"]
    for described in (project(), project("worker")):
        needed += described["dependencies"] + described["optional-dependencies"]["demo"]
    wanted = [one for one in dict.fromkeys(needed) if Requirement(one).name != "tito-router"]
    subprocess.run([*PIP, "download", "--only-binary", ":all:", "--dest", str(shelf.wheels), *wanted], check=True)
    for folder in (ROOT, ROOT / "worker"):
        shelf.run(beside("uv"), "build", "--out-dir", shelf.wheels, folder)
    sdists = sorted(shelf.wheels.glob("tito_*.tar.gz"))
    assert [path.name for path in sdists] == [f"tito_{name}-{__version__}.tar.gz" for name in ("router", "worker")]
    for path in sdists:
        path.unlink()  # only wheels are installed
    return shelf


@pytest.mark.slow  # it builds and installs
def test_a_stranger_installs_the_router_by_name(shelf: Shelf) -> None:
    """It says what to install for a demo, and a type checker sees its types."""
    venv.create(shelf.folder / "router", symlinks=True)
    programs = shelf.folder / "router" / "bin"
    shelf.run(*PIP, "--python", programs / "python", "install", "--no-compile", "tito-router")
    assert shelf.run(programs / "tito-router", "--version") == f"tito-router {__version__}\n"
    assert "--incremental-streaming-output" in shelf.run(programs / "tito-router", "--help")
    with pytest.raises(AssertionError, match=r"pip install 'tito-worker\[agents\]'"):
        shelf.run(programs / "tito-router", "demo")
    code = (
        "import importlib.metadata as m, importlib.resources as r\n"
        "typed = [(r.files(name) / 'py.typed').is_file() for name in ('router', 'middleware_hub')]\n"
        "print(m.version('tito-router'), *typed)"
    )
    assert shelf.run(programs / "python", "-c", code) == f"{__version__} True True\n"


@pytest.mark.slow  # and plays conversations
def test_uvx_plays_the_demo(shelf: Shelf) -> None:
    """The command that the demo names to go on with is one that this environment has."""
    uvx = [beside("uvx"), "--with", f"tito-worker[demo]=={__version__}", "tito-router"]
    shown = shelf.run(*uvx, "demo", "--conversations", "2", "--turns", "2")
    assert "2 of 2 exact" in shown
    assert "make " not in shown
    (serve,) = re.findall(r"`tito-router ([^`]+)` starts the same", shown)
    assert "--serve" in shelf.run(*uvx, *serve.split(), "--help")
