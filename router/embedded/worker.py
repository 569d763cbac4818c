"""The embedded engine as a worker, over real HTTP, in a thread of this process.

    with EmbeddedWorker() as worker:
        ...                                   # talk to worker.url
        assert worker.log[0].output_ids

What it says can be scripted, stopped at any token, and made to go wrong:

    worker.script(ids=[1, 2, 3], finish="eos")
    worker.hold(after=2)
    ...                                       # ask
    worker.wait_for_arrivals(1)
    worker.release()

All of its state belongs to its thread's event loop: the methods here go through it, so there are no locks. `log` is the truth
about what was read and sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from router.embedded.engine.engine import Engine, Job
from router.embedded.engine.faults import Fault
from router.embedded.engine.records import Call, Record
from router.embedded.engine.script import Finish, Script
from router.embedded.engine.source import Source
from router.embedded.http.app import EngineApp
from router.embedded.http.control import Control
from router.embedded.http.serve import Server
from router.embedded.http.wire import StreamStyle, Wire
from router.embedded.loop_thread import LoopThread
from router.embedded.models.ngram import NGramModel, shipped_tokenizer
from router.embedded.models.noise import NoiseSource
from router.embedded.models.pool import Pool
from router.embedded.models.sampler import ModelSource
from router.embedded.models.vocabulary import load_vocabulary


class EmbeddedWorker:
    """A worker on a port of its own. Enter it to start it; `url` is stable over `kill()` and `restart()`."""

    def __init__(
        self,
        tokenizer_path: str | Path | None = None,
        *,
        scripted: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
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
        keep_log: bool = True,
        on_death: Callable[[str], object] | None = None,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        """Set a worker up.

        Args:
            tokenizer_path: a Hugging Face tokenizer folder, or a hub id; if None, the shipped one. With this one the shipped
                language model is sampled, with any other one noise.
            scripted: replies are cut out of a pool, for measuring load.
            host: where to listen.
            port: 0 takes a free one.
            stream_style: cumulative (the default of SGLang), incremental (`--incremental-streaming-output`), or mixed
                (up to 0.5.5: `output_ids` are deltas, the rest is cumulative).
            stream_interval: tokens per event.
            seed: of what is sampled; the k-th sample of a worker is the same in every run.
            eos_share: of noise: how likely a token is the EOS.
            sample_from: of noise: the ids to draw from.
            weight_version: the first version.
            version_spans: False leaves `weight_versions` out, as before 0.5.19.
            context_length: longer prompts are refused.
            health_timeout: how long `/health` waits for a paused engine before its 503.
            token_delay: seconds per token.
            keep_log: False keeps neither `log` nor `calls`, for a worker that serves for long.
            on_death: told, in the worker's thread, when a request has killed it, and why.
            new_loop: makes its event loop.
        """
        path = str(tokenizer_path or shipped_tokenizer())
        self.vocabulary = vocabulary = load_vocabulary(path)
        self.tokenizer_path = path
        self.log: list[Record] = []
        self.calls: list[Call] = []
        self.dead: str | None = None  # why the worker died, if a request killed it
        self._told_of_death = on_death
        source: Source | Pool
        if scripted:
            source = Pool(vocabulary, seed)
        elif path == str(shipped_tokenizer()):
            source = ModelSource(NGramModel.shipped(), vocabulary)
        else:
            source = NoiseSource(vocabulary, sample_from=sample_from, eos_share=eos_share)
        self._engine = Engine(
            vocabulary,
            source,
            seed=seed,
            weight_version=weight_version,
            stream_interval=stream_interval,
            token_delay=token_delay,
        )
        self._wire = Wire(vocabulary, stream_style=stream_style, version_spans=version_spans)
        self._control = Control(
            self._engine,
            self._wire,
            tokenizer_path=path,
            context_length=context_length,
            stream_interval=stream_interval,
            health_timeout=health_timeout,
        )
        app = EngineApp(
            self._engine,
            vocabulary,
            self._wire,
            self._control,
            context_length=context_length,
            log=self.log if keep_log else None,
            calls=self.calls if keep_log else None,
            on_death=self._die,
            reset=lambda client: self._server.reset(client),
        )
        self._server = Server(app, host, port)
        self._new_loop = new_loop
        self._thread: LoopThread | None = None

    def __repr__(self) -> str:
        up = "paused" if self._engine.paused else "up" if self._server.up else "down"
        state = f"dead: {self.dead}" if self.dead else up
        return f"<EmbeddedWorker {self.url} {state}, {self.in_flight} in flight, {len(self.log)} logged>"

    @property
    def url(self) -> str:
        """Where it is; before it was started without a port, nowhere."""
        return f"http://{self._server.host}:{self._server.port}"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> EmbeddedWorker:
        self._thread = LoopThread("embedded-worker", self._new_loop)
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

    def kill(self, reason: str | None = None) -> None:
        """End it at once: what is in flight is reset, later connections are refused. `restart()` brings it back."""
        self._call(self._end(reason))

    def hanging(self) -> AbstractContextManager[None]:
        """A block in which it answers to nothing, though its system still takes connections: as if stopped (SIGSTOP)."""
        assert self._thread is not None
        return self._thread.hanging()

    def restart(self) -> None:
        """Come back on the same port, with an empty queue and the same weights."""
        self.dead = None
        self._call(self._server.listen())

    async def _end(self, reason: str | None) -> None:
        if reason is not None:
            self.dead = reason
        await self._server.die()
        self._engine.drop()

    async def _die(self, reason: str) -> None:
        await self._end(reason)
        if self._told_of_death is not None:
            self._told_of_death(reason)

    # -- how it is -----------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> dict[str, Job]:
        """What is in flight, by request id. It changes under the reader, unless all of it is held."""
        return dict(self._engine.jobs)

    @property
    def in_flight(self) -> int:
        """How many samples are queued or running."""
        return len(self._engine.jobs)

    @property
    def weight_version(self) -> str:
        """The present one."""
        return self._engine.weight_version

    def set_weight_version(self, version: str) -> None:
        """Change the weights under whatever is running, without a request."""
        self._engine_call(lambda: setattr(self._engine, "weight_version", version))

    @property
    def stream_style(self) -> StreamStyle:
        """How it streams from now on."""
        return self._wire.stream_style

    @stream_style.setter
    def stream_style(self, style: StreamStyle) -> None:
        self._wire.stream_style = style

    @property
    def version_spans(self) -> bool:
        """Whether its replies have `weight_versions`."""
        return self._wire.version_spans

    @version_spans.setter
    def version_spans(self, spans: bool) -> None:
        self._wire.version_spans = spans

    @property
    def unhealthy(self) -> bool:
        """Whether /health, /ready and /ping answer 503."""
        return self._control.unhealthy

    @unhealthy.setter
    def unhealthy(self, unhealthy: bool) -> None:
        self._control.unhealthy = unhealthy

    @property
    def skip_tokenizer_init(self) -> bool:
        """As /server_info tells it."""
        return self._control.skip_tokenizer_init

    @skip_tokenizer_init.setter
    def skip_tokenizer_init(self, skip: bool) -> None:
        self._control.skip_tokenizer_init = skip

    # -- what it samples -----------------------------------------------------------------------------------------------

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
        still ends the reply earlier. `finish=None` goes on with what the source draws. A single request can carry the same
        keys itself, in `sampling_params.custom_params["script"]`, which wins over the queue. A pool has no ear for scripts.
        """
        chosen = tuple(self.vocabulary.encode_bare(text)) if text else tuple(ids)
        script = Script(chosen, finish, tuple(logprobs), fault, extra or {}, extra_meta or {})
        self._engine_call(lambda: self._engine.scripts.extend([script] * times))

    def fault(self, fault: Fault, times: int = 1) -> None:
        """The next `times` samples misbehave, whatever they say."""
        self._engine_call(lambda: self._engine.faults.extend([fault] * times))

    def forget_scripts(self) -> None:
        """Those that nobody came for."""
        self._engine_call(self._engine.scripts.clear)

    # -- gates instead of sleeps ---------------------------------------------------------------------------------------

    def hold(self, after: int = 0) -> None:
        """Stop every sample that has `after` tokens: 0 keeps them in the waiting queue, more lets them run that far."""
        self._engine_call(lambda: self._engine.hold(after))

    def release(self, count: int | None = None) -> None:
        """Open the gate, or let only the first `count` of those who wait there go on."""
        self._engine_call(lambda: self._engine.release(count))

    def wait_for_arrivals(self, count: int, timeout: float = 20.0) -> None:
        """Return when `count` samples stand at the gate. Blocks: in a coroutine, use `asyncio.to_thread`."""
        self.wait_for(lambda: sum(job.waiting for job in self._engine.jobs.values()) >= count, timeout)

    def wait_until_idle(self, timeout: float = 20.0) -> None:
        """Return when nothing is in flight."""
        self.wait_for(lambda: not self._engine.jobs, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Return when `condition` holds; it is looked at in the worker's loop, after each token and each request.

        Raises:
            TimeoutError: it never did; the message tells the worker's state.
        """
        try:
            self._call(asyncio.wait_for(self._engine.watchers.wait_for(condition), timeout), timeout + 5)
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
