"""Telling one worker what all are told: for how long it is waited for, and whether it did what it was told.

A worker that hangs must not hang a call to all of them. So an answer may take `--fleet-timeout`. A transfer of weights takes as
long as it takes: it goes on while its worker answers probes, and is given up when there was no answer to any for that time.
A worker whose last probe was bad is asked how it is before it is told anything: a stopped process does what waits for it
whenever it goes on, long after the others were told something else.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from router.engines.sglang.json import JSON_ERRORS
from router.http.asgi import HeaderList
from router.http.time_limits import patience
from router.http.upstream import Upstream, UpstreamFailure, fetch
from router.workers.probe import Prober
from router.workers.worker import Worker

PAUSES = 4
"""Of the time after which a silent worker is given up, so many parts lie between two questions how it is."""

LONGEST_PAUSE = 10.0


class Call(msgspec.Struct, frozen=True):
    """What workers are told.

    Attributes:
        method: of HTTP.
        target: path and query.
        headers: those that may pass.
        body: as it is sent.
        transfer: whether it may take any time.
        updates: whether it gives workers other weights, or another version.
        lasting: whether it is right at any time, also when its worker hears it late.
    """

    method: str
    target: str
    headers: HeaderList
    body: bytes
    transfer: bool = False
    updates: bool = False
    lasting: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What a worker said, or why it said nothing.

    Attributes:
        id: the worker's.
        url: the same.
        status: of HTTP; None if there was no answer.
        body: of the answer, decoded if it is JSON.
        error: what there was in its place.
        done: whether the worker did what it was told. With a 200 it may say that it did not.
        unsure: whether nobody knows: it was told, and did not answer.
        doubts: the worker's, when it answered.
    """

    id: str
    url: str
    status: int | None
    body: Any = None
    error: str | None = None
    done: bool = False
    unsure: bool = False
    doubts: int = 0

    def shown(self) -> dict[str, Any]:
        """For the client."""
        said = {"error": self.error} if self.status is None else {"body": self.body}
        return {"id": self.id, "url": self.url, "status": self.status, **said}

    @property
    def failure(self) -> str:
        """In one line, why it is not done."""
        said = self.error or f"status {self.status}"
        if self.status is not None and self.status < 300:
            said += " and no success"
        return f"{self.url} ({said})"


class Teller:
    """Tells workers, and waits for them.

    Args:
        upstream: the way to them.
        prober: asks those that are silent how they are.
        seconds: `--fleet-timeout`.
    """

    def __init__(self, upstream: Upstream, prober: Prober, *, seconds: float) -> None:
        self._upstream = upstream
        self._prober = prober
        self._seconds = seconds

    async def tell(self, worker: Worker, call: Call, seconds: float | None = None) -> Answer:
        """One worker's answer. `seconds`: another limit than `--fleet-timeout`, for a call that is no transfer."""
        telling = _Telling(self._upstream, self._prober, worker, call)
        try:
            if call.transfer:
                return await self._while_it_answers(worker, telling)
            async with patience(self._seconds if seconds is None else seconds):
                return await telling.run()
        except UpstreamFailure as failure:
            return telling.unanswered(str(failure))
        except TimeoutError:
            return telling.unanswered(f"no answer within {seconds or self._seconds:g} s")

    async def _while_it_answers(self, worker: Worker, telling: _Telling) -> Answer:
        """Raises TimeoutError when the worker has not answered any question for `--fleet-timeout`."""
        told = asyncio.create_task(telling.run())
        heard = asyncio.create_task(self._until_silent(worker))
        try:
            await asyncio.wait((told, heard), return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                raise TimeoutError
            return told.result()
        finally:
            told.cancel()
            heard.cancel()
            await asyncio.wait((told, heard))

    async def _until_silent(self, worker: Worker) -> None:
        pause = min(self._seconds / PAUSES, LONGEST_PAUSE)
        try:
            while True:
                async with patience(self._seconds):
                    silent = True
                    while silent:
                        await asyncio.sleep(pause)
                        found = await self._prober.probe(worker.url)
                        silent = found.silent or found.absent
        except TimeoutError:
            pass


class _Telling:
    """One call on its way to one worker. It is sent once, and so on a new connection: one that its worker has just closed looks
    like a dead worker."""

    def __init__(self, upstream: Upstream, prober: Prober, worker: Worker, call: Call) -> None:
        self._upstream = upstream
        self._prober = prober
        self._worker = worker
        self._call = call
        self._told = False

    async def run(self) -> Answer:
        """Raises UpstreamFailure."""
        worker, call = self._worker, self._call
        if worker.complaint is not None and not call.lasting:
            while (await self._prober.probe(worker.url)).silent:
                pass
        self._told = True
        status, content = await fetch(
            self._upstream, call.method, worker.url + call.target, call.headers, call.body, fresh=True
        )
        body = _readable(content)
        done = status < 300 and _success(body, call)
        return Answer(worker.id, worker.url, status, body, done=done, doubts=worker.doubts)

    def unanswered(self, why: str) -> Answer:
        """There is no answer."""
        worker = self._worker
        if not self._told:
            why = f"it is {worker.state.value} ({worker.complaint}) and was not told: {why} to the question how it is"
        return Answer(worker.id, worker.url, None, error=why, unsure=self._told)


def _success(body: Any, call: Call) -> bool:
    """Whether a good status is meant. SGLang answers an update in JSON; whatever does not has updated nothing."""
    said = body if isinstance(body, list) else [body]
    if any(isinstance(one, dict) and one.get("success", True) is not True for one in said):
        return False
    return not (call.updates and isinstance(body, str) and body.strip())


def _readable(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except JSON_ERRORS:
        return content.decode("utf-8", "replace")
