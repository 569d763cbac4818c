"""Calls to the fleet, in SGLang's words, as the calls that a vLLM worker has for them.

| the router's call | what a vLLM worker is sent |
|---|---|
| `/abort_request` of a `rid` | `/inference/v1/abort_requests`, with all names that it may know the generation by |
| `/abort_request` of all | `/abort_requests` without names |
| `/pause_generation`: `abort`, `in_place`, `retract` | `/pause?mode=abort`, `keep`, `keep` and then without a cache |
| `/continue_generation` | `/resume` |
| `/flush_cache` | `/reset_prefix_cache` |
| `/update_weight_version` | the same, after `/abort_requests` unless the call says otherwise |
| `/update_weights_from_disk` | `/collective_rpc` of `reload_weights`, then the version, then the cache |
| `/release_memory_occupation`, `/resume_memory_occupation` | `/sleep`, `/wake_up` |
| `/load_lora_adapter`, `/unload_lora_adapter` | the same below `/v1` |
| `/get_model_info`, `/model_info`, `/get_server_info` | `/v1/models`, and `/weight_info` |

All but the abort of a `rid` need a worker that was started with `VLLM_SERVER_DEV_MODE=1`. What a worker cannot do is answered
with a 501 that says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from router.engines.engine import EngineAnswer, EngineCall, EngineExchange, KnownWorker, UntranslatableError
from router.engines.form.fleet_paths import Body, FleetPath, Query
from router.engines.json import JSON_ERRORS
from router.engines.vllm.requests import DEV_MODE, SCALE_OUT, engine_ids

_Done = Callable[[Any], EngineAnswer]
_Translation = Callable[[Body, KnownWorker], EngineExchange | EngineAnswer]


def _aborts(_: Body, query: Query) -> bool:
    return query.get("mode", "abort") == "abort"


OWN_PATHS = (
    FleetPath("/pause", aborts=_aborts, pauses=True),
    FleetPath("/resume", pauses=True, lasting=True),
    FleetPath("/abort_requests", aborts=lambda body, _: not body.get("request_ids")),
    FleetPath("/reset_prefix_cache"),
    FleetPath("/sleep", aborts=_aborts, pauses=True, transfer=True),
    FleetPath("/wake_up", pauses=True, transfer=True),
    FleetPath("/init_weight_transfer_engine", transfer=True, updates=True),
    FleetPath("/start_weight_update", transfer=True, updates=True),
    FleetPath("/update_weights", transfer=True, updates=True),
    FleetPath("/finish_weight_update", transfer=True, updates=True, names_version=True),
    FleetPath("/collective_rpc", transfer=True, updates=True),
    FleetPath("/v1/load_lora_adapter", transfer=True),
    FleetPath("/v1/unload_lora_adapter", transfer=True),
)
"""vLLM's own calls that concern all workers: sent to one of them, they would divide the fleet. They pass unchanged, and other
engines' workers do not have them. `/update_weight_version` belongs to the common form."""

_PAUSES = {"abort": "abort", "in_place": "keep", "retract": "keep"}
_OWN_IN_DEV_MODE = frozenset(call.path for call in OWN_PATHS if not call.path.startswith("/v1/"))
_OWN_TRANSFER = (
    "vLLM workers get weights by their own calls, which this router sends to all of them: /init_weight_transfer_engine,"
    " /start_weight_update, /update_weights, /finish_weight_update (docs/engines.md)"
)


class _NoStream:
    """The base of an exchange that is never answered by a stream."""

    stream = False
    over = False

    def event(self, number: int, data: bytes) -> bytes:
        raise UntranslatableError("a stream in answer to a call that has none")

    def end(self) -> bytes:
        raise UntranslatableError("a stream in answer to a call that has none")


class _Steps(_NoStream):
    """Calls to one worker, one after the other. The first that fails is the answer, in vLLM's words."""

    def __init__(self, *calls: EngineCall, done: _Done) -> None:
        """`done` makes the answer of the JSON of the last one, None without any."""
        self.calls: Sequence[EngineCall] = calls[:1]
        self._rest = calls[1:]
        self._done = done

    def whole(self, answers: Sequence[EngineAnswer]) -> EngineAnswer | EngineExchange:
        answer = answers[-1]
        if answer.status != 200:
            return answer
        return _Steps(*self._rest, done=self._done) if self._rest else self._done(_decoded(answer.body))


