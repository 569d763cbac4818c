"""The conversations of `benchmarks.routing.simulation` as a load over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from benchmarks.routing.fleet import WIDTH
from benchmarks.routing.simulation import SHARED, ConversationKind
from tests.support.vocabularies import load, vocabulary

VOCABULARY: Final = "qwen"


class TimedMeta(msgspec.Struct):
    """What a worker reports about a reply."""

    worker: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TimedReply(msgspec.Struct):
    text: str
    meta_info: TimedMeta


class Words:
    """Words of one token and four characters each, and texts made of them."""

    def __init__(self) -> None:
        vocab: dict[str, int] = load(VOCABULARY).get_vocab()
        found = sorted(token for token in vocab if re.fullmatch("Ġ[a-z]{3}", token))
        words = [" " + token[1:] for token in found]
        said = {
            "words": words,
            "ids": [vocab[token] for token in found],
            "tokenizer": str(vocabulary(VOCABULARY)),
        }
        self.said = msgspec.json.encode(said)
        self._random = random.Random(0)
        self._text = "".join(self._random.choices(words, k=500_000))

    def cut(self, tokens: int) -> str:
        """Return a text of this many tokens that was practically never used before."""
        start = self._random.randrange(len(self._text) // WIDTH - tokens) * WIDTH
        return self._text[start : start + tokens * WIDTH]


class ConversationLoad:
    """Conversations that ask, wait, think and ask again, until enough requests were sent."""

    def __init__(
        self, url: str, words: Words, kind: ConversationKind, inflight: int, requests: int, seed: int, *, keyed: bool
    ) -> None:
        self._url = f"{url}/generate"
        self._words = words
        self._kind = kind
        self._inflight = inflight
        self._keyed = keyed
        self._left = requests
        self._over = asyncio.Event()
        self._random = random.Random(seed)
        self._system = words.cut(kind.system)
        self._generation = words.cut(kind.dropped) if kind.dropped else ""
        self._decode = msgspec.json.Decoder(TimedReply).decode
        self.served: Counter[int] = Counter()  # tokens, by worker
        self.later = self.kept = self.prompt = self.cached = 0
        self.failures: Counter[str] = Counter()
        self.latencies: list[float] = []

    async def run(self, generation: float, cpu: Callable[[], float]) -> tuple[float, float]:
        """Run until the last request is sent. Return the seconds, and the seconds of the router's CPU.

        The conversations start within the duration of three generations.
        """
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        begun, before = time.perf_counter(), cpu()
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            talks = [
                group.create_task(self._talk(session, number, self._random.uniform(0, 3 * generation)))
                for number in range(max(1, 3 * self._inflight // self._kind.group))  # one generates while two think
            ]
            await self._over.wait()
            took, used = time.perf_counter() - begun, cpu() - before
            for talk in talks:
                talk.cancel()
        return took, used

    def _length(self, median: float) -> int:
        return max(1, round(self._random.lognormvariate(0, 1) * median))

    async def _talk(self, session: aiohttp.ClientSession, number: int, wait: float) -> None:
        """Hold conversations one after the other, or groups of them with the same first prompt."""
        await asyncio.sleep(wait)
        for name in itertools.count():
            text = self._system if self._random.random() < SHARED else self._words.cut(self._length(200))
            text += self._words.cut(self._length(150))
            async with asyncio.TaskGroup() as group:
                for sample in range(self._kind.group):
                    group.create_task(self._converse(session, f"{number}-{name}-{sample}", text))

    async def _converse(self, session: aiohttp.ClientSession, key: str, text: str) -> None:
        at: int | None = None
        for turn in range(min(40, self._length(5))):
            if turn:
                text += self._words.cut(self._length(150))
            self._left -= 1
            if self._left < 0:
                self._over.set()
                await asyncio.Event().wait()  # until cancelled
            begun = time.perf_counter()
            reply = await self._ask(session, key, text + self._generation)
            took = time.perf_counter() - begun
            if reply is None:
                await asyncio.sleep(took)
                return
            self.latencies.append(took)
            self._count(reply.meta_info, at)
            at = reply.meta_info.worker
            text += reply.text[WIDTH:-WIDTH] if self._kind.stripped else reply.text
            await asyncio.sleep(took * self._random.uniform(1, 3))

    async def _ask(self, session: aiohttp.ClientSession, key: str, text: str) -> TimedReply | None:
        sampling = {"max_new_tokens": self._length(300), "ignore_eos": True}
        body = msgspec.json.encode({"text": text, "sampling_params": sampling})
        headers = {"content-type": "application/json"}
        if self._keyed:
            headers["x-smg-routing-key"] = key
        try:
            async with session.post(self._url, data=body, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failures[type(error).__name__] += 1
            return None
        if response.status != 200:
            self.failures[str(response.status)] += 1
            return None
        return self._decode(content)

    def _count(self, meta: TimedMeta, at: int | None) -> None:
        self.served[meta.worker] += meta.prompt_tokens + meta.completion_tokens
        self.prompt += meta.prompt_tokens
        self.cached += meta.cached_tokens
        if at is not None:
            self.later += 1
            self.kept += at == meta.worker
