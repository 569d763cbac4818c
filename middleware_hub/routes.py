"""All routes of the hub: which call serves which method of which path.

Each table belongs to one part of the hub, which has a function for each call (`bound`). A name in braces stands for one segment
of a path. What is in no table goes on to the router. A call for GET serves HEAD as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
Table = Mapping[str, Mapping[str, str]]
"""Maps paths to methods, and these to the names of calls."""

RADIX_TREE: Final[Table] = {
    "/generate": {"POST": "generate", "PUT": "generate"},  # SGLang takes both
    "/retrieve_from_text": {"POST": "retrieve"},
    "/radix_tree/explain": {"POST": "explain"},
    "/radix_tree/stats": {"GET": "stats"},
}
"""Of `RadixTreeMiddleware`."""

TRAJECTORIES: Final[Table] = {
    "/trajectories": {"GET": "show"},  # all samples of a group, including those that trainers hold
    "/trajectories/claim": {"POST": "claim"},  # samples for a while
    "/trajectories/ack": {"POST": "acknowledge"},  # the samples of a claim are never handed out again
    "/trajectories/release": {"POST": "release"},  # the samples of a claim are given back
    "/trajectories/renew": {"POST": "renew"},  # the lease of a claim begins again
    "/trajectories/reward": {"POST": "reward"},  # what a reply was worth: its rollout ends
    "/trajectories/drop": {"POST": "drop"},  # samples of a group that no trainer holds are never handed out
}
"""Of `Calls` (`middleware_hub/trajectories/calls.py`), which `RadixTreeMiddleware` has."""

SAMPLED_ELSEWHERE: Final = (
    *(f"/v1/{call}" for call in ("chat/completions", "chat/completions/batch", "completions", "messages", "responses")),
    "/api/chat",
    "/api/generate",
    "/invocations",
    "/vertex_generate",
    "/inference/v1/generate",
)
"""Paths of workers that sample. `RadixTreeMiddleware` sends on what comes here, whatever its method, and says that it is not
recorded: the middleware of sessions, which stands outside, has not turned it into a `/generate`."""

READ_ELSEWHERE: Final = (
    *("/v1/messages/count_tokens", "/tokenize", "/v1/tokenize"),
    *(f"/v1/{call}/render" for call in ("chat/completions", "completions", "messages", "responses")),
    *("/encode", "/v1/embeddings", "/v2/embed", "/classify", "/v1/classify", "/pooling", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
"""Paths of workers that read without sampling, perhaps images. With a model that sees, `RadixTreeMiddleware` checks what media
is in them, and sends them on."""

CHATS: Final[Table] = {
    "/v1/chat/completions": {"POST": "talk"},  # OpenAI
    "/v1/messages": {"POST": "talk"},  # Anthropic
    "/v1/messages/count_tokens": {"POST": "talk"},
    "/v1/responses": {"POST": "respond"},  # OpenAI; only in a session: workers keep their own
    "/v1/completions": {"POST": "complete"},  # texts, without a chat template
    "/load_lora_adapter": {"POST": "load"},  # a worker's, after which it may serve other models
    "/v1/load_lora_adapter": {"POST": "load"},
}
"""Of `SessionsMiddleware`, without a session in the path: `X-Session-Id` may name one. Other methods go on to the router, HEAD
too. A request with the key of a session comes with the path of that session (`router.auth.session_key_check`)."""

MODELS: Final[Table] = {
    "/v1beta/models/{model}:generateContent": {"POST": "talk"},  # Google
    "/v1beta/models/{model}:streamGenerateContent": {"POST": "talk"},
    "/v1beta/models/{model}:countTokens": {"POST": "talk"},
    "/v1beta/models": {"GET": "models"},
    "/v1beta/models/{model}": {"GET": "models"},
}
"""The same for clients that write the model's name into the path, where it may have slashes and colons. No worker has these."""

