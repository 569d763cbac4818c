"""Texts are encoded as `tokenizers` does it, whoever does it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from middleware_hub.encoder import CHECK_EVERY, FastEncoder, encoder, is_verbatim
from middleware_hub.vocabulary import Vocabulary
from router.errors import BadRequestError
from tests.support.vocabularies import Name, vocabulary

BYTE_LEVEL: tuple[Name, ...] = ("qwen", "tekken")
SENTENCEPIECE: tuple[Name, ...] = ("mistral-v1", "mistral-v1-legacy")
TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(
        [" ", "  ", "\n", "\r\n", "'s", "the", " the", "12", "é", "e\u0301", "한", "\u1112\u1161\u11ab", "👍🏽"]
    )
    | st.sampled_from(["<think>", "<|im_end|>", "<|im", "[INST]", "</s>", "\ufffd", "\u200d"]),
    max_size=20,
).map("".join)


@cache
def backend(name: Name) -> Tokenizer:
    return Tokenizer.from_file(str(vocabulary(name) / "tokenizer.json"))


@cache
def made(name: Name, choice: str = "auto") -> Callable[[str], list[int]]:
    return encoder(backend(name), json.loads(backend(name).to_str()), choice)


def expected(name: Name, text: str) -> list[int]:
    return list(backend(name).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCEPIECE])
@given(text=TEXTS)
@settings(deadline=None)  # the first example loads a vocabulary
def test_ids_are_those_of_tokenizers(name: Name, text: str) -> None:
    assert made(name)(text) == expected(name, text)


@pytest.mark.parametrize("name", BYTE_LEVEL)
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
    checked = FastEncoder(lambda _text: [1], lambda _text: [2])
    assert {tuple(checked("x")) for _ in range(CHECK_EVERY - 1)} == {(2,)}
    with caplog.at_level(logging.ERROR):
        assert checked("x") == [1]
    assert "does not encode a text" in caplog.text
    assert checked("x") == [1]


def test_an_error_of_the_fast_one_costs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_text: str) -> list[int]:
        raise RuntimeError("a limit was reached")

    checked = FastEncoder(lambda _text: [1], fails)
    with caplog.at_level(logging.ERROR):
        assert checked("x") == [1]
    assert "a limit was reached" in caplog.text


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(text=st.text(st.characters(max_codepoint=127), max_size=80))
@settings(deadline=None)
def test_of_a_verbatim_tokenizer_ids_spell_an_ascii_text(name: Name, text: str) -> None:
    assert is_verbatim(json_of(name))
    assert spelling(name).spell(made(name)(text)) == text


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
        {"added_tokens": [{"id": 9, "content": "<x>", "lstrip": True, "rstrip": False}]},
    ],
    ids=["a normalizer", "a space in front", "what is split off is lost", "bytes without a token", "lstrip"],
)
def test_what_changes_characters_is_not_verbatim(changed: dict[str, object]) -> None:
    assert not is_verbatim({**json_of("qwen"), **changed})


@cache
def json_of(name: Name) -> dict[str, object]:
    return dict(json.loads(backend(name).to_str()))


@cache
def spelling(name: Name) -> Vocabulary:
    from middleware_hub.tokenizer import Tokenizer as Whole

    return Whole.load(str(vocabulary(name))).vocabulary
