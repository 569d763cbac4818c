"""Two vocabularies, reduced to what a match needs: where each token of a text ends."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import mistral_common
import tokenizers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers.pre_tokenizers import ByteLevel

ADDED = re.compile(r"(<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>|</?think>|</?tool_call>)")
"""Qwen3's added tokens that occur here: one token each, whatever the vocabulary."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A run of tokens as text, and how many characters have begun by the end of each token."""

    text: str
    ends: list[int]

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> "Pieces":
        """From the bytes of each token; a character that spans tokens counts for the first one on."""
        ends, whole, begun = [], b"", 0
        for piece in pieces:
            begun += sum(byte & 0xC0 != 0x80 for byte in piece)
            ends.append(begun)
            whole += piece
        return cls(whole.decode(errors="replace"), ends)


class Worker:
    """The vocabulary of the worker's model: a reply's tokens are the sampled ids."""

    name = "worker"

    def __init__(self, model: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        letters = _byte_letters()
        added = {i: t.content for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        self._bytes = {
            i: added[i].encode() if i in added else bytes(letters[c] for c in piece)
            for piece, i in self._tokenizer.get_vocab().items()
        }

    def id(self, token: str) -> int:
        """The id of a token's literal."""
        found = self._tokenizer.token_to_id(token)
        assert found is not None
        return found

    def sampled(self, ids: list[int]) -> Pieces:
        """A reply's ids."""
        return Pieces.of(self._bytes[i] for i in ids)

    def context(self, text: str) -> Pieces:
        """Text that is encoded on the router's side."""
        return self.sampled(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Tekken:
    """Mistral's tekken of 2024-09-11 (131,072 entries): what a model would have sampled, if it had spelled canonically."""

    name = "tekken"

    def __init__(self, worker: Worker) -> None:
        data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
        self._tokenizer, self._worker = Tekkenizer.from_file(str(data)), worker

    def sampled(self, ids: list[int]) -> Pieces:
        """Encode the text of a reply's ids again."""
        return self.context(self._worker.sampled(ids).text)

    def context(self, text: str) -> Pieces:
        """Text, its added tokens one token each."""
        pieces: list[bytes] = []
        for part in ADDED.split(text):
            if ADDED.fullmatch(part):
                pieces.append(part.encode())
            else:
                ids = self._tokenizer.encode(part, bos=False, eos=False)
                pieces += [self._tokenizer.id_to_byte_piece(i) for i in ids]
        return Pieces.of(pieces)


Vocabulary = Worker | Tekken


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's alphabet, back to bytes: printable bytes stand for themselves, the rest is shifted up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(b): b for b in printable}
    letters |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)}
    assert set(letters) == set(ByteLevel.alphabet())
    return letters
