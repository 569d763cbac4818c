"""Models that only score: a teacher, a reference. They say how likely they find the tokens of others, and sample none.

    --scorer teacher=http://10.0.0.7:30000      an SGLang
    --scorer ref=vllm+http://10.0.0.8:8000      a vLLM

A scorer is no worker: no generation and no call to all workers reaches it. It is asked as SGLang is asked for the logprobs of a
prompt, for vLLM in translation (`/generate` with `max_new_tokens: 0` and `logprob_start_len`), a sequence at a time, and its
answer has to be about exactly the ids that were sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from router.engines.json import JSON_ERRORS
from router.errors import BadRequestError, UpstreamError, UpstreamTimeoutError
from router.http.time_limits import patience
from router.http.upstream import Upstream, UpstreamFailure, fetch

AT_ONCE: Final = 16
"""Sequences that one scorer is given at a time: its prefill is busy with few long ones."""
ATTEMPTS: Final = 3
PAUSE: Final = 0.5
"""Seconds before the second attempt, and twice as many before the third."""
MOST_KEPT: Final = 4_000_000
"""Numbers that are kept of calls that failed, so that the next one goes on from there."""
_FULL: Final = (429, 503)
_REFUSED: Final = (400, 413, 422)
"""What an engine answers to a sequence that it cannot score: too long, or with ids that it does not know."""
_HEADERS: Final = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]


class Scored(msgspec.Struct, frozen=True):
    """What a scorer says of the tokens of a sequence from a position on; one entry for each.

    Attributes:
        logprobs: of the tokens themselves.
        top: of its likeliest tokens, `[logprob, id]`, the likeliest first; None if they were not asked for.
    """

    logprobs: list[float]
    top: list[list[tuple[float, int]]] | None

    @property
    def numbers(self) -> int:
        return len(self.logprobs) + 2 * sum(map(len, self.top or ()))


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]
    input_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta


_decode = msgspec.json.Decoder(_Reply).decode
_Key = tuple[str, bytes, int, int]


class Scorers:
    """Asks scorers by their names. What they said in a call that failed is kept for the next call.

    Args:
        ways: by the names of the scorers, what sends them requests in SGLang's form, and their URLs.
        seconds: how long one sequence may take.
    """

    def __init__(self, ways: Mapping[str, tuple[Upstream, str]], *, seconds: float) -> None:
        self.names: Sequence[str] = tuple(ways)
        self._ways = ways
        self._seconds = seconds
        self._free = {name: asyncio.Semaphore(AT_ONCE) for name in ways}
        self._kept: OrderedDict[_Key, Scored] = OrderedDict()
        self._numbers = 0

    async def score(self, names: Sequence[str], sequences: Sequence[tuple[Raw, int]], top: int) -> list[list[Scored]]:
        """Return what each scorer says of each sequence: a list for each sequence, in the order of `names`.

        Args:
            sequences: ids as a JSON list, and the first position that is scored, at least 1.
            top: how many likeliest tokens to return for each position.

        Raises UpstreamError and UpstreamTimeoutError if a scorer does not answer, or not about these ids, and BadRequestError
        if it refuses them. All others have been answered then; the same call, made again, asks only for what is missing.
        """
        keys = [
            [(name, hashlib.blake2b(ids, digest_size=16).digest(), start, top) for name in names]
            for ids, start in sequences
        ]
        wanted = {key: ids for row, (ids, _) in zip(keys, sequences, strict=True) for key in row}
        found = {key: scored for key in wanted if (scored := self._kept.pop(key, None)) is not None}
        self._numbers -= sum(scored.numbers for scored in found.values())
        tasks = {key: asyncio.create_task(self._ask(key, ids)) for key, ids in wanted.items() if key not in found}
        try:
            if tasks:
                await asyncio.wait(tasks.values())
        except asyncio.CancelledError:  # the client has left
            for task in tasks.values():
                task.cancel()
            self._keep({**found, **_answered(tasks)})
            raise
        found |= _answered(tasks)
        if len(found) < len(wanted):
            self._keep(found)
            for task in tasks.values():
                task.result()  # raises the first failure
        return [[found[key] for key in row] for row in keys]

    def _keep(self, found: Mapping[_Key, Scored]) -> None:
        for key, scored in found.items():
            if key not in self._kept:  # else another call, at the same time, has kept it
                self._kept[key] = scored
                self._numbers += scored.numbers
        while self._numbers > MOST_KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._numbers -= oldest.numbers

    async def _ask(self, key: _Key, ids: Raw) -> Scored:
        name, _, start, top = key
        upstream, url = self._ways[name]
        body = msgspec.json.encode(
            {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": start - 1,  # engines give none for the first one
                **({"top_logprobs_num": top} if top else {}),
            }
        )
        async with self._free[name]:
            content = await self._sent(name, upstream, f"{url}/generate", body)
        return _read(name, content, msgspec.json.decode(ids, type=list[int])[start:], top)

    async def _sent(self, name: str, upstream: Upstream, url: str, body: bytes) -> bytes:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with patience(self._seconds):
                    status, content = await fetch(upstream, "POST", url, _HEADERS, body, limit=1 << 30)
            except UpstreamFailure as failure:
                why = str(failure)
            except TimeoutError:
                raise UpstreamTimeoutError(
                    f"scorer {name!r} took longer than {self._seconds:g} s for a sequence"
                ) from None
            else:
                if status == 200:
                    return content
                why = f"it answers {status}: {content[:300].decode('utf-8', 'replace')}"
                if status in _REFUSED:
                    raise BadRequestError(f"scorer {name!r} refuses a sequence: {why}")
                if status not in _FULL:
                    break
            if attempt < ATTEMPTS:
                await asyncio.sleep(PAUSE * attempt)
        raise UpstreamError(f"scorer {name!r} failed: {why}")


def _answered(tasks: Mapping[_Key, asyncio.Task[Scored]]) -> dict[_Key, Scored]:
    """Return the answers of the tasks that have one. Failures are looked at, so that nobody warns of them."""
    return {
        key: task.result()
        for key, task in tasks.items()
        if task.done() and not task.cancelled() and task.exception() is None
    }


def _read(name: str, content: bytes, expected: list[int], top: int) -> Scored:
    """Return what an answer says of the expected ids. Raises UpstreamError if it is about others, or lacks numbers."""
    try:
        meta = _decode(content).meta_info
    except JSON_ERRORS as error:
        raise UpstreamError(f"scorer {name!r} failed: its answer has no logprobs of the prompt ({error})") from error
    entries = meta.input_token_logprobs[1:]
    if len(entries) != len(expected):
        raise UpstreamError(
            f"scorer {name!r} failed: it scored {len(entries)} tokens, and not the {len(expected)} that it was sent"
        )
    if [token for _, token, _ in entries] != expected:
        raise UpstreamError(f"scorer {name!r} failed: it scored other tokens than those that it was sent")
    logprobs = [logprob for logprob, _, _ in entries if logprob is not None and math.isfinite(logprob)]
    if len(logprobs) != len(expected):
        raise UpstreamError(f"scorer {name!r} failed: {len(expected) - len(logprobs)} tokens have no finite logprob")
    if not top:
        return Scored(logprobs, None)
    tops = [
        [(logprob, token) for logprob, token, _ in one or () if logprob is not None]
        for one in (meta.input_top_logprobs or [])[1:]
    ]
    if len(tops) != len(expected) or any(len(one) < top for one in tops):
        raise UpstreamError(f"scorer {name!r} failed: it does not give the {top} likeliest tokens of each position")
    return Scored(logprobs, [one[:top] for one in tops])
