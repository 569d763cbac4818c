"""A worker double: SGLang's wire contract over real HTTP, with scripted or random ids, gates, and faults.

    with FakeWorker(vocabulary("qwen")) as worker:
        worker.script(ids=[1, 2, 3], finish="eos")
        ...                                   # talk to worker.url
        assert worker.log[0].output_ids == [1, 2, 3, eos]
        assert worker.dead is None

It runs in a thread with an event loop of its own, and all of its state belongs to that loop: the methods a test calls
go through it, so there are no locks, and nothing here sleeps. `log` is the truth to compare with. It imports nothing of
the code under test; where it differs from a real SGLang, the real one is right (`integration/test_real_sglang.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs

import uvicorn

from tests.support.fake_engine import (
    Detokenizer,
    Finish,
    FinishReason,
    Sample,
    Sampling,
    Script,
    load_vocabulary,
    reply_interval,
)

StreamStyle = Literal["cumulative", "incremental", "mixed"]
Fault = Literal[
    "not_json",  # HTTP 200 and something else
    "no_done",  # a stream that ends well, without [DONE]; a reply without its second half
    "dies",  # the connection is reset in the middle of the answer
    "no_answer",  # not a byte until the client goes away
    "http_500",
    "http_503",
    "error_event",  # in a stream: the error after the first event; otherwise HTTP 503
    "abort_503",  # an abort with a status code: HTTP 503, and in a stream an abort event
    "wrong_completion_tokens",
    "wrong_prompt_tokens",
    "wrong_text",
    "wrong_logprob_ids",
    "nan_logprob",  # the literal NaN, which Python's json reads
    "null_logprob",  # how orjson, and so SGLang, prints a NaN
    "missing_logprob",
    "no_logprobs",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

_SAMPLING_FIELDS = [
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
]
_INTEGERS = ("max_new_tokens", "min_new_tokens", "n", "top_k", "stream_interval")
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass
class Record:
    """One reply, as it was made: what a test compares with."""

    rid: str
    body: dict[str, Any]  # the request as received (of a batch: the whole of it)
    raw: bytes
    headers: dict[str, str]
    index: int  # the reply's place in the batch
    input_ids: list[int]  # what the model consumed
    from_text: bool  # the worker had to encode a text itself, which a router must not let happen
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # per output token
    text: str = ""
    finish_reason: FinishReason | None = None
    disconnected: bool = False


@dataclass
class Call:
    """Any request that is not a generation."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw) if self.raw else None


class _Refused(Exception):
    """A request that is wrong, in one of SGLang's shapes."""

    def __init__(self, message: str, shape: Literal["message", "error", "object"] = "message") -> None:
        super().__init__(message)
        self.message = message
        self.shape = shape

    def body(self) -> dict[str, Any]:
        if self.shape == "object":
            return {"object": "error", "message": self.message, "type": "Bad Request", "param": None, "code": 400}
        return {"error": self.message if self.shape == "error" else {"message": self.message}}


class _Broken(Exception):
    """A request at which SGLang's front end fails: HTTP 500 as plain text, and the connection is closed."""


class _Dead(Exception):
    """This request was one of those that end a worker."""


@dataclass(eq=False)
class _Job:
    """A sample on its way: its record, its place at the gate, and what cuts it short."""

    sample: Sample
    record: Record
    options: dict[str, Any]
    fault: str | None
    aborted: bool = False
    admitted: bool = False  # out of the waiting queue
    waiting: bool = False  # stands at the gate
    released: bool = False


