"""Where a template takes a system message, found by trials, and in what form it is written elsewhere."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest

from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.templates.trials import TOOL
from router.errors import BadRequestError
from tests.support import templates
from tests.support.agents import system, user
from tests.support.usual import usual

Message = dict[str, Any]

OWN = (
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2", "glm4moe", "gemma4", "gemma4_v5", "phi3"),
    *("lfm2", "nemotron_3_nano", "muse_glimmer", "kimi_k2", "minimax_m2", "mistral", "seed_oss", "chatml", "smolvlm"),
)
"""Templates that write a system message where it stands as they write the first one."""
APART = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "qwen3_vl", "gptoss", "deepseekv3", "deepseek_v32")
"""Others, which take two messages of the user's in a row."""
ALTERNATING = ("gemma3", "gemma", "cohere", "cohere2")
"""Others, which do not."""
SAID = {"role": "assistant", "content": "Well."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "Flour.", "tool_call_id": "call00000", "name": "look"}


def made(name: str, **options: Any) -> ChatTemplate:
    special = {"bos_token": "<bos>", "eos_token": "<eos>", **templates.SPECIAL_TOKENS.get(name, {})}
    return ChatTemplate(templates.source(name), special, **options)


def noted(text: str) -> Message:
    return user(f"<system>\n{text}\n</system>")


@pytest.mark.parametrize("name", usual(OWN, "qwen3", "qwen2_5", "llama3_1", "glm4moe", "gemma4_v5", "phi3"))
def test_it_stays_a_system_message(name: str) -> None:
    template = made(name)
    text = template.whole([system("A"), system("BB"), user("Hi"), system("CC"), SAID, user("Go")], None, {})
    assert "<system>" not in text
    assert text.index("BB") < text.index("Hi") < text.index("CC") < text.index("Well.")
    assert template.remarks([system("A"), user("Hi"), system("CC")], 0) == ()


@pytest.mark.parametrize("name", usual(APART, "qwen3_5_think", "gptoss", "deepseekv3"))
def test_it_becomes_a_message_of_the_users(name: str) -> None:
    """The text is the one that the template writes for these messages of the user's."""
    template = made(name)
    late = [system("A"), user("Hi"), system("B"), SAID, system("C"), user("Go"), system("D")]
    as_users = [system("A"), user("Hi"), noted("B"), SAID, noted("C"), user("Go"), noted("D")]
    assert template.whole(late, None, {}) == template.whole(as_users, None, {})
    assert template.tail(SAID, late[4:], None, {}, earlier=late[:3]) == template.tail(
        SAID, as_users[4:], None, {}, earlier=as_users[:3]
    )
    assert template.transcript(late, [3], None, {}) == template.transcript(as_users, [3], None, {})


@pytest.mark.parametrize("name", ["qwen3_5_think", "deepseekv3"])
def test_results_follow_their_calls(name: str) -> None:
    template = made(name)
    late = [user("Hi"), CALL, system("B"), RESULT, system("C"), user("Go")]
    as_users = [user("Hi"), CALL, RESULT, noted("B"), noted("C"), user("Go")]
    assert template.whole(late, None, {}) == template.whole(as_users, None, {})


@pytest.mark.parametrize("name", usual(ALTERNATING, "gemma3", "gemma"))
def test_it_is_joined_to_what_the_user_says(name: str) -> None:
    template = made(name)
    late = [user("Hi"), system("B"), SAID, system("C"), system("D"), user("Go"), SAID, system("E")]
    as_users = [
        user("Hi\n\n<system>\nB\n</system>"),
        SAID,
        user("<system>\nC\n</system>\n\n<system>\nD\n</system>\n\nGo"),
        SAID,
        noted("E"),
    ]
    assert template.whole(late, None, {}) == template.whole(as_users, None, {})
    assert template.transcript(late, [2, 6], None, {}) == template.transcript(as_users, [1, 3], None, {})
    assert template.tail(SAID, late[3:6], None, {}, earlier=late[:2]) == template.tail(
        SAID, as_users[2:3], None, {}, earlier=as_users[:1]
    )


