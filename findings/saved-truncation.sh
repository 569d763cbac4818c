#!/usr/bin/env bash
# Guess: `truncation` and `max_length` count for the call that has them, and what a tokenizer saves is the same before and after.
# Instead (transformers 5.24.0, tokenizers 0.23.3): the call's limit stays in the tokenizer, so after
# `tokenizer(text, truncation=True, max_length=8)` it is saved with it. In Python transformers reads that file and cuts nothing.
# The tokenizers library, in Python and in Rust under many servers, cuts each text to 8 tokens, and fills shorter ones up to 8
# if the call had `padding="max_length"`. A call without a limit in between takes it out again. No warning.
# Hurts: whoever saves a tokenizer beside a checkpoint after training rows were cut: what measures or serves with `tokenizer.json`
# reads beginnings of prompts, or padding as a part of them, and the trainer, which reads the same file, sees nothing of it.
# Here: the router takes truncation and padding out of each tokenizer that it loads.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile transformers==5.24.0 tokenizers==0.23.3
TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - "$tmp/saved" <<'PY'
import sys
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

FOLDER = sys.argv[1]
LONG, SHORT = "a b c d e f g h i j k l", "a b"
WORDS = {word: n for n, word in enumerate(["<pad>", *LONG.split()])}
CALLS = {
    "no call": lambda tokenizer: None,
    "truncation": lambda tokenizer: tokenizer(LONG, truncation=True, max_length=8),
    "and padding": lambda tokenizer: tokenizer(SHORT, truncation=True, max_length=8, padding="max_length"),
    "then a call without": lambda tokenizer: (tokenizer(LONG, truncation=True, max_length=8), tokenizer(LONG)),
}
SEEN = {  # tokens of the long and the short text: transformers, tokenizers
    "no call": ((12, 2), (12, 2)),
    "truncation": ((12, 2), (8, 2)),
    "and padding": ((12, 2), (8, 8)),
    "then a call without": ((12, 2), (12, 2)),
}
print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
found = {}
for name, call in CALLS.items():
    backend = Tokenizer(models.WordLevel(WORDS))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    call(tokenizer)
    tokenizer.save_pretrained(FOLDER)
    read, raw = AutoTokenizer.from_pretrained(FOLDER), Tokenizer.from_file(f"{FOLDER}/tokenizer.json")
    found[name] = (
        tuple(len(read(text)["input_ids"]) for text in (LONG, SHORT)),
        tuple(len(raw.encode(text).ids) for text in (LONG, SHORT)),
    )
    print(f"{name:20} transformers {found[name][0]}, tokenizers {found[name][1]}")
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
