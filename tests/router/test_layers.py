"""Imports point down only."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("router", "middleware_hub", "worker")

# From the top down. `*` stands for all modules of a room; a line for one module goes before the line for its room.
LAYERS: dict[str, tuple[str, ...]] = {
    "edges": (
        "router.__main__",
        "router.app",
        "router.cli",
        "router.embedded",
        "router.flags",
        "router.processes.*",
        "router.routes",
        "router.auth.cross_site",
        "router.auth.key_check",
        "router.auth.session_key_check",
        "router.serving.*",
        "worker.demo.*",
        "router.observability.logs",
        "middleware_hub.client",
        "middleware_hub.client.*",
        "middleware_hub.completions_middleware",
        "middleware_hub.media.calls",
        "middleware_hub.radix_tree_middleware",
        "middleware_hub.sessions_middleware",
        "middleware_hub.dialects.*",
        "middleware_hub.drift.*",
        "middleware_hub.inspector.*",
        "middleware_hub.integrations.*",
        "middleware_hub.sessions.chats",
        "middleware_hub.sessions.controls",
        "middleware_hub.sessions.exports",
        "middleware_hub.sessions.scoring",
        "middleware_hub.sessions.session_fields",
        "middleware_hub.store_cli.*",
        "middleware_hub.trajectories.calls",
    ),
    "flow": (
        "router.plugins",
        "router.generate.*",
        "router.kv_cache.watch",
        "router.policies.snapshots",
        "router.proxy.*",
        "router.workers.admission",
        "router.workers.dns",
        "router.workers.health",
        "router.workers.membership",
        "router.workers.names",
        "router.workers.probe",
        "router.workers.queue",
        "middleware_hub.generate.*",
        "middleware_hub.hub",
        "middleware_hub.media.reading",
        "middleware_hub.persistence.*",
        "middleware_hub.served_models",
        "middleware_hub.retrieval.retrieval",
        "middleware_hub.sessions.anonymous",
        "middleware_hub.sessions.exchange",
        "middleware_hub.sessions.log.*",
        "middleware_hub.sessions.prompt.composer",
        "middleware_hub.sessions.prompt.known_text",
        "middleware_hub.sessions.registry",
        "middleware_hub.sessions.scores",
        "middleware_hub.sessions.session",
        "middleware_hub.sessions.turn.*",
        "middleware_hub.trajectories.*",
    ),
    "seams": (
        "router.http.*",
        "router.peers.*",
        "router.kv_cache.subscriptions",
        "router.observability.*",
        "router.proxy.generate_call",
        "router.proxy.in_flight",
        "router.proxy.worker_reply",
        "router.workers.allowed",
        "middleware_hub.media.family_files",
        "middleware_hub.media.fetching",
        "middleware_hub.media.media",
        "middleware_hub.media.viewer",
        "middleware_hub.media.worker_check",
        "middleware_hub.media.stock",
        "middleware_hub.metrics",
        "middleware_hub.sessions.prompt.edited_turns",
        "middleware_hub.sessions.prompt.splice",
        "middleware_hub.sessions.prompt.tails",
        "middleware_hub.sessions.prompt.verifier",
        "middleware_hub.store.*",
        "middleware_hub.templates.*",
        "middleware_hub.tokenizer.encoder",
        "middleware_hub.tokenizer.kept",
        "middleware_hub.tokenizer.loaded",
        "middleware_hub.tokenizer.tokenizer",
        "middleware_hub.tokenizer.worker_check",
    ),
    "core": (
        "router.auth.*",
        "router.engines.*",
        "router.http.unpacking",
        "router.kv_cache.*",
        "router.http.request_state",
        "router.peers.channel",
        "router.peers.events",
        "router.policies",
        "router.policies.*",
        "router.prefix_tree.*",
        "router.proxy.attempts",
        "router.workers.*",
        "middleware_hub.affinity",
        "middleware_hub.chat.*",
        "middleware_hub.media.*",
        "middleware_hub.parsers",
        "middleware_hub.parsers.*",
        "middleware_hub.radix.*",
        "middleware_hub.retrieval.retrieval_request",
        "middleware_hub.sessions.export.*",
        "middleware_hub.sessions.events",
        "middleware_hub.sessions.log.replay",
        "middleware_hub.sessions.prompt.*",
        "middleware_hub.sessions.request_defaults",
        "middleware_hub.sessions.trie.*",
        "middleware_hub.sessions.turn.answer",
        "middleware_hub.sessions.turn.forced_calls",
        "middleware_hub.store.chains",
        "middleware_hub.store.errors",
        "middleware_hub.store.media",
        "middleware_hub.store.paths",
        "middleware_hub.store.protocol",
        "middleware_hub.store.records",
        "middleware_hub.templates.trials",
        "middleware_hub.trajectories.choosing",
        "middleware_hub.trajectories.events",
        "middleware_hub.trajectories.ledger",
        "middleware_hub.trajectories.members",
        "middleware_hub.trajectories.samples",
        "middleware_hub.tokenizer.*",
    ),
    "words": (
        "router.errors",
        "router.config",
        "router.version",
        "middleware_hub.routes",
        "middleware_hub.spans.*",
    ),
    # A distribution of its own, which shares no code with the router.
    "worker": ("worker.*",),
}
FRAMEWORKS = frozenset({"starlette", "aiohttp", "transformers", "tenacity", "asyncio", "uvicorn"})
ONLY_IN = {
    "aiohttp": ("router.http.upstream", "middleware_hub.client.transport"),
    "opentelemetry": ("router.observability.otel",),
    "uvicorn": ("router.serving.server", "router.serving.connection", "worker.http.serve"),
    "transformers": (
        "middleware_hub.tokenizer.loaded",
        "middleware_hub.templates.renderer",
        "worker.vocabulary",
    ),
}
DEMOS = "worker.demo."
"""They start a worker and a router."""

ORDER = list(LAYERS)


@cache
def layer_of(module: str) -> str | None:
    """The layer with the longest pattern that fits a module, or a name in it."""
    fits = [
        (len(pattern), layer)
        for layer, patterns in LAYERS.items()
        for pattern in patterns
        if (module.startswith(pattern[:-1]) if pattern.endswith("*") else f"{module}.".startswith(f"{pattern}."))
    ]
    return max(fits)[1] if fits else None


def imports_of(source: str) -> set[str]:
    """Full names of what is imported: modules, and `module.name` where a name may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def faults(module: str, source: str) -> list[str]:
    """What in this module's imports is against the table."""
    found = []
    layer = layer_of(module)
    if layer is None and len(ast.parse(source).body) != 1:  # a package may be a docstring and nothing else
        found.append(f"{module} stands in no layer: add it to LAYERS in tests/router/test_layers.py")
    for name in sorted(imports_of(source)):
        package = name.partition(".")[0]
        if module.startswith("router") and package == "middleware_hub":
            found.append(f"{module} imports {name}: router never imports middleware_hub")
        if package in ONLY_IN and module not in ONLY_IN[package]:
            found.append(f"{module} imports {name}: only {ONLY_IN[package]} may")
        if layer in ("core", "words") and package in FRAMEWORKS:
            found.append(f"{module} imports {name}: the {layer} has no framework")
        target = layer_of(name)
        if "worker" in (layer, target) and layer != target and target is not None:
            if not module.startswith(DEMOS):
                found.append(f"{module} imports {name}: the worker is a witness, and stands alone")
        elif layer is not None and target is not None and ORDER.index(target) < ORDER.index(layer):
            found.append(f"{module} ({layer}) imports {name} ({target})")
    return found


