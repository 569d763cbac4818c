"""`POST /trajectories/score`: how likely a teacher or a reference finds the tokens of trajectories, or of given ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from middleware_hub.media.media import Media
from middleware_hub.sessions.export.formats import trajectory_json
from middleware_hub.sessions.exports import SessionSamples, fields_of
from middleware_hub.sessions.scores import SCORE_FIELDS, AskedScorers
from middleware_hub.tokenizer.id_checks import check_ids
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.fields import typed
from router.errors import BadRequestError
from router.generate.scorers import Scorers
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.request_state import request_state
from router.http.responses import send_json

FIELDS: Final = SCORE_FIELDS | {"session_id", "sequences", "roots"}


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence of the request; `start` is the first position that is scored."""

    input_ids: list[int]
    start: int = 1


class ScoreRequest(msgspec.Struct, frozen=True):
    """A request.

    Attributes:
        options: who scores.
        session: whose trajectories are scored; None for `sequences`.
        head: whether only the task's trajectories are.
    """

    options: AskedScorers
    session: str | None
    sequences: Sequence[tuple[Raw, int]]
    head: bool

    @classmethod
    def of(
        cls,
        fields: Mapping[str, Raw],
        scorers: Scorers | None,
        vocabulary: Vocabulary,
        most: int,
        media: Media | None = None,
    ) -> ScoreRequest:
        """Read a body. Raises BadRequestError. `media`: of a model that sees, so that its pictures are found in ids."""
        options, given = AskedScorers.of(fields, scorers), dict(fields)
        roots = typed(given, "roots", str, "a string") or "all"
        if roots not in ("all", "head"):
            raise BadRequestError(f"`roots` must be one of all, head, not {roots!r}")
        session = typed(given, "session_id", str, "the id of a session")
        several = typed(given, "sequences", list[_Given], "a list of objects with `input_ids` and `start`")
        if (session is None) is (several is None):
            raise BadRequestError("say what to score: `session_id`, or `sequences`")
        if several is not None and not 1 <= len(several) <= most:
            raise BadRequestError(f"`sequences` must have 1 to {most} entries, not {len(several)}")
        sequences = [_checked(one, number, vocabulary, media) for number, one in enumerate(several or ())]
        return cls(options, session, sequences, roots == "head")


def _checked(one: _Given, number: int, vocabulary: Vocabulary, media: Media | None) -> tuple[Raw, int]:
    if not 1 <= one.start < len(one.input_ids):
        raise BadRequestError(
            f"`sequences[{number}].start` must be 1 to {len(one.input_ids) - 1}, not {one.start}: nothing stands before the"
            " first token, so it has no logprob"
        )
    # An id outside of the vocabulary ends an SGLang that scores, as it ends a worker.
    check_ids(vocabulary, one.input_ids, f"sequences[{number}].input_ids")
    if media is not None and media.has_run(one.input_ids):
        raise BadRequestError(
            f"`sequences[{number}].input_ids` have an image, and scorers are given ids only", code="unsupported_content"
        )
    return Raw(msgspec.json.encode(one.input_ids)), one.start


class Scoring:
    """Serves the call.

    Args:
        scorers: None where no model scores.
        vocabulary: of the model that samples: ids outside of it are refused.
        media: None where the model does not see.
        most: sequences of one request.
    """

    def __init__(
        self,
        scorers: Scorers | None,
        samples: SessionSamples,
        vocabulary: Vocabulary,
        media: Media | None = None,
        *,
        most: int,
        max_body_bytes: int,
    ) -> None:
        self._media = media
        self._scorers = scorers
        self._samples = samples
        self._vocabulary = vocabulary
        self._most = most
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = fields_of(await read_json(scope, receive, self._max_body_bytes, ids=True))
        wanted = ScoreRequest.of(fields, self._scorers, self._vocabulary, self._most, self._media)
        async with ClientConnection(receive) as client:
            found = await self._scored(request_state(scope).caller.tenant, wanted)
            client.stop_watching()
        ignored = sorted(fields.keys() - FIELDS)
        head = msgspec.json.encode({**({"ignored": ignored} if ignored else {}), **found})
        await send_json(send, 200, head)

    async def _scored(self, tenant: str, wanted: ScoreRequest) -> dict[str, Any]:
        """Return the answer to a request. Raises UnknownSessionError, UpstreamError, StoreError, and BadRequestError."""
        if wanted.session is None:
            return {"sequences": await wanted.options.ask(wanted.sequences)}
        found = await self._samples.branches(tenant, wanted.session, head=wanted.head)
        scored = await wanted.options.score(found)
        shown = await asyncio.to_thread(lambda: [Raw(b"".join(trajectory_json(one))) for one in scored])
        return {"session_id": wanted.session, "trajectories": shown}
