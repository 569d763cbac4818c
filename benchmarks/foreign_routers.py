"""Other routers of SGLang workers from PyPI, each in a virtual environment of its own.

The extra `routing` of pyproject.toml names them. They are never installed with this project, because both install a command
`smg`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tito-router" / "routing"

# The policies of each that choose among several workers and need neither a GPU nor separate prefill workers.
POLICIES = {
    "sglang-router": ("random", "round_robin", "power_of_two", "manual", "cache_aware"),
    "smg": (
        "random",
        "round_robin",
        "power_of_two",
        "least_load",
        "manual",
        "consistent_hashing",
        "prefix_hash",
        "cache_aware",
    ),
}


class NotInstalledError(Exception):
    """A router could not be installed; the message says why."""


def requirement(name: str) -> str:
    """Return the requirement of pyproject.toml, such as `smg>=1.13`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(str(one) for one in extras["routing"] if one.partition(">=")[0] == name)


def install(name: str) -> str:
    """Install a router unless it is installed. Return its version. Raise NotInstalledError if that fails."""
    python = CACHE / name / "bin" / "python"
    commands = [
        [sys.executable, "-m", "venv", str(CACHE / name)],
        [str(python), *"-m pip install --quiet --disable-pip-version-check --no-input".split(), requirement(name)],
    ]
    if not (CACHE / name / "bin" / name).exists():
        for command in commands:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise NotInstalledError((made.stderr.strip().splitlines() or [f"ended with {made.returncode}"])[-1])
    asks = "import sys, importlib.metadata as found; print(found.version(sys.argv[1]))"
    return subprocess.run([python, "-c", asks, name], capture_output=True, text=True, check=True).stdout.strip()


def command(name: str, policy: str, worker_urls: Sequence[str], port: int, metrics_port: int) -> list[str]:
    """Return the command that starts a router, with its own defaults but for the log level."""
    return [
        *(str(CACHE / name / "bin" / name), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", policy, "--log-level", "warn", "--worker-startup-check-interval", "1"),
        *("--worker-urls", *worker_urls),
    ]
