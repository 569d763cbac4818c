"""An echo that is not quite what was sampled keeps the ids of what it did not edit, and is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import Stacks
from tests.support.agents import TOOLS, AgentSession, Turn, call_text, ids_of, tool, user
from tests.support.asking import counted
from tests.support.shapes import ChatModel
from tests.support.stack import stack

Opens = Callable[..., AgentSession]
SAYS = "The answer is  four.\n\n"
CALLING = {
    "qwen3": f"<think>\nAgain.\n</think>\n\nCONTENT{call_text('b')}",
    "glm4moe": "<think>Again.</think>\nCONTENT<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>x</arg_value>\n"
    "</tool_call>",
    "deepseekv3": "Again.</think>\n\nCONTENT<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
    '{"where": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gptoss": "<|channel|>analysis<|message|>Again.<|end|><|start|>assistant<|channel|>commentary to=functions.look"
    ' <|constrain|>json<|message|>{"where":"x"}<|call|>',
}
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
THOUGHT = "<think>\nhm, let me see\n</think>\n\nThe answer is  four."


@pytest.fixture(scope="module")
def opens(stacks: Stacks) -> Opens:
    return lambda name, history="keep", **given: AgentSession.make(stacks(name, history=history), **given)


def rendered(model: ChatModel, *messages: dict[str, Any]) -> str:
    return model.template.whole(messages, None, {})


def reasons(turn: Turn) -> set[str]:
    return set(filter(None, turn.answer.headers.get("x-radix-reasons", "").split(", ")))


def says(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def kept(first: Turn, second: Turn) -> int:
    """How many of the first turn's sampled tokens stand where they stood."""
    prompt = len(first.sent)
    assert second.sent[:prompt] == first.sent
    count = 0
    for one, other in zip(first.sampled, second.sent[prompt:], strict=False):
        if one != other:
            break
        count += 1
    return count


def how(agent: AgentSession) -> dict[str, int]:
    found = counted(agent.stack, "tito_session_turns_total")
    return {
        label.split('reason="')[1].split('"')[0]: count
        for label, count in found.items()
        if 'kind="edited_turn"' in label
    }


@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_stripped_reply_keeps_its_ids_up_to_the_strip(opens: Opens, history: str) -> None:
    name = "qwen2_5"
    agent = opens(name, history)
    before = how(agent).get("stripped", 0)
    first = agent.must(user("a"), says=SAYS)
    second = agent.must(user("a"), says(SAYS.strip()), user("b"), says="two")
    model = ChatModel(name)
    assert "edited_turn" in reasons(second)
    assert how(agent)["stripped"] == before + 1
    spelled = model.spell(first.sampled[: kept(first, second)])
    assert SAYS.strip().startswith(spelled)
    assert len(spelled) >= len(SAYS.strip()) - 2
    assert int(second.answer.headers["x-radix-reused-tokens"]) == len(first.sent) + kept(first, second)
    assert model.spell(second.sent) == rendered(model, user("a"), says(SAYS.strip()), user("b"))
    one, other = agent.finalize()
    assert (ids_of(one), one["exact"]) == (first.chain, True)
    assert (ids_of(other), other["exact"]) == (second.chain, True)
    assert sum(one["response_mask"]) == len(first.sampled)
    assert sum(other["response_mask"]) == len(second.sampled), "no token is trained twice"


@pytest.mark.parametrize("name", ["llama3_1", "gemma4", "qwen3_5_think", "glm4moe"])
def test_white_space_that_the_template_strips_is_no_edit(opens: Opens, name: str) -> None:
    agent = opens(name)
    messages, turns = [user("a")], list[Turn]()
    for number in range(3):
        turns.append(agent.must(*messages, says=SAYS))
        if number:
            assert kept(turns[-2], turns[-1]) >= len(turns[-2].sampled) - 1  # the template may write another end
            assert not reasons(turns[-1]) & {"edited_turn", "rewritten_turn"}
        messages += [says(SAYS.strip()), user("b")]
    (only,) = agent.finalize()
    assert (only["num_turns"], only["exact"]) == (3, True)