@cache
def modules() -> dict[str, str]:
    found = {}
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text()
    return found


def test_imports_point_down() -> None:
    """All modules in one test: to start five hundred tests costs more than what they look at."""
    found = {module: told for module, source in modules().items() if (told := faults(module, source))}
    assert found == {}, "\n".join(fault for told in found.values() for fault in told)


def test_the_table_is_about_these_files() -> None:
    assert {
        "router.cli",
        "router.proxy.proxy",
        "router.http.upstream",
        "router.workers.pool",
        "router.errors",
    } <= modules().keys()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("router.proxy.proxy", "import middleware_hub.spans.chain"),
        ("router.proxy.proxy", "from middleware_hub import spans"),
        ("router.proxy.proxy", "def f():\n    from router.app import create_app"),
        ("router.http.bodies", "from router.proxy.proxy import Proxy"),
        ("router.http.bodies", "from router.proxy import proxy"),
        ("router.workers.pool", "import asyncio"),
        ("router.workers.pool", "from router.http.upstream import Upstream"),
        ("router.policies.least_inflight", "from starlette.types import Scope"),
        ("router.errors", "from router.workers.worker import Worker"),
        ("router.proxy.proxy", "import aiohttp.client"),
        ("middleware_hub.radix.tree", "from transformers import AutoTokenizer"),
        ("middleware_hub.radix.tree", "from middleware_hub.radix_tree_middleware import RadixTreeMiddleware"),
        ("router.newcomer", ""),
        ("worker.http.wire", "from router.engines.form.stream import StreamedReply"),
        ("worker.http.wire", "from router.errors import RouterError"),
        ("worker.http.wire", "import middleware_hub.spans.chain"),
        ("router.proxy.proxy", "from worker.worker import EmbeddedWorker"),
        ("router.app", "from worker import worker"),
        ("worker.http.wire", "import uvicorn"),
        ("middleware_hub.generate.prompting", "from opentelemetry import trace"),
    ],
)
def test_faults_are_found(module: str, source: str) -> None:
    assert faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "middleware_hub.radix_tree_middleware",
            "from router.http.bodies import read_body\nimport asyncio\nimport tenacity",
        ),
        ("router.http.upstream", "import aiohttp"),
        ("router.workers.pool", "from router.workers.policy import Policy\nimport random"),
        ("router.config", "from router.errors import BadRequestError"),
        ("worker.demo.cli", "from worker.models.ngram import shipped_tokenizer"),
        ("worker.http.wire", "from worker.engine.engine import Engine\nimport asyncio"),
        ("worker.http.serve", "import uvicorn"),
    ],
)
def test_what_is_right_passes(module: str, source: str) -> None:
    assert faults(module, source) == []
