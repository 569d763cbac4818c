"""Imports point down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("router", "middleware_hub")

# From the top down. A file is named by its module path, `*` stands for the rest of a name.
LAYERS: dict[str, tuple[str, ...]] = {
    "edges": (
        "router.cli",
        "router.__main__",
        "router.server",
        "router.app",
        "router.boundary",
        "router.connection",
        "router.flags",
        "router.descriptors",
        "router.logs",
        "router.routes",
        "router.guard",
        "router.intake",
        "router.demo.*",
        "middleware_hub.*_middleware",
        "middleware_hub.completions.*",
        "middleware_hub.sessions.chats",
        "middleware_hub.sessions.controls",
        "middleware_hub.sessions.gateway",
        "middleware_hub.sessions.dialects.*",
    ),
    "flow": (
        "router.outbound",
        "router.proxy",
        "router.abort_retries",
        "router.gate",
        "router.generations",
        "router.renewal",
        "router.disguise",
        "router.fleet",
        "router.flights",
        "router.kv_watch",
        "router.plugins",
        "router.telling",
        "router.upkeep",
        "router.workers.admission",
        "router.workers.health",
        "router.workers.probe",
        "router.workers.queue",
        "middleware_hub.prompting",
        "middleware_hub.recording",
        "middleware_hub.responder",
        "middleware_hub.retrieval",
        "middleware_hub.hub",
        "middleware_hub.sessions.anonymous",
        "middleware_hub.sessions.composing",
        "middleware_hub.sessions.whole_rendering",
        "middleware_hub.sessions.exchange",
        "middleware_hub.sessions.generation",
        "middleware_hub.sessions.session",
        "middleware_hub.sessions.store",
        "middleware_hub.sessions.thoughts",
        "middleware_hub.sessions.turns",
        "middleware_hub.sessions.worker_request",
        "middleware_hub.sessions.worker_stream",
    ),
    "seams": (
        "router.upstream",
        "router.kv_events",
        "router.asgi",
        "router.beside",
        "router.client",
        "router.loops",
        "router.lag",
        "router.metrics",
        "router.otel",
        "router.patience",
        "router.policy_metrics",
        "router.tracing",
        "router.workers.allowed",
        "middleware_hub.hub_metrics",
        "middleware_hub.encoder",
        "middleware_hub.tokenizer",
        "middleware_hub.sessions.renderer",
        "middleware_hub.sessions.rendering",
        "middleware_hub.sessions.tails",
        "middleware_hub.sessions.template_reads",
        "middleware_hub.sessions.session_metrics",
        "middleware_hub.sessions.turn_forms",
    ),
    "core": (
        "router.sglang",
        "router.unpacking",
        "router.sglang.*",
        "router.policies",
        "router.policies.*",
        "router.attempts",
        "router.callers",
        "router.error_bodies",
        "router.keys",
        "router.permissions",
        "router.requests",
        "router.workers.breaker",
        "router.workers.pool",
        "router.workers.worker",
        "middleware_hub.alignment",
        "middleware_hub.cover",
        "middleware_hub.prefix_match",
        "middleware_hub.radix_node",
        "middleware_hub.ids_index",
        "middleware_hub.leaves",
        "middleware_hub.radix_tree",
        "middleware_hub.records",
        "middleware_hub.reply_names",
        "middleware_hub.tree_check",
        "middleware_hub.tree_walk",
        "middleware_hub.segments",
        "middleware_hub.versions",
        "middleware_hub.vocabulary",
        "middleware_hub.sessions.chat",
        "middleware_hub.sessions.composed_prompt",
        "middleware_hub.sessions.edited_turns",
        "middleware_hub.sessions.export",
        "middleware_hub.sessions.export_formats",
        "middleware_hub.sessions.forced_calls",
        "middleware_hub.sessions.message_key",
        "middleware_hub.sessions.message_memo",
        "middleware_hub.sessions.message_nodes",
        "middleware_hub.sessions.message_trie",
        "middleware_hub.sessions.path_index",
        "middleware_hub.sessions.parsers",
        "middleware_hub.sessions.per_token",
        "middleware_hub.sessions.parsers.*",
        "middleware_hub.sessions.refusals",
        "middleware_hub.sessions.seam",
        "middleware_hub.sessions.segments",
        "middleware_hub.sessions.template_trials",
        "middleware_hub.sessions.told",
        "middleware_hub.sessions.verifier",
        "middleware_hub.sessions.written_ids",
    ),
    "words": ("router.errors", "router.config", "middleware_hub.spans"),
    # A worker, which shares nothing with the router but the command line.
    "embedded": ("router.embedded.*",),
    # Packages whose __init__ only has a docstring.
    "names": (
        "router",
        "router.workers",
        "router.demo",
        "router.embedded",
        "middleware_hub",
        "middleware_hub.completions",
        "middleware_hub.sessions",
        "middleware_hub.sessions.dialects",
    ),
}
FRAMEWORKS = frozenset({"starlette", "aiohttp", "transformers", "tenacity", "asyncio", "uvicorn"})
ONLY_IN = {
    "aiohttp": ("router.upstream",),
    "opentelemetry": ("router.otel",),
    "uvicorn": ("router.server", "router.connection", "router.embedded.serve"),
    "transformers": ("middleware_hub.tokenizer", "middleware_hub.sessions.renderer", "router.embedded.vocabulary"),
}
MAY_EMBED = ("router.demo.cli", "router.demo.agent_")
"""The demos, which start it."""

ORDER = list(LAYERS)


def layer_of(module: str) -> str | None:
    for layer, patterns in LAYERS.items():
        for pattern in patterns:
            start, star, end = pattern.partition("*")
            if module == pattern or (star and module.startswith(start) and module.endswith(end)):
                return layer
    return None


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
    if layer is None:
        found.append(f"{module} stands in no layer")
    for name in sorted(imports_of(source)):
        package = name.partition(".")[0]
        if module.startswith("router") and package == "middleware_hub":
            found.append(f"{module} imports {name}: router never imports middleware_hub")
        if package in ONLY_IN and module not in ONLY_IN[package]:
            found.append(f"{module} imports {name}: only {ONLY_IN[package]} may")
        if layer in ("core", "words") and package in FRAMEWORKS:
            found.append(f"{module} imports {name}: the {layer} has no framework")
        target = layer_of(name)
        if "embedded" in (layer, target) and layer != target and name not in LAYERS["names"]:
            if package in OURS and not module.startswith(MAY_EMBED):
                found.append(f"{module} imports {name}: the embedded engine is a witness, and stands alone")
        elif layer is not None and target is not None and ORDER.index(target) < ORDER.index(layer):
            found.append(f"{module} ({layer}) imports {name} ({target})")
    return found


def modules() -> dict[str, str]:
    found = {}
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text()
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    assert faults(module, modules()[module]) == []


def test_the_table_is_about_these_files() -> None:
    assert {"router.cli", "router.proxy", "router.upstream", "router.workers.pool", "router.errors"} <= modules().keys()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("router.proxy", "import middleware_hub.spans"),
        ("router.proxy", "from middleware_hub import spans"),
        ("router.proxy", "def f():\n    from router.app import create_app"),
        ("router.asgi", "from router.proxy import Proxy"),
        ("router.asgi", "from router import proxy"),
        ("router.workers.pool", "import asyncio"),
        ("router.workers.pool", "from router.upstream import Upstream"),
        ("router.policies.least_inflight", "from starlette.types import Scope"),
        ("router.errors", "from router.workers.worker import Worker"),
        ("router.proxy", "import aiohttp.client"),
        ("middleware_hub.radix_tree", "from transformers import AutoTokenizer"),
        ("middleware_hub.radix_tree", "from middleware_hub.radix_tree_middleware import RadixTreeMiddleware"),
        ("router.newcomer", ""),
        ("router.embedded.wire", "from router.sglang import StreamedReply"),
        ("router.embedded.wire", "from router.errors import RouterError"),
        ("router.embedded.wire", "import middleware_hub.spans"),
        ("router.proxy", "from router.embedded.worker import EmbeddedWorker"),
        ("router.app", "from router.embedded import worker"),
        ("router.embedded.wire", "import uvicorn"),
        ("middleware_hub.prompting", "from opentelemetry import trace"),
    ],
)
def test_faults_are_found(module: str, source: str) -> None:
    assert faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("middleware_hub.radix_tree_middleware", "from router.asgi import read_body\nimport asyncio\nimport tenacity"),
        ("router.upstream", "import aiohttp"),
        ("router.workers.pool", "from router.policies.base import Policy\nimport random"),
        ("router.config", "from router.errors import BadRequestError"),
        ("router.demo.cli", "from router.embedded.ngram import shipped_tokenizer"),
        ("router.embedded.wire", "from router.embedded.engine import Engine\nimport asyncio"),
        ("router.embedded.serve", "import uvicorn"),
    ],
)
def test_what_is_right_passes(module: str, source: str) -> None:
    assert faults(module, source) == []
