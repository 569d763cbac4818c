"""Random agent histories through whole sessions, compared with an oracle that keeps full token lists.

The engine is a function that samples what it likes and writes down what it was sent. The oracle knows conversations as lists
of messages, and for each sample the whole list of ids that the engine consumed and produced.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import CollectorRegistry
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from middleware_hub import hub
from middleware_hub.hub import Hub
from middleware_hub.sessions_middleware import SessionsMiddleware
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.config import RadixConfig, RouterConfig, SessionsConfig
from router.errors import ClientDisconnectedError
from router.plugins import MiddlewareContext
from tests.conftest import examples
from tests.middleware_hub.sessions.trie.recount import recount
from tests.support import templates
from tests.support.agents import TOOLS
from tests.support.asgi_backend import AsgiBackend
from tests.support.vocabularies import load, vocabulary

OTHER_TOOLS = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "other"}}]
TEXTS = st.sampled_from(["Hello", "Go on.", "Why?"])
REPLIES = ("Yes.", "No.", '<tool_call>\n{"name": "look", "arguments": {"where": "x", "times": 1}}\n</tool_call>')
CONFIG = RouterConfig(
    radix=RadixConfig(tokenizer_path=str(vocabulary("qwen")), tokenizer_backend="huggingface"),
    sessions=SessionsConfig(
        chat_template=str(templates.folder() / "qwen2_5.jinja"), verify_rate=1.0, orphan_grace=60.0
    ),
)


@cache
def tokenizer() -> Tokenizer:
    return hub.load(CONFIG.radix)


class Engine:
    """Samples the same few texts in random spellings, and waits where it is told to."""

    def __init__(self, seed: int) -> None:
        self.tokenizer = load("qwen")
        self.eos = self.tokenizer.token_to_id("<|im_end|>")
        self.log: dict[str, list[int]] = {}
        self.waiting: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()
        self.holds = False
        self._random = random.Random(seed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads((await receive())["body"])
        if scope["path"] == "/abort_request":
            self.aborted.add(body["rid"])
            if body["rid"] in self.waiting:
                self.waiting[body["rid"]].set()
            await self._answer(send, {})
            return
        rid, ids = body["rid"], self._spelled(self._random.choice(REPLIES))
        if self.holds:
            gate = self.waiting[rid] = asyncio.Event()
            await gate.wait()
            del self.waiting[rid]
        finish: dict[str, Any] = {"type": "stop", "matched": self.eos}
        if rid in self.aborted:
            ids, finish = ids[:2], {"type": "abort"}
        else:
            ids = [*ids, self.eos]
        self.log[rid] = [*body["input_ids"], *ids]
        said = self.tokenizer.decode([token for token in ids if token != self.eos], skip_special_tokens=True)
        meta = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        await self._answer(send, {"text": said, "output_ids": ids, "meta_info": meta})

    def _spelled(self, text: str) -> list[int]:
        """The ids of a text, cut into words or letters by chance: rarely what encoding it gives."""
        pieces, begin = [], 0
        while begin < len(text):
            end = begin + self._random.randint(1, 6)
            pieces += self.tokenizer.encode(text[begin:end], add_special_tokens=False).ids
            begin = end
        return pieces

    @staticmethod
    async def _answer(send: Send, body: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"x-router-worker", b"http://engine")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode(), "more_body": False})


@dataclass
class Sample:
    """What the oracle knows of a generation: its conversation, and everything the engine saw and said."""

    tools: Any
    messages: list[dict[str, Any]]
    ids: list[int]


@dataclass
class Pending:
    """A request whose reply is not there yet."""

    tools: Any
    messages: list[dict[str, Any]]
    task: asyncio.Task[tuple[int, Any]]
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Histories(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = Engine(seed)
        shared: dict[type, object] = {Hub: Hub(tokenizer())}
        context = MiddlewareContext(CONFIG, CollectorRegistry(), shared=shared, backend=AsgiBackend(self.engine))
        self.app = SessionsMiddleware(self.engine, context)
        self.samples: dict[str, Sample] = {}
        self.pending: list[Pending] = []
        status, _ = self.do(self.call("POST", "/sessions", {"session_id": "s"}))
        assert status == 201

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.engine.holds = False
            for gate in self.engine.waiting.values():
                gate.set()
            self.do(self.app.registry.close())
            for pending in self.pending:
                pending.task.cancel()
            self.do(asyncio.sleep(0))
            self.loop.close()

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def call(
        self, method: str, path: str, body: Any, gone: asyncio.Event | None = None, *, again: bool = False
    ) -> tuple[int, Any]:
        content, given = json.dumps(body).encode(), False
        out: list[AsgiMessage] = []
        gone = gone or asyncio.Event()

        async def receive() -> AsgiMessage:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": content, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: AsgiMessage) -> None:
            out.append(message)

        headers = [(b"x-stainless-retry-count", b"1")] if again else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "state": {}}
        await self.app(scope, receive, send)
        return out[0]["status"], json.loads(b"".join(part.get("body", b"") for part in out[1:]))

    def conversation(self, data: st.DataObject, texts: list[str]) -> tuple[Any, list[dict[str, Any]]]:
        """The whole of a known one or a part of it, an earlier reply perhaps rewritten, and something new."""
        history: list[dict[str, Any]] = []
        tools = data.draw(st.sampled_from([TOOLS, OTHER_TOOLS]), label="tools")
        if self.samples and data.draw(st.integers(0, 3), label="go on"):
            known = self.samples[data.draw(st.sampled_from(list(self.samples)), label="which")]
            history = list(known.messages)
            if data.draw(st.integers(0, 4), label="keep tools"):
                tools = known.tools
            if data.draw(st.integers(0, 2), label="whole") == 0:
                history = history[: data.draw(st.integers(0, len(history)), label="until")]
            replies = [at for at, message in enumerate(history) if message["role"] == "assistant"]
            if replies and data.draw(st.integers(0, 5), label="rewrite") == 0:
                at = data.draw(st.sampled_from(replies), label="which reply")
                history[at] = {"role": "assistant", "content": "rewritten"}
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
            for call in (history[-1].get("tool_calls") or () if history else ())
        ]
        return tools, [*history, *answers, *({"role": "user", "content": text} for text in texts)]

    def expected(self, tools: Any, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of the newest sample of the longest known conversation that this one goes on with."""
        best: tuple[int, list[int]] = (0, [])
        for sample in self.samples.values():
            size = len(sample.messages)
            if sample.tools == tools and size >= best[0] and _same(messages[:size], sample.messages):
                best = size, sample.ids
        return best[1]

    @rule(data=st.data(), texts=st.lists(TEXTS, min_size=1, max_size=2), samples=st.integers(1, 3))
    def ask(self, data: st.DataObject, texts: list[str], samples: int) -> None:
        tools, messages = self.conversation(data, texts)
        expected = self.expected(tools, messages)
        body = {"messages": messages, "tools": tools, "n": samples}
        status, reply = self.do(self.call("POST", "/sessions/s/v1/chat/completions", body))
        assert status == 200, reply
        for choice in reply["choices"]:
            name = choice["meta_info"]["generation_id"]
            ids = self.engine.log[name]
            assert ids[: len(expected)] == expected, "the prompt does not begin with its parent's chain"
            self.samples[name] = Sample(tools, [*messages, _echo(data, choice["message"])], ids)

    @rule(data=st.data(), text=TEXTS)
    def ask_and_wait(self, data: st.DataObject, text: str) -> None:
        tools, messages = self.conversation(data, [text])
        self.engine.holds = True
        gone = asyncio.Event()
        body = {"messages": messages, "tools": tools}
        task = self.loop.create_task(self.call("POST", "/sessions/s/v1/chat/completions", body, gone))
        before = len(self.engine.waiting)
        while len(self.engine.waiting) == before:
            self.do(asyncio.sleep(0.001))
        self.engine.holds = False
        self.pending.append(Pending(tools, messages, task, gone))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """What waited is answered."""
        if self.pending:
            at = data.draw(st.integers(0, len(self.pending) - 1))
            pending = self.pending.pop(at)
            gate = list(self.engine.waiting.values())[at]
            gate.set()
            status, reply = self.do(pending.task)
            assert status == 200, reply
            (choice,) = reply["choices"]
            name = choice["meta_info"]["generation_id"]
            self.samples[name] = Sample(
                pending.tools, [*pending.messages, _echo(data, choice["message"])], self.engine.log[name]
            )

    @rule(data=st.data())
    def leave_and_come_back(self, data: st.DataObject) -> None:
        """A client loses its connection and sends its request again: the engine is not asked a second time."""
        if not self.pending:
            return
        pending = data.draw(st.sampled_from(self.pending))
        pending.gone.set()
        with pytest.raises(ClientDisconnectedError):
            self.do(pending.task)
        before = set(self.engine.waiting)
        pending.gone = asyncio.Event()
        body = {"messages": pending.messages, "tools": pending.tools}
        path = "/sessions/s/v1/chat/completions"
        pending.task = self.loop.create_task(self.call("POST", path, body, pending.gone, again=True))
        self.do(asyncio.sleep(0.002))
        assert set(self.engine.waiting) == before

    @rule()
    def delete(self) -> None:
        """Whoever waits is told; what was there is gone, and the name can be used again."""
        status, _ = self.do(self.call("DELETE", "/sessions/s", {}))
        assert status == 200
        for pending in self.pending:
            status, reply = self.do(pending.task)
            assert status == 409, reply
        self.pending.clear()
        self.samples.clear()
        status, _ = self.do(self.call("POST", "/sessions", {"session_id": "s"}))
        assert status == 201

    @rule()
    def refused(self) -> None:
        before = self.do(self.call("GET", "/sessions/s", {}))
        status, _ = self.do(self.call("POST", "/sessions/s/v1/chat/completions", {"messages": [{"role": "nobody"}]}))
        assert status == 400
        assert self.do(self.call("GET", "/sessions/s", {})) == before

    @invariant()
    def exported_is_what_the_engine_saw(self) -> None:
        if not hasattr(self, "app"):
            return
        (session,) = self.app.registry
        recount(session.trie)
        status, reply = self.do(self.call("GET", "/sessions/s/trajectories", {}))
        assert status == 200
        trained = 0
        for one in reply["trajectories"]:
            assert [*one["prompt_ids"], *one["response_ids"]] == self.engine.log[one["branch"]]
            assert one["exact"], one["reasons"]
            trained += sum(one["response_mask"])
        assert trained == sum(len(sample.span) for sample in session.trie.checkpoints()), "trained once, and all of it"


def _echo(data: st.DataObject, message: dict[str, Any]) -> dict[str, Any]:
    """A reply as a client sends it back."""
    kept = {"role": "assistant", "content": message["content"]}
    calls = message.get("tool_calls")
    if calls and data.draw(st.booleans(), label="print anew"):
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=2),
                },
            }
            for call in calls
        ]
    return {**kept, "tool_calls": calls} if calls else kept


def _same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return len(some) == len(others) and all(
        _plain(one) == _plain(other) for one, other in zip(some, others, strict=True)
    )


def _plain(message: dict[str, Any]) -> Any:
    calls = [(call["id"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return message["role"], message.get("content") or "", message.get("tool_call_id"), calls


Histories.TestCase.settings = settings(
    max_examples=examples(25),
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink takes minutes
)
TestHistories = Histories.TestCase