def test_it_is_joined_to_a_result_where_no_user_may_follow_one() -> None:
    """As Mistral's templates, which count the turns of users and of the assistant without calls."""
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}[S]{{ messages[0].content }}[/S]{% set messages = messages[1:] %}{% endif %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}"
        "{% if m.role == 'user' %}[I]{{ m.content }}[/I]{% elif m.role == 'tool' %}[R]{{ m.content }}[/R]"
        "{% elif m.role == 'assistant' %}{{ m.content }}{{ m.tool_calls[0].function.arguments if m.tool_calls }}</s>"
        "{% else %}{{ raise_exception('only users, tools and the assistant') }}{% endif %}{% endfor %}",
        {},
    )
    text = template.whole([user("Hi"), CALL, system("B"), RESULT, system("C")], None, {})
    assert text.endswith("[R]Flour.\n\n<system>\nB\n</system>\n\n<system>\nC\n</system>[/R]")


def test_one_that_is_written_in_no_place_is_no_silence() -> None:
    """This template writes no results, and takes no message of the user's behind one."""
    with pytest.raises(
        BadRequestError, match=r"messages\[3\]: the chat template writes this system message in no place"
    ):
        made("cohere2").whole([user("Hi"), CALL, RESULT, system("Be brief.")], None, {})


@pytest.mark.parametrize("behind", [[system("Be brief."), RESULT], [RESULT, system("Be brief."), user("Go")]])
def test_one_that_is_written_in_no_place_behind_a_turn_is_no_silence(behind: list[Message]) -> None:
    with pytest.raises(RenderingError, match="does not write a system message where it stands"):
        made("cohere2").tail(SAID, behind, None, {}, earlier=[user("Hi")])


@pytest.mark.parametrize("name", [*APART, *ALTERNATING])
def test_the_first_ones_are_one(name: str) -> None:
    template = made(name)
    several = template.whole([system("A"), system(""), system("B"), user("Hi")], None, {})
    assert template.remarks([system("A"), system("B"), user("Hi")], 0) == (
        ("system_in_place",) if name == "gemma" else ()
    )
    if name != "gemma":
        assert several == template.whole([system("A\n\nB"), user("Hi")], None, {})
    else:  # which takes no system message at all
        assert several == template.whole([user("<system>\nA\n</system>\n\n<system>\nB\n</system>\n\nHi")], None, {})


def test_it_is_named_by_the_request_that_first_writes_it() -> None:
    template = made("qwen3_5_think")
    messages = [system("A"), system("A2"), user("Hi"), system("B"), SAID, user("Go")]
    assert template.remarks(messages, 0) == template.remarks(messages, 3) == ("system_in_place",)
    assert template.remarks(messages, 5) == ()
    assert template.remarks([system("A"), user("Hi"), system("")], 0) == ()


