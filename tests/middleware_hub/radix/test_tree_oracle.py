"""The tree against a naive oracle that keeps every chain as a full list of tokens and compares strings from the start.

The oracle is written from the rules (exactness, 3 to 6), without spans, splits, nodes or passes: each record is its text
and a list of tokens, each token knows the characters it covers. Random histories over a vocabulary in which
everything collides, `check()` after each step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from middleware_hub.radix import indexes
from middleware_hub.radix import match as tree_match
from middleware_hub.radix.records import Context, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import SpanFlag, chain_ids, pack_ids, pack_logprobs, unpack_ids
from middleware_hub.spans.trajectory import flatten
from middleware_hub.tokenizer.alignment import align_context, align_reply
from tests.conftest import examples
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.toy import EOS, EOT, PIECES, encode, toy_vocabulary

NS = ("", "", "")
SPECIAL = (EOS, EOT)


@dataclass(frozen=True)
class Token:
    id: int
    mask: int
    logprob: float
    version: str
    serial: int  # which request added it: equal ids with other logprobs stay apart
    begin: int
    end: int  # characters begun up to here
    hidden: bool = False


@dataclass
class Record:
    serial: int
    text: str
    chain: list[Token]
    reply_at: int  # characters of the prompt
    line: Record | None  # the complete reply that was continued
    alive: bool = True

    def descends(self, other: Record | None) -> bool:
        return self.line is other


def cover(ids: list[int], start: int, skip: bool) -> list[tuple[int, int]]:
    """Characters that each token begins: how many there are, decoded up to it, broken ones and open ones counted."""
    out = []
    position, spelled = start, b""
    for i in ids:
        spelled += b"" if skip and i in SPECIAL else PIECES[i]
        end = start + len(spelled.decode("utf-8", "replace"))
        out.append((position, end))
        position = end
    return out


class Oracle:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def complete(self, text: str) -> tuple[Record, list[Token], int] | None:
        """The longest complete reply; if it ends inside a literal that the text spells, one that ends before it."""
        best = self._complete(text, len(text))
        begin = None if best is None else _literal_around(text, len(best[0].text))
        return best if begin is None else self._complete(text, begin) or best

    def _complete(self, text: str, most: int) -> tuple[Record, list[Token], int] | None:
        fits = (r for r in self.records if r.alive and text.startswith(r.text) and len(r.text) <= most)
        found = sorted(fits, key=lambda r: (len(r.text), r.serial))
        for record in reversed(found):
            tokens = [t for t in record.chain if not t.hidden]
            hidden = [t for t in record.chain if t.hidden]
            position = len(record.text)
            empty = len(record.text) == record.reply_at
            if position == len(text):
                if empty:
                    continue
                return record, tokens, position
            literals = [PIECES[t.id].decode() for t in hidden]
            consumed = 0
            ways = ["".join(literals[i:]) for i in range(len(literals))]
            ways += ["".join(literals[:i]) for i in range(len(literals), 0, -1)]
            for way in ways:
                if way and text.startswith(way, position):
                    consumed = len(way)
                    break
            if empty and not consumed:
                continue
            return record, tokens + hidden, position + consumed
        return None

    def match(self, text: str) -> tuple[list[Token], int]:
        tokens, start = self._match(text)
        return [replace(t, hidden=False) for t in tokens], start

    def _match(self, text: str) -> tuple[list[Token], int]:
        """The chain to continue, and the characters it covers; boundaries of context are not looked at."""
        best = self.complete(text)
        record, tokens, start = best if best else (None, [], 0)
        common = {r.serial: len(_common(r.text, text)) for r in self.records if r.alive}
        found = []
        for rival in self.records:
            if rival.alive and rival.descends(record) and common[rival.serial] > start:
                limit, chain = common[rival.serial], rival.chain
                last = _last_inside(chain, limit)
                while last is not None and (begin := _literal_around(text, chain[last].end)) is not None:
                    last = _last_inside(chain, begin)
                if last is not None and chain[last].end > start:
                    # Where the text leaves a chain before its own reply, its tokens are another reply's: of equal tokens, those
                    # of a reply that the text leaves in its middle count, whoever else reused others.
                    own = rival.reply_at < limit
                    found.append((chain[last].end, own, limit, rival.serial, chain[: last + 1]))
        if found:
            furthest, _, _, _, tokens = max(found, key=lambda one: one[:4])
            return tokens, furthest
        return tokens, start


def _last_inside(chain: list[Token], limit: int) -> int | None:
    """The last sampled token of a chain whose text ends within `limit` characters."""
    inside = [k for k, t in enumerate(chain) if t.mask and t.end <= limit and not t.hidden and _has_text(t)]
    if not inside:
        return None
    last = inside[-1]
    while last + 1 < len(chain) and _same_character(chain, last, limit):
        last += 1
    return last


def _literal_around(text: str, position: int) -> int | None:
    """Where a literal begins of which `position` is neither the beginning nor the end; it must be encoded whole."""
    return next((m.start() for m in re.finditer("<e>|<t>", text) if m.start() < position < m.end()), None)


def _has_text(token: Token) -> bool:
    return token.end > token.begin or (bool(PIECES[token.id]) and token.id not in SPECIAL)


def _same_character(chain: list[Token], index: int, limit: int) -> bool:
    following = chain[index + 1]
    return bool(following.mask and following.end <= limit and not following.hidden and _has_text(following))


def _common(a: str, b: str) -> str:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


class History:
    """Plays requests against the tree and the oracle, side by side."""

    def __init__(self, seed: int, max_tokens: int | None = None) -> None:
        self.random = random.Random(seed)
        self.vocabulary = toy_vocabulary()
        self.tree = RadixTree(self.vocabulary, max_tokens=max_tokens)
        self.oracle = Oracle()
        self.serial = 0
        self.generations = {}

    def request(self, text: str, sampled: list[int], version: str = "1") -> str:
        """One turn; returns text + reply."""
        expected, covered = self.oracle.match(text)
        match = self.tree.match(NS, text)
        self.covers(text, covered)
        self.tree.pin(match)
        before = flatten(match.cut.span, match.cut.take)
        cut_ids = list(before.token_ids)
        # The tree may add context that any text like this one has; behind the same tokens the same ids must follow.
        sent = cut_ids + encode(text[match.cut.start :])
        assert sent == [t.id for t in expected] + encode(text[covered:])
        masks = [t.mask for t in expected] + [0] * (len(sent) - len(expected))
        assert list(before.loss_mask) + [0] * (len(sent) - len(cut_ids)) == masks
        assert list(before.logprobs) == [t.logprob for t in expected] + [0.0] * (len(cut_ids) - len(expected))

        rest = encode(text[match.cut.start :])
        context = None
        if match.cut.start < len(text):
            alignment = align_context(self.vocabulary, rest, text[match.cut.start :], bos=(), offsets=lambda: None)
            assert not alignment.flags & SpanFlag.WHOLE
            context = Context(pack_ids(rest), alignment.flags, alignment.ends)
        visible = b"".join(PIECES[i] for i in sampled if i not in SPECIAL).decode("utf-8", "replace")
        logprobs = [-self.random.randrange(1, 1000) / 64 for _ in sampled]
        alignment = align_reply(self.vocabulary, sampled, visible, skips_special=True, matched=None)
        self.serial += 1
        generation = self.tree.record(
            match,
            context,
            SampledReply(
                pack_ids(sampled),
                visible,
                version,
                pack_logprobs(logprobs),
                alignment.visible,
                alignment.flags,
                alignment.ends,
                alignment.tail,
                (f"r{self.serial}",),
            ),
        )
        self.tree.unpin(match)
        chain = list(expected)
        for i, (begin, end) in zip(encode(text[covered:]), cover(encode(text[covered:]), covered, False), strict=True):
            chain.append(Token(i, 0, 0.0, "", self.serial, begin, end))
        spans = cover(sampled, len(text), True)
        last_visible = max((k for k, i in enumerate(sampled) if i not in SPECIAL and PIECES[i]), default=-1)
        for k, (i, (begin, end), logprob) in enumerate(zip(sampled, spans, logprobs, strict=True)):
            chain.append(Token(i, 1, logprob, version, self.serial, begin, end, hidden=k > last_visible))
        best = self.oracle.complete(text)
        record = Record(self.serial, text + visible, chain, len(text), best[0] if best else None)
        self.oracle.records.append(record)
        self.generations[self.serial] = generation
        recount(self.tree)
        self.recall(record)
        return record.text

    def covers(self, text: str, covered: int) -> None:
        """A text is covered up to its last sampled token, or whole if it was sent before; and so is its covered part."""
        found = self.tree.recall(NS, text, note=False)
        assert found is not None
        assert found.cut.start == (len(text) if found.exact else covered)
        if covered:
            part = self.tree.recall(NS, text[:covered], note=False)
            assert part is not None
            assert part.exact

    def recall(self, record: Record) -> None:
        """The newest of a text answers for it, the others by their id, whole."""
        same = [r for r in self.oracle.records if r.alive and r.text == record.text]
        for wanted, request_id in [(same[-1], None)] + [(r, f"r{r.serial}") for r in same]:
            found = self.tree.recall(NS, record.text, request_id=request_id)
            assert found is not None
            assert found.exact
            flat = flatten(found.cut.span, found.cut.take)
            assert list(flat.token_ids) == [t.id for t in wanted.chain]
            assert list(flat.loss_mask) == [t.mask for t in wanted.chain]
            assert list(flat.logprobs) == [t.logprob for t in wanted.chain]
            versions = [v for v, begin, end in flat.weight_versions for _ in range(begin, end)]
            assert versions == [t.version for t in wanted.chain if t.mask]
            assert found.request_ids == tuple(f"r{r.serial}" for r in reversed(same))

    def forget_evicted(self) -> None:
        for serial, generation in self.generations.items():
            self.oracle.records[serial - 1].alive = generation.span.owner is generation
        for record in self.oracle.records:
            if record.alive and record.line is not None:
                assert record.line.alive, "a reply was collected while another one continues it"


TEXT = st.text(alphabet="ab é", min_size=1, max_size=6)
SAMPLED = st.lists(st.sampled_from(list(PIECES)), min_size=1, max_size=6)
STEP = st.one_of(
    st.tuples(st.just("start"), TEXT, SAMPLED),
    st.tuples(st.just("continue"), st.integers(0, 20), TEXT | st.just(""), SAMPLED),
    st.tuples(
        st.just("spell"),
        st.integers(0, 20),
        st.sampled_from(["<e>", "<t>", "<e><t>", "<t><e>", "<e>a", "<", "<t>b"]),
        SAMPLED,
    ),
    st.tuples(st.just("cut"), st.integers(0, 20), st.integers(1, 8), TEXT | st.just(""), SAMPLED),
    st.tuples(st.just("strip"), st.integers(0, 20), TEXT, SAMPLED),
)


GROUP = st.tuples(st.just("group"), st.integers(0, 20), TEXT | st.just(""), SAMPLED, st.lists(SAMPLED, max_size=4))
"""Samples of one prompt that begin alike."""


def play(history: History, texts: list[str], step: tuple) -> None:
    kind, rest = step[0], step[1:]
    if kind == "group":
        for sample in rest[3]:
            play(history, texts, ("continue", rest[0] % max(1, len(texts)), rest[1], rest[2] + sample))
        return
    sampled = rest[-1]
    if kind == "start":
        text = rest[0]
    else:
        base = texts[rest[0] % len(texts)] if texts else "a"
        if kind == "cut":
            text = base[: -rest[1]] + rest[2]
        elif kind == "strip":
            text = base.strip() + rest[1]
        else:
            text = base + rest[1]
    if not text or set(text) - set("ab é<et>"):
        return  # half a character has no encoding in this toy; the real vocabularies have it elsewhere
    texts.append(history.request(text, sampled))


EQUAL_TOKENS = [
    ("start", "a", [4, 1, 0, 0, 0]),
    ("start", "a", [0]),
    ("cut", 0, 4, "a", [0]),
    ("start", "a", [4, 1]),
    ("cut", 0, 4, "a", [0]),
]
"""The last text leaves one chain in its own reply, and, a character later, another one that has an equal token of a third."""


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(STEP, min_size=1, max_size=14), st.integers(0, 2**16))
@example(EQUAL_TOKENS, 0)
def test_random_histories_agree_with_the_oracle(steps: list[tuple], seed: int) -> None:
    """Whatever conversations do, the tree continues the chain that the rules say, and gives every reply back whole."""
    history, texts = History(seed), []
    for step in steps:
        play(history, texts, step)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(STEP, min_size=4, max_size=20), st.integers(0, 2**16), st.integers(5, 40))
def test_collection_in_between_never_changes_what_is_left(steps: list[tuple], seed: int, budget: int) -> None:
    """Collecting takes whole leaves; everything that is left still agrees with the oracle."""
    history, texts = History(seed, max_tokens=budget), []
    for number, step in enumerate(steps):
        play(history, texts, step)
        if number % 3 == 2:
            history.tree.collect()
            recount(history.tree)
            history.forget_evicted()
            for record in history.oracle.records:
                if record.alive:
                    history.recall(record)
            assert not history.tree.over_budget


@contextmanager
def close_landmarks(far: int, block: int) -> Iterator[None]:
    """Landmarks as in a conversation of thousands of turns, after a few characters."""
    with (
        patch.object(indexes, "BLOCK", block),
        patch.object(indexes, "MOST_LANDMARKS", 8),
        patch.object(tree_match, "FAR", far),
    ):
        yield


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(STEP | GROUP, min_size=3, max_size=12),
    st.integers(0, 2**16),
    st.integers(1, 3),
    st.integers(1, 6),
    st.none() | st.integers(5, 60),
)
def test_groups_landmarks_and_collection_agree_with_the_oracle(
    steps: list[tuple], seed: int, far: int, block: int, budget: int | None
) -> None:
    """The same with samples of one prompt, with landmarks everywhere, and with replies that go in between."""
    history, texts = History(seed, max_tokens=budget), []
    with close_landmarks(far, block):
        for number, step in enumerate(steps):
            play(history, texts, step)
            if budget is not None and number % 2:
                history.tree.collect()
                recount(history.tree)
                history.forget_evicted()
                for record in history.oracle.records:
                    if record.alive:
                        history.recall(record)


@pytest.mark.parametrize("seed", range(3))
def test_long_conversations_find_their_landmarks(seed: int) -> None:
    """Some conversations of many turns, edited and forked now and then, of which old ones are collected."""
    rng = random.Random(seed)
    history, texts = History(seed, max_tokens=600), ["a" * n for n in range(1, 4)]
    with close_landmarks(3, 5):
        used = 0
        for number in range(150):
            sampled = [rng.choice(list(PIECES)) for _ in range(rng.randrange(1, 4))]
            pick = rng.randrange(len(texts))
            if rng.random() < 0.1:
                steps: list[tuple] = [("cut", pick, rng.randrange(1, 30), "b", sampled)]
            else:
                steps = [("continue", pick, rng.choice(["", " a", "b é"]), sampled)]
            for step in steps:
                play(history, texts, step)
            if len(texts) > 3:
                texts[pick] = texts.pop()
            used += len(history.tree.marks) > 0
            if number % 10 == 9:
                history.tree.collect()
                recount(history.tree)
                history.forget_evicted()
        assert used > 100


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(STEP, min_size=1, max_size=10), st.lists(TEXT, max_size=5), st.integers(0, 2**16))
def test_a_lookup_changes_nothing(steps: list[tuple], lookups: list[str], seed: int) -> None:
    """Two trees with the same history, one of them asked about everything in between, give the same answers."""
    asked, silent = History(seed), History(seed)
    asked_texts: list[str] = []
    silent_texts: list[str] = []
    for step in steps:
        for text in lookups + asked_texts:
            asked.tree.recall(NS, text + "a")
            asked.tree.match(NS, text)
            asked.tree.departure(NS, text)
        play(asked, asked_texts, step)
        play(silent, silent_texts, step)
        assert asked_texts == silent_texts
    assert asked.tree.stats.nodes == silent.tree.stats.nodes
    for text in asked_texts:
        one, two = asked.tree.match(NS, text), silent.tree.match(NS, text)
        assert chain_ids(one.cut.span, one.cut.take) == chain_ids(two.cut.span, two.cut.take)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_history(seed: int) -> None:
    """Hundreds of turns over few texts, so that the tree gets bushy."""
    rng = random.Random(seed)
    history, texts = History(seed), []
    for _ in range(150):
        sampled = [rng.choice(list(PIECES)) for _ in range(rng.randrange(1, 7))]
        extra = "".join(rng.choice("ab é") for _ in range(rng.randrange(0, 5)))
        kind = rng.choice(["start", "continue", "continue", "continue", "cut", "strip", "spell"])
        pick = rng.randrange(50)
        step = {
            "start": ("start", extra or "a", sampled),
            "continue": ("continue", pick, extra, sampled),
            "cut": ("cut", pick, rng.randrange(1, 9), extra, sampled),
            "strip": ("strip", pick, extra or "b", sampled),
            "spell": ("spell", pick, rng.choice(["<e>", "<t>", "<e><t>"]), sampled),
        }[kind]
        play(history, texts, step)
    ids = unpack_ids(chain_ids(*history.tree.match(NS, max(texts, key=len)).cut[:2]))
    assert ids
