"""Random conversations whose earlier messages come back changed, judged by what the worker read and sampled.

A change that the model would not see (`INVISIBLE`) leaves one trajectory, with every sampled id. An edit (`EDITS`) keeps every
token before it; the test knows where it is, because it wrote the turn.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.integration.conftest import Stacks
from tests.support import three_dialects
from tests.support.agents import AgentSession, Turn, ids_of, user
from tests.support.chat_models import chat_model
from tests.support.shapes import ChatModel
from tests.support.stack import Stack, stack
from tests.support.usual import usual

Said = dict[str, Any]
TOOLS: list[Said] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "depth": {"type": "integer", "default": 1},
                    "all": {"type": "boolean", "default": False},
                },
                "required": ["path"],
            },
        },
    }
    for name in ("look", "see")
]
MODELS = ("qwen3", "qwen3_5_think", "glm4moe", "gptoss")
HARMONY_TURN = "<|end|><|start|>assistant"


@dataclass
class Draft:
    """A turn before it is sampled: its text, and what stands where in it."""

    text: str = ""
    places: dict[str, int] = field(default_factory=dict)

    def add(self, text: str, name: str = "") -> None:
        if name:
            self.places[name] = len(self.text)
        self.text += text


def arguments_of(drawn: random.Random) -> Said:
    found: Said = {"path": "".join(drawn.choices("abc/ .é", k=drawn.randint(1, 5))).strip() or "x"}
    if drawn.random() < 0.4:
        found["depth"] = drawn.choice([1, 2])
    if drawn.random() < 0.3:
        found["all"] = drawn.choice([True, False])
    items = list(found.items())
    drawn.shuffle(items)
    return dict(items)


def called(model: str, name: str, arguments: Said, drawn: random.Random) -> str:
    """A call in the form of a model, with white space and an order of its own."""
    if model == "qwen3":
        separators = drawn.choice([(", ", ": "), (",", ":"), (" , ", " : ")])
        written = json.dumps(arguments, separators=separators, ensure_ascii=drawn.random() < 0.5)
        return f'<tool_call>\n{{"name": "{name}",{drawn.choice(["", " ", "  "])}"arguments": {written}}}\n</tool_call>'
    spelled = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if model == "qwen3_5_think":
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in spelled.items())
        return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"
    if model == "glm4moe":
        inside = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in spelled.items()
        )
        return f"<tool_call>{name}\n{inside}</tool_call>"
    written = json.dumps(arguments, separators=drawn.choice([(", ", ": "), (",", ":")]))
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{written}<|call|>"


def drafted(model: str, drawn: random.Random, *, calls: int) -> Draft:
    draft = Draft()
    thought, text = f"hm {drawn.randint(0, 99)}", f"I look, {drawn.randint(0, 99)}."
    says = drawn.random() < 0.7 or not calls
    if model == "gptoss":
        draft.add(f"<|channel|>analysis<|message|>{thought}")
        draft.add(HARMONY_TURN)
        if calls:
            draft.add(called(model, "look", arguments_of(drawn), drawn), "call 0")
        else:
            draft.add("<|channel|>final<|message|>")
            draft.add(text, "text")
        return draft
    gap = drawn.choice(["", "\n", "\n\n"])
    if model == "glm4moe":
        draft.add(f"<think>{thought}</think>\n{gap}")
    else:
        draft.add(f"{'' if model == 'qwen3_5_think' else '<think>' + chr(10)}{thought}\n</think>\n\n{gap}")
    if says:
        draft.add(text, "text")
        draft.add(drawn.choice(["\n", "\n\n", "\n\n\n"]) if calls else "")
    for number in range(calls):
        draft.add(called(model, drawn.choice(["look", "see"]), arguments_of(drawn), drawn), f"call {number}")
        draft.add("\n" if number + 1 < calls else "")
    return draft


@cache
def model_of(name: str) -> ChatModel:
    return ChatModel(name)


def odd_ids(model: str, text: str, drawn: random.Random) -> list[int]:
    """A text in ids that an encoder would not make of all of it. Special tokens stay whole."""
    found, at = list[int](), 0
    while at < len(text):
        end = text.find("<", at + 1)
        piece = text[at : min(at + drawn.randint(1, 6), end if end > at else len(text))]
        if text[at] == "<":
            piece = text[at : text.find(">", at) + 1] or text[at]
        found += model_of(model).encode(piece)
        at += len(piece)
    return found


# What a harness changes, and the model does not see --------------------------------------------------------------------


def _no_reasoning(message: Said, _: random.Random) -> None:
    message.pop("reasoning_content", None)


def _moved_reasoning(message: Said, drawn: random.Random) -> None:
    thought = message.pop("reasoning_content", None)
    if thought:
        tag = drawn.choice(["think", "thinking"])
        message["content"] = f"<{tag}>\n{thought.strip()}\n</{tag}>\n\n{message.get('content') or ''}"


def _named(message: Said, _: random.Random) -> None:
    message["name"] = "coder"


def _rewritten_arguments(message: Said, drawn: random.Random) -> None:
    for call in message.get("tool_calls") or ():
        items = list(json.loads(call["function"]["arguments"]).items())
        drawn.shuffle(items)
        call["function"]["arguments"] = json.dumps(dict(items), indent=drawn.choice([None, 2]))


def _defaults(message: Said, _: random.Random) -> None:
    for call in message.get("tool_calls") or ():
        arguments = {"depth": 1, "all": False, **json.loads(call["function"]["arguments"])}
        call["function"]["arguments"] = json.dumps(arguments)


def _no_defaults(message: Said, _: random.Random) -> None:
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        left = {key: value for key, value in arguments.items() if (key, value) not in (("depth", 1), ("all", False))}
        call["function"]["arguments"] = json.dumps(left)


def _in_parts(message: Said, _: random.Random) -> None:
    if message.get("content") and "refusal" in message:  # a message of a chat, as it was answered
        message["content"] = [{"type": "text", "text": message["content"]}]


def _empty(message: Said, drawn: random.Random) -> None:
    if message.get("tool_calls") and not message.get("content"):
        message["content"] = drawn.choice([None, "", "(no content)"])


INVISIBLE: tuple[Callable[[Said, random.Random], None], ...] = (
    _no_reasoning,
    _moved_reasoning,
    _named,
    _rewritten_arguments,
    _defaults,
    _no_defaults,
    _in_parts,
    _empty,
)


def echoed(exchange: list[Said], drawn: random.Random) -> list[Said]:
    """An assistant's message and its results as a harness may send them: changed, but not in what the model sees."""
    message, *results = copy.deepcopy(exchange)
    for change in drawn.sample(INVISIBLE, drawn.randint(0, 4)):
        if not isinstance(message.get("content"), list):
            change(message, drawn)
    calls = message.get("tool_calls") or []
    if calls and drawn.random() < 0.3:
        for number, (call, result) in enumerate(zip(calls, results, strict=True)):
            call["id"] = result["tool_call_id"] = f"tool-{drawn.randint(0, 9)}-{number}"
    elif len(calls) > 1 and drawn.random() < 0.4:
        apart: list[Said] = []
        for number, (call, result) in enumerate(zip(calls, results, strict=True)):
            words = message if not number else {"role": "assistant", "content": None}
            apart += [{**words, "tool_calls": [call]}, result]
        return apart
    return [message, *results]


