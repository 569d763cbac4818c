"""The shape of the code: a file holds one noun, whole, and imports are neither circular nor deep."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "middleware_hub")

MAX_LINES = 600
"""A longer file is no longer one noun. (Do not cut a noun, nor a sentence, to keep a file short.)"""
MAX_FLOORS = 8

Imports = Mapping[str, frozenset[str]]


@cache
def sources() -> dict[str, str]:
    """Maps the path of each module, relative to the repository, to its source."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


parsed = cache(ast.parse)


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports() -> Imports:
    """Maps each module to the modules of this project that it imports, inside functions too."""
    trees = {module_of(path): parsed(source) for path, source in sources().items()}
    found = {}
    for module, tree in trees.items():
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names.update(full & trees.keys())
                if full - trees.keys():
                    names.add(node.module)
        found[module] = frozenset(names & trees.keys() - {module})
    return found


def stair(graph: Imports) -> list[str]:
    """Returns the longest way down through the imports. Raises ValueError with the modules of a circle."""
    best: dict[str, list[str]] = {}

    def down(module: str, above: tuple[str, ...]) -> list[str]:
        if module in above:
            raise ValueError(" -> ".join((*above[above.index(module) :], module)))
        if module not in best:
            below = [down(name, (*above, module)) for name in sorted(graph[module])]
            best[module] = [module, *max(below, key=len, default=[])]
        return best[module]

    return max((down(module, ()) for module in graph), key=len)


def test_no_file_is_long() -> None:
    lengths = {path: source.count("\n") for path, source in sources().items()}
    long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert long == {}, f"a file has at most {MAX_LINES} lines: which of its nouns is another one?"


def test_imports_make_no_circle_and_are_not_deep() -> None:
    assert len(stair(imports())) <= MAX_FLOORS, stair(imports())


def test_a_circle_is_found() -> None:
    circle = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"})}
    with pytest.raises(ValueError, match=r"^a -> b -> c -> a$"):
        stair(circle)


def test_the_longest_way_is_found() -> None:
    graph = {"a": frozenset({"b", "c"}), "b": frozenset({"c"}), "c": frozenset(), "d": frozenset({"c"})}
    assert stair(graph) == ["a", "b", "c"]
