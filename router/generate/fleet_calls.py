"""One call of the fleet at one worker: how long the router waits, and whether the worker did it.

A hanging worker must not block a call to all workers. So an answer may take `--fleet-timeout`; that of a worker which is
quarantined when the call comes, and so hung before it, only `QUARANTINED_SECONDS`. A transfer of weights may take any time: the
router waits while the worker answers probes, and gives up when it has answered none for as long as an answer may take. The
probes of a worker that has left the fleet do not count: it may never end the transfer, and later updates wait for it. A worker
whose last probe was bad is probed again before it gets the call: when a stopped process continues, it serves its backlog, and
by then the others may have got a later call.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from router.engines.json import JSON_ERRORS
from router.http.headers import HeaderList
from router.http.time_limits import patience
from router.http.upstream import Upstream, UpstreamFailure, fetch
from router.workers.probe import Prober
from router.workers.worker import Worker, WorkerState

QUARANTINED_SECONDS = 3.0
"""How long a worker that is quarantined when the call comes may be silent, where `--fleet-timeout` is not shorter."""

PAUSES = 4
"""Probes within the time after which a silent worker is given up."""

LONGEST_PAUSE = 10.0

_ROOM = 200
"""Levels of JSON, and of calls, that the client's answer needs around what a worker said."""

_WORDS = 300
"""Characters of a worker's own message in the one line that says why it did not do a call."""


class FleetCall(msgspec.Struct, frozen=True):
    """A call to workers.

    Attributes:
        target: path and query.
        transfer: whether it may take any time.
        updates: whether it changes the weights, or their version.
        lasting: whether it is still right when its worker gets it late.
        prefill_first: whether decode workers get it after the prefill workers have done it.
    """

    method: str
    target: str
    headers: HeaderList
    body: bytes
    transfer: bool = False
    updates: bool = False
    lasting: bool = False
    prefill_first: bool = False


class WorkerAnswer(msgspec.Struct, frozen=True):
    """A worker's answer to a call, or why there is none.

    Attributes:
        status: the HTTP status; None if there was no answer.
        body: of the answer, decoded if it is JSON.
        error: why there was no answer.
        done: whether the worker did it. A 200 may say that it did not.
        unsure: whether `done` is unknown: the worker got the call and did not answer.
        doubts: the worker's doubts when it answered.
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
        """Return the answer as the client sees it."""
        said = {"error": self.error} if self.status is None else {"body": self.body}
        return {"id": self.id, "url": self.url, "status": self.status, **said}

    @property
    def failure(self) -> str:
        """Why the call was not done, in one line. A worker may have done a part of it, which only its own message says."""
        said = self.error or f"status {self.status}"
        if self.status is not None and self.status < 300:
            said += " and no success"
        words = _message(self.body)
        if words.strip():
            said += ": " + " ".join(words[:_WORDS].split())
        return f"{self.url} ({said})"


class CallSender:
    """Sends calls to workers, and waits for their answers."""

    def __init__(self, upstream: Upstream, prober: Prober, *, seconds: float) -> None:
        """`seconds`: `--fleet-timeout`."""
        self._upstream = upstream
        self._prober = prober
        self.seconds = seconds

    async def send(self, worker: Worker, call: FleetCall, seconds: float | None = None) -> WorkerAnswer:
        """Return one worker's answer. `seconds`: another limit than `--fleet-timeout`, for a call that is not a transfer."""
        sent = _SentCall(self._upstream, self._prober, worker, call)
        seconds = self.seconds if seconds is None else seconds
        if worker.known_to_hang:
            seconds = min(seconds, QUARANTINED_SECONDS)
        try:
            if call.transfer:
                return await self._while_it_answers(worker, sent, seconds)
            async with patience(seconds):
                return await sent.run()
        except UpstreamFailure as failure:
            return sent.unanswered(str(failure))
        except TimeoutError:
            return sent.unanswered(f"no answer within {seconds:g} s")

    async def _while_it_answers(self, worker: Worker, sent: _SentCall, seconds: float) -> WorkerAnswer:
        """Raise TimeoutError when the worker has not answered any probe for so long."""
        answered = asyncio.create_task(sent.run())
        heard = asyncio.create_task(self._until_silent(worker, seconds))
        try:
            await asyncio.wait((answered, heard), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise TimeoutError
            return answered.result()
        finally:
            answered.cancel()
            heard.cancel()
            await asyncio.wait((answered, heard))

    async def _until_silent(self, worker: Worker, seconds: float) -> None:
        try:
            while True:
                pause = min(seconds / PAUSES, LONGEST_PAUSE)
                async with patience(seconds):
                    silent = True
                    while silent:
                        await asyncio.sleep(pause)
                        found = await self._prober.probe(worker.url)
                        silent = found.silent or found.absent or worker.state is WorkerState.GONE
                seconds = self.seconds  # it is not known to hang any more
        except TimeoutError:
            pass


class _SentCall:
    """One call on its way to one worker.

    It is sent once, and therefore on a new connection: a kept one that its worker has just closed looks like a dead worker.
    """

    def __init__(self, upstream: Upstream, prober: Prober, worker: Worker, call: FleetCall) -> None:
        self._upstream = upstream
        self._prober = prober
        self._worker = worker
        self._call = call
        self._was_sent = False

    async def run(self) -> WorkerAnswer:
        """Send the call and return the answer. Raises UpstreamFailure."""
        worker, call = self._worker, self._call
        if worker.complaint is not None and not call.lasting:
            while (await self._prober.probe(worker.url)).silent:
                pass
        self._was_sent = True
        status, content = await fetch(
            self._upstream, call.method, worker.url + call.target, call.headers, call.body, fresh=True
        )
        body = _readable(content)
        done = status < 300 and _success(body, call)
        return WorkerAnswer(worker.id, worker.url, status, body, done=done, doubts=worker.doubts)

    def unanswered(self, why: str) -> WorkerAnswer:
        """Return the answer for a worker that did not answer."""
        worker = self._worker
        if not self._was_sent:
            why = f"it is {worker.state.value} ({worker.complaint}) and was not told: {why} to the question how it is"
        return WorkerAnswer(worker.id, worker.url, None, error=why, unsure=self._was_sent)


def _success(body: Any, call: FleetCall) -> bool:
    """Return whether a good status means success. SGLang answers an update in JSON; anything else has updated nothing."""
    said = body if isinstance(body, list) else [body]
    if any(isinstance(one, dict) and one.get("success", True) is not True for one in said):
        return False
    return not (call.updates and isinstance(body, str) and body.strip())


def _readable(content: bytes) -> Any:
    """Return a body as its value if it is JSON that can be printed again inside of the client's answer, else as text."""
    try:
        msgspec.json.decode(b"[" * _ROOM + content + b"]" * _ROOM)
        return msgspec.json.decode(content)
    except JSON_ERRORS:
        return content.decode("utf-8", "replace")


def _message(body: Any) -> str:
    """Return the message of a worker's answer, wherever its engine or its web framework puts it; "" if there is none."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error")
    found = (body.get("message"), error.get("message") if isinstance(error, dict) else error, body.get("detail"))
    return next((words for words in found if isinstance(words, str)), "")
