"""A text that is put into a rendering gives what the template renders, or the template is not taken to copy texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from middleware_hub.chat.messages import Message
from middleware_hub.media.errors import ReservedCharacterError
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from middleware_hub.templates.slots import Slots, copies_of
from router.errors import BadRequestError
from tests.conftest import examples
from tests.support import templates

SHIPPED = {path.name: path.read_text("utf-8") for path in sorted(templates.folder().glob("*.jinja"))}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": {"a": 1}}}
TURNS: list[Message] = [
    {"role": "assistant", "content": "done"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "look", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
]
WORDS = [
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
    "say",
    "sa",
    "y",
    "{{ 1 }}",
    "&lt;",
    "\N{PILE OF POO}",
]
TEXT = st.lists(st.one_of(st.sampled_from([*WORDS, " ", "\n", "\u00a0", ""]), st.text(max_size=3)), max_size=5).map(
    "".join
)


@st.composite
def _message(draw: st.DrawFn) -> Message:
    message: Message = {"role": draw(st.sampled_from(["user", "tool", "system"])), "content": draw(TEXT)}
    for key in draw(st.sets(st.sampled_from(["tool_call_id", "name", "is_error"]))):
        message[key] = draw(st.sampled_from(["x", "y", "call_1"]))
    return message


MESSAGES: st.SearchStrategy[list[Message]] = st.lists(_message(), max_size=3)


def test_the_templates_of_many_models_copy() -> None:
    for name in ("qwen2_5", "qwen3", "llama3", "deepseekv3", "phi3"):
        assert copies_of(SHIPPED[f"{name}.jinja"]) is not None, name


@pytest.mark.parametrize("name", [name for name in SHIPPED if not name.endswith("_training.jinja")])
@settings(max_examples=examples(25, share=5))
@given(st.lists(st.tuples(st.sampled_from(TURNS), MESSAGES), min_size=1, max_size=4))
def test_tails_are_what_the_template_renders(name: str, asked: list[tuple[Message, list[Message]]]) -> None:
    """Over templates of models: the same tail, or the same refusal, whatever was rendered before."""
    if copies_of(SHIPPED[name]) is None:
        pytest.skip("this template does more than copy")
    kept, plain = made(name), made(name)
    for last, behind in asked:
        plain._slots._copies = None
        assert _tail(kept, last, behind) == _tail(plain, last, behind)


_made: dict[str, list[ChatTemplate]] = {}


def made(name: str) -> ChatTemplate:
    """Return one of two equal templates, in turn: making one takes long."""
    if name not in _made:
        placeholder = PLACEHOLDERS.get(name, "")
        _made[name] = [ChatTemplate(SHIPPED[name], SPECIAL, placeholder=placeholder) for _ in range(2)]
    found = _made[name]
    found.reverse()
    return found[0]


def _tail(
    template: ChatTemplate,
    last: Message,
    behind: list[Message],
    tools: list[Message] | None = None,
    options: dict[str, Any] | None = None,
    earlier: list[Message] | None = None,
) -> str | tuple[type, str]:
    try:
        whole = False if earlier is None else None
        earlier = earlier or [{"role": "user", "content": "Hi"}]
        return template.tail(last, behind, tools, options or {}, earlier=earlier, whole=whole)
    except (BadRequestError, RenderingError) as error:
        return type(error), str(error)


# Templates with macros, and of models that read pictures -----------------------------------------------------------------

MACROS = [name for name, source in SHIPPED.items() if "macro " in source and copies_of(source) is not None]
PICTURES = [name for name in SHIPPED if name.startswith(("qwen2_5_vl", "qwen3_vl", "gemma3"))]
PLACEHOLDERS = {name: "<|image_pad|>" for name in SHIPPED if name.startswith(("qwen2_5_vl", "qwen3_"))}
PLACEHOLDERS |= {name: "<start_of_image>" for name in PICTURES if name.startswith("gemma3")}
ODD = [
    *WORDS,
    *(
        "/nothink",
        "/no_think",
        "<|image_pad|>",
        "<|im_end|>",
        "<|im_start|>user\n",
        "<|user|>",
        "<tool_call>",
        "</parameter>",
    ),
    *("slot", "slot00000000000000", "000000", "sentinel", "{%- endif %}", "{# #}", "{}", "%s", "\\n", "'", '"', "<b>"),
    *("\ufdd0", "\ufdd1", "\u2028", "\x00", "e\N{COMBINING ACUTE ACCENT}", "\N{ZERO WIDTH JOINER}", "\ud800", "\u3000"),
]
LOOKED_AT = [
    "<tool_response>8</tool_response>",
    "<tool_response>8",
    "Go /nothink",
    " 8",
    "8\n",
    "\n",
    "</think>8",
    "8\u3000",
]
SAID = st.one_of(
    st.sampled_from(LOOKED_AT),
    st.lists(
        st.one_of(st.sampled_from([" ", "\n", "a word"]), st.sampled_from(ODD), st.text(max_size=3)), max_size=4
    ).map("".join),
)
PARTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, SAID),
        st.just({"type": "image", "digest": f"sha256:{1:064x}"}),
    ),
    min_size=1,
    max_size=3,
)
TOOLS = [
    {"type": "function", "function": {"name": "run", "description": "<b>Runs.</b>", "parameters": {"type": "object"}}}
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "preserve_thinking": True},
    {"add_vision_id": True, "reasoning_effort": "low"},
]


@st.composite
def _answers(draw: st.DrawFn) -> list[Message]:
    found: list[Message] = []
    for role in draw(st.lists(st.sampled_from(["user", "tool", "user", "tool", "assistant"]), max_size=4)):
        content = draw(SAID if role != "user" else st.one_of(SAID, SAID, SAID, PARTS))
        message: Message = {"role": role, "content": content}
        if role == "tool":
            message["tool_call_id"] = draw(st.sampled_from(["call_1", "<|im_end|>"]))
        found.append(message)
    return found


@st.composite
def _turn(draw: st.DrawFn) -> Message:
    turn: Message = {"role": "assistant", "content": draw(SAID)}
    if draw(st.booleans()):
        turn["reasoning_content"] = draw(SAID)
    if draw(st.booleans()):
        arguments = draw(st.sampled_from([{}, {"a": 1}, {"text": "<b> & {{ a }}", "list": [{"b": "<"}], "none": None}]))
        turn["tool_calls"] = [{**CALL, "function": {"name": "run", "arguments": arguments}}]
    return turn


@pytest.mark.parametrize("name", [*MACROS, *PICTURES])
@settings(max_examples=examples(200, share=7))
@given(
    st.lists(_answers(), max_size=2),
    _turn(),
    st.lists(_answers(), min_size=1, max_size=3),
    st.sampled_from([None, TOOLS]),
    st.sampled_from(OPTIONS),
)
def test_macros_write_in_slots_what_they_write_rendered(
    name: str,
    before: list[list[Message]],
    turn: Message,
    behind: list[list[Message]],
    tools: Any,
    options: dict[str, Any],
) -> None:
    """Over conversations with tools, reasoning, pictures and odd texts: the same tail, or the same refusal."""
    kept, plain = made(name), made(name)
    earlier = [{"role": "user", "content": "Hi"}, *(message for one in before for message in one)]
    plain._slots._copies = None
    for messages in behind:
        assert _tail(kept, turn, messages, tools, options, earlier) == _tail(
            plain, turn, messages, tools, options, earlier
        )


@pytest.mark.parametrize("name", ["glm4moe", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "qwen3_vl"])
def test_templates_with_macros_have_slots(name: str) -> None:
    template = ChatTemplate(SHIPPED[f"{name}.jinja"], SPECIAL)
    tail = template.tail(
        TURNS[1], [{"role": "tool", "content": "total 8"}], None, {}, earlier=[{"role": "user", "content": "Hi"}]
    )
    assert "total 8" in tail
    assert [len(around) for around in template._slots._known.values()] == [2]


def test_a_text_in_parts_has_a_slot() -> None:
    """Some harnesses write reminders of their own as further parts: their turns cost no rendering either."""
    template = ChatTemplate(SHIPPED["qwen3.jinja"], SPECIAL)
    parts = [{"type": "text", "text": text} for text in ("total 8", "Go on.")]
    tail = _tail(template, TURNS[0], [{"role": "user", "content": parts}], earlier=[{"role": "user", "content": "Hi"}])
    assert "total 8 Go on." in tail
    assert [len(around) for around in template._slots._known.values()] == [2]


def test_a_text_with_a_mark_is_refused_also_where_slots_are_known() -> None:
    """The renderer refuses these characters, and a text in a slot is not rendered."""
    template = ChatTemplate(SHIPPED["qwen3_5_think.jinja"], SPECIAL, placeholder="<|image_pad|>")
    earlier = [{"role": "user", "content": "Hi"}]
    for text in ("total 8", "total \ufdd0", "total \ufdd1"):
        found = _tail(template, TURNS[1], [{"role": "tool", "content": text}], None, {}, earlier)
        assert (text in found) if text == "total 8" else found[0] is ReservedCharacterError


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

# Any template ------------------------------------------------------------------------------------------------------------

COPYING = [
    "{{ message.content }}",
    "{{ message['content'] }}",
    "{{ message.get('content') }}",
    "{{ message.role + ': ' + message.content + '|' }}",
    "{{ message.role ~ message.content }}",
    "{{ message.content | trim }}",
    "{{ (message.role + message.content) | trim }}",
    "{{ message.content.strip() }}{{ message.content.lstrip('\\n') }}",
    "{{ message.content.split('say')[-1] }}",
    "{{ message.content.split('say') | first }}",
    "{% if message.content.startswith('say') %}1{% endif %}{{ message.content }}",
    "{% if 'sa' in message.content %}1{% else %}{{ message.content }}{% endif %}",
    "{% if message.content == 'say' %}1{% endif %}{{ message.content }}",
    "{% if message.content is string and message.content %}{{ message.content }}{% endif %}",
    "{% if 'name' in message %}{{ message.name }}{% endif %}{{ message.content }}",
    "{% if loop.previtem and loop.previtem.role == message.role %}same{% endif %}{{ message.content }}",
    "{% set text = message.content %}{{ text if text else 'nothing' }}",
    "{% set ns = namespace(text='') %}{% set ns.text = message.content %}{{ ns.text }}",
    "{% set text = {'a': 1} | string | safe %}{{ text }}{{ text ~ '<' }}{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{{ message.content | length }}{% endif %}",
    "{% if message.content is not string %}{% for part in message.content %}{{ part }}{% endfor %}{% endif %}",
    "{% if message.content is string %}{% elif message.content | length %}1{% endif %}{{ message.content }}",
    "{% set text = message.content %}{% set text = '>' + text %}{{ text }}",
    "{{ messages[loop.index0].content }}{{ (messages | last).content }}{{ messages[1:] | length }}",
]
"""What templates do with texts and leave them as they are, or show that they look for a word."""

OTHER = [
    "{{ message.content | tojson }}",
    "{{ message.content | upper }}",
    "{{ message.content | length }}",
    "{{ message.content | replace('s', '') }}",
    "{{ message.content | e }}",
    "{{ ('<b>' | safe) ~ message.content }}",
    "{{ message.content[:2] }}",
    "{{ message.content[0] }}",
    "{{ message.content.replace('s', '') }}",
    "{{ message.content.split() }}",
    "{{ message.content.split('say') }}",
    "{{ message.content.strip('say') }}",
    "{{ message.content * 2 }}{{ message.content.upper() }}",
    "{{ '%s' % message.content }}{{ '%r' % message.content }}",
    "{{ '{!r}'.format(message.content) }}",
    "{% if message.content in 'so to say' %}1{% endif %}",
    "{% if message.content > 'm' %}1{% endif %}",
    "{% if message.content == messages[0].content %}1{% endif %}",
    "{% if message == messages[0] %}1{% endif %}",
    "{% if ('sa' + message.content) == 'say' %}1{% endif %}",
    "{% if (message.content ~ 'y').endswith('say') %}1{% endif %}",
    "{% set text = 's' + message.content %}{% if 'say' in text %}1{% endif %}",
    "{% set ns = namespace(text='s') %}{% set ns.text = ns.text + message.content %}{% if 'sa' in ns.text %}1{% endif %}",
    "{% for letter in message.content %}{{ letter }},{% endfor %}",
    "{% for key, value in message.items() %}{{ value | length }}{% endfor %}",
    "{% for key in message %}{{ message[key] | length }}{% endfor %}",
    "{{ message }}{{ messages | tojson }}",
    "{{ messages | map(attribute='content') | join(',') | length }}",
    "{% macro show(text) %}{{ text | length }}{% endmacro %}{{ show(message.content) }}",
    "{% set text %}{{ message.content }}{% endset %}{{ text | length }}",
    "{% filter upper %}{{ message.content }}{% endfilter %}",
    "{% with text = message.content %}{{ text | length }}{% endwith %}",
    "{{ raise_exception(message.content) }}",
    "{{ {message.content: 1} }}{{ [message.content] }}",
    "{{ {'say': 1}[message.content] }}{{ {'say': 1}.get(message.content) }}",
    "{{ dict(a=message.content) }}{{ namespace(a=message.content).a | length }}",
    "{{ message.content is lower }}{{ message.content is in ['say'] }}",
    "{% set ns = namespace(seen=[]) %}{% if ns.seen.append(message.content) %}{% endif %}{{ ns.seen | length }}",
    "{{ strftime_now('%f') }}{{ message.content }}",
    "{{ {'now': strftime_now}.now('%f') }}{{ [1, 2] | random }}{{ message.content }}",
    "{{ '<b>' | safe + message.content }}",
    "{% set bold = '<b>' | safe %}{{ bold + message.content }}",
    "{{ (['<b>'] | map('safe') | first) + message.content }}",
    "{% set n = namespace(b='') %}{% autoescape true %}{% set n.b %}<{% endset %}{% endautoescape %}{{ n.b+message.content }}",
    "{% set ns = namespace(text='') %}{% set ns.text = message.content %}{{ ns['te' ~ 'xt'] | length }}",
    "{% set ns = namespace(text='') %}{% set ns.text = message.content %}{{ (ns | attr('text')) | length }}{{ ns }}",
    "{{ (loop | attr('previtem')) | tojson }}",
    "{% set ns = {'n': namespace}.n(text='') %}{% set ns.text = message.content %}{{ ns }}",
    "{% if message.content is not string %}{% else %}{{ message.content | length }}{% endif %}",
    "{% if message.content is string and a %}{% else %}{{ message.content | length }}{% endif %}",
    "{% set text = '' %}{% if text is string %}{% else %}{% set text = message.content %}{{ text | length }}{% endif %}",
]
"""What changes a text, or decides by it."""

DEFINED = """{%- set ns = namespace(seen='', count=0) -%}
{%- macro show(shown) -%}{%- if shown is string -%}{{- shown -}}{%- else -%}{{- shown | tojson -}}{%- endif -%}{%- endmacro -%}
{%- macro quoted(words, mark='"') -%}{{- mark + words + mark -}}{%- endmacro -%}
{%- macro boxed(inside) -%}[{{- inside -}}]{%- endmacro -%}
{%- macro role(of) -%}{%- if of.role == 'tool' -%}{{- show(of.content) -}}{%- endif -%}{%- endmacro -%}
{%- macro counted() -%}{%- set ns.count = ns.count + 1 -%}{{- ns.count -}}{%- endmacro -%}
{%- macro listed(items) -%}{%- for item in items -%}{{- show(item) -}}{%- endfor -%}{%- endmacro -%}
{%- macro twice(again) -%}{%- for one in 'ab' -%}{{- again -}}{%- endfor -%}{%- endmacro -%}
{%- macro seen() -%}{{- ns.seen -}}{%- endmacro -%}
{%- macro long(measured) -%}{{- measured | length -}}{%- endmacro -%}
"""
COPYING_CALLS = [
    "{{ show(message.content) }}",
    "{{ show(message.content) | trim }}{{ show(shown=message.content) }}",
    "{% if show(message.content).startswith('say') %}1{% endif %}{{ message.content }}",
    "{% if 'sa' in show(message.content) %}1{% endif %}{{ show(message.content).split('y')[0] }}",
    "{{ quoted(message.content) }}{{ quoted(message.content, mark=message.role) }}{{ boxed(message.content) | trim }}",
    "{{ role(message) }}{{ message.content }}",
    "{{ counted() }}{% set text = show(show(message.content)) %}{{ text ~ counted() }}",
    "{{ listed([1, 'a', {'b': '<'}]) }}{{ message.content }}",
    "{{ twice(message.content) }}",
    "{% set ns.seen = message.content %}{{ seen() }}",
]
OTHER_CALLS = [
    "{{ show(message.content) | length }}",
    "{{ show(message.content)[0] }}",
    "{{ long(message.content) }}",
    "{% if quoted(message.content).startswith('\"say') %}1{% endif %}",
    "{% if quoted(message.content, 's').endswith('ys') %}1{% endif %}",
    "{% if '[sa' in boxed(message.content) %}1{% endif %}",
    "{% if 'aya' in twice(message.content) %}1{% endif %}",
    "{% set ns.seen = message.content %}{{ seen() | length }}",
    "{{ {'show': show}.show(message.content) }}",
    "{% set ns.seen = message.content %}{{ {'seen': seen}.seen() | length }}",
    "{{ show(message.content, 1) }}",
    "{{ show(*[message.content]) }}",
    "{% call show(message.content) %}{% endcall %}",
    "{{ show(message.content | upper) }}",
    "{{ listed(message.content) }}",
    "{{ listed([message.content]) }}",
    "{% set show = message.content %}{{ show }}",
]
"""Calls of these macros, after which a text is still known to be as it was, and others."""


@pytest.mark.parametrize("piece", OTHER)
def test_what_changes_a_text_is_no_copy(piece: str) -> None:
    assert copies_of(_loop([piece])) is None


@pytest.mark.parametrize("piece", COPYING)
def test_what_leaves_a_text_as_it_is_is_a_copy(piece: str) -> None:
    assert copies_of(_loop([piece])) is not None


def _loop(pieces: list[str]) -> str:
    return "{% for message in messages %}" + "|".join(pieces) + "{% endfor %}."


@pytest.mark.parametrize("piece", OTHER_CALLS)
def test_a_call_that_changes_a_text_is_no_copy(piece: str) -> None:
    assert copies_of(DEFINED + _loop([piece])) is None


@pytest.mark.parametrize("piece", COPYING_CALLS)
def test_a_call_that_leaves_a_text_as_it_is_is_a_copy(piece: str) -> None:
    assert copies_of(DEFINED + _loop([piece])) is not None


@given(
    st.sampled_from(["", DEFINED]),
    st.lists(st.sampled_from([*COPYING, *OTHER[:30], *COPYING_CALLS, *OTHER_CALLS]), min_size=1, max_size=3),
    st.lists(MESSAGES, max_size=4),
)
def test_a_template_that_is_taken_to_copy_copies(
    defined: str, pieces: list[str], conversations: list[list[Message]]
) -> None:
    """Every slot shows what a rendering of the texts themselves shows."""
    source = defined + _loop(pieces)
    if copies_of(source) is None:
        return
    slots, template = Slots(source), ENVIRONMENT.from_string(source)

    def render(messages: list[Message]) -> str:
        return template.render(messages=messages)

    for messages in conversations:
        assert _caught(slots.rendered, "key", messages, render) == _caught(render, messages)


def _caught(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except (TypeError, ValueError, TemplateError) as error:
        return type(error)


def test_nothing_is_rendered_for_texts_whose_surroundings_are_known() -> None:
    seen: list[list[Message]] = []

    def render(messages: list[Message]) -> str:
        seen.append(messages)
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    slots = Slots("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}")
    for text in ("a", "b", "", "c"):
        found = slots.rendered("key", [{"role": "tool", "content": text, "tool_call_id": text}], render)
        assert found == f"<tool>{text}"
    assert len(seen) == 2, "once for the slot, and once for the empty text, which a template may leave out"
    slots.rendered("other", [{"role": "tool", "content": "a"}], render)
    assert len(seen) == 3


def test_no_more_renderings_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose how many there are."""
    monkeypatch.setattr("middleware_hub.templates.trials.REMEMBERED", 2)
    slots = Slots("{% for message in messages %}{{ message.content }}{% endfor %}")
    seen: list[str] = []

    def rendered(key: str) -> str:
        def render(messages: list[Message]) -> str:
            seen.append(key)
            return str(messages[0]["content"])

        return slots.rendered(key, [{"role": "user", "content": "a"}], render)

    assert [rendered(key) for key in "aabbabcbc"] == ["a"] * 9
    assert "".join(seen) == "abcb"


def test_no_more_bytes_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose how many messages follow a turn, and how long the text of an option is."""
    monkeypatch.setattr("middleware_hub.templates.trials.REMEMBERED_BYTES", 4000)
    slots = Slots("{% for message in messages %}{{ message.content }}{% endfor %}")
    seen: list[int] = []

    def rendered(key: str, count: int = 1) -> bool:
        """Return whether the template was run."""

        def render(messages: list[Message]) -> str:
            seen.append(count)
            return "".join(message["content"] for message in messages)

        before = len(seen)
        assert slots.rendered(key, [{"role": "user", "content": "a"}] * count, render) == "a" * count
        return len(seen) > before

    assert [rendered("a"), rendered("a")] == [True, False]
    assert [rendered("a", 100), rendered("a", 100)] == [True, True], "they alone are more than there is room for"
    assert not rendered("a"), "and take no other's place"
    assert [rendered("b" * 3500), rendered("b" * 3500)] == [True, False]
    assert rendered("a"), "the long one has taken its place"
