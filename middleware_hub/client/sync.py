"""The blocking `Client`, an `AsyncClient` in its own thread, and conversations and sessions with it."""

from __future__ import annotations

import asyncio
import atexit
import selectors
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from middleware_hub.client import operations
from middleware_hub.client.asynchronous import AsyncClient
from middleware_hub.client.claims import Claim, ClaimOptions
from middleware_hub.client.conversation import Talk, Transcript
from middleware_hub.client.errors import UnknownReplyError
from middleware_hub.client.operations import (
    ExportOptions,
    GenerateOptions,
    Operation,
    Prompt,
    RetrieveOptions,
    SessionOptions,
)
from middleware_hub.client.sending import ClientOptions
from middleware_hub.client.session import SessionCalls
from middleware_hub.client.trajectory import Cover, Trajectory
from middleware_hub.client.wire import Piece, Reply

T = TypeVar("T")


class Client:
    """Talks to a router, and waits for each answer. Any number of threads may share it.

    It has its own thread: make the client after a `fork`, not before it. What is still open when Python ends is closed then.
    See `Sending` for the arguments.
    """

    def __init__(self, urls: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        self.asynchronous = AsyncClient(urls, **options)
        self._closed = False
        self._beginning = threading.Lock()
        self._loop = _loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tito-client", daemon=True)
        self._thread.start()
        # A client that nobody closes leaves no thread behind. At the end of Python, see below.
        self._dropped = weakref.finalize(self, _end_thread, self._loop, self.asynchronous)
        self._dropped.atexit = False
        _open.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        _open.discard(self)
        self._dropped.detach()
        if not self._thread.is_alive():  # closed already, or this is a fork
            return
        with self._beginning:
            closed, self._closed = self._closed, True
        if not closed:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        """End what other threads wait for: for a loop that has stopped they would wait for ever."""
        waited_for = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waited_for:
            task.cancel()
        await asyncio.gather(*waited_for, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()
        await self.asynchronous.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("this client was closed while a request was under way") from None
        except BaseException:  # also Ctrl-C: what is under way ends, and its worker stops
            future.cancel()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._thread.is_alive():
            with self._beginning:  # nothing begins behind `_end`
                if not self._closed:
                    return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError(
            "this client was closed, or it was made before a fork and its thread is in the other process: make another client"
        )

    @property
    def url(self) -> str:
        """Return the address that is asked now."""
        return self.asynchronous.url

    def run(self, operation: Operation[T]) -> T:
        """Send a request, again if that is harmless, and return what its answer says."""
        return self._wait(self.asynchronous.run(operation))

    def generate(
        self, prompt: Prompt, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> Reply:
        """Return one reply to a text or to ids."""
        return self._wait(self.asynchronous.generate(prompt, sampling_params, **options))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Reply]]:
        """Return `n` replies to each prompt, in one request: a list for each prompt."""
        return self._wait(self.asynchronous.generate_batch(prompts, sampling_params, n=n, **options))

    def stream(
        self, prompt: Prompt, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[Piece]:
        """Yield a reply as it comes; the last piece has all of it. Raises IncompleteStreamError. Closing it ends the reply."""
        pieces = self.asynchronous.stream(prompt, sampling_params, **options)
        try:
            while (piece := self._wait(_next(pieces))) is not None:
                yield piece
        finally:
            self._wait(pieces.aclose())

    def retrieve(
        self,
        text: str,
        *,
        expect_request_ids: Sequence[str] | None = None,
        request_id: str | None = None,
        **options: Unpack[RetrieveOptions],
    ) -> Trajectory:
        """Return the exact sequence of a text. List all replies that you got: only then is a lost reply noticed."""
        asked = self.asynchronous.retrieve(
            text, expect_request_ids=expect_request_ids, request_id=request_id, **options
        )
        return self._wait(asked)

    def cover(
        self,
        text: str,
        expect_request_ids: Sequence[str],
        *,
        request_id: str | None = None,
        **options: Unpack[RetrieveOptions],
    ) -> Cover:
        """Return the fewest sequences that hold all listed replies whole, that of the text first."""
        return self._wait(self.asynchronous.cover(text, expect_request_ids, request_id=request_id, **options))

    def explain(self, text: str) -> dict[str, Any]:
        """Return where a text leaves what is recorded."""
        return self._wait(self.asynchronous.explain(text))

    def claim(self, **options: Unpack[ClaimOptions]) -> Claim:
        """Take samples for a while; without any, `len(claim)` is 0. Acknowledge them, or they are handed out again."""
        return self.run(operations.claim(options))

    def acknowledge(self, claim: Claim | str) -> int:
        """Acknowledge samples that are trained on or kept: they are never handed out again. Returns how many.

        Raises RefusedError if the lease was over and others have some of them: `details["taken"]`.
        """
        found = self.run(operations.settle("ack", claim))
        return int(found["acknowledged"])

    def release(self, claim: Claim | str) -> int:
        """Give samples back; return how many."""
        found = self.run(operations.settle("release", claim))
        return int(found["released"])

    def renew(self, claim: Claim | str, lease_seconds: float = 600.0) -> None:
        """Begin the lease of a claim again. Raises RefusedError if it was over and others have some of the samples."""
        self.run(operations.settle("renew", claim, lease_seconds=lease_seconds))

    def reward(self, request_id: str, reward: float | None, info: Mapping[str, Any] | None = None) -> bool:
        """Give the reward of a rollout, which is named by its last reply and is complete now.

        Returns False if the router says that its store did not take it (yet): trainers at other routers do not know it.
        """
        return self.run(operations.reward(request_id, reward, info))

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers of the router."""
        return self._wait(self.asynchronous.workers())

    def to_workers(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call all workers, for example `/update_weights_from_disk`. Raises RefusedError if one of them failed."""
        return self._wait(self.asynchronous.to_workers(path, body))


def _loop() -> asyncio.AbstractEventLoop:
    """Return a loop that a fork does not share: what a child closed would be gone from an epoll of its parent."""
    if hasattr(selectors, "PollSelector"):
        return asyncio.SelectorEventLoop(selectors.PollSelector())
    return asyncio.new_event_loop()


def _end_thread(loop: asyncio.AbstractEventLoop, client: AsyncClient) -> None:
    """Close the connections of a client that was dropped, and end its thread."""

    async def end() -> None:
        await client.close()
        loop.stop()

    loop.call_soon_threadsafe(lambda: loop.create_task(end()))


async def _next(pieces: Any) -> Piece | None:
    return await anext(pieces, None)


_open: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_what_is_open() -> None:
    for client in list(_open):
        client.close()


class Conversation(Talk):
    """A conversation with a `Client`."""

    def __init__(
        self,
        client: Client,
        prompt: str | Transcript,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> None:
        super().__init__(prompt, sampling_params, options)
        self.client = client

    def say(self, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]) -> Reply:
        """Let the model continue the text, add its reply, and return it. After an abort, call it again to continue."""
        params = {**self.sampling_params, **(sampling_params or {})}
        reply = self.client.generate(self.text, params, **self.turn_options(options))
        self.transcript.take(reply)
        return reply

    def retrieve(self, **options: Unpack[RetrieveOptions]) -> Trajectory:
        """Return the sequence that the last reply ends. A listed reply that is not in it makes it inexact."""
        names, asked = self.transcript.names, self.retrieval(options)
        try:
            return self.client.retrieve(self.recorded, expect_request_ids=names, **self.named(), **asked)
        except UnknownReplyError:  # the last reply is lost: the rest shows that by itself
            return self.client.retrieve(self.recorded, expect_request_ids=names, **asked)

    def cover(self, **options: Unpack[RetrieveOptions]) -> Cover:
        """Return sequences that hold every reply whole, that of the last reply first."""
        names, asked = self.transcript.names, self.retrieval(options)
        try:
            return self.client.cover(self.recorded, names, **self.named(), **asked)
        except UnknownReplyError:
            return self.client.cover(self.recorded, names, **asked)


class Session(SessionCalls):
    """A session of a `Client`. As a context it is deleted at the end."""

    def __init__(self, client: Client, **options: Unpack[SessionOptions]) -> None:
        made = client.run(operations.create_session(options))
        super().__init__(made)
        self.client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], headers: Mapping[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Return a completion in OpenAI's form. `fields` are those of the request: `tools`, `temperature`, `n`, ..."""
        return self.took(self.client.run(self.chat_call(messages, fields, headers)))

    def reward(self, reward_info: Mapping[str, Any], branch: str | None = None) -> bool:
        """Attach a reward to the session, or to a branch by the id of one of its replies.

        Returns False if the router says that its store did not take it (yet): trainers at other routers do not know it.
        """
        return self.client.run(self.reward_call(reward_info, branch))

    def finalize(self, **options: Unpack[ExportOptions]) -> Cover:
        """End it; return a trajectory for each branch. May be called again."""
        return self.client.run(self.finalize_call(options))

    def tree(self, *, roots: str = "all") -> dict[str, Any]:
        """End it; return its tree, in which shared turns are once. See `middleware_hub.integrations.tree`.

        `roots`: `head` leaves out what the agent asked beside its task.
        """
        return self.client.run(self.tree_call(roots))

    def delete(self) -> None:
        """Abort running generations, and forget everything."""
        self.client.run(operations.delete_session(self.id))
