"""A wrong splice is impossible: whatever a client does to its history, a worker reads what the template writes for it.

The oracle. A prompt may hold sampled turns, which the export names. Where one stands, the worker's log must say that these very
ids were sampled behind these very ids. All the rest must be, letter for letter, what the template writes around these turns:

    rendered  <|im_start|>user\\nHi<|im_end|>\\n [<|im_start|>assistant\\n ...MARK] <|im_end|>\\n<|im_start|>user\\n ...
    expected  <|im_start|>user\\nHi<|im_end|>\\n  what it was asked with, and said  <|im_end|>\\n<|im_start|>user\\n ...

Under `--history keep` a chain that is appended to is what the model saw, and stays that, even where the template would now
write something of it in another way (a thought in an assistant's turn that nobody sampled here). So there the prompt of the
last turn in it, which was held against the template when it was asked, takes the place of all that is in front of that turn.

A turn whose message the client has edited since may stand in a prompt in part. Then the rest of the edited message follows, as
the template writes it; or, under `--history keep`, in the place of what it was, the thought in front of it kept.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.integration.editing_client import STOP, Client, Said, Served
from tests.middleware_hub.templates.test_chat_template import JSON_CALL, MARK, PUBLISHED
from tests.support.agents import TOOLS, AgentSession, ids_of, user
from tests.support.chat_models import chat_model
from tests.support.shapes import ChatModel, Message, understood
from tests.support.stack import stack
from tests.support.usual import usual

HEADERS = {
    "qwen3": "<|im_start|>assistant\n",
    "qwen3_5_think": "<|im_start|>assistant\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "glm4moe": "<|assistant|>",
    # These look for switches in what was said, all over it or in the system prompt.
    "nemotron_nano_2": "<|im_start|>assistant\n",
    "smollm3": "<|im_start|>assistant\n",
}
OWN = {name: known.own for name, known in PUBLISHED.items()}
PLAYED = [f"{name}-{how}" for name in HEADERS for how in ("keep", "template")]


@pytest.fixture(scope="module", params=usual(PLAYED, "glm4moe-keep", "qwen3-template"))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    name, history = request.param.split("-")
    radix = {"tokenizer_backend": "huggingface"}
    sessions = {"history": history}
    with stack("qwen", styles=("cumulative",), folder=chat_model(name), radix=radix, sessions=sessions) as made:
        yield Served(ChatModel(name), made, history)
        told = made.get("/metrics").content.decode().splitlines()
        counted = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in told if line[:1] != "#"}
        assert any("spliced" in name and count > 5 for name, count in counted.items()), "there was something to prove"


# The oracle ------------------------------------------------------------------------------------------------------------


def scaffold(model: ChatModel, said: Said) -> str:
    """What a turn was asked with."""
    prompt = model.template.whole(understood(said.messages), said.tools, said.options)
    return prompt[prompt.rindex(HEADERS[model.name]) :]


def expected(model: ChatModel, said: Said, turns: list[Said], *, appended: bool) -> set[str]:
    """What a worker may have read, if these turns, first ones first, stand in it as they were sampled.

    One text, or several where the last of these turns was edited. `appended`: all in front of the last one is what was sent in
    front of it.
    """
    messages = [dict(message) for message in understood(said.messages)]
    edited = [turn for turn in turns if not _same(turn.reply, said.messages[len(turn.messages)])]
    found = set()
    if turns and turns[-1] in edited:
        found = expected(model, said, turns[:-1], appended=False)
    for number, turn in enumerate(turns):
        message = messages[len(turn.messages)]
        if turn in edited and turn is not turns[-1]:
            continue
        calls = copy.deepcopy(message.get("tool_calls"))
        if calls:
            calls[-1]["function"]["arguments"] = {"where": mark(number)}
            messages[len(turn.messages)] = {**message, "content": "", "tool_calls": calls}
        else:
            messages[len(turn.messages)] = {**message, "content": mark(number)}
    rest = model.template.whole(messages, said.tools, said.options)
    read = ""
    for number, turn in enumerate(turns):
        if turn in edited and turn is not turns[-1]:
            continue
        before, there, rest = rest.partition(mark(number))
        assert there
        read += before[: before.rindex(HEADERS[model.name])] + scaffold(model, turn) + turn.text
        if appended and turn is turns[-1]:
            read = model.spell(turn.record.input_ids) + turn.text
        if (said.messages[len(turn.messages)] if turn in edited else turn.reply).get("tool_calls"):
            own = OWN.get(model.name, JSON_CALL)
            assert rest.startswith(own)
            rest = rest[len(own) :]
    if turns and turns[-1] in edited:
        return found | {text + rest for text in _edited(model, turns[-1], said.messages[len(turns[-1].messages)])}
    return {read + rest}


def _edited(model: ChatModel, turn: Said, echo: Message) -> Iterator[str]:
    """A turn in the words of an edited echo: these in the place of the sampled ones, or alone, with all that they show."""
    prompt, content, own = model.spell(turn.record.input_ids), _content(echo), _content(turn.reply)
    if _plain(echo)[2] == _plain(turn.reply)[2]:
        at = turn.text.rfind(own)
        yield prompt + turn.text[:at] + content + turn.text[at + len(own) :]
    if not echo.get("tool_calls"):
        known = max(n for n in range(len(content) + 1) if prompt.endswith(content[:n]))
        yield prompt + content[known:]


def mark(number: int) -> str:
    return f"{MARK}{number:03}"


def _same(reply: Message, echo: Message) -> bool:
    """Whether a client has sent a reply back, in whatever form."""
    return bool(_plain(reply) == _plain(echo))


def _plain(message: Message) -> Any:
    calls = [(call["id"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return message["role"], _content(message), calls


def _content(message: Message) -> str:
    content = message.get("content") or ""
    return str(content if isinstance(content, str) else content[0]["text"])


def check_prompts(client: Client) -> None:
    """Every prompt that reached the worker, and what is exported of it."""
    model = client.served.model
    exported = client.agent.trajectories("?export_all_checkpoints=true&shared_turns=every")
    assert {one["branch"] for one in exported} == set(client.said), "none is lost"
    for one in exported:
        said, ids, begin = client.said[one["branch"]], ids_of(one), len(one["prompt_ids"])
        assert ids == [*said.record.input_ids, *said.record.output_ids]
        mask, logprobs = [0] * len(one["response_ids"]), [0.0] * len(one["response_ids"])
        turns = one["extra_fields"]["turns"]
        for turn in turns:
            record = client.said[turn["generation_id"]].record
            low, high = turn["start"], turn["end"]
            assert ids[: begin + low] == record.input_ids, "the prefix that it was sampled under"
            assert ids[begin + low : begin + high] == record.output_ids[: high - low]
            mask[low:high] = [1] * (high - low)
            logprobs[low:high] = record.logprobs[: high - low]
        assert one["response_mask"] == mask
        assert one["response_logprobs"] == logprobs
        earlier = [client.said[turn["generation_id"]] for turn in turns[:-1]]
        keeps = client.served.history == "keep" and bool(earlier)
        appended = keeps and (said.tools, said.options) == (earlier[-1].tools, earlier[-1].options)
        assert model.spell(said.record.input_ids) in expected(model, said, earlier, appended=appended)
        if not (keeps and strangers(said, earlier)):
            assert one["exact"], one["reasons"]


def strangers(said: Said, turns: list[Said]) -> bool:
    """Whether an assistant's turn among the messages is a text in the prompt."""
    return len([message for message in said.messages if message["role"] == "assistant"]) > len(turns)