# Conversations ---------------------------------------------------------------------------------------------------------


class Conversation:
    """A conversation, with what was drafted and sampled for each turn. Its agents, one at each router, take turns."""

    def __init__(
        self, model: str, drawn: random.Random, *agents: AgentSession, dialect: str = "chat", stream: bool = False
    ) -> None:
        self.model, self.drawn, self.agents = model, drawn, agents
        self.dialect, self.stream = dialect, stream
        self.exchanges: list[list[Said]] = []
        self.drafts: list[Draft] = []
        self.turns: list[Turn] = []

    def messages(self, exchanges: list[list[Said]]) -> list[Said]:
        return [user("Go."), *[message for one in exchanges for message in one]]

    def go_on(self, exchanges: list[list[Said]], *, calls: int) -> Turn:
        """Ask for a turn behind what is left of earlier ones."""
        draft = drafted(self.model, self.drawn, calls=calls)
        workers = [
            worker for agent in self.agents for worker in agent.stack.workers
        ]  # routers of one store share theirs
        before, ids = [len(worker.log) for worker in workers], odd_ids(self.model, draft.text, self.drawn)
        for worker in workers:
            worker.script(ids=ids, finish="eos")
        agent, messages = self.agents[len(self.turns) % len(self.agents)], self.messages(exchanges)
        body = three_dialects.body(self.dialect, messages, stream=self.stream, tools=TOOLS)
        answer = agent.stack.post(f"{agent.path}/v1/{three_dialects.PLACES[self.dialect]}", body)
        assert answer.status == 200, answer.content
        for worker in workers:
            worker.forget_scripts()
        (record,) = [one for worker, count in zip(workers, before, strict=True) for one in worker.log[count:]]
        turn = Turn(answer, record)
        said = three_dialects.reply(self.dialect, answer, stream=self.stream)
        if (self.dialect, self.stream) == ("chat", False):
            said = turn.message  # with its reasoning
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"found {number}"}
            for number, call in enumerate(said.get("tool_calls") or ())
        ]
        assert len(results) == calls, said
        self.exchanges.append([said, *(results or [user("And?")])])
        self.drafts.append(draft)
        self.turns.append(turn)
        return turn

    def go_on_changed(self) -> None:
        """Ask for a turn behind changes of all earlier ones that the model does not see."""
        exchanges = [echoed(one, self.drawn) for one in self.exchanges]
        turn = self.go_on(exchanges, calls=self.most_calls())
        if len(self.turns) > 1:
            assert begins_with(turn, self.turns[-2]), reasons(turn)
        assert reasons(turn) <= {"left_out"}

    def most_calls(self) -> int:
        return self.drawn.choice([0, 1, 1] if self.model == "gptoss" else [0, 1, 2, 3])


