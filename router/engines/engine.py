"""The contract of an engine: how the router recognizes it, and how it talks to its workers.

Inside the router requests and replies have one form, the *common form*, which is SGLang's: `/generate`, its replies and
streams, and the calls to the fleet. Hub, policies, retries and aborts read and write only the common form. An *engine* is an
adapter: it translates a request on its way to a worker, and the reply on its way back (`router/proxy/engine_upstream.py`). For
SGLang it does nothing.

Adapters are pure code: an `EngineExchange` says what to send, and translates the answers. Other code does the I/O.

A new engine is a folder next to `sglang` and `vllm` with one `Engine`, and its place in `router/engines/table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Raw

from router.engines.form import media
from router.engines.form.fleet_paths import FleetPath
from router.engines.form.kv_events import KvReader
from router.engines.form.ranks import with_rank
from router.engines.known_names import KnownNames

Headers = Sequence[tuple[bytes, bytes]]

_WITH_RANK = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
"""Paths whose bodies may name a data-parallel rank."""


class UntranslatableError(Exception):
    """A worker's answer has not the form of its engine. Nothing of it is passed on: no token may be lost or altered."""


class EngineCall(msgspec.Struct, frozen=True):
    """One HTTP request to a worker. `target` is path and query."""

    method: str
    target: str
    body: bytes | None = None


class EngineAnswer(msgspec.Struct, frozen=True):
    """A reply in one piece; JSON, unless it is empty."""

    status: int
    body: bytes


class KnownWorker(NamedTuple):
    """An adapter's knowledge of a worker.

    Attributes:
        abilities: the worker's abilities beyond the least, in the engine's own words (see `Introduction`).
        version: returns the weight version that a call through this router has set; None if none has.
        images: the names of the pictures that it has answered with. The adapter reads and writes them.
    """

    abilities: frozenset[str] = frozenset()
    version: Callable[[], str | None] = lambda: None
    images: KnownNames = KnownNames(0)


class EngineExchange(Protocol):
    """One request in the common form and its reply, as a worker sees them. It is used once.

    Attributes:
        calls: the calls to the worker, all at the same time. It is one call, except for batches.
        stream: whether the router waits for a stream. If a call is not answered by one, `whole` makes the reply.
        over: whether an event has ended the stream for all calls, as an error does. The rest of it is not read.
    """

    calls: Sequence[EngineCall]
    stream: bool
    over: bool

    def whole(self, answers: Sequence[EngineAnswer]) -> EngineAnswer | EngineExchange:
        """Return the reply in the common form for answers in one piece, or the exchange that asks the worker next.

        Raise UntranslatableError.

        There is an answer for each call, or only one, of a call that failed.
        """
        ...

    def event(self, number: int, data: bytes) -> bytes:
        """Return events in the common form (complete, or none) for the payload of one event. Raise UntranslatableError.

        `number`: the call whose stream it is. `[DONE]` comes here too.
        """
        ...

    def end(self) -> bytes:
        """Return the last events, after all streams have ended. Raise UntranslatableError if one has ended too early."""
        ...


class Question(NamedTuple):
    """A question to a new worker about itself."""

    method: str
    path: str
    body: bytes | None = None


class Introduction(msgspec.Struct, frozen=True):
    """The meaning of a new worker's answers.

    Attributes:
        refusal: why it cannot be used, and what to do about it; None if it can. It does not name the worker.
        abilities: for `KnownWorker`.
        version: its weight version, if it said so.
    """

    refusal: str | None = None
    abilities: frozenset[str] = frozenset()
    version: str | None = None


