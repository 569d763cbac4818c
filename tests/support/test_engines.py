"""What an engine cannot run is listed with its reason: a test that skips itself fails `make test-sglang` or `test-vllm`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.engines import CANNOT, ENGINES

INTEGRATION = Path(__file__).resolve().parents[1] / "integration"


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_no_test_on_an_engine_skips_itself() -> None:
    skipping = [
        f"{path.stem}.{name}"
        for path in INTEGRATION.glob("test_*.py")
        for name, function in functions(path).items()
        if name.startswith("test_")
        and "engine" in {argument.arg for argument in function.args.args}
        and any(isinstance(node, ast.Attribute) and node.attr == "skip" for node in ast.walk(function))
    ]
    assert not skipping, f"list in CANNOT of tests/support/engines.py: {skipping}"


def test_what_cannot_run_exists() -> None:
    assert set(CANNOT) == set(ENGINES)
    for tests in CANNOT.values():
        for test in tests:
            module, _, name = test.partition(".")
            assert name in functions(INTEGRATION / f"{module}.py"), test
