"""Texts are encoded as `tokenizers` does it, whoever does it."""

from __future__ import annotations

import ctypes
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from middleware_hub.spans.chain import pack_ids, unpack_ids
from middleware_hub.tokenizer.encoder import CHECK_EVERY, Encode, FastEncoder, LateEncoder, encoder
from middleware_hub.tokenizer.settings import is_verbatim
from middleware_hub.tokenizer.tokenizer import Tokenizer as Whole
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.limits import PROMPT_LIMITS
from router.errors import BadRequestError
from tests.support.usual import usual
from tests.support.vocabularies import Name, vocabulary
from worker.models.ngram import shipped_tokenizer

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTE_LEVEL: tuple[Name, ...] = ("qwen", "tekken")
SENTENCEPIECE: tuple[Name, ...] = ("mistral-v1", "mistral-v1-legacy")


@cache
def backend(name: Name) -> Tokenizer:
    return Tokenizer.from_file(str(vocabulary(name) / "tokenizer.json"))


@cache
def json_of(name: Name) -> dict[str, Any]:
    return dict(json.loads(backend(name).to_str()))


TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [" ", "  ", "\n", "\r\n", "'s", "the", " the", "12", "é", "e\u0301", "한", "\u1112\u1161\u11ab", "👍🏽"]
    )
    | st.sampled_from(["<think>", "<|im_end|>", "<|im", "[INST]", "</s>", "\ufffd", "\u200d"]),
    max_size=20,
).map("".join)


@cache
def made(name: Name, choice: str = "auto") -> Encode:
    return encoder(backend(name), json.loads(backend(name).to_str()), choice)


def expected(name: Name, text: str) -> bytes:
    return pack_ids(backend(name).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", usual([*BYTE_LEVEL, *SENTENCEPIECE], "qwen", "mistral-v1"))
@given(text=TEXTS)
@settings(deadline=None)  # the first example loads a vocabulary
def test_ids_are_those_of_tokenizers(name: Name, text: str) -> None:
    assert made(name)(text) == expected(name, text)


def _split(pattern: str, **how: object) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **how}


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How the tokenizers of published models take texts apart, before BPE.
SPLITS: dict[str, list[dict[str, object]]] = {
    "gpt2": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}],
    "llama3": [_split(rf"{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}")],
    "qwen3.5": [
        _split(rf"{CONTRACTIONS}|{WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}")
    ],
    "gpt-oss": [
        _split(
            rf"{WORD}{UPPER}*{LOWER}+{CONTRACTIONS}?|{WORD}{UPPER}+{LOWER}*{CONTRACTIONS}?"
            rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
        )
    ],
    "deepseek": [
        _split(r"\p{N}{1,3}"),
        _split("[一-龥぀-ゟ゠-ヿ]+"),
        _split(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
        ),
    ],
    "digits": [{"type": "Digits", "individual_digits": True}],
}


def taking_apart(parts: list[dict[str, object]], folder: Path) -> Tokenizer:
    """A tokenizer that takes texts apart in this way, and for the rest is the one in a folder."""
    settings = json.loads((folder / "tokenizer.json").read_text())
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = parts if parts[-1]["type"] == "ByteLevel" else [*parts, last]
    return Tokenizer.from_str(json.dumps({**settings, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}))


@cache
def small_one(name: str) -> tuple[Tokenizer, Encode]:
    backend = taking_apart(SPLITS[name], shipped_tokenizer())
    return backend, encoder(backend, json.loads(backend.to_str()), "fastokens")


@pytest.mark.parametrize("name", SPLITS)
@given(text=TEXTS)
@settings(deadline=None)
def test_texts_are_taken_apart_as_published_models_do_it(name: str, text: str) -> None:
    backend, encode = small_one(name)
    assert encode(text) == pack_ids(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.slow  # a vocabulary with all entries
def test_what_is_encoded_differently_is_noticed_at_the_start() -> None:
    """The two libraries do not mean the same by the words of such a pattern."""
    backend = taking_apart([_split(r"\w+", invert=True)], vocabulary("qwen-whole"))
    assert not isinstance(encoder(backend, json.loads(backend.to_str()), "auto"), FastEncoder)
    with pytest.raises(BadRequestError, match=r"it encodes .* differently"):
        encoder(backend, json.loads(backend.to_str()), "fastokens")


@pytest.mark.parametrize("name", usual(BYTE_LEVEL, "qwen"))
def test_byte_level_bpe_is_encoded_by_fastokens(name: Name) -> None:
    assert isinstance(made(name), FastEncoder)
    assert isinstance(made(name, "fastokens"), FastEncoder)
    assert not isinstance(made(name, "huggingface"), FastEncoder)


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_what_it_was_not_made_for_is_not(name: Name) -> None:
    assert not isinstance(made(name), FastEncoder)
    with pytest.raises(BadRequestError, match="--tokenizer-backend fastokens: this is no byte-level BPE"):
        made(name, "fastokens")


def test_nor_a_tokenizer_with_whims() -> None:
    whimsical = Tokenizer.from_file(str(vocabulary("qwen") / "tokenizer.json"))
    whimsical.add_tokens([AddedToken("<greedy>", lstrip=True)])
    with pytest.raises(BadRequestError, match="an added token is one of lstrip"):
        encoder(whimsical, json.loads(whimsical.to_str()), "fastokens")


def test_two_that_differ_are_not_used_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    """The text that showed it is encoded rightly, and all later ones."""
    checked = FastEncoder(lambda _text: b"1", lambda _text: b"2")
    assert {checked("x") for _ in range(CHECK_EVERY - 1)} == {b"2"}
    with caplog.at_level(logging.ERROR):
        assert checked("x") == b"1"
    assert "does not encode a text" in caplog.text
    assert checked("x") == b"1"


def test_an_error_of_the_fast_one_costs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_text: str) -> bytes:
        raise RuntimeError("a limit was reached")

    checked = FastEncoder(lambda _text: b"1", fails)
    with caplog.at_level(logging.ERROR):
        assert checked("x") == b"1"
    assert "a limit was reached" in caplog.text


