"""Ends generations by the id that their clients know, at whichever router they are.

An abort is an entry in the routers' log before any worker gets it, so that no router resends such a generation. SGLang's rule
for ids holds for all routers together: an abort ends the generations with exactly this id, or, if no router has one, those
whose ids begin with it. So for an id that this router does not have, it asks the others twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.types import Scope

from router.generate.fleet_calls import CallSender, FleetCall, WorkerAnswer
from router.http.headers import HeaderList
from router.peers.events import Abort, AbortAnswered
from router.peers.peers import Heard, Peers
from router.proxy.in_flight import GenerationsInFlight, InFlight

logger = logging.getLogger(__name__)

_Meant = Sequence[tuple[InFlight, int]]

_LONGER = 5.0
"""Seconds that another router has beyond `--fleet-timeout`, to report what its workers said."""


class NamedAborts:
    """Aborts that clients ask for here, and those that they asked for at other routers."""

    def __init__(
        self,
        in_flight: GenerationsInFlight,
        sender: CallSender,
        peers: Peers,
        headers: Callable[[Scope], HeaderList],
    ) -> None:
        """`headers`: those of a request that its worker gets, too."""
        self._in_flight = in_flight
        self._sender = sender
        self._peers = peers
        self._headers = headers
        self._answered: dict[int, list[AbortAnswered]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        peers.log.hear(Abort, self._asked_elsewhere)
        peers.log.hear(AbortAnswered, self._answered_elsewhere)

    async def end(self, abort: Abort, scope: Scope) -> tuple[list[WorkerAnswer], bool, Heard]:
        """End the generations that an abort means. Return what workers said, whether there were any, and who heard of it.

        `scope`: of the request that asks for it.
        """
        here = self._in_flight.named(abort.rid, abort.tenant)
        if _of_this_name(here, abort.rid) or self._peers.kind is None:
            _mark(here)
            heard = await self._peers.tell(replace(abort, exact=bool(here)), seconds=0.0)
            self._answered.pop(heard.number, None)
            return await self._call_workers(here, abort, scope), bool(here), heard
        heard, answers, found = await self._ask(replace(abort, exact=True))
        if not found:
            _mark(here)
            (heard, answers, found), mine = await asyncio.gather(
                self._ask(abort), self._call_workers(here, abort, scope)
            )
            answers = [*mine, *answers]
        return answers, found or bool(here), heard

    async def _ask(self, abort: Abort) -> tuple[Heard, list[WorkerAnswer], bool]:
        """Ask all other routers. Return who heard, what their workers said, and whether one of them had such a generation."""
        heard = await self._peers.tell(abort, seconds=self._sender.seconds + _LONGER)
        await self._peers.catch_up()
        answered = self._answered.pop(heard.number, [])
        answers = [msgspec.convert(answer, WorkerAnswer) for one in answered for answer in one.answers]
        return heard, answers, bool(answered)

    async def close(self) -> None:
        """Wait a moment for the last answers."""
        if self._answering:
            await asyncio.wait(self._answering, timeout=1.0)

    async def _asked_elsewhere(self, abort: Abort, number: int, own: bool) -> None:
        if own:
            self._answered[number] = []
            return
        named = self._in_flight.named(abort.rid, abort.tenant)
        meant = _of_this_name(named, abort.rid) if abort.exact else named
        if meant:
            _mark(meant)
            self._peers.presence.busy.add(number)
            task = asyncio.create_task(self._answer(abort, number, meant))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, abort: Abort, number: int, meant: _Meant) -> None:
        """Abort generations at their workers for another router, and report to it what they said."""
        try:
            answers = await self._call_workers(meant, abort, None)
            told = tuple(msgspec.to_builtins(answer) for answer in answers)
            await self._peers.tell(AbortAnswered(number, told), seconds=0.0)
        finally:
            self._peers.presence.busy.discard(number)
            await self._peers.announce()

    async def _answered_elsewhere(self, event: AbortAnswered, _: int, own: bool) -> None:
        if not own and event.abort in self._answered:
            self._answered[event.abort].append(event)

    async def _call_workers(self, meant: _Meant, abort: Abort, scope: Scope | None) -> list[WorkerAnswer]:
        """Send the abort to the workers; without a `scope`, with the headers of the generation itself."""
        calls = []
        for one, position in meant:
            at_worker = one.rids.get(position)
            if one.worker is not None and at_worker is not None:
                headers = self._headers(scope or one.scope or {"headers": []})
                calls.append(self._sender.send(one.worker, abort_call(headers, {**abort.fields, "rid": at_worker})))
        return await asyncio.gather(*calls)


def abort_call(headers: HeaderList, body: dict[str, Any]) -> FleetCall:
    return FleetCall("POST", "/abort_request", headers, msgspec.json.encode(body), lasting=True)


def _of_this_name(meant: _Meant, rid: str) -> _Meant:
    return [(one, position) for one, position in meant if one.names[position] == rid]


def _mark(meant: _Meant) -> None:
    for one, position in meant:
        one.end((position,))