def test_an_agent_that_strips_every_reply_keeps_ids_at_every_turn(opens: Opens) -> None:
    agent = opens("qwen2_5")
    messages = [user("a")]
    turns: list[Turn] = []
    for number in range(6):
        turn = agent.must(*messages, says=f"Reply  {number}.\n\n")
        if turns:
            assert kept(turns[-1], turn) >= len(turns[-1].sampled) - 3
            assert "edited_turn" in reasons(turn)
        turns.append(turn)
        messages += [says(f"Reply  {number}."), user(f"next {number}")]
    trajectories = agent.finalize()
    assert [ids_of(one) for one in trajectories] == [turn.chain for turn in turns]
    assert sum(sum(one["response_mask"]) for one in trajectories) == sum(len(turn.sampled) for turn in turns)
    every = agent.finalize(shared_turns="every")
    assert sum(every[-1]["response_mask"]) > sum(len(turn.sampled) - 3 for turn in turns)


def test_turns_behind_an_edited_one_are_exact_whatever_the_tokenizer_normalizes() -> None:
    with stack("qwen", styles=("cumulative",)) as served:  # its tokenizer composes what the user has decomposed (NFC)
        agent = AgentSession.make(served)
        messages = [user("cafe\u0301")]
        agent.must(*messages, says=SAYS)
        messages += [says(SAYS.strip()), user("b")]
        second = agent.must(*messages, says="two")
        assert "edited_turn" in reasons(second)
        third = agent.must(*messages, second.message, user("c"), says="three")
        assert "template_mismatch" not in reasons(third)
        assert [one["reasons"] for one in agent.finalize() if not one["exact"]] == []


@pytest.mark.parametrize(
    ("name", "said", "edit"),
    [
        ("gptoss", f"{HARMONY}It is 4.\n\n", str.strip),
        ("gptoss", f"{HARMONY}It is 4.\n\n", lambda text: text + " more"),
        ("gemma4", "<|channel>thought\nhm<channel|>It is 4.\n\n", lambda text: text + " more"),
    ],
    ids=["gptoss-stripped", "gptoss-longer", "gemma4-longer"],
)
def test_turns_behind_an_edited_one_are_exact_where_history_leaves_special_tokens_out(
    opens: Opens, name: str, said: str, edit: Callable[[str], str]
) -> None:
    agent = opens(name)
    messages = [user("a")]
    for number in range(4):
        message = agent.must(*messages, says=said).message
        content = message["content"] if number else edit(message["content"])
        messages += [says(content), user("go on")]
    first, rest = agent.finalize()
    assert (first["num_turns"], rest["num_turns"]) == (1, 4)
    assert (rest["exact"], rest["reasons"]) == (True, ["edited_turn"])


def test_a_stripped_reply_keeps_the_reasoning_that_the_client_dropped(opens: Opens) -> None:
    """As an unedited reply does with `--history keep`: the thought is not what was edited."""
    agent = opens("qwen3")
    first = agent.must(user("a"), says=THOUGHT + "\n\n")
    assert first.message["reasoning_content"]
    second = agent.must(user("a"), says("The answer is  four."), user("b"), says="two")
    assert "edited_turn" in reasons(second) or second.sent[: len(first.chain)] == first.chain
    assert kept(first, second) >= len(first.sampled) - 3
    assert "hm, let me see" in ChatModel("qwen3").spell(second.sent)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_reasoning_that_were_put_back_into_the_content_cost_nothing(opens: Opens, name: str) -> None:
    """All of the turn is kept, and the branch goes on: one trajectory."""
    agent = opens(name)
    thought = THOUGHT if name == "qwen3" else THOUGHT.removeprefix("<think>\n")
    first = agent.must(user("a"), says=thought)
    assert first.message["reasoning_content"].strip() == "hm, let me see"
    second = agent.must(user("a"), says(THOUGHT), user("b"), says=thought)
    assert second.sent[: len(first.chain)] == first.chain
    assert "edited_turn" not in reasons(second)
    third = agent.must(user("a"), says(THOUGHT), user("b"), says(THOUGHT), user("c"), says=thought)
    assert third.sent[: len(second.chain)] == second.chain
    (found,) = agent.finalize()
    assert (ids_of(found), found["exact"]) == (third.chain, True)
    assert sum(found["response_mask"]) == sum(len(turn.sampled) for turn in (first, second, third))


