"""Runs work that would block the event loop in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
"""One thread for the process. With several, each of them would get its turn before the event loop gets its own."""


async def offload(heavy: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns. It is done in a thread if it is `heavy`.

    Python's threads take turns of half a millisecond (`SWITCH_SECONDS` of the server), so the work has to consist of many small
    calls: one long call into a library holds up the event loop from a thread just as well.
    """
    if not heavy:
        return work(*args, **kwargs)
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, lambda: context.run(work, *args, **kwargs))
