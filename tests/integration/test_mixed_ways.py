"""An agent that keeps its ids itself, and asks every time in another way, at another router: as text, as ids, as a chat.

The oracle is a list of ids: what was sent and sampled, and behind it the encoding of what the template writes after the last
reply. Every worker has to read just that, and the answer for the last text has to be that list, with each sampled token's mask
and logprob. Replies are spelled as no tokenizer would, so that a text that is encoded again is never the same.

A text that the tokenizer normalizes, and a special token or half a character in a reply, are left out: ids spell them otherwise
than the client does, and then a text and a chat are two conversations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.conftest import examples
from tests.support.chat_models import chat_model, markers_of
from tests.support.lives import Router
from tests.support.shapes import ChatModel
from worker.engine.records import GenerationRecord
from worker.worker import EmbeddedWorker

NAME = "qwen2_5"
"""Its template writes what was said as it was said."""
WAYS = ("/generate", "/generate ids", "/v1/completions", "/v1/completions ids", "/v1/chat/completions", "/v1/messages")
SAID = (
    "Hello",
    "a\r\nb",
    "x\x00y",
    "🙂👍🏽",
    "  spaces  ",
    "\ufffd",
    "\u2028",
    "tool",
    "q" * 260,
    "é" * 255 + "🙂",
    "x" * 1030,
)
PIECES = (
    "Hello",
    " world",
    "\n\n",
    "  ",
    "日本",
    "🙂",
    "\r\n",
    "user\n",
    "assistant\n",
    "\x00",
    "...",
    "<|",
    "im_end|>",
    "w " * 130,
)


@dataclass
class Agent:
    """See the top of this file.

    Attributes:
        chain: all ids that were sent and sampled.
        seen: their text, as the client has it.
        messages: the conversation, which ends with what the agent has to say next.
        records: what the worker knows of each turn.
    """

    model: ChatModel
    worker: EmbeddedWorker
    random: random.Random
    namespace: str
    chain: list[int] = field(default_factory=list)
    seen: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    records: list[GenerationRecord] = field(default_factory=list)

    @property
    def eos(self) -> str:
        return markers_of(NAME).eos

    def turn(self, routers: list[Router]) -> None:
        """Say something, have one or two samples, and go on with one of them."""
        self.messages.append({"role": "user", "content": self.random.choice(SAID)})
        text = self.model.template.whole(self.messages, None, {})
        rest = text.removeprefix(self.seen)
        if self.chain and self.model.spell(self.chain[-1:]) == self.eos:
            rest = rest.removeprefix(self.eos)  # it was sampled
        prompt = [*self.chain, *self.model.encode(rest)]
        # They begin otherwise: nobody can tell which of two equal texts is meant.
        beginnings = self.random.choice([("",), ("",), ("", "B")])
        record = self.random.choice([self._sample(routers, text, prompt, begins) for begins in beginnings])
        self.records.append(record)
        self.chain = [*prompt, *record.output_ids]
        self.seen = text + record.text
        self.messages.append({"role": "assistant", "content": record.text})

    def _sample(self, routers: list[Router], text: str, prompt: list[int], begins: str) -> GenerationRecord:
        """Have a reply in any way, at any router; `begins` is how it begins."""
        draw = self.random
        ids = self.model.encode(begins) + [one for _ in range(draw.randrange(6)) for one in self._piece()]
        limit = draw.choice([400, len(ids) or 1])
        self.worker.forget_scripts()
        self.worker.script(ids=[*ids, *self.model.encode(self.eos)], finish=None)
        begin, way = len(self.worker.log), draw.choice(WAYS)
        body = self._body(way, text, prompt, limit)
        stack = draw.choice(routers).stack
        answer = stack.post(way.split()[0], body, headers={"x-radix-namespace": self.namespace})
        assert answer.status == 200, answer.content
        (record,) = self.worker.log[begin:]
        assert list(record.input_ids) == prompt, way
        return record

    def _piece(self) -> list[int]:
        """As a tokenizer would spell it, or letter by letter."""
        piece = self.random.choice(PIECES)
        return (
            self.model.encode(piece) if self.random.random() < 0.5 else [i for c in piece for i in self.model.encode(c)]
        )

    def _body(self, way: str, text: str, ids: list[int], limit: int) -> dict[str, Any]:
        path, *form = way.split()
        stops = {"stop_token_ids": self.model.encode(self.eos)}
        stream = self.random.random() < 0.4
        if path == "/generate":
            prompt: dict[str, Any] = {"input_ids": ids} if form else {"text": text}
            return {**prompt, "sampling_params": {**stops, "max_new_tokens": limit}, "stream": stream}
        prompt = {"prompt": ids if form else text} if path == "/v1/completions" else {"messages": self.messages}
        return {**prompt, **stops, "model": "m", "max_tokens": limit, "stream": stream}

    def check(self, router: Router) -> None:
        found = router.stack.retrieve(self.seen, namespace=self.namespace)
        mask, logprobs = [0] * len(self.chain), [0.0] * len(self.chain)
        for record in self.records:
            low, high = len(record.input_ids), len(record.input_ids) + len(record.output_ids)
            mask[low:high] = [1] * len(record.output_ids)
            logprobs[low:high] = record.logprobs
        assert found["exact"], found["reasons"]
        assert (found["tokens"], found["loss_mask"], found["rollout_logp"]) == (self.chain, mask, logprobs)


@pytest.fixture(scope="module", params=["one", "two over a store"])
def routers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Router]]:
    folder: Path = tmp_path_factory.mktemp("store")
    store = None if request.param == "one" else StoreConfig(url=f"sqlite:{folder / 'store.sqlite3'}")
    with EmbeddedWorker(chat_model(NAME), token_delay=0) as worker:
        running = [Router(worker, store, folder=chat_model(NAME)) for _ in range(1 if store is None else 2)]
        yield running
        for router in running:
            router.stop()


@pytest.mark.hypothesis  # `make test-slow` has all examples of it, too
@pytest.mark.parametrize("seed", range(4))
def test_a_conversation_is_one_sequence_whichever_way_it_goes(routers: list[Router], seed: int) -> None:
    (worker,) = routers[0].stack.workers
    model = ChatModel(NAME)
    for number in range(examples(20, share=5)):
        drawn = random.Random(f"{seed} {number}")
        agent = Agent(model, worker, drawn, f"n{seed}-{number}")
        for _ in range(drawn.randrange(2, 8)):
            if len(routers) > 1 and drawn.random() < 0.03:
                drawn.choice(routers).restart()
            agent.turn(routers)
        agent.check(drawn.choice(routers))
