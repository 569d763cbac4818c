"""A real SGLang worker without a GPU, as a subprocess. `tests/sglang_cpu/setup.sh` makes the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import vllm_server
from tests.support.engine_server import EngineServer, Kit

KIT = Kit("SGLang", "sglang_cpu", "0.5.23", "sglang")

SGLangServer = EngineServer
SETUP = KIT.setup
sglang_server = KIT.server
sglang_servers = KIT.servers


def sglang_dir() -> Path:
    return KIT.directory


def is_installed() -> bool:
    return KIT.is_installed


def model_path() -> Path:
    return KIT.model


def package_path() -> Path | None:
    return KIT.package


def python_with(module: str) -> str | None:
    """An interpreter that has torch, or TRL: this one, or an engine's, which also has all that clients of a router need."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    for path in (sys.executable, *(str(kit.directory / "venv" / "bin" / "python") for kit in (KIT, vllm_server.KIT))):
        if Path(path).exists() and subprocess.run([path, "-c", look], capture_output=True).returncode == 0:
            return path
    return None
