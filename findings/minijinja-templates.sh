#!/usr/bin/env bash
# Guess: a chat template gives the same prompt in transformers (Jinja2), MiniJinja (used by gateways in Rust) and
# @huggingface/jinja, since all three are Jinja and the templates were published for all of them.
# Instead (transformers 5.24.0, minijinja 3.1.0 with its Python methods on, @huggingface/jinja 0.5.11, Qwen templates
# of TRL 1.16.0): on one valid conversation with a call all three prompts differ. MiniJinja's own `tojson` escapes < >
# & ' as \u003c and so on; it prints 1e+22 as 10000000000000000000000.0; the JavaScript engine writes 1.0 as 1, and
# both write 1e-07 as 1e-7. GLM 4 MoE's template does not run in MiniJinja (`ensure_ascii`), nor does one with TRL's
# `generation` tag.
# Hurts: whoever renders in a gateway with an engine as it comes, and trains with a tokenizer in Python: the policy is
# trained on a prompt it never saw, in the code-like tool results and arguments that have such characters.
# Here: the router renders with Jinja2 as transformers sets it up, and sends ids, so no second engine renders.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6 minijinja==3.1.0
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-deps trl==1.16.0
npm install --silent --prefix "$tmp" @huggingface/jinja@0.5.11 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/render.mjs" <<'JS'
import { readFileSync } from 'node:fs';
import { Template } from '@huggingface/jinja';
const { template, variables } = JSON.parse(readFileSync(0, 'utf8'));
process.stdout.write(new Template(template).render(variables));
JS
"$tmp/venv/bin/python" - "$tmp/render.mjs" <<'PY'
import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import minijinja
from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
ARGUMENTS = {"code": "a < 'b'", "big": 1e22, "small": 1e-7, "one": 1.0}
CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": ARGUMENTS}}
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def python(template):
    return render_jinja_template([MESSAGES], chat_template=template)[0][0]


def rust(template):
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, pycompat=True)
    try:
        return environment.render_str(template, messages=MESSAGES)
    except minijinja.TemplateError as error:
        return f"error: {str(error).splitlines()[0]}"


def javascript(template):
    body = json.dumps({"template": template, "variables": {"messages": MESSAGES}})
    return subprocess.run(["node", sys.argv[1]], input=body, capture_output=True, text=True, check=True).stdout


print(*(f"{name} {version(name)}" for name in ("transformers", "minijinja", "trl")), "@huggingface/jinja 0.5.11")
right = True
for name in "qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "qwen3_training":
    template = (FOLDER / f"{name}.jinja").read_text()
    prompts = python(template), rust(template), javascript(template) if "generation %}" not in template else ""
    for engine, prompt in zip(("Jinja2", "MiniJinja", "JavaScript"), prompts):
        print(f"{name:15} {engine:10}", repr(prompt[prompt.find("code") - 1 :][:150] if "code" in prompt else prompt))
    if name in ("glm4moe", "qwen3_training"):
        right &= prompts[1].startswith("error") and not prompts[0].startswith("error")
    else:
        right &= len(set(prompts)) == 3 and not any(prompt.startswith("error") for prompt in prompts)
sys.exit(0 if right else "changed")
PY
