"""The clients: they hold conversations as text, streamed or not, sometimes leave early, and check what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import aiohttp

from worker.models.ngram import shipped_corpus

_TURNS = (3, 12)
_REPLY_TOKENS = (16, 64)
_OBSERVATION = (20, 200)  # characters
_THINKING = (0.05, 0.6)  # seconds between two turns
_LEAVES = 0.06  # of the requests
_PATIENCE = 8  # failures in a row before a conversation is given up
BROKEN = (aiohttp.ClientError, ConnectionError, json.JSONDecodeError)

# Path, body, and the status that it must get.
BAD: tuple[tuple[str, bytes, int], ...] = (
    ("/generate", b'{"text": ""}', 400),
    ("/generate", b'{"text": "a", "sampling_params": {"n": 0.5}}', 400),
    ("/generate", b'{"input_ids": [1, -1]}', 400),
    ("/generate", b'{"text": "a"', 400),
    ("/generate", b'{"text": "a", "sampling_params": {"stop_regex": "("}}', 400),
    ("/generate", b"[" * 5_000, 400),
    ("/retrieve_from_text", b'{"text": 5}', 400),
    ("/retrieve_from_text", b'{"text": "nobody has said this", "strict": true}', 409),
    ("/radix_tree/explain", b'{"text": ["a"]}', 400),
    ("/abort_request", b"[" * 5_000, 400),
    ("/workers/nobody", b"", 405),
    ("/no/such/path", b"{}", 404),
)


class AnsweredTurn:
    """A reply that became part of a conversation."""

    def __init__(self, text: str, ids: list[int]) -> None:
        self.text = text
        self.ids = ids


class Clients:
    """All clients, in one event loop.

    Attributes:
        counts: actions and outcomes.
        wrong: descriptions of outcomes that must not happen.
        rids: the request ids of generations in flight that have one.
    """

    def __init__(self, url: str, incremental: Mapping[str, bool], seed: int) -> None:
        """`incremental`: by URL of a worker, whether its streams are incremental."""
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rids: set[str] = set()
        self._url = url
        self._incremental = incremental
        self._corpus = shipped_corpus().replace("<|im_start|>", "").replace("<|im_end|>", "")
        self._random = random.Random(seed)
        self._session: aiohttp.ClientSession

    async def run(self, conversations: int, bad_per_second: float, over: asyncio.Event) -> None:
        """Hold this many conversations at a time until the event is set; then finish those in progress."""
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(conversations):
                group.create_task(self._talk_on(random.Random(self._random.random()), over))
            group.create_task(self._misbehave(bad_per_second, over))

    async def _talk_on(self, rng: random.Random, over: asyncio.Event) -> None:
        await asyncio.sleep(rng.uniform(0, 2))
        while not over.is_set():
            await self._conversation(rng, over)

    async def _conversation(self, rng: random.Random, over: asyncio.Event) -> None:
        text, observation = "", f"{rng.getrandbits(64):x} {self._said(rng)}\n"
        turns: list[AnsweredTurn] = []
        failures = 0
        for _ in range(rng.randint(*_TURNS)):
            turn = await self._turn(text + observation, rng)
            if turn is not None:
                failures = 0
                turns.append(turn)
                text += observation + turn.text
                observation = f"\nObservation: {self._said(rng)}\n"
                if rng.random() < 0.15:
                    await self._check(text, turns)
            else:
                failures += 1
            if failures == _PATIENCE or over.is_set():
                break
            await asyncio.sleep(rng.uniform(*_THINKING))
        self.counts["conversations"] += 1
        if turns:
            await self._check(text, turns)

    def _said(self, rng: random.Random) -> str:
        begin = rng.randrange(len(self._corpus) - _OBSERVATION[1])
        return self._corpus[begin : begin + rng.randint(*_OBSERVATION)]

    async def _turn(self, text: str, rng: random.Random) -> AnsweredTurn | None:
        """Send one request. Return None if it brought no reply."""
        streams, leaves = rng.random() < 0.5, rng.random() < _LEAVES
        body: dict[str, Any] = {"text": text, "stream": streams}
        body["sampling_params"] = {"max_new_tokens": rng.randint(*_REPLY_TOKENS)}
        rid = f"{rng.getrandbits(128):032x}" if rng.random() < 0.5 else None
        if rid is not None:
            body["rid"] = rid
            self.rids.add(rid)
        self.counts["asked"] += 1
        try:
            headers = {"x-abort-policy": rng.choice(("retry", "retry", "return"))}
            async with asyncio.timeout(rng.uniform(0.05, 1.0) if leaves else None):
                return await self._ask(body, headers)
        except TimeoutError:
            self.counts["left" if leaves else "no answer in time"] += 1
        except BROKEN as error:
            self.counts[f"broken off: {type(error).__name__}"] += 1
        finally:
            self.rids.discard(rid or "")
        return None

    async def _ask(self, body: dict[str, Any], headers: dict[str, str]) -> AnsweredTurn | None:
        async with self._session.post(f"{self._url}/generate", json=body, headers=headers) as response:
            content = await response.read()
            self.counts[f"/generate {response.status}"] += 1
            if response.status != 200:
                if response.status not in (502, 503):
                    self.wrong.append(f"/generate: {response.status} {content[:300]!r}")
                return None
            if not body["stream"]:
                reply = json.loads(content)
                return AnsweredTurn(reply["text"], reply["output_ids"]) if reply["output_ids"] else None
            return self._streamed(content, self._incremental[response.headers["x-router-worker"]])

    def _streamed(self, content: bytes, incremental: bool) -> AnsweredTurn | None:
        events = content.split(b"\n\n")
        if events[-2:] != [b"data: [DONE]", b""]:
            raise ConnectionError("a stream without [DONE]")
        said = [json.loads(event.removeprefix(b"data: ")) for event in (events[:-2] if incremental else events[-3:-2])]
        if not said or "error" in said[-1]:
            self.counts["streams that end with an error"] += 1
            return None
        ids = [token for event in said for token in event["output_ids"]]
        return AnsweredTurn("".join(event["text"] for event in said), ids) if ids else None

    async def _check(self, text: str, turns: list[AnsweredTurn]) -> None:
        """Check that the text of a conversation, up to its last reply, retrieves the tokens of all replies."""
        body = {"text": text}
        try:
            async with self._session.post(f"{self._url}/retrieve_from_text", json=body) as response:
                found = await response.json()
        except BROKEN as error:
            self.wrong.append(f"a retrieval broke off: {error!r}")
            return
        self.counts["retrieved"] += 1
        if not found["exact"]:
            self.wrong.append(f"not exact: {found['reasons']}, {found['exact_chars']} of {len(text)} characters")
        elif not _is_whole(found, turns):
            self.wrong.append(f"other tokens than were sampled: {text[:60]!r}")

    async def _misbehave(self, per_second: float, over: asyncio.Event) -> None:
        while not over.is_set():
            path, body, expected = self._random.choice(BAD)
            try:
                async with self._session.post(self._url + path, data=body, headers=_JSON) as response:
                    await response.read()
                    self.counts["bad requests"] += 1
                    if response.status not in (expected, 503):
                        self.wrong.append(f"{path} {body[:60]!r}: {response.status} in the place of {expected}")
            except BROKEN as error:
                self.wrong.append(f"{path} {body[:60]!r}: {error!r}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 1 / per_second)


_JSON = {"content-type": "application/json"}


def _is_whole(found: dict[str, Any], turns: list[AnsweredTurn]) -> bool:
    """Return whether the tokens retrieved as sampled are those that were sampled, reply by reply.

    A reply without text is missing from the retrieval unless it is the last one, and a reply's hidden tail (the token that ends
    it) is left out where the text goes on.
    """
    pairs = zip(found["loss_mask"], found["tokens"], strict=True)
    runs = [[token for _, token in run] for sampled, run in groupby(pairs, key=lambda pair: pair[0]) if sampled]
    read = [turn.ids for turn in turns[:-1] if turn.text] + [turns[-1].ids]
    same = len(runs) == len(read) and all(run == ids[: len(run)] for run, ids in zip(runs, read, strict=True))
    return same and runs[-1] == read[-1]
