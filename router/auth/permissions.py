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
from difflib import get_close_matches


class Right(enum.Enum):
    """The right that a request needs."""

    FREE = "free"
    """None: monitoring has no key."""
    USE = "use"
    """To generate, and to retrieve one's own generations. Needs a key where tenants have keys."""
    READ = "read"
    """To see the state of the fleet. Needs any key where there are keys."""
    ADMIN = "admin"
    """To change the fleet, or to see other clients' requests. Needs an admin key where there are admin keys."""


FREE = frozenset({"/liveness", "/readiness", "/health"})

USE = frozenset(
    {
        # Our own. The body of an abort decides: without a request id, it needs an admin key.
        "/generate",
        "/retrieve_from_text",
        "/radix_tree/explain",
        "/trajectories",
        *(f"/trajectories/{call}" for call in ("claim", "ack", "release", "renew", "reward", "drop", "score")),
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
        "/v1beta/models",
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
    if path.startswith("/media/") and ".." not in path.split("/"):
        return Right.USE  # a tenant gets only its own images
    if path == "/inspect" or path.startswith("/inspect/"):
        # The page has no data in it. Where it is switched off, no worker is asked for it (`ControlRoutes`).
        return Right.USE if path.startswith("/inspect/api/") else Right.FREE
    if path.startswith(("/v1/models/", "/v1beta/models/", "/v1alpha/models/")) and ".." not in path.split("/"):
        return Right.USE  # a name may have slashes in it
    return Right.ADMIN


_SOURCE = "{source}"
_KNOWN = FREE | USE | READ | OWN_ADMIN | {"/sessions", "/workers", "/inspect", "/media"}
_SPELT = frozenset(path.replace(_SOURCE, "disk") for path in _KNOWN)
_LONGER = tuple(path.partition(_SOURCE)[0] if _SOURCE in path else f"{path}/" for path in _KNOWN)
"""How a path begins that is known and has more behind it, such as a name."""
_SESSIONS = "sessions"
_HUB = frozenset(
    path for path in USE | READ if path.startswith(("/retrieve_from_text", "/radix_tree/", "/trajectories"))
)
_ENDS = ("/chat/completions", "/messages", "/messages/count_tokens")
_ALIKE = 0.8
"""How much of two paths has to be equal. Less, and paths of workers that are not listed here would count as misspelt."""
_LONGEST = 2048
"""Characters of a path that may be a misspelt one, with the id of a session in it. To compare longer ones takes long."""
_PART = len("/stats")
"""As many characters of a path are enough to find it by its beginning or its end."""


def meant_path(path: str) -> str | None:
    """Return the path that a misspelt one means; None if `path` itself is known, or like no other.

    The router passes a path that is not its own to a worker, whose 404 names neither the router nor the path.
    """
    if path in _KNOWN or len(path) > _LONGEST:
        return None
    if path == "/":  # somebody opens the router's address in a browser
        return "/inspect"
    bare = "/" + path.strip("/")
    while bare.startswith("/v1/"):  # a client's base URL has a /v1 too many, or none
        bare = bare.removeprefix("/v1")
    for found in (bare, f"/v1{bare}"):
        if found in _SPELT and found != path:
            return found
    head, _, rest = bare[1:].partition("/")
    if rest and get_close_matches(head, (_SESSIONS,), 1, _ALIKE):
        return None if head == _SESSIONS else f"/{_SESSIONS}/{rest}"
    # A client's base URL may itself be the path of a call. Clients put these behind it.
    if ended := [end for end in _ENDS if path.endswith(end)]:
        return f"/v1{ended[0]}"
    if path.startswith(_LONGER):
        return None
    if alike := get_close_matches(path, _SPELT, 1, _ALIKE):
        return alike[0]
    parts = [known for known in _SPELT if len(bare) >= _PART and (known.startswith(bare) or known.endswith(bare))]
    return min(parts, default=None)


def of_the_hub(path: str) -> bool:
    """Return whether a path is one of the middlewares': no worker has it."""
    return path in _HUB or path == "/sessions" or path.startswith(("/sessions/", "/media/"))
