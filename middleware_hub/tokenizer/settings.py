"""The settings in a tokenizer.json: the tokenizer's parts, and its additions to a start."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from hashlib import blake2b
from typing import Any

import msgspec
from tokenizers import pre_tokenizers

from router.engines.json import decode_any, decode_object

KNOWN_PARTS = frozenset({"Split", "ByteLevel", "Digits", "Sequence", "NFC"})


def read_settings(tokenizer_json: str) -> dict[str, Any]:
    """Return a tokenizer.json as a dict. The merges of its model, which are most of it, stay raw: nothing here reads them."""
    raw = decode_object(tokenizer_json)
    model = decode_object(raw.pop("model"))
    settings: dict[str, Any] = {name: decode_any(value) for name, value in raw.items()}
    settings["model"] = {name: value if name == "merges" else decode_any(value) for name, value in model.items()}
    return settings


def fingerprint(settings: dict[str, Any]) -> str:
    """Return a hash of vocabulary, added tokens and normalizer: ids mean the same text to tokenizers with the same hash.

    For 150,000 entries it takes about half a second.
    """
    hashed = [settings["model"]["vocab"], settings["added_tokens"], settings["normalizer"]]
    return blake2b(msgspec.json.encode(hashed, order="sorted"), digest_size=16).hexdigest()


def parts(settings: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a normalizer, pre-tokenizer or decoder of a tokenizer.json, and everything inside its Sequences."""
    if settings is None:
        return
    yield settings
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        for part in settings.get(key, ()):
            yield from parts(part)


def is_verbatim(settings: dict[str, Any]) -> bool:
    """Return whether the ids of any ASCII text spell that text and nothing else.

    That holds for byte-level BPE with a token for every byte, if no step before it inserts, removes or changes characters.
    (NFC leaves ASCII alone.)
    """
    steps = [part for key in ("normalizer", "pre_tokenizer") for part in parts(settings[key])]
    kinds = {part["type"] for part in steps}
    model = settings["model"]
    return (
        model["type"] == "BPE"
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and "ByteLevel" in kinds
        and kinds <= KNOWN_PARTS
        and not any(part.get("add_prefix_space") or part.get("behavior") == "Removed" for part in steps)
        and not any(token["lstrip"] or token["rstrip"] for token in settings["added_tokens"])
        and set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()
    )


def tail_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a tail's tokenizer, without the additions to a start, even inside nested Sequences."""
    pre_tokenizer = deepcopy(settings["pre_tokenizer"])
    for part in parts(pre_tokenizer):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    normalizer = _without_prepend(deepcopy(settings["normalizer"]))
    return {**settings, "post_processor": None, "pre_tokenizer": pre_tokenizer, "normalizer": normalizer}


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        kept = [_without_prepend(part) for part in normalizer["normalizers"]]
        normalizer["normalizers"] = [part for part in kept if part is not None]
    return normalizer
