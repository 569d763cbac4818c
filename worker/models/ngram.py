"""A language model of forty kilobytes, counted while it is loaded: its replies make some sense, with varied tokenizations.

The router exists for replies whose ids differ from the encoding of their text. A model that was counted from encoded text never
samples such a reply. So the corpus is tokenized many times, and each time some of its tokens are split at random, into two with
the same text:

    encoded      [The][ keeper][ of][ the][ old][ lighthouse]...
    in a passage [The][ ke][eper][ of][ the][ old][ light][house]...

The n-grams of all passages are counted, and so the model splits words by itself, one token at a time and with logprobs of its
own. The text is the corpus's in every passage.

The distribution after a context interpolates those after its last three tokens, its last two, its last one and none. The share
of the shorter context depends on how many different tokens followed the longer one, and on how often the longer one was seen
(Witten and Bell, 1991).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

DATA = Path(__file__).with_name("data")

PASSAGES = 16
WHOLE = 3
"""Tokens that stay whole after a split one: as many as the model sees, so that it learns to split evenly."""
SPLIT_SHARE = 0.115
"""The share of the tokens after these that are split. With it, encoding the text loses 15 of 100 sampled ids."""
BACKOFF = (0.01, 0.1, 1.0)
"""Factors to Witten and Bell's share of the shorter context, for contexts of one, two and three tokens. They have 1."""
BACKOFF_IN_CHARACTER = 1e-6
"""The same inside a character, where a shorter context would go on with another character and break the text."""
FLOOR = 1e-4
"""The probability that all tokens share, because a token may follow that was never counted."""

_EOS = "<|im_end|>"
_PROMPT = re.compile(r"(<\|im_start\|>(?:system|user|tool)\n.*?<\|im_end\|>)", re.DOTALL)

Spellings = Sequence[Sequence[Sequence[int]]]  # by id, the ways to split it


def shipped_tokenizer() -> Path:
    """Return the folder of the tokenizer that this package ships: 4,096 entries, ChatML."""
    return DATA / "tokenizer"


def shipped_image_tokenizer() -> Path:
    """Return the folder of the same tokenizer for a model that takes images: three more entries, behind all others."""
    return DATA / "tokenizer-images"


def shipped_corpus() -> str:
    """Return the conversations that the shipped model is counted from, with their special tokens spelled out."""
    return (DATA / "corpus.txt").read_text(encoding="utf-8")


def spellings(tokenizer: Tokenizer) -> Spellings:
    """Return all ways to split each token: an ordinary one into any two that spell it, `<think>` into `<`, `think`, `>`.

    Single bytes and special tokens cannot be split.
    """
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    found: list[list[list[int]]] = [[] for _ in range(tokenizer.get_vocab_size())]
    for token, number in vocab.items():
        if number not in added:
            halves = ((vocab.get(token[:at]), vocab.get(token[at:])) for at in range(1, len(token)))
            found[number] = [[left, right] for left, right in halves if left is not None and right is not None]
    for number, entry in added.items():
        if not entry.special:
            pieces = re.findall(r"\w+|\W+", entry.content)
            found[number] = [[id_ for piece in pieces for id_ in tokenizer.encode(piece, add_special_tokens=False).ids]]
    return found


def respell(ids: Sequence[int], ways: Spellings, rng: random.Random) -> list[int]:
    """Return `ids` with some of them split. They decode to the same text."""
    spelled: list[int] = []
    whole, due = 0, False
    for number in ids:
        # Some tokens, such as digits, cannot be split. If one of them is due, the next one is split instead.
        due = due or (whole == 0 and rng.random() < SPLIT_SHARE)
        if due and ways[number]:
            # rng.choice may change from one version of Python to another.
            spelled += ways[number][int(rng.random() * len(ways[number]))]
            whole, due = WHOLE, False
        else:
            spelled.append(number)
            whole = max(0, whole - 1)
    return spelled


