"""The way of a prompt's cache from a prefill worker to a decode worker, as far as clients of SGLang see it.

    prefill                                     decode
    waits until its room is asked for  <------  asks for the room, and waits
    computes the prompt, samples a token
    hands over the room  -------------------->  goes on from that token
    ends with that token                        ends as any generation does

Both legs of a request name the same room. Whichever comes first waits for the other. A leg that ends early fails the other one.

A pause that retracts takes the cache from a decode worker. When it goes on, it asks its prefill worker, by a `/generate` of its
own, for the cache of the prompt and of all tokens but the last one, and then goes on behind the last one
(`scheduler.py`, `Req.build_rebootstrap_payload` in SGLang 0.5.23).

No cache moves here: the decode worker samples as the prefill worker would go on, given its seed and its first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worker.engine.records import FinishReason


@dataclass(frozen=True)
class Bootstrap:
    """Where the two legs of a request meet, as the request says it: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`."""

    host: str
    port: int
    room: int
    prefill_rank: int | None = None  # the data-parallel rank of the prefill worker, as a decode worker is told it


@dataclass(frozen=True)
class Handover:
    """What a decode worker gets of a prompt."""

    seed: str  # of the sample
    first: tuple[int, float] | None  # the token that was sampled, and its logprob; None if there is none

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Handover:
        first = given["first"]
        return cls(given["seed"], None if first is None else (first[0], first[1]))


class Leg:
    """One leg of a request at its worker.

    Attributes:
        ready: whether it may sample.
        done: whether what it hands over has been taken. A decode leg hands over nothing.
        lost: whether a decode leg's cache was taken back, and has to be computed again.
        failure: why it cannot go on; None if it can.
        handover: what passes from the prefill leg to the decode leg.
    """

    def __init__(self, room: int, changed: Callable[[], object], *, prefill: bool) -> None:
        """`changed` is called after each change."""
        self.room = room
        self.prefill = prefill
        self.ready = self.done = self.lost = False
        self.failure: str | None = None
        self.handover: Handover | None = None
        self._changed = changed

    def begin(self) -> None:
        """Let it sample: the other leg is there."""
        self.ready = True
        self._changed()

    def give(self, handover: Handover) -> None:
        """Take what passes to the decode leg, which may sample then."""
        self.handover, self.ready = handover, True
        self._changed()

    def taken(self) -> None:
        """Note that the other leg has it."""
        self.done = True
        self._changed()

    def lose(self) -> None:
        """Take its cache from a decode leg, which may sample again once it has that again."""
        self.lost, self.ready, self.done = True, False, False

    def fail(self, why: str) -> None:
        """End it, unless it is done. The first reason counts."""
        if not self.done and self.failure is None:
            self.failure = why
            self._changed()

    def reason(self) -> FinishReason:
        """Return how a failed leg ends: SGLang answers 500, and in a stream with an abort of that code."""
        return {"type": "abort", "message": self.failure, "status_code": 500, "err_type": "InternalServerError"}


class Rooms:
    """The prefill legs of a worker, by room, and the questions of decode workers that came before them."""

    def __init__(self) -> None:
        self._legs: dict[int, Leg] = {}
        self._asked: set[int] = set()

    def enter(self, leg: Leg) -> None:
        """Take in a prefill leg. A room that is taken fails the new leg."""
        if leg.room in self._legs:
            leg.fail(f"bootstrap room {leg.room} is in use")
            return
        self._legs[leg.room] = leg
        if leg.room in self._asked:
            leg.begin()

    def leave(self, leg: Leg) -> None:
        if self._legs.get(leg.room) is leg:
            del self._legs[leg.room]

    def ask(self, room: int) -> None:
        """Note that a decode worker waits for a room."""
        self._asked.add(room)
        if room in self._legs:
            self._legs[room].begin()

    def asked_no_more(self, room: int) -> None:
        """Note that nobody waits for a room any more: its leg fails, unless it has handed over."""
        self._asked.discard(room)
        if room in self._legs:
            self._legs[room].fail(f"the decode side of bootstrap room {room} has left")

    def leg(self, room: int) -> Leg | None:
        return self._legs.get(room)