def check_training(client: Client) -> None:
    """No token is trained twice, and none is lost: only what the client never saw of a turn may be left out behind it."""
    trained: list[tuple[str, int]] = []
    continued: set[str] = set()
    for one in client.agent.finalize(shared_turns="once"):
        turns = one["extra_fields"]["turns"]
        continued.update(turn["generation_id"] for turn in turns[:-1])
        for turn in turns:
            marked = one["response_mask"][turn["start"] : turn["end"]]
            trained += [(turn["generation_id"], at) for at, bit in enumerate(marked) if bit]
    assert len(trained) == len(set(trained))
    sampled = {(name, at) for name, said in client.said.items() for at in range(len(said.record.output_ids))}
    assert sampled.issuperset(trained)
    for name, at in sampled.difference(trained):
        said = client.said[name]
        assert name in continued
        assert len(client.served.model.spell(said.record.output_ids[: at + 1])) > len(said.text)


def test_a_worker_reads_what_the_template_writes(served: Served) -> None:
    @settings(max_examples=examples(20), phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        (worker,) = served.stack.workers
        worker.forget_scripts()
        client = Client(served, data, AgentSession.make(served.stack))
        client.talk(data.draw(st.integers(2, 8), label="turns"))
        check_prompts(client)
        check_training(client)

    check()


@pytest.mark.parametrize("ends", ["token", "length", "string"])
def test_a_turn_that_is_gone_on_with_under_other_options_does_not_end_first(served: Served, ends: str) -> None:
    """What was sampled is kept, but for the token that ended it: nothing may be said behind that."""
    model, agent = served.model, AgentSession.make(served.stack)
    (worker,) = served.stack.workers
    messages = [user("Hello")]
    text = model.says(messages, TOOLS, {}, "Well, well", "")
    ids, stop = model.encode(text), model.stop({"role": "assistant", "content": "x"}, [user("y")])
    worker.forget_scripts()
    worker.script(ids=[*ids, *(model.encode(STOP) if ends == "string" else []), stop], finish=None)
    how: dict[str, Any] = {
        "max_tokens": len(ids) if ends == "length" else 400,
        "stop_token_ids": [stop],
        "skip_special_tokens": False,
    }
    string: dict[str, Any] = {"stop": [STOP]} if ends == "string" else {}
    first = agent.must(*messages, **how, **string, tools=TOOLS)
    worker.script(ids=[*model.encode(", then."), stop], finish=None)
    going_on: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    said = {"role": "assistant", "content": first.message["content"]}
    second = agent.must(
        *messages, said, **{**how, "max_tokens": 400}, **going_on, tools=TOOLS, documents=[{"text": "a"}]
    )
    assert second.sent == [*first.sent, *ids]
    assert second.message["content"] == ", then."
