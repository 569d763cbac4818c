"""The spelling of each id of a tokenizer.json."""

from __future__ import annotations

import codecs
import re
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from middleware_hub.tokenizer.settings import parts
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.errors import BadRequestError


def read_vocabulary(backend: Backend, settings: dict[str, Any]) -> Vocabulary:
    """Return what every id spells. Raises BadRequestError for a decoder that is not supported."""
    added = backend.get_added_tokens_decoder()
    decoders = {part["type"] for part in parts(settings["decoder"])}
    if "ByteLevel" in decoders:
        alphabet = {ord(stand_in): byte for stand_in, byte in _byte_alphabet().items()}
        byte_tokens: dict[str, int] = {}

        def piece(token: str) -> bytes:
            try:
                return codecs.charmap_encode(token, "strict", alphabet)[0]
            except UnicodeEncodeError:
                return token.encode()
    elif decoders & {"Metaspace", "Replace", "ByteFallback"}:
        byte_tokens = {f"<0x{byte:02X}>": byte for byte in range(256)} if "ByteFallback" in decoders else {}

        def piece(token: str) -> bytes:
            return bytes([byte_tokens[token]]) if token in byte_tokens else token.replace("▁", " ").encode()
    else:
        raise BadRequestError(
            f"--tokenizer-path: a tokenizer that decodes by {sorted(decoders) or 'nothing'} is not supported; "
            "byte-level BPE and SentencePiece styles are"
        )
    listed = settings["model"]["vocab"]  # a unigram model's is a list, with scores
    vocabulary = listed if isinstance(listed, dict) else backend.get_vocab(with_added_tokens=False)
    pieces = {i: piece(token) for token, i in vocabulary.items()}
    # Decoders treat added tokens like others (Gemma has `▁▁` among them), but a special token is spelled by its name.
    pieces |= {i: token.content.encode() if token.special else piece(token.content) for i, token in added.items()}
    return Vocabulary(
        pieces,
        special=[i for i, token in added.items() if token.special],
        boundaries=_boundaries(added, settings),
        added=added,
        byte_ids=[i for token, i in vocabulary.items() if token in byte_tokens and i not in added],
        strips_lead=_strips_lead(backend, pieces),
    )


def _strips_lead(backend: Backend, pieces: dict[int, bytes]) -> bool:
    """Return whether the decoder takes a leading space for SentencePiece's dummy space."""
    spaced = next((i for i, piece in pieces.items() if piece.startswith(b" ") and piece.strip().isalpha()), None)
    return spaced is not None and not backend.decode([spaced]).startswith(" ")


def _byte_alphabet() -> dict[str, int]:
    """Return stand-in -> byte, as in GPT-2's byte-level BPE: printable bytes stand for themselves, the rest follow."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet


def _boundaries(added: dict[int, Any], settings: dict[str, Any]) -> list[int]:
    """Return the added tokens that split a text before any other step, and touch nothing on either side."""
    normalizer, pre_tokenizer = settings["normalizer"], settings["pre_tokenizer"]
    prefixed = any(part["type"] == "Prepend" for part in parts(normalizer)) or any(
        part.get("prepend_scheme") == "always" or part.get("add_prefix_space") is True for part in parts(pre_tokenizer)
    )
    if prefixed:  # every section between added tokens gains a dummy space: a start is not the sum of its sections
        return []
    # Tokens that a longer token could swallow when the text goes on are left out: those inside another token, and those
    # overlapped by another token that is matched first (normalized tokens are matched in what the others left).
    inside_of_others = "\0".join(token.content[:-1] for token in added.values())
    first = [token.content for token in added.values() if not token.normalized]
    beginnings = {content[:size] for content in first for size in range(1, len(content))}
    # A `single_word` token matches only where no word goes on, which an encoder that has only the rest cannot see.
    apart = any(token.single_word for token in added.values())
    return [
        i
        for i, token in added.items()
        if not (token.lstrip or token.rstrip or token.single_word)
        and not (token.normalized and normalizer is not None)
        and token.content not in inside_of_others
        and not (apart and re.search(r"\w\Z", token.content))
        and not (token.normalized and any(token.content[k:] in beginnings for k in range(1, len(token.content))))
    ]
