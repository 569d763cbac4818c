"""Make the tokenizers of the embedded engine's model: `worker/models/data/tokenizer`, and `tokenizer-images` beside it.

Usage: python scripts/make_embedded_data.py [--count-words]

It is trained on two texts of the repository: the corpus that the model is counted from, and `embedded_words.txt`, which lists
how often each word occurs in the docs and the sources. The counts are kept in a file, because a tokenizer that changed with
every line of documentation would produce other ids each time; `--count-words` counts the words again. The same inputs make the
same files, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from worker.engine.prompt_images import LONGEST, SHORTEST

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "worker" / "models" / "data"
CORPUS = DATA / "corpus.txt"
WORDS = Path(__file__).with_name("embedded_words.txt")

SIZE = 4_096
CORPUS_WEIGHT = 4  # the corpus is shorter than the docs, and the model's replies come from it
COMMON = 6  # rarer words are left out

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PATCH, MERGE = 14, 2  # a patch's edge in pixels, and a token's in patches
# Qwen's pattern, in which each digit is a word.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# ChatML. Tools are described and called as in the Hermes and Qwen models.
TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{- content }}
{%- elif content %}{%- for part in content if part.type == 'text' %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\nYou may call these tools:\\n' }}
{%- for tool in tools %}{{- (tool.function if tool.function is defined else tool) | tojson + '\\n' }}{%- endfor %}
{{- 'A call is spelled <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEXT_PARTS = "{%- for part in content if part.type == 'text' %}{{- part.text }}{%- endfor %}"
ALL_PARTS = (
    "{%- for part in content %}{%- if part.type == 'text' %}{{- part.text }}"
    f"{{%- elif part.type in ('image', 'image_url') %}}{{{{- '{''.join(IMAGE)}' }}}}"
    "{%- endif %}{%- endfor %}"
)


def count_words(root: Path = ROOT) -> str:
    """Count the words of the docs and the sources as the tokenizer splits them. Return lines of a count and a JSON string."""
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    for package in ("router", "middleware_hub", "worker"):
        paths += sorted((root / package).rglob("*.py"))
    counted: Counter[str] = Counter()
    split = _splitter()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        counted.update(word for word, _span in split.pre_tokenize_str(text) if word.isascii() and len(word) > 1)
    common = sorted(((word, count) for word, count in counted.items() if count >= COMMON), key=lambda item: item[0])
    return "".join(f"{count} {json.dumps(word)}\n" for word, count in common)


def make(folder: Path, corpus: Path = CORPUS, words: Path = WORDS) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [_splitter(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(SPECIAL) - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = _texts(corpus.read_text(encoding="utf-8"), words.read_text(encoding="utf-8"))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    if tokenizer.get_vocab_size() != SIZE:
        raise ValueError(f"the texts are too short for {SIZE} tokens: there are {tokenizer.get_vocab_size()}")
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32_768,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", config)


def make_image_tokenizer(source: Path, folder: Path) -> None:
    """Write a ChatML tokenizer into `folder` as the tokenizer of a model that takes images.

    The tokens for images come behind all others, so that no id changes; a token that `source` has stays where it is. The two
    configurations have the fields of Qwen's, by which a router recognizes a model, and a name that no real model has.
    """
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in IMAGE])
    start, pad, end = (tokenizer.token_to_id(token) for token in IMAGE)
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    pixels = (PATCH * MERGE) ** 2  # of a token
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    _write(folder / "tokenizer_config.json", {**config, "chat_template": TEMPLATE.replace(TEXT_PARTS, ALL_PARTS)})
    model = {
        "model_type": "tito_demo_vl",
        "architectures": ["TitoDemoVLForConditionalGeneration"],
        "image_token_id": pad,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "vision_config": {"patch_size": PATCH, "spatial_merge_size": MERGE},
    }
    _write(folder / "config.json", model)
    processor = {
        "image_processor_type": "TitoDemoVLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": SHORTEST * pixels,
        "max_pixels": LONGEST * pixels,
    }
    _write(folder / "preprocessor_config.json", processor)


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")


def _texts(corpus: str, words: str) -> Iterator[str]:
    # An added token is never merged from pieces, so the corpus must not contain it. Its word without brackets is trained.
    for token in SPECIAL:
        corpus = corpus.replace(token, "\0")
    for token in ADDED:
        corpus = corpus.replace(token, f"\0{token.strip('</>')}\0")
    for _ in range(CORPUS_WEIGHT):
        yield from corpus.split("\0")
    for line in words.splitlines():
        count, word = line.split(" ", 1)
        yield from [json.loads(word)] * int(count)


def _write(path: Path, value: dict[str, Any]) -> None:
    # Written here, because the library's own format may change.
    path.write_bytes((json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count-words", action="store_true", help="first count the words of the docs and the sources again"
    )
    if parser.parse_args().count_words:
        WORDS.write_text(count_words(), encoding="utf-8")
    make(DATA / "tokenizer")
    make_image_tokenizer(DATA / "tokenizer", DATA / "tokenizer-images")


if __name__ == "__main__":
    main()