class Engine(Protocol):
    """One kind of worker.

    Attributes:
        name: as in `--engine`.
        native: whether its JSON is the common form, so that nothing is translated.
        mark: a path that only this engine answers, asked where a worker does not describe itself; empty for none.
        questions: a worker that was recognised is asked these.
        rank_questions: paths where it may say how many data-parallel ranks it has; the first that does counts.
        private_headers: names of the router's own headers (lower case) that a translated call must not carry.
        version_path: where a worker tells its weight version, as `weight_version`; empty for nowhere of its own.
        fleet_paths: its own calls that concern all workers; the calls of the common form are everyone's.
        kv_reader: how its workers tell where they publish the events of their caches.
        tells_ids_once: whether a stream with pictures has the prompt's ids in its first and last events alone, so that it
            costs nothing to ask for them each time.
        keeps_strays: whether it keeps a placeholder that the model sampled, if no picture follows: it takes the first
            placeholders of a prompt for the pictures'. Otherwise it keeps none.
        image_words: texts that it takes for a picture, besides the placeholder of the model's family.
    """

    name: str
    native: bool
    mark: str
    version_path: str
    questions: Sequence[Question]
    rank_questions: Sequence[str]
    private_headers: frozenset[bytes]
    fleet_paths: Sequence[FleetPath]
    kv_reader: KvReader
    tells_ids_once: bool
    keeps_strays: bool
    image_words: Sequence[str]

    def recognises(self, description: bytes) -> bool:
        """Return whether a JSON object is how this engine describes itself: at `/server_info`, `/v1/models` or its `mark`."""
        ...

    def introduction(self, answers: Mapping[str, EngineAnswer]) -> Introduction:
        """Judge a worker by its answers to `questions`, by path."""
        ...

    def ranked(self, path: str, headers: Headers, body: bytes | None, rank: int) -> tuple[Headers, bytes | None]:
        """Return a request that this data-parallel rank of a worker is to serve. `body` is in the common form."""
        ...

    def ranks(self, path: str, answer: bytes) -> int | None:
        """Return the number of data-parallel ranks, by the answer to one of the `rank_questions`; None if it does not say."""
        ...

    def exchange(self, call: EngineCall, worker: KnownWorker) -> EngineExchange | EngineAnswer | None:
        """Return how a request in the common form reaches a worker.

        None: unchanged. An `EngineAnswer`: not at all, because this engine cannot do it or has nothing to do, and it says so.
        """
        ...

    def image_fields(
        self, tenant: str, prompts: Sequence[Sequence[media.ImageFile]], *, batch: bool
    ) -> Mapping[str, Raw]:
        """Return the fields of a request in the common form for the pictures of each prompt.

        An adapter may only name them there: the caller holds the files until the reply has begun.

        `tenant`: whose request it is; empty where there are no keys.
        """
        ...


class Native:
    """An engine whose JSON is the common form."""

    native = True
    mark = ""
    version_path = ""
    questions: Sequence[Question] = ()
    rank_questions: Sequence[str] = ()
    private_headers: frozenset[bytes] = frozenset()
    fleet_paths: Sequence[FleetPath] = ()
    tells_ids_once = False
    keeps_strays = False
    image_words: Sequence[str] = ("<image>",)  # SGLang's own

    def __init__(self, name: str, kv_reader: KvReader) -> None:
        self.name = name
        self.kv_reader = kv_reader

    def recognises(self, description: bytes) -> bool:
        """Return False: a worker that no other engine recognises is native."""
        return False

    def introduction(self, answers: Mapping[str, EngineAnswer]) -> Introduction:
        return Introduction()

    def ranked(self, path: str, headers: Headers, body: bytes | None, rank: int) -> tuple[Headers, bytes | None]:
        return headers, with_rank(body, rank) if body is not None and path in _WITH_RANK else body

    def ranks(self, path: str, answer: bytes) -> int | None:
        return None

    def exchange(self, call: EngineCall, worker: KnownWorker) -> EngineExchange | EngineAnswer | None:
        return None

    def image_fields(
        self, tenant: str, prompts: Sequence[Sequence[media.ImageFile]], *, batch: bool
    ) -> Mapping[str, Raw]:
        """Return data URLs, and the digests that a worker checks them by."""
        hashes = [[one.digest for one in each] for each in prompts]
        return {
            media.IMAGES: media.printed(prompts, batch=batch),
            media.HASHES: Raw(msgspec.json.encode(hashes if batch else hashes[0])),
        }
