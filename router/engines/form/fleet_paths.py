"""The calls that go to all workers, and the effects of each. The calls of the common form are here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

Body = Mapping[str, Any]
Query = Mapping[str, str]


def never(_body: Body, _query: Query) -> bool:
    return False


def _if_asked(body: Body, _: Query) -> bool:
    return body.get("abort_all_requests") is True


class FleetPath(msgspec.Struct, frozen=True):
    """A call to all workers.

    Attributes:
        path: as in a route; a parameter is at its end.
        methods: separated by spaces.
        aborts: returns whether all generations in flight end, by the body and the query.
        transfer: whether it may take any time.
        updates: whether it changes the weights, or their version, so that there is one at a time.
        names_version: whether the version that it brings is that of the fleet from then on.
        pauses: whether it may begin or end a pause.
        lasting: whether it is still right when its worker gets it late.
        prefill_first: whether decode workers get it after the prefill workers have done it.
        wants_object: whether a body without anything has to be an object.
        engine: the only engine that has it; for other engines it is a path like any other. Empty for the common form.
    """

    path: str
    methods: str = "POST"
    aborts: Callable[[Body, Query], bool] = never
    transfer: bool = False
    updates: bool = False
    names_version: bool = False
    pauses: bool = False
    lasting: bool = False
    prefill_first: bool = False
    wants_object: bool = False
    engine: str = ""

    def fits(self, path: str) -> bool:
        """Return whether a request with this path is such a call."""
        begin, parameter, _ = self.path.partition("{")
        return path.startswith(begin) if parameter else path == self.path


PAUSES = frozenset({"/pause_generation", "/pause", "/sleep"})
"""Calls with which a pause begins, of all engines. In front of the workers of another one they are paths like any other."""
CONTINUES = frozenset({"/continue_generation", "/resume", "/wake_up"})
"""Those with which it ends."""
_ASLEEP = {"sleeping": True, "awake": False}


def asleep(answers: Iterable[Any]) -> bool | None:
    """Return whether a worker is asleep, and so paused, by their answers to a call; None if none of them says so.

    vLLM's wake up by parts, with `tags`. They stay paused until they have all of their memory, and then any pause is over.
    """
    said = [_ASLEEP.get(str(one.get("status"))) for one in answers if isinstance(one, dict)]
    return max((one for one in said if one is not None), default=None)


COMMON = (
    FleetPath(
        "/pause_generation",
        aborts=lambda body, _: body.get("mode", "abort") == "abort",
        pauses=True,
        wants_object=True,
    ),
    # A worker that hung may still run the pause later.
    FleetPath("/continue_generation", pauses=True, lasting=True, prefill_first=True, wants_object=True),
    FleetPath("/flush_cache", "GET POST"),
    # For vLLM these are a pause and its end.
    FleetPath("/release_memory_occupation", "GET POST", transfer=True, pauses=True),
    FleetPath("/resume_memory_occupation", "GET POST", transfer=True, pauses=True),
    FleetPath("/update_weights_from_{source}", aborts=_if_asked, transfer=True, updates=True, names_version=True),
    FleetPath(
        "/update_weight_version",
        aborts=lambda body, _: body.get("abort_all_requests", True) is not False,
        updates=True,
        names_version=True,
    ),
    FleetPath("/begin_weight_update", aborts=_if_asked, transfer=True, updates=True),
    FleetPath("/end_weight_update", aborts=_if_asked, transfer=True, updates=True),
    FleetPath("/load_lora_adapter", transfer=True),
    FleetPath("/load_lora_adapter_from_tensors", transfer=True),
    FleetPath("/unload_lora_adapter", transfer=True),
)
