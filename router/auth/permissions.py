"""Which key a path wants.

What is not the router's own goes to a worker as it is, and a worker's paths are many: some write files, load weights, start
profilers, or tell what the worker was started with, its own key and command line included (`/server_info`). A list of what is
forbidden would have a hole with every release. So this is a list of what a tenant may do, and everything else takes an admin
key; also the paths of a middleware of your own, which are to be added here.

Left out though they look harmless: `/open_session` and `/close_session`, `/v1/responses/{id}`: a worker keeps these for
whoever names them. What a worker tells of its load, its caches and its corpora is everybody's.
"""

from __future__ import annotations

import enum


class Right(enum.Enum):
    """What a request has to be allowed."""

    FREE = "free"
    """Nothing: whoever watches over the process has no key."""
    USE = "use"
    """To generate, and to ask for what one has generated. Wants a key where there are keys of tenants."""
    READ = "read"
    """To see how the fleet is. Wants any key where there are keys."""
    ADMIN = "admin"
    """To change the fleet, or to see what others do. Wants an admin key where there are such."""


FREE = frozenset({"/liveness", "/readiness", "/health"})

USE = frozenset(
    {
        # Our own. What an abort means is decided by its body: without a request id it is an admin's.
        "/generate",
        "/retrieve_from_text",
        "/radix_tree/explain",
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

READ = frozenset({"/metrics", "/list_workers", "/radix_tree/stats"})

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
    }
)
"""Routes of the router's own that are in no list above because they are not to be: a new one has to be put somewhere."""


def needed(method: str, path: str) -> Right:
    """The right that a request wants. `path` is the decoded one; nothing but these very spellings of it is known."""
    if path in USE:
        return Right.USE
    if path in FREE:
        return Right.FREE
    if path in READ:
        return Right.READ
    if path == "/workers" or path.startswith("/workers/"):
        return Right.READ if method in ("GET", "HEAD") else Right.ADMIN
    if path == "/sessions" or (path.startswith("/sessions/") and ".." not in path.split("/")):
        return Right.USE  # of its tenant's own; where there are no sessions, no worker knows such a path
    if path.startswith("/v1/models/") and ".." not in path.split("/"):
        return Right.USE  # a name may have slashes in it
    return Right.ADMIN
