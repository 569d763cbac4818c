"""SGLang's own contract of its HTTP interface: the one generated file of its wheel that needs nothing but msgspec.

`GenerateRequest.from_json_value(body)` judges what is sent to a worker, `GenerateResponse.from_json_value(reply)` what a
worker says. The file is taken out of the wheel once, and kept outside the checkout.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.support.vocabularies import cache_folder
from tests.support.wheels import fetch

WHEEL = "sglang==0.5.23"
_FILE = "sglang/api/v1/api_types.py"


@cache
def contract() -> ModuleType:
    """The contract's types; the first time ever it takes the network."""
    spec = importlib.util.spec_from_file_location("sglang_api_types", contract_path())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where msgspec looks its annotations up
    spec.loader.exec_module(module)
    return module


def contract_path() -> Path:
    """The file, fetched if it is not there."""
    target = cache_folder() / WHEEL.replace("==", "-contract-") / "api_types.py"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            fetched = Path(temporary) / target.name
            fetched.write_bytes(_fetch(Path(temporary)))
            fetched.rename(target)
    return target


def _fetch(folder: Path) -> bytes:
    with zipfile.ZipFile(fetch(WHEEL, folder, "SGLang's contract")) as archive:
        return archive.read(_FILE)
