"""Requests and answers without a socket: their bytes, and which requests may be sent twice.

A request is sent again only where that cannot make a second sample. A router that could not be reached, or that answered that
it took nothing (408, 429, 503), has sampled nothing. After a broken connection the reply may exist. So after that, only a
request that changes nothing, or that the router recognizes (`Idempotency-Key`), is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from middleware_hub.client.errors import InconsistentAnswerError, RefusedError, refused
from middleware_hub.client.trajectory import Trajectory

REFUSED: Final = frozenset({408, 429, 503})
"""Statuses of a router that took nothing of a request."""
PASSING: Final = frozenset({502, 504})
"""Statuses that may be temporary: the request is repeated if that is harmless."""
MAX_ERROR_TEXT: Final = 500
MOST_DOUBLINGS: Final = 64
"""Of the wait between attempts: a float has an end, and a client that asks for hours comes there."""


@dataclass(frozen=True)
class ClientCall:
    """One request.

    Attributes:
        again: whether it may be sent again although the router may have served it.
        samples: whether a second attempt may leave an unused sample behind (see `Retries.resample`).
        accepts: statuses that are not errors.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    again: bool = False
    samples: bool = False
    accepts: frozenset[int] = frozenset({200})

    def content(self) -> bytes | None:
        """Return the body as JSON."""
        return None if self.body is None else msgspec.json.encode(self.body)


@dataclass(frozen=True)
class ClientAnswer:
    """The answer to a request; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


SAVED: Final = "x-radix-saved"


def is_saved(headers: Mapping[str, str]) -> bool:
    """Return False if the router says that its store did not take something (yet): other routers do not know it."""
    return headers.get(SAVED) != "no"


@dataclass(frozen=True)
class Reply:
    """One reply of `/generate`.

    Attributes:
        text: as the worker sent it. Append it unchanged.
        output_ids: the sampled ids.
        id: its name in `expect_request_ids` and `x-radix-parent`.
        finish: `stop`, `length` or `abort`.
        meta_info: everything that the worker said, logprobs included if they were asked for.
        headers: of the whole answer, in lower case.
    """

    text: str
    output_ids: list[int]
    id: str
    finish: str
    meta_info: dict[str, Any]
    headers: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def version(self) -> str:
        """Return the weight version under which the reply ended."""
        return str(self.meta_info.get("weight_version", "default"))

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of the prompt; 0 if the worker does not say, as for a request that was aborted in its queue."""
        return int(self.meta_info.get("prompt_tokens", 0))

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def logprobs(self) -> list[float] | None:
        """Return the logprob of each sampled id, if `return_logprob` was asked for."""
        found = self.meta_info.get("output_token_logprobs")
        return None if found is None else [pair[0] for pair in found]

    @property
    def recorded(self) -> str:
        """Return what the router says about recording it: `exact`, `inexact`, `no; REASON`, or `pending` of a stream."""
        return self.headers.get("x-radix-recorded", "")

    @property
    def saved(self) -> bool:
        """Return False if the router says that its store did not take the reply (yet): other routers do not know it."""
        return is_saved(self.headers)

    @property
    def trajectory(self) -> Trajectory | None:
        """Return the whole sequence, if `return_trajectory` was asked for."""
        found = self.meta_info.get("trajectory")
        return None if found is None else Trajectory.of(found)


@dataclass(frozen=True)
class Piece:
    """The new part of a stream in one event. `last` is the whole reply, in the last event only."""

    text: str
    last: Reply | None


@dataclass(frozen=True)
class Retries:
    """How often and how fast a request is sent again.

    Attributes:
        attempts: the number in all, over all routers.
        first: seconds before the second attempt; each further wait is twice as long, up to `longest`. A router may ask for
            more, also up to `longest` (`retry-after`). A wait is up to a half longer, so that requests spread.
        resample: whether to ask again for a generation whose connection broke. If its first sample exists, no client knows its
            name, and it only costs time. With a `rollout_id`, however, it counts as a reply
            of the rollout, and a claim of the rollout contains it.
    """

    attempts: int = 6
    first: float = 0.2
    longest: float = 10.0
    resample: bool = False

    def wait(self, attempt: int, asked: float = 0.0) -> float:
        """Return the seconds to wait after so many failed attempts; `asked` is what the last answer asks for."""
        return float(min(self.longest, max(asked, self.first * 2 ** min(attempt - 1, MOST_DOUBLINGS))))


def may_go_again(call: ClientCall, status: int) -> bool:
    """Return whether a request may be sent again after an answer of this status."""
    return status in REFUSED or (call.again and status in PASSING)


def read_json(call: ClientCall, answer: ClientAnswer) -> Any:
    """Return the JSON of an answer.

    Raises:
        RefusedError: its status is an error.
        InconsistentAnswerError: it is not JSON.
    """
    try:
        found = msgspec.json.decode(answer.content) if answer.content else {}
    except msgspec.DecodeError as error:
        if answer.status in call.accepts:
            raise InconsistentAnswerError(
                f"{call.method} {call.path} answered {answer.status} with something that is not JSON: is this address "
                f"tito-router's? {answer.content[:MAX_ERROR_TEXT]!r}"
            ) from error
        found = {}
    if answer.status in call.accepts:
        return found
    raise error_of(answer.status, found, answer.content)


def error_of(status: int, found: Any, content: bytes) -> RefusedError:
    """Return the error of an answer, whatever its shape: the router's, a dialect's, or a worker's."""
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict):
        return refused(status, error)
    return refused(status, {"message": str(error or content[:MAX_ERROR_TEXT].decode(errors="replace"))})


def read_reply(found: Any, headers: Mapping[str, str]) -> Reply:
    """Return one reply. Raises InconsistentAnswerError if its numbers contradict each other."""
    try:
        meta = found["meta_info"]
        reply = Reply(
            text=found["text"],
            output_ids=found["output_ids"],
            id=meta["id"],
            finish=(meta["finish_reason"] or {}).get("type", ""),
            meta_info=meta,
            headers=headers,
        )
        counted, logprobs = meta["completion_tokens"], meta.get("output_token_logprobs")
    except (KeyError, TypeError, AttributeError) as error:
        raise InconsistentAnswerError(f"a reply of /generate lacks {error}: {str(found)[:MAX_ERROR_TEXT]}") from error
    if counted != len(reply.output_ids):
        raise InconsistentAnswerError(f"reply {reply.id} has {len(reply.output_ids)} ids and says {counted}")
    if logprobs is not None and [pair[1] for pair in logprobs] != reply.output_ids:
        raise InconsistentAnswerError(f"the logprobs of reply {reply.id} are not those of its ids")
    return reply


def read_replies(found: Any, prompts: int, n: int, headers: Mapping[str, str]) -> list[list[Reply]]:
    """Return the replies of a batch, prompt by prompt. Raises InconsistentAnswerError if their number is wrong."""
    replies = [read_reply(one, headers) for one in (found if isinstance(found, list) else [found])]
    if len(replies) != prompts * n:
        raise InconsistentAnswerError(f"{prompts} prompts with n={n} got {len(replies)} replies")
    return [replies[start : start + n] for start in range(0, len(replies), n)]
