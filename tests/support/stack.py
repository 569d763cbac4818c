"""The whole product in front of embedded engines, seen only from outside: over HTTP, and in the workers' own logs."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from middleware_hub.hub import Hub, load, media_of
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.app import create_app
from router.config import (
    RADIX_TREE_MIDDLEWARE,
    SESSIONS_MIDDLEWARE,
    AbortConfig,
    RadixConfig,
    RetryConfig,
    RouterConfig,
    ServerConfig,
    SessionsConfig,
    StoreConfig,
    WorkersConfig,
)
from router.config.kv_salt import KvSaltConfig
from router.config.media import MediaConfig
from router.serving.connection import Limits, limited_by
from tests.support.client import Answer
from tests.support.oracle import Speller, speller
from tests.support.serving import serve
from tests.support.vocabularies import Name, vocabulary
from worker.engine.records import GenerationRecord
from worker.options import Role, StreamStyle
from worker.worker import EmbeddedWorker

STYLES: tuple[StreamStyle, ...] = ("cumulative", "incremental", "mixed")


@dataclass
class Reply:
    """What the client saw, and what the worker did."""

    answer: Answer
    body: Any  # of a stream: its events
    records: list[GenerationRecord]

    @property
    def record(self) -> GenerationRecord:
        """The only one."""
        (record,) = self.records
        return record


@dataclass
class Stack:
    """A router with its middleware, and its workers. Where these are apart, `workers` decode."""

    name: Name
    url: str
    workers: list[EmbeddedWorker]
    spelling: Speller
    prefills: Sequence[EmbeddedWorker] = ()

    def post(
        self, path: str, body: Any, *, headers: Mapping[str, str] | None = None, raw: bytes | None = None
    ) -> Answer:
        """POST JSON, or whatever `raw` is."""
        content = json.dumps(body).encode() if raw is None else raw
        return self._exchange("POST", path, content, {"content-type": "application/json", **(headers or {})})

    def exchange(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Any call; a body is sent as JSON."""
        content = None if body is None else json.dumps(body).encode()
        return self._exchange(method, path, content, {"content-type": "application/json", **(headers or {})})

    def get(self, path: str) -> Answer:
        return self._exchange("GET", path, None, {})

    def generate(self, body: dict[str, Any], *, headers: Mapping[str, str] | None = None) -> Reply:
        """One generation, streamed or not, which must succeed."""
        before = [len(worker.log) for worker in self.workers]
        answer = self.post("/generate", body, headers=headers)
        assert answer.status == 200, answer.content
        records = [record for worker, start in zip(self.workers, before, strict=True) for record in worker.log[start:]]
        return Reply(answer, events(answer) if body.get("stream") else answer.json(), records)

    def retrieve(self, text: str | list[str], *, namespace: str | None = None, **options: Any) -> Any:
        headers = {"x-radix-namespace": namespace} if namespace else {}
        answer = self.post("/retrieve_from_text", {"text": text, **options}, headers=headers)
        assert answer.status == 200, answer.content
        return answer.json()

    def set_weight_version(self, version: str) -> None:
        for worker in (*self.workers, *self.prefills):
            worker.set_weight_version(version)

    def inflight(self) -> dict[str, Any]:
        """Whatever the router counts as in flight: all of it must be zero at the end."""
        found = self._loads()
        for line in self.get("/metrics").content.decode().splitlines():
            if not line.startswith("#") and ("inflight" in line or "in_flight" in line or "pinned" in line):
                label, value = line.rsplit(" ", 1)
                found[label] = float(value)
        return found

    def _loads(self) -> dict[str, Any]:
        return {state["url"]: state["load"] for state in self.get("/workers").json()["workers"]}

    def idle(self) -> bool:
        """What answers sooner is asked first: many ask until it is true."""
        return not (
            any(worker.in_flight for worker in (*self.workers, *self.prefills))
            or any(self._loads().values())
            or any(self.inflight().values())
        )

    def _exchange(self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]) -> Answer:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        try:
            connection.request(method, path, content, dict(headers))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()


@lru_cache(maxsize=16)
def _tokenizer(config: RadixConfig) -> Tokenizer:
    """One per vocabulary and process: to load a large one takes two seconds."""
    return load(dataclasses.replace(config, max_tokens=None))


def events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a whole stream, which must end with [DONE]."""
    lines = [line for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
    assert lines, answer.content
    assert lines[-1] == b"data: [DONE]", lines[-1]
    return [json.loads(line[6:]) for line in lines[:-1]]


@contextlib.contextmanager
def stack(
    name: Name,
    *,
    styles: tuple[StreamStyle, ...] = STYLES,
    radix: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    abort: AbortConfig | None = None,
    workers: Mapping[str, Any] | None = None,
    sessions: Mapping[str, Any] | None = None,
    store: StoreConfig | None = None,
    media: Mapping[str, Any] | None = None,
    middlewares: Sequence[str] = (),
    kv_salt: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    apart: bool = False,
    **worker: Any,
) -> Iterator[Stack]:
    """Start it all: one worker per style of streaming. Unless it is told to, the router sends nothing twice.

    `apart`: each of them only decodes, and has a prefill worker beside it.
    `middlewares`: those of a user, around the others.
    `folder`: a tokenizer that has more added tokens than that of `name`.
    """
    folder = folder or vocabulary(name)
    with contextlib.ExitStack() as entered:

        def run(role: Role) -> list[EmbeddedWorker]:
            return [
                entered.enter_context(
                    EmbeddedWorker(folder, stream_style=style, seed=number, disaggregation_mode=role, **worker)
                )
                for number, style in enumerate(styles)
            ]

        prefills, running = (run("prefill"), run("decode")) if apart else ([], run("null"))
        config = RouterConfig(
            server=ServerConfig(**(server or {})),
            workers=WorkersConfig(
                urls=tuple(one.url for one in (*prefills, *running)),
                policy="round_robin",
                **{"retry": RetryConfig(attempts=1), **(workers or {})},
            ),
            abort=abort or AbortConfig(attempts=1, wait=0),
            radix=RadixConfig(tokenizer_path=str(folder), **(radix or {})),
            store=store or StoreConfig(),
            media=MediaConfig(**(media or {})),
            kv_salt=KvSaltConfig(**(kv_salt or {})),
            sessions=SessionsConfig(**{"verify_rate": 1.0, **(sessions or {})}),
            middlewares=(*middlewares, SESSIONS_MIDDLEWARE, RADIX_TREE_MIDDLEWARE),
        )
        hub = Hub(_tokenizer(config.radix), config.store, config.media)
        hub.see(media_of(config, hub.stock))
        app, limits = create_app(config, shared={Hub: hub}), Limits(max_header_bytes=65_536, max_connections=1000)
        url = entered.enter_context(serve(app, protocol=limited_by(limits)))
        yield Stack(name, url, running, speller(name), prefills)
