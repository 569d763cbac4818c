"""Which key a path needs.

The router passes a path that is not its own to a worker. Some of a worker's paths write files, load weights, start profilers,
or show the worker's command line, its own key included (`/server_info`). A list of forbidden paths would miss new ones at every
release. So this file lists the paths that a tenant may use, and all others need an admin key. Add the paths of your own
middleware here.

Some paths are left out although they look harmless: `/open_session`, `/close_session` and `/v1/responses/{id}`, because a
worker serves them to every client that knows the id. Reports on load, caches and corpora concern all tenants.
"""

from __future__ import annotations

import enum


class Right(enum.Enum):
    """The right that a request needs."""

    FREE = "free"
    """None: monitoring has no key."""
    USE = "use"
    """To generate, and to retrieve one's own generations. Needs a key where tenants have keys."""
    READ = "read"
    """To see the state of the fleet. Needs any key where there are keys."""
    ADMIN = "admin"
    """To change the fleet, or to see what others do. Needs an admin key where there are admin keys."""


FREE = frozenset({"/liveness", "/readiness", "/health"})

USE = frozenset(
    {
        # Our own. The body of an abort decides: without a request id, it needs an admin key.
        "/generate",
        "/retrieve_from_text",
        "/radix_tree/explain",
        "/trajectories",
        *(f"/trajectories/{call}" for call in ("claim", "ack", "release", "renew", "reward", "drop")),
        "/abort_request",
        # A worker's: OpenAI, Anthropic, Ollama, SageMaker, Vertex AI, SGLang (0.5.23).
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/score",
        "/v1/rerank",
        "/v1/decisions",
        "/v1/systemone",
        "/v1/audio/transcriptions",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/models",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/api/tags",
        "/api/show",
        "/invocations",
        "/vertex_generate",
        "/encode",
        "/classify",
        "/tokenize",
        "/detokenize",
        "/parse_function_call",
        "/separate_reasoning",
        "/model_info",
        "/get_model_info",
        "/health_generate",
        "/ready",
        "/ping",
    }
)

READ = frozenset({"/metrics", "/list_workers", "/routers", "/radix_tree/stats"})

OWN_ADMIN = frozenset(
    {
        "/add_worker",
        "/remove_worker",
        "/debug/requests",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_{source}",
        "/update_weight_version",
        "/begin_weight_update",
        "/end_weight_update",
        "/load_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/unload_lora_adapter",
        # vLLM's own paths.
        "/pause",
        "/resume",
        "/abort_requests",
        "/reset_prefix_cache",
        "/sleep",
        "/wake_up",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""The router's own routes that need an admin key. A test requires each new route to be in one of these lists."""


def needed(method: str, path: str) -> Right:
    """Return the right that a request needs. `path` is decoded; only these exact spellings are known."""
    if path in USE:
        return Right.USE
    if path in FREE:
        return Right.FREE
    if path in READ:
        return Right.READ
    if path == "/workers" or path.startswith("/workers/"):
        return Right.READ if method in ("GET", "HEAD") else Right.ADMIN
    if path == "/sessions" or (path.startswith("/sessions/") and ".." not in path.split("/")):
        return Right.USE  # a tenant sees only its own sessions; without sessions, no worker knows the path
    if path == "/inspect" or path.startswith("/inspect/"):
        # The page has no data in it. No worker is asked for what is not there (`ControlRoutes`).
        return Right.USE if path.startswith("/inspect/api/") else Right.FREE
    if path.startswith("/v1/models/") and ".." not in path.split("/"):
        return Right.USE  # a name may have slashes in it
    return Right.ADMIN
