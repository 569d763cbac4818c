"""The real vocabularies as the code under test loads them, what to throw at them, and a recount that shares no code with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from transformers import AutoTokenizer

from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.config import SpecialTokens
from tests.support.vocabularies import Name, _byte_alphabet, load, vocabulary

ALL: tuple[Name, ...] = ("qwen", "mistral-v1", "tekken", "mistral-v1-legacy")
BYTE_LEVEL: tuple[Name, ...] = ("qwen", "tekken")

CHUNKS = (
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u2028", "\ufeff", "\x00", "\x7f"),
    *(
        "a",
        "b",
        "x",
        "Hello",
        " world",
        "the",
        " the",
        "'s",
        "don't",
        "0",
        "42",
        "3.14",
        "=",
        "==",
        " =",
        "##",
        ".",
        "...",
        ",",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "\u0338",
        "A\u030a",
        "Å",
        "\u1100\u1161",
        "각",
        "ﬁ",
        "你",
        "好",
        "你好世界",
        "こんにちは",
        "ё",
        "हि",
        "م",
    ),
    *("😀", "🚀", "👩‍👩‍👧‍👦", "🇩🇪", "\u200d", "\ufe0f", "𝔘", "\ufffd", "▁", "Ġ", "Ċ", "<0x0A>", "<0x41>"),
    *("<", "</", "<|", "|>", "<s", "s>", "<|im", "_end|>", "[", "[INST", "INST]", "/", "]", "<thin", "<unk"),
)
"""What tokenizers stumble over: white space, what combines, characters of several tokens, and halves of added tokens."""


@cache
def tokenizer(name: Name, mode: SpecialTokens = "auto") -> Tokenizer:
    """Once a process: loading one takes seconds."""
    return Tokenizer.load(str(vocabulary(name)), add_special_tokens=mode)


@cache
def reference(name: Name) -> Any:
    """What a worker loads."""
    return AutoTokenizer.from_pretrained(str(vocabulary(name)))


@cache
def added(name: Name) -> dict[int, str]:
    """The added tokens by their id, at most a few dozen of them."""
    known = load(name).get_added_tokens_decoder()
    return {number: known[number].content for number in sorted(known)[:24] + sorted(known)[-2:]}


def texts(name: Name, *, max_chunks: int = 8) -> st.SearchStrategy[str]:
    """Texts in which added tokens, parts of them and everything in `CHUNKS` stand next to each other."""
    literals = sorted(set(added(name).values()))
    parts = [literal[:at] for literal in literals[:8] for at in range(1, len(literal))]
    chunk = st.sampled_from(CHUNKS) | st.sampled_from(literals) | st.sampled_from(parts) | st.text(max_size=3)
    return st.lists(chunk, max_size=max_chunks).map("".join).filter(_encodable)


def _encodable(text: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in text)


@cache
def interesting_ids(name: Name) -> tuple[int, ...]:
    """Ids whose bytes are no character of their own, and added tokens."""
    bare = load(name)
    size = bare.get_vocab_size()
    scanned = [*range(1400), *range(1400, size, 23)]  # single bytes have low ids in all of them
    broken = [i for i in scanned if not _whole(_bytes_of(name, i))]
    return (*broken[:120], *broken[120 :: max(1, len(broken) // 80)], *added(name))


def sampled_ids(name: Name, *, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    """What a model with a fever would sample."""
    size = load(name).get_vocab_size()
    spelled = st.sampled_from(CHUNKS).map(lambda chunk: tuple(tokenizer(name).encode_tail(chunk)))
    one = st.integers(0, size - 1) | st.sampled_from(interesting_ids(name))
    return st.lists(one.map(lambda i: (i,)) | spelled, max_size=max_size).map(
        lambda parts: [i for p in parts for i in p]
    )


def recount(name: Name, ids: Sequence[int], *, skip_special: bool = False) -> tuple[str, list[int]]:
    """The text of ids and the characters begun by each, byte by byte."""
    special = {i for i, token in load(name).get_added_tokens_decoder().items() if token.special}
    kept = [(k, i) for k, i in enumerate(ids) if not (skip_special and i in special)]
    text, owners = "", [0] * len(ids)
    group: list[tuple[int, int]] = []

    def flush() -> None:
        nonlocal text
        data = [(k, byte) for k, i in group for byte in _bytes_of(name, i)]
        raw = bytes(byte for _, byte in data)
        position = 0
        alone = name.startswith("mistral") and not _whole(raw)
        while position < len(raw):
            size = 1 if alone else _character(raw[position : position + 4])
            text += "\ufffd" if alone else raw[position : position + size].decode("utf-8", "replace")
            owners[data[position][0]] += 1
            position += size
        group.clear()

    for k, i in kept:
        if name.startswith("mistral") and group and _is_byte(name, group[-1][1]) != _is_byte(name, i):
            flush()
        group.append((k, i))
    flush()
    return text, [sum(owners[: k + 1]) for k in range(len(ids))]


def _character(raw: bytes) -> int:
    """How many of these bytes are one character, or one broken part that is replaced by a single `�`."""
    for size in range(1, len(raw) + 1):
        if _whole(raw[:size]):
            return size
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.end
    raise AssertionError(raw)


def _whole(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_byte(name: Name, token_id: int) -> bool:
    token = load(name).id_to_token(token_id)
    return name.startswith("mistral") and len(token) == 6 and token.startswith("<0x")


@cache
def _alphabet() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_byte_alphabet())}


@cache
def _added_all(name: Name) -> dict[int, str]:
    return {number: token.content for number, token in load(name).get_added_tokens_decoder().items()}


def _bytes_of(name: Name, token_id: int) -> bytes:
    literal = _added_all(name).get(token_id)
    if literal is not None:
        return literal.encode()
    token = load(name).id_to_token(token_id)
    assert token is not None
    if not name.startswith("mistral"):
        return bytes(_alphabet()[character] for character in token)
    return bytes([int(token[3:5], 16)]) if _is_byte(name, token_id) else token.replace("▁", " ").encode()
