"""How the router treats generations that their workers aborted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.config.flag import NOT_NEGATIVE, Section, flag

AbortPolicy = Literal["retry", "return"]


@dataclass(frozen=True)
class AbortConfig(Section):
    """Whether an aborted generation is sent again (`attempts` in all, `wait` seconds apart) or returned as it is."""

    TITLE = "aborted generations"

    policy: AbortPolicy = flag(
        "--abort-policy", "retry", "what to do with aborted generations; x-abort-policy overrules it for one request"
    )
    attempts: int = flag("--abort-retries", 5, "attempts in all, with the first one")
    wait: float = flag(
        "--abort-retry-wait", 30.0, "time between attempts; best as long as a weight update takes", limit=NOT_NEGATIVE
    )