def test_parts_stay_parts() -> None:
    """A text is put behind the parts of a message as another part; the parts of a system message are paragraphs."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = made("gemma3").whole([{"role": "user", "content": parts}, {"role": "system", "content": parts}], None, {})
    assert "a" in text
    assert text.index("a") < text.index("<system>\na\n\nb\n</system>")
    text = made("gemma3").whole([user("Hi"), SAID, system("C"), {"role": "user", "content": parts}], None, {})
    assert text.index("<system>\nC\n</system>") < text.rindex("b")


def conversation(rng: random.Random, *, calls: bool) -> list[Message]:
    """Turns of the assistant's, perhaps with calls, and system messages anywhere."""
    made: list[Message] = [system(f"s{at}") for at in range(rng.randrange(3))]
    number = itertools.count()
    for _ in range(rng.randrange(1, 5)):
        gap = [user(f"u{next(number)}")]
        if made and made[-1].get("tool_calls"):
            gap = [{**RESULT, "content": f"r{next(number)}"}]
        for _ in range(rng.randrange(3)):
            gap.insert(rng.randrange(len(gap) + 1), system(f"l{next(number)}"))
        turn: Message = {"role": "assistant", "content": f"a{next(number)}"}
        made += [*gap, {**CALL, **turn} if calls and rng.random() < 0.5 else turn]
    return made


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "deepseekv3", "gemma3", "gemma", "qwen3", "glm4moe"])
def test_a_chain_goes_on_wherever_they_stand(name: str) -> None:
    """What is rendered behind any turn is the end of what is rendered of all, and holds every message once, in its order."""
    template, rng = made(name), random.Random(name)
    tools = [TOOL] if name not in ("gemma3", "gemma") else None
    for _ in range(40):
        messages = conversation(rng, calls=tools is not None)
        for at, last in enumerate(messages):
            behind = messages[at + 1 :]
            if last["role"] != "assistant" or any(one["role"] == "assistant" for one in behind):
                continue
            if not any(one["role"] != "system" for one in behind):
                behind = [*behind, {**RESULT, "content": "rr"} if last.get("tool_calls") else user("uu")]
            tail = template.tail(last, behind, tools, {}, earlier=messages[:at])
            whole = template.whole([*messages[: at + 1], *behind], tools, {})
            assert whole.endswith(tail)
            for one in [*messages[:at], *behind]:
                if one["role"] != "assistant":
                    assert len(re.findall(rf"\b{one['content']}\b", whole)) == 1, one
            for one in behind:
                assert re.search(rf"\b{one['content']}\b", tail)


class TestTheOtherWays:
    def test_refused(self) -> None:
        template = made("qwen3_5_think", late_system="refuse")
        assert "A\n\nB" in template.whole([system("A"), system("B"), user("Hi"), system("")], None, {})
        for render in (
            lambda: template.whole([user("Hi"), system("B")], None, {}),
            lambda: template.tail(SAID, [system("B"), user("Go")], None, {}, earlier=[user("Hi")]),
        ):
            with pytest.raises(BadRequestError, match="--late-system refuse"):
                render()
        assert made("qwen3", late_system="refuse").whole([user("Hi"), system("B")], None, {})

    def test_merged(self) -> None:
        template = made("qwen3_5_think", late_system="merge")
        messages = [system("A"), user("Hi"), system("B"), SAID, user("Go"), system("C")]
        plain = [system("A\n\nB\n\nC"), user("Hi"), SAID, user("Go")]
        assert template.whole(messages, None, {}) == template.whole(plain, None, {})
        assert template.transcript(messages, [3], None, {}) == template.transcript(plain, [2], None, {})
        assert template.whole(messages[1:], None, {}) == template.whole([system("B\n\nC"), *plain[1:]], None, {})
        with pytest.raises(RenderingError, match="beginning"):
            template.tail(SAID, messages[4:], None, {}, earlier=messages[:3])
        assert template.tail(SAID, [user("Go")], None, {}, earlier=messages[:3]).startswith("<|im_end|>")
        assert template.remarks(messages, 0) == ()


def test_nothing_is_changed_for_a_template_that_refuses_all_trials() -> None:
    picky = "{% for m in messages if m.content == 'Hi' %}{{ raise_exception('a poor greeting') }}{% endfor %}"
    template = ChatTemplate(picky + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {})
    assert template.whole([system("A"), user("Hello"), system("B")], None, {}) == "[system]A[user]Hello[system]B"


def test_a_template_of_another_day_writes_them_alike() -> None:
    template = made("gptoss", late_system="refuse")
    (other,) = template.on_other_days([0.0])
    with pytest.raises(BadRequestError, match="--late-system refuse"):
        other.whole([user("Hi"), system("B")], None, {})
