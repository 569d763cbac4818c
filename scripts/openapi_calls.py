"""What docs/openapi.json says of each route beside its path: what it does, takes, and answers.

A body is a `msgspec.Struct`: the one that reads the request where there is one, otherwise one of `openapi_bodies.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct

from middleware_hub.inspector.finding import PARAMETERS as CONVERSATION_FILTERS
from middleware_hub.inspector.queries import ExplainRequest
from middleware_hub.inspector.reports.files import TYPES
from middleware_hub.retrieval.retrieval_request import RetrievalRequest
from middleware_hub.trajectories.claims import ClaimRequest
from scripts.openapi_bodies import (
    AbortBody,
    ChatBody,
    ClaimIdBody,
    CompleteBody,
    CompletionBody,
    CountTokensBody,
    DropBody,
    FinalizeBody,
    FleetBody,
    Form,
    GenerateBody,
    GenerateContentBody,
    MessagesBody,
    RenewBody,
    ResponsesBody,
    RewardBody,
    RewardInfoBody,
    Roots,
    ScoreBody,
    SessionBody,
    SharedTurns,
    WorkerBody,
)

READS: Final = (400, 408, 413, 415)
"""Errors of a body: wrong, late, too large, compressed in an unknown way."""
WORKS: Final = (408, 429, 502, 503, 504)
"""Errors of a generation: no worker has room, fails, is there, or answers in time."""


class Call(NamedTuple):
    """A method of a path.

    Attributes:
        does: the summary.
        takes: the body; None if none is read.
        optional: whether the body may be left out.
        status: of success.
        content: the media types of success.
        errors: statuses besides those that any route of its kind may have.
        query: parameters, with their types.
        needs: the parameters of the query that may not be missing.
        headers: request headers, by name.
        tells: reply headers, by name.
        workers: whether an error of a worker is passed on with the worker's own status.
    """

    does: str
    takes: type[Struct] | None = None
    optional: bool = False
    status: int | tuple[int, ...] = 200
    content: tuple[str, ...] = ("application/json",)
    errors: tuple[int, ...] = ()
    query: Mapping[str, Any] = {}
    needs: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    tells: tuple[str, ...] = ()
    workers: bool = False


# Headers ----------------------------------------------------------------------------------------------------------------

HEADERS: Final[Mapping[str, tuple[Any, str]]] = {
    "x-radix-namespace": (str, "Keeps texts apart: what is recorded in one namespace never answers in another"),
    "x-radix-parent": (str, "The request id of the reply to continue; `none`: all of the prompt is context"),
    "x-radix-media": (Literal["expanded"], "The ids have a run of placeholders for each image"),
    "x-group-id": (str, "The group that the replies belong to"),
    "x-group-size": (str, "How many samples make the group complete, 1 to 65536"),
    "x-rollout-id": (str, "Joins replies to one rollout"),
    "x-rollout-end": (Literal["true", "false"], "`true`: this reply ends its rollout"),
    "x-router-affinity": (str, "The word of the conversation, by which a load balancer keeps it at one router"),
    "x-abort-policy": (Literal["retry", "return"], "What happens if the worker aborts the generation"),
    "x-kv-salt": (Literal["version", "rollout", "off"], "Which requests share the engine's cache with this one"),
    "x-session-id": (str, "The session that is meant"),
    "idempotency-key": (str, "The same key with the same body is the same request, for two minutes"),
}
"""Of requests."""

TOLD: Final[Mapping[str, tuple[Any, str]]] = {
    "x-request-id": (str, "That of the request, or a new one"),
    "x-router-affinity": (str, "The word of the conversation: send it back with the next turn"),
    "x-router-worker": (str, "The worker that answered"),
    "x-router-reason": (str, "Why this worker was chosen"),
    "x-radix-recorded": (str, "`exact`; `inexact`; `no; REASON`; `pending` in a stream"),
    "x-radix-prompt-tokens": (int, "Ids that were sent"),
    "x-radix-reused-tokens": (int, "How many of them came from memory"),
    "x-radix-reasons": (str, "Remarks about the prompt, separated by commas"),
    "x-radix-saved": (Literal["no"], "The store did not take the reply: it waits in a file of this router"),
    "x-session-id": (str, "The session"),
    "x-generation-id": (str, "The generation; with `n`, all of them, separated by commas"),
    "x-radix-ignored-tools": (str, "The types of tools that were left out"),
    "x-radix-ignored-fields": (str, "Fields of the request that have no effect here"),
    "x-radix-spliced-turns": (int, "How many earlier turns kept their ids in a new rendering"),
    "location": (str, "The path of the worker"),
}
"""Of replies. All are optional but the first, which every reply has."""

_GROUP = ("x-group-id", "x-group-size", "x-rollout-id", "x-rollout-end")
_SENT = ("x-radix-namespace", "x-radix-parent", "x-router-affinity", "x-abort-policy", "x-kv-salt", *_GROUP)
_ROUTED = ("x-router-affinity", "x-router-worker", "x-router-reason")
_RECORDED = (
    *("x-radix-recorded", "x-radix-prompt-tokens", "x-radix-reused-tokens", "x-radix-reasons", "x-radix-saved"),
    *_ROUTED,
)
_TURN = (
    *("x-session-id", "x-generation-id", "x-radix-ignored-tools", "x-radix-ignored-fields", "x-radix-spliced-turns"),
    *_RECORDED,
)

# Calls ------------------------------------------------------------------------------------------------------------------

_STREAM = ("application/json", "text/event-stream")
_EXPORT: Final = {
    "export_all_checkpoints": bool,
    "shared_turns": SharedTurns,
    "roots": Roots,
    "format": Form,
    "media": Literal["ref", "inline"],
    "expect_request_ids": str,
}
_TREES = ("application/json", "application/vnd.apache.arrow.stream", "application/octet-stream")
_GENERATE = Call(
    "Sample, as SGLang does",
    GenerateBody,
    content=_STREAM,
    errors=WORKS,
    headers=(*_SENT, "x-radix-media"),
    tells=_RECORDED,
    workers=True,
)
_ADD = Call("Register a worker", WorkerBody, optional=True, query={"url": str}, errors=(502, 504))
_EXPLAIN = Call("Show where a text departs from the recorded one", RetrievalRequest, headers=("x-radix-namespace",))


def _fleet(does: str) -> Call:
    return Call(does, FleetBody, optional=True, status=(200, 207), errors=(404, 405, 502), workers=True)


def _turn(does: str, takes: type[Struct], *, workers: bool, session: bool, google: bool = False) -> Call:
    return Call(
        does,
        takes,
        content=_STREAM,
        errors=(404, 409, 500, *WORKS),
        query={"alt": Literal["sse"]} if google else {},
        headers=("x-radix-parent", "idempotency-key", "x-abort-policy", "x-kv-salt", "x-router-affinity")
        if session
        else (*_SENT, "x-session-id", "idempotency-key"),
        tells=_TURN,
        workers=workers,
    )


def _models(does: str, *more: int) -> Call:
    return Call(does, errors=(400, 404, *more, *WORKS), workers=True)


_G = "/v1beta/models/{model}"
_CHATS: Final = {
    "/v1/chat/completions": ("Answer a chat, in OpenAI's dialect", ChatBody),
    "/v1/responses": ("Answer, in the dialect of OpenAI's Responses API", ResponsesBody),
    "/v1/messages": ("Answer a chat, in Anthropic's dialect", MessagesBody),
    f"{_G}:generateContent": ("Answer a chat, in Google's dialect", GenerateContentBody),
    f"{_G}:streamGenerateContent": ("Answer a chat piece by piece, in Google's dialect", GenerateContentBody),
}
_COUNTS: Final = {
    "/v1/messages/count_tokens": ("Count the tokens of a prompt, in Anthropic's dialect", CountTokensBody),
    f"{_G}:countTokens": ("Count the tokens of a prompt, in Google's dialect", GenerateContentBody),
}
_S = "/sessions/{id}"
_B = "/inspect/api/conversations/{id}/branches/{branch}"

CALLS: Final[Mapping[tuple[str, str], Call]] = {
    ("POST", "/generate"): _GENERATE,
    ("PUT", "/generate"): _GENERATE,
    ("POST", "/retrieve_from_text"): Call(
        "Return the tokens of a text as the engine saw them",
        RetrievalRequest,
        errors=(404, 409),
        query={"media": Literal["ref", "inline"]},
        headers=("x-radix-namespace", "x-router-affinity"),
        tells=("x-router-affinity",),
    ),
    ("POST", "/radix_tree/explain"): _EXPLAIN,
    ("GET", "/radix_tree/stats"): Call("Count what is remembered"),
    # Chats
    **{
        ("POST", path): _turn(does, takes, workers="v1beta" not in path, session=False, google="v1beta" in path)
        for path, (does, takes) in _CHATS.items()
    },
    **{
        ("POST", path): Call(does, takes, errors=(404, 500, *WORKS), headers=("x-session-id",), workers=True)
        for path, (does, takes) in _COUNTS.items()
    },
    ("POST", "/v1/completions"): Call(
        "Complete a text, as OpenAI does",
        CompletionBody,
        content=_STREAM,
        errors=(404, *WORKS),
        headers=_SENT,
        tells=_RECORDED,
        workers=True,
    ),
    ("GET", "/v1beta/models"): _models("List the models, as Google does"),
    ("GET", _G): _models("Describe a model, as Google does", 405),
    # Sessions
    ("POST", "/sessions"): Call(
        "Make a session",
        SessionBody,
        status=201,
        errors=(409, 429, 502, 504),
        headers=("x-group-id", "x-group-size", "x-radix-namespace"),
        tells=("x-router-affinity",),
    ),
    ("GET", "/sessions"): Call("List the sessions, oldest first"),
    ("GET", _S): Call("Describe a session", query={"tree": bool}, errors=(404,)),
    ("DELETE", _S): Call("Abort what runs in a session, and forget it", errors=(404, 409)),
    ("POST", f"{_S}/reward_info"): Call("Attach a reward to a session", RewardInfoBody, errors=(404, 409)),
    ("POST", f"{_S}/complete"): Call("Say that the agent is done", CompleteBody, optional=True, errors=(404, 409)),
    ("GET", f"{_S}/complete"): Call("Wait until the agent is done", query={"timeout_s": float}, errors=(400, 404, 409)),
    ("POST", f"{_S}/finalize"): Call(
        "Close a session, and return its trajectories",
        FinalizeBody,
        optional=True,
        content=_TREES,
        errors=(404, 409, 502, 504),
        query=_EXPORT,
    ),
    ("GET", f"{_S}/trajectories"): Call(
        "Return the trajectories of a session", content=_TREES, errors=(400, 404, 409), query=_EXPORT
    ),
    **{
        ("POST", _S + path): _turn(does, takes, workers=False, session=True, google="v1beta" in path)
        for path, (does, takes) in _CHATS.items()
    },
    **{
        ("POST", _S + path): Call(does, takes, errors=(404, 409, 500, *WORKS))
        for path, (does, takes) in _COUNTS.items()
    },
    ("GET", f"{_S}/v1/models"): _models("List the models that a worker serves"),
    ("GET", f"{_S}/v1beta/models"): _models("List the models, as Google does"),
    ("GET", _S + _G): _models("Describe a model, as Google does", 405),
    # Groups
    ("GET", "/trajectories"): Call(
        "Show all samples of a group",
        errors=(400, 404, 409),
        query={"group": str},
        needs=("group",),
        headers=("x-radix-namespace",),
    ),
    **{
        ("POST", f"/trajectories/{name}"): Call(
            does,
            takes,
            optional=name == "claim",
            errors=errors,
            query={"media": Literal["ref", "inline"]} if name == "claim" else {},
            headers=("x-radix-namespace",),
        )
        for name, does, takes, errors in (
            ("claim", "Hand out samples for a while", ClaimRequest, (409,)),
            ("ack", "Never hand out the samples of a claim again", ClaimIdBody, (404, 409)),
            ("release", "Give the samples of a claim back", ClaimIdBody, (404, 409)),
            ("renew", "Begin the lease of a claim again", RenewBody, (404, 409)),
            ("reward", "Set the reward of a reply or a rollout", RewardBody, (404, 409)),
            ("drop", "Never hand out what no trainer holds of a group", DropBody, (404, 409)),
        )
    },
    ("POST", "/trajectories/score"): Call(
        "Say how likely a teacher or a reference finds tokens", ScoreBody, errors=(404, 409, 502, 504)
    ),
    ("GET", "/media/{digest}"): Call("Return the file of an image", content=("image/*",), errors=(404,)),
    # The inspector
    ("GET", "/inspect"): Call("Show the inspector", content=("text/html",), errors=(404,)),
    ("GET", "/inspect/assets/{file}"): Call("Return a file of the inspector", content=("*/*",), errors=(404,)),
    ("GET", "/inspect/api/conversations"): Call(
        "List conversations, newest first",
        status=(200, 204),
        errors=(400, 404),
        query=dict.fromkeys(CONVERSATION_FILTERS, str),
    ),
    ("GET", "/inspect/api/conversations/{id}"): Call("Describe a conversation", errors=(400, 404)),
    ("GET", _B): Call("Describe a branch", errors=(400, 404)),
    ("GET", f"{_B}/tokens"): Call("Show a window of tokens", errors=(400, 404), query={"start": int, "end": int}),
    ("GET", f"{_B}/find"): Call(
        "Find a text, or ids",
        errors=(400, 404),
        query={"text": str, "token_ids": str, "from": int, "limit": int},
    ),
    ("GET", f"{_B}/drift"): Call("Find where re-encoding gives other tokens", errors=(400, 404), query={"from": int}),
    ("GET", f"{_B}/download"): Call(
        "Return a branch as a file",
        content=("application/json", "application/vnd.apache.parquet", "text/html"),
        errors=(400, 404),
        query={"format": Literal[tuple(TYPES)]},
    ),
    ("GET", "/inspect/api/compare"): Call(
        "Compare two branches",
        errors=(400, 404),
        query=dict.fromkeys(("a", "a_branch", "b", "b_branch"), str),
        needs=("a", "b"),
    ),
    ("POST", "/inspect/api/explain"): Call(
        "Show where a text departs from the recorded one, with advice", ExplainRequest, errors=(404,)
    ),
    ("GET", "/inspect/api/run"): Call("Return the figures of all that is remembered", errors=(400, 404)),
    # Workers
    ("POST", "/add_worker"): _ADD,
    ("POST", "/remove_worker"): Call(
        "Send no more requests to a worker", WorkerBody, optional=True, query={"url": str}, errors=(404,)
    ),
    ("GET", "/list_workers"): Call("List the URLs of the workers"),
    ("GET", "/workers"): Call("List the workers and their state"),
    ("POST", "/workers"): _ADD._replace(
        does="Register a worker, as at SGLang's gateway", status=202, tells=("location",)
    ),
    ("GET", "/workers/{id}"): Call("Describe a worker, by its id or URL", errors=(400, 404)),
    ("DELETE", "/workers/{id}"): Call("Send no more requests to a worker", status=202, errors=(400, 404)),
    ("GET", "/routers"): Call("List the routers that share the store"),
    # Health
    ("GET", "/health"): Call("Say whether a generation would find a worker"),
    ("GET", "/liveness"): Call("Say that the process answers"),
    ("GET", "/readiness"): Call("Say whether the router takes new work"),
    ("GET", "/metrics"): Call("Return the metrics, as Prometheus reads them", content=("text/plain",)),
    ("GET", "/debug/requests"): Call("List the requests in flight"),
    # All workers
    ("POST", "/abort_request"): Call(
        "End generations", AbortBody, status=(200, 207), errors=(404, 405, 502), workers=True
    ),
}
"""By method and path. The calls to all workers that are not here have no words of their own: `fleet_call`."""


def fleet_call(path: str) -> Call:
    """Return what is said of a call that the router sends to all workers."""
    return _fleet(f"Send {path} to every worker")
