"""One request at two workers: one prefills its prompt, the other decodes its reply. To the proxy, both are one worker.

SGLang's workers get it at the same time, and find each other. vLLM's get it one after the other. The reply is that of the
decode worker; what only the prefill worker knows is joined to it (`router/engines/form/joined_reply.py`).

A leg alone waits for its other leg for minutes. So when one fails or is aborted, the other is cancelled and aborted at once.
`culprit` is the worker that failed. If a decode worker of SGLang answers that its prefill worker did not hand over, that is the
prefill worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from router.engines.engine import EngineAnswer
from router.engines.events import has_ended
from router.engines.form.joined_reply import UNTOLD, JoinedReply, PrefillReply, read_prefill
from router.engines.form.outcome import may_be_aborted, refusal_status
from router.engines.form.worker_request import WorkerRequest
from router.engines.json import decode_object
from router.engines.sglang.meeting import MeetingPlace, lacks_cache, with_meeting, with_prefill_rank
from router.engines.vllm.handover import LEASE_SECONDS, decode_body, prefill_body
from router.errors import EndedInQueueError
from router.http.headers import HeaderList
from router.http.time_limits import end_now
from router.http.upstream import Body, Headers, Take, UpstreamBrokenError, UpstreamFailure, UpstreamResponse
from router.proxy.engine_upstream import EngineUpstream, WholeResponse
from router.proxy.in_flight import InFlight
from router.workers.pool import Lease
from router.workers.worker import Target, Worker

logger = logging.getLogger(__name__)

MOMENT = 0.25
"""Seconds in which the other leg may show that it is the one at fault."""
GRACE = 0.75
"""Seconds that an aborted leg has to answer."""
ABORT_SECONDS = 1.0
"""Seconds that a worker has to answer an abort before it may get the request again. A healthy one takes milliseconds."""

_PATH = "/generate"
_SHOWN = 500
"""The most bytes of a worker's error to log."""
_ROWS = frozenset({"return_routed_experts", "return_indexer_topk"})

Abandon = Callable[[InFlight, Worker], Sequence[asyncio.Task[None]]]
"""Aborts a request at one of its workers, in the background. Returns what does it."""


class LegRefusedError(Exception):
    """A leg has answered in place of the reply: with an error, or that it was aborted."""

    def __init__(self, response: UpstreamResponse) -> None:
        super().__init__()
        self.response = response


