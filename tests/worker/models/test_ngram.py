"""The embedded model says something like sentences, and spells a good part of them as no tokenizer would."""

from __future__ import annotations

import math
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from scripts import make_embedded_data
from tests.support.usual import usual
from worker.models.ngram import (
    PASSAGES,
    NGramModel,
    passages,
    respell,
    shipped_corpus,
    shipped_image_tokenizer,
    shipped_tokenizer,
    spellings,
)
from worker.models.sampler import LanguageModel

ROOT = Path(__file__).parents[3]
PROMPTS = (
    "<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n<|im_start|>assistant\n",
    "Question: How far away is the moon?\n",
    "Wie geht es Ihnen?",
    "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n",
    "zxqj 0xDEADBEEF \u0e01\u0e02",  # nothing that it knows
)


@cache
def backend() -> Tokenizer:
    return Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return list(backend().encode(text).ids)


def decode(ids: Sequence[int]) -> str:
    return str(backend().decode(list(ids), skip_special_tokens=False))


def spelled(number: int) -> str:
    """A token as the vocabulary spells it: one character per byte."""
    return str(backend().id_to_token(number))


EOS = backend().token_to_id("<|im_end|>")


def sample(prompt: str, seed: int, length: int = 200, *, ignore_eos: bool = True) -> list[int]:
    """A reply at temperature 1."""
    rng = random.Random(seed)
    model = NGramModel.shipped()
    ids = encode(prompt)
    start = len(ids)
    while len(ids) < start + length and (ignore_eos or len(ids) == start or ids[-1] != EOS):
        cumulated = np.cumsum(np.exp(model.next_logprobs(ids), dtype=np.float64))
        ids.append(int(np.searchsorted(cumulated, rng.random() * cumulated[-1])))
    return ids[start:]


def spans(ids: Sequence[int]) -> set[tuple[int, int]]:
    """The bytes of each token in the text."""
    found, at = set(), 0
    for number in ids:
        end = at + len(spelled(number))
        found.add((at, end))
        at = end
    return found


def misspelled(ids: Sequence[int]) -> float:
    """The share of ids that encoding the text does not give at the same place."""
    return len(spans(ids) - spans(encode(decode(ids)))) / len(ids)


def test_it_is_a_language_model() -> None:
    model: LanguageModel = NGramModel.shipped()
    logprobs = model.next_logprobs(encode("The keeper"))
    assert logprobs.dtype == np.float32
    assert logprobs.shape == (backend().get_vocab_size(),)
    assert NGramModel.shipped() is model


@cache
def learnt_ids() -> list[int]:
    return encode(shipped_corpus())


@given(
    ids=st.lists(st.integers(0, 4_095), max_size=5)
    | st.integers(0, 10_000).map(lambda at: learnt_ids()[at : at + 3])
    | st.lists(st.integers(-(2**40), 2**40), max_size=5)
)
def test_probabilities_sum_to_one_after_any_ids(ids: list[int]) -> None:
    """After counted ids, after others, and after ids outside the vocabulary. No probability is zero."""
    logprobs = NGramModel.shipped().next_logprobs(ids).astype(np.float64)
    assert np.isfinite(logprobs).all()
    assert math.log(np.exp(logprobs).sum()) == pytest.approx(0, abs=1e-4)


def test_only_the_last_tokens_count_and_nothing_is_remembered() -> None:
    ids = encode("Thought: I should look it up")
    model = NGramModel.shipped()
    first = model.next_logprobs(ids)
    first[:] = 0  # what is given belongs to whoever asked
    np.testing.assert_array_equal(model.next_logprobs(ids), model.next_logprobs(ids[-3:]))


@pytest.mark.parametrize("prompt", usual(PROMPTS, PROMPTS[0]))
def test_more_than_a_twentieth_of_every_reply_is_not_what_encoding_gives(prompt: str) -> None:
    shares = [misspelled(sample(prompt, seed)) for seed in range(20)]
    assert min(shares) > 0.05
    assert 0.1 < statistics.mean(shares) < 0.2


def test_a_think_tag_is_spelled_in_both_ways() -> None:
    whole, pieces = encode("<think>"), [backend().token_to_id(piece) for piece in ("<", "think", ">")]
    replies = [sample(PROMPTS[0], seed, length=3) for seed in range(100)]
    assert whole in [reply[:1] for reply in replies]
    assert pieces in replies


@pytest.mark.parametrize("prompt", usual(PROMPTS, PROMPTS[0]))
def test_replies_end_by_themselves_after_some_sentences(prompt: str) -> None:
    lengths = [len(sample(prompt, seed, 2_000, ignore_eos=False)) for seed in range(60)]
    assert 40 < statistics.median(lengths) < 120
    assert max(lengths) < 1_000
    assert statistics.quantiles(lengths, n=10)[0] > 3


