#!/usr/bin/env bash
# Guess: a folder with a model's tokenizer has one chat template for whoever loads it, the trainer, a conversion to GGUF and a
# page in a browser; if `chat_template.jinja` and `tokenizer_config.json` both have one, all take the same.
# Instead: transformers 5.24.0 takes the file, gguf 0.19.0, with which llama.cpp's converter reads the template, the one in
# `tokenizer_config.json`, and so does @huggingface/transformers 4.3.2, which has no other: what transformers 5 saves, with the
# file alone, has no template there.
# Hurts: a folder of an older release that got a file for training, as TRL's templates for training are: the policy is trained
# under one template and served under another, without a word.
# Here: transformers loads the tokenizer, so the file counts; whoever exports a trained model removes the other one.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile transformers==5.24.0 gguf==0.19.0 jinja2==3.1.6
cd "$tmp"
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/transformers@4.3.2 >/dev/null
cat >names.mjs <<'JS'
import { AutoTokenizer, env } from "@huggingface/transformers";

env.allowRemoteModels = false;
env.localModelPath = "models/";
const names = process.argv.slice(2);
const loaded = await Promise.all(names.map((name) => AutoTokenizer.from_pretrained(name)));
console.log(JSON.stringify(loaded.map((tokenizer) => tokenizer.chat_template ?? null)));
JS
TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - <<'PY'
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({"<unk>": 0, "<end>": 1}, unk_token="<unk>")), unk_token="<unk>", eos_token="<end>"
)
tokenizer.chat_template = "of the release"
older, newer = Path("models", "both"), Path("models", "saved")
tokenizer.save_pretrained(older, save_jinja_files=False)
(older / "chat_template.jinja").write_text("for training")
tokenizer.save_pretrained(newer)

node = subprocess.run(["node", "names.mjs", older.name, newer.name], capture_output=True, text=True, check=True, timeout=120)
SEEN = {
    older.name: ["for training", "of the release", "of the release"],
    newer.name: ["of the release", "of the release", None],
}
print("transformers", version("transformers"), "gguf", version("gguf"), "@huggingface/transformers 4.3.2")
found = {}
for folder, in_javascript in zip((older, newer), json.loads(node.stdout), strict=True):
    of_gguf = gguf.SpecialVocab(folder, load_merges=False).chat_template
    found[folder.name] = [AutoTokenizer.from_pretrained(folder).chat_template, of_gguf, in_javascript]
    print(f"{folder.name}: transformers {found[folder.name][0]!r}, gguf {of_gguf!r}, transformers.js {in_javascript!r}")
sys.exit(f"changed: {found}" if found != SEEN else 0)
PY
