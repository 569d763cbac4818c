"""vLLM as an engine of the fleet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from msgspec import Raw

from router.engines.engine import (
    EngineAnswer,
    EngineCall,
    EngineExchange,
    Headers,
    Introduction,
    KnownWorker,
    Question,
)
from router.engines.form.fleet_paths import FleetPath
from router.engines.form.kv_events import KvReader, KvSource, configured_source
from router.engines.form.media import ImageFile
from router.engines.json import JSON_ERRORS
from router.engines.vllm.fleet import OWN_PATHS, fleet_exchange, weight_version
from router.engines.vllm.generation import VllmGeneration
from router.engines.vllm.images import NamedImages
from router.engines.vllm.requests import COMPLETIONS, CONTEXT, DEV_MODE, GENERATE, SCALE_OUT, read
from router.errors import RouterError

_LEAST = (0, 11, 0)
"""The first version that returns token ids and knows `structured_outputs`. Earlier versions ignore a grammar silently."""
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_NO_MODE = b'{"token_ids":[],"sampling_params":{},"output_mode":"?"}'
"""No version generates for this. A version that can return text (`output_mode`) refuses the mode by its name."""
_NONE_SUCH = frozenset({404, 405, 501})
_INFO, _SOURCES, _METRICS = "/server_info?config_format=json", "/kv_event_sources", "/metrics"
_ENGINE_LABEL = re.compile(rb'^vllm:[^{\n]*\{[^}\n]*\bengine="(\d+)"', re.MULTILINE)
_SHOWN = 200
"""The most bytes of an answer to show in a refusal."""
_FORBIDDEN = frozenset({401, 403})


class _Model(msgspec.Struct):
    owned_by: str | None = None


class _Tokenized(msgspec.Struct):
    max_model_len: int | None = None


class _Description(msgspec.Struct):
    """The fields of `/v1/models`, `/server_info` and `/version` that identify vLLM."""

    data: list[_Model] = []
    vllm_config: msgspec.Raw = msgspec.Raw()
    version: str | None = None


class _Parallel(msgspec.Struct):
    data_parallel_size: int
    data_parallel_size_local: int = 1
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False


class _Configured(msgspec.Struct):
    parallel_config: _Parallel


class _Config(msgspec.Struct):
    """The fields of `/server_info?config_format=json` about data parallelism."""

    vllm_config: _Configured


class _Publisher(msgspec.Struct):
    """One entry of `GET /kv_event_sources`, which maps data-parallel ranks to the `--kv-events-config` of each."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


def published_source(url: str, sources: bytes) -> KvSource | None:
    """Return where the worker at `url` publishes, from its answer to `GET /kv_event_sources`; None if it does not, over TCP."""
    try:
        ranks = msgspec.json.decode(sources, type=dict[int, _Publisher])
    except JSON_ERRORS:
        return None
    first = ranks.get(0)
    if first is None or not first.enable_kv_cache_events:
        return None
    return configured_source(
        url, first.publisher or "zmq", first.endpoint, first.replay_endpoint, topic=first.topic, ranks=len(ranks)
    )


