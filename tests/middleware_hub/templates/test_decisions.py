"""What a template reads of its messages: its words, or that it decides by something that no short conversation shows."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.chat.messages import KeyedMessage
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.decisions import Decisions, decisions_of
from tests.support.templates import CHATML, READING, folder, source

DECIDES = "{{% for m in messages %}}{{% if {} %}}!{{% endif %}}{{{{ m.content }}}}{{% endfor %}}"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("'/no_think' in m.content", ["/no_think"]),
        ("'/no_think' in m['content']", ["/no_think"]),
        ("'/no_think' in m.get('content')", ["/no_think"]),
        ("'/no_think' not in messages[0].content | trim", ["/no_think"]),
        ("m.content.strip().startswith('Go')", ["Go"]),
        ("m.content.startswith(('Go', 'Run'))", ["Go", "Run"]),
        ("m.content.split('</think>')[-1] == 'x'", ["</think>", "x"]),
        ("m.content == 'now'", ["now"]),
        ("m.content in ['now', 'then']", ["now", "then"]),
        ("m.content is eq('now')", ["now"]),
        ("'now' is in m.content", ["now"]),
        ("m.content[:3] == 'Now'", ["Now"]),
        ("m.content.find('now') > 0", ["now"]),
        ("('/no' ~ '_think') in m.content", ["/no_think"]),
        ("'a' in m.content and 'b' in m.content", ["a", "b"]),
        ("messages | selectattr('content', 'equalto', 'now') | list", ["now"]),
        ("'now' in messages | map(attribute='content') | join", ["now"]),
        ("'now' in messages | tojson", ["now"]),
        ("m.content | replace('/fast', '') != m.content", None),
        ("m.role == 'user'", []),
        ("m.role in ['user', 'tool'] and not loop.last", []),
        ("m.tool_calls and 'x' in m", []),
        ("m.content and m.content | length > 0", []),
        ("messages | length > 1 and loop.index0 % 2 == 0", []),
        ("loop.index0 > messages | length - 1", []),
        ("m.content | length > 100", None),
        ("messages | length > 20", None),
        ("loop.index0 % 3 == 0", None),
        ("loop.index > most", None),
        ("word in m.content", None),
        ("m.content == messages[0].content", None),
        ("m.content.isdigit()", None),
        ("m.content | int > 1", None),
        ("'nothink' in m.content.replace(' ', '')", None),
        ("{'now': 1}[m.content]", None),
    ],
)
def test_what_decides_is_found(condition: str, words: list[str] | None) -> None:
    """None: it is opaque. Roles, and numbers that short conversations have, decide nothing that these could not show."""
    found = decisions_of(DECIDES.format(condition))
    if words is None:
        assert found.opaque
    else:
        assert found == Decisions(tuple(words))


@pytest.mark.parametrize(
    "template",
    [
        "{% set said = messages[0].content %}{% if '/fast' in said %}!{% endif %}",
        "{% set ns = namespace(said='') %}{% for m in messages %}{% set ns.said = m.content %}{% endfor %}"
        "{{ '!' if '/fast' in ns.said }}",
        "{% set ns = namespace(said=messages[0].content) %}{{ '!' if '/fast' in ns.said }}",
        "{% macro fast(one) %}{{ '!' if '/fast' in one }}{% endmacro %}{{ fast(messages[0].content) }}",
        "{% macro said(m) %}{{ m.content }}{% endmacro %}{{ '!' if '/fast' in said(messages[0]) }}",
        "{% set said %}{{ messages[0].content }}{% endset %}{{ '!' if '/fast' in said }}",
        "{% for line in messages[0].content.split('\n') %}{{ '!' if line == '/fast' }}{% endfor %}",
        "{% set word = '/fast' %}{{ '!' if word in messages[0].content }}",
        "{% for word in ['/fast'] %}{{ '!' if word in messages[0].content }}{% endfor %}",
        "{% set words = ['/fast'] %}{% for word in words %}{{ '!' if word in messages[0].content }}{% endfor %}",
        "{% generation %}{{ '!' if '/fast' in messages[0].content }}{% endgeneration %}",
    ],
)
def test_it_is_followed_through_whatever_holds_it(template: str) -> None:
    assert decisions_of(template).words == ("/fast",)


def test_words_are_looked_for_in_texts_and_parts_and_remembered() -> None:
    reads = decisions_of(DECIDES.format("'/fast' in m.content"))
    for content, holds in (("go /fast", True), ("go", False), (None, False)):
        assert reads.concern([user("a"), user(content)]) is holds
        assert reads.concern([user("a"), user([{"type": "image"}, {"type": "text", "text": content}])]) is holds
        keyed = KeyedMessage(user(content), b"")
        assert [reads.concern([keyed]) for _ in range(2)] == [holds] * 2
        assert not decisions_of(DECIDES.format("'/slow' in m.content")).concern([keyed]), "another template's words"


def test_case_counts_unless_the_template_folds_it() -> None:
    assert not decisions_of(DECIDES.format("'json' in m.content")).concern([user("As JSON")])
    for condition in ("'json' in m.content | lower", "'JSON' in m.content.upper()"):
        assert decisions_of(DECIDES.format(condition)).concern([user("As Json")])


def test_an_opaque_template_is_concerned_by_everything() -> None:
    assert decisions_of("{% broken").concern([user("")])
    template = ChatTemplate(CHATML, {})
    assert not template.reads([user("a")])
    assert [template.distrust() for _ in range(2)] == [True, False]
    assert template.reads([user("a")])


def test_published_templates_are_not_opaque() -> None:
    """But for Cohere's, which compares a message with the system prompt: what all of them read is a few markers."""
    opaque = [
        path.stem
        for path in folder().glob("*.jinja")
        if "training" not in path.name and decisions_of(path.read_text()).opaque
    ]
    assert opaque == ["cohere2"]
    assert decisions_of(source("qwen2_5")) == decisions_of(CHATML) == Decisions()
    assert decisions_of(source("qwen3")).words == ("</think>", "</tool_response>", "<think>", "<tool_response>")


def test_templates_that_read_texts_are_seen_to() -> None:
    assert [name for name in READING if decisions_of(source(name)) == Decisions()] == [
        "hidden",
        "hidden_later",
        "tool_names",
    ]


@pytest.mark.parametrize("pairs", ["given | dictsort", "given | items", "given.items()"])
def test_names_of_fields_are_not_looked_for_in_texts(pairs: str) -> None:
    """Gemma 4 leaves `type` and `description` out of a tool's properties; a reply may have these words."""
    shows = "{%- if key not in ['type', 'description'] %}{{ key }}{{ shown(value) }}{%- endif %}"
    macro = f"{{%- macro shown(given) %}}{{%- for key, value in {pairs} %}}{shows}{{%- endfor %}}{{%- endmacro %}}"
    assert decisions_of(macro + "{%- for m in messages %}{{ shown(m.content) }}{%- endfor %}").words == ()
    values = macro.replace("key not in", "value not in")
    assert decisions_of(values + "{%- for m in messages %}{{ shown(m.content) }}{%- endfor %}").words == (
        "description",
        "type",
    )
