"""The shape of the code: a file holds one noun, whole, and imports of files and folders are neither circular nor deep."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import filter as matching
from fnmatch import fnmatch
from functools import cache
from os import X_OK, access
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "middleware_hub", "worker")

LONG = 400
"""Ask of a file that is longer which of its nouns is another one. The answer may be: none."""
MAX_LINES = 600
"""A longer file is no longer one noun. (Do not cut a noun, nor a sentence, to keep a file short.)"""
MAX_FLOORS = 13
"""Deeper imports are not layers any more. (Do not add a Protocol to spare a floor: layers are held by another test.)"""

HELPERS: dict[str, tuple[str, ...]] = {
    "one of several of a kind, each in a file of its own": (
        "middleware_hub.dialects.*",
        "middleware_hub.parsers.think",
        "middleware_hub.store_cli.*",
        "router.policies.*",
    ),
    "where a program begins, or a middleware is named": (
        "middleware_hub.completions_middleware",
        "worker.cli",
        "router.routes",
    ),
    "a core without a framework, or without a loop, below an edge": (
        "router.http.packed_bodies",
        "router.http.unpacking",
        "router.proxy.attempts",
        "router.serving.body_pieces",
    ),
    "a noun with a theory of its own, at the top of its file": (
        "middleware_hub.inspector.branches",
        "middleware_hub.media.fetching",
        "middleware_hub.media.image_header",
        "middleware_hub.media.lifted",
        "middleware_hub.media.passed_on",
        "middleware_hub.inspector.conversations.text_conversation",
        "middleware_hub.inspector.finding",
        "middleware_hub.persistence.turn_writer",
        "middleware_hub.sessions.prompt.edited_turns",
        "middleware_hub.sessions.prompt.verifier",
        "middleware_hub.sessions.trie.roots",
        "middleware_hub.sessions.turn.answer",
        "middleware_hub.sessions.turn.forced_calls",
        "middleware_hub.sessions.turn.written_again",
        "middleware_hub.sessions.log.stored_log",
        "middleware_hub.store.redis.forgetting",
        "middleware_hub.store.redis.recovery",
        "middleware_hub.store.sqlite.checkpoints",
        "middleware_hub.store.sqlite.searching",
        "middleware_hub.templates.decisions",
        "middleware_hub.templates.slots",
        "middleware_hub.templates.system_messages",
        "middleware_hub.templates.turn_forms",
        "middleware_hub.tokenizer.encoder",
        "middleware_hub.tokenizer.kept",
        "worker.engine.detokenizer",
        "router.engines.vllm.fleet",
        "router.engines.vllm.parameters",
        "router.generate.abort_retries",
        "router.kv_cache.positional_indexer",
        "router.peers.control_log",
        "router.processes.child_process",
        "router.proxy.legs",
        "router.serving.connection",
        "router.serving.large_pages",
    ),
    "what builds read, too": ("router.version",),
    "a format of earlier versions": ("middleware_hub.store.spool.earlier",),
    "one task of several that its importer has": (
        "middleware_hub.inspector.api",
        "middleware_hub.sessions.session_fields",
        "middleware_hub.store.redis.cluster",
        "middleware_hub.store.redis.scattering",
        "middleware_hub.store.redis.searching",
        "middleware_hub.store.redis.verifying",
        "middleware_hub.store.redis.writer",
        "middleware_hub.store.sqlite.writer",
        "middleware_hub.trajectories.claims",
        "worker.demo.agent.photo",
        "worker.demo.agent.team",
        "worker.http.admission",
        "router.engines.vllm.generation",
        "router.engines.vllm.replies",
    ),
}
"""Modules (`*`: any name) that only one module of their folder imports, by the reason why they are not a part of it."""

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


def parts(graph: Imports) -> Mapping[str, Mapping[str, set[str]]]:
    """Maps each folder to the imports between its parts: the files in it, and the folders in it as a whole."""
    found: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, names in graph.items():
        for name in names:
            ways = list(zip(module.split("."), name.split("."), strict=False))
            shared = next((at for at, (here, there) in enumerate(ways) if here != there), None)
            if shared is not None:  # otherwise one is the folder of the other
                folder = ".".join(module.split(".")[:shared])
                part, other = (".".join(full.split(".")[: shared + 1]) for full in (module, name))
                found[folder][part].add(other)
                found[folder][other] |= set()
    return found


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Returns the groups of parts that lead to each other, each as names with spaces between."""

    def reached(part: str) -> set[str]:
        seen: set[str] = set()
        ahead = [part]
        while ahead:
            ahead += (new := graph[ahead.pop()] - seen)
            seen |= new
        return seen

    below = {part: reached(part) for part in graph}
    groups = {" ".join(sorted(other for other in below[part] if part in below[other])) for part in graph}
    return sorted(groups - {""})