@pytest.mark.parametrize("content", ["", "I look. "])
@pytest.mark.parametrize(
    "tags", [("<think>\n", "\n</think>\n\n"), ("<thinking>", "</thinking>"), ("", "\n")], ids=["think", "other", "none"]
)
@pytest.mark.parametrize("name", list(CALLING))
def test_reasoning_that_was_put_into_the_content_of_a_call_costs_nothing(
    opens: Opens, name: str, tags: tuple[str, str], content: str
) -> None:
    if name == "gptoss" and content:
        return  # its content would be a message of its own
    agent = opens(name, tools=TOOLS)
    first = agent.must(user("a"), says=CALLING[name].replace("CONTENT", content))
    call = first.message["tool_calls"][0]
    shown = f"{tags[0]}Again.{tags[1]}{content}"
    echo = {**first.message, "content": shown}
    del echo["reasoning_content"]
    second = agent.must(user("a"), echo, tool(call, "found"), says="two")
    assert "edited_turn" not in reasons(second)
    assert kept(first, second) >= len(first.sampled) - 1  # the template may write another end of the turn
    (only,) = agent.finalize()
    assert (only["exact"], only["num_turns"]) == (True, 2)


@pytest.mark.parametrize("thought", ["hm", "yes"])
def test_words_of_the_reasoning_that_are_in_the_reply_too_are_no_reasoning_in_it(opens: Opens, thought: str) -> None:
    agent = opens("qwen3")
    first = agent.must(user("a"), says=f"<think>\n{thought}\n</think>\n\nyes, it is.\n\n")
    second = agent.must(user("a"), says("yes, it is."), user("b"), says="two")
    assert kept(first, second) >= len(first.sampled) - 2


@pytest.mark.parametrize(
    "edit", [lambda text: text, lambda text: text + " ", lambda text: text[:-3]], ids=["name", "longer", "shorter"]
)
def test_an_edited_reply_that_a_stop_string_cut_within_a_token_keeps_the_tokens_before_it(
    opens: Opens, edit: Callable[[str], str]
) -> None:
    """`]` and the line break before `Observation` are one token."""
    agent = opens("qwen2_5")
    text = "Action: search[plays]"
    first = agent.must(user("a"), says=f"{text}\nObservation: 37", stop=["\nObservation"])
    assert first.message["content"] == text
    second = agent.must(user("a"), says(edit(text), name="bob"), user("Observation: 37"), says="two")
    seen = ChatModel("qwen2_5").spell(first.sampled[: kept(first, second)])
    assert len(text) - 6 <= len(seen) < len(text)
    assert edit(text) in ChatModel("qwen2_5").spell(second.sent)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_replaced_ids_of_tool_calls_cost_nothing(opens: Opens, name: str) -> None:
    agent = opens(name, tools=TOOLS)
    first = agent.must(user("a"), says=call_text("here"))
    calls = first.message["tool_calls"]
    mine = [{**call, "id": f"call_of_mine_{number}"} for number, call in enumerate(calls)]
    second = agent.must(user("a"), says("", tool_calls=mine), tool(mine[0], "nothing"), says="Nothing.")
    assert second.sent[: len(first.chain)] == first.chain
    assert "edited_turn" not in reasons(second)
    (found,) = agent.finalize()
    assert (ids_of(found), found["exact"]) == (second.chain, True)


def test_words_that_were_changed_end_what_is_kept(opens: Opens) -> None:
    agent = opens("qwen2_5")
    first = agent.must(user("a"), says="One two three four.")
    second = agent.must(user("a"), says("One two 3 four."), user("b"), says="two")
    model = ChatModel("qwen2_5")
    assert model.spell(first.sampled[: kept(first, second)]).strip() in ("One two", "One")
    assert model.spell(second.sent) == rendered(model, user("a"), says("One two 3 four."), user("b"))
    assert "edited_turn" in reasons(second)


def test_another_call_is_never_taken_for_the_sampled_one(opens: Opens) -> None:
    """What was said in front of it is kept; the call is what the client says now."""
    agent = opens("qwen2_5", tools=TOOLS)
    first = agent.must(user("a"), says=f"I look.\n{call_text('here')}")
    (call,) = first.message["tool_calls"]
    other = {**call, "function": {"name": "look", "arguments": '{"where": "there", "times": 1}'}}
    second = agent.must(user("a"), says("I look.", tool_calls=[other]), tool(other, "nothing"), says="Nothing.")
    model = ChatModel("qwen2_5")
    assert "edited_turn" in reasons(second)
    assert '"there"' in model.spell(second.sent)
    assert '"here"' not in model.spell(second.sent)


