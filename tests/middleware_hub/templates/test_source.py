"""Several templates by name are joined to one that writes what transformers writes; a date is replaced by another day's."""

from __future__ import annotations

from datetime import datetime

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from middleware_hub.chat.messages import Tool
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.source import at_time, joined, tells_time
from tests.middleware_hub.templates.test_chat_template import TOOLS, call, result, said, system, user
from tests.support.templates import CHATML, source
from tests.support.vocabularies import vocabulary

LISTS_TOOLS = (
    "{%- for t in tools %}{{- '[' ~ t.function.name ~ ']' }}{%- endfor %}{%- for m in messages %}"
    "{{- m.role ~ ':' ~ m.content }}{%- for c in m.tool_calls or [] %}{{- '<' ~ c.function.arguments ~ c.id ~ '>' }}"
    "{%- endfor %}{{- ';' }}{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
)
"""As Hermes 3's: it fails without tools. And calls' arguments are wanted as text."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer that gets each test's templates."""
    return AutoTokenizer.from_pretrained(vocabulary("qwen"))


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("default", "for_tools"),
    [
        (CHATML, LISTS_TOOLS),
        ("\n  " + CHATML + "\n  \n", "\n" + LISTS_TOOLS + " \n"),
        (CHATML + "hi\r\n", LISTS_TOOLS + "hi\r\n"),
        ("qwen2_5", "llama3_1"),
    ],
    ids=["plain", "blanks", "lines of Windows", "published"],
)
def test_it_writes_what_transformers_does(
    tokenizer: PreTrainedTokenizerBase, default: str, for_tools: str, tools: list[Tool] | None
) -> None:
    named = {"default": default, "tool_use": for_tools}
    if default == "qwen2_5":
        named = {name: source(value) for name, value in named.items()}
    tokenizer.chat_template = named
    one = joined(named)
    assert one is not None
    template = ChatTemplate(one, tokenizer.special_tokens_map)
    messages = [system("Be brief."), user("a"), said("b"), user("c")]
    assert template.whole(messages, tools, {}) == tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def test_calls_are_tried_with_the_one_for_tools() -> None:
    one = joined({"default": CHATML, "tool_use": LISTS_TOOLS})
    assert one is not None
    template, alone = ChatTemplate(one, {}), ChatTemplate(LISTS_TOOLS, {})
    turns = [(said("", call("weather", number, x="y")), [result("rain", number)]) for number in range(2)]
    for turn, behind in turns:
        earlier = [user("a")]
        found = template.tail(turn, behind, TOOLS, {}, earlier=earlier)
        assert found == alone.tail(turn, behind, TOOLS, {}, earlier=earlier) == ";tool:rain;assistant:"
    assert '{"x": "y"}' in template.whole([user("a"), turns[0][0]], TOOLS, {})


def test_one_alone_is_taken_as_it_is() -> None:
    assert joined({"tool_use": LISTS_TOOLS}) == joined({"rag": "r", "tool_use": LISTS_TOOLS}) == LISTS_TOOLS
    assert joined({"default": CHATML}) == joined({"rag": "r", "default": CHATML}) == CHATML
    assert joined({"rag": "r"}) == "r"
    assert joined({}) is None


# Dates ------------------------------------------------------------------------------------------------------------------

DAY = datetime(2025, 3, 4, 12).timestamp()
SAYS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ('{{ strftime_now("%Y-%m-%d") }}', "2025-03-04"),
        (
            "{%- if strftime_now is defined %}{%- set day = strftime_now ( '%d %b %Y' ) %}{%- endif %}{{ day }}",
            "04 Mar 2025",
        ),
        ("""{{ strftime_now("%d o'clock") }}""", "04 o'clock"),
        ("{{ strftime_now('%d') }}/{{ strftime_now('%m') }}", "04/03"),
    ],
)
def test_the_date_of_another_day(source: str, written: str) -> None:
    assert tells_time(source)
    assert (
        ChatTemplate(at_time(source, DAY) + SAYS, {}).whole([{"role": "user", "content": "!"}], None, {})
        == written + "!"
    )


@pytest.mark.parametrize(
    "source",
    [
        SAYS,
        "{% if strftime_now is defined %}{% endif %}",
        "{{ strftime_now(format) }}",
        "{{ strftime_now('%d') }}{{ strftime_now(format) }}",
    ],
)
def test_no_date_or_one_that_the_source_does_not_spell(source: str) -> None:
    assert not tells_time(source)


def test_other_days_only_and_each_once() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}" + SAYS, {})
    now = datetime.now().timestamp()
    assert [*template.on_other_days([now])] == []
    (one,) = template.on_other_days([DAY, DAY + 60, now])
    assert [*template.on_other_days([DAY])] == [one]
    assert [*ChatTemplate(SAYS, {}).on_other_days([DAY])] == []