class Vllm:
    """Workers that run vLLM 0.11.0 or later."""

    name = "vllm"
    native = False
    mark = "/version"
    version_path = "/weight_info"
    questions: Sequence[Question] = (
        Question("GET", "/version"),
        Question("POST", COMPLETIONS, b"{}"),
        Question("POST", GENERATE, _NO_MODE),
        Question("POST", "/tokenize", b'{"prompt":"a"}'),
        Question("GET", "/weight_info"),
    )
    rank_questions: Sequence[str] = (_INFO, _SOURCES, _METRICS)
    private_headers = frozenset({b"x-request-id"})
    """vLLM would take this header's id in place of the generation's own."""
    fleet_paths: Sequence[FleetPath] = OWN_PATHS
    kv_reader = KvReader((_SOURCES,), published_source)
    tells_ids_once = True
    keeps_strays = True
    image_words: Sequence[str] = ()

    def __init__(self, *, cumulative: bool = True) -> None:
        """`cumulative`: each event of a stream repeats all before it, as SGLang's do by default."""
        self._cumulative = cumulative
        self._images = NamedImages()

    def recognises(self, description: bytes) -> bool:
        """See `Engine`."""
        try:
            found = msgspec.json.decode(description, type=_Description)
        except JSON_ERRORS:
            return False
        if bytes(found.vllm_config) or any(model.owned_by == self.name for model in found.data):
            return True
        return found.version is not None and set(msgspec.json.decode(description)) == {"version"}

    def introduction(self, answers: Mapping[str, EngineAnswer]) -> Introduction:
        """See `Engine`. Nothing is generated: an endpoint that is open refuses the question.

        Versions before 0.32 may have `GENERATE`, too, and answer with ids alone: they ignore `output_mode`.
        """
        version = _version(answers["/version"].body)
        number = _VERSION.match(version or "")
        if number is not None and (0, 0, 0) < tuple(map(int, number.groups())) < _LEAST:
            return Introduction(
                f"runs vLLM {version}: from 0.11.0 on it returns token ids, and keeps to grammars, so update vLLM there"
            )
        if answers[COMPLETIONS].status in _NONE_SUCH:
            return Introduction(
                f"runs vLLM without {COMPLETIONS}: it serves no model that generates text, or was started with"
                " --tokens-only; start it without that flag"
            )
        if answers[COMPLETIONS].status == 200:
            return Introduction(
                f"has the name of vLLM, and is none: it answers an empty POST {COMPLETIONS} with 200"
                f" ({_shown(answers[COMPLETIONS].body)}); give the URL of a worker, with its port"
            )
        if answers["/tokenize"].status not in {200, *_FORBIDDEN}:
            return Introduction(
                "runs vLLM without a tokenizer, so it neither takes nor returns text: start it without"
                " --skip-tokenizer-init"
            )
        told = answers["/weight_info"]
        returns_text = answers[GENERATE].status == 400 and b"output_mode" in answers[GENERATE].body
        context = _context(answers["/tokenize"].body)
        abilities = {SCALE_OUT: returns_text, DEV_MODE: told.status == 200, f"{CONTEXT}{context}": context is not None}
        return Introduction(None, frozenset(name for name, has in abilities.items() if has), weight_version(told.body))

    def ranked(self, path: str, headers: Headers, body: bytes | None, rank: int) -> tuple[Headers, bytes | None]:
        """See `Engine`."""
        return [*headers, (b"x-data-parallel-rank", b"%d" % rank)], body

    def ranks(self, path: str, answer: bytes) -> int | None:
        """See `Engine`. A server of one rank of a group, each of which has a URL of its own, has one."""
        try:
            if path == _METRICS:
                return len(set(_ENGINE_LABEL.findall(answer))) or None
            if path == _SOURCES:
                return len(msgspec.json.decode(answer, type=dict[int, msgspec.Raw])) or None
            found = msgspec.json.decode(answer, type=_Config).vllm_config.parallel_config
        except JSON_ERRORS:
            return None
        if found.data_parallel_external_lb:
            return 1
        return found.data_parallel_size_local if found.data_parallel_hybrid_lb else found.data_parallel_size

    def exchange(self, call: EngineCall, worker: KnownWorker) -> EngineExchange | EngineAnswer | None:
        """See `Engine`."""
        path = call.target.partition("?")[0]
        if path != "/generate" or call.method not in ("POST", "PUT"):
            return fleet_exchange(call, worker)
        try:
            return self._generation(call.body or b"", worker)
        except RouterError as error:
            return EngineAnswer(error.status, msgspec.json.encode(error.body()))

    def image_fields(self, tenant: str, prompts: Sequence[Sequence[ImageFile]], *, batch: bool) -> Mapping[str, Raw]:
        """See `Engine`."""
        return self._images.fields(tenant, prompts, batch=batch)

    def _generation(self, body: bytes, worker: KnownWorker, doubted: bool = False) -> VllmGeneration:
        asked = read(body, worker.abilities, self._images, worker.images)
        again = partial(self._generation, body, worker)
        return VllmGeneration(asked, worker, again, cumulative=self._cumulative, doubted=doubted)


def _context(tokenized: bytes) -> int | None:
    try:
        return msgspec.json.decode(tokenized, type=_Tokenized).max_model_len
    except JSON_ERRORS:
        return None


def _shown(body: bytes) -> str:
    return " ".join(body[:_SHOWN].decode("utf-8", "replace").split())


def _version(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Description).version
    except JSON_ERRORS:
        return None
