"""Asking a worker: who it is, when it is new, and how it is, ever after.

Every question goes out on a new connection: one that its worker has just closed looks like a dead worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.loops import loop_refusal
from router.patience import patience
from router.sglang.json import JSON_ERRORS
from router.upstream import ConnectFailedError, Upstream, UpstreamFailure, fetch

_SERVER_INFO = ("/server_info", "/get_server_info")
"""The second one is what SGLang called it before 0.5."""

_PING = ("/ping", "/model_info", "/get_model_info")
_MODEL_INFO = ("/model_info", "/get_model_info", "/ping")
"""The first that a worker has: old ones have no /ping, and call the other one by its second name. All of them answer in
milliseconds, in a pause too, in which /health and /ready say no (SGLang 0.5.23)."""

_LIMIT = 16 * 1024 * 1024
_NONE_SUCH = frozenset({404, 405})


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

    async def introduction(self, url: str) -> Finding:
        """Who it is. One that does not tell is taken as it is, as long as it answers."""
        found = await self._ask(url, _SERVER_INFO)
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
        found = await self._ask(url, _SERVER_INFO)
        return found if isinstance(found, bytes) else None

    async def probe(self, url: str, *, wants_version: bool = False) -> Finding:
        """How it is. A worker that refuses the question (401, say) is there; one that answers with a 5xx is not well."""
        found = await self._ask(url, _MODEL_INFO if wants_version else _PING)
        return Finding(version=_decoded(found).weight_version) if isinstance(found, bytes) else found

    async def _ask(self, url: str, paths: tuple[str, ...]) -> bytes | Finding:
        """The first answer with a 200, or what there was instead."""
        try:
            async with patience(self._seconds):
                for path in paths:
                    status, body = await fetch(
                        self._upstream, "GET", url + path, self._headers, fresh=True, limit=_LIMIT
                    )
                    if (loop := loop_refusal(url, status)) is not None:
                        return Finding(refusal=loop)
                    if status >= 500:
                        return Finding(f"GET {path} is answered with {status}")
                    if status == 200:
                        return body
                    if status not in _NONE_SUCH:
                        break
        except UpstreamFailure as failure:
            return Finding(str(failure), absent=isinstance(failure, ConnectFailedError))
        except TimeoutError:
            return Finding(f"no answer within {self._seconds:g} s", silent=True)
        return Finding()


def _decoded(body: bytes) -> _ServerInfo:
    """As far as it is what SGLang answers; a ping's body is empty."""
    try:
        return msgspec.json.decode(body, type=_ServerInfo)
    except JSON_ERRORS:
        return _ServerInfo()
