"""Probes: what a new worker is, and whether a known one is healthy.

Each request of a probe uses a new connection, because a pooled connection that the worker has just closed looks like a dead
worker.

The server at a URL may be no engine: at a wrong port there may be anything that speaks HTTP, and much of that answers 200, or
403, to everything. An engine names its model when it describes itself, or asks for a key before it does, or at least answers a
request to generate as an engine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from router.engines.engine import Engine, EngineAnswer, EngineCall, Introduction
from router.engines.json import JSON_ERRORS
from router.engines.sglang.engine import SGLANG
from router.errors import LoopError
from router.http.time_limits import patience
from router.http.upstream import ConnectFailedError, NotHttpError, Upstream, UpstreamFailure, fetch
from router.workers.worker import ProbeResult, WorkerRole

_SERVER_INFO = ("/server_info", "/get_server_info")
"""The second is the name before SGLang 0.5."""

_PING = ("/ping", "/model_info", "/get_model_info")
_MODEL_INFO = ("/model_info", "/get_model_info", "/ping")
"""The first path that a worker has is used; old workers lack /ping and have only the last name. Each answers in milliseconds,
also in a pause, when /health and /ready answer with an error (SGLang 0.5.23)."""

_MODEL = ("/model_info", "/get_model_info", "/v1/models")
"""Where an engine describes its model, also while its scheduler is too busy for more."""

_ENGINE = (*_SERVER_INFO, *_MODEL)
"""Where an engine describes itself in JSON. Engines other than SGLang have the last path too."""

_SIGNS = frozenset(
    (
        "model_path served_model_name tokenizer_path is_generation weight_version context_length max_total_num_tokens "
        "skip_tokenizer_init disaggregation_mode is_embedding encoder_only internal_states vllm_config"
    ).split()
)
"""Fields in an engine's description of itself. One of these is enough: versions and engines differ."""

_REPLY = frozenset({"text", "output_ids", "meta_info"})
"""The fields of a reply to `/generate`."""

_REFUSAL = frozenset({"error", "detail", "message"})
"""Where an engine, or its web framework, says why it refuses a request to generate."""

_QUICK = 0.25
"""Seconds after which a description is late."""

_LIMIT = 16 * 1024 * 1024
_SHOWN = 200
"""The most bytes of an answer to show in an error message."""

_REFUSES_US = frozenset({401, 429})
"""The engine is up, and answers clients with its key; or others."""

NONE_SUCH = frozenset({404, 405, 501})
"""The statuses of a server that lacks a path, or a method there."""


class _NoSuchPath(msgspec.Struct, frozen=True):
    """The server has none of the paths; `said` describes its answer to the first of them."""

    said: str


class _Description(msgspec.Struct):
    """SGLang's description of itself (`/server_info`, `/model_info`)."""

    skip_tokenizer_init: bool = False
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    is_embedding: bool = False
    encoder_only: bool = False
    weight_version: str | None = None
    dp_size: int | None = None
    attn_dp_size: int | None = None

    @property
    def ranks(self) -> int:
        """Return the number of data-parallel ranks: `--enable-dp-attention` turns 8 into 1 with 8 for the attention."""
        return max(1, (self.dp_size or 1) * (self.attn_dp_size or 1))

    @property
    def refusal(self) -> str | None:
        """Return why the worker is of no use; None if it is a regular one."""
        if self.skip_tokenizer_init:
            return "runs with --skip-tokenizer-init: it neither takes nor returns text; start it without that flag"
        if self.is_embedding or self.encoder_only:
            return "does not generate: it runs with --is-embedding or --encoder-only"
        return None

    @property
    def role(self) -> WorkerRole:
        """Its part of a generation. Workers that are too old to tell do all."""
        return _ROLES.get(self.disaggregation_mode, WorkerRole.REGULAR)


_ROLES = {role.value: role for role in (WorkerRole.PREFILL, WorkerRole.DECODE)}
"""Roles, by SGLang's names; others are those of regular workers."""