class FakeWorker:
    """A worker on an ephemeral port. Enter it to start it; `url` is stable over `kill()` and `restart()`."""

    def __init__(
        self,
        tokenizer_path: str | Path,
        *,
        stream_style: StreamStyle = "cumulative",
        stream_interval: int = 1,
        seed: int = 0,
        eos_share: float = 0.0,
        sample_from: tuple[int, ...] | None = None,
        weight_version: str = "default",
        version_spans: bool = True,
        context_length: int = 32768,
        health_timeout: float = 20.0,
        token_delay: float = 0.0,
    ) -> None:
        """Set a worker up.

        Args:
            tokenizer_path: a Hugging Face tokenizer folder.
            stream_style: cumulative (the default of SGLang), incremental (`--incremental-streaming-output`), or mixed
                (up to 0.5.5: `output_ids` are deltas, the rest is cumulative).
            stream_interval: tokens per event.
            seed: of the random ids; the k-th sample of a worker is the same in every run.
            eos_share: how likely a random token is the EOS.
            sample_from: the ids to draw from; if None, ordinary ones such that nearly no reply is what re-encoding its
                text gives.
            weight_version: the first version.
            version_spans: False leaves `weight_versions` out, as before 0.5.19.
            context_length: longer prompts are refused.
            health_timeout: how long `/health` waits for a paused engine before its 503.
            token_delay: seconds per token, where a test measures load. 0 still lets others run between two tokens.
        """
        self.vocabulary = load_vocabulary(str(tokenizer_path))
        self.tokenizer_path = str(tokenizer_path)
        self.log: list[Record] = []
        self.calls: list[Call] = []
        self.dead: str | None = None  # why the worker died, if a request killed it
        self.url = ""
        self.port = 0
        self.weight_version = weight_version
        self.unhealthy = False  # /health answers 503
        self.skip_tokenizer_init = False  # as /server_info tells it
        self._style: StreamStyle = stream_style
        self._interval = stream_interval
        self._seed = seed
        self._eos_share = eos_share
        self._pool = sample_from
        self._spans = version_spans
        self._context_length = context_length
        self._health_timeout = health_timeout
        self._token_delay = token_delay
        self._scripts: deque[Script] = deque()
        self._faults: deque[str] = deque()
        self._jobs: dict[str, _Job] = {}
        self._count = 0
        self._hold: int | None = None
        self._paused = False
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._changed = asyncio.Condition()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = f"dead: {self.dead}" if self.dead else "paused" if self._paused else "up" if self._server else "down"
        return (
            f"<FakeWorker {self.url or '(not started)'} {state}, {len(self._jobs)} in flight, {len(self.log)} logged>"
        )

    # -- for tests: life ------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeWorker:
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-worker", daemon=True)
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_exc: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        assert self._thread is not None
        self._thread.join(10)
        self._loop.close()

    def kill(self, reason: str | None = None) -> None:
        """End it at once: what is in flight is reset, later connections are refused. `restart()` brings it back."""
        self._call(self._die(reason))

    def restart(self) -> None:
        """Come back on the same port, with an empty queue and the same weights."""
        self._call(self._listen())

    # -- for tests: what it samples -------------------------------------------------------------------------------

    def script(
        self,
        ids: list[int] | tuple[int, ...] = (),
        *,
        text: str | None = None,
        finish: Finish | None = "eos",
        logprobs: tuple[float, ...] = (),
        fault: Fault | None = None,
        extra: dict[str, Any] | None = None,
        extra_meta: dict[str, Any] | None = None,
        times: int = 1,
    ) -> None:
        """Queue what the next sample shall be (the next of all that arrive; of a batch, one item each).

        `text` is encoded by the worker's tokenizer without special tokens. A stop or `max_new_tokens` of the request
        still ends the reply earlier. `finish=None` goes on with random ids. A single request can carry the same keys
        itself, in `sampling_params.custom_params["fake"]`, which wins over the queue.
        """
        chosen = tuple(self.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids) if text else tuple(ids)
        script = Script(chosen, finish, tuple(logprobs), fault, extra or {}, extra_meta or {})
        self._call(self._do(lambda: self._scripts.extend([script] * times)))

    def fault(self, fault: Fault, times: int = 1) -> None:
        """The next `times` samples misbehave, whatever they say."""
        self._call(self._do(lambda: self._faults.extend([fault] * times)))

    def set_weight_version(self, version: str) -> None:
        """Change the weights under whatever is running, without a request."""
        self._call(self._do(lambda: setattr(self, "weight_version", version)))

    # -- for tests: gates instead of sleeps -----------------------------------------------------------------------

    def hold(self, after: int = 0) -> None:
        """Stop every sample that has `after` tokens: 0 keeps them in the waiting queue, more lets them run that far."""
        self._call(self._do(lambda: setattr(self, "_hold", after)))

    def release(self, count: int | None = None) -> None:
        """Open the gate, or let only the first `count` of those who wait there go on."""
        self._call(self._release(count))

    def wait_for_arrivals(self, count: int, timeout: float = 20.0) -> None:
        """Return when `count` samples stand at the gate. Blocks: in a coroutine, use `asyncio.to_thread`."""
        self.wait_for(lambda: sum(job.waiting for job in self._jobs.values()) >= count, timeout)

    def wait_until_idle(self, timeout: float = 20.0) -> None:
        """Return when nothing is in flight."""
        self.wait_for(lambda: not self._jobs, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Return when `condition` holds; it is looked at in the worker's loop, after each token and each request.

        Raises:
            TimeoutError: it never did; the message tells the worker's state.
        """

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(condition)

        try:
            self._call(asyncio.wait_for(wait(), timeout), timeout + 5)
        except TimeoutError:
            raise TimeoutError(f"{self!r}: not after {timeout:g} s") from None

    @property
    def in_flight(self) -> int:
        """How many samples are queued or running."""
        return len(self._jobs)

    # -- the loop's side: life ------------------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:
        if self._thread is None:
            raise RuntimeError("enter the worker first: with FakeWorker(...) as worker")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    async def _do(self, action: Callable[[], object]) -> None:
        action()
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _listen(self) -> None:
        # With its protocol number: asyncio turns Nagle's algorithm off only then, and a reply in two writes would take 40 ms.
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.dead, self._paused = None, False
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=5,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for this, and it takes a few turns only
            await asyncio.sleep(0)

    async def _die(self, reason: str | None) -> None:
        if reason is not None:
            self.dead = reason
        if self._server is None:
            return
        server, self._server = self._server, None
        while _accepting():  # noqa: ASYNC110 - asyncio has no event for this, and it takes a few turns only
            await asyncio.sleep(0)
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for job in self._jobs.values():
            job.aborted = True
        server.force_exit = server.should_exit = True
        await self._notify()

    async def _close(self) -> None:
        tasks = list(self._server.server_state.tasks) if self._server else []
        await self._die(None)
        if tasks:
            await asyncio.wait(tasks, timeout=1)  # they see that their client is gone
        # uvicorn's own way out takes two tenths of a second, for connections that are already cut here.
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _release(self, count: int | None) -> None:
        if count is None:
            self._hold = None
        else:
            for job in [job for job in self._jobs.values() if job.waiting and not job.released][:count]:
                job.released = True
        await self._notify()

    # -- the loop's side: requests --------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while (message := await receive())["type"] == "http.request":
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        else:
            return
        exchange = _Exchange(scope, receive, send, raw)
        try:
            if scope["path"] == "/generate" and scope["method"] in ("POST", "PUT"):
                await self._generate(exchange)
            else:
                await self._other(exchange)
        except _Refused as refused:
            await exchange.answer(400, refused.body())
        except _Broken:
            await exchange.answer(500, b"Internal Server Error", "text/plain; charset=utf-8")
        except _Dead as death:
            await self._die(str(death))
        finally:
            await self._notify()

    async def _generate(self, exchange: _Exchange) -> None:
        body = exchange.json_object()
        stream = bool(body.get("stream"))
        try:
            jobs, batch = self._admit(exchange, body)
        except _Refused as refused:
            if not stream or refused.shape != "message":
                raise
            error = {"message": refused.message, "type": "invalid_request_error", "code": 400, "retryable": False}
            await exchange.start_stream()
            await exchange.event({"error": error})
            await exchange.end_stream()
            return
        await self._notify()
        work = asyncio.ensure_future(
            self._stream(exchange, jobs, batch) if stream else self._reply(exchange, jobs, batch)
        )
        gone = asyncio.ensure_future(exchange.disconnected())
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                for job in jobs:
                    job.record.disconnected = True
            else:
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            for job in jobs:
                self._retire(job)

    def _retire(self, job: _Job) -> None:
        if self._jobs.get(job.record.rid) is job:
            del self._jobs[job.record.rid]
        if job.sample.finish is None:
            job.sample.abort()
        job.record.output_ids = list(job.sample.output_ids)
        job.record.logprobs = list(job.sample.logprobs)
        job.record.versions = list(job.sample.versions)
        job.record.finish_reason = job.sample.finish

    def _admit(self, exchange: _Exchange, body: dict[str, Any]) -> tuple[list[_Job], bool]:
        """Check a request in SGLang's order and make its jobs, prompt-major; tell whether the answer is a list."""
        prompts, batch, from_text = self._prompts(body)
        params = body.get("sampling_params")
        if params is not None and not isinstance(params, dict | list):
            raise _Refused(f"invalid type: {_kind(params)}, expected a map", "error")
        for one in params if isinstance(params, list) else [params or {}]:
            _check_sampling(one)
        rids = _rids(body.get("rid"), len(prompts), batch)
        jobs: list[_Job] = []
        for number, prompt in enumerate(prompts):
            mine = params[number] if isinstance(params, list) else (params or {})
            sampling = Sampling.parse(mine)
            if not prompt:
                raise _Dead("a request with an empty prompt")
            if any(not 0 <= token < self.vocabulary.size for token in prompt):
                raise _Dead("a request with an id outside the vocabulary")
            if len(prompt) >= self._context_length:
                limit = f"longer than the model's context length ({self._context_length} tokens)."
                raise _Refused(f"The input ({len(prompt)} tokens) is {limit}")
            rid = rids[number]
            if rid in self._jobs:
                raise _Refused(f"Duplicate request ID detected: {rid}")
            for _ in range(sampling.n):
                name = rid if rid is not None and sampling.n == 1 else uuid.uuid4().hex
                record = Record(name, body, exchange.raw, exchange.headers, len(jobs), list(prompt), from_text)
                jobs.append(self._job(record, sampling, mine, body, number))
        for job in jobs:
            self._jobs[job.record.rid] = job
            self.log.append(job.record)
        return jobs, batch or len(jobs) > 1

    def _job(
        self, record: Record, sampling: Sampling, params: dict[str, Any], body: dict[str, Any], number: int
    ) -> _Job:
        custom = params.get("custom_params")
        own = custom.get("fake") if isinstance(custom, dict) else None
        if own is not None:
            own = {"finish": "eos", **own}
            own["ids"], own["logprobs"] = tuple(own.get("ids", ())), tuple(own.get("logprobs", ()))
            script = Script(**own)
        else:
            script = self._scripts.popleft() if self._scripts else Script()
        fault = self._faults.popleft() if self._faults else script.fault
        rng = random.Random(f"{self._seed}/{self._count}")
        self._count += 1
        sample = Sample(self.vocabulary, record.input_ids, sampling, script, rng, self._pool, self._eos_share)
        names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
        options = {name: _item(body.get(name), number) for name in names}
        options["return_prompt_token_ids"] = bool(body.get("return_prompt_token_ids"))
        return _Job(sample, record, options, fault)

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool, bool]:
        text, ids = body.get("text"), body.get("input_ids")
        if text is None and ids is None:
            raise _Refused("Either text, input_ids or input_embeds should be provided.")
        if text is not None and not (
            isinstance(text, str) or (isinstance(text, list) and all(isinstance(one, str) for one in text))
        ):
            raise _Refused("Input should be a valid string", "object")
        if ids is not None:
            flat = (
                [token for one in ids for token in (one if isinstance(one, list) else [one])]
                if isinstance(ids, list)
                else None
            )
            if flat is None or any(not isinstance(token, int) or isinstance(token, bool) for token in flat):
                raise _Refused("Value error, elements must be int or list", "object")
        # SGLang reads off `text` whether it is a batch, and takes the ids all the same.
        batch = isinstance(text, list) if text is not None else bool(ids) and isinstance(ids[0], list)
        if ids is not None:
            if batch != (bool(ids) and isinstance(ids[0], list)):
                raise _Broken("text and input_ids differ in being a batch")
            if not ids:
                raise _Refused("input_ids cannot be empty.")
            return (ids if batch else [ids]), batch, False
        texts = text if isinstance(text, list) else [text]
        return [self.vocabulary.encode(one) for one in texts], batch, True

    # -- the loop's side: sampling --------------------------------------------------------------------------------

    async def _gate(self, job: _Job) -> None:
        """Wait while the engine is paused or the sample has come as far as `hold` lets it."""

        def open_() -> bool:
            held = self._hold is not None and len(job.sample.output_ids) >= self._hold and not job.released
            return job.aborted or not (held or self._paused)

        if not open_():
            job.waiting = True
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(open_)
            job.waiting = False

    async def _chunks(self, job: _Job, *, stream: bool) -> AsyncIterator[_Chunk]:
        """Run one sample and yield what SGLang would pass on, the last one with the finish reason."""
        sample, record = job.sample, job.record
        detokenizer = Detokenizer(self.vocabulary, sample.prompt_ids, sample.sampling)
        interval = reply_interval(sample.sampling, stream=stream, default=self._interval)
        sent = 0
        await self._gate(job)
        if job.aborted:
            sample.finish = {"type": "abort", "message": "Abort in waiting queue"}
            yield _Chunk("", 0, queued=True)
            return
        job.admitted = True
        while True:
            if sample.finish is None:
                await self._gate(job)
                if job.aborted:
                    sample.abort()
                else:
                    sample.step(self.weight_version)
                    await asyncio.sleep(self._token_delay)
                    await self._notify()
            count = len(sample.output_ids)
            due = (sent == 0 or count - sent >= interval) if stream else count % interval == 0
            if sample.finish is not None or (due and not (stream and sample.may_be_stopping())):
                record.text += detokenizer.push(sample.output_ids[sent:], sample.finish)
                sent = count
                yield _Chunk(record.text, count)
            if sample.finish is not None:
                return

    def _payload(self, job: _Job, chunk: _Chunk, since: _Chunk | None, index: int | None) -> dict[str, Any]:
        """The JSON of a reply, or of a stream's event if `since` is what was sent before it."""
        sample, count = job.sample, chunk.count
        style = self._style if since is not None else "cumulative"
        ids_from = 0 if since is None or style == "cumulative" else since.count
        rest_from = since.count if since is not None and style == "incremental" else 0
        text = chunk.text[len(since.text) :] if since is not None and style == "incremental" else chunk.text
        finish = sample.finish if count == len(sample.output_ids) else None
        logprobs = self._logprobs(job, count)
        if chunk.queued:
            meta: dict[str, Any] = {
                "id": job.record.rid,
                "finish_reason": finish,
                "weight_version": self.weight_version,
                "e2e_latency": 0.01,
                **logprobs,
                "completion_tokens": 0,
            }
        else:
            for key in ("output_token_logprobs", "output_top_logprobs"):
                if key in logprobs:
                    logprobs[key] = logprobs[key][rest_from:]
            meta = {
                "id": job.record.rid,
                "finish_reason": finish,
                "prompt_tokens": len(sample.prompt_ids),
                "weight_version": self.weight_version,
                "num_retractions": 0,
                **logprobs,
                "reasoning_tokens": 0,
                "completion_tokens": count,
                "cached_tokens": 0,
                "cached_tokens_details": None,
                "dp_rank": None,
            }
            if since is None or since.count == 0:
                meta["response_sent_to_client_ts"] = time.time()  # once per request: in a stream, in its first event
            if finish is not None:
                if self._spans:
                    meta["weight_versions"] = sample.version_spans(self.weight_version)
                    meta["weight_version"] = meta["weight_versions"][-1]["version"]
                meta["e2e_latency"] = 0.01
        payload: dict[str, Any] = {"text": text, "output_ids": sample.output_ids[ids_from:count], "meta_info": meta}
        if job.options["return_prompt_token_ids"]:
            payload["prompt_token_ids"] = list(sample.prompt_ids)
        if index is not None:
            payload["index"] = index
        payload.update(sample.script.extra)
        meta.update(sample.script.extra_meta)
        _spoil(payload, job.fault)
        return payload

    def _logprobs(self, job: _Job, count: int) -> dict[str, Any]:
        if not job.options["return_logprob"]:
            return {}
        sample, start = job.sample, job.options["logprob_start_len"]
        prompt = sample.prompt_ids
        text = self._token_text if job.options["return_text_in_logprobs"] else lambda _token: None
        first = len(prompt) if start is None or start < 0 else start
        inputs = [[None if at == 0 else -1.5, prompt[at], text(prompt[at])] for at in range(first, len(prompt))]
        pairs = zip(sample.logprobs[:count], sample.output_ids[:count], strict=True)
        outputs: list[list[Any]] = [[value, token, text(token)] for value, token in pairs]
        found: dict[str, Any] = {
            "input_token_logprobs": inputs,
            "output_token_logprobs": outputs,
            "output_token_logprobs_length": count,
        }
        if top := job.options["top_logprobs_num"]:
            found["input_top_logprobs"] = [[entry] * top for entry in inputs]
            found["output_top_logprobs"] = [[entry] * top for entry in outputs]
        return found

    def _token_text(self, token: int) -> str:
        return self.vocabulary.decode([token], skip_special_tokens=False)

    # -- the loop's side: answers ---------------------------------------------------------------------------------

    async def _reply(self, exchange: _Exchange, jobs: list[_Job], batch: bool) -> None:
        async def run(job: _Job) -> dict[str, Any]:
            last = _Chunk("", 0)
            async for chunk in self._chunks(job, stream=False):
                last = chunk
            self._retire(job)
            return self._payload(job, last, None, None)

        fault = next((job.fault for job in jobs if job.fault), None)
        if fault == "no_answer":
            await asyncio.Event().wait()
        if fault in ("http_503", "error_event", "abort_503"):
            error = {
                "object": "error",
                "message": "The request queue is full.",
                "type": "503",
                "param": None,
                "code": 503,
            }
            await exchange.answer(503, error)
            return
        if fault == "http_500":
            await exchange.answer(500, b"Internal Server Error", "text/plain; charset=utf-8")
            return
        payloads = await asyncio.gather(*(run(job) for job in jobs))
        content = _dump(payloads if batch else payloads[0])
        if fault == "not_json":
            await exchange.answer(200, b"<html>this is not JSON</html>", "application/json")
        elif fault == "no_done":
            await exchange.answer(200, content[: len(content) // 2])
        elif fault == "dies":
            await exchange.start(200, "application/json")
            await exchange.send_part(content[: len(content) // 2])
            self._reset(exchange)
        else:
            await exchange.answer(200, content)

    async def _stream(self, exchange: _Exchange, jobs: list[_Job], batch: bool) -> None:
        fault = next((job.fault for job in jobs if job.fault), None)
        if fault == "no_answer":
            await asyncio.Event().wait()
        if fault in ("http_500", "http_503"):
            await exchange.answer(
                int(fault[-3:]), {"object": "error", "message": "The request queue is full.", "code": 503}
            )
            return
        await exchange.start_stream()
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def run(job: _Job, index: int | None) -> None:
            since = _Chunk("", 0)
            async for chunk in self._chunks(job, stream=True):
                if job.sample.finish is not None:
                    self._retire(job)
                queue.put_nowait(self._payload(job, chunk, since, index))
                since = chunk
            queue.put_nowait(None)

        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(jobs):
                group.create_task(run(job, number if batch else None))
            open_, sent = len(jobs), 0
            while open_:
                payload = await queue.get()
                if payload is None:
                    open_ -= 1
                    continue
                if fault == "abort_503":
                    reason = {
                        "type": "abort",
                        "message": "The request queue is full.",
                        "status_code": 503,
                        "err_type": None,
                    }
                    payload["meta_info"]["finish_reason"] = reason
                await exchange.event(payload)
                sent += 1
                if fault == "not_json":
                    await exchange.send_part(b"data: {this is not JSON\n\n")
                elif fault == "error_event":
                    error = {"message": "the engine gave up", "type": "internal_error", "code": 500, "retryable": False}
                    await exchange.event({"error": error})
                elif fault == "dies":
                    self._reset(exchange)
                if fault in ("error_event", "dies", "no_done", "abort_503"):
                    for job in jobs:
                        job.aborted = True
                    await self._notify()
                    break
        if fault == "no_done":
            await exchange.send_part(b"", last=True)
        elif fault != "dies":
            await exchange.end_stream()

    def _reset(self, exchange: _Exchange) -> None:
        """Cut this exchange's connection, and no other."""
        for connection in list(self._server.server_state.connections) if self._server else []:
            if getattr(connection, "client", None) == exchange.client:
                connection.transport.abort()

    # -- the loop's side: everything that is not a generation -----------------------------------------------------

    async def _other(self, exchange: _Exchange) -> None:
        path, method = exchange.path, exchange.method
        self.calls.append(Call(method, path, exchange.query, exchange.headers, exchange.raw))
        handlers: dict[str, Callable[[_Exchange], Awaitable[None]]] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/ping": self._ping,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weight_version": self._update_weight_version,
            "/v1/models": self._models,
        }
        if path in handlers:
            await handlers[path](exchange)
        elif path.startswith("/update_weights_from_"):
            await self._update_weights(exchange)
        elif path == "/echo":
            # Not SGLang's: shows what of a request arrives at a worker, for a router's catch-all.
            await exchange.answer(200, exchange.raw, exchange.headers.get("content-type", "application/octet-stream"))
        else:
            await exchange.answer(404, {"detail": "Not Found"})

    async def _health(self, exchange: _Exchange) -> None:
        async def resumed() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._paused)

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(resumed(), self._health_timeout)
        await exchange.answer(503 if self.unhealthy or self._paused else 200, b"", None)

    async def _ping(self, exchange: _Exchange) -> None:
        await exchange.answer(503 if self.unhealthy else 200, b"", None)

    async def _ready(self, exchange: _Exchange) -> None:
        await exchange.answer(503 if self.unhealthy or self._paused else 200, b"", None)

    async def _model_info(self, exchange: _Exchange) -> None:
        info = {
            "model_path": self.tokenizer_path,
            "served_model_name": self.tokenizer_path,
            "tokenizer_path": self.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "fake",
            "architectures": ["FakeForCausalLM"],
        }
        await exchange.answer(200, info)

    async def _server_info(self, exchange: _Exchange) -> None:
        info = {
            "model_path": self.tokenizer_path,
            "tokenizer_path": self.tokenizer_path,
            "skip_tokenizer_init": self.skip_tokenizer_init,
            "context_length": self._context_length,
            "stream_interval": self._interval,
            "incremental_streaming_output": self._style == "incremental",
            "weight_version": self.weight_version,
            "version": "0.5.23",
        }
        await exchange.answer(200, info)

    async def _models(self, exchange: _Exchange) -> None:
        card = {
            "id": self.tokenizer_path,
            "object": "model",
            "owned_by": "sglang",
            "max_model_len": self._context_length,
        }
        await exchange.answer(200, {"object": "list", "data": [card]})

    async def _abort_request(self, exchange: _Exchange) -> None:
        body = exchange.json_object() if exchange.raw else {}
        rid = body.get("rid") or ""
        if body.get("abort_all"):
            self._abort(lambda _name: True)
        elif rid in self._jobs:
            # The front end wants to know the rid; the scheduler then takes all that begin with it.
            self._abort(lambda name: name.startswith(rid))
        await exchange.answer(200, b"", None)

    def _abort(self, matches: Callable[[str], bool]) -> None:
        for name, job in self._jobs.items():
            if matches(name):
                job.aborted = True

    async def _pause(self, exchange: _Exchange) -> None:
        mode = (exchange.json_object() if exchange.raw else {}).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise _Refused("Input should be 'abort', 'retract' or 'in_place'", "object")
        self._paused = True
        if mode == "abort":
            self._abort(lambda _name: True)
        await exchange.answer(200, {"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, exchange: _Exchange) -> None:
        self._paused = False
        await exchange.answer(200, {"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, exchange: _Exchange) -> None:
        busy = bool(self._jobs)
        message = b"Flush cache failed.\n" if busy else b"Cache flushed.\n"
        await exchange.answer(400 if busy else 200, message, None)

    async def _update_weight_version(self, exchange: _Exchange) -> None:
        body = exchange.json_object()
        if not isinstance(body.get("new_version"), str):
            raise _Refused("Field required: new_version", "object")
        if body.get("abort_all_requests", True):
            self._abort(lambda _name: True)
        version = body["new_version"]
        self.weight_version = version
        message = f"Weight version updated to {version}"
        await exchange.answer(200, {"success": True, "message": message, "new_version": version})

    async def _update_weights(self, exchange: _Exchange) -> None:
        body = exchange.json_object()
        if body.get("abort_all_requests"):
            self._abort(lambda _name: True)
        if not self._paused:
            # The engine's writer lock: an update waits for what is running.
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._jobs)
        if body.get("weight_version") is not None:
            self.weight_version = str(body["weight_version"])
        await exchange.answer(200, {"success": True, "message": "Success", "num_paused_requests": 0})


@dataclass(frozen=True)
class _Chunk:
    """A sample as far as it has been decoded: all of its text, and how many tokens that is."""

    text: str
    count: int
    queued: bool = False  # it never ran


class _Exchange:
    """One HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, raw: bytes) -> None:
        self.raw = raw
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query = parse_qs(scope["query_string"].decode("latin-1"))
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.client = tuple(scope["client"])
        self._receive = receive
        self._send = send

    def json_object(self) -> dict[str, Any]:
        if self.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise _Refused("Input should be a dictionary or an instance of GenerateReqInput", "object")
        try:
            body = json.loads(self.raw)
        except ValueError as error:
            raise _Refused(f"JSON decode error: {error}", "object") from None
        if not isinstance(body, dict):
            raise _Refused("Input should be a dictionary or an instance of GenerateReqInput", "object")
        return body

    async def disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, content_type: str | None, length: int | None = None) -> None:
        headers = [(b"content-type", content_type.encode())] if content_type else []
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_part(self, content: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": not last})

    async def answer(self, status: int, content: Any, content_type: str | None = "application/json") -> None:
        raw = content if isinstance(content, bytes) else _dump(content)
        await self.start(status, content_type, len(raw))
        await self.send_part(raw, last=True)

    async def start_stream(self) -> None:
        await self.start(200, "text/event-stream; charset=utf-8")

    async def event(self, payload: dict[str, Any]) -> None:
        await self.send_part(b"data: " + _dump(payload) + b"\n\n")

    async def end_stream(self) -> None:
        await self.send_part(b"data: [DONE]\n\n")
        await self.send_part(b"", last=True)


def _dump(payload: Any) -> bytes:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()


def _item(value: Any, number: int) -> Any:
    return value[number] if isinstance(value, list) else value


def _accepting() -> bool:
    """Whether a connection is on its way from its acceptance to its protocol: asyncio loses it if its server closes then."""
    return any(getattr(task.get_coro(), "__name__", "") == "_accept_connection2" for task in asyncio.all_tasks())


def _kind(value: Any) -> str:
    return f"string {json.dumps(value)}" if isinstance(value, str) else type(value).__name__


def _check_sampling(params: Any) -> None:
    if not isinstance(params, dict):
        raise _Refused(f"invalid type: {_kind(params)}, expected a map", "error")
    if "n" in params and params["n"] is None:
        raise _Broken("n is null")
    for key, value in params.items():
        if key not in _SAMPLING_FIELDS:
            names = ", ".join(f"`{name}`" for name in _SAMPLING_FIELDS)
            raise _Refused(f"unknown field `{key}`, expected one of {names}", "error")
        if value is None:
            continue
        if key in _INTEGERS and (not isinstance(value, int) or isinstance(value, bool)):
            raise _Refused(f"invalid type: {_kind(value)}, expected i64", "error")
        if key in _NUMBERS and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise _Refused(f"invalid type: {_kind(value)}, expected f64", "error")
    if (params.get("temperature") or 0) < 0:
        raise _Refused(f"temperature must be a non-negative finite number, got {params['temperature']}.")
    if (params.get("max_new_tokens") or 0) < 0:
        raise _Refused(f"max_new_tokens must be at least 0, got {params['max_new_tokens']}.")


def _rids(rid: Any, count: int, batch: bool) -> list[str | None]:
    """One request id per prompt: a list as it is, a string for a batch with the item's number."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{number}" for number in range(count)] if batch else [rid]
    if not isinstance(rid, list) or len(rid) != count:
        raise _Refused("The specified rids length mismatch with the batch_size for batch processing.")
    if len(set(rid)) != count:
        raise _Refused(f"Duplicate request IDs detected within the request: {rid}")
    return list(rid)


def _spoil(payload: dict[str, Any], fault: str | None) -> None:
    meta = payload["meta_info"]
    logprobs = meta.get("output_token_logprobs")
    match fault:
        case "wrong_completion_tokens":
            meta["completion_tokens"] += 1
        case "wrong_prompt_tokens":
            meta["prompt_tokens"] = meta.get("prompt_tokens", 0) + 1
        case "wrong_text":
            payload["text"] = "What these ids do not say. " + payload["text"]
        case "wrong_logprob_ids" if logprobs:
            logprobs[-1] = [logprobs[-1][0], logprobs[-1][1] ^ 1, logprobs[-1][2]]
        case "nan_logprob" if logprobs:
            logprobs[-1] = [float("nan"), *logprobs[-1][1:]]
        case "null_logprob" if logprobs:
            logprobs[-1] = [None, *logprobs[-1][1:]]
        case "missing_logprob" if logprobs:
            logprobs.pop()
            meta["output_token_logprobs_length"] = len(logprobs)
        case "no_logprobs":
            for key in [key for key in meta if "logprobs" in key]:
                del meta[key]