@pytest.mark.parametrize(
    ("content", "where", "edited"),
    [("Paris?", "Paris?", "Paris!"), ("here ", "there ", "here"), ("look", "x", "look at it"), ("a", "b", "c")],
)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_words_that_were_changed_are_never_changed_in_a_call(
    opens: Opens, name: str, content: str, where: str, edited: str
) -> None:
    """The call may have the same words in its arguments, or in the name of its tool."""
    agent = opens(name, tools=TOOLS)
    thought = "<think>\nAgain.\n</think>\n\n" if name == "qwen3" else ""
    first = agent.must(user("a"), says=f"{thought}{content}\n{call_text(where)}")
    (call,) = first.message["tool_calls"]
    second = agent.must(user("a"), {**first.message, "content": edited}, tool(call, "found"), says="two")
    sent = ChatModel(name).spell(second.sent)
    assert ("edited_turn" if edited[0] == content[0] or thought else "rewritten_turn") in reasons(second)
    assert sent.count(call_text(where)) == sent.count('{"name": "look", "arg') == 1
    assert f"{edited}\n{call_text(where)}" in sent


def test_words_that_were_added_go_on_where_the_model_had_stopped(opens: Opens) -> None:
    """Its end of turn is not written between them."""
    agent = opens("qwen2_5")
    first = agent.must(user("a"), says="One.")
    second = agent.must(user("a"), says("One. And two."), user("b"), says="two")
    model = ChatModel("qwen2_5")
    assert kept(first, second) == len(first.sampled) - 1
    assert model.spell(second.sent) == rendered(model, user("a"), says("One. And two."), user("b"))


def test_an_edited_turn_keeps_its_ids_when_a_later_one_is_written_over(opens: Opens) -> None:
    agent = opens("qwen2_5")
    first = agent.must(user("a"), says="One.")
    agent.must(user("a"), says("One. x"), user("b"), says="Two.")
    third = agent.must(user("a"), says("One. x"), user("b"), says("Something else."), user("c"), says="three")
    model = ChatModel("qwen2_5")
    assert kept(first, third) == len(first.sampled) - 1
    said = [user("a"), says("One. x"), user("b"), says("Something else."), user("c")]
    assert model.spell(third.sent) == rendered(model, *said)


def test_a_reply_that_was_written_over_is_reported(opens: Opens) -> None:
    agent = opens("qwen2_5")
    first = agent.must(user("a"), says="One.")
    second = agent.must(user("a"), says("Something else."), user("b"), says="two")
    assert "rewritten_turn" in reasons(second)
    assert how(agent)["rewritten"] >= 1
    assert kept(first, second) == 0
    model = ChatModel("qwen2_5")
    assert model.spell(second.sent) == rendered(model, user("a"), says("Something else."), user("b"))


def test_an_unedited_reply_is_no_edited_turn(opens: Opens) -> None:
    agent = opens("qwen2_5")
    first = agent.must(user("a"), says="One.")
    agent.must(user("a"), says="Two.")
    second = agent.must(user("a"), first.message, user("b"), says="two")
    assert "edited_turn" not in reasons(second)
    warm = agent.must(user("other"), says("Never sampled."), user("b"), says="two")
    assert reasons(warm) == set()


def test_of_several_samples_the_one_that_the_echo_keeps_most_of_is_continued(opens: Opens) -> None:
    agent = opens("qwen2_5")
    agent.must(user("a"), says="Three four.\n")
    mine = agent.must(user("a"), says="One two three.\n")
    agent.must(user("a"), says="One 2 three.\n")
    second = agent.must(user("a"), says("One two three."), user("b"), says="two")
    assert kept(mine, second) >= len(mine.sampled) - 2


def test_the_same_edited_request_again_is_another_sample_of_the_same_prompt(opens: Opens) -> None:
    agent = opens("qwen2_5")
    agent.must(user("a"), says=SAYS)
    messages = [user("a"), says(SAYS.strip()), user("b")]
    second, third = (agent.must(*messages, says=word) for word in ("two", "three"))
    assert second.sent == third.sent
    fourth = agent.must(*messages, second.message, user("c"), says="four")
    assert fourth.sent[: len(second.chain)] == second.chain
    assert "edited_turn" not in reasons(fourth)


