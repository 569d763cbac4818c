"""All routes of a worker except /generate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from worker.engine.engine import EmbeddedEngine, PauseMode
from worker.http.exchange import PLAIN, Handler, HttpExchange, Refused
from worker.http.rooms import ROOMS, RoomHandler
from worker.http.wire import Wire
from worker.options import WorkerOptions
from worker.vocabulary import EngineVocabulary

GET, POST = ("GET",), ("POST",)
BOTH = ("GET", "POST")
ANY = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")

Routes = Mapping[str, tuple[tuple[str, ...], Handler]]
"""The methods that a path takes, and its handler."""

_UPDATED = "Succeeded to update model weights."
_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")


class EngineControl:
    """Reports on an engine, and commands it. A subclass is the interface of one engine, and fills `_routes`.

    Attributes:
        unhealthy: while it is true, the paths about health answer 503.
        adapters: the names of the loaded adapters.
    """

    _routes: Routes

    def __init__(
        self, engine: EmbeddedEngine, vocabulary: EngineVocabulary, tokenizer_path: str, options: WorkerOptions
    ) -> None:
        self.unhealthy = False
        self.adapters = list(options.adapters)
        self._engine = engine
        self._vocabulary = vocabulary
        self._path = tokenizer_path
        self._name = options.served_name or tokenizer_path
        self._options = options
        self._started = int(time.time())

    async def __call__(self, exchange: HttpExchange) -> None:
        """Let the handler of its path answer a request; without one the answer is 404, or 405 for another method."""
        methods, handler = self._routes.get(exchange.path, ((), not_found))
        if not methods:
            await not_found(exchange)
        elif exchange.method not in methods:
            allow = (b"allow", ", ".join(methods).encode())
            await exchange.answer(405, {"detail": "Method Not Allowed"}, more=[allow])
        else:
            await handler(exchange)

    async def _answer_loads(self, exchange: HttpExchange, label: str, running: str, waiting: str) -> None:
        """Answer with these two metrics of each rank. `label` names the rank."""
        rows = [
            f'{name}{{{label}="{rank}",model_name="{self._name}"}} {count}.0\n'
            for rank, counts in enumerate(self._engine.loads())
            for name, count in zip((running, waiting), counts, strict=True)
        ]
        await exchange.answer(200, "".join(rows).encode(), PLAIN)

    def _cards(self, owner: str) -> list[dict[str, Any]]:
        """Return the entries of the model and of its adapters in `/v1/models`."""
        card = {"object": "model", "created": self._started, "owned_by": owner}
        most = self._options.context_length
        return [
            {"id": self._name, **card, "root": self._path, "parent": None, "max_model_len": most},
            *({"id": one, **card, "root": one, "parent": self._name, "max_model_len": None} for one in self.adapters),
        ]


async def not_found(exchange: HttpExchange) -> None:
    """Answer 404, as both engines do."""
    await exchange.answer(404, {"detail": "Not Found"})


async def echo(exchange: HttpExchange) -> None:
    """Answer with the body. No engine does it: it shows how a request arrives that a router passes through."""
    await exchange.answer(200, exchange.raw, exchange.headers.get("content-type", "application/octet-stream"))


class Control(EngineControl):
    """SGLang's routes. `/health`, `/ready` and `/ping` are about health."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        wire: Wire,
        vocabulary: EngineVocabulary,
        tokenizer_path: str,
        options: WorkerOptions,
    ) -> None:
        super().__init__(engine, vocabulary, tokenizer_path, options)
        self._wire = wire
        self._routes = {
            "/health": (GET, self._health),
            "/health_generate": (GET, self._health),
            "/ping": (GET, self._ping),
            "/ready": (GET, self._ready),
            "/model_info": (GET, self._model_info),
            "/get_model_info": (GET, self._model_info),
            "/server_info": (GET, self._server_info),
            "/get_server_info": (GET, self._server_info),
            "/v1/models": (GET, self._models),
            "/v1/loads": (GET, self._loads),
            "/metrics": (GET, self._metrics),
            "/tokenize": (POST, self._tokenize),
            "/generate": (("POST", "PUT"), not_found),
            ROOMS: (POST, RoomHandler(engine)),
            "/abort_request": (POST, self._abort_request),
            "/pause_generation": (POST, self._pause),
            "/continue_generation": (POST, self._continue),
            "/flush_cache": (BOTH, self._flush),
            "/update_weight_version": (POST, self._update_weight_version),
            "/update_weights_from_disk": (POST, self._updating("model_path", kind=str, num_paused_requests=0)),
            "/update_weights_from_tensor": (POST, self._updating("serialized_named_tensors", kind=list)),
            "/update_weights_from_distributed": (POST, self._updating("names", "dtypes", "shapes", kind=list)),
            "/update_weights_from_ipc": (POST, self._updating("zmq_handles", kind=dict)),
            "/echo": (ANY, echo),
        }

    # -- reports -------------------------------------------------------------------------------------------------------

    async def _health(self, exchange: HttpExchange) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._engine.progress.wait_for(lambda: not self._engine.paused), self._options.health_timeout
            )
        await self._ready(exchange)

    async def _ping(self, exchange: HttpExchange) -> None:
        await exchange.answer(503 if self.unhealthy else 200)

    async def _ready(self, exchange: HttpExchange) -> None:
        await exchange.answer(503 if self.unhealthy or self._engine.paused else 200)

    async def _model_info(self, exchange: HttpExchange) -> None:
        info = {
            "model_path": self._path,
            "served_model_name": self._name,
            "tokenizer_path": self._path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._engine.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": self._engine.role,
            "has_image_understanding": self._vocabulary.image_id is not None,
            "has_audio_understanding": False,
            "model_type": self._vocabulary.model_type or "embedded",
            "architectures": ["EmbeddedForCausalLM"],
        }
        await exchange.answer(200, info)

    async def _server_info(self, exchange: HttpExchange) -> None:
        info = {
            "model_path": self._path,
            "tokenizer_path": self._path,
            "skip_tokenizer_init": False,
            "context_length": self._options.context_length,
            "stream_interval": self._options.stream_interval,
            "incremental_streaming_output": self._wire.stream_style == "incremental",
            "weight_version": self._engine.weight_version,
            "version": "0.5.23",
            "dp_size": self._engine.ranks,
            "attn_dp_size": 1,
            "disaggregation_mode": self._options.disaggregation_mode,
            "disaggregation_bootstrap_port": exchange.server[1],
        }
        if self._vocabulary.image_id is not None:
            info["mm_preprocess_cache_size_mb"] = self._options.preprocess_cache
        await exchange.answer(200, info)

    async def _models(self, exchange: HttpExchange) -> None:
        await exchange.answer(200, {"object": "list", "data": self._cards("sglang")})

    async def _loads(self, exchange: HttpExchange) -> None:
        loads = [
            {
                "dp_rank": rank,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_total_reqs": running + waiting,
            }
            for rank, (running, waiting) in enumerate(self._engine.loads())
        ]
        asked = exchange.query.get("dp_rank")
        if asked is not None:
            loads = [load for load in loads if str(load["dp_rank"]) == asked[0]]
        now = datetime.now(UTC).isoformat()
        head = {"timestamp": now, "version": "0.5.23", "accelerator": None, "num_accelerators": 1}
        await exchange.answer(200, {**head, "loads": loads})

    async def _metrics(self, exchange: HttpExchange) -> None:
        await self._answer_loads(exchange, "dp_rank", "sglang:num_running_reqs", "sglang:num_queue_reqs")

    async def _tokenize(self, exchange: HttpExchange) -> None:
        body = exchange.json_object()
        ids = self._vocabulary.tokenized(wanted(body, "prompt", str), wanted(body, "add_special_tokens", bool, True))
        await exchange.answer(200, {"tokens": ids, "count": len(ids), "max_model_len": self._options.context_length})

    # -- commands ------------------------------------------------------------------------------------------------------

    async def _abort_request(self, exchange: HttpExchange) -> None:
        body = exchange.json_object()
        rid = wanted(body, "rid", str, "")
        if body.get("abort_all"):
            self._engine.abort_all()
        else:
            self._engine.abort(rid)
        await exchange.answer(200)

    async def _pause(self, exchange: HttpExchange) -> None:
        mode = exchange.json_object().get("mode", "abort")
        if mode not in _MODES:
            raise Refused("Input should be 'abort', 'retract' or 'in_place'", "object")
        await self._engine.pause(mode)
        await exchange.answer(200, {"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, exchange: HttpExchange) -> None:
        exchange.json_object()
        self._engine.resume()
        await exchange.answer(200, {"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, exchange: HttpExchange) -> None:
        idle = self._engine.flush()
        message = b"Cache flushed.\n" if idle else b"Flush cache failed.\n"
        await exchange.answer(200 if idle else 400, message, None)

    async def _update_weight_version(self, exchange: HttpExchange) -> None:
        body = exchange.json_object()
        version = wanted(body, "new_version", str)
        if body.get("abort_all_requests", True):
            self._engine.abort_all()
        self._engine.weight_version = version
        message = f"Weight version updated to {version}"
        await exchange.answer(200, {"success": True, "message": message, "new_version": version})

    def _updating(self, *fields: str, kind: type, **more: Any) -> Handler:
        """Return the handler of an update whose body has these fields, and whose reply has `more` in it."""

        async def update(exchange: HttpExchange) -> None:
            body = exchange.json_object()
            for name in fields:
                wanted(body, name, kind)
            if body.get("abort_all_requests"):
                self._engine.abort_all()
            flush = wanted(body, "flush_cache", bool, True)
            await self._engine.update_weights(wanted(body, "weight_version", str, None), flush=flush)
            await exchange.answer(200, {"success": True, "message": _UPDATED, **more})

        return update


def wanted(body: dict[str, Any], name: str, kind: type, *default: Any) -> Any:
    """Return a value of a body; null counts as missing.

    Raises:
        Refused: it is of another kind, or it is missing and has no default.
    """
    value = body.get(name)
    if value is None and default:
        return default[0]
    if not isinstance(value, kind):
        raise Refused(f"body.{name}: input should be a valid {kind.__name__}", "object")
    return value
