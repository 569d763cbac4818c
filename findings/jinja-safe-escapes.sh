#!/usr/bin/env bash
# Guess: in a chat template `| safe` changes nothing. transformers renders with autoescape off, and Jinja documents
# `safe` only for environments with automatic escaping. So `a | safe + b` is `a` followed by `b`.
# Instead (transformers 5.24.0, jinja2 3.1.6): `+` escapes the text on its other side, in either order: a message
# `a < b & c` becomes `a &lt; b &amp; c`, and `<|end|>` becomes `&lt;|end|&gt;`, which is no special token any more.
# `| safe | format(...)` escapes its arguments, too. `~`, `join` and two printed values in a row escape nothing.
# Hurts: whoever copies `arguments | tojson | safe` from a published template (Qwen 3.5 and later have it) into one that
# puts texts together with `+`: nothing fails, code in messages is altered, and turns end without their end token.
# Here: a text that is added to a `safe` value is never put into a remembered rendering: Jinja renders it, as it would.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6
"$tmp/venv/bin/python" - <<'PY'
from importlib.metadata import version

from transformers.utils.chat_template_utils import render_jinja_template

MESSAGES = [{"role": "user", "content": "a < b & c"}]
SEEN = {
    "{{ '<|user|>' + m.content + '<|end|>' }}": "<|user|>a < b & c<|end|>",
    "{{ '<|user|>' | safe + m.content }}": "<|user|>a &lt; b &amp; c",
    "{{ m.content | safe + '<|end|>' }}": "a < b & c&lt;|end|&gt;",
    "{{ '<call>' + (m.content | tojson | safe) + '</call>' }}": '&lt;call&gt;"a < b & c"&lt;/call&gt;',
    "{{ '<|user|>%s' | safe | format(m.content) }}": "<|user|>a &lt; b &amp; c",
    "{{ ('<|user|>' | safe) ~ m.content }}": "<|user|>a < b & c",
    "{{ ['<|user|>' | safe, m.content] | join }}": "<|user|>a < b & c",
    "{{ '<|user|>' | safe }}{{ m.content }}": "<|user|>a < b & c",
}
print(f"transformers {version('transformers')}, jinja2 {version('jinja2')}")
for template, expected in SEEN.items():
    source = "{% for m in messages %}" + template + "{% endfor %}"
    (found,), _ = render_jinja_template(conversations=[MESSAGES], chat_template=source)
    print(f"{template:60} {found}")
    assert found == expected, (template, found)
PY
