"""What a middleware asks each worker about itself, such as whether it has the same tokenizer.

The answer changes nothing about the routing: a warning is logged, and `GET /workers` shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.engines.engine import Call


@dataclass(frozen=True)
class WorkerCheck:
    """One question.

    Attributes:
        call: is sent to a worker once it is healthy, and again after it may have been restarted.
        judge: returns what is wrong with a worker that gives this answer (status 200), or None. It is not called for other
            answers: not every version of an engine has every path.
    """

    call: Call
    judge: Callable[[bytes], str | None]