class Late:
    """A LateEncoder whose work is done when it is told to, and the encoders that it was replaced by."""

    def __init__(self, name: Name, settings: dict[str, Any]) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.used: list[Encode] = []
        self.encode = LateEncoder(backend(name), settings, PROMPT_LIMITS, run=self.waiting.append, use=self.used.append)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop()()


@pytest.mark.parametrize("name", usual([*BYTE_LEVEL, *SENTENCEPIECE], "qwen", "mistral-v1"))
def test_no_text_waits_for_the_faster_encoder(name: Name) -> None:
    """The first one has it made, once; until then all are encoded by tokenizers."""
    late = Late(name, json_of(name))
    assert not late.waiting
    for text in ("first", "second"):
        assert late.encode(text) == expected(name, text)
        assert (len(late.waiting), late.used) == (1, [])
    late.run()
    (used,) = late.used
    assert isinstance(used, FastEncoder) is (name in BYTE_LEVEL)
    assert used("third") == late.encode("third") == expected(name, "third")
    assert not late.waiting


def test_a_faster_encoder_that_cannot_be_made_costs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    late = Late("qwen", {})
    late.encode("first")
    with caplog.at_level(logging.ERROR):
        late.run()
    assert "no faster encoder could be made" in caplog.text
    (used,) = late.used
    assert used("second") == expected("qwen", "second")


MEMORY = """
import ctypes, sys
from middleware_hub.tokenizer.tokenizer import Tokenizer

def resident():
    return int(open("/proc/self/statm").read().split()[1])

tokenizer = Tokenizer.load(sys.argv[1])
tokenizer.encode_start("a"), tokenizer.encode_tail("a")
tokenizer._threads.shutdown(wait=True)
held = resident()
assert ctypes.CDLL(None).malloc_trim(0) in (0, 1)
print(held / resident())
"""


@pytest.mark.slow  # a vocabulary with all entries
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library keeps no freed memory")
def test_the_memory_in_which_the_faster_encoder_was_made_is_given_back() -> None:
    """Else a process keeps 300 MB: twice what it needs."""
    ran = subprocess.run([sys.executable, "-c", MEMORY, vocabulary("qwen-whole")], capture_output=True, check=True)
    assert float(ran.stdout.split()[-1]) < 1.3


@pytest.mark.parametrize("name", usual(BYTE_LEVEL, "qwen"))
@given(text=st.text(st.characters(max_codepoint=127), max_size=80))
@settings(deadline=None)
def test_of_a_verbatim_tokenizer_ids_spell_an_ascii_text(name: Name, text: str) -> None:
    assert is_verbatim(json_of(name))
    assert spelling(name).spell(unpack_ids(made(name)(text))) == text


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_one_with_dummy_spaces_is_not_verbatim(name: Name) -> None:
    assert not is_verbatim(json_of(name))


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
        {"model": {"type": "BPE", "vocab": dict.fromkeys(ALPHABET, 0), "end_of_word_suffix": "</w>"}},
        {"added_tokens": [{"id": 9, "content": "<x>", "lstrip": True, "rstrip": False}]},
    ],
    ids=[
        "a normalizer",
        "a space in front",
        "what is split off is lost",
        "bytes without a token",
        "a suffix",
        "lstrip",
    ],
)
def test_what_changes_characters_is_not_verbatim(changed: dict[str, object]) -> None:
    assert not is_verbatim({**json_of("qwen"), **changed})


@cache
def spelling(name: Name) -> Vocabulary:
    return Whole.load(str(vocabulary(name))).vocabulary


@pytest.mark.parametrize("name", usual([*BYTE_LEVEL, *SENTENCEPIECE], "qwen", "mistral-v1"))
def test_a_tokenizer_changes_to_the_faster_encoder_and_to_no_other_ids(name: Name) -> None:
    made = Whole(backend(name))
    texts = ["Hello world", " leading", "naïve 你好 🙂\n", "def f(x):\n    return x\n"]
    before = [(made.encode_start(text), made.encode_tail(text)) for text in texts]
    made._threads.shutdown(wait=True)
    assert isinstance(made._encode_start, FastEncoder) is (name in BYTE_LEVEL)
    assert isinstance(made._encode_tail, FastEncoder) is (name in BYTE_LEVEL)
    assert [(made.encode_start(text), made.encode_tail(text)) for text in texts] == before