def folder_of(module: str) -> str:
    """Returns the package of a module; a package is in itself."""
    return module if f"{module.replace('.', '/')}/__init__.py" in sources() else module.rpartition(".")[0]


def helpers(graph: Imports) -> set[str]:
    """Returns the modules that one module imports, which is in the same folder."""
    importers: defaultdict[str, list[str]] = defaultdict(list)
    for module, names in graph.items():
        for name in names:
            importers[name].append(module)
    return {
        module
        for module, found in importers.items()
        if len(found) == 1 and folder_of(module) == folder_of(found[0]) != module
    }


@pytest.mark.filterwarnings("default:files of more than")
def test_no_file_is_long() -> None:
    lengths = {path: source.count("\n") for path, source in sources().items()}
    long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert long == {}, f"a file has at most {MAX_LINES} lines: which of its nouns is another one?"
    if longish := [f"{path} {lines}" for path, lines in lengths.items() if lines > LONG]:
        warnings.warn(f"files of more than {LONG} lines: {', '.join(longish)}", stacklevel=1)


def test_a_module_with_one_importer_has_a_reason() -> None:
    listed = [pattern for patterns in HELPERS.values() for pattern in patterns]
    found = helpers(imports())
    unlisted = {module for module in found if not any(fnmatch(module, pattern) for pattern in listed)}
    advice = "make it a part of the module that imports it, or name it in HELPERS with the reason why it is not"
    assert unlisted == set(), advice
    assert [pattern for pattern in listed if not matching(found, pattern)] == [], "these are no such modules any more"


def test_a_module_with_one_importer_is_found() -> None:
    graph = {
        "router.a": frozenset({"router.b", "router.c", "router.policies.base"}),
        "router.b": frozenset({"router.c"}),
        "router.policies": frozenset({"router.policies.manual"}),
    }
    assert helpers(graph) == {"router.b", "router.policies.manual"}


def test_imports_make_no_circle_and_are_not_deep() -> None:
    assert len(stair(imports())) <= MAX_FLOORS, stair(imports())


def test_folders_make_no_circle() -> None:
    found = sorted(circle for graph in parts(imports()).values() for circle in circles(graph))
    assert found == [], "move what both need into one of them, or below both"


def test_a_circle_of_folders_is_found() -> None:
    """Though no two modules import each other; a part of a folder inside is that folder's own matter."""
    graph = {
        "router.a.x": frozenset({"router.b.x"}),
        "router.b.y": frozenset({"router.a.c.y", "router.d"}),
        "router.a.z": frozenset({"router.a.c.y", "router"}),
        "router.a.c.y": frozenset({"router.a.w"}),
    }
    found = parts(graph)
    assert circles(found["router"]) == ["router.a router.b"]
    assert circles(found["router.a"]) == []


def test_a_circle_is_found() -> None:
    circle = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a"})}
    with pytest.raises(ValueError, match=r"^a -> b -> c -> a$"):
        stair(circle)


def test_the_longest_way_is_found() -> None:
    graph = {"a": frozenset({"b", "c"}), "b": frozenset({"c"}), "c": frozenset(), "d": frozenset({"c"})}
    assert stair(graph) == ["a", "b", "c"]


def test_each_finding_runs_and_has_a_row() -> None:
    """Its script can be run, and findings/README.md has a row for it."""
    scripts = sorted((ROOT / "findings").glob("*.sh"))
    rows = (ROOT / "findings" / "README.md").read_text()
    assert scripts
    assert [one.name for one in scripts if not access(one, X_OK)] == []
    assert [one.name for one in scripts if f"| [{one.stem}]({one.name}) |" not in rows] == []


def test_the_tests_that_pages_name_are_there() -> None:
    """docs/security.md names the test of each claim: one that was renamed would leave the claim without."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {one for page in pages for one in re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", page.read_text())}
    assert len(named) > 50
    assert [
        (file, name)
        for file, name in sorted(named)
        if not re.search(rf"^\s*(async )?(def|class) {name.split('::')[-1]}\b", (ROOT / file).read_text(), re.MULTILINE)
    ] == []
