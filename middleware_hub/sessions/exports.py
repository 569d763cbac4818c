"""Exports of sessions: the calls `finalize` and `trajectories` (a session as it is), and sessions as samples of groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, get_args
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from middleware_hub.chat.answer import check_one
from middleware_hub.chat.errors import SessionOverError, UnknownSessionError
from middleware_hub.media.media import Media
from middleware_hub.media.viewer import Viewer, asks_inline
from middleware_hub.metrics import SessionMetrics
from middleware_hub.sessions.events import Exported
from middleware_hub.sessions.export.formats import FORMATS, STREAMED, trajectory_json
from middleware_hub.sessions.export.trajectories import BranchTrajectory, SharedTurns, branches
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.sessions.scores import SCORE_FIELDS, AskedScorers
from middleware_hub.sessions.session import Act, Session
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.spans.chain import INEXACT_TOKENS, STORE_UNREACHABLE, UNKNOWN_REPLY, TokenSpan
from middleware_hub.spans.trajectory import kv_versions
from middleware_hub.store.errors import NOT_SAVED, DamagedRecordError, StoreError, StoreUnreachableError
from middleware_hub.trajectories.samples import Built, GroupSample, Member
from router.engines.form.fields import parse_object, typed
from router.errors import BadRequestError
from router.generate.scorers import Scorers
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.headers import HeaderList
from router.http.offload import offload
from router.http.responses import SEND_BYTES

_FINALIZE_FIELDS = frozenset(
    {"export_all_checkpoints", "shared_turns", "format", "expect_request_ids", "roots", "media"}
)
"""The fields of an export, in its body or its query; `score` may be in the body alone. Others are ignored, and named in the
reply: one may be misspelt."""
_ROOTS = ("all", "head")
_PIECE_BYTES = 64 * 1024
EndOfSession = Callable[[Session], Awaitable[None]]
"""Notes that a session has ended."""


class _Export(msgspec.Struct, frozen=True):
    """The options of an export; see `branches`.

    Attributes:
        every: whether to export one trajectory for each sample.
        shared: which trajectories have the mask of a shared turn.
        roots: `head`: only trajectories of the task's root; or `all`.
        form: one of `STREAMED` or `FORMATS`.
        inline: whether pictures come with their bytes.
        expected: the replies that the client received; None if it does not say.
        ignored: the fields of the request that mean nothing.
        score: who scores the trajectories; None for nobody.
    """

    every: bool
    shared: SharedTurns
    roots: str
    form: str
    inline: bool
    expected: Sequence[str] | None
    ignored: Sequence[str]
    score: AskedScorers | None = None

    @classmethod
    def of(cls, fields: dict[str, Raw], query: Mapping[str, str], scorers: Scorers | None = None) -> _Export:
        """Read a request; its body overrides its query. Raises BadRequestError."""
        every = typed(fields, "export_all_checkpoints", bool, "true or false")
        if every is None:
            every = is_on(query, "export_all_checkpoints")
        shared = typed(fields, "shared_turns", str, "a string") or query.get("shared_turns") or "once"
        if shared not in get_args(SharedTurns):
            raise BadRequestError(f"`shared_turns` must be one of {', '.join(get_args(SharedTurns))}, not {shared!r}")
        roots = typed(fields, "roots", str, "a string") or query.get("roots") or "all"
        if roots not in _ROOTS:
            raise BadRequestError(f"`roots` must be one of {', '.join(_ROOTS)}, not {roots!r}")
        form = typed(fields, "format", str, "a string") or query.get("format") or "json"
        if form not in STREAMED and form not in FORMATS:
            raise BadRequestError(f"`format` must be one of {', '.join((*STREAMED, *FORMATS))}, not {form!r}")
        inline = asks_inline(typed(fields, "media", str, "a string") or query.get("media"))
        expected = typed(fields, "expect_request_ids", list[str], "a list of request ids")
        if expected is None and "expect_request_ids" in query:
            expected = [name for name in query["expect_request_ids"].split(",") if name]
        for name in expected or ():
            check_one(name, "of `expect_request_ids`,")
        ignored = sorted(((fields.keys() - {"score"}) | query.keys()) - _FINALIZE_FIELDS)
        score = None
        asked = typed(fields, "score", dict[str, Raw], "an object with `workers` and `top_logprobs`")
        if asked is not None:
            if form != "json":
                raise BadRequestError(f"`score` needs the `format` json, not {form}: scores have no place in it")
            ignored += [f"score.{name}" for name in sorted(asked.keys() - SCORE_FIELDS)]
            score = AskedScorers.of(asked, scorers)
        return cls(every, shared, roots, form, inline, expected, ignored, score)  # type: ignore[arg-type]  # checked


class Exports:
    """Serves the calls that export a session. `scorers` may be asked about it; None where no model scores."""

    def __init__(
        self,
        metrics: SessionMetrics,
        ended: EndOfSession,
        media: Media | None = None,
        scorers: Scorers | None = None,
        *,
        max_body_bytes: int,
    ) -> None:
        self._scorers = scorers
        self._media = media
        self._metrics = metrics
        self._ended = ended
        self._max_body_bytes = max_body_bytes

    async def finalize(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        fields = fields_of(await read_json(scope, receive, self._max_body_bytes))
        export = _Export.of(fields, query_of(scope), self._scorers)
        first = await session.finalize()
        session.require(Act.EXPORT)  # the session may have been deleted meanwhile
        if first:
            self._metrics.sessions.labels("finalized").inc()
        await self._ended(session)
        await _send_export(session, export, self._media, receive, send)

    async def trajectories(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        session.require(Act.EXPORT)
        await _send_export(session, _Export.of({}, query_of(scope)), self._media, receive, send)


async def _send_export(session: Session, export: _Export, media: Media | None, receive: Receive, send: Send) -> None:
    """Raises ClientDisconnectedError if the client leaves before everything was sent: then no client has the export."""
    session.touch()
    unread = session.stale or not await filled(session)
    check_known(session, unread=unread)
    missing = [name for name in export.expected or () if session.trie.checkpoint(name) is None]
    missing += [name for name in session.lost if name not in missing]
    head_root = session.trie.head_root
    ends = session.trie.checkpoints(terminal=not export.every, root=head_root if export.roots == "head" else None)
    viewer = None
    if media is not None:
        viewer = await Viewer.look(media, session.tenant, _digests(ends), inline=export.inline)
        session.require(Act.EXPORT)
    found: Iterable[BranchTrajectory] = branches(
        ends,
        session.reward_info,
        shared_turns=export.shared,
        missing=missing,
        unread=unread,
        passed_over=session.trie.passed_over,
        head=head_root,
    )
    if viewer is not None:
        found = _with_images(found, viewer)
    head: dict[str, Any] = {
        "session_id": session.id,
        "phase": session.phase.value,
        "metadata": session.metadata,
        **({"missing": missing} if missing or export.expected is not None else {}),
        **({"ignored": export.ignored} if export.ignored else {}),
    }
    samples = session.samples
    # A server does not tell an application whether its client is still there; `ClientConnection` does.
    async with ClientConnection(receive) as client:
        if export.score is not None:
            found = await export.score.score(list(found))
            session.require(Act.EXPORT)
        if export.form in STREAMED:
            await _send_json(STREAMED[export.form](found, head), signs(session), send)
        else:
            kind, encode = FORMATS[export.form]
            body = await asyncio.to_thread(lambda: encode(list(found), head))
            start = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *signs(session)]
            await send({"type": "http.response.start", "status": 200, "headers": start})
            await _send_part(send, body)
        client.stop_watching()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    with suppress(SessionOverError, StoreError):  # the session was deleted, or the store does not take the note
        await session.happen(Exported(samples, time=time.time()))
    session.touch()


def _digests(ends: Iterable[Checkpoint]) -> list[str]:
    """Return the digests of all pictures on the paths to these checkpoints. Each span is looked at once."""
    seen, found = set[int](), dict[str, None]()
    for checkpoint in ends:
        span: TokenSpan | None = checkpoint.span
        while span is not None and id(span) not in seen:
            seen.add(id(span))
            found.update((digest, None) for _, _, digest in span.media)
            span = span.parent
    return list(found)


def _with_images(found: Iterable[BranchTrajectory], viewer: Viewer) -> Iterator[BranchTrajectory]:
    """Yield trajectories with the pictures of their own paths."""
    for one in found:
        images, reasons = viewer.shown(one.pictures)
        yield msgspec.structs.replace(one, images=images, reasons=(*one.reasons, *reasons)) if images else one


def check_known(session: Session, *, unread: bool) -> None:
    """Raise StoreUnreachableError for a session without turns here, if they may be at other routers: no sample can say that."""
    if unread and not session.samples:
        raise StoreUnreachableError(
            f"it is not known whether session {session.id!r} has turns: the store does not answer, or lacks what a router left "
            "that died. Repeat the request"
        )


async def filled(session: Session) -> bool:
    """Fetch the further fields of a session from the store; return whether that succeeded."""
    try:
        if session.log is not None:
            await session.log.fill()
    except StoreUnreachableError:
        return False
    return True


def signs(session: Session) -> HeaderList:
    """Return the headers that say whether the store lacks turns, has lost turns, or is unreachable."""
    reasons = (STORE_UNREACHABLE, session.stale), (UNKNOWN_REPLY, bool(session.lost))
    told = ", ".join(name for name, holds in reasons if holds).encode()
    return [
        *([NOT_SAVED] if session.log is not None and session.log.unsaved else []),
        *([(b"x-radix-reasons", told)] if told else []),
    ]


async def _send_json(made: Iterator[bytes], more: HeaderList, send: Send) -> None:
    pieces = _joined(made)
    first = next(pieces)  # an error must come before the head of the reply is out
    headers = [(b"content-type", b"application/json"), *more]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in chain((first,), pieces):
        await _send_part(send, piece)


async def _send_part(send: Send, part: bytes) -> None:
    """Send a part of a body, a large one in pieces, between which other requests have their turn."""
    for at in range(0, len(part), SEND_BYTES):
        await send({"type": "http.response.body", "body": part[at : at + SEND_BYTES], "more_body": True})
        await asyncio.sleep(0)


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces until they are worth a packet."""
    held, size = list[bytes](), 0
    for piece in pieces:
        if len(piece) >= _PIECE_BYTES:  # joined to others, it would be copied
            yield b"".join(held)
            yield piece
            held, size = [], 0
            continue
        held.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


