"""What one reply shall be, said beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from router.embedded.engine.faults import Fault

Finish = Literal["eos", "length", "abort"]


@dataclass(frozen=True)
class Script:
    """`ids` are sampled first; then `finish` says how it ends, and None goes on with what the worker's source draws."""

    ids: tuple[int, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[float, ...] = ()
    fault: Fault | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further keys at the top level of the reply
    extra_meta: dict[str, Any] = field(default_factory=dict)  # and in its meta_info

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Script:
        """From JSON: `sampling_params.custom_params["script"]`."""
        found: dict[str, Any] = {"finish": "eos", **given}
        return cls(**{**found, "ids": tuple(found.get("ids", ())), "logprobs": tuple(found.get("logprobs", ()))})


FREE = Script()  # nothing said
