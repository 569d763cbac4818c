"""What is done with a session besides talking: made, looked at, rewarded, completed, exported, deleted."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, get_args
from urllib.parse import parse_qs
from uuid import uuid4

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from middleware_hub.chat.keys import KeyFunction
from middleware_hub.sessions.export.formats import FORMATS
from middleware_hub.sessions.export.trajectories import BranchTrajectory, SharedTurns, as_json, branches, topology
from middleware_hub.sessions.metrics import SessionMetrics
from middleware_hub.sessions.registry import SessionStore
from middleware_hub.sessions.session import Act, Phase, Session
from router.config import SessionsConfig
from router.engines.sglang.json import parse_object, typed
from router.errors import BadRequestError
from router.http.asgi import Handler, header, read_json, send_json
from router.http.disconnect import ClientConnection

_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_CREATES = frozenset({"session_id", "sampling_params", "metadata", "ttl_s", "response_budget"})
"""The fields of `POST /sessions`. Others mean nothing, and are named in the answer: one may be misspelt."""
_FINALIZES = frozenset({"export_all_checkpoints", "shared_turns", "format", "expect_request_ids"})
"""The fields of `POST /sessions/{id}/finalize`; the same holds for others."""
_PIECE_BYTES = 64 * 1024
MAX_WAIT = 3600.0
MAX_METADATA = 256 * 1024
"""Bytes, as JSON: they are kept with the session, and no budget counts them."""

_Call = Callable[[Session, Scope, Receive, Send], Awaitable[None]]


class Controls:
    """Serves these calls. Each handler is given the session that its path names."""

    def __init__(
        self,
        store: SessionStore,
        config: SessionsConfig,
        key: KeyFunction,
        metrics: SessionMetrics,
        *,
        max_body_bytes: int,
    ) -> None:
        self._store = store
        self._config = config
        self._key = key
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self.places: dict[str, dict[str, _Call]] = {
            "": {"GET": self._show, "DELETE": self._delete},
            "reward_info": {"POST": self._reward},
            "complete": {"POST": self._complete, "GET": self._wait},
            "finalize": {"POST": self._finalize},
            "trajectories": {"GET": self._trajectories},
        }
        """What there is below a session's own path, by method."""

    # All of them -------------------------------------------------------------------------------------------------------

    async def create(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /sessions`. Raises BadRequestError, SessionExistsError, CapacityError."""
        fields = await self._fields(scope, receive)
        session_id = typed(fields, "session_id", str, "a string")
        if session_id is not None:
            _check_name(session_id, "`session_id`")
        ttl = typed(fields, "ttl_s", float, "a number of seconds")
        if ttl is not None and not 0 < ttl < math.inf:
            raise BadRequestError(f"`ttl_s` must be a positive number of seconds, not {ttl}")
        sampling = typed(fields, "sampling_params", dict[str, Any], "an object") or {}
        budget = typed(fields, "response_budget", int, "a number of tokens")
        if budget is None:
            budget = sampling.pop("response_budget", None)
        if budget is not None and (not isinstance(budget, int) or budget < 1):
            raise BadRequestError(f"`response_budget` must be at least 1 token, not {budget!r}")
        if len(fields.get("metadata", b"")) > MAX_METADATA:
            raise BadRequestError(
                f"`metadata` is larger than {MAX_METADATA} bytes: keep a name in it, and the rest elsewhere"
            )
        session = Session(
            uuid4().hex if session_id is None else session_id,
            tenant,
            self._key,
            ttl=self._config.ttl if ttl is None else ttl,
            sampling=_sampling(sampling),
            metadata=typed(fields, "metadata", dict[str, Any], "an object"),
            response_budget=budget,
        )
        self._store.add(session)
        root = f"{_origin(scope)}/sessions/{session.id}"
        answer: dict[str, Any] = {
            "session_id": session.id,
            "base_url": f"{root}/v1",
            "anthropic_base_url": root,
            "reward_info_url": f"{root}/reward_info",
        }
        ignored = sorted(fields.keys() - _CREATES)
        if ignored:
            answer["ignored"] = ignored
        await send_json(send, 201, msgspec.json.encode(answer))

    def make(self, tenant: str, name: str) -> Session:
        """One that is made on its first use (`--implicit-sessions`). Raises BadRequestError, CapacityError."""
        _check_name(name, "x-session-id")
        session = Session(name, tenant, self._key, ttl=self._config.ttl)
        self._store.add(session)
        return session

    async def list(self, tenant: str, send: Send) -> None:
        """`GET /sessions`."""
        found = [session.summary() for session in self._store.of(tenant)]
        await send_json(send, 200, msgspec.json.encode({"sessions": found}))

    # One of them -------------------------------------------------------------------------------------------------------

    def handlers(self, session: Session, action: str) -> dict[str, Handler]:
        """What may be done at this place of a session, by method; nothing if there is no such place."""

        def bound(call: _Call) -> Handler:
            return lambda scope, receive, send: call(session, scope, receive, send)

        return {method: bound(call) for method, call in self.places.get(action, {}).items()}

    async def _show(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        answer = session.summary()
        if _query(scope).get("tree") in ("1", "true"):
            answer["tree"] = topology(session.trie)
        await send_json(send, 200, msgspec.json.encode(answer))

    async def _delete(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        await self._store.delete(session)
        await send_json(send, 200, msgspec.json.encode({"session_id": session.id, "deleted": True}))

    async def _reward(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        if "reward_info" not in fields:
            raise BadRequestError("`reward_info` is missing: give an object")
        info = typed(fields, "reward_info", dict[str, Any], "an object") or {}
        session.reward(info, typed(fields, "branch", str, "the id of a generation"))
        session.touch()
        await send_json(send, 200, msgspec.json.encode(session.summary()))

    async def _complete(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        info = typed(fields, "reward_info", dict[str, Any], "an object")
        session.require(Act.COMPLETE)
        if info is not None:
            session.reward(info, None)
        session.complete()
        session.touch()
        await send_json(send, 200, msgspec.json.encode(session.summary()))

    async def _wait(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as soon as the agent is done, or when the time is over: `completed` says which."""
        given = _query(scope).get("timeout_s", "0")
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_WAIT:
            raise BadRequestError(f"timeout_s must be 0 to {MAX_WAIT:g} seconds, not {given!r}")
        async with ClientConnection(receive):  # who left does not wait any more
            await session.completed(seconds)
        completed = session.phase in (Phase.COMPLETE, Phase.FINALIZED)
        session.touch()
        await send_json(send, 200, msgspec.json.encode({"completed": completed, **session.summary()}))

    async def _finalize(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        fields, query = await self._fields(scope, receive), _query(scope)
        every = typed(fields, "export_all_checkpoints", bool, "true or false")
        if every is None:
            every = _is_on(query.get("export_all_checkpoints"))
        shared = _shared(typed(fields, "shared_turns", str, "a string") or query.get("shared_turns"))
        form = _form(typed(fields, "format", str, "a string") or query.get("format"))
        expected = typed(fields, "expect_request_ids", list[str], "a list of request ids")
        if expected is None:
            expected = _listed(query.get("expect_request_ids"))
        ignored = sorted(fields.keys() - _FINALIZES)
        first = session.phase is not Phase.FINALIZED
        await session.finalize()
        session.require(Act.EXPORT)  # it may have been deleted meanwhile
        if first:
            self._metrics.sessions.labels("finalized").inc()
        await self._export(
            session, receive, send, every=every, shared=shared, form=form, expected=expected, ignored=ignored
        )

    async def _trajectories(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        session.require(Act.EXPORT)
        query = _query(scope)
        every = _is_on(query.get("export_all_checkpoints"))
        shared, form = _shared(query.get("shared_turns")), _form(query.get("format"))
        expected = _listed(query.get("expect_request_ids"))
        await self._export(session, receive, send, every=every, shared=shared, form=form, expected=expected)

    async def _export(
        self,
        session: Session,
        receive: Receive,
        send: Send,
        *,
        every: bool,
        shared: SharedTurns,
        form: str,
        expected: Sequence[str] | None,
        ignored: Sequence[str] = (),
    ) -> None:
        """Raises ClientDisconnectedError if the client leaves before all was sent: then nobody has it."""
        session.touch()
        missing = [name for name in expected or () if session.trie.checkpoint(name) is None]
        found = branches(
            session.trie, session.reward_info, every_checkpoint=every, shared_turns=shared, missing=missing
        )
        head: dict[str, Any] = {
            "session_id": session.id,
            "phase": session.phase.value,
            "metadata": session.metadata,
            **({} if expected is None else {"missing": missing}),
            **({"ignored": ignored} if ignored else {}),
        }
        samples = session.samples
        # To a server it is all the same whether anybody is there to whom it sends.
        async with ClientConnection(receive) as client:
            if form == "json":
                await self._as_json(found, head, send)
            else:
                kind, encode = FORMATS[form]
                body = await asyncio.to_thread(lambda: encode(list(found), head))
                start = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
                await send({"type": "http.response.start", "status": 200, "headers": start})
                await send({"type": "http.response.body", "body": body, "more_body": True})
            client.stop_watching()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        # What was committed meanwhile is not in it.
        session.exported = session.samples == samples
        session.touch()

    @staticmethod
    async def _as_json(found: Iterator[BranchTrajectory], head: dict[str, Any], send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        pieces = _joined(as_json(found, head))
        first = next(pieces)  # whatever is wrong is wrong before the head of the reply is out
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)

    async def _fields(self, scope: Scope, receive: Receive) -> dict[str, Raw]:
        """The fields of a body; of none, none."""
        body = await read_json(scope, receive, self._max_body_bytes)
        return parse_object(body) if body.strip() else {}


def _check_name(name: str, place: str) -> None:
    if not _ID.fullmatch(name) or not name.strip("."):
        raise BadRequestError(f"{place} must be 1 to 128 letters, digits, or any of . _ ~ -, not {name[:140]!r}")


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Small pieces together, as many as are worth a packet."""
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _listed(given: str | None) -> list[str] | None:
    """Names in a query, with commas between them."""
    return None if given is None else [name for name in given.split(",") if name]


def _shared(given: str | None) -> SharedTurns:
    if given is None:
        return "once"
    if given not in get_args(SharedTurns):
        raise BadRequestError(f"`shared_turns` must be one of {', '.join(get_args(SharedTurns))}, not {given!r}")
    return given  # type: ignore[return-value] # it is one of them


def _form(given: str | None) -> str:
    form = given or "json"
    if form != "json" and form not in FORMATS:
        raise BadRequestError(f"`format` must be one of json, {', '.join(FORMATS)}, not {given!r}")
    return form


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """A session's `sampling_params`, OpenAI's names for a limit understood. Raises BadRequestError."""
    limit = given.pop("max_completion_tokens", given.pop("max_tokens", given.get("max_new_tokens")))
    if limit is not None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BadRequestError(f"`max_tokens` in `sampling_params` must be at least 1, not {limit!r}")
        given["max_new_tokens"] = limit
    if given.get("n") not in (None, 1):
        raise BadRequestError("`n` in a session's `sampling_params` must be 1: ask for more in a request")
    given.pop("n", None)
    return given


def _is_on(given: str | None) -> bool:
    return given in ("1", "true")


def _query(scope: Scope) -> dict[str, str]:
    return {key: values[-1] for key, values in parse_qs(scope.get("query_string", b"").decode("latin-1")).items()}


def _origin(scope: Scope) -> str:
    """How the client calls this server."""
    host = header(scope, b"x-forwarded-host") or header(scope, b"host")
    if host is None:
        server = scope.get("server") or ("127.0.0.1", None)
        host = f"{server[0]}:{server[1]}" if server[1] else str(server[0])
    scheme = header(scope, b"x-forwarded-proto") or scope.get("scheme", "http")
    return f"{scheme}://{host}"
