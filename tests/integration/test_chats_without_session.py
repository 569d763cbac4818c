"""A client that says nothing about itself keeps its ids: it is known by its conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.agents import TOOLS, AgentSession, deltas, system, tool, user
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.shapes import SHAPES, UNEDITED, ChatModel, Message, Messages, converse, kept
from tests.support.stack import Stack, stack
from tests.support.usual import usual
from worker.engine.records import GenerationRecord

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3")) as made:
        yield made


@dataclass
class Turn:
    answer: Answer
    record: GenerationRecord

    @property
    def message(self) -> Message:
        found: Message = self.answer.json()["choices"][0]["message"]
        return found

    @property
    def chain(self) -> list[int]:
        return [*self.record.input_ids, *self.record.output_ids]


def ask(served: Stack, *messages: Message, says: str, path: str = PATH, headers: Any = None, **options: Any) -> Turn:
    (worker,) = served.workers
    worker.script(text=says)
    answer = served.post(path, {"model": "m", "messages": list(messages), **options}, headers=headers)
    assert answer.status == 200, answer.content
    return Turn(answer, worker.log[-1])


def contains(ids: Sequence[int], part: list[int]) -> bool:
    return any(list(ids[at : at + len(part)]) == part for at in range(len(ids)))


class TestOpenAI:
    def test_a_conversation_goes_on_from_what_was_sampled(self, served: Stack) -> None:
        """In ids that encoding again would not give, thoughts kept that the client and the template drop."""
        opening = [system("s1"), user("Hello")]
        first = ask(served, *opening, says="<think>\nhm\n</think>\n\nHi  there.")
        echo = {"role": "assistant", "content": first.message["content"]}
        second = ask(served, *opening, echo, user("And?"), says="Yes.")
        assert list(second.record.input_ids)[: len(first.chain)] == first.chain
        assert second.answer.headers["x-radix-reused-tokens"] == str(len(first.chain))
        assert second.answer.headers["x-radix-recorded"] == "exact"
        assert second.answer.headers["x-router-reason"] == "only_one"
        assert "x-session-id" not in second.answer.headers

    def test_it_can_be_retrieved_by_its_text(self, served: Stack) -> None:
        """One chain, with both replies in it as they were sampled."""
        opening = [system("s2"), user("Hello")]
        first = ask(served, *opening, says="One.")
        second = ask(served, *opening, first.message, user("And?"), says="Two.")
        found = served.post("/retrieve_from_text", {"text": ChatModel("qwen3").spell(second.chain)}).json()
        assert found["exact"], found
        assert found["tokens"] == second.chain
        assert sum(found["loss_mask"]) == len(first.record.output_ids) + len(second.record.output_ids)

    def test_a_tool_loop(self, served: Stack) -> None:
        says = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'
        opening = [system("s3"), user("Hello")]
        first = ask(served, *opening, says=says, tools=TOOLS)
        (call,) = first.message["tool_calls"]
        second = ask(served, *opening, first.message, tool(call, "nothing"), says="Nothing.", tools=TOOLS)
        assert list(second.record.input_ids)[: len(first.chain)] == first.chain

    def test_a_stream(self, served: Stack) -> None:
        opening = [system("s4"), user("Hello")]
        first = ask(served, *opening, says="One two three.", stream=True)
        message = deltas(first.answer)
        assert message["content"] == "One two three."
        second = ask(served, *opening, message, user("And?"), says="Four.")
        assert list(second.record.input_ids)[: len(first.chain)] == first.chain

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_reply_that_is_not_recorded_as_text_is_not_continued_either(self, served: Stack, streamed: bool) -> None:
        """Its ids would be known to this router alone, and only in chats."""
        opening = [system(f"s6{streamed}"), user("Hello")]
        (worker,) = served.workers
        ids = [one for letter in "Yes." for one in worker.vocabulary.encode_bare(letter)]
        worker.script(ids=ids, fault="no_logprobs")
        answer = served.post(PATH, {"model": "m", "messages": opening, "stream": streamed})
        message = deltas(answer) if streamed else answer.json()["choices"][0]["message"]
        assert message["content"] == "Yes."
        if not streamed:
            assert answer.headers["x-radix-recorded"].startswith("no; engine_mismatch")
        second = ask(served, *opening, message, user("And?"), says="Two.")
        assert contains(second.record.input_ids, worker.vocabulary.encode_bare("Yes."))
        assert not contains(second.record.input_ids, ids)

    def test_several_samples_of_one_turn(self, served: Stack) -> None:
        """The newest is gone on with, unless the client says which."""
        opening = [system("s5"), user("Hello")]
        (worker,) = served.workers
        worker.script(text="Same.")
        worker.script(text="Same.")
        answer = served.post(PATH, {"model": "m", "messages": opening, "n": 2})
        assert len(answer.json()["choices"]) == 2
        ids = answer.headers["x-generation-id"].split(", ")
        records = {record.rid: record for record in worker.log[-2:]}
        echo = {"role": "assistant", "content": "Same."}
        again = ask(served, *opening, echo, user("b"), says="x", headers={"x-parent-generation": ids[0]})
        chain = [*records[ids[0]].input_ids, *records[ids[0]].output_ids]
        assert list(again.record.input_ids)[: len(chain)] == chain

    @pytest.mark.parametrize("header", ["x-radix-parent", "x-parent-generation"])
    def test_a_conversation_of_which_nothing_is_to_be_continued(self, served: Stack, header: str) -> None:
        """All of it is context, whatever is remembered, and the next turn goes on from its reply."""
        opening = [system("s7" + header), user("Hello")]
        first = ask(served, *opening, says="One  two.")
        behind = [*opening, first.message, user("b")]
        second = ask(served, *behind, says="Three.", headers={header: "none"})
        spelling = ChatModel("qwen3")
        assert list(second.record.input_ids) == spelling.encode(spelling.spell(list(second.record.input_ids)))
        assert second.answer.headers["x-radix-reused-tokens"] == "0"
        assert "x-radix-reasons" not in second.answer.headers
        third = ask(served, *behind, second.message, user("c"), says="Four.")
        assert list(third.record.input_ids)[: len(second.chain)] == second.chain
        found = served.post("/retrieve_from_text", {"text": spelling.spell(third.chain)}).json()
        assert found["exact"], found
        assert [turn["request_id"] for turn in found["turns"]] == [second.record.rid, third.record.rid]
        assert sum(found["loss_mask"]) == len(second.record.output_ids) + len(third.record.output_ids)

    def test_namespaces_and_settings_are_apart(self, served: Stack) -> None:
        opening = [system("s6"), user("Hello")]
        first = ask(served, *opening, says="One  two.")
        behind = [*opening, first.message, user("b")]
        other = ask(served, *behind, says="x", headers={"x-radix-namespace": "evaluation"})
        assert other.answer.headers["x-radix-reused-tokens"] == "0"
        tools = ask(served, *behind, says="x", tools=TOOLS)
        assert tools.answer.headers["x-radix-reused-tokens"] == "0"
        assert tools.answer.headers["x-radix-reasons"] == "setting, divergence"

    def test_what_cannot_be_served_goes_to_the_worker(self, served: Stack) -> None:
        """An image is for a worker that can see; the reply says that it is not recorded."""
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"model": "m", "messages": [{"role": "user", "content": [image]}]}
        answer = served.post(PATH, body)
        assert answer.headers["x-radix-recorded"] == "no; unsupported_content"

    def test_malformed_requests_are_reported(self, served: Stack) -> None:
        answer = served.post(PATH, {"model": "m", "messages": []})
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "messages"


class TestAnthropic:
    def test_a_conversation_goes_on(self, served: Stack) -> None:
        opening = [user("Hello")]
        first = ask(served, *opening, says="One  two.", path="/v1/messages", max_tokens=50, system="a1")
        content = first.answer.json()["content"]
        echo = {"role": "assistant", "content": content}
        second = ask(served, *opening, echo, user("b"), says="x", path="/v1/messages", max_tokens=50, system="a1")
        assert list(second.record.input_ids)[: len(first.chain)] == first.chain

    def test_tokens_are_counted_and_errors_are_its_own(self, served: Stack) -> None:
        counted = served.post("/v1/messages/count_tokens", {"model": "m", "messages": [user("Hello")]})
        assert counted.json()["input_tokens"] > 3
        wrong = served.post("/v1/messages", {"model": "m", "messages": [user("Hello")]})
        assert wrong.status == 400
        assert wrong.json()["type"] == "error"


class TestNames:
    def test_a_session_that_is_there_is_meant_by_its_name(self, served: Stack) -> None:
        agent = AgentSession.make(served)
        first = ask(served, user("a"), says="One.", headers={"x-session-id": agent.name})
        assert first.answer.headers["x-session-id"] == agent.name
        (only,) = agent.finalize()
        assert [*only["prompt_ids"], *only["response_ids"]] == first.chain
        late = served.post(PATH, {"model": "m", "messages": [user("a")]}, headers={"x-session-id": agent.name})
        assert late.status == 409

    def test_a_name_that_is_none_only_routes(self, served: Stack) -> None:
        turn = ask(served, user("a"), says="One.", headers={"x-session-id": "nobody"})
        assert "x-session-id" not in turn.answer.headers
        assert served.get("/sessions/nobody").status == 404

    def test_it_opens_one_if_so_configured(self) -> None:
        with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3"), sessions={"implicit": True}) as made:
            first = ask(made, user("a"), says="One.", headers={"x-session-id": "mine"})
            assert first.answer.headers["x-session-id"] == "mine"
            assert AgentSession(made, "mine").show()["num_generations"] == 1
            wrong = made.post(PATH, {"model": "m", "messages": [user("a")]}, headers={"x-session-id": "no/name"})
            assert wrong.status == 400


@pytest.mark.parametrize(
    "name", usual(["qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "deepseekv3"], "qwen3", "glm4moe")
)
@pytest.mark.parametrize("shape", ["tool loop", "think on", "re-serialized arguments", "list content"])
def test_shapes(name: str, shape: str) -> None:
    radix = {"tokenizer_backend": "huggingface"}
    with stack("qwen", styles=("cumulative",), folder=chat_model(name), radix=radix) as made:
        model = ChatModel(name)
        (worker,) = made.workers

        def asking(
            messages: Messages, tools: Any, options: Any, ids: list[int], stop: int
        ) -> tuple[Message, list[int]]:
            worker.script(ids=[*ids, stop], finish=None)
            body = {
                "model": "m",
                "messages": messages,
                **({"tools": tools} if tools else {}),
                **({"chat_template_kwargs": options} if options else {}),
                "stop_token_ids": [stop],
                "skip_special_tokens": False,
            }
            answer = made.post(PATH, body)
            assert answer.status == 200, answer.content
            return answer.json()["choices"][0]["message"], list(worker.log[-1].input_ids)

        found = kept(converse(model, SHAPES[shape], asking))
        assert shape in UNEDITED
        assert found.ids == found.earlier
        assert found.prefixes == found.requests


class TestTexts:
    def test_a_conversation_that_began_as_text_keeps_its_ids(self, served: Stack) -> None:
        """What is rendered begins with what `/generate` has recorded: the text tree knows it, though no chat does."""
        model, (worker,) = ChatModel("qwen3"), served.workers
        opening = [system("s7"), user("Hello")]
        text = model.template.whole(opening, None, {})
        worker.script(ids=[*model.encode("One"), *model.encode(" "), *model.encode("two")], finish="length")
        said = served.generate({"text": text, "sampling_params": {"max_new_tokens": 3}})
        chain = [*said.record.input_ids, *said.record.output_ids]
        turn = ask(served, *opening, {"role": "assistant", "content": "One two"}, user("b"), says="x")
        sent = list(turn.record.input_ids)
        assert sent[: len(chain)] == chain
        assert turn.answer.headers["x-radix-reused-tokens"] == str(len(chain))

    def test_namespaces_hold_for_texts_as_well(self, served: Stack) -> None:
        opening = [system("s8"), user("Hello")]
        text = ChatModel("qwen3").template.whole(opening, None, {})
        served.generate({"text": text, "sampling_params": {"max_new_tokens": 3}})
        turn = ask(served, *opening, says="x", headers={"x-radix-namespace": "other"})
        assert turn.answer.headers["x-radix-reused-tokens"] == "0"

    @pytest.mark.parametrize("key", ["text", "input_ids"])
    def test_a_turn_that_was_sampled_for_a_text_in_between_keeps_its_ids(self, served: Stack, key: str) -> None:
        """No chat knows that reply, but the text tree does: the longest recorded text is continued, not the last chat."""
        model, (worker,) = ChatModel("qwen3"), served.workers
        opening = [system(f"s9{key}"), user("Hello")]
        first = ask(served, *opening, says="<think>\n\n</think>\n\nOne.")
        messages = [*opening, first.message, user("b")]
        behind = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        prompt = [*first.chain, *model.encode(behind)]
        worker.script(ids=[one for letter in "Two." for one in model.encode(letter)])
        said = served.generate({key: model.spell(prompt) if key == "text" else prompt})
        assert list(said.record.input_ids) == prompt
        chain = [*prompt, *said.record.output_ids]
        reply = {"role": "assistant", "content": "Two."}
        third = ask(served, *messages, reply, user("c"), says="Three.")
        assert list(third.record.input_ids)[: len(chain)] == chain
        assert third.answer.headers["x-radix-reused-tokens"] == str(len(chain))
        fourth = ask(served, *messages, reply, user("c"), third.message, user("d"), says="Four.")
        assert list(fourth.record.input_ids)[: len(third.chain)] == third.chain
        found = served.post("/retrieve_from_text", {"text": model.spell(fourth.chain)}).json()
        assert found["exact"], found
        records = [first.record, said.record, third.record, fourth.record]
        assert sum(found["loss_mask"]) == sum(len(one.output_ids) for one in records)

    @pytest.mark.parametrize("turns", [0, 1])
    def test_a_reply_to_a_text_is_no_edited_echo_of_a_reply_to_a_chat(self, served: Stack, turns: int) -> None:
        """Of two samples, one was asked for by a chat and one by a text. The client goes on with the second one."""
        model, (worker,) = ChatModel("qwen3"), served.workers
        messages = [system(f"s10{turns}"), user("Hello")]
        before: list[int] = []
        for _ in range(turns):
            first = ask(served, *messages, says="<think>\n\n</think>\n\nOne.")
            messages += [first.message, user("b")]
            before = [*first.chain, *model.encode("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")]
        other = ask(served, *messages, says="One two three.")
        prompt = list(other.record.input_ids)
        assert before in ([], prompt)
        worker.script(ids=[one for letter in "One two four." for one in model.encode(letter)])
        said = served.generate({"text": model.spell(prompt)})
        chain = [*prompt, *said.record.output_ids]
        assert list(said.record.input_ids) == prompt
        reply = {"role": "assistant", "content": "One two four."}
        third = ask(served, *messages, reply, user("c"), says="x")
        assert list(third.record.input_ids)[: len(chain)] == chain
        assert "x-radix-reasons" not in third.answer.headers
        found = served.post("/retrieve_from_text", {"text": model.spell(third.chain)}).json()
        assert (found["exact"], found["tokens"]) == (True, third.chain)
        assert [turn["end"] - turn["start"] for turn in found["turns"]][-2:] == [
            len(said.record.output_ids),
            len(third.record.output_ids),
        ]
