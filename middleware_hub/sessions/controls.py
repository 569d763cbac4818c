"""The calls about a session other than turns: create, list, show, reward, complete and delete it."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from middleware_hub import affinity, routes
from middleware_hub.chat.answer import check_one
from middleware_hub.chat.errors import SessionExistsError
from middleware_hub.chat.keys import KeyFunction
from middleware_hub.dialects.fields import BOOLEAN, NUMBER, OBJECT, STRING, Fields
from middleware_hub.media.media import Media
from middleware_hub.metrics import SessionMetrics
from middleware_hub.served_models import ServedModels
from middleware_hub.sessions.events import Completed, SessionRewarded, as_json
from middleware_hub.sessions.exports import Exports, fields_of, is_on, query_of, signs
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.sessions.request_defaults import RequestDefaults
from middleware_hub.sessions.session import LOOK_SECONDS, Act, Session, SessionPhase
from middleware_hub.sessions.session_fields import read_defaults, refuse_others
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.store.errors import NOT_SAVED, StoreUnreachableError
from middleware_hub.tokenizer.vocabulary import Vocabulary
from middleware_hub.trajectories.groups import Groups
from middleware_hub.trajectories.members import memberships
from middleware_hub.trajectories.settling import reward_session
from router.auth.session_keys import digest_of, new_key, written
from router.config.sessions import SessionsConfig
from router.engines.form.fields import typed
from router.engines.form.request import GenerateRequest
from router.errors import BadRequestError
from router.generate.scorers import Scorers
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.headers import first_values, header
from router.http.responses import send_json

_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_OWN_FIELDS = ("session_id", "metadata", "ttl_s", "response_budget", "as_key", *RequestDefaults.__struct_fields__)
"""The fields of `POST /sessions`."""
_STEP = 256
"""Sessions that are written before the event loop serves other requests."""
MAX_WAIT = 3600.0
MAX_METADATA = 256 * 1024
"""Bytes of JSON. They are kept with the session, and no budget counts them."""

SessionCall = Callable[[Session, Scope, Receive, Send], Awaitable[None]]


class Controls:
    """Serves the calls about sessions."""

    def __init__(
        self,
        registry: SessionRegistry,
        config: SessionsConfig,
        key: KeyFunction,
        metrics: SessionMetrics,
        groups: Groups,
        stopping: Callable[[], bool],
        models: ServedModels,
        vocabulary: Vocabulary,
        media: Media | None = None,
        scorers: Scorers | None = None,
        *,
        max_body_bytes: int,
    ) -> None:
        self._registry = registry
        self._config = config
        self._key = key
        self._max_body_bytes = max_body_bytes
        self._groups = groups
        self._stopping = stopping
        self._models = models
        self._vocabulary = vocabulary
        exports = Exports(metrics, self._ended, media, scorers, max_body_bytes=max_body_bytes)
        calls: dict[str, SessionCall] = {
            "show": self._show,
            "delete": self._delete,
            "reward": self._reward,
            "complete": self._complete,
            "wait": self._wait,
            "finalize": exports.finalize,
            "trajectories": exports.trajectories,
        }
        self.places = routes.bound(routes.SESSION_CONTROLS, calls, "/sessions/{id}/")
        """The calls below a session's own path, by method."""

    # All sessions ------------------------------------------------------------------------------------------------------

    async def create(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        fields = Fields(await self._fields(scope, receive))
        session_id = fields.take("session_id", STRING)
        if session_id is not None:
            _check_name(session_id, "`session_id`")
        ttl = fields.take("ttl_s", NUMBER)
        if ttl is not None and not 0 < ttl < math.inf:
            raise BadRequestError(f"`ttl_s` must be a positive number of seconds, not {ttl}")
        metadata = fields.take("metadata", OBJECT)
        if metadata is not None and len(msgspec.json.encode(metadata)) > MAX_METADATA:
            raise BadRequestError(
                f"`metadata` is larger than {MAX_METADATA} bytes: keep a name in it, and the rest elsewhere"
            )
        as_key = fields.take("as_key", BOOLEAN)
        defaults, budget = read_defaults(fields)
        refuse_others(fields, _OWN_FIELDS)
        defaults = await self._checked(defaults, scope)
        name = secrets.token_hex(16) if session_id is None else session_id
        key = new_key(name) if as_key else None
        session = Session(
            name,
            tenant,
            self._key,
            ttl=self._config.ttl if ttl is None else ttl,
            defaults=defaults,
            metadata=metadata,
            response_budget=budget,
            key_digest=b"" if key is None else digest_of(key),
        )
        await self._create(session, scope)
        root = f"{_origin(scope)}/sessions/{session.id}"
        answer: dict[str, Any] = {
            "session_id": session.id,
            "base_url": f"{root}/v1",
            "anthropic_base_url": root,
            "reward_info_url": f"{root}/reward_info",
            **({} if key is None else {"session_key": written(key)}),
            "google_base_url": root,
        }
        await send_json(send, 201, msgspec.json.encode(answer), [(affinity.HEADER, session.id.encode("latin-1"))])

    async def _checked(self, defaults: RequestDefaults, scope: Scope) -> RequestDefaults:
        """Return defaults that workers take, with the adapter that their `model` names. Raises BadRequestError."""
        sampling, limit = defaults.sampling_params, self._vocabulary.size
        body = {"input_ids": [0], "sampling_params": sampling}
        GenerateRequest.parse(msgspec.json.encode(body), vocabulary=limit)
        for token in sampling.get("logit_bias", ()):
            if int(token) >= limit:
                raise BadRequestError(f"`logit_bias` has {token} in it, and the vocabulary is 0 to {limit - 1}")
        model = defaults.model or ""
        if self._models.must_ask(model):
            await self._models.ask(scope, model)
        adapter = self._models.adapter_of(model)
        return defaults if adapter is None else msgspec.structs.replace(defaults, lora_path=adapter)

    async def _create(self, session: Session, scope: Scope) -> Session:
        """Add a new session, also to its group, if any: both, or neither."""
        headers = first_values(scope["headers"])
        (member,) = memberships(headers, 1)
        if member is None:
            return await self._registry.create(session)
        if member.rollout is not None or member.ends:
            raise BadRequestError("a session is a rollout by itself: leave x-rollout-id and x-rollout-end out")
        namespace = headers.get(b"x-radix-namespace", b"").decode("latin-1")
        session.group = member.group, namespace
        joining = self._groups.joining(session.tenant, namespace, member, session.id)
        made = await self._registry.create(session, self._groups.beside(session.tenant, namespace, joining))
        self._groups.joined(session.tenant, namespace, joining)
        return made

    async def make(self, tenant: str, name: str, scope: Scope) -> Session:
        """Make a session on its first use (`--implicit-sessions`). Raises BadRequestError, CapacityError.

        Requests that make it at the same time, here or at other routers, all get the same session.
        """
        _check_name(name, "x-session-id")
        while True:
            try:
                return await self._create(Session(name, tenant, self._key, ttl=self._config.ttl), scope)
            except SessionExistsError:
                found = await self._registry.reach(tenant, name)
                if found is not None:  # else it has ended meanwhile
                    return found

    async def list(self, tenant: str, send: Send) -> None:
        found, damaged = await self._registry.summaries(tenant)
        pieces = [b'{"sessions":[']
        for at in range(0, len(found), _STEP):
            pieces += (b"," if at else b"", msgspec.json.encode(found[at : at + _STEP])[1:-1])
            await asyncio.sleep(0)
        pieces.append(b'],"damaged":%b}' % msgspec.json.encode(damaged) if damaged else b"]}")
        await send_json(send, 200, pieces)

    # One session -------------------------------------------------------------------------------------------------------

    async def _show(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        more: dict[str, Any] = {"tree": topology(session.trie)} if is_on(query_of(scope), "tree") else {}
        await _send_summary(send, session, **more)

    async def _delete(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        await self._registry.delete(session)
        if session.group is not None:
            await self._groups.left(session.tenant, session.group[1], session.id)
        await send_json(send, 200, msgspec.json.encode({"session_id": session.id, "deleted": True}), signs(session))

    async def _reward(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        if "reward_info" not in fields:
            raise BadRequestError("`reward_info` is missing: give an object")
        info = typed(fields, "reward_info", dict[str, Any], "an object") or {}
        branch = typed(fields, "branch", str, "the id of a generation")
        if branch is not None:
            check_one(branch, "`branch`")
        saved = await self._rewarded(session, info, branch)
        session.touch()
        await _send_summary(send, session, saved)

    async def _rewarded(self, session: Session, info: dict[str, Any], branch: str | None) -> bool:
        """Attach a reward; return whether it is in the store, if there is one. Raises HandedOutError, StoreUnreachableError."""
        if branch is not None and session.stale and session.trie.checkpoint(branch) is None:
            raise StoreUnreachableError(
                f"it is not known whether session {session.id!r} has a branch {branch!r}: the store does not answer, or lacks "
                "what a router left that died"
            )
        event = SessionRewarded(as_json(info), branch, time=time.time())
        if session.group is None:
            return await session.happen(event)
        journal = self._groups.journal(session.tenant, session.group[1])
        return await reward_session(journal, session.id, as_json([branch, info]), lambda: session.happen(event))

    async def _complete(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        info = typed(fields, "reward_info", dict[str, Any], "an object")
        session.require(Act.COMPLETE)
        saved = info is None or await self._rewarded(session, info, None)
        await session.happen(Completed(time=time.time()))
        await self._ended(session)
        session.touch()
        await _send_summary(send, session, saved)

    async def _ended(self, session: Session) -> None:
        """Note in a session's group that the session has ended."""
        if session.group is not None:
            await self._groups.ended(session.tenant, session.group[1], session.id)

    async def _wait(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as soon as the agent is done or the time is up; `completed` says which."""
        given = query_of(scope).get("timeout_s", "0")
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_WAIT:
            raise BadRequestError(f"timeout_s must be 0 to {MAX_WAIT:g} seconds, not {given!r}")
        until = time.monotonic() + seconds
        async with ClientConnection(receive):  # ends the wait when the client leaves
            while not await session.completed(min(LOOK_SECONDS, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until or self._stopping():
                    break
        completed = session.phase in (SessionPhase.COMPLETE, SessionPhase.FINALIZED)
        session.touch()
        await _send_summary(send, session, completed=completed)

    async def _fields(self, scope: Scope, receive: Receive) -> dict[str, Raw]:
        return fields_of(await read_json(scope, receive, self._max_body_bytes))


async def _send_summary(send: Send, session: Session, saved: bool = True, **more: Any) -> None:
    headers = signs(session)
    if not saved and NOT_SAVED not in headers:
        headers = [NOT_SAVED, *headers]
    await send_json(send, 200, msgspec.json.encode({**session.summary(), **more}), headers)


def _check_name(name: str, place: str) -> None:
    if not _ID.fullmatch(name) or not name.strip("."):
        raise BadRequestError(f"{place} must be 1 to 128 letters, digits, or any of . _ ~ -, not {name[:140]!r}")


def _origin(scope: Scope) -> str:
    """Return the scheme, host and port by which the client calls this server."""
    host = header(scope, b"x-forwarded-host") or header(scope, b"host")
    if host is None:
        server = scope.get("server") or ("127.0.0.1", None)
        host = f"{server[0]}:{server[1]}" if server[1] else str(server[0])
    scheme = header(scope, b"x-forwarded-proto") or scope.get("scheme", "http")
    return f"{scheme}://{host}"


def topology(trie: MessageTrie) -> list[dict[str, Any]]:
    """Return every message with its samples, parents before children."""
    nodes = list(trie.each_node())
    numbers = {id(node): number for number, node in enumerate(nodes)}
    return [
        {
            "node": number,
            "parent": numbers.get(id(node.parent)),
            "depth": node.depth,
            "role": node.role,
            "pending": not node.committed,
            "in_flight": node.handles,
            "excerpt": _excerpt(node.message),
            "samples": [
                {
                    "generation_id": sample.id,
                    "parent_generation": None if sample.parent is None else sample.parent.id,
                    "finish_reason": sample.finish,
                    "tokens": len(sample.span),
                    "terminal": sample.terminal,
                }
                for sample in node.samples or ()
            ],
        }
        for number, node in enumerate(nodes)
    ]


def _excerpt(message: bytes, characters: int = 80) -> str:
    said = msgspec.json.decode(message)
    content = said.get("content") or ""
    calls = [call["function"]["name"] for call in said.get("tool_calls") or ()]
    text = content if isinstance(content, str) else str(content)
    return (text + "".join(f" [{name}]" for name in calls))[:characters]