def passages(tokenizer: Tokenizer, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Spell the shipped corpus `PASSAGES` times, each time in another way.

    Returns:
        ids: [length].
        counted: [length], whether the model may sample the token: any but a special one, and the EOS where a reply ends. (With
            the EOS of prompts it would answer a prompt whose end is not marked with nothing but an EOS.)
    """
    eos = tokenizer.get_vocab()[_EOS]
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    encoded: list[int] = []
    ends: list[bool] = []  # of each EOS, whether a reply ends there
    for place, part in enumerate(_PROMPT.split(shipped_corpus())):  # every second one is a prompt
        ids = tokenizer.encode(part, add_special_tokens=False).ids
        encoded += ids
        ends += [place % 2 == 0] * ids.count(eos)
    ways, rng = spellings(tokenizer), random.Random(seed)
    spelled = np.array([number for _ in range(PASSAGES) for number in respell(encoded, ways, rng)])
    counted = ~np.isin(spelled, special)
    counted[spelled == eos] = ends * PASSAGES
    return spelled, counted


class NGramModel:
    """Distributions of the next token, from counts.

    Args:
        ids: the tokens to count, [length].
        counted: whether the model may sample the token, [length]; the others are context only.
        size: the vocabulary's.
        broken: ids that are not whole characters by themselves.
    """

    def __init__(
        self, ids: NDArray[np.int64], counted: NDArray[np.bool_], *, size: int, broken: Sequence[int] = ()
    ) -> None:
        self.size = size
        inside = np.array(broken, dtype=np.int64)
        seen = np.bincount(ids[counted], minlength=size)
        seen[inside] = 0
        self._alone: NDArray[np.float32] = ((1 - FLOOR) * seen / seen.sum() + FLOOR / size).astype(np.float32)
        self._bits = (size - 1).bit_length()
        self._contexts: list[_Contexts] = []
        contexts = np.zeros_like(ids)
        for length in range(1, len(BACKOFF) + 1):
            contexts[length:] |= ids[:-length] << self._bits * (length - 1)
            # A single broken token does not say where in its character it is, so by itself it is not a context.
            clear = counted[length:] if length > 1 else counted[1:] & ~np.isin(ids[:-1], inside)
            grams = (contexts << self._bits | ids)[length:][clear]
            self._contexts.append(_Contexts(grams, self._bits, BACKOFF[length - 1], inside))

    @classmethod
    @cache
    def shipped(cls) -> NGramModel:
        """Return the model of the shipped corpus and tokenizer, made once per process."""
        tokenizer = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))
        size = tokenizer.get_vocab_size()
        broken = [number for number in range(size) if "\ufffd" in tokenizer.decode([number])]
        return cls(*passages(tokenizer), size=size, broken=broken)

    def next_logprobs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the natural logs of the next token's probabilities after `ids`, [size]. Only the last three count."""
        found: list[tuple[_Contexts, int]] = []
        context = 0
        for length, contexts in enumerate(self._contexts, start=1):
            if length > len(ids) or not 0 <= ids[-length] < self.size:
                break
            context |= ids[-length] << self._bits * (length - 1)
            row = contexts.rows.get(context)
            if row is not None:
                found.append((contexts, row))
        left = 1.0  # the share of the probability that the longer contexts leave
        parts: list[tuple[NDArray[np.intp], NDArray[np.float32]]] = []
        for contexts, row in reversed(found):
            span = slice(contexts.starts[row], contexts.starts[row + 1])
            parts.append((contexts.tokens[span], contexts.shares[span] * np.float32(left)))
            left *= contexts.left[row]
        probabilities: NDArray[np.float32] = self._alone * np.float32(left)
        for tokens, shares in parts:
            probabilities[tokens] += shares  # += works because a token is in a part only once
        np.log(probabilities, out=probabilities)
        return probabilities


class _Contexts:
    """The tokens that followed each context of one length.

    Args:
        grams: [length], each a context with its follower in the lowest `bits`.
        bits: of a token.
        backoff: see `BACKOFF`.
        broken: see `NGramModel`.
    """

    def __init__(self, grams: NDArray[np.int64], bits: int, backoff: float, broken: NDArray[np.int64]) -> None:
        grams, counts = np.unique(grams, return_counts=True)
        last = (1 << bits) - 1
        contexts = grams >> bits
        starts = np.flatnonzero(np.diff(contexts, prepend=-1))
        kinds = np.diff(starts, append=len(grams))
        totals = np.add.reduceat(counts, starts)
        left = np.where(
            np.isin(contexts[starts] & last, broken), BACKOFF_IN_CHARACTER, backoff * kinds / (totals + backoff * kinds)
        )
        self.rows: dict[int, int] = dict(zip(contexts[starts].tolist(), range(len(starts)), strict=True))
        self.starts: list[int] = [*starts.tolist(), len(grams)]
        self.left: list[float] = left.tolist()  # to shorter contexts, [rows]
        self.tokens: NDArray[np.intp] = (grams & last).astype(np.intp)  # row i has starts[i] to starts[i + 1]
        self.shares: NDArray[np.float32] = (counts * np.repeat((1 - left) / totals, kinds)).astype(np.float32)
