#!/usr/bin/env bash
# Guess: of a preference pair without a prompt, TRL's `extract_prompt`, which its trainers of DPO and KTO call for such sets,
# takes the words that both replies begin with as the prompt; and two equal replies are refused, or have all of the text.
# Instead (trl 1.16.0): it cuts at the first character that differs, and goes back only over a space. `The answer is 12` and `The
# answer is 15` have the prompt `The answer is 1`, and the replies `2` and `5`; `cats` and `cars` begin with `ca`. A reply that is
# the other one's beginning is its last character alone, and so are both of two equal ones.
# Hurts: pairs that were sampled or judged as whole texts: the loss is on ends of words, from a prompt that ends in the middle of
# one. No tokenizer writes it so: `12` and `cats` are other tokens than `1` and `2`, `ca` and `ts`. With messages, or with a
# prompt column, it does not happen.
# Here: prompts and replies are ids, apart from the first turn on; nothing is cut from a text.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile transformers==5.24.0 datasets==5.2.0
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps trl==1.16.0 accelerate==1.14.0
HF_HOME=$tmp/hf HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version

from trl.data_utils import extract_prompt

SEEN = {
    ("The sky is blue.", "The sky is green."): ("The sky is", " blue.", " green."),
    ("The answer is 12", "The answer is 15"): ("The answer is 1", "2", "5"),
    ("I like cats.", "I like cars."): ("I like ca", "ts.", "rs."),
    ("It is 12.", "It is 12. Sure."): ("It is 12", ".", ". Sure."),
    ("The same.", "The same."): ("The same", ".", "."),
}
print("trl", version("trl"))
found = {}
for chosen, rejected in SEEN:
    parts = extract_prompt({"chosen": chosen, "rejected": rejected})
    found[chosen, rejected] = parts["prompt"], parts["chosen"], parts["rejected"]
    print(f"{chosen!r:20} {rejected!r:20} prompt {parts['prompt']!r:18} replies {parts['chosen']!r} {parts['rejected']!r}")
sys.exit("changed" if found != SEEN else 0)
PY
