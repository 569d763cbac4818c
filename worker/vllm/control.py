"""All routes of a vLLM worker except its two paths that generate. Most commands exist only in vLLM's development mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from worker.engine.engine import EmbeddedEngine, EngineJob, PauseMode
from worker.http.control import ANY, BOTH, GET, POST, EngineControl, echo, not_found
from worker.http.exchange import Handler, HttpExchange
from worker.options import WorkerOptions
from worker.vllm.kept_caches import READ, KeptCaches
from worker.vocabulary import EngineVocabulary

_MODES: Mapping[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}
_MEMORY = frozenset({"weights", "kv_cache"})
_NO_TRANSFER = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."


class VllmControl(EngineControl):
    """vLLM's routes. `/health` and `/ping` are about health.

    Attributes:
        transferring: whether weights are being transferred, between `start_weight_update` and `finish_weight_update`.
        asleep: the parts of its memory that it has given away.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        vocabulary: EngineVocabulary,
        tokenizer_path: str,
        options: WorkerOptions,
        kept: KeptCaches,
    ) -> None:
        super().__init__(engine, vocabulary, tokenizer_path, options)
        self.transferring = False
        self.asleep: frozenset[str] = frozenset()
        routes: dict[str, tuple[tuple[str, ...], Handler]] = {
            "/health": (GET, self._health),
            "/ping": (BOTH, self._health),
            "/version": (GET, self._version),
            "/v1/models": (GET, self._models),
            "/load": (GET, self._load),
            "/tokenize": (POST, self._tokenize),
            "/kv_event_sources": (GET, self._sources),
            "/metrics": (GET, self._metrics),
            "/v1/completions": (POST, not_found),
            "/inference/v1/generate": (POST, not_found),
            "/echo": (ANY, echo),
            READ: (POST, kept.given),
        }
        if options.scale_out:
            routes["/inference/v1/abort_requests"] = (POST, self._abort_some)
        else:
            routes |= dict.fromkeys(("/inference/v1/generate", "/inference/v1/abort_requests"), (POST, self._forbidden))
        if options.dev_mode:
            routes |= {
                "/abort_requests": (POST, self._abort),
                "/pause": (POST, self._pause),
                "/resume": (POST, self._resume),
                "/is_paused": (GET, self._is_paused),
                "/server_info": (GET, self._server_info),
                "/reset_prefix_cache": (POST, self._reset_prefix_cache),
                "/weight_info": (GET, self._weight_info),
                "/update_weight_version": (POST, self._update_weight_version),
                "/init_weight_transfer_engine": (POST, self._transfer),
                "/start_weight_update": (POST, self._transfer),
                "/update_weights": (POST, self._transfer),
                "/finish_weight_update": (POST, self._transfer),
                "/collective_rpc": (POST, self._collective_rpc),
                "/sleep": (POST, self._sleep),
                "/wake_up": (POST, self._wake_up),
            }
        self._routes = routes

    # -- reports -------------------------------------------------------------------------------------------------------

    async def _health(self, exchange: HttpExchange) -> None:
        await exchange.answer(503 if self.unhealthy else 200)

    async def _version(self, exchange: HttpExchange) -> None:
        await exchange.answer(200, {"version": "0.32.0"})

    async def _models(self, exchange: HttpExchange) -> None:
        cards = [{**card, "permission": []} for card in self._cards("vllm")]
        await exchange.answer(200, {"object": "list", "data": cards})

    async def _load(self, exchange: HttpExchange) -> None:
        await exchange.answer(200, {"server_load": len(self._engine.jobs)})

    async def _tokenize(self, exchange: HttpExchange) -> None:
        body = _object(exchange) or {}
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            await _refuse(exchange, "1 validation error:\n  Field required", "body.prompt")
            return
        ids = self._vocabulary.tokenized(prompt, body.get("add_special_tokens") is not False)
        length = self._options.context_length
        await exchange.answer(200, {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": None})

    async def _sources(self, exchange: HttpExchange) -> None:
        await exchange.answer(200, {})

    async def _metrics(self, exchange: HttpExchange) -> None:
        await self._answer_loads(exchange, "engine", "vllm:num_requests_running", "vllm:num_requests_waiting")

    async def _server_info(self, exchange: HttpExchange) -> None:
        ranks = self._engine.ranks
        parallel = {
            "data_parallel_size": ranks,
            "data_parallel_size_local": ranks,
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
        }
        config: Any = {"parallel_config": parallel}
        if exchange.query.get("config_format", ["text"])[0] != "json":
            config = f"model='{self._path}', data_parallel_size={ranks}"
        await exchange.answer(200, {"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _weight_info(self, exchange: HttpExchange) -> None:
        await exchange.answer(200, {"weight_version": self._engine.weight_version})

    async def _is_paused(self, exchange: HttpExchange) -> None:
        await exchange.answer(200, {"is_paused": self._engine.paused})

    async def _forbidden(self, exchange: HttpExchange) -> None:
        message = "The scale-out APIs are disabled. Start the server with --enable-scale-out."
        error = {"message": message, "type": "PermissionDeniedError", "param": None, "code": 403}
        await exchange.answer(403, {"error": error})

    # -- commands ------------------------------------------------------------------------------------------------------

    async def _abort_some(self, exchange: HttpExchange) -> None:
        body = _object(exchange)
        if body is None or body.get("request_ids") is None:
            await _refuse(exchange, "Missing 'request_ids' in request body")
            return
        self._engine.give_up(self._called(body["request_ids"]))
        await exchange.answer(200)

    async def _abort(self, exchange: HttpExchange) -> None:
        body = _object(exchange)
        if body is None:
            await _refuse(exchange, "Invalid JSON format")
            return
        ids = body.get("request_ids")
        ended = self._called(ids) if ids else list(self._engine.jobs.values())
        self._engine.give_up(ended)
        await exchange.answer(200, {"status": "aborted", "aborted": len(ids or ended)})

    def _called(self, ids: list[str]) -> list[EngineJob]:
        """Return the samples of these requests."""
        return [job for name, job in self._engine.jobs.items() if name.rpartition("#")[0] in ids]

    async def _pause(self, exchange: HttpExchange) -> None:
        mode = exchange.query.get("mode", ["abort"])[0]
        if mode not in _MODES:
            await _refuse(exchange, "1 validation error:\n  Input should be 'abort', 'wait' or 'keep'", "query.mode")
            return
        await self._engine.pause(_MODES[mode])
        await exchange.answer(200, {"status": "paused"})

    async def _resume(self, exchange: HttpExchange) -> None:
        self._engine.resume()
        await exchange.answer(200, {"status": "resumed"})

    async def _reset_prefix_cache(self, exchange: HttpExchange) -> None:
        await exchange.answer(200, {"success": self._engine.flush()})

    async def _update_weight_version(self, exchange: HttpExchange) -> None:
        body = _object(exchange) or {}
        version = body.get("new_version")
        if not isinstance(version, str):
            await _refuse(exchange, "1 validation error:\n  Input should be a valid string", "body.new_version")
            return
        self._engine.weight_version = version
        await exchange.answer(200, {"success": True, "new_version": version})

    async def _transfer(self, exchange: HttpExchange) -> None:
        """Do one step of a transfer of weights. Only its order and its version matter."""
        body = _object(exchange) or {}
        step = exchange.path[1:]
        if not self._options.weight_transfer:
            await _refuse(exchange, f"Call to collective_rpc method failed: {_NO_TRANSFER}", status=500)
            return
        if step in ("update_weights", "finish_weight_update") and not self.transferring:
            await _refuse(exchange, f"Call to collective_rpc method failed: {step} without a start", status=500)
            return
        if step != "init_weight_transfer_engine":
            self.transferring = step != "finish_weight_update"
        if step == "finish_weight_update" and body.get("weight_version") is not None:
            self._engine.weight_version = str(body["weight_version"])
        await exchange.answer(200, {"message": f"{step} done"})

    async def _collective_rpc(self, exchange: HttpExchange) -> None:
        body = _object(exchange)
        if body is None or body.get("method") is None:
            await _refuse(exchange, "Missing 'method' in request body")
            return
        await exchange.answer(200, {"results": [None]})

    async def _sleep(self, exchange: HttpExchange) -> None:
        level = int(exchange.query.get("level", ["1"])[0])
        await self._engine.pause("abort")
        if level:
            self.asleep = _MEMORY
            self._engine.flush()
        await exchange.answer(200, {"status": "sleeping", "level": level})

    async def _wake_up(self, exchange: HttpExchange) -> None:
        """Take parts of the memory back. A worker that has all of it goes on, whatever has paused it."""
        tags = exchange.query.get("tags")
        parts = _MEMORY if tags is None else frozenset(tags) - {"scheduling"}
        if tags is None or parts <= self.asleep:
            self.asleep -= parts
        if not self.asleep:
            self._engine.resume()
        await exchange.answer(200, {"status": "sleeping" if self.asleep else "awake", "tags": tags})


def _object(exchange: HttpExchange) -> dict[str, Any] | None:
    try:
        body = msgspec.json.decode(exchange.raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


async def _refuse(exchange: HttpExchange, message: str, param: str | None = None, *, status: int = 400) -> None:
    kind = "Bad Request" if status == 400 else "InternalServerError"
    await exchange.answer(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})
