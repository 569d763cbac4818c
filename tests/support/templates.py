"""Published chat templates, out of the wheel `trl`, which keeps those of many models under short names.

They are fetched once and kept outside of the checkout, as they are; none of them is ours.
"""

from __future__ import annotations

import tempfile
import zipfile
from functools import cache
from pathlib import Path

from tests.support.family_templates import FAMILIES
from tests.support.vocabularies import cache_folder
from tests.support.wheels import fetch

WHEEL = "trl==1.16.0"
_INSIDE = "trl/chat_templates/"

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The plain one: no tools, no calls, no thinking."""

_TURN = "{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}"
_CALLS = """{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ c.function.arguments | tojson ~ '}\\n</tool_call>' }}
{%- endfor %}"""


def _reading(before: str = "", asked: str = "", *, after: str = "") -> str:
    """A template that keeps what was said as it was, and reads it for what it asks the model with.

    Args:
        before: in front of all messages.
        asked: behind the assistant's header, where it is asked.
        after: behind each message.
    """
    return (
        f"{before}{{%- for m in messages %}}{_TURN}{_CALLS}{{{{- '<|im_end|>\\n' }}}}{after}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{asked}{{%- endif %}}"
    )


def _think(closed: str) -> str:
    return f"{{{{- '<think></think>' if {closed} else '<think>\\n' }}}}"


_ALL_SWITCHES = """{%- set ns = namespace(thinks = enable_thinking is not defined or enable_thinking) %}
{%- for m in messages %}
    {%- if m.role == 'user' or m.role == 'system' %}
        {%- if '/think' in m.content.replace('</think>', '') %}
            {%- set ns.thinks = true %}
        {%- elif '/no_think' in m.content %}
            {%- set ns.thinks = false %}
        {%- endif %}
    {%- endif %}
{%- endfor %}"""
_LAST_USER = """{%- set ns = namespace(last = '') %}
{%- for m in messages if m.role == 'user' %}{%- set ns.last = m.content %}{%- endfor %}"""
_SMOLLM3 = """{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" %}
{{- "<|im_start|>system\n" }}
{%- if messages[0].role == "system" %}
  {%- set system_message = messages[0].content %}
  {%- if "/no_think" in system_message %}
    {%- set reasoning_mode = "/no_think" %}
  {%- elif "/think" in system_message %}
    {%- set reasoning_mode = "/think" %}
  {%- endif %}
  {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() %}
{%- endif %}
{{- "Reasoning Mode: " + reasoning_mode + "\n\n## Custom Instructions\n\n" }}
{%- if custom_instructions %}{{- custom_instructions + "\n\n" }}{%- endif %}
{%- if tools %}{{- "### Tools\n\n" }}{%- for tool in tools %}{{- tool | tojson + "\n" }}{%- endfor %}{%- endif %}
{{- "<|im_end|>\n" }}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else "" %}
  {%- if message.role == "user" %}
    {{- "<|im_start|>user\n" + content + "<|im_end|>\n" }}
  {%- elif message.role == "assistant" %}
    {%- if reasoning_mode == "/think" %}
      {{- "<|im_start|>assistant\n" + content.lstrip("\n") }}
    {%- else %}
      {{- "<|im_start|>assistant\n<think>\n\n</think>\n" + content.lstrip("\n") }}
    {%- endif %}
    {%- for c in message.tool_calls or [] %}
      {{- '<tool_call>\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ c.function.arguments | tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
  {%- elif message.role == "tool" %}
    {{- "<|im_start|>user\n" + content + "<|im_end|>\n" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {%- if reasoning_mode == "/think" %}
    {{- "<|im_start|>assistant\n" }}
  {%- else %}
    {{- "<|im_start|>assistant\n<think>\n\n</think>\n" }}
  {%- endif %}
{%- endif %}"""

READING: dict[str, str] = {
    # As published with NVIDIA's Nemotron Nano 2: the last switch of any user or system message counts.
    "nemotron_nano_2": _reading(_ALL_SWITCHES, _think("not ns.thinks")),
    # As published with SmolLM3, which reads the system prompt alone, and writes earlier turns by it.
    "smollm3": _SMOLLM3,
    # Qwen3's own soft switch, where a template looks for it: in what the user said last, however many tools answered since.
    "last_user": _reading(_LAST_USER, _think("ns.last.strip().endswith('/no_think')")),
    "json_fence": _reading(asked="{{- '```json\\n' if 'json' in (messages[0].content | lower) else '' }}"),
    "fourth_turn": _reading(
        asked="{%- if messages | selectattr('role', 'equalto', 'user') | list | length > 3 %}{{- '(Sum up.)\\n' }}{%- endif %}"
    ),
    "long_prompt": _reading(asked="{%- if messages[0].content | length > 20 %}{{- '(In short.)\\n' }}{%- endif %}"),
    "named_word": _reading(
        asked="{%- if word is defined and word in messages[0].content %}{{- '(Now!)\\n' }}{%- endif %}"
    ),
    "table": _reading(asked="{{- {'Be quick.': '<think></think>'}.get(messages[0].content, '<think>\\n') }}"),
    # It reads what nobody expects to be read: only a comparison finds that out.
    "hidden": _reading(asked="{{- '<think></think>' if messages[0].name is defined else '<think>\\n' }}"),
    "hidden_later": _reading(
        asked="{%- set roles = messages | map(attribute='role') | list %}"
        "{{- '(Quick.)\\n' if roles | select('equalto', 'system') | list | length > 1 else '' }}",
    ),
    "tool_names": _reading(
        asked="{%- for tool in tools or [] if tool.function.name == 'look' %}{{- '(Look!)\\n' }}{%- endfor %}"
    ),
    "other_reply": _reading(
        asked="{%- set said = messages | selectattr('role', 'equalto', 'assistant') | list %}"
        "{{- '(Calmly.)\\n' if said and '!!' in said[-1].content else '' }}"
    ),
    "each_message": _reading(
        after="{{- '(Quietly.)\\n' if '/quiet' in messages[0].content and m.role == 'user' else '' }}"
    ),
}
"""Templates that look at what was said, near or far, for what they write later on."""

SPECIAL_TOKENS: dict[str, dict[str, str]] = {
    "llama3_1": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "deepseekv3": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "gemma4": {"bos_token": "<bos>", "eos_token": "<turn|>"},
    "lfm2_v2": {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "mistral_list": {"bos_token": "<s>", "eos_token": "</s>"},
    "deepseek_v32": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
}
"""The variables that a template sees of its model's tokenizer, where it looks at them."""


@cache
def source(name: str) -> str:
    """The Jinja source of a template, by the wheel's name for it (`qwen3`), or of `chatml`, or of one of ours."""
    if name in READING or name in FAMILIES:
        return READING.get(name) or FAMILIES[name]
    return CHATML if name == "chatml" else (folder() / f"{name}.jinja").read_text()


def folder() -> Path:
    """Where the templates are: fetched if they are not there, which takes a second and the network."""
    target = cache_folder() / "templates" / WHEEL.replace("==", "-")
    if not target.is_dir():
        _fetch(target)
    return target


def _fetch(target: Path) -> None:
    """Unpack into a folder of our own and rename it: of several processes at once, the first one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".trl-") as temporary:
        wheel = fetch(WHEEL, Path(temporary), "the chat templates")
        made = Path(temporary) / "folder"
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(_INSIDE) and name.endswith(".jinja"):
                    (made / Path(name).name).write_bytes(archive.read(name))
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