class Legs:
    """The two legs of one attempt: an `UpstreamResponse`, once `begin` has returned.

    Attributes:
        prefill: the worker of the first leg.
        prefill_target: its rank there.
        decode_target: that of the second leg.
        culprit: the target at fault, if it fails.
        avoided: the other target, if that may be at fault as well.
        failure: that of the prefill leg, if it came before the reply of the decode worker.
    """

    def __init__(
        self,
        upstream: EngineUpstream,
        abandon: Abandon,
        in_flight: InFlight,
        lease: Lease,
        *,
        target: str,
        sent: WorkerRequest | None,
        body: bytes,
        at_once: bool,
    ) -> None:
        """Make the legs.

        Args:
            upstream: sends them.
            abandon: ends one of them.
            in_flight: the generations that they are for.
            lease: both workers.
            target: path and query.
            sent: the request of this attempt; None if only a worker can decide what it means.
            body: the same as it is sent, with what was added since.
            at_once: whether both workers get the request at the same time.
        """
        assert lease.prefill is not None
        self._upstream = upstream
        self._abandon = abandon
        self._in_flight = in_flight
        self._target = target
        self._prefill_lease = lease.prefill
        self.prefill_target: Target = lease.prefill.target
        self.prefill: Worker = lease.prefill.worker
        self.decode_target: Target = lease.target
        self._decode: Worker = lease.worker
        self._roles = self.prefill.role, self._decode.role
        self._at_once = at_once
        self._sent, self._body = self._single(sent, body)
        self.culprit = self.decode_target
        self.avoided: Target | None = None
        self.status = 0
        self.headers: Headers = []
        self.stream = False
        self._begun = False
        self._over = False  # whether the prefill leg has ended well
        self._response: UpstreamResponse | None = None
        self._first_leg: asyncio.Task[None] | None = None
        self.failure: Exception | None = None
        self._prefilled: list[PrefillReply] | None = None
        self._waiting: asyncio.Timeout | None = None
        self._aborts: list[asyncio.Task[None]] = []

    def _single(self, sent: WorkerRequest | None, body: bytes) -> tuple[WorkerRequest | None, bytes]:
        """Return the request for one sample of each prompt: samples of a prompt become prompts."""
        if sent is not None and (sent.samples > 1 or not self._at_once):
            sent = msgspec.structs.replace(sent, fields=decode_object(body), _printed=b"")
        if sent is not None and sent.samples > 1:
            sent = sent.again(range(sent.replies))
            self._in_flight.rename(dict(enumerate(sent.rids)))
            body = sent.body
        return sent, body

    async def begin(self, headers: HeaderList, waiting: asyncio.Timeout, *, fresh: bool) -> None:
        """Send both legs, and wait for the head of the decode worker's reply. Raises UpstreamFailure, LegRefusedError.

        `waiting`: around all that is awaited here, until `joined` is called. It ends with a `failure`.
        """
        self._waiting = waiting
        if self._at_once:
            prefill, rank, ranks = self.prefill, self.prefill_target.rank, len(self.prefill.targets)
            place = MeetingPlace(prefill.url, prefill.bootstrap_port, rank, ranks)
            body = with_meeting(self._body, self._sent, place)
            if body is not None:
                self._first_leg = asyncio.create_task(self._prefilling(headers, body, fresh=fresh))
                if ranks > 1:
                    body = with_prefill_rank(body, rank)
        else:
            body = await self._one_after_the_other(headers, fresh=fresh)
        decoded = self._body if body is None else body
        response = self._response = await self._send(self.decode_target, headers, decoded, fresh=fresh)
        self.status, self.headers, self.stream = response.status, response.headers, response.stream

    async def read(self) -> bytes:
        """Return the next piece of the decode worker's reply. Raises UpstreamBrokenError, LegRefusedError."""
        assert self._response is not None
        self._check()
        return await self._response.read()

    async def flow(self, take: Take) -> None:
        """Hand on pieces of the decode worker's reply as they come, once the prefill leg is over. Raises as `read`."""
        assert self._response is not None
        if self._begun:
            self._check()
            await self._response.flow(take)

    async def joined(self, status: int, first: bytes) -> JoinedReply | None:
        """Wait until the prefill leg is over; return what joins the replies, None if there is nothing to join.

        Args:
            status: that of the decode worker's reply.
            first: the part of it that has come.

        Raises UpstreamFailure, LegRefusedError.
        """
        leg, sent, ended = self._first_leg, self._sent, may_be_aborted(first)
        self._waiting = None
        if status != 200:
            if status >= 500 and leg is not None:  # it may only say that the other leg has ended
                await asyncio.wait((leg,), timeout=MOMENT)
                self._check()
                if self._aborted():
                    raise LegRefusedError(self._ended())
                if lacks_cache(first):
                    logger.warning("worker %s: %s", self._decode.url, first[:_SHOWN].decode("utf-8", "replace"))
                    self.culprit, self.avoided = self.prefill_target, self.decode_target
                    raise UpstreamBrokenError("its decode worker did not get the cache of the prompt from it")
            self._settle()
            return None
        if leg is not None and not leg.done():
            if ended:
                self._end(self.prefill)
            await asyncio.wait((leg,), timeout=GRACE if ended else None)
        if not ended:
            self._check()
        self._settle()
        prefilled = self._prefilled
        if prefilled is None and leg is not None and sent is not None:
            prefilled = [UNTOLD] * sent.prompts
        if prefilled is None or sent is None:
            return None
        return JoinedReply(prefilled, listed=sent.listed, rows=not _ROWS.isdisjoint(sent.fields))

    def _settle(self) -> None:
        """Let the reply of the decode worker, an abort's or an error, stand for both, whatever becomes of the prefill leg."""
        self._begun = True
        if self.failure is not None:
            self.failure, self.culprit = None, self.decode_target

    @property
    def switched(self) -> Target | None:
        """The target that no longer has the role in which it was asked, if there is one."""
        both = self.prefill_target, self.decode_target
        return next((one for one, role in zip(both, self._roles, strict=True) if one.worker.role is not role), None)

    @property
    def both_late(self) -> bool:
        """Whether both legs are under way: either may wait for the other one."""
        return self._first_leg is not None and not self._first_leg.done()

    def end_decode(self) -> None:
        """Abort the decode leg."""
        self._end(self._decode)

    async def until_told(self) -> None:
        """Wait until its workers have answered all aborts of this attempt, or for a moment.

        An abort ends all that begins with its id, and so the next attempt, if that is there before the abort is.
        """
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_SECONDS)

    def close(self) -> None:
        self._waiting = None
        if self._response is not None:
            self._response.close()
        leg, self._first_leg = self._first_leg, None
        if leg is not None and not leg.done():
            leg.cancel()
            self._end(self.prefill)
            self._in_flight.prefill = None

    def _end(self, worker: Worker) -> None:
        self._aborts += self._abandon(self._in_flight, worker)

    # The prefill leg --------------------------------------------------------------------------------------------------

    async def _ask_prefill(self, headers: HeaderList, body: bytes, *, fresh: bool) -> WholeResponse:
        """Return the whole reply of the prefill worker. Raises UpstreamFailure."""
        response = await self._send(self.prefill_target, headers, body, fresh=fresh)
        try:
            pieces = []
            while piece := await response.read():
                pieces.append(piece)
        finally:
            response.close()
        found = WholeResponse(EngineAnswer(response.status, b"".join(pieces)), response.headers, stream=response.stream)
        if found.stream and found.status == 200 and not has_ended(found.body):
            raise UpstreamBrokenError("its stream ended before its end")
        return found

    async def _prefilling(self, headers: HeaderList, body: bytes, *, fresh: bool) -> None:
        """Take the prefill worker's reply. The decode leg ends with a leg that failed."""
        try:
            answer = await self._ask_prefill(headers, body, fresh=fresh)
        except UpstreamFailure as failure:
            self._fail(failure)
            return
        status = answer.status
        if answer.stream and status == 200:
            status = refusal_status(answer.body) or 200
        if status >= 500 and lacks_cache(answer.body):
            self._fail(UpstreamBrokenError("it is a decode worker now"))
        elif status >= 500:  # it may only say that the other leg has ended, which says that itself
            self._later(MOMENT, LegRefusedError(answer))
        elif status != 200:
            self._fail(LegRefusedError(answer))
        else:
            self._take(answer)
            self._over = not self._aborted()
            if not self._over:
                self._end(self._decode)
                if self._prefilled is not None and all(one.aborted for one in self._prefilled):
                    self._later(GRACE, LegRefusedError(self._ended()))

    def _aborted(self) -> bool:
        """Return whether a prompt was not prefilled because it was aborted."""
        return self._prefilled is not None and any(one.aborted for one in self._prefilled)

    def _ended(self) -> WholeResponse:
        """Return the reply to a request that was aborted before it was decoded."""
        sent = self._sent
        assert sent is not None
        return WholeResponse(EngineAnswer(200, sent.ended_in_queue(sent.rids)), stream=sent.stream)

    def _later(self, seconds: float, failure: LegRefusedError) -> None:
        asyncio.get_running_loop().call_later(seconds, self._fail, failure)

    def _take(self, answer: WholeResponse) -> None:
        sent = self._sent
        if sent is not None:
            self._prefilled = read_prefill(answer.body, sent.prompts, listed=sent.listed, stream=answer.stream)
        self._in_flight.prefill = None
        self._prefill_lease.release()

    def _fail(self, failure: Exception) -> None:
        """End the decode leg, if it is not over: the prefill leg has failed."""
        if self.failure is not None or self._first_leg is None or self._begun:
            return
        self.failure, self.culprit = failure, self.prefill_target
        self._end(self._decode)
        if self._waiting is not None:
            end_now(self._waiting)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    # Engines whose legs follow each other -----------------------------------------------------------------------------

    async def _one_after_the_other(self, headers: HeaderList, *, fresh: bool) -> bytes:
        """Have the prompt prefilled; return the body for the decode worker. Raises UpstreamFailure, LegRefusedError."""
        sent = self._sent
        if sent is None:
            return self._body
        self.culprit = self.prefill_target
        answer = await self._ask_prefill(headers, prefill_body(sent), fresh=fresh)
        if answer.status != 200:
            raise LegRefusedError(answer)
        self._take(answer)
        if self._in_flight.unwanted:
            raise EndedInQueueError("the generation was aborted before its decode worker had it")
        if self._prefilled is None:
            raise UpstreamBrokenError("its reply to a prefill cannot be read")
        if self._aborted():
            raise LegRefusedError(self._ended())
        self.culprit = self.decode_target
        return decode_body(sent, [one.transfer for one in self._prefilled])

    async def _send(self, target: Target, headers: Headers, body: Body, *, fresh: bool) -> UpstreamResponse:
        worker = target.worker
        if len(worker.targets) > 1:
            headers, body = self._upstream.ranked(_PATH, headers, body, target.rank)
        try:
            return await self._upstream.send("POST", worker.url + self._target, headers, body, fresh=fresh)
        except UpstreamFailure:
            if not self._at_once and worker is self._decode:
                logger.info(
                    "worker %s keeps the cache of a prompt for %d s that worker %s did not come for",
                    self.prefill.url,
                    LEASE_SECONDS,
                    worker.url,
                )
            raise
