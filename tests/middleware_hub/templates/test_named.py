"""Several templates by name, joined: what is written is what transformers writes with the one that it would take."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from middleware_hub.chat.messages import Tool
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.named import one_of
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
    joined = one_of(named)
    assert joined is not None
    template = ChatTemplate(joined, tokenizer.special_tokens_map)
    messages = [system("Be brief."), user("a"), said("b"), user("c")]
    assert template.whole(messages, tools, {}) == tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def test_calls_are_tried_with_the_one_for_tools() -> None:
    joined = one_of({"default": CHATML, "tool_use": LISTS_TOOLS})
    assert joined is not None
    template, alone = ChatTemplate(joined, {}), ChatTemplate(LISTS_TOOLS, {})
    turns = [(said("", call("weather", number, x="y")), [result("rain", number)]) for number in range(2)]
    for turn, behind in turns:
        earlier = [user("a")]
        found = template.tail(turn, behind, TOOLS, {}, earlier=earlier)
        assert found == alone.tail(turn, behind, TOOLS, {}, earlier=earlier) == ";tool:rain;assistant:"
    assert '{"x": "y"}' in template.whole([user("a"), turns[0][0]], TOOLS, {})


def test_one_alone_is_taken_as_it_is() -> None:
    assert one_of({"tool_use": LISTS_TOOLS}) == one_of({"rag": "r", "tool_use": LISTS_TOOLS}) == LISTS_TOOLS
    assert one_of({"default": CHATML}) == one_of({"rag": "r", "default": CHATML}) == CHATML
    assert one_of({"rag": "r"}) == "r"
    assert one_of({}) is None
