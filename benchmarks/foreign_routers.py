"""Other routers of SGLang workers, out of PyPI: each in a virtual environment of its own, started like ours.

The extra `routing` of pyproject.toml names them. They are never installed beside this project: both bring a command `smg`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tito-router" / "routing"

# All of each that choose among several workers and need neither a GPU nor prefill workers of their own.
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
    """It could not be had; the message says why."""


def requirement(name: str) -> str:
    """What pyproject.toml asks for: `smg>=1.13`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(str(one) for one in extras["routing"] if one.partition(">=")[0] == name)


def install(name: str) -> str:
    """Make it if it is not there; its version. NotInstalledError if that fails."""
    python = CACHE / name / "bin" / "python"
    commands = [
        [sys.executable, "-m", "venv", str(CACHE / name)],
        [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            requirement(name),
        ],
    ]
    if not (CACHE / name / "bin" / name).exists():
        for command in commands:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise NotInstalledError((made.stderr.strip().splitlines() or [f"ended with {made.returncode}"])[-1])
    asks = "import sys, importlib.metadata as found; print(found.version(sys.argv[1]))"
    return subprocess.run([python, "-c", asks, name], capture_output=True, text=True, check=True).stdout.strip()


def command(name: str, policy: str, worker_urls: Sequence[str], port: int, metrics_port: int) -> list[str]:
    """How it is called, with its own defaults but for what it writes to its log."""
    return [
        *(str(CACHE / name / "bin" / name), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", policy, "--log-level", "warn", "--worker-startup-check-interval", "1"),
        *("--worker-urls", *worker_urls),
    ]