logger = logging.getLogger(__name__)


class SessionSamples:
    """Implements `SampleTrajectories` for samples that are sessions."""

    def __init__(self, registry: SessionRegistry, media: Media | None = None) -> None:
        self._registry = registry
        self._media = media

    async def built(self, tenant: str, sample: GroupSample, options: Mapping[str, Any]) -> Built | None:
        """Return a session as `finalize` gives it; None if there is none, or it is damaged. Raises StoreUnreachableError."""
        try:
            return await self._built(tenant, sample, inline=options.get("media") == "inline")
        except DamagedRecordError as error:  # it must not stand in front of all samples that can be read
            logger.error("session %r of group %r cannot be read: %s", sample.members[0].session, sample.group.id, error)
            return None

    async def _built(self, tenant: str, sample: GroupSample, *, inline: bool) -> Built | None:
        session = await self._registry.reach(tenant, sample.members[0].session or "")
        if session is None:
            return None
        session.visitors += 1
        try:
            unread = session.stale or not await filled(session)
            check_known(session, unread=unread)
            ends, lost = session.trie.checkpoints(terminal=True), session.lost
            viewer = None
            if self._media is not None:
                viewer = await Viewer.look(self._media, tenant, _digests(ends), inline=inline)
                ends = session.trie.checkpoints(terminal=True)
            known, head = session.trie.passed_over, session.trie.head_root
            found = list(branches(ends, session.reward_info, missing=lost, unread=unread, passed_over=known, head=head))
            if viewer is not None:
                found = list(_with_images(found, viewer))
            session.touch()
        finally:
            session.visitors -= 1
        return Built(
            await offload(inline, lambda: [Raw(b"".join(trajectory_json(one))) for one in found]),
            bool(found) and all(one.exact for one in found),
            tuple(dict.fromkeys(version for one in found for version, _, _ in one.weight_versions)),
            session.reward_info,
            tuple(kv_versions(turn for one in found for turn in one.turns)),
            exact_tokens=bool(found) and all(INEXACT_TOKENS.isdisjoint(one.reasons) for one in found),
            adapters=tuple(dict.fromkeys(one.lora for one in found)),
        )

    async def branches(self, tenant: str, session_id: str, *, head: bool) -> list[BranchTrajectory]:
        """Return the trajectories of a session, as `trajectories` gives them. Raises UnknownSessionError, StoreError."""
        session = await self._registry.reach(tenant, session_id)
        if session is None:
            raise UnknownSessionError(f"there is no session {session_id[:140]!r}: POST /sessions makes one")
        session.visitors += 1
        try:
            unread = session.stale or not await filled(session)
            check_known(session, unread=unread)
            trie, root = session.trie, session.trie.head_root
            ends = trie.checkpoints(terminal=True, root=root if head else None)
            session.touch()
            return list(
                branches(
                    ends,
                    session.reward_info,
                    missing=session.lost,
                    unread=unread,
                    passed_over=trie.passed_over,
                    head=root,
                )
            )
        finally:
            session.visitors -= 1

    async def acknowledged(self, tenant: str, members: Sequence[Member]) -> None:
        """Note that a trainer has these sessions."""
        for member in members:
            with suppress(SessionOverError, StoreError):  # the session is over, or the store does not take the note
                session = await self._registry.reach(tenant, member.session or "")
                if session is not None:
                    await session.happen(Exported(session.samples, time=time.time()))


_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


def fields_of(body: bytes) -> dict[str, Raw]:
    """Return the fields of a body; an empty body has none. Raises BadRequestError."""
    return parse_object(body) if body.strip() else {}


def query_of(scope: Scope) -> dict[str, str]:
    """Return the last value of each parameter in the query."""
    return {key: values[-1] for key, values in parse_qs(scope.get("query_string", b"").decode("latin-1")).items()}


def is_on(query: Mapping[str, str], name: str) -> bool:
    """Return whether a switch of the query is on; without it, it is off. Raises BadRequestError for another word."""
    found = _SWITCH.get(query.get(name, "").lower())
    if found is None:
        raise BadRequestError(f"`{name}` must be true or false, not {query[name]!r}")
    return found
