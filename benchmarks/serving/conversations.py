"""What the clients of the benchmarks say, and what the engine replies: pieces of this repository's own prose and code.

The vocabulary is Qwen's with all of its 151,643 entries.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from benchmarks.processes import ROOT
from tests.support.vocabularies import Name, load, vocabulary

VOCABULARY: Name = "qwen-whole"
NEW_TOKENS = 400  # of each request: the first prompt, and the text that follows a reply
TURNS = 4  # requests of a conversation
REPLIES = 64  # that the engine gives in turn
ALIKE = 4  # so many replies begin in the same way, for one token in twenty
END = "<|im_end|>"


class _TextReply(msgspec.Struct):
    text: str


text_of = msgspec.json.Decoder(_TextReply).decode


def tokenizer_folder() -> str:
    return str(vocabulary(VOCABULARY))


class Corpus:
    """A long text of ASCII characters, cut between tokens. It spells no special token, which the text of a reply would lack."""

    def __init__(self) -> None:
        tokenizer = load(VOCABULARY)
        paths = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("router/**/*.py"))]
        whole = "\n".join(path.read_text() for path in paths).encode("ascii", "ignore").decode()
        for token in tokenizer.get_added_tokens_decoder().values():
            whole = whole.replace(token.content, "")
        encoding = tokenizer.encode(whole, add_special_tokens=False)
        self._whole = whole
        self._ids: list[int] = encoding.ids
        self._offsets: list[tuple[int, int]] = encoding.offsets
        self._random = random.Random(0)

    def cut(self, tokens: int) -> str:
        """Return a random piece of this many tokens."""
        return self.piece(tokens, self._random.getrandbits(40))

    def piece(self, tokens: int, number: int) -> str:
        """Return a piece of this many tokens, the same for the same number."""
        first = number % (len(self._ids) - tokens)
        return self._whole[self._offsets[first][0] : self._offsets[first + tokens][0]]

    def replies(self, tokens: int, count: int = REPLIES) -> bytes:
        """Return replies of this many tokens, the last an EOS without text, as `instant_engine` reads them."""
        eos = load(VOCABULARY).token_to_id(END)
        opening = tokens // 20
        lines = []
        for number in range(count):
            if number % ALIKE == 0:
                first = self._slice(opening)
            rest = self._slice(tokens - 1 - opening)
            spans = [*self._offsets[first], *self._offsets[rest]]
            pieces = [self._whole[start:end] for start, end in spans]
            ids = [*self._ids[first], *self._ids[rest], eos]
            lines.append(
                msgspec.json.encode({"ids": ids, "text": "".join(pieces), "eos": eos, "pieces": [*pieces, ""]})
            )
        return b"\n".join(lines)

    def _slice(self, tokens: int) -> slice:
        first = self._random.randrange(len(self._ids) - tokens)
        return slice(first, first + tokens)


class Conversation:
    """One conversation as text: a prompt, then each reply followed by new text."""

    def __init__(self, corpus: Corpus, prompt: str, new_tokens: int = NEW_TOKENS) -> None:
        self._corpus = corpus
        self._new_tokens = new_tokens
        self.text = prompt

    def heard(self, reply: bytes) -> None:
        """Append this reply of `/generate`, and new text."""
        self.text += text_of(reply).text + "\nObservation: " + self._corpus.cut(self._new_tokens)

    def request(self, reply_tokens: int, *, asks: bool, stream: bool = False) -> bytes:
        """Return the body of the next request. `asks` is whether it asks for logprobs."""
        body: dict[str, Any] = {"text": self.text, "sampling_params": {"max_new_tokens": reply_tokens}}
        body |= {"return_logprob": True} if asks else {}
        body |= {"stream": True} if stream else {}
        return msgspec.json.encode(body)
