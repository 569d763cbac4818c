"""A harness: a program in `agents/` that runs an agent as its documentation says, in an environment of its own.

A program is one file. It begins with inline metadata as scripts have it (PEP 723; `//` in place of `#` in JavaScript):
`dependencies` from PyPI, `requires-python` where the Python of the tests is too old, and the table `[tool.harness]`:

- `npm`: packages from the npm registry; a Node is one of them where the machine's is older than the package wants;
- `needs`: a program that is in no registry: the machine's, or Debian's, which is fetched (see `tests.support.debian`);
- `dialect`: `chat`, `responses`, `messages` or `gemini`;
- `tool`, `first`, `second`: a tool that the harness has, and two sets of arguments for it;
- `unknown = false`: an unknown tool ends its run; `resume = false`: it takes one question alone;
- `marks`: a text that is in every request of the task and in no side request, where tools do not tell them apart;
- `match`: the setting of `POST /sessions` that makes it one trajectory, where the default does not;
- `last`: the call, with `name` and `arguments`, that ends its run, where an answer without a call does not;
- `replies`: texts that the model says in place of the plan's, where the harness reads its own form out of them;
- `trajectories`: how many it makes of one task, if not one, and `because`, the reason, in words;
- `scene`: `agents`, `handoff` or `compaction`, a `plan.Scene` in place of the task; `then`, the call that begins it;
  `beside`, a text that is in every request of the other conversation and in no other request; `asks_on = true`, if the
  harness asks for one more answer by itself;
- `of`: the harness whose packages and other settings it has.

It gets its questions as arguments, one after the other in one conversation, prints the last answer, and reads
`OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL`, `GOOGLE_GEMINI_BASE_URL` and `MODEL` from its environment. The folder that it runs in
is empty and its own, as is `HOME`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from tests.support import debian

AGENTS = Path(__file__).parent / "agents"
NODE = "node@24"
DAY = "2026-11-29T00:00:00Z"
"""No package that came later is installed: it pins what the pinned packages depend on, and Node."""
RUNNERS = {".py": "python", ".mjs": "node", ".sh": "bash"}
HEADER = re.compile(r"^(?:#|//) /// script$\n(?P<lines>(?:^(?:#|//)(?: .*)?$\n)+?)^(?:#|//) ///$", re.M)


def cache() -> Path:
    given = os.environ.get("TITO_HARNESSES_DIR")
    return Path(given) if given else Path.home() / ".cache" / "tito-router" / "harnesses-1"


@dataclass(frozen=True)
class Harness:
    """A program, with its metadata; `shares` names the harness whose environment it has, if not one of its own."""

    path: Path
    python: str
    dependencies: tuple[str, ...]
    npm: tuple[str, ...]
    dialect: str
    tool: str
    first: dict[str, Any]
    second: dict[str, Any]
    unknown: bool
    resume: bool
    marks: str
    match: str
    last: dict[str, Any]
    replies: tuple[str, ...]
    trajectories: int
    because: str
    scene: str
    then: dict[str, Any]
    beside: str
    asks_on: bool
    needs: str
    shares: str = ""

    @classmethod
    def read(cls, path: Path) -> Harness:
        """Read a program's metadata. Raises ValueError where it has none."""
        found = HEADER.search(path.read_text())
        if found is None:
            raise ValueError(f"{path.name} does not begin with `/// script`")
        lines = (re.sub(r"^(#|//) ?", "", line) for line in found["lines"].splitlines())
        told = tomllib.loads("\n".join(lines))
        own = told["tool"]["harness"]
        if "of" in own:
            (other,) = path.parent.glob(f"{own['of']}.*")
            return dataclasses.replace(cls.read(other), path=path, shares=own.pop("of"), **own)
        return cls(
            path,
            told.get("requires-python", ""),
            tuple(told.get("dependencies", ())),
            tuple(own.get("npm", ())),
            own["dialect"],
            own.get("tool", "look"),
            own.get("first", {"where": "there", "times": 2}),
            own.get("second", {"where": "here", "times": 1}),
            own.get("unknown", True),
            own.get("resume", True),
            own.get("marks", ""),
            own.get("match", ""),
            own.get("last", {}),
            tuple(own.get("replies", ())),
            own.get("trajectories", 1),
            own.get("because", ""),
            own.get("scene", ""),
            own.get("then", {}),
            own.get("beside", ""),
            own.get("asks_on", False),
            own.get("needs", ""),
        )

    @property
    def name(self) -> str:
        return self.path.stem

    def who(self, body: Any) -> str:
        """Say who asks a request: the `task`, the conversation `beside` it, or a `side` request (a title, a probe)."""
        text = json.dumps(body)
        if self.beside and self.beside in text:
            return "beside"
        is_side = self.marks not in text if self.marks else not body.get("tools")
        return "side" if is_side else "task"

    @property
    def packages(self) -> tuple[str, ...]:
        return self.dependencies + self.npm

    @property
    def lacks(self) -> str:
        """What it needs and this machine has not, in words, or nothing: a program, a Python, npm, and its registry."""
        try:
            _ = self.needs and debian.program(self.needs)
        except RuntimeError as error:
            return str(error)
        if (self.environment / ".done").exists():
            return ""
        if _python(self.python) is None:
            return f"no Python {self.python} on this machine"
        if not self.npm:
            return ""
        if shutil.which("npm") is None:
            return "no npm on this machine"
        asked = subprocess.run(["npm", "ping"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
        return "the npm registry does not answer" if asked.returncode else ""

    @property
    def environment(self) -> Path:
        made_of = self.packages, self.python or sys.version_info[:2], NODE, DAY
        return cache() / f"{self.shares or self.name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:10]}"

    def install(self) -> Path:
        """Make its environment, if it is not there, and return its folder; what broke off is made again."""
        folder, done = self.environment, self.environment / ".done"
        if done.exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self.path.suffix == ".py" or self.dependencies:
            uv = _uv()
            _run([uv, "venv", "--quiet", "--python", _python(self.python), folder / "venv"], folder)
            python = folder / "venv" / "bin" / "python"
            wanted = ["--python", python, "--exclude-newer", DAY, *self.dependencies]
            _run([uv, "pip", "install", "--quiet", *wanted], folder)
        if self.npm:
            quiet = ["--no-fund", "--no-audit", "--loglevel", "error"]
            npm = ["npm", "install", "--prefix", folder, "--before", DAY, *quiet]
            _run([*npm, NODE], folder)
            _run([*npm, *self.npm], folder, PATH=f"{folder}/node_modules/.bin:{os.environ['PATH']}")
        done.touch()
        return folder

    def run(self, urls: dict[str, str], questions: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run it in `folder`, with the addresses of a session, for three minutes at most."""
        made, home, work = self.install(), folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        path = f"{made}/venv/bin:{made}/node_modules/.bin:{os.environ['PATH']}"
        path += f":{debian.program(self.needs).parent}" if self.needs else ""
        own = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "MODEL": "m", "TERM": "dumb", **urls}
        own |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "GEMINI_API_KEY": "none"}
        own |= {"PYTHONWARNINGS": "ignore", "NO_COLOR": "1"}
        if "uv" in {re.split("[=<>]", one)[0] for one in self.dependencies}:  # it installs more while it runs
            own |= {name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_CERT_"))}
            own |= {"UV_CACHE_DIR": str(cache() / "uv-cache"), "UV_EXCLUDE_NEWER": DAY}
        # Beside the modules of npm, which are looked for there, and beside no file that has the name of a package.
        program = made / f"program_{self.name}{self.path.suffix}"
        shutil.copyfile(self.path, program)
        command = [RUNNERS[self.path.suffix], str(program), *questions[: 2 if self.resume else 1]]
        return subprocess.run(
            command, cwd=work, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
        )


def harnesses(*, scenes: bool = False) -> list[Harness]:
    """All of them that do the task, by name; or those of the other `scenes`."""
    found = [Harness.read(path) for path in sorted(AGENTS.iterdir()) if path.suffix in RUNNERS]
    return [one for one in found if bool(one.scene) == scenes]


@functools.cache
def _python(wanted: str) -> str | None:
    """Return a Python of these versions: that of the tests, or the first of `PATH`, or of pyenv; None if there is none."""
    if not wanted:
        return sys.executable
    named = filter(None, (shutil.which(f"python3.{minor}") for minor in range(11, 16)))
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for one in (sys.executable, *named, *map(str, sorted(pyenv.glob("versions/3.*/bin/python")))):
        told = subprocess.run(
            [one, "-ISc", "import sys; print(sys.version.split()[0])"], capture_output=True, text=True
        )
        if not told.returncode and SpecifierSet(wanted).contains(told.stdout.strip()):
            return one
    return None


def _uv() -> Path:
    """Return uv, which makes environments that share their files."""
    folder = cache() / "uv-0.13.9"
    uv = folder / "bin" / "uv"
    if not uv.exists():
        _run([sys.executable, "-m", "venv", "--clear", folder], Path.cwd())
        _run([folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "uv==0.13.9"], Path.cwd())
    return uv


def _run(command: list[Any], folder: Path, **env: str) -> None:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | {"UV_CACHE_DIR": str(cache() / "uv-cache"), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
