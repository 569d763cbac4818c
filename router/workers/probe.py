"""Asking a worker: who it is, when it is new, and how it is, ever after.

Every question goes out on a new connection: one that its worker has just closed looks like a dead worker.

What answers is not always an engine: behind a wrong port there may be anything that talks HTTP. An engine tells of itself in
JSON, or wants a key for that, or takes at least a request to generate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from router.engines.sglang.json import JSON_ERRORS
from router.http.loop_guard import loop_refusal
from router.http.time_limits import patience
from router.http.upstream import ConnectFailedError, NotHttpError, Upstream, UpstreamFailure, fetch

_SERVER_INFO = ("/server_info", "/get_server_info")
"""The second one is what SGLang called it before 0.5."""

_PING = ("/ping", "/model_info", "/get_model_info")
_MODEL_INFO = ("/model_info", "/get_model_info", "/ping")
"""The first that a worker has: old ones have no /ping, and call the other one by its second name. All of them answer in
milliseconds, in a pause too, in which /health and /ready say no (SGLang 0.5.23)."""

_ENGINE = (*_SERVER_INFO, "/model_info", "/get_model_info", "/v1/models")
"""Where an engine tells of itself in JSON; at the last one also engines that are not SGLang."""

_LIMIT = 16 * 1024 * 1024
_SHOWN = 200
"""Bytes of what something answered that is no engine."""

_KNOWS_US_NOT = frozenset({401, 403, 429})
"""There is somebody, who tells only others."""

NONE_SUCH = frozenset({404, 405, 501})
"""How a server says that it has no such path, or nothing to do there."""


class Finding(msgspec.Struct, frozen=True):
    """What a worker had to say.

    Attributes:
        complaint: what is wrong with it at the moment, if anything is: the next question may be answered better.
        refusal: why it can never be used, as far as it tells.
        version: its weight version, if it told.
        absent: whether no connection came about.
        silent: whether there was no answer in time.
    """

    complaint: str | None = None
    refusal: str | None = None
    version: str | None = None
    absent: bool = False
    silent: bool = False


class _Nothing(msgspec.Struct, frozen=True):
    """No path that was asked for is there; `said` tells how the first of them was answered."""

    said: str


class _ServerInfo(msgspec.Struct):
    skip_tokenizer_init: bool = False
    weight_version: str | None = None


class Prober:
    """Asks one worker after the other. Never raises: silence is a finding, too."""

    def __init__(self, upstream: Upstream, *, seconds: float, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """`seconds`: what an answer may take. `headers`: further ones of each question."""
        self._headers = [(b"accept-encoding", b"identity"), *headers]
        self._upstream = upstream
        self._seconds = seconds
        self._mute: set[str] = set()  # they generate, and tell nothing of themselves

    async def introduction(self, url: str) -> Finding:
        """Who it is. A refusal if it is no engine, or one that is of no use."""
        found = await self._ask(url, _ENGINE, _is_object)
        if isinstance(found, _Nothing):
            return await self._last_chance(url, found)
        if isinstance(found, bytes):
            info = _decoded(found)
            if info.skip_tokenizer_init:
                return Finding(
                    refusal=f"worker {url} runs with --skip-tokenizer-init: it neither takes nor returns text;"
                    " start it without that flag"
                )
            return Finding(version=info.weight_version)
        # What it says of itself comes from its scheduler, which may be busy for long; a ping does not.
        return await self.probe(url) if found.complaint is not None else found

    async def server_info(self, url: str) -> bytes | None:
        """What it tells of itself; None if it does not."""
        found = await self._ask(url, _SERVER_INFO, _is_object)
        return found if isinstance(found, bytes) else None

    async def probe(self, url: str, *, wants_version: bool = False) -> Finding:
        """How it is. A worker that wants a key for that (401) is there; one that answers with a 5xx is not well."""
        found = await self._ask(url, _MODEL_INFO if wants_version else _PING, _is_no_page)
        if isinstance(found, _Nothing) and url not in self._mute:
            found = await self._ask(url, _ENGINE, _is_object)
        if isinstance(found, _Nothing):
            return Finding() if url in self._mute else Finding(f"it is no engine: {found.said}")
        return Finding(version=_decoded(found).weight_version) if isinstance(found, bytes) else found

    async def _last_chance(self, url: str, found: _Nothing) -> Finding:
        """Something tells nothing of itself. It is an engine if it understands a request to generate, with nothing in it."""
        try:
            async with patience(self._seconds):
                headers = [*self._headers, (b"content-type", b"application/json")]
                status, body = await fetch(
                    self._upstream, "POST", url + "/generate", headers, b"{}", fresh=True, limit=_LIMIT
                )
        except NotHttpError:
            return _no_engine(url, found.said)
        except UpstreamFailure as failure:
            return Finding(str(failure), absent=isinstance(failure, ConnectFailedError))
        except TimeoutError:
            return Finding(f"no answer within {self._seconds:g} s", silent=True)
        if status not in NONE_SUCH:
            if status == 500 or _is_json(body):
                self._mute.add(url)
                return Finding()
            if status > 500:
                return Finding(f"POST /generate is answered with {status}")
        return _no_engine(url, f"{found.said}, {_answer('POST /generate', status, body)}")

    async def _ask(
        self, url: str, paths: tuple[str, ...], is_answer: Callable[[bytes], bool]
    ) -> bytes | _Nothing | Finding:
        """The first answer with a 200 that is one, or what there was instead."""
        nothing = None
        try:
            async with patience(self._seconds):
                for path in paths:
                    status, body = await fetch(
                        self._upstream, "GET", url + path, self._headers, fresh=True, limit=_LIMIT
                    )
                    if (loop := loop_refusal(url, status)) is not None:
                        return Finding(refusal=loop)
                    if status >= 500 and status not in NONE_SUCH:
                        return Finding(f"GET {path} is answered with {status}")
                    if status in _KNOWS_US_NOT:
                        break
                    if status == 200 and is_answer(body):
                        return body
                    nothing = nothing or _Nothing(_answer(f"GET {path}", status, body))
                else:
                    assert nothing is not None
                    return nothing
        except NotHttpError as error:
            return _Nothing(f"GET {path} is answered with {' '.join(str(error)[:_SHOWN].split())}")
        except UpstreamFailure as failure:
            return Finding(str(failure), absent=isinstance(failure, ConnectFailedError))
        except TimeoutError:
            return Finding(f"no answer within {self._seconds:g} s", silent=True)
        return Finding()


def _no_engine(url: str, said: str) -> Finding:
    return Finding(refusal=f"{url} is no engine: {said}. Give the URL of a worker, with its port")


def _answer(question: str, status: int, body: bytes) -> str:
    shown = " ".join(body[:_SHOWN].decode("utf-8", "replace").split())
    return f"{question} is answered with {status}" + (f" ({shown})" if shown else "")


def _is_json(body: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(body), dict | list)
    except JSON_ERRORS:
        return False


def _is_object(body: bytes) -> bool:
    return body.lstrip()[:1] == b"{" and _is_json(body)


def _is_no_page(body: bytes) -> bool:
    """A ping's body is empty, or whatever an engine likes to say; a page is of a server for people."""
    return not body.lstrip().startswith(b"<")


def _decoded(body: bytes) -> _ServerInfo:
    """As far as it is what SGLang answers; a ping's body is empty."""
    try:
        return msgspec.json.decode(body, type=_ServerInfo)
    except JSON_ERRORS:
        return _ServerInfo()
