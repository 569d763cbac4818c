#!/usr/bin/env bash
# Guess: with TRL's training templates, `return_assistant_tokens_mask` marks what a model samples: from the end of the
# generation prompt to the token that ends the turn, and nothing else.
# Instead (trl 1.16.0, transformers 5.24.0): of twelve templates those of Llama 3, GLM 4 MoE and Command R7B do. Of the
# generation prompt Qwen 2.5's marks a newline, those of Qwen 3.5 and 3.8 `<think>` and a newline, gpt-oss' and DeepSeek
# V3's the header of the assistant; behind the end of the turn those of Qwen, Gemma 3 and LFM2 mark a newline, Phi 3's an
# end of text besides. DeepSeek V3's marks the end of a tool's output, too, if a reply follows.
# Hurts: whoever takes this mask for the loss mask of rollouts that were rendered again: the ratio of old and new
# logprobs has tokens that no policy sampled, and the mean over a turn's tokens is over one or three too many.
# Here: the loss mask is that of the tokens as they were sampled; nothing is rendered again.
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
CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": {"a": 1}}}
ASKED = [{"role": "user", "content": "q"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
CALLED.append({"role": "tool", "tool_call_id": "call_1", "name": "run", "content": "2"})
REPLY = {"role": "assistant", "content": "one"}
# By template: what is marked of the generation prompt, and behind the token that ends the turn.
SEEN = {
    "llama3": ("", ""),
    "glm4moe": ("", ""),
    "cohere2": ("", ""),
    "qwen2_5": ("\n", "\n"),
    "qwen3": ("", "\n"),
    "qwen3_5_think": ("<think>\n", "\n"),
    "qwen3_8": ("<think>\n", "\n"),
    "gemma3": ("", "\n"),
    "lfm2": ("", "\n"),
    "phi3": ("", "\n<eos>"),
    "gptoss": ("<|start|>assistant", ""),
}
ENDS = {
    "llama3": "<|eot_id|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
}


def rendered(name: str, messages: list, **options: bool) -> tuple[str, list]:
    (text,), spans = render_jinja_template(
        conversations=[messages],
        chat_template=(FOLDER / f"{name}_training.jinja").read_text(),
        bos_token="<bos>",
        eos_token="<eos>",
        **options,
    )
    return text, spans


def last_reply(name: str, messages: list) -> tuple[str, int]:
    """Return the text, and where the mark of the last reply begins."""
    text, (spans,) = rendered(name, messages, return_assistant_tokens_mask=True)
    first = next(at for at, (begin, end) in enumerate(spans) if "one" in text[begin:end])
    assert spans[-1][1] == len(text) and all(spans[at][1] == spans[at + 1][0] for at in range(first, len(spans) - 1))
    return text, spans[first][0]


print(f"trl {version('trl')}, transformers {version('transformers')}")
for name, (before, after) in SEEN.items():
    prompt, _ = rendered(name, ASKED, add_generation_prompt=True)
    text, begin = last_reply(name, [*ASKED, REPLY])
    print(f"{name:13} marked: {text[begin:]!r}, of the prompt {prompt[begin:]!r}")
    end = ENDS.get(name, "<|im_end|>")
    assert text.startswith(prompt), name
    assert (prompt[begin:], text[text.rindex(end) + len(end) :]) == (before, after), name
for messages, expected in (
    ([*ASKED, REPLY], "<｜Assistant｜>one<｜end▁of▁sentence｜>"),
    ([*CALLED, REPLY], "<｜tool▁outputs▁end｜>one<｜end▁of▁sentence｜>"),
):
    text, begin = last_reply("deepseekv3", messages)
    print(f"deepseekv3    marked: {text[begin:]!r}")
    assert text[begin:] == expected
PY
