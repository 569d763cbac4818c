"""A slow and literal reading of the exactness rules, to judge the real thing by.

It keeps every chain as a whole list of tokens and looks at all of them for every question; nothing of the code under
test is used here. What it is told comes from a worker's own log. Where the rules leave a choice, `Plan` has more
than one acceptable answer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from tests.support.vocabularies import Name, _byte_alphabet, load


class Speller:
    """What the ids of one vocabulary spell, and how a text is encoded at a start and behind a chain."""

    def __init__(self, name: Name) -> None:
        self.start = load(name)
        self.sentencepiece = name.startswith("mistral")
        self.bos = "" if name == "qwen" else "<s>"
        self.tail = _without_privileges(self.start)
        added = self.start.get_added_tokens_decoder()
        self.added = {number: token.content for number, token in added.items()}
        self.special = frozenset(number for number, token in added.items() if token.special)
        self._byte_of = {character: byte for byte, character in enumerate(_byte_alphabet())}

    def encode_start(self, text: str) -> list[int]:
        """`tokenizer(text)`, but never with two BOS."""
        ids = list(self.start.encode(text).ids)
        return ids[1:] if self.bos and text.startswith(self.bos) else ids

    def encode_tail(self, text: str) -> list[int]:
        """What follows a chain: gains nothing that a start gains."""
        return list(self.tail.encode(text, add_special_tokens=False).ids) if text else []

    def spell(self, ids: Sequence[int], *, skip_special: bool) -> Spelling:
        """The text of ids that stand behind other ids, and where each of them ends in it."""
        pieces = [self._piece(number, skip_special) for number in ids]
        text, ends = _spell_runs(pieces) if self.sentencepiece else _spell_bytes(pieces)
        return Spelling(text, ends, [bool(piece.data) for piece in pieces])

    def text_of_request(self, ids: Sequence[int]) -> str:
        """The text of an `input_ids` request: specials spelled, less a leading BOS and the dummy space behind it."""
        bos = self.start.token_to_id(self.bos) if self.bos else None
        body = ids[1:] if bos is not None and ids[:1] == [bos] else ids
        text = self.spell(body, skip_special=False).text
        return text[1:] if self.sentencepiece and len(body) < len(ids) and text.startswith(" ") else text

    def _piece(self, number: int, skip_special: bool) -> _Piece:
        if number in self.added:
            skipped = skip_special and number in self.special
            return _Piece(b"" if skipped else self.added[number].encode(), is_byte=False, skipped=skipped)
        token = self.start.id_to_token(number)
        assert token is not None, f"no such id: {number}"
        if not self.sentencepiece:
            return _Piece(bytes(self._byte_of[character] for character in token), is_byte=False)
        if len(token) == 6 and token.startswith("<0x"):
            return _Piece(bytes([int(token[3:5], 16)]), is_byte=True)
        return _Piece(token.replace("▁", " ").encode(), is_byte=False)


@dataclass(frozen=True)
class Spelling:
    """A text, per token the number of its characters begun so far, and whether the token has a text at all."""

    text: str
    ends: list[int]
    wide: list[bool]


@dataclass(frozen=True)
class _Piece:
    data: bytes
    is_byte: bool
    skipped: bool = False


@lru_cache(maxsize=8)
def speller(name: Name) -> Speller:
    """One per vocabulary and process."""
    return Speller(name)


def _without_privileges(tokenizer: Tokenizer) -> Tokenizer:
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    spec["post_processor"] = None

    def clean(node: Any) -> Any:
        if node is None or node.get("type") == "Prepend":
            return None
        for key in ("normalizers", "pretokenizers"):
            if key in node:
                node[key] = [kept for kept in map(clean, node[key]) if kept is not None]
        if node["type"] == "Metaspace":
            node["prepend_scheme"] = "never"
            node.pop("add_prefix_space", None)
        if node["type"] == "ByteLevel":
            node["add_prefix_space"] = False
        return node

    spec["normalizer"], spec["pre_tokenizer"] = clean(spec["normalizer"]), clean(spec["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(spec))


def _spell_bytes(pieces: Sequence[_Piece]) -> tuple[str, list[int]]:
    text, begins = _decode(b"".join(piece.data for piece in pieces))
    ends, size = [], 0
    for piece in pieces:
        size += len(piece.data)
        ends.append(sum(begin < size for begin in begins))
    return text, ends


def _spell_runs(pieces: Sequence[_Piece]) -> tuple[str, list[int]]:
    """A run of byte tokens is decoded as one; if it is not valid, each of its bytes is a character of its own."""
    text, ends = "", [0] * len(pieces)
    run: list[int] = []

    def flush() -> None:
        nonlocal text
        data = b"".join(pieces[at].data for at in run)
        found, begins = _decode(data)
        if "�" in found and data.decode(errors="ignore").encode() != data:
            found, begins = "�" * len(data), list(range(len(data)))
        for number, at in enumerate(run):
            ends[at] = len(text) + sum(begin <= number for begin in begins)
        text += found
        run.clear()

    skipped: list[int] = []
    for at, piece in enumerate(pieces):
        if piece.skipped:
            skipped.append(at)
        elif piece.is_byte:
            run.append(at)
        else:
            flush()
            text += piece.data.decode()
            ends[at] = len(text)
    flush()
    for at in skipped:
        ends[at] = ends[at - 1] if at else 0
    return text, ends


def _decode(data: bytes) -> tuple[str, list[int]]:
    """As UTF-8 with U+FFFD for what is not, and at which byte each character begins."""
    bad: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad.append((error.start, error.end))
        return "�", error.end

    codecs.register_error("oracle", note)
    text = data.decode("utf-8", errors="oracle")
    begins, at = [], 0
    wrong = dict(bad)
    for character in text:
        begins.append(at)
        at = wrong[at] if at in wrong else at + len(character.encode())
    return text, begins


@dataclass(frozen=True, eq=False)
class Token:
    """One token of a chain; its identity is what makes it *this* generation's token."""

    id: int
    mask: int = 0
    logprob: float = 0.0
    version: str | None = None