SCORES: Final[Table] = {"/trajectories/score": {"POST": "score"}}
"""Of `Scoring` (`middleware_hub/sessions/scoring.py`), which `SessionsMiddleware` has: what a teacher or a reference says of
tokens."""

SESSIONS: Final[Table] = {"/sessions": {"POST": "create", "GET": "list"}}
"""Of `SessionsMiddleware`. Nothing below goes on to the router."""

SESSION_CONTROLS: Final[Table] = {
    "/sessions/{id}": {"GET": "show", "DELETE": "delete"},
    "/sessions/{id}/reward_info": {"POST": "reward"},
    "/sessions/{id}/complete": {"POST": "complete", "GET": "wait"},
    "/sessions/{id}/finalize": {"POST": "finalize"},
    "/sessions/{id}/trajectories": {"GET": "trajectories"},
}
"""Of `Controls` (`middleware_hub/sessions/controls.py`), which `SessionsMiddleware` has."""

SESSION_CHATS: Final[Table] = {
    "/sessions/{id}/v1/chat/completions": {"POST": "talk"},  # OpenAI
    "/sessions/{id}/v1/messages": {"POST": "talk"},  # Anthropic
    "/sessions/{id}/v1/responses": {"POST": "talk"},  # OpenAI
    "/sessions/{id}/v1/messages/count_tokens": {"POST": "talk"},
    "/sessions/{id}/v1/models": {"GET": "models"},
    **{f"/sessions/{{id}}{path}": calls for path, calls in MODELS.items()},
}
"""Of `SessionsMiddleware`. A client library is given the base URL and adds the rest. Some add a second `/v1`, some none at all:
both are understood. What follows `models/` is a model's name, which may have slashes in it."""

MEDIA: Final[Table] = {"/media/{digest}": {"GET": "show"}}
"""Of `MediaCalls` (`middleware_hub/media/calls.py`), which every middleware of the hub has."""

INSPECTOR_PAGE: Final[Table] = {
    "/inspect": {"GET": "page"},
    "/inspect/assets/{file}": {"GET": "page"},
}
"""Of `Inspector`. The name of a file may have slashes in it."""

_BRANCH: Final = "/inspect/api/conversations/{id}/branches/{branch}"
INSPECTOR_API: Final[Table] = {
    "/inspect/api/conversations": {"GET": "conversations"},
    "/inspect/api/conversations/{id}": {"GET": "conversation"},
    _BRANCH: {"GET": "branch"},
    f"{_BRANCH}/tokens": {"GET": "tokens"},
    f"{_BRANCH}/find": {"GET": "find"},
    f"{_BRANCH}/drift": {"GET": "drift"},
    f"{_BRANCH}/download": {"GET": "download"},
    "/inspect/api/compare": {"GET": "compare"},
    "/inspect/api/explain": {"POST": "explain"},
    "/inspect/api/run": {"GET": "run"},
}
"""Of `Api` (`middleware_hub/inspector/api.py`), which `Inspector` has. Nothing below `/inspect` goes on to the router."""


def bound(table: Table, calls: Mapping[str, T], prefix: str = "") -> dict[str, dict[str, T]]:
    """Return a table with the functions of its calls, and with its paths behind `prefix`."""
    named = {name for methods in table.values() for name in methods.values()}
    assert named == calls.keys(), f"these calls have no route, or no function: {sorted(named ^ calls.keys())}"
    return {
        path[len(prefix) :]: {method: calls[name] for method, name in methods.items()}
        for path, methods in table.items()
    }


def find(table: Mapping[str, T], segments: Sequence[str]) -> tuple[T, list[str]] | None:
    """Return the row of a path, and the segments that stand for its names in braces; None if no row fits.

    Args:
        table: by paths without a slash in front.
        segments: of the path, decoded.
    """
    for path, row in table.items():
        parts = path.split("/")
        if len(parts) == len(segments):
            pairs = list(zip(parts, segments, strict=True))
            if all(part == segment or part.startswith("{") for part, segment in pairs):
                return row, [segment for part, segment in pairs if part.startswith("{")]
    return None
