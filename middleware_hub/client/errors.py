"""The errors between a trainer and the router. Each message ends with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class RouterClientError(Exception):
    """The base of all errors that this client itself raises."""


class UnreachableError(RouterClientError):
    """No router could be connected to, or the connection broke before there was an answer."""


class InconsistentAnswerError(RouterClientError):
    """An answer contradicts itself: numbers of tokens, masks or logprobs differ, or it is not the JSON that was asked for."""


class IncompleteStreamError(RouterClientError):
    """A stream ended before its last event."""


class NotUsableError(RouterClientError):
    """A sequence must not be trained on as it stands.

    Attributes:
        reasons: the reasons, named as in the user guide's table.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class RefusedError(RouterClientError):
    """The router answered with an error.

    Attributes:
        status: the HTTP status.
        kind: the `type` of the error: `not_found`, `queue_full`, ...
        code: a word that says more than `kind`, if the error has one (`media_count`, `unsupported_content`); else `kind`.
        details: all fields of the error, for example `exact_chars` and `reasons` of a 409.
    """

    def __init__(self, message: str, status: int, kind: str, details: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.details = details
        code = details.get("code")
        self.code = code if isinstance(code, str) else kind


class NotExactError(RefusedError):
    """`strict` was asked for, and the text is not exact (409)."""


class UnknownReplyError(RefusedError):
    """There is no such reply, session, branch or image (404)."""


class NotAllowedError(RefusedError):
    """The router wants a key, or another key (401, 403)."""


class OverloadedError(RefusedError):
    """The router took nothing of the request, because it or its workers are overloaded (408, 429, 503)."""


class WorkerFailedError(RefusedError):
    """The workers gave no reply (502, 504)."""


_KINDS: Mapping[int, type[RefusedError]] = {
    401: NotAllowedError,
    403: NotAllowedError,
    404: UnknownReplyError,
    408: OverloadedError,
    429: OverloadedError,
    502: WorkerFailedError,
    503: OverloadedError,
    504: WorkerFailedError,
}

_ADVICE: Mapping[str, str] = {
    "unauthorized": "give the client one of the router's keys: Client(url, api_key=...)",
    "forbidden": "this call needs the admin's key (--admin-key)",
    "not_exact": "ask without `strict` to see `reasons` and `exact_chars`; POST /radix_tree/explain shows where the text "
    "leaves what was recorded",
    "not_found": "check the namespace, the adapter and the key (a tenant sees its own records only); it may have been evicted: "
    "raise --radix-max-tokens, or keep it in a --store",
    "session_exists": "choose another session_id, or leave it out",
    "claim_over": "claim with a longer lease_seconds, or renew the claim before its lease is over",
    "handed_out": "give rewards before a trainer claims the sample: a reply with `rollout_end` may be claimed at once",
    "session_over": "this session was finalized or deleted: make a new one",
    "queue_full": "send fewer requests at once, add workers, or raise --queue-size",
    "queue_timeout": "send fewer requests at once, add workers, or raise --queue-timeout-secs",
    "over_capacity": "finalize and delete sessions that are over, or raise --session-max-tokens",
    "no_worker": "register workers: POST /add_worker, or --worker-urls; GET /workers says in which state they are",
    "draining": "this router is about to stop: name another one as well, Client([url, url])",
    "stopped": "this router was stopped: name another one as well, Client([url, url])",
    "worker_error": "`details['tried']` has what each worker did; read the workers' logs",
    "worker_timeout": "raise --request-timeout-secs, or look for a worker that hangs in GET /workers",
    "body_too_large": "send a smaller batch, or raise --max-body-bytes",
    "text_too_long": "raise --max-text-tokens",
    "media_count": "give an image for each placeholder of the text, those of earlier turns too, in order",
    "media_unknown": "send the image's bytes: the router does not have it (any more), or another tenant's key sent it",
    "media_missing": "send the image's bytes again, or raise --media-max-bytes",
    "media_url": "give the bytes of a file, or its path: the client reads it; the router opens no address by itself",
    "media_expanded": "send one placeholder for an image: the ids that a trainer gets have a run for each",
}


def refused(status: int, error: Mapping[str, Any]) -> RefusedError:
    """Return the error for a router's answer of this status, whose `error` object is given."""
    kind = str(error.get("type") or "error")
    found = NotExactError if kind == "not_exact" else _KINDS.get(status, RefusedError)
    said = str(error.get("message") or "the router said no more")
    made = found("", status, kind, dict(error))
    advice = None if "meant" in error else _ADVICE.get(made.code)  # of a misspelt path, the router says what is meant
    made.args = (f"{status} {made.code}: {said}" + (f" - {advice}" if advice else ""),)
    return made


_MENDING: Mapping[str, str] = {
    "unknown_reply": "a reply that you list was lost (a restart without --store, an eviction), or the text before it is not "
    "what was sent: POST /radix_tree/explain shows where it differs",
    "unknown_parent": "a turn named a reply that the router no longer had (a restart without --store, an eviction)",
    "retokenized": "the end of the text was never sent to a worker: leave the last observation off, or cut at `exact_chars`",
    "edited_turn": "the loop changed a reply: append replies as they are, or ask with `cover`, which has every reply whole",
    "engine_mismatch": "the worker's ids do not spell its text: check --tokenizer-path",
    "no_logprobs": "the worker sent no logprobs: leave --force-logprobs on",
    "store_unreachable": "the store could not be asked: ask again when it is back",
    "media_missing": "the router does not hold an image's bytes any more: raise --media-max-bytes, or retrieve earlier",
    "media_mismatch": "a worker computed with other tokens for an image than the router expects: read the router's log",
    "media_grid_mismatch": "the trainer's processor makes another number of tokens of an image than the engine made: give both "
    "the same preprocessor_config.json and pixel limits",
    "template_mismatch": "the chat template renders another text than the ids spell: check --chat-template",
}


_CAUSES: Mapping[str, frozenset[str]] = {
    "retokenized": frozenset(_MENDING) - {"retokenized", "no_logprobs"},
    "unknown_reply": frozenset({"unknown_parent", "store_unreachable"}),
}
"""Reasons that follow from others. Only the cause can be mended, so the message has its remedy alone."""


def not_usable(what: str, reasons: Sequence[str]) -> NotUsableError:
    """Return the error for a sequence that is not exact, or lacks something that a trainer needs."""
    causes = [reason for reason in reasons if _CAUSES.get(reason, frozenset()).isdisjoint(reasons)]
    known = [f"{reason}: {_MENDING[reason]}" for reason in causes if reason in _MENDING]
    return NotUsableError(f"{what}: {'; '.join(known) or ', '.join(reasons) or 'no reason was given'}", reasons)