def test_other_options_do_not_take_an_edited_turn_for_the_sampled_one(opens: Opens) -> None:
    """What is spliced into another rendering ends in front of the edited turn: its sampled words are not the client's."""
    agent = opens("qwen2_5")
    agent.must(user("a"), says="One two three four.")
    messages = [user("a"), says("One two 3 four."), user("b")]
    second = agent.must(*messages, says="two")
    third = agent.must(*messages, second.message, user("c"), says="three", chat_template_kwargs={"x": 1})
    model = ChatModel("qwen2_5")
    assert model.spell(third.sent) == rendered(model, *messages, second.message, user("c"))


def test_a_chat_without_a_session_keeps_its_ids_too(opens: Opens) -> None:
    served = opens("qwen2_5").stack

    def ask(*messages: Any, text: str) -> Turn:
        served.workers[0].script(text=text)
        answer = served.post("/v1/chat/completions", {"model": "m", "messages": list(messages)})
        assert answer.status == 200, answer.content
        return Turn(answer, served.workers[0].log[-1])

    first = ask(user("without a session"), text=SAYS)
    second = ask(user("without a session"), says(SAYS.strip()), user("b"), text="two")
    assert kept(first, second) >= len(first.sampled) - 3
    assert "edited_turn" in reasons(second)
    found = served.retrieve(ChatModel("qwen2_5").spell(second.chain))
    assert (found["exact"], found["tokens"]) == (True, second.chain)
    assert [turn["request_id"] for turn in found["turns"]] == [first.generation, second.generation]


@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_reply_that_is_cut_at_a_tag_is_ended_by_the_end_of_turn(opens: Opens, history: str) -> None:
    """`<` of a sampled `<search>` and of `<|im_end|>` are one character, and two tokens."""
    agent = opens("qwen2_5", history)
    model = ChatModel("qwen2_5")
    ids = [*model.encode("I look. "), *model.encode("<"), *model.encode("search>it")]
    agent.stack.workers[0].script(ids=ids)
    first = agent.must(user("a"))
    second = agent.must(user("a"), says("I look. "), user("b"), says="two")
    (end,) = model.encode("<|im_end|>")
    assert second.sent.count(end) == first.sent.count(end) + 2
    assert model.spell(second.sent) == rendered(model, user("a"), says("I look. "), user("b"))
    assert kept(first, second) == len(model.encode("I look. "))


def test_a_chat_without_a_session_never_keeps_an_end_of_turn_in_mid_turn(opens: Opens) -> None:
    """Where the echo is of none of the samples that are looked at, its text may still be known to the radix tree."""
    served = opens("qwen2_5").stack
    model = ChatModel("qwen2_5")

    def ask(*messages: Any, text: str) -> Turn:
        served.workers[0].script(text=text)
        answer = served.post("/v1/chat/completions", {"model": "m", "messages": list(messages)})
        assert answer.status == 200, answer.content
        return Turn(answer, served.workers[0].log[-1])

    for text in ["One.", *(f"Another {number}." for number in range(9))]:
        ask(user("many samples"), text=text)
    second = ask(user("many samples"), says("One. x"), user("b"), text="two")
    assert model.spell(second.sent) == rendered(model, user("many samples"), says("One. x"), user("b"))