def begins_with(turn: Turn, before: Turn) -> bool:
    """Whether a prompt begins with all that was read and sampled before, but perhaps for the token that ended the turn."""
    return turn.sent[: len(before.chain) - 1] == before.chain[:-1]


def reasons(turn: Turn) -> set[str]:
    return set(filter(None, turn.answer.headers.get("x-radix-reasons", "").split(", ")))


@pytest.fixture(scope="module")
def served(stacks: Stacks) -> Callable[[str], Stack]:
    return partial(stacks, verify_rate=1.0)


@pytest.mark.parametrize("seed", usual(range(30), *range(6)))
@pytest.mark.parametrize("model", MODELS)
def test_what_the_model_does_not_see_leaves_one_trajectory(
    served: Callable[[str], Stack], model: str, seed: int
) -> None:
    drawn = random.Random(f"{model} {seed}")
    agent = AgentSession.make(served(model), tools=TOOLS)
    told = Conversation(model, drawn, agent)
    for _ in range(5):
        told.go_on_changed()
    (only,) = agent.finalize()
    assert (only["exact"], only["num_turns"]) == (True, 5)
    assert ids_of(only) == told.turns[-1].chain


@pytest.mark.parametrize("session", [True, False], ids=["session", "open"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", list(three_dialects.PLACES))
@pytest.mark.parametrize("model", usual(MODELS, "qwen3"))
def test_in_every_dialect(
    served: Callable[[str], Stack], model: str, dialect: str, stream: bool, session: bool
) -> None:
    if dialect == "responses" and not session:
        return  # a worker's own
    drawn, at = random.Random(f"{model} {dialect} {stream} {session}"), served(model)
    agent = AgentSession.make(at) if session else OpenChat(at, "")
    told = Conversation(model, drawn, agent, dialect=dialect, stream=stream)
    for _ in range(5):
        told.go_on_changed()
    if session:
        (only,) = agent.finalize()
        assert (only["exact"], only["num_turns"]) == (True, 5)


class OpenChat(AgentSession):
    """Chats without a session."""

    @property
    def path(self) -> str:
        return ""


@pytest.mark.parametrize("seed", usual(range(6), 0))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("session", [True, False], ids=["session", "chat"])
def test_nor_does_another_router(tmp_path: Path, model: str, seed: int, session: bool) -> None:
    drawn, store = random.Random(f"{model} {seed}"), StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}")
    shared: dict[str, Any] = {"styles": ("cumulative",), "folder": chat_model(model), "store": store}
    with stack("qwen", **shared) as one, stack("qwen", **shared) as other:
        first = AgentSession.make(one, tools=TOOLS) if session else OpenChat(one, "", tools=TOOLS)
        told = Conversation(model, drawn, first, type(first)(other, first.name, tools=TOOLS))
        for _ in range(5):
            told.go_on_changed()
        if session:
            (only,) = first.finalize()
            assert (only["exact"], only["num_turns"]) == (True, 5)


def edit(exchange: list[Said], draft: Draft, drawn: random.Random) -> tuple[list[Said], str] | None:
    """An exchange with an edit, and where in its draft the edit is; None if there is nothing of the kind in it."""
    message, *results = copy.deepcopy(exchange)
    calls = message.get("tool_calls") or []
    kind = drawn.choice(["text", "no text", "argument", "no last call", "name"])
    if kind == "text" and "text" in draft.places:
        message["content"] = message["content"].replace("look, ", "look; ")
        return [message, *results], "text"
    if kind == "no text" and "text" in draft.places and calls:
        message["content"] = None
        return [message, *results], "text"
    number = drawn.randrange(len(calls)) if calls else 0
    if kind == "argument" and calls:
        arguments = json.loads(calls[number]["function"]["arguments"])
        calls[number]["function"]["arguments"] = json.dumps({**arguments, "path": "Q" + arguments["path"]})
        return [message, *results], f"call {number}"
    if kind == "name" and calls:
        function = calls[number]["function"]
        function["name"] = "see" if function["name"] == "look" else "look"
        return [message, *results], f"call {number}"
    if kind == "no last call" and len(calls) > 1:
        message["tool_calls"] = calls[:-1]
        draft.places["end"] = draft.text.rindex("\n", 0, draft.places[f"call {len(calls) - 1}"])
        return [message, *results[:-1]], "end"
    return None


@pytest.mark.parametrize("seed", usual(range(40), *range(8)))
@pytest.mark.parametrize("model", MODELS)
def test_an_edit_keeps_everything_before_it(served: Callable[[str], Stack], model: str, seed: int) -> None:
    drawn = random.Random(f"edit {model} {seed}")
    agent = AgentSession.make(served(model), tools=TOOLS)
    told = Conversation(model, drawn, agent, dialect=list(three_dialects.PLACES)[seed % 3], stream=seed % 2 == 1)
    for _ in range(3):
        told.go_on([echoed(one, drawn) for one in told.exchanges], calls=told.most_calls())
    found = None
    while found is None:
        at = drawn.randrange(3)
        found = edit(told.exchanges[at], told.drafts[at], drawn)
    edited, where = found
    before = [echoed(one, drawn) for one in told.exchanges[:at]]
    later = [one if model == "gptoss" else echoed(one, drawn) for one in told.exchanges[at + 1 :]]
    turn = told.go_on([*before, edited, *later], calls=0)
    first, place = told.turns[at], told.drafts[at].places[where]
    assert turn.sent[: len(first.sent)] == first.sent
    spelled, tokens = "", 0
    for _ in first.sampled:  # whole tokens before the edit
        spelled = model_of(model).spell(first.sampled[: tokens + 1])
        if len(spelled) > place or spelled != told.drafts[at].text[: len(spelled)]:
            break
        tokens += 1
    kept = len(first.sent) + tokens
    assert turn.sent[:kept] == first.chain[:kept], (where, reasons(turn))
    assert int(turn.answer.headers["x-radix-reused-tokens"]) >= kept
    assert reasons(turn) - {"left_out"} == {"edited_turn"}
    said = edited[0]
    sent = model_of(model).spell(turn.sent[len(first.sent) :])
    for call in said.get("tool_calls") or ():
        assert json.loads(call["function"]["arguments"])["path"] in sent.replace("\\u00e9", "é")
    assert ("look; " in sent) == ("look; " in (said.get("content") or ""))
    trajectories = agent.finalize()
    assert all(one["exact"] for one in trajectories)
    ends = 0 if model.startswith("qwen") else len(told.turns)  # other templates may write another end of a turn
    trained = sum(sum(one["response_mask"]) for one in trajectories)
    assert 0 <= sum(len(one.sampled) for one in told.turns) - trained <= ends
