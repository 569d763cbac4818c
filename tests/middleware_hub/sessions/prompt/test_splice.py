"""Splicing, compared with an oracle that keeps full token lists: a turn keeps its ids if everything in front is unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.sessions.prompt.splice import Splice, codec_of, splice
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.spans.chain import SpanFlag, TokenSpan, chain_ids, pack_ids, unpack_ids
from middleware_hub.spans.hidden_tail import HiddenToken
from middleware_hub.tokenizer.tokenizer import Tokenizer
from tests.middleware_hub.real import ALL, texts, tokenizer
from tests.support.usual import usual
from tests.support.vocabularies import Name

STOPS: dict[Name, str] = {"qwen": "<|im_end|>", "mistral-v1": "</s>", "mistral-v1-legacy": "</s>", "tekken": "</s>"}
OTHERS: dict[Name, str] = {"qwen": "<|im_start|>", "mistral-v1": "<s>", "mistral-v1-legacy": "<s>", "tekken": "[INST]"}
HALVES = (("in", "to"), ("yes", "terday"), ("no", "\n\n"), ("a", "b"))
"""What may be one token: what the client saw of it, and what it did not, for there a stop string begins."""
SCAFFOLDS = ("<|im_start|>assistant\n", "[/INST]", "", "<think>\n", "A:", " ")


class Hidden(NamedTuple):
    """The end of what was sampled: how a turn ended, and what the client did not see of it."""

    ids: list[int]
    text: str
    special: bool = False
    shown: str = ""


class Turn(NamedTuple):
    """One generation, written down in full."""

    prompt: list[int]
    sampled: list[int]
    hidden: list[Hidden]
    spoilt: bool

    @property
    def visible(self) -> int:
        return len(self.sampled) - sum(len(one.ids) for one in self.hidden)


def behind(turn: Turn, text: str, encoder: Tokenizer) -> tuple[list[int], int]:
    """All ids of a prompt that goes on behind a turn, and how many sampled ones of that turn are among them."""
    kept = list(turn.sampled[: turn.visible])
    for one in turn.hidden:
        if text.startswith(one.text):
            kept, text = kept + one.ids, text[len(one.text) :]
        elif one.special:
            first = encoder.encode_tail(text)[:1]
            # Another special token says how the turn ends: it stands in the place of the one that was sampled.
            if not (first and first[0] in encoder.vocabulary.special_ids):
                kept += one.ids
        else:
            text = one.shown + text
            break
    return [*turn.prompt, *kept, *encoder.encode_tail(text)], len(kept)


def prompt(before: Turn | None, text: str, encoder: Tokenizer) -> tuple[list[int], int]:
    return (encoder.encode_start(text), 0) if before is None else behind(before, text, encoder)


@st.composite
def endings(draw: st.DrawFn, name: Name) -> list[Hidden]:
    encoder, kind = tokenizer(name), draw(st.sampled_from(["stop", "length", "string", "half"]))
    if kind == "stop":
        return [Hidden(encoder.encode_tail(STOPS[name]), STOPS[name], special=True)]
    if kind == "string":
        literals = draw(st.sampled_from([("###",), ("\n", "User"), ("x", "y", "z")]))
        return [Hidden(encoder.encode_tail(one), one) for one in literals]
    if kind == "half":
        halves = [half for half in HALVES if len(encoder.encode_tail("".join(half))) == 1]
        shown, text = draw(st.sampled_from(halves))
        return [Hidden(encoder.encode_tail(shown + text), text, shown=shown)]
    return []


class Lineage(NamedTuple):
    turns: list[Turn]
    pieces: list[str]
    scaffolds: list[str]


@st.composite
def lineages(draw: st.DrawFn, name: Name) -> Lineage:
    encoder = tokenizer(name)
    between = st.tuples(st.sampled_from([STOPS[name], OTHERS[name], "###", "\n", "terday", ""]), texts(name)).map(
        "".join
    )
    turns: list[Turn] = []
    pieces, scaffolds = [], []
    for _ in range(draw(st.integers(1, 4))):
        piece, scaffold = draw(between), draw(st.sampled_from(SCAFFOLDS))
        if not piece + scaffold:
            piece = "\n"
        sent, _ = prompt(turns[-1] if turns else None, piece + scaffold, encoder)
        hidden = draw(endings(name))
        said = [i for text in draw(st.lists(texts(name, max_chunks=2), max_size=3)) for i in encoder.encode_tail(text)]
        spoilt = draw(st.integers(0, 15)) == 0
        turns.append(Turn(sent, [*(said or [7]), *(i for one in hidden for i in one.ids)], hidden, spoilt))
        pieces.append(piece)
        scaffolds.append(scaffold)
    return Lineage(turns, pieces, scaffolds)


EDITS = ("", " ", "\n", "<s>", "<s> ", "</s>", "<|im_end|>", "x", "A:", "e\u0301", "\u00e9")


@st.composite
def edited(draw: st.DrawFn, pieces: Sequence[str]) -> list[str]:
    """Pieces of a new rendering: mostly as they were, some a little longer, shorter, or in other letters."""
    found = []
    for piece in pieces:
        kind = draw(st.sampled_from(["same"] * 6 + ["front", "back", "cut", "cut in front", "joined", "apart"]))
        more = draw(st.sampled_from(EDITS))
        if kind in ("joined", "apart"):
            piece = piece.replace("e\u0301", "\u00e9") if kind == "joined" else piece.replace("\u00e9", "e\u0301")
        at = draw(st.integers(0, len(piece)))
        found.append(
            {"front": more + piece, "back": piece + more, "cut": piece[:at], "cut in front": piece[at:]}.get(
                kind, piece
            )
        )
    return found


def checkpoints(turns: Sequence[Turn]) -> list[Checkpoint]:
    """The same as chains of spans."""
    made: list[Checkpoint] = []
    for number, turn in enumerate(turns):
        before = made[-1] if made else None
        chain = [] if before is None else unpack_ids(chain_ids(before.span, len(before.span)))
        alike = next((i for i, (a, b) in enumerate(zip(chain, turn.prompt, strict=False)) if a != b), len(chain))
        take = 0 if before is None else min(alike, len(turn.prompt)) - before.span.offset
        if before is not None:
            assert take >= turns[number - 1].visible
        above = None if before is None else before.span
        context = TokenSpan(above, take, 0, pack_ids(turn.prompt[(0 if above is None else above.offset + take) :]), 0)
        flags = SpanFlag.MISMATCH if turn.spoilt else SpanFlag.NONE
        span = TokenSpan(
            context, len(context), 0, pack_ids(turn.sampled), 0, versions="1", visible=turn.visible, flags=flags
        )
        tail = tuple(HiddenToken(len(one.ids), one.text, one.special, len(one.shown)) for one in turn.hidden)
        node = MessageNode(str(number), "assistant", b"", None, 2 * number + 2)
        shown = turn.hidden[0].shown if turn.hidden else ""
        made.append(Checkpoint(str(number), node, span, before, number, "stop", tail=tail, shown=shown))
        assert unpack_ids(chain_ids(context, len(context))) == turn.prompt
    return made


def oracle(turns: Sequence[Turn], pieces: Sequence[str], scaffolds: Sequence[str], encoder: Tokenizer) -> Splice:
    before: Turn | None = None
    for number, (turn, piece) in enumerate(zip(turns, pieces, strict=True)):
        if turn.spoilt:
            return Splice(number, "unfaithful")
        if all(prompt(before, piece + one, encoder)[0] != turn.prompt for one in scaffolds if piece + one):
            return Splice(number, "divergence")
        before = turn
    return Splice(len(turns))


@pytest.mark.parametrize("name", usual(ALL, "qwen", "mistral-v1-legacy"))
def test_a_turn_stands_where_it_stood_if_its_whole_prompt_is_what_it_was(name: Name) -> None:
    encoder = tokenizer(name)
    codec = codec_of(encoder)

    @given(st.data(), lineages(name))
    def check(data: st.DataObject, lineage: Lineage) -> None:
        pieces = data.draw(edited(lineage.pieces))
        scaffolds = data.draw(st.permutations(SCAFFOLDS))
        found = splice(pieces, checkpoints(lineage.turns), scaffolds, codec)
        assert found == oracle(lineage.turns, pieces, scaffolds, encoder)

    check()


@pytest.mark.parametrize("name", ALL)
def test_what_a_start_spells_is_another_text_if_it_is_encoded_otherwise(name: Name) -> None:
    """`Hello` gains a BOS and a dummy space; a text with both of them may gain another space."""
    encoder = tokenizer(name)

    @given(texts(name).filter(bool), st.sampled_from(SCAFFOLDS))
    def check(text: str, scaffold: str) -> None:
        turn = Turn(encoder.encode_start(text + scaffold), [7], [], False)
        spelled = encoder.vocabulary.spell(turn.prompt).removesuffix(scaffold)
        if spelled + scaffold:
            found = splice([spelled], checkpoints([turn]), SCAFFOLDS, codec_of(encoder))
            assert found == oracle([turn], [spelled], SCAFFOLDS, encoder)

    check()


@pytest.mark.parametrize("name", ALL)
def test_the_token_that_ends_a_turn_is_compared_too(name: Name) -> None:
    """It was left out, or is now: what stands behind it is the same in both, and what was in front is not."""
    encoder, stop, other = tokenizer(name), STOPS[name], OTHERS[name] + "Go on."
    first = Turn(
        encoder.encode_start("Hi"),
        [7, *encoder.encode_tail(stop)],
        [Hidden(encoder.encode_tail(stop), stop, True)],
        False,
    )
    for was, now in ((other, stop + other), (stop + other, other)):
        turns = [first, Turn(behind(first, was, encoder)[0], [7], [], False)]
        pieces, made = ["Hi", was], checkpoints(turns)
        assert splice(pieces, made, ("",), codec_of(encoder)) == Splice(2)
        assert splice(["Hi", now], made, ("",), codec_of(encoder)) == Splice(1, "divergence")