@pytest.mark.parametrize("others", [1, 12])
@pytest.mark.parametrize("known", ["reasoning", "reasoning in the content", "calls", "words"])
@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_an_edited_echo_of_one_of_several_samples_never_has_the_reasoning_of_another(
    opens: Opens, name: str, known: str, others: int
) -> None:
    """The others have more reasoning, so their ids would be more."""
    if others > 8 and known != "calls":
        return  # the newest are compared, and those that calls name
    agent, says_of = opens(name, tools=TOOLS), CALLING[name].replace("Again.", "THOUGHT")
    own = says_of.replace("THOUGHT", "I am hungry.").replace("CONTENT", "" if known == "calls" else "Some words here.")
    mine = agent.must(user("a"), says=own)
    for number in range(others):
        other = f"Some other thoughts, of which there are more, number {number}. " * 10
        agent.must(user("a"), says=says_of.replace("THOUGHT", other.strip()).replace("CONTENT", "Yes.\n"))
    (call,) = mine.message["tool_calls"]
    edited = {**call, "function": {**call["function"], "arguments": '{"where": "elsewhere"}'}}
    echo = {**mine.message, "tool_calls": [edited]}
    if known == "words":
        edited["id"] = "call-1"
    if known != "reasoning":
        del echo["reasoning_content"]
    if known == "reasoning in the content":
        echo["content"] = f"<think>\nI am hungry.\n</think>\n\n{mine.message['content']}"
    second = agent.must(user("a"), echo, tool(edited, "found"), says="two")
    assert reasons(second) == {"edited_turn"}
    prompt = ChatModel(name).spell(second.sent)
    assert prompt.count("I am hungry.") == 1
    assert "Some other thoughts" not in prompt
    assert prompt.count("elsewhere") == 1
    assert kept(mine, second) > 0
    assert all(one["exact"] for one in agent.finalize())


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gptoss"])
def test_reasoning_that_the_client_edited_with_the_turn_is_not_what_was_sampled(opens: Opens, name: str) -> None:
    """In a loop of tools these templates show reasoning: the model reads what the client sent."""
    agent = opens(name, tools=TOOLS)
    first = agent.must(user("a"), says=CALLING[name].replace("Again.", "I am hungry.").replace("CONTENT", ""))
    call = first.message["tool_calls"][0]
    edited = {**call, "function": {**call["function"], "arguments": '{"where": "elsewhere"}'}}
    echo = {**first.message, "tool_calls": [edited], "reasoning_content": "I am thirsty."}
    second = agent.must(user("a"), echo, tool(edited, "found"), says="two")
    prompt = ChatModel(name).spell(second.sent)
    assert "hungry" not in prompt
    assert prompt.count("thirsty") == 1
    assert prompt.count("elsewhere") == 1
    assert all(one["exact"] for one in agent.finalize())


def test_a_turn_that_the_template_writes_otherwise_keeps_nothing_of_another(opens: Opens) -> None:
    """Gemma 4's template writes the text of a turn behind its calls: of the edited turn no token can be kept."""
    agent = opens("gemma4", tools=TOOLS)
    looks = '<|tool_call>call:look{where:<|"|>here<|"|>}<tool_call|>'
    first = agent.must(user("a"), says=f"I look.{looks}", finish="eos")
    agent.must(user("a"), says=f"<|channel>thought\nSome other thoughts.\n<channel|>{looks}", finish="eos")
    (call,) = first.message["tool_calls"]
    edited = {**call, "function": {**call["function"], "arguments": '{"where": "elsewhere"}'}}
    second = agent.must(user("a"), {**first.message, "tool_calls": [edited]}, tool(edited, "found"), says="two")
    prompt = ChatModel("gemma4").spell(second.sent)
    assert "Some other thoughts" not in prompt
    assert prompt.count("elsewhere") == 1


@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>Again.<|end|><|start|>assistant"])
@pytest.mark.parametrize("text", ["", "I look.", "I look there."])
def test_gpt_oss_reads_the_text_that_a_client_wrote_beside_calls(opens: Opens, thought: str, text: str) -> None:
    """Its template writes that text as reasoning, and refuses a turn that has both."""
    agent = opens("gptoss", tools=TOOLS)
    said = "<|channel|>commentary<|message|>I look here.<|end|><|start|>assistant"
    called = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"where": "here"}<|call|>'
    first = agent.must(user("a"), says=f"{thought}{said}{called}")
    assert first.message["content"] == "I look here."
    (call,) = first.message["tool_calls"]
    second = agent.must(user("a"), {**first.message, "content": text}, tool(call, "found"), says="two")
    prompt = ChatModel("gptoss").spell(second.sent)
    assert "I look here." not in prompt
    assert prompt.count(text or "<|call|>") == 1
    assert prompt.count("Again.") == (1 if thought else 0)
    assert all(one["exact"] for one in agent.finalize())


@pytest.mark.parametrize("content", ["I look.", [{"type": "text", "text": "I look."}]], ids=["text", "part"])
def test_gpt_oss_reads_a_turn_with_reasoning_and_text_and_a_call_of_another_session(opens: Opens, content: Any) -> None:
    agent = opens("gptoss", tools=TOOLS)
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"where": "here"}'}}
    turn = {"role": "assistant", "content": content, "reasoning_content": "Again.", "tool_calls": [call]}
    prompt = ChatModel("gptoss").spell(agent.must(user("a"), turn, tool(call, "found"), says="two").sent)
    assert "<|channel|>analysis<|message|>Again.\n\nI look.<|end|>" in prompt
