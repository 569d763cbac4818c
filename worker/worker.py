"""The embedded engine as a worker, over real HTTP, in a thread of this process.

    with EmbeddedWorker() as worker:
        ...                                   # send requests to worker.url
        assert worker.log[0].output_ids

Its replies can be scripted, stopped at any token, and made to go wrong:

    worker.script(ids=[1, 2, 3], finish="eos")
    worker.hold(after=2)
    ...                                       # send a request
    worker.wait_for_arrivals(1)
    worker.release()

All of its state belongs to the event loop of its thread. The methods here run in that loop, so there are no locks. `log` is the
truth about what was read and sampled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from worker.engine.engine import EmbeddedEngine, EngineJob
from worker.engine.generated_reply import GeneratedReply
from worker.engine.prefix_cache import PrefixCache
from worker.engine.records import WorkerLog
from worker.engine.sample import ReplyRequest, WorkerSample
from worker.engine.script import Fault, Finish, ReplyScript
from worker.engine.source import Source
from worker.http.control import Control
from worker.http.exchange import EngineApp, Handler
from worker.http.generate import GenerateHandler
from worker.http.serve import RestartableServer
from worker.http.wire import Wire
from worker.models.ngram import NGramModel, shipped_image_tokenizer, shipped_tokenizer
from worker.models.noise import NoiseSource
from worker.models.pool import Pool, PooledReply
from worker.models.sampler import ModelSource
from worker.models.sight import SeeingModel
from worker.options import Role, WorkerOptions
from worker.vllm.content_parts import ImageMemory
from worker.vllm.control import VllmControl
from worker.vllm.generate import VllmGenerateHandler
from worker.vllm.kept_caches import KeptCaches
from worker.vllm.reply import VllmReply
from worker.vllm.request import COMPLETIONS, GENERATE
from worker.vllm.wire import VllmWire
from worker.vocabulary import EngineVocabulary, load_vocabulary

T = TypeVar("T")

_PATIENCE = 30.0  # seconds that a call may take by default


class EmbeddedWorker:
    """A worker on a port of its own. Entering it starts it; `url` stays the same over `kill()` and `restart()`.

    Args:
        tokenizer_path: a Hugging Face tokenizer folder, or a hub id; None takes the shipped one. With the shipped tokenizer the
            worker samples the shipped language model, with any other one it samples noise. It takes images if the folder has a
            config.json with an `image_token_id`, as that of `shipped_image_tokenizer` has; then it always has a prefix cache,
            as each rank of a worker with several (`dp_size`) has.
        options: how the worker behaves.
        changes: options that differ from these, by name.

    Attributes:
        log: a record of each generation.
        calls: a record of each other request.
        out_of_range: the faults of requests outside of the valid range. A router must send no such request.
        wire: `stream_style` and `version_spans` can be changed while it serves.
        kept_caches: with vLLM's interface and a `kv_connector`, the caches that it keeps for other workers.
        control: `unhealthy` and `adapters` can be changed while it serves.
    """

    def __init__(
        self, tokenizer_path: str | Path | None = None, options: WorkerOptions | None = None, **changes: Any
    ) -> None:
        self.tokenizer_path = str(tokenizer_path or shipped_tokenizer())
        self.vocabulary = load_vocabulary(self.tokenizer_path)
        self._options = options = replace(options or WorkerOptions(), **changes)
        self._journal = WorkerLog(keep=options.keep_log)
        self.log = self._journal.generations
        self.calls = self._journal.requests
        self.out_of_range = self._journal.out_of_range
        self._engine = EmbeddedEngine(
            _sampler(self.tokenizer_path, self.vocabulary, options),
            options,
            [
                PrefixCache(on=options.prefix_cache or self.vocabulary.image_id is not None or options.dp_size > 1)
                for _ in range(options.dp_size)
            ],
        )
        self.wire = Wire(self.vocabulary, options)
        self._images = ImageMemory()
        self.kept_caches = KeptCaches(on=options.kv_connector, seconds=options.kv_lease)
        self.control: Control | VllmControl
        generate: Handler
        if options.interface == "vllm":
            self.control = VllmControl(self._engine, self.vocabulary, self.tokenizer_path, options, self.kept_caches)
            vllm_wire = VllmWire(self.vocabulary, self.tokenizer_path)
            generate = VllmGenerateHandler(
                *(self._engine, vllm_wire, self._journal, self.vocabulary, options, self._reset),
                memory=self._images,
                kept=self.kept_caches,
            )
        else:
            self.control = Control(self._engine, self.wire, self.vocabulary, self.tokenizer_path, options)
            generate = GenerateHandler(self._engine, self.wire, self._journal, self.vocabulary, options, self._reset)
        app = EngineApp(self._engine, self._journal, _generating(options), generate, self.control)
        self._server = RestartableServer(app, options.host, options.port)
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        up = "paused" if self._engine.paused else "up" if self._server.up else "down"
        return f"<EmbeddedWorker {self.url} {up}, {self.in_flight} in flight, {len(self.log)} logged>"

    @property
    def url(self) -> str:
        """Where the worker listens; with port 0 only once it has started."""
        return f"http://{self._server.host}:{self._server.port}"

    @property
    def port(self) -> int:
        return self._server.port

    # -- start and end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> EmbeddedWorker:
        self._thread = LoopThread("embedded-worker", self._options.new_loop)
        try:
            self._thread.call(self._server.listen())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._engine_call(self._engine.drop)
        self._call(self._server.close())
        assert self._thread is not None
        self._thread.stop()

    def kill(self) -> None:
        """End the worker at once: connections in flight are reset, later ones are refused. `restart()` brings it back."""
        self._call(self._end())

    def hanging(self) -> AbstractContextManager[None]:
        """Return a block in which the worker answers nothing, while its system accepts connections: as after SIGSTOP."""
        assert self._thread is not None
        return self._thread.hanging()

    def restart(self) -> None:
        """Come back on the same port, with an empty queue, no image and the same weights."""
        self._call(self._server.listen())

    async def _end(self) -> None:
        await self._server.die()
        self._engine.drop()
        self._images.forget()
        self.kept_caches.forget()

    def _reset(self, client: tuple[Any, ...]) -> None:
        self._server.reset(client)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> dict[str, EngineJob]:
        """The jobs in flight, by request id. The map changes under the reader, unless all jobs are held."""
        return dict(self._engine.jobs)

    @property
    def in_flight(self) -> int:
        """How many samples are queued or running."""
        return len(self._engine.jobs)

    @property
    def ranks(self) -> int:
        """The number of its data-parallel ranks."""
        return self._engine.ranks

    @property
    def received(self) -> int:
        """The number of requests to generate that have arrived, including refused ones."""
        return self._journal.received

    @property
    def weight_version(self) -> str:
        return self._engine.weight_version

    def set_weight_version(self, version: str) -> None:
        """Change the weights under the running samples, without a request."""
        self._engine_call(lambda: setattr(self._engine, "weight_version", version))

    def switch_role(self, role: Role) -> None:
        """Make it a prefill or a decode worker from now on, as SGLang's `/pd_role_switch` does."""
        self._engine_call(lambda: setattr(self._engine, "role", role))

    def forget_images(self) -> None:
        """Forget the images that a `uuid` named, as vLLM does when its cache is full: their bytes are wanted again."""
        self._engine_call(self._images.forget)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def script(
        self,
        ids: list[int] | tuple[int, ...] = (),
        *,
        text: str | None = None,
        finish: Finish | None = "eos",
        times: int = 1,
        **more: Any,
    ) -> None:
        """Queue the script of the next samples.

        One sample takes one script, in the order of arrival; each item of a batch takes its own. A stop or `max_new_tokens` of
        the request still ends the reply earlier. A request can carry the same keys in
        `sampling_params.custom_params["script"]`, which wins over the queue. A pool ignores scripts.

        Args:
            ids: the first sampled tokens.
            text: in place of ids: the worker's tokenizer encodes it, without special tokens.
            finish: how the reply ends; None goes on with tokens of the source.
            times: how many samples it is for.
            more: the other fields of `ReplyScript`.
        """
        chosen = tuple(self.vocabulary.encode_bare(text)) if text else tuple(ids)
        script = ReplyScript(chosen, finish, **more)
        self._engine_call(lambda: self._engine.scripts.extend([script] * times))

    def fault(self, fault: Fault, times: int = 1) -> None:
        """Make the next `times` samples misbehave, whatever their scripts are."""
        self._engine_call(lambda: self._engine.faults.extend([fault] * times))

    def forget_scripts(self) -> None:
        """Drop the scripts that no sample has taken."""
        self._engine_call(self._engine.scripts.clear)

    # -- gates instead of sleeps ---------------------------------------------------------------------------------------

    def hold(self, after: int = 0, *, rank: int | None = None) -> None:
        """Stop every sample that has `after` tokens: 0 keeps them in the waiting queue, more lets them run that far.

        `rank`: only the samples of this data-parallel rank.
        """
        self._engine_call(lambda: self._engine.hold(after, rank))

    def release(self, count: int | None = None) -> None:
        """Open the gate, or let only the first `count` samples that wait there go on."""
        self._engine_call(lambda: self._engine.release(count))

    def wait_for_arrivals(self, count: int, timeout: float = 20.0) -> None:
        """Return when `count` samples wait at the gate. This blocks: in a coroutine, use `asyncio.to_thread`."""
        self.wait_for(lambda: sum(job.waiting for job in self._engine.jobs.values()) >= count, timeout)

    def wait_until_idle(self, timeout: float = 20.0) -> None:
        """Return when nothing is in flight."""
        self.wait_for(lambda: not self._engine.jobs, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Return when `condition` holds. The worker's loop evaluates it after each token and each request.

        Raises:
            TimeoutError: it did not hold in time; the message has the worker's state.
        """
        try:
            self._call(asyncio.wait_for(self._engine.progress.wait_for(condition), timeout), timeout + 5)
        except TimeoutError:
            raise TimeoutError(f"{self!r}: not after {timeout:g} s") from None

    # -- into the loop -------------------------------------------------------------------------------------------------

    def _engine_call(self, action: Callable[[], object]) -> None:
        async def run() -> None:
            action()
            self._engine.changed()

        self._call(run())

    def _call(self, coroutine: Coroutine[Any, Any, None], timeout: float = 30.0) -> None:
        if self._thread is None:
            coroutine.close()
            raise RuntimeError("enter the worker first: with EmbeddedWorker(...) as worker")
        self._thread.call(coroutine, timeout)


def _sampler(path: str, vocabulary: EngineVocabulary, options: WorkerOptions) -> Callable[[ReplyRequest], WorkerSample]:
    """Return the function that begins a sample. The k-th sample has the same seed in every run."""
    if options.scripted:
        return partial(PooledReply, Pool(vocabulary, options.seed))
    reply = VllmReply if options.interface == "vllm" else GeneratedReply
    source: Source = NoiseSource(vocabulary, sample_from=options.sample_from, eos_share=options.eos_share)
    if path == str(shipped_tokenizer()):
        source = ModelSource(NGramModel.shipped(), vocabulary)
    elif path == str(shipped_image_tokenizer()):
        source = ModelSource(SeeingModel(NGramModel.shipped(), size=vocabulary.size), vocabulary)
    numbers = count()

    def begin(request: ReplyRequest) -> WorkerSample:
        seed = f"{options.seed}/{next(numbers)}" if request.handover is None else request.handover.seed
        return reply(vocabulary, source, request, seed)

    return begin


def _generating(options: WorkerOptions) -> Mapping[str, Sequence[str]]:
    """Return the methods that generate, by path."""
    if options.interface == "sglang":
        return {"/generate": ("POST", "PUT")}
    return {COMPLETIONS: ("POST",), **({GENERATE: ("POST",)} if options.scale_out else {})}


class LoopThread:
    """An event loop that runs from its construction to `stop`."""

    def __init__(self, name: str, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float = _PATIENCE) -> T:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Block the loop for the length of the block."""
        begun, over = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            over.wait()

        self._loop.call_soon_threadsafe(hang)
        begun.wait()
        try:
            yield
        finally:
            over.set()

    def stop(self) -> None:
        """End the loop. Tasks that still run are lost."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