def fleet_exchange(call: EngineCall, worker: KnownWorker) -> EngineExchange | EngineAnswer | None:
    """Return how a call other than a generation reaches a worker; None: as it is."""
    path = call.target.partition("?")[0]
    translation = _TRANSLATIONS.get((call.method, path))
    if translation is None:
        if path.startswith("/update_weights_from_") or path in ("/begin_weight_update", "/end_weight_update"):
            return _refusal(f"{path} is SGLang's: {_OWN_TRANSFER}", 501)
        if path in _OWN_IN_DEV_MODE and DEV_MODE not in worker.abilities:
            return _lacks_dev_mode(path)
        return None
    body = _decoded(call.body or b"{}")
    return translation(body if isinstance(body, dict) else {}, worker)


def weight_version(info: bytes) -> str | None:
    """Return the weight version in an answer to `/weight_info`; None if there is none."""
    told = _decoded(info)
    version = told.get("weight_version") if isinstance(told, dict) else None
    return version if isinstance(version, str) else None


def _abort(body: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    rid = body.get("rid")
    if body.get("abort_all"):
        return _in_dev_mode(worker, "an abort of all", _post("/abort_requests", {}))
    if not isinstance(rid, str) or not rid:
        return EngineAnswer(200, b"")
    names = {"request_ids": engine_ids(rid)}
    if SCALE_OUT in worker.abilities:
        return _Steps(_post("/inference/v1/abort_requests", names), done=_empty)
    return _in_dev_mode(worker, "an abort (without --enable-scale-out)", _post("/abort_requests", names))


def _pause(body: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    mode = body.get("mode", "abort")
    if not isinstance(mode, str) or mode not in _PAUSES:
        return _refusal(f"`mode` is 'abort', 'retract' or 'in_place', not {mode!r}")
    calls = [_post(f"/pause?mode={_PAUSES[mode]}")]
    if mode == "retract":
        calls.append(_post("/reset_prefix_cache?reset_running_requests=true"))
    return _in_dev_mode(worker, "a pause", *calls, done=_message("Generation paused successfully."))


def _continue(_: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    return _in_dev_mode(worker, "a pause", _post("/resume"), done=_message("Generation continued successfully."))


def _flush(_: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    return _in_dev_mode(worker, "flushing the cache", _post("/reset_prefix_cache"), done=_flushed)


def _update_version(body: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    version = body.get("new_version")
    if not isinstance(version, str):
        return _refusal("`new_version` is missing, or no string")
    aborts = body.get("abort_all_requests", True) is not False
    if DEV_MODE not in worker.abilities and not aborts:
        return _updated(version)(None)  # the router remembers it, and gives it to replies that report none
    calls = [_post("/abort_requests", {})] if aborts else []
    calls.append(_post("/update_weight_version", {"new_version": version}))
    return _in_dev_mode(worker, "an abort of what runs (see `abort_all_requests`)", *calls, done=_updated(version))


def _update_from_disk(body: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(path, str):
        return _refusal("`model_path` is missing, or no string")
    calls = [_post("/abort_requests", {})] if body.get("abort_all_requests") else []
    calls.append(_post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}))
    if isinstance(version, str):
        calls.append(_post("/update_weight_version", {"new_version": version}))
    if body.get("flush_cache", True) is not False:
        calls.append(_post("/reset_prefix_cache"))
    return _in_dev_mode(worker, "weights from disk", *calls, done=_updated(version))


def _release_memory(body: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    tags = body.get("tags")
    if tags not in (None, [], ["kv_cache"]):
        return _refusal(f"a vLLM worker releases all of its memory, or the `kv_cache`, not {tags!r} alone")
    path = "/release_kv_cache_memory" if tags else "/sleep?level=1"
    return _in_dev_mode(worker, "sleep (with --enable-sleep-mode)", _post(path), done=_status)


def _resume_memory(body: Body, worker: KnownWorker) -> EngineExchange | EngineAnswer:
    tags = body.get("tags") or []
    query = "?" + urlencode([("tags", tag) for tag in tags]) if isinstance(tags, list) and tags else ""
    return _in_dev_mode(worker, "sleep (with --enable-sleep-mode)", _post(f"/wake_up{query}"), done=_status)


class _Adapter(_Steps):
    """A call about an adapter. A worker that takes no adapters lacks the path, and its 404 does not say why."""

    def whole(self, answers: Sequence[EngineAnswer]) -> EngineAnswer | EngineExchange:
        said = _decoded(answers[-1].body)
        if answers[-1].status == 404 and not (isinstance(said, dict) and "error" in said):
            settings = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            return _refusal(f"adapters need a vLLM worker that was started with {settings}", 501)
        return super().whole(answers)


def _adapter(path: str) -> _Translation:
    return lambda body, _: _Adapter(_post(path, body), done=_message("done"))


class _Description(_NoStream):
    """A worker's description of itself, as SGLang's `/get_model_info` and `/get_server_info` together."""

    def __init__(self, _: Body, worker: KnownWorker) -> None:
        self._version = worker.version
        self.calls: Sequence[EngineCall] = [EngineCall("GET", "/v1/models")]
        if DEV_MODE in worker.abilities:
            self.calls = [*self.calls, EngineCall("GET", "/weight_info")]

    def whole(self, answers: Sequence[EngineAnswer]) -> EngineAnswer | EngineExchange:
        models = _decoded(answers[0].body)
        if answers[0].status != 200 or len(answers) < len(self.calls) or not isinstance(models, dict):
            return answers[-1]
        cards = models.get("data")
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        info = {
            "model_path": card.get("root"),
            "served_model_name": card.get("id"),
            "tokenizer_path": card.get("root"),
            "is_generation": True,
            "weight_version": weight_version(answers[1].body) if len(answers) > 1 else self._version(),
            "context_length": card.get("max_model_len"),
        }
        return EngineAnswer(200, msgspec.json.encode(info))


_TRANSLATIONS: Mapping[tuple[str, str], _Translation] = {
    ("POST", "/abort_request"): _abort,
    ("POST", "/pause_generation"): _pause,
    ("POST", "/continue_generation"): _continue,
    ("GET", "/flush_cache"): _flush,
    ("POST", "/flush_cache"): _flush,
    ("POST", "/update_weight_version"): _update_version,
    ("POST", "/update_weights_from_disk"): _update_from_disk,
    ("GET", "/release_memory_occupation"): _release_memory,
    ("POST", "/release_memory_occupation"): _release_memory,
    ("GET", "/resume_memory_occupation"): _resume_memory,
    ("POST", "/resume_memory_occupation"): _resume_memory,
    ("POST", "/load_lora_adapter"): _adapter("/v1/load_lora_adapter"),
    ("POST", "/unload_lora_adapter"): _adapter("/v1/unload_lora_adapter"),
    ("GET", "/get_model_info"): _Description,
    ("GET", "/model_info"): _Description,
    ("GET", "/get_server_info"): _Description,
}


def _in_dev_mode(
    worker: KnownWorker, what: str, *calls: EngineCall, done: _Done | None = None
) -> EngineExchange | EngineAnswer:
    if DEV_MODE not in worker.abilities:
        return _lacks_dev_mode(what)
    return _Steps(*calls, done=done or _empty)


def _lacks_dev_mode(what: str) -> EngineAnswer:
    return _refusal(f"{what} needs a vLLM worker that was started with VLLM_SERVER_DEV_MODE=1", 501)


def _refusal(message: str, status: int = 400) -> EngineAnswer:
    kind = "BadRequestError" if status == 400 else "NotImplementedError"
    return EngineAnswer(status, msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}}))


def _post(target: str, body: Body | None = None) -> EngineCall:
    return EngineCall("POST", target, None if body is None else msgspec.json.encode(body))


def _empty(_: Any) -> EngineAnswer:
    return EngineAnswer(200, b"")


def _status(said: Any) -> EngineAnswer:
    """Pass on what a worker says of its sleep, see `asleep`."""
    return EngineAnswer(200, msgspec.json.encode(said) if isinstance(said, dict) else b"")


def _message(text: str) -> _Done:
    return lambda _: EngineAnswer(200, msgspec.json.encode({"success": True, "message": text, "status": "ok"}))


def _flushed(said: Any) -> EngineAnswer:
    done = isinstance(said, dict) and said.get("success") is True
    message = "Cache flushed." if done else "Flush cache failed."
    return EngineAnswer(200 if done else 400, msgspec.json.encode({"success": done, "message": message}))


def _updated(version: Any) -> _Done:
    message = "Succeeded to update model weights." if version is None else f"Weight version updated to {version}"
    return lambda _: EngineAnswer(
        200, msgspec.json.encode({"success": True, "message": message, "new_version": version})
    )


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except JSON_ERRORS:
        return None
