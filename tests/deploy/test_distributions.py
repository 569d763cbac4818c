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
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV", "MAKE"))
        } | {
            "HOME": str(folder),  # no configuration, and no cache
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder),
            "PIP_NO_INDEX": "1",  # in variables, so that pip tells the pip with which it builds
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
            "UV_OFFLINE": "1",
            "UV_NO_INDEX": "1",
            "UV_FIND_LINKS": str(self.wheels),
        }

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Return what a command prints, run away from the clone."""
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def empty(self, name: str) -> Path:
        """Return the folder of the programs of a new environment."""
        venv.create(self.folder / name, symlinks=True)
        return self.folder / name / "bin"

    def install(self, programs: Path, *names: str) -> None:
        self.run(*PIP, "--python", programs / "python", "install", "--no-compile", *names)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Both distributions, built out of their sdists, and what they need, which comes from a registry."""
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    described = [project(), project("worker")]
    needed = ["hatchling", *(one for each in described for one in each["dependencies"])]
    needed += project()["optional-dependencies"]["demo"]
    needed += described[0]["optional-dependencies"]["demo"]
    wanted = [one for one in needed if Requirement(one).name != "tito-router"]
    download = [*PIP, "download", "--only-binary", ":all:", "--dest", str(shelf.wheels), *dict.fromkeys(wanted)]
    subprocess.run(download, check=True, timeout=300)
    builder = shelf.empty("builder")
    shelf.install(builder, "hatchling")
    for folder in (ROOT, ROOT / "worker"):
        shelf.run(builder / "python", "-m", "hatchling", "build", "-t", "sdist", "-d", shelf.wheels, cwd=folder)
    sdists = sorted(shelf.wheels.glob("tito_*.tar.gz"))
    assert [path.name for path in sdists] == [f"tito_{name}-{__version__}.tar.gz" for name in ("router", "worker")]
    shelf.run(*PIP, "wheel", "--no-deps", "--wheel-dir", shelf.wheels, *sdists)
    for path in sdists:
        path.unlink()
    return shelf


@pytest.mark.slow  # it builds and installs
def test_a_stranger_installs_the_router_by_name(shelf: Shelf) -> None:
    """It says what to install for a demo, and a type checker sees its types."""
    programs = shelf.empty("router")
    shelf.install(programs, "tito-router")
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
def test_a_stranger_installs_the_demo_by_name(shelf: Shelf) -> None:
    """What it names to go on with is a command that this environment has."""
    programs = shelf.empty("demo")
    shelf.install(programs, "tito-worker[demo]")
    shown = shelf.run(programs / "tito-router", "demo", "--conversations", "2", "--turns", "2")
    assert "2 of 2 exact" in shown
    assert "make " not in shown
    (serve,) = re.findall(r"`(tito-router [^`]+)` starts the same", shown)
    assert "--serve" in shelf.run(programs / "tito-router", *serve.split()[1:], "--help")
    code = "import importlib.metadata as m, worker; print(m.version('tito-worker'))"
    assert shelf.run(programs / "python", "-c", code) == f"{__version__}\n"


@pytest.mark.slow
def test_uvx_runs_both(shelf: Shelf) -> None:
    uvx = [Path(sys.executable).with_name("uvx"), "--python", sys.executable]
    assert shelf.run(*uvx, "tito-router", "--version") == f"tito-router {__version__}\n"
    assert "--conversations" in shelf.run(*uvx, "--with", "tito-worker[demo]", "tito-router", "demo", "--help")
