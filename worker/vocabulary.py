"""A Hugging Face tokenizer folder, loaded without the rest of the project."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer


@dataclass(frozen=True, eq=False)
class EngineVocabulary:
    """A worker's tokenizer, and its ids by kind."""

    tokenizer: Tokenizer
    eos_id: int
    eos_ids: frozenset[int]  # with those of generation_config.json, which SGLang uses too
    size: int
    ordinary: tuple[int, ...]  # ids that are neither special nor added
    special: frozenset[int]
    crumbs: tuple[int, ...]  # ordinary ids of one to three ASCII letters or digits, which an encoder mostly merges
    image_id: int | None  # an image's placeholder, of config.json; None in the vocabulary of a model that sees nothing
    model_type: str | None  # of config.json

    def encode(self, text: str) -> list[int]:
        """Encode a prompt as a worker does, with the special tokens that the tokenizer adds by itself."""
        return list(self.tokenizer.encode(text).ids)

    def encode_bare(self, text: str) -> list[int]:
        """Encode without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenized(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode a text as `/tokenize` does."""
        return self.encode(text) if add_special_tokens else self.encode_bare(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


@lru_cache(maxsize=8)
def load_vocabulary(folder: str | Path) -> EngineVocabulary:
    """Load a tokenizer folder, or a hub id, once per process."""
    wrapper = AutoTokenizer.from_pretrained(str(folder))
    tokenizer: Tokenizer = wrapper.backend_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    more = _config(folder, "generation_config.json").get("eos_token_id", [])
    model = _config(folder, "config.json")
    vocab = {token: number for token, number in tokenizer.get_vocab().items() if number not in added}
    return EngineVocabulary(
        tokenizer=tokenizer,
        eos_id=wrapper.eos_token_id,
        eos_ids=frozenset([wrapper.eos_token_id, *([more] if isinstance(more, int) else more)]),
        size=tokenizer.get_vocab_size(with_added_tokens=True),
        ordinary=tuple(sorted(vocab.values())),
        special=frozenset(number for number, token in added.items() if token.special),
        crumbs=tuple(sorted(number for token, number in vocab.items() if _is_crumb(token))),
        image_id=model.get("image_token_id"),
        model_type=model.get("model_type"),
    )


def _config(folder: str | Path, name: str) -> dict[str, Any]:
    path = Path(folder) / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _is_crumb(token: str) -> bool:
    return len(token) <= 3 and token.isascii() and token.isalnum()