class Prober:
    """Probes workers. A failure is a `ProbeResult`, never an exception."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        seconds: float,
        headers: Sequence[tuple[bytes, bytes]] = (),
        engines: Iterable[Engine] = (),
        checked: Callable[[str, ProbeResult], ProbeResult] = lambda _, found: found,
        ranks: Mapping[str, int] | None = MappingProxyType({}),
        passes_keys: bool = True,
    ) -> None:
        """Ask workers over `upstream`.

        Args:
            seconds: the time limit of a probe.
            headers: are added to each of its requests.
            engines: the engines that a worker may run beside the native one.
            checked: makes a refusal of a result at a URL, if its engine cannot be in this fleet.
            ranks: by URL, the numbers of data-parallel ranks that workers are not asked for; None asks none of them.
            passes_keys: whether workers get the keys of clients. If not, a worker that asks for a key is of no use.
        """
        self._passes_keys = passes_keys
        self._ranks = ranks
        self.checked = checked
        self._engines = tuple(engines)
        own = (engine.version_path for engine in self._engines if engine.version_path)
        self._versions = (*_MODEL_INFO[:-1], *own, _MODEL_INFO[-1])
        self._headers = [(b"accept-encoding", b"identity"), *headers]
        self._upstream = upstream
        self._seconds = seconds
        self._mute: set[str] = set()  # URLs of engines that do not describe themselves

    async def introduction(self, url: str) -> ProbeResult:
        """Ask a new worker what it is. The result is a refusal unless it is an engine of use in this fleet."""
        engine, found = await self._recognised(url)
        if engine is not None:
            return self.checked(url, await self._introduced(url, engine))
        return self.checked(url, await self._native_introduction(url, found))

    async def _recognised(self, url: str) -> tuple[Engine | None, bytes | _NoSuchPath | ProbeResult]:
        """Return the engine of a worker (None for the native engine, or for none), and the description that the worker gave.

        Marks are asked for only where the description is late (a vLLM in development mode takes seconds), or says nothing.
        """
        described = asyncio.create_task(self._ask(url, _ENGINE, self._is_engine, known=False))
        try:
            await asyncio.wait((described,), timeout=_QUICK)
            if not described.done() and (engine := await self._marked(url)) is not None:
                return engine, b""
            found = await described
        finally:
            described.cancel()
        if isinstance(found, bytes):
            return next((engine for engine in self._engines if engine.recognises(found)), None), found
        if isinstance(found, ProbeResult) and (found.complaint is not None or found.refusal is not None):
            return None, found
        return await self._marked(url), found

    async def _marked(self, url: str) -> Engine | None:
        """Return the engine whose mark a worker has."""
        for engine in self._engines:
            if engine.mark:
                said = await self._ask(url, (engine.mark,), _is_object)
                if isinstance(said, bytes) and engine.recognises(said):
                    return engine
        return None

    async def _introduced(self, url: str, engine: Engine) -> ProbeResult:
        answers: dict[str, EngineAnswer] = {}
        try:
            async with patience(self._seconds):
                for method, path, body in engine.questions:
                    answers[path] = EngineAnswer(*await self._fetch(method, url + path, body))
        except (UpstreamFailure, TimeoutError) as error:
            return self._failed(error)
        locked = next((path for path, said in answers.items() if said.status == 401), None)
        if locked is not None and not self._passes_keys:
            return ProbeResult(refusal=f"{url}: {_locked(locked)}", stranger=True)
        found: Introduction = engine.introduction(answers)
        refusal = None if found.refusal is None else f"worker {url} {found.refusal}"
        ranks = self.given_ranks(url) if refusal is None else 1
        if ranks is None:
            ranks = await self._told_ranks(url, engine)
        return ProbeResult(
            refusal=refusal, version=found.version, engine=engine.name, abilities=found.abilities, ranks=ranks
        )

    def given_ranks(self, url: str) -> int | None:
        """Return the number of ranks of a worker that need not be asked; else None."""
        return 1 if self._ranks is None else self._ranks.get(url)

    async def _told_ranks(self, url: str, engine: Engine) -> int | None:
        """Return the number of ranks that a worker tells; one if it tells none, and None if an answer that may tell it is late.

        All places are asked at once. The one that comes first in order counts, but the others wait only a moment for it.
        """
        asked = [asyncio.create_task(self.answer(url, EngineCall("GET", path))) for path in engine.rank_questions]
        try:
            if asked[1:]:
                await asyncio.wait(asked[1:], timeout=4 * _QUICK)
            await asyncio.wait(asked, timeout=_QUICK)
            for path, task in zip(engine.rank_questions, asked, strict=True):
                said = task.result() if task.done() else None
                if said is not None and (found := engine.ranks(path, said)) is not None:
                    return max(1, found)
            return 1 if all(task.done() for task in asked) else None
        finally:
            for task in asked:
                task.cancel()

    async def _native_introduction(self, url: str, found: bytes | _NoSuchPath | ProbeResult) -> ProbeResult:
        if isinstance(found, _NoSuchPath):
            return await self._try_to_generate(url, found)
        if isinstance(found, bytes):
            info = _decoded(found)
            if info.refusal is not None:
                return ProbeResult(refusal=f"worker {url} {info.refusal}")
            return await self._with_role(url, info)
        if found.complaint is None:
            return replace(found, engine=SGLANG.name, ranks=self.given_ranks(url) or 1)  # it tells us nothing
        # The description comes from the worker's scheduler, which may be busy for long; its model's does not.
        model = await self._ask(url, _MODEL, self._is_engine, known=False)
        if not isinstance(model, bytes):
            return found
        told = _decoded(model)
        return ProbeResult(version=told.weight_version, engine=SGLANG.name, role=told.role, ranks=self.given_ranks(url))

    async def _with_role(self, url: str, started: _Description) -> ProbeResult:
        """Return what a worker of SGLang is now. A server that was started as one of a pair may have another role by now."""
        ranks = self.given_ranks(url) or started.ranks
        found = ProbeResult(version=started.weight_version, engine=SGLANG.name, role=started.role, ranks=ranks)
        if started.role is WorkerRole.REGULAR:
            return found
        now = await self._ask(url, _MODEL_INFO[:-1], self._is_engine)
        role = _decoded(now).role if isinstance(now, bytes) and b"disaggregation_mode" in now else started.role
        return replace(found, role=role, bootstrap_port=started.disaggregation_bootstrap_port)

    async def description(self, url: str, paths: Sequence[str]) -> bytes | ProbeResult | None:
        """Return the JSON object that a worker has at the first of these paths that it knows.

        None: it has none of them. A `ProbeResult`: it did not answer, or not to us.
        """
        found = await self._ask(url, paths, _is_object)
        return None if isinstance(found, _NoSuchPath) else found

    async def answer(self, url: str, call: EngineCall) -> bytes | None:
        """Return the answer of a worker (status 200) to a JSON call, or None."""
        try:
            async with patience(self._seconds):
                status, body = await self._fetch(call.method, url + call.target, call.body)
        except (UpstreamFailure, TimeoutError):
            return None
        return body if status == 200 else None

    async def probe(self, url: str, *, wants_version: bool = False) -> ProbeResult:
        """Ask a worker whether it is well. One that asks for a key (401) is; one that answers with a 5xx is not.

        `wants_version`: ask where it tells its weight version, and the role that it has now.
        """
        found = await self._ask(url, self._versions if wants_version else _PING, _is_no_page)
        if isinstance(found, _NoSuchPath) and url not in self._mute:
            found = await self._ask(url, _ENGINE, self._is_engine)
        if isinstance(found, _NoSuchPath):
            return ProbeResult() if url in self._mute else ProbeResult(f"it is no engine: {found.said}", stranger=True)
        if not isinstance(found, bytes):
            return found
        told = _decoded(found)
        return ProbeResult(version=told.weight_version, role=_ROLES.get(told.disaggregation_mode))

    def _is_engine(self, body: bytes) -> bool:
        """Return whether a description is one of an engine's."""
        return _has_signs(body) or any(engine.recognises(body) for engine in self._engines)

    async def _try_to_generate(self, url: str, found: _NoSuchPath) -> ProbeResult:
        """Judge a server without a description: it is an engine if it understands an empty request to generate.

        One that only says that it is not ready yet, as `/health` does while a model is loaded, is asked again.
        """
        try:
            async with patience(self._seconds):
                status, body = await self._fetch("POST", url + "/generate", b"{}")
                health = 0
                if status in NONE_SUCH:
                    health, _ = await self._fetch("GET", url + "/health")
        except NotHttpError:
            return _no_engine(url, found.said)
        except (UpstreamFailure, TimeoutError) as error:
            return self._failed(error)
        if _answers_as_an_engine(status, body):
            self._mute.add(url)
            return ProbeResult(engine=SGLANG.name, ranks=self.given_ranks(url) or 1)
        for question, code in (("POST /generate", status), ("GET /health", health)):
            if code == 429 or (code > 500 and code not in NONE_SUCH):
                return ProbeResult(f"{question} is answered with {code}")
        return _no_engine(url, f"{found.said}, {_answer('POST /generate', status, body)}")

    async def _ask(
        self, url: str, paths: Sequence[str], is_answer: Callable[[bytes], bool], *, known: bool = True
    ) -> bytes | _NoSuchPath | ProbeResult:
        """Return the first body that is an answer (status 200), or the reason why there is none.

        A `known` engine is well where it turns others away; a new one has to show that it is an engine, later if need be.
        """
        missing = None
        try:
            async with patience(self._seconds):
                for path in paths:
                    status, body = await self._fetch("GET", url + path)
                    if (loop := loop_refusal(url, status)) is not None:
                        return ProbeResult(refusal=loop)
                    if status >= 500 and status not in NONE_SUCH:
                        return ProbeResult(f"GET {path} is answered with {status}")
                    if status == 429 and not known:
                        return ProbeResult(f"GET {path} is answered with {status}")
                    if status in _REFUSES_US and _is_no_page(body):
                        if status != 401 or self._passes_keys:
                            return ProbeResult()
                        if known:
                            return ProbeResult(_locked(path), stranger=True)
                        return ProbeResult(refusal=f"{url}: {_locked(path)}", stranger=True)
                    if status == 200 and is_answer(body):
                        return body
                    missing = missing or _NoSuchPath(_answer(f"GET {path}", status, body))
        except NotHttpError as error:
            return _NoSuchPath(f"GET {path} is answered with {' '.join(str(error)[:_SHOWN].split())}")
        except (UpstreamFailure, TimeoutError) as error:
            return self._failed(error)
        assert missing is not None
        return missing

    async def _fetch(self, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = self._headers if body is None else [*self._headers, (b"content-type", b"application/json")]
        return await fetch(self._upstream, method, url, headers, body, fresh=True, limit=_LIMIT)

    def _failed(self, error: UpstreamFailure | TimeoutError) -> ProbeResult:
        if isinstance(error, TimeoutError):
            return ProbeResult(f"no answer within {self._seconds:g} s", silent=True)
        return ProbeResult(str(error), absent=isinstance(error, ConnectFailedError))


def for_now(found: ProbeResult) -> ProbeResult:
    """Return the result for a worker that stays: no engine at its URL is a complaint, because one may come."""
    return replace(found, complaint=found.refusal, refusal=None) if found.stranger else found


def loop_refusal(url: str, status: int) -> str | None:
    """Return why a worker that answers a probe with this status cannot be used; None if there is no loop."""
    if status != LoopError.status:
        return None
    return f"{url} leads back to this router: give the URL of a worker"


def _no_engine(url: str, said: str) -> ProbeResult:
    return ProbeResult(refusal=f"{url} is no engine: {said}. Give the URL of a worker, with its port", stranger=True)


def _locked(path: str) -> str:
    return (
        f"it asks for a key (GET {path} is answered with 401). This router has keys of its own, and passes none on: "
        "start the worker without a key"
    )


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


def _has_signs(body: bytes) -> bool:
    """Return whether a JSON object describes an engine, or lists models as an engine does."""
    try:
        said = msgspec.json.decode(body)
    except JSON_ERRORS:
        return False
    if not isinstance(said, dict):
        return False
    models = said.get("data")
    listed = isinstance(models, list) and any(isinstance(one, dict) and one.get("id") for one in models)
    return listed or any(said.get(sign) is not None for sign in _SIGNS)


def _answers_as_an_engine(status: int, body: bytes) -> bool:
    """Return whether an engine may answer an empty request to generate so: it refuses it, or fails at it, or generates."""
    if status == 500:
        return True
    if status == 401:
        return _is_no_page(body)
    try:
        said = msgspec.json.decode(body)
    except JSON_ERRORS:
        return False
    said = said[0] if isinstance(said, list) and said else said
    if not isinstance(said, dict):
        return False
    return not (_REPLY if status < 300 else _REFUSAL if status in (400, 422) else frozenset()).isdisjoint(said)


def _is_no_page(body: bytes) -> bool:
    """Return whether a ping's body, in which an engine may write anything, is not an HTML page."""
    return not body.lstrip().startswith(b"<")


def _decoded(body: bytes) -> _Description:
    """Return the known fields of a description by SGLang; a ping's body is empty."""
    try:
        return msgspec.json.decode(body, type=_Description)
    except JSON_ERRORS:
        return _Description()
