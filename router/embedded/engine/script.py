"""What one reply is to be, decided beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from router.embedded.engine.faults import Fault

Finish = Literal["eos", "length", "abort"]


@dataclass(frozen=True)
class Script:
    """How one reply begins and ends.

    Attributes:
        ids: sampled first.
        finish: how the reply ends behind them; None goes on with what the worker's source samples.
        logprobs: of the first tokens, in place of the source's.
        fault: how the reply misbehaves.
        extra: further keys at the top level of the reply.
        extra_meta: further keys in its `meta_info`.
    """

    ids: tuple[int, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[float, ...] = ()
    fault: Fault | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    extra_meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Script:
        """Read the JSON of `sampling_params.custom_params["script"]`."""
        found: dict[str, Any] = {"finish": "eos", **given}
        return cls(**{**found, "ids": tuple(found.get("ids", ())), "logprobs": tuple(found.get("logprobs", ()))})


FREE = Script()  # decides nothing
