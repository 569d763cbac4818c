#!/usr/bin/env bash
# Guess: with `continue_final_message=True` a prompt ends with the text of the last message, so that an interrupted reply
# goes on where it stopped. Whether the template trims finished messages does not matter: this one is not finished.
# Instead (transformers 5.24.0, the templates of TRL 1.16.0): 13 of 19 templates lose the white space at its end, without
# an error: those of Llama 3 and 3.1, Gemma to 4, GLM 4 MoE, Qwen 3.5 to 3.8, Nemotron 3, Command R. `Step 1:\n` is
# continued after `Step 1:`. Where the message is empty, the newline goes too that the template itself writes before a
# reply (`<|end_header_id|>` in place of `<|end_header_id|>\n\n`). Qwen 2.5 and 3, Phi 3, DeepSeek V3, gpt-oss and
# Command R7B keep both.
# Hurts: partial rollouts that are resumed from messages, and prefills: the model goes on after a prefix that it never
# sampled, and what is put together for training has a token that the second prompt did not have.
# Here: the rendering of a message that goes on ends with its text, white space kept, and a sampled turn goes on at its
# own ids.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-deps trl==1.16.0
"$tmp/venv/bin/python" - <<'PY'
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
LOSE = (
    "llama3 llama3_1 gemma gemma3 gemma4 glm4moe qwen3_5_think qwen3_5_nothink qwen3_6 qwen3_8 nemotron_3_nano "
    "nemotron_3_super cohere"
).split()
KEEP = "qwen2_5 qwen3 phi3 deepseekv3 gptoss cohere2".split()


def prompt(name: str, reply: str) -> str:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": reply}]
    (found,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=(FOLDER / f"{name}.jinja").read_text(),
        continue_final_message=True,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    return found


print(f"transformers {version('transformers')}, trl {version('trl')}")
for name in LOSE + KEEP:
    found = prompt(name, "Step 1:\n")
    keeps = found.endswith("Step 1:\n")
    print(f"{name:16} {'keeps' if keeps else 'loses'}  {found[-40:]!r}")
    assert keeps == (name in KEEP), name
    assert keeps or found.endswith("Step 1:"), name
empty = prompt("llama3", "")
print(f"llama3, empty    {empty[-40:]!r}")
assert empty.endswith("<|end_header_id|>")
PY
