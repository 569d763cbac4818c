"""What is fuzzed: an application with workers behind it, and what must hold of it after every batch of requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import quote
from uuid import uuid4

import msgspec
from starlette.types import Message

from middleware_hub.radix_tree_middleware import RadixTreeMiddleware
from middleware_hub.sessions_middleware import SessionsMiddleware
from router.app import RouterApp, create_app
from router.config import (
    AbortConfig,
    RadixConfig,
    RetryConfig,
    RouterConfig,
    ServerConfig,
    SessionsConfig,
    StoreConfig,
    WorkersConfig,
)
from router.generate.fleet import Fleet
from router.serving.connection import Limits, limited_by
from router.workers.queue import RequestQueue
from tests.fuzz import rules
from tests.fuzz.bodies import ASKED, BODIES
from tests.fuzz.case import Case
from tests.fuzz.draw import Surroundings
from tests.fuzz.exchange import Answer, exchange
from tests.fuzz.parts import only, parts, pins, routes
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.sessions.trie.recount import recount as recount_trie
from tests.support.openapi import DescribedRoutes
from tests.support.serving import serving
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

Kind = Literal["memory", "tenants", "stored", "vllm", "spoilt", "plain"]
"""The router as it is; with keys of two tenants; with a store; before vLLM workers; before a worker that talks nonsense; the
same without its middleware."""

MAX_BODY_BYTES = 96 * 1024
MAX_HEADER_BYTES = 8 * 1024
MAX_TOKENS = 20_000
"""In memory: so few that the collection has something to do."""

_ADMIN = "admin-key"
_KEYS = ("blue-key", "red-key", _ADMIN)
_SETTLE_SECONDS = 20.0


class Troubles(logging.Handler):
    """Errors that were logged: an answer alone does not show all of them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, if it is about the router or the event loop."""
        if record.name.startswith(("router", "middleware_hub", "worker", "asyncio")):
            self.found.append(logging.Formatter().format(record))


class Target:
    """One application, inside its lifespan."""

    def __init__(self, kind: Kind, workers: Sequence[str], dead: str, embedded: Sequence[EmbeddedWorker]) -> None:
        self.kind = kind
        self.good_workers = bool(embedded)
        self._embedded = embedded
        self._workers = workers
        keys = kind == "tenants"
        self._folder = TemporaryDirectory() if kind == "stored" else None
        config = RouterConfig(
            server=ServerConfig(
                max_body_bytes=MAX_BODY_BYTES,
                api_keys=("blue:blue-key", "red:red-key") if keys else (),
                admin_keys=(_ADMIN,) if keys else (),
            ),
            # One attempt: what a retry does is not what this is about, and its waits would be waited for.
            workers=WorkersConfig(urls=tuple(workers), retry=RetryConfig(attempts=1)),
            abort=AbortConfig(attempts=2, wait=0.0),
            radix=RadixConfig(tokenizer_path=str(shipped_tokenizer()), max_tokens=MAX_TOKENS),
            sessions=SessionsConfig(max_tokens=MAX_TOKENS, orphan_grace=0.0, verify_rate=0.1),
            store=StoreConfig(url=self._folder and f"sqlite:{self._folder.name}"),
            **({"middlewares": ()} if kind == "plain" else {}),
        )
        self.app: RouterApp = create_app(config)
        found = routes(self.app)
        self._sessions = next((part.registry for part in parts(self.app) if isinstance(part, SessionsMiddleware)), None)
        if self._sessions is not None:
            found |= {path: ("POST",) for path in BODIES if path.startswith("/sessions/s/")}
            found |= {
                "/sessions": ("POST", "GET"),
                "/sessions/s": ("GET", "DELETE"),
                "/sessions/s/trajectories": ("GET",),
            }
            found |= {path: ("GET",) for path in ASKED if path.startswith("/inspect/")}
            found["/inspect/api/explain"] = ("POST",)
        self.around = Surroundings(found, (*workers, dead), _KEYS if keys else ())
        self._troubles = Troubles()
        self._requests, self._flights = self.app.requests, only(self.app, Fleet).in_flight
        self._queue = only(self.app, RequestQueue)
        self._tree = next((part.tree for part in parts(self.app) if isinstance(part, RadixTreeMiddleware)), None)
        self._usual: Counter[str] = Counter()
        self._described = DescribedRoutes()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Startup, and shutdown."""
        to_app: asyncio.Queue[Message] = asyncio.Queue()
        from_app: asyncio.Queue[Message] = asyncio.Queue()
        lifespan = asyncio.create_task(self.app({"type": "lifespan", "state": {}}, to_app.get, from_app.put))  # type: ignore[arg-type]
        to_app.put_nowait({"type": "lifespan.startup"})
        assert (await from_app.get())["type"] == "lifespan.startup.complete"
        yield
        to_app.put_nowait({"type": "lifespan.shutdown"})
        assert (await from_app.get())["type"] == "lifespan.shutdown.complete"
        await lifespan
        if self._folder is not None:
            self._folder.cleanup()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        """The same behind the router's own protocol, on a port."""
        limits = Limits(max_header_bytes=MAX_HEADER_BYTES, max_connections=1000)
        async with serving(self.app, protocol=limited_by(limits)) as url:
            yield int(url.rpartition(":")[2])

    def begin(self) -> None:
        """What runs now is what runs always."""
        self._usual = _tasks()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What is logged in the meantime is its doing."""
        logging.getLogger().addHandler(self._troubles)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(self._troubles)

    async def ask(self, case: Case, seconds: float) -> tuple[Answer, str | None]:
        """Send one request: its answer, and what is wrong with it."""
        answer = await exchange(self.app, case, seconds)
        wrong = rules.complaint(case, answer, good_workers=self.good_workers, of_vllm=self.kind == "vllm")
        if wrong is None and self.kind != "plain":  # where other paths are the router's own
            wrong = rules.undescribed(case, answer, self._described)
        return answer, wrong

    # Afterwards ---------------------------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        """Undo what a batch was allowed to do: pauses, workers that were removed or added."""
        for worker in self.app.pool.list():
            if worker.url not in self._workers:
                await self._call("DELETE", f"/workers/{worker.id}")
        for url in self._workers:
            await self._call("POST", f"/add_worker?url={quote(url)}")
        await self._call("POST", "/continue_generation", {})
        if self._sessions is not None:
            for session in list(self._sessions):
                await self._sessions.delete(session)
            await self._call("POST", "/sessions", {"session_id": "s"})

    async def afterwards(self) -> str | None:
        """What is not as it was before, pauses and the like apart; None if all is well. When nothing is on its way any more."""
        try:
            await self._restore()
            await self._settled()
            for worker in self._embedded:
                assert not worker.out_of_range, f"outside of the valid range: {worker.out_of_range}"
            await self._a_good_request()
            await self._settled()
            self._recounted()
            assert not self._troubles.found, "\n".join(self._troubles.found[:3])
        except AssertionError as error:
            self._troubles.found.clear()
            return str(error) or repr(error)
        return None

    async def _settled(self) -> None:
        """Nothing is in flight, and nothing runs that did not run at first."""
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                while self._left():  # noqa: ASYNC110 - what runs tells nobody when it ends
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"left behind: {self._left()}") from None

    def _left(self) -> dict[str, object]:
        pool = self.app.pool.list()
        counts: dict[str, object] = {
            "leases": [worker for worker in pool if worker.inflight],
            "requests": [record.path for record in self._requests],
            "flights": len(self._flights) or "",
            "waiting": len(self._queue) or "",
            "tasks": _tasks() - self._usual,
            "jobs": [worker for worker in self._embedded if worker.in_flight],
        }
        return {name: count for name, count in counts.items() if count}

    async def _a_good_request(self) -> None:
        space = uuid4().hex
        text = f"After the storm of {space}: "
        said = await self._call("POST", "/generate", {"text": text, "sampling_params": {"max_new_tokens": 3}}, space)
        if self._tree is None:
            return
        known = await self._call("POST", "/retrieve_from_text", {"text": text + said["text"], "strict": True}, space)
        sampled = [token for token, mask in zip(known["tokens"], known["loss_mask"], strict=True) if mask]
        assert sampled == said["output_ids"], (said, known)

    def _recounted(self) -> None:
        """The trees are sound, and nothing of them is held by a request that is over."""
        for session in self._sessions or ():
            recount_trie(session.trie)
            assert not session.trie.in_flight, f"{session!r} waits for what is over"
        if self._tree is None:
            return
        recount(self._tree)
        held = pins(self._tree)
        assert not held, f"{held} holds on chains are left"

    async def _call(self, method: str, target: str, body: Any = None, space: str = "") -> Any:
        headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + _ADMIN.encode())]
        headers += [(b"x-radix-namespace", space.encode())] if space else []
        case = Case(method, target.encode(), tuple(headers), b"" if body is None else msgspec.json.encode(body))
        answer, wrong = await self.ask(case, _SETTLE_SECONDS)
        assert wrong is None, f"a good request: {wrong}"
        assert answer.status is not None
        assert answer.status < 300, f"a good request: {answer.status} {bytes(answer.body[:300])!r}"
        return msgspec.json.decode(bytes(answer.body)) if answer.body else None


def _tasks() -> Counter[str]:
    """How many tasks there are of each kind. Those of a worker that was taken out and put back are others than before."""
    return Counter(
        getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks() - {asyncio.current_task()}
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing below an error is logged: a million warnings would be kept for nobody."""
    loggers = [logging.getLogger(name) for name in ("router", "middleware_hub", "worker", "uvicorn")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
