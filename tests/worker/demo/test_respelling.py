"""The comparison with the encoded text tells the truth."""

from __future__ import annotations

from tests.worker.demo.support import TOKENIZER, answer, ids
from worker.demo.respelling import Respelling, Speller


def test_a_token_is_wrong_if_the_encoding_has_none_like_it_in_its_place() -> None:
    tokens = ids("The", " se", "arch", " home", "\n", "<", "think", ">")
    mask = [0, 1, 1, 1, 1, 1, 1, 1]
    wrong, shown = Speller(TOKENIZER).wrong(answer(tokens, mask), "The search home\n<think>")
    assert wrong == 5
    assert shown == Respelling([" se", "arch"], [" search"])


def test_what_was_not_sampled_is_not_counted() -> None:
    tokens = ids("The", " se", "arch", " home")
    assert Speller(TOKENIZER).wrong(answer(tokens, [0, 0, 0, 1]), "The search home") == (0, None)


def test_a_special_token_that_nobody_reads_is_not_wrong() -> None:
    tokens = ids("The", " search", "<|im_end|>", " home")
    assert Speller(TOKENIZER).wrong(answer(tokens, [0, 1, 1, 1]), "The search home") == (0, None)


def test_bytes_of_one_character_are_tokens_of_their_own() -> None:
    text = "好, 👍🏽 way"
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert Speller(TOKENIZER).wrong(answer(tokens, [1] * len(tokens)), text) == (0, None)
