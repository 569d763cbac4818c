"""The whole vocabularies are what they say: each encodes and decodes like the library it was taken from."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support import vocabularies
from tests.support.usual import usual
from tests.support.vocabularies import Name, load, vocabulary

WORDS = [
    "The quick brown fox jumps over the lazy dog.",
    "Don't panic: it's 3.14159, isn't it?  Two  spaces,   three.",
    "def f(x):\n    return [y ** 2 for y in x]  # squares\n\n\n\tpass\r\n",
    "你好，世界。今天天气很好。",
    "こんにちは世界、ｶﾀｶﾅ",
    "Привет, мир! Ёлка — “кавычки” …",
    "émigré café naïve Zürich Ærøskøbing",
    "😀😃🚀🔥 👩‍👩‍👧‍👦 🇩🇪 emoji",
    "مرحبا بالعالم",
    "हिन्दी में लिखा",
    "\u0000\u0001\u007f odd \u200b controls \ufeff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ∑∫√ ½ ﬁ",
    " leading space",
    "trailing space ",
    "\n",
    " ",
    "a",
    "x" * 300,
    "supercalifragilisticexpialidocious" * 3,
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9"}',
    "https://example.org/path?q=1&r=%20#frag",
    "0123456789" * 5,
]
TEXTS = [*WORDS, " ".join(WORDS), "\n".join(Path(__file__).read_text().splitlines()[:60])]
NFC_TEXTS = [unicodedata.normalize("NFC", text) for text in TEXTS]


WHOLE: tuple[Name, ...] = ("qwen-whole", "mistral-v1", "tekken-whole")


@pytest.mark.parametrize("name", usual(WHOLE, "mistral-v1"))
def test_the_folder_loads_with_transformers_and_agrees_with_the_bare_tokenizer(name: Name) -> None:
    """What a router loads (transformers) and what tests load (tokenizers) are one and the same."""
    wrapper = AutoTokenizer.from_pretrained(str(vocabulary(name)))
    assert len(wrapper) >= 30_000
    for text in TEXTS:
        ids = wrapper(text)["input_ids"]
        assert ids == load(name).encode(text).ids
        for skip in (False, True):
            assert wrapper.decode(ids, skip_special_tokens=skip) == load(name).decode(ids, skip_special_tokens=skip)


@pytest.mark.slow
def test_added_tokens_of_models_that_see_have_their_ids() -> None:
    """Those that Qwen2.5-VL and Qwen3-VL publish."""
    published = {"<|endoftext|>": 151643, "<|vision_start|>": 151652, "<|image_pad|>": 151655, "</think>": 151668}
    assert {name: load("qwen-vl-whole").token_to_id(name) for name in published} == published


@pytest.mark.slow
def test_qwen_encodes_like_tiktoken() -> None:
    """Merges made out of ranks give what ranks give."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken comes with mistral-common")
    tokenizer = load("qwen-whole")
    alphabet = {character: byte for byte, character in enumerate(vocabularies._byte_alphabet())}
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    ranks = {bytes(alphabet[c] for c in token): number for token, number in vocab.items()}
    reference = tiktoken.Encoding("qwen", pat_str=vocabularies.QWEN_SPLIT, mergeable_ranks=ranks, special_tokens={})
    for text in NFC_TEXTS:
        assert tokenizer.encode(text).ids == reference.encode(text)
        assert tokenizer.decode(reference.encode(text)) == text


@pytest.mark.slow
def test_qwen_has_its_special_and_its_plain_added_tokens() -> None:
    """`<|im_end|>` vanishes from a decoded text, `<think>` does not, and NFC composes."""
    tokenizer = load("qwen-whole")
    ids = tokenizer.encode("<|im_start|>a<think>b</think><|im_end|>").ids
    assert ids[0] == 151644
    assert ids[-1] == 151645
    assert tokenizer.decode(ids) == "a<think>b</think>"
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v1-legacy"])
def test_mistral_v1_encodes_like_sentencepiece(name: Name) -> None:
    """BOS, the dummy prefix, byte fallback: all as in the model file."""
    sentencepiece = pytest.importorskip("sentencepiece")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(vocabularies.sentencepiece_path()))
    tokenizer = load(name)
    for text in TEXTS:
        # SentencePiece has no spelling for NUL, and drops it. Metaspace adds no dummy prefix to a text that begins with
        # a space, SentencePiece does: "Hello" and " Hello" are the same ids in the one and not in the other.
        text = text.replace("\u0000", "")
        if name == "mistral-v1":
            text = text.lstrip(" ") or "_"
        ids = tokenizer.encode(text).ids
        assert ids == [1, *reference.encode(text)], text
        assert tokenizer.decode(ids) == reference.decode(ids[1:]), text


@pytest.mark.slow
def test_tekken_encodes_like_mistral_common() -> None:
    """The thousand special ids come first, BOS is added, and nothing is normalized."""
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    reference = tekken.Tekkenizer.from_file(str(vocabularies.tekken_path()))
    tokenizer = load("tekken-whole")
    assert tokenizer.get_vocab_size() == reference.n_words
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == reference.encode(text, bos=True, eos=False)
        assert tokenizer.decode(ids) == text
    for token in ("<s>", "</s>", "[INST]", "[/INST]"):
        assert tokenizer.token_to_id(token) == reference.get_special_token(token)


@pytest.mark.parametrize(("cut", "whole"), [("qwen", "qwen-whole"), ("tekken", "tekken-whole")])
def test_a_cut_vocabulary_has_the_first_entries_and_all_added_tokens(cut: Name, whole: Name) -> None:
    """It encodes in its own way, loses no text, and knows the same special tokens."""
    few, all_of_it = load(cut), load(whole)
    assert few.get_vocab_size() < 35_000
    named = [
        {token.content: token.special for token in one.get_added_tokens_decoder().values()} for one in (few, all_of_it)
    ]
    assert named[0] == named[1]
    for token, number in few.get_vocab(with_added_tokens=False).items():
        assert all_of_it.token_to_id(token) == number
    for text in NFC_TEXTS:
        assert few.decode(few.encode(text).ids) == text
    assert few.encode("in the").ids == all_of_it.encode("in the").ids
    for token in named[0]:
        assert few.encode(token, add_special_tokens=False).ids == [few.token_to_id(token)]