def test_characters_are_split_over_tokens_and_never_broken() -> None:
    """The only exception is a character that the end of the reply cuts off."""
    replies = [sample(prompt, seed, 150) for seed in range(6) for prompt in PROMPTS[2:]]
    assert any("\ufffd" in decode([number]) for reply in replies for number in reply)
    assert not any("\ufffd" in decode(reply).rstrip("\ufffd") for reply in replies)


def test_of_special_tokens_only_eos_is_sampled() -> None:
    others = {backend().token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>")}
    assert not any(others & set(sample(prompt, seed)) for prompt in PROMPTS for seed in range(3))


def test_each_passage_is_the_corpus() -> None:
    ids, counted = passages(backend())
    assert decode(ids.tolist()) == shipped_corpus() * PASSAGES
    assert len(counted) == len(ids)


@given(text=st.text(max_size=200), seed=st.integers(0, 2**32))
def test_a_respelling_has_the_same_text(text: str, seed: int) -> None:
    ids = encode(text)
    assert decode(respell(ids, spellings_(), random.Random(seed))) == decode(ids)


@cache
def spellings_() -> Any:
    return spellings(backend())


def test_each_spelling_spells_its_token() -> None:
    for number, ways in enumerate(spellings_()):
        for way in ways:
            assert "".join(map(spelled, way)) == spelled(number)


def test_the_tokenizer_is_what_the_script_makes(tmp_path: Path) -> None:
    make_embedded_data.make(tmp_path / "plain")
    make_embedded_data.make_image_tokenizer(tmp_path / "plain", tmp_path / "images")
    for made, shipped in ((tmp_path / "plain", shipped_tokenizer()), (tmp_path / "images", shipped_image_tokenizer())):
        assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in shipped.iterdir())
        for path in made.iterdir():
            assert path.read_bytes() == (shipped / path.name).read_bytes(), path.name


def test_the_tokenizer_with_images_changes_no_id() -> None:
    plain, images = (
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        for folder in (shipped_tokenizer(), shipped_image_tokenizer())
    )
    added = images.get_vocab().items() - plain.get_vocab().items()
    assert added == {("<|vision_start|>", 4096), ("<|image_pad|>", 4097), ("<|vision_end|>", 4098)}
    assert images.encode(shipped_corpus()).ids == plain.encode(shipped_corpus()).ids
    assert images.decode([4096, 4097, 4098, 5]) == plain.decode([5]), "they are special"


def test_the_shipped_data_is_small() -> None:
    assert sum(path.stat().st_size for path in shipped_tokenizer().parent.rglob("*") if path.is_file()) < 300_000


def test_the_tokenizer_loads_as_any_folder_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("this asks the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    loaded = AutoTokenizer.from_pretrained(str(shipped_tokenizer()))
    assert len(loaded) == 4_096
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "<|im_start|>user\nWhat's 6 × 7, 你好?<|im_end|>\n<think>"
    assert loaded(text)["input_ids"] == encode(text)
    assert loaded.decode(encode(text)) == text
    assert loaded.decode(encode(text), skip_special_tokens=True) == "user\nWhat's 6 × 7, 你好?\n<think>"


def test_the_chat_template_is_chatml() -> None:
    pytest.importorskip("jinja2", reason="transformers renders chat templates with it, and does not ask for it")
    loaded = AutoTokenizer.from_pretrained(str(shipped_tokenizer()))
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Is it going to rain?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no"},
    ]
    said = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said == (
        "<|im_start|>user\nIs it going to rain?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nno<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    seeing = AutoTokenizer.from_pretrained(str(shipped_image_tokenizer()))
    assert seeing.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == said
    for kind in ("image", "image_url"):
        parts = [{"type": "text", "text": "Is this "}, {"type": kind}, {"type": "text", "text": " a cat?"}]
        shown = seeing.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        picture = "<|vision_start|><|image_pad|><|vision_end|>"
        assert shown == f"<|im_start|>user\nIs this {picture} a cat?<|im_end|>\n"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    rendered = loaded.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert rendered.startswith(
        '<|im_start|>system\nYou may call these tools:\n{"name": "weather", "parameters": {}}\n'
        'A call is spelled <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>.<|im_end|>\n<|im_start|>user\n'
    )


def test_the_model_loads_without_the_network_and_without_torch() -> None:
    program = """
import socket, sys
del socket.socket
from worker.models.ngram import NGramModel
NGramModel.shipped()
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