@dataclass(eq=False)
class Chain:
    """One recorded turn: all tokens from the start, and where they end in the text."""

    text: str
    tokens: list[Token]
    ends: list[int]  # of context tokens: only that they do not decrease
    wide: list[bool]
    request_id: str
    parent: Chain | None
    reply: str
    begins: int  # tokens[begins:] were sampled for it
    first_hidden: int  # tokens[first_hidden:] is the hidden tail
    hidden: list[tuple[str, bool]]  # its texts, and whether each is a special token
    partial: str  # what the reply lacks of the token before the hidden tail
    opaque: bool = False  # ids and text agree only as a whole
    maybe_opaque: bool = False

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def descends_from(self, other: Chain) -> bool:
        chain: Chain | None = self
        while chain is not None and chain is not other:
            chain = chain.parent
        return chain is other


@dataclass(frozen=True)
class Plan:
    """One acceptable answer to a text: what is reused, up to where, and what is encoded behind it."""

    tokens: list[Token]
    ends: list[int]
    wide: list[bool]
    position: int
    parent: Chain | None
    tail: list[int]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens] + self.tail

    @property
    def all_tokens(self) -> list[Token]:
        """With what is encoded, as context."""
        return [*self.tokens, *map(Token, self.tail)]


@dataclass
class Oracle:
    """All chains of one key of the tree, oldest first."""

    spelling: Speller
    chains: list[Chain] = field(default_factory=list)

    def plans(self, text: str, parent: Chain | None = None, *, forgetful: bool = False) -> list[Plan]:
        """What a request with this text may send: in most cases one answer.

        `forgetful`: any of the chains may have been evicted, the parent too.
        """
        everyone = parent is None or forgetful
        pool = [chain for chain in self.chains if everyone or chain.descends_from(parent)]
        complete = [chain for chain in pool if self._is_continued(chain, text)]
        if forgetful:
            found = [self._fresh(text), *(self._carry(chain, text) for chain in complete)]
            for chain in pool:
                matched = _shared(chain.text, text)
                cuts = [at for at, end in enumerate(chain.ends, 1) if end <= matched and chain.tokens[at - 1].mask]
                found += [self._plan(chain, at, chain.ends, chain.ends[at - 1], text) for at in cuts]
            return found
        if complete:
            newest = max(range(len(complete)), key=lambda at: (len(complete[at].text), at))
            base = complete[newest]
            carried = self._carry(base, text)
            size = len(carried.tokens)
            pool = [one for one in pool if one is not base and one.descends_from(base)]
            # Or should what was asked at the very end of the chain, and went on without its hidden tail, be continued?
            ended = [base.tokens[: base.first_hidden], carried.tokens]
            pool = [one for one in pool if any(_same(one.tokens[: len(head)], head) for head in ended)]
            loose = [self._partly(one, text) for one in pool if not _same(one.tokens[:size], carried.tokens)]
            pool = [one for one in pool if _same(one.tokens[:size], carried.tokens)]
        else:
            carried, loose = self._fresh(text), []
        found = self._furthest([carried, *(self._partly(chain, text) for chain in pool)])
        if any(chain.maybe_opaque for chain in pool) or (complete and not carried.tokens):
            found += [carried, *(self._partly(chain, text) for chain in self.chains)]
        return found + [plan for plan in loose if plan.position > carried.position]

    def plan_of_ids(self, ids: list[int], *, forgetful: bool = False) -> list[tuple[str, Plan]]:
        """What a request with these ids is, and its text: all of it is context but the chain that it begins with."""
        text = self.spelling.text_of_request(ids)
        whole = self.spelling.spell(ids, skip_special=False)
        less = len(whole.text) - len(text)
        ends = [max(0, end - less) for end in whole.ends]
        found = []
        longest: list[Chain | None] = [*self.continued_by_ids(ids)]
        if forgetful:
            heads = [_shared(chain.ids, ids) for chain in self.chains]
            cuts = [
                (chain, size) for chain, head in zip(self.chains, heads, strict=True) for size in range(1, head + 1)
            ]
            return [
                (text, Plan(chain.tokens[:size], ends[:size], whole.wide[:size], 0, chain, ids[size:]))
                for chain, size in cuts
                if chain.tokens[size - 1].mask
            ] + [(text, Plan([], [], [], 0, None, ids))]
        if forgetful or not longest:
            longest.append(None)
        for chain in longest:
            size = len(chain.tokens) if chain else 0
            tokens = chain.tokens if chain else []
            found.append((text, Plan(tokens, ends[:size], whole.wide[:size], 0, chain, ids[size:])))
        return found

    def none(self, text: str) -> Plan:
        """What `x-radix-parent: none` sends."""
        return self._fresh(text)

    def ending_at(self, text: str) -> list[Chain]:
        """The generations whose full text this is, newest first."""
        return [chain for chain in reversed(self.chains) if chain.text == text]

    def continued_by_ids(self, ids: list[int]) -> list[Chain]:
        """The longest chains that these ids begin with, newest first."""
        found = [chain for chain in reversed(self.chains) if chain.ids == ids[: len(chain.ids)]]
        longest = max((len(chain.ids) for chain in found), default=0)
        return [chain for chain in found if len(chain.ids) == longest]

    def record(
        self,
        plan: Plan,
        text: str,
        output: Iterable[tuple[int, float, str]],
        reply: str,
        *,
        request_id: str,
        skip_special: bool,
    ) -> Chain:
        """A reply has come: `text` is the request's, `plan` what was sent for it."""
        sampled = [Token(number, 1, logprob, version) for number, logprob, version in output]
        spelled = self.spelling.spell([token.id for token in sampled], skip_special=skip_special)
        stripped = self.spelling.sentencepiece and spelled.text.startswith(" ") and not spelled.text.startswith(reply)
        ends, wide, whole = spelled.ends, spelled.wide, spelled.text
        if stripped:
            ends, whole = [max(0, end - 1) for end in ends], whole[1:]
        opaque = not whole.startswith(reply)
        context, size = len(plan.tokens) + len(plan.tail), len(reply)
        first_hidden, partial = len(sampled), ""
        if opaque:
            ends = [size] * len(sampled)
        else:
            while first_hidden:
                begin = ends[first_hidden - 2] if first_hidden > 1 else 0
                shares = spelled.wide[first_hidden - 1] and begin == size == ends[first_hidden - 1] > 0
                if begin < size or shares:  # it shares its character with the token before it
                    break
                first_hidden -= 1
            partial = whole[size : ends[first_hidden - 1]] if first_hidden else ""
        hidden = [
            (self._own_text(sampled[at].id, whole, ends, at), sampled[at].id in self.spelling.special)
            for at in range(first_hidden, len(sampled))
        ]
        chain = Chain(
            text=text + reply,
            tokens=[*plan.tokens, *map(Token, plan.tail), *sampled],
            ends=[*plan.ends, *([len(text)] * len(plan.tail)), *(len(text) + end for end in ends)],
            wide=[*plan.wide, *([True] * len(plan.tail)), *wide],
            request_id=request_id,
            parent=plan.parent,
            reply=reply,
            begins=context,
            first_hidden=context + first_hidden,
            hidden=hidden,
            partial=partial,
            opaque=opaque,
            maybe_opaque=stripped or opaque,
        )
        self.chains.append(chain)
        return chain

    def _own_text(self, number: int, whole: str, ends: list[int], at: int) -> str:
        if number in self.spelling.special:
            return self.spelling.added[number]
        return whole[ends[at - 1] if at else 0 : ends[at]]

    def _fresh(self, text: str) -> Plan:
        return Plan([], [], [], 0, None, self.spelling.encode_start(text))

    def _plan(self, chain: Chain, keep: int, ends: list[int], position: int, text: str) -> Plan:
        """The first `keep` tokens of a chain, less context that no sampled token follows."""
        tokens = chain.tokens[:keep]
        while tokens and not tokens[-1].mask:
            tokens.pop()
        if len(tokens) < keep:
            position = ends[len(tokens) - 1] if tokens else 0
        if not tokens or not position:
            return self._fresh(text)
        size = len(tokens)
        return Plan(tokens, ends[:size], chain.wide[:size], position, chain, self.spelling.encode_tail(text[position:]))

    def _partly(self, chain: Chain, text: str) -> Plan:
        """What lies wholly inside the text, up to the last sampled token that has a text."""
        matched = _shared(chain.text, text)
        fitting = [
            at
            for at in range(min(chain.first_hidden, len(chain.tokens)))
            if chain.tokens[at].mask and chain.wide[at] and chain.ends[at] <= matched
        ]
        keep = fitting[-1] + 1 if fitting else 0
        return self._plan(chain, keep, chain.ends, chain.ends[keep - 1] if keep else 0, text)

    def _is_continued(self, chain: Chain, text: str) -> bool:
        if not text.startswith(chain.text) or not any(token.mask for token in chain.tokens):
            return False
        return bool(chain.reply) or _consume(chain.hidden, text[len(chain.text) :])[1] > 0

    def _carry(self, chain: Chain, text: str) -> Plan:
        """The whole chain, and of its hidden tail what the text lets stay."""
        length = len(chain.text)
        rest, ends, keep, position = text[length:], list(chain.ends), chain.first_hidden, length
        if chain.partial:
            if not rest.startswith(chain.partial):
                keep -= 1
                while keep and (not chain.wide[keep - 1] or chain.ends[keep - 1] == chain.ends[keep]):
                    keep -= 1  # textless at the cut, or of the same character
                return self._plan(chain, keep, ends, ends[keep - 1] if keep else 0, text)
            position += len(chain.partial)
        kept, consumed = _consume(chain.hidden, text[position:])
        for at in range(keep, keep + kept):
            ends[at] = position + consumed
        return self._plan(chain, keep + kept, ends, position + consumed, text)

    def _furthest(self, plans: list[Plan]) -> list[Plan]:
        best = max(plan.position for plan in plans)
        return [plan for plan in plans if plan.position == best]


def _shared(left: Sequence[object], right: Sequence[object]) -> int:
    """How much of their beginnings is the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _same(left: Sequence[Token], right: Sequence[Token]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


def _consume(hidden: Sequence[tuple[str, bool]], rest: str) -> tuple[int, int]:
    """How many tokens of a hidden tail stay, and how much of the text behind is theirs."""
    if not rest or not hidden:
        return 0, 0
    if all(special for _, special in hidden):
        texts = [text for text, _ in hidden]
        for spelled in [texts, texts[-1:], *(texts[:size] for size in range(len(texts) - 1, 0, -1))]:
            if rest.startswith("".join(spelled)):
                return len(hidden), len("".join(spelled))
        return len(hidden), 0
    kept = position = 0
    for text, special in hidden:
        if rest.startswith(text, position):
            position += len(text)
        elif not special:
            break
        kept += 1
    return kept, position


def versions_of(spans: Iterable[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """`weight_versions` of a retrieval, token by token."""
    for span in spans:
        for at in range(span["start"], span["end"]):
            yield at, span["version"]
