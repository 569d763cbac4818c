"""`AsyncClient`, the client for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from middleware_hub.client import operations
from middleware_hub.client.claims import Claim, ClaimOptions
from middleware_hub.client.errors import InconsistentAnswerError, refused
from middleware_hub.client.operations import GenerateOptions, Operation, Prompt, RetrieveOptions
from middleware_hub.client.sending import BROKEN, ClientOptions, Sending, broken_stream, retry_after
from middleware_hub.client.trajectory import Cover, Trajectory
from middleware_hub.client.wire import SAVED, Answer, Call, Piece, Reply, read_json, read_reply

_COMMENT = b": x-radix-saved:"
T = TypeVar("T")


class _Connector(aiohttp.TCPConnector):
    """Closes a kept connection on which bytes came while no request was under way.

    aiohttp would take them for the answer to the next request. A load balancer in front of the routers sends them: a 408, when
    nothing was asked for a while.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            found = await super().connect(req, traces, timeout)
            if found.protocol is None or not found.protocol.should_close:
                return found
            found.close()


class AsyncClient(Sending):
    """Talks to a router from one event loop, or from several. See `Sending` for the arguments."""

    def __init__(self, urls: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        super().__init__(urls, **options)
        # By event loop: trainers make new loops.
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[aiohttp.ClientSession, None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections of the running loop."""
        await self._end(asyncio.get_running_loop())

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        found = self._sessions.get(loop)
        if found is None:
            keeper = self._keepers[loop] = self._kept(loop)
            found = await anext(keeper)
            for other in [one for one in tuple(self._keepers) if one.is_closed()]:  # without having been shut down
                await self._end(other)
        return found

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        keeper = self._keepers.pop(loop, None)
        if keeper is not None:
            await keeper.aclose()

    async def _kept(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """Yield a session. A loop that is shut down closes its generators, and so the session: trainers run many loops."""
        # No limits by the library itself. An idle connection is closed here before the router closes it.
        session = self._sessions[loop] = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            yield session
        finally:
            self._sessions.pop(loop, None)
            self._keepers.pop(loop, None)
            await session.close()

    async def run(self, operation: Operation[T]) -> T:
        """Send a request, again if that is harmless, and return what its answer says."""
        async with self._sent(operation.call, whole=True) as found:
            return operation.read(Answer(found.status, _lower(found), await found.read()))

    @asynccontextmanager
    async def _sent(self, call: Call, *, whole: bool = False) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send until there is an answer that counts; `whole`: with all of its body, which is otherwise still to be read."""
        attempt, least = 0, 0.0
        while True:
            attempt += 1
            asked = self.url
            wait: float | None
            try:
                found = await (await self._session()).request(**self._request(call), allow_redirects=False)
                if whole:
                    await found.read()
            except BROKEN as error:
                wait = self.go_on(call, attempt, asked, None, error, least)
            else:
                least = max(least, retry_after(found))
                wait = self.go_on(call, attempt, asked, found.status, None, least) if found.status >= 400 else None
                if wait is None:
                    break
                found.close()
            least = 0.0 if wait else least
            await asyncio.sleep(wait or 0.0)
        try:
            yield found
        finally:
            found.release() if found.content.is_eof() else found.close()

    async def generate(
        self, prompt: Prompt, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> Reply:
        """Return one reply to a text or to ids."""
        return await self.run(operations.generate(prompt, sampling_params, options))

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Reply]]:
        """Return `n` replies to each prompt, in one request: a list for each prompt."""
        return await self.run(operations.generate_batch(prompts, sampling_params, n, options))

    async def stream(
        self, prompt: Prompt, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Piece, None]:
        """Yield a reply as it comes; the last piece has all of it. Raises IncompleteStreamError. Closing it ends the reply."""
        call = operations.stream(prompt, sampling_params, options)
        async with self._sent(call) as found:
            if found.status != 200:
                read_json(call, Answer(found.status, _lower(found), await found.read()))
            reader, lines = StreamReader(_lower(found)), Lines()
            try:
                async for chunk in found.content.iter_any():
                    new = "".join([reader.feed(line) for line in lines.feed(chunk)])
                    if reader.done:
                        yield Piece(new, reader.reply())
                        return
                    if new:
                        yield Piece(new, None)
            except BROKEN as error:
                raise broken_stream() from error
        raise broken_stream()

    async def retrieve(
        self,
        text: str,
        *,
        expect_request_ids: Sequence[str] | None = None,
        request_id: str | None = None,
        **options: Unpack[RetrieveOptions],
    ) -> Trajectory:
        """Return the exact sequence of a text. List all replies that you got: only then is a lost reply noticed."""
        return await self.run(operations.retrieve(text, expect_request_ids, request_id, options))

    async def cover(
        self,
        text: str,
        expect_request_ids: Sequence[str],
        *,
        request_id: str | None = None,
        **options: Unpack[RetrieveOptions],
    ) -> Cover:
        """Return the fewest sequences that hold all listed replies whole, that of the text first."""
        return await self.run(operations.cover(text, expect_request_ids, request_id, options))

    async def explain(self, text: str) -> dict[str, Any]:
        """Return where a text leaves what is recorded."""
        return await self.run(operations.explain(text))

    async def claim(self, **options: Unpack[ClaimOptions]) -> Claim:
        """Take samples for a while; without any, `len(claim)` is 0. Acknowledge them, or they are handed out again."""
        return await self.run(operations.claim(options))

    async def acknowledge(self, claim: Claim | str) -> int:
        """Acknowledge samples that are trained on or kept: they are never handed out again. Returns how many.

        Raises RefusedError if the lease was over and others have some of them: `details["taken"]`.
        """
        found = await self.run(operations.settle("ack", claim))
        return int(found["acknowledged"])

    async def release(self, claim: Claim | str) -> int:
        """Give samples back; return how many."""
        found = await self.run(operations.settle("release", claim))
        return int(found["released"])

    async def renew(self, claim: Claim | str, lease_seconds: float = 600.0) -> None:
        """Begin the lease of a claim again. Raises RefusedError if it was over and others have some of the samples."""
        await self.run(operations.settle("renew", claim, lease_seconds=lease_seconds))

    async def reward(self, request_id: str, reward: float | None, info: Mapping[str, Any] | None = None) -> bool:
        """Give the reward of a rollout, which is named by its last reply and is complete now.

        Returns False if the router says that its store did not take it (yet): trainers at other routers do not know it.
        """
        return await self.run(operations.reward(request_id, reward, info))

    async def workers(self) -> list[dict[str, Any]]:
        """Return the workers of the router."""
        answer = await self.run(operations.plain(Call("GET", "/workers", again=True)))
        found: list[dict[str, Any]] = answer["workers"]
        return found

    async def to_workers(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call all workers, for example `/update_weights_from_disk`. Raises RefusedError if one of them failed."""
        return await self.run(operations.to_workers(path, body))


def _lower(found: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in found.headers.items()}


class StreamReader:
    """Reads one stream, in any of the forms that workers send it in."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        from router.engines.form.stream import StreamedReply  # it needs numpy, which only streams load

        self._headers = {
            name: value for name, value in headers.items() if name != SAVED
        }  # a comment says it at the end
        self._reply = StreamedReply(added=[])

    @property
    def done(self) -> bool:
        """Return whether the last event has come."""
        return self._reply.done

    def feed(self, line: bytes) -> str:
        """Take a line; return what it adds to the text. Raises RefusedError for an error in the place of an event."""
        if line.startswith(_COMMENT):
            self._headers[SAVED] = line[len(_COMMENT) :].strip().decode("latin-1")
        if not line.startswith(b"data:"):
            return ""
        self._reply.feed(line[5:].strip())
        if self._reply.error is not None:
            try:
                error = msgspec.json.decode(self._reply.error)
            except msgspec.DecodeError:
                error = {"message": self._reply.error}
            raise refused(502, error if isinstance(error, dict) else {"message": str(error)})
        added = self._reply.added
        assert added is not None
        pieces = [msgspec.json.decode(piece, type=str) for piece in added]
        added.clear()
        return "".join(pieces)

    def reply(self) -> Reply:
        """Return the whole reply, when the stream is over. Raises InconsistentAnswerError."""
        found = self._reply.reply()
        if found is None:
            raise InconsistentAnswerError("the stream ended without an event")
        meta = {name: msgspec.json.decode(raw) for name, raw in self._reply.last_meta.items()}
        if self._reply.logprobs:
            meta["output_token_logprobs"] = list(self._reply.logprobs)
        return read_reply({"text": found.text, "output_ids": list(self._reply.ids), "meta_info": meta}, self._headers)


class Lines:
    """Cuts bytes into lines, at line feeds only: JSON may hold any other character that Unicode calls a line's end."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> Sequence[bytes]:
        """Take bytes; return the lines that they complete."""
        *lines, self._held = (self._held + chunk).split(b"\n")
        return lines
