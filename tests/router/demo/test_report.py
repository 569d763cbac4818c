"""The table tells the truth: about what encoding again would have made of a text, and about what is exact."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from router.demo.conversations import Conversation
from router.demo.report import Respelling, Speller, example, table
from router.embedded.models.ngram import shipped_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))


def ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Each piece as the token of exactly that text."""
    found = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
    assert all(len(one) == 1 for one in found), found
    return [one[0] for one in found]


def answer(tokens: list[int], mask: list[int]) -> dict[str, Any]:
    logprobs = [-0.5 if sampled else 0.0 for sampled in mask]
    first = mask.index(1) if 1 in mask else 0
    spans = [{"version": "1", "start": first, "end": first + sum(mask)}]
    found = {"tokens": tokens, "loss_mask": mask, "token_length": len(tokens), "rollout_logp": logprobs}
    return {**found, "weight_versions": spans, "exact": True}


def test_a_token_is_wrong_if_the_encoding_has_none_like_it_in_its_place(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "The", " se", "arch", " home", "\n", "<", "think", ">")
    mask = [0, 1, 1, 1, 1, 1, 1, 1]
    wrong, shown = Speller(tokenizer).wrong(answer(tokens, mask), "The search home\n<think>")
    assert wrong == 5
    assert shown == Respelling([" se", "arch"], [" search"])


def test_what_was_not_sampled_is_not_counted(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "The", " se", "arch", " home")
    assert Speller(tokenizer).wrong(answer(tokens, [0, 0, 0, 1]), "The search home") == (0, None)


def test_a_special_token_that_nobody_reads_is_not_wrong(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "The", " search", "<|im_end|>", " home")
    assert Speller(tokenizer).wrong(answer(tokens, [0, 1, 1, 1]), "The search home") == (0, None)


def test_bytes_of_one_character_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    text = "好, 👍🏽 way"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert Speller(tokenizer).wrong(answer(tokens, [1] * len(tokens)), text) == (0, None)


def talk(tokenizer: Tokenizer, **changed: Any) -> Conversation:
    prompt, reply = ids(tokenizer, "The"), ids(tokenizer, " se", "arch")
    found = Conversation("The search", [" search"], [reply], 1, 0, answer(prompt + reply, [0, 1, 1]))
    found.trajectory.update(changed)
    return found


def test_what_was_sampled_is_exact(tokenizer: Tokenizer) -> None:
    assert talk(tokenizer).exact


@pytest.mark.parametrize(
    "changed",
    [
        {"exact": False},
        {"tokens": [1, 2, 3]},
        {"loss_mask": [0, 1, 0]},
        {"loss_mask": [1, 1, 1]},
        {"rollout_logp": [0.0, -0.5, 0.0]},
        {"weight_versions": [{"version": "1", "start": 1, "end": 2}]},
    ],
    ids=str,
)
def test_what_was_not_is_not(tokenizer: Tokenizer, changed: dict[str, Any]) -> None:
    assert not talk(tokenizer, **changed).exact
    assert "NOT EXACT" in table([talk(tokenizer, **changed)], Speller(tokenizer))


def test_a_reply_that_stopped_at_once_leaves_nothing(tokenizer: Tokenizer) -> None:
    """All of it was the stop string; the next turn went on from the prompt."""
    found = talk(tokenizer)
    found.replies.insert(0, "")
    found.sampled.insert(0, ids(tokenizer, "Observation", ":"))
    assert found.exact
    found.replies[0] = "read"
    assert not found.exact


def test_a_last_reply_that_stopped_at_once_is_there_whole(tokenizer: Tokenizer) -> None:
    """No next turn says how much of it is read, so the text ends where it does, stop string and all."""
    found = talk(tokenizer)
    found.replies[-1] = ""
    assert found.exact
    found.sampled[-1] = ids(tokenizer, " se", "arch", "Observation")
    assert not found.exact


def test_the_table_has_a_line_for_each_and_one_for_all(tokenizer: Tokenizer) -> None:
    lines = table([talk(tokenizer), talk(tokenizer)], Speller(tokenizer)).splitlines()
    assert lines[-1].split("  ")[0] == "all"
    assert "4 (100%)" in lines[-1]
    assert "2 of 2 exact" in lines[-1]
    assert len({len(line) for line in lines}) == 1
    assert example([talk(tokenizer)], Speller(tokenizer)) == "sampled [ se][arch]; its text encodes to [ search]"
