"""A client of a radix tree for tests: it says prompts and replies over a toy vocabulary, and checks what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from middleware_hub.radix.cut import Cut
from middleware_hub.radix.match import PrefixMatch
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Context, Recall, SampledReply
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import SpanFlag, Versions, chain_ids, pack_ids, pack_logprobs, unpack_ids
from middleware_hub.tokenizer.alignment import align_context, align_reply
from tests.middleware_hub.radix.recount import recount
from tests.middleware_hub.toy import AB, BA, EOS, EOT, SPACE, A, B, encode, toy_vocabulary

NS = ("", "", "")


@dataclass(frozen=True)
class Turn:
    """A request and its reply."""

    prompt: str
    generation: Generation
    reply: str

    @property
    def text(self) -> str:
        return self.prompt + self.reply

    @property
    def ids(self) -> list[int]:
        span = self.generation.span
        return unpack_ids(chain_ids(span, len(span)))

    @property
    def sent(self) -> list[int]:
        """What the worker got."""
        return self.ids[: self.generation.span.offset]


class Talk:
    """Plays requests against a tree as the middleware does, without any I/O."""

    def __init__(self, *, max_tokens: int | None = None, keep_versions: int = 5) -> None:
        self.vocabulary = toy_vocabulary()
        self.tree = RadixTree(self.vocabulary, max_tokens=max_tokens, keep_versions=keep_versions)

    def match(self, text: str, *, parent: str | None = None, namespace: tuple[str, ...] = NS) -> PrefixMatch:
        return self.tree.match(namespace, text, parent=parent)

    def match_ids(self, ids: list[int], *, parent: str | None = None) -> PrefixMatch:
        def width(count: int) -> int:
            return len(self.vocabulary.spell(ids[:count]))

        return self.tree.match_ids(NS, self.vocabulary.spell(ids), pack_ids(ids), width, parent=parent)

    def sent(self, text: str, **options: str) -> list[int]:
        """What a request with this text sends to the worker."""
        match = self.match(text, **options)
        return kept(match) + encode(text[match.cut.start :])

    def say(
        self,
        text: str,
        sampled: list[int],
        name: str = "",
        *,
        version: Versions = "1",
        parent: str | None = None,
        namespace: tuple[str, ...] = NS,
        reply: str | None = None,
        matched: int | str | None = None,
    ) -> Turn:
        match = self.match(text, parent=parent, namespace=namespace)
        rest = encode(text[match.cut.start :])
        return self.answer(match, rest, sampled, name, version=version, reply=reply, matched=matched)

    def say_ids(self, ids: list[int], sampled: list[int], name: str = "") -> Turn:
        match = self.match_ids(ids)
        return self.answer(match, ids[match.cut.tokens :], sampled, name, given=SpanFlag.GIVEN)

    def answer(
        self,
        match: PrefixMatch,
        rest: list[int],
        sampled: list[int],
        name: str = "",
        *,
        version: Versions = "1",
        reply: str | None = None,
        matched: int | str | None = None,
        given: SpanFlag = SpanFlag.NONE,
    ) -> Turn:
        text, start = match.text, match.cut.start
        context = None
        if rest or start < len(text):
            over = align_context(self.vocabulary, rest, text[start:], bos=(), offsets=lambda: None)
            context = Context(pack_ids(rest), over.flags | given, over.ends)
        if reply is None:
            reply = self.vocabulary.spell(sampled, skip_special=True)
        over = align_reply(self.vocabulary, sampled, reply, skips_special=True, matched=matched)
        assert not over.flags & SpanFlag.MISMATCH
        sampled_reply = SampledReply(
            pack_ids(sampled),
            reply,
            version,
            pack_logprobs([-(i + 1) / 64 for i in range(len(sampled))]),
            over.visible,
            over.flags,
            over.ends,
            over.tail,
            tuple(name.split()),
        )
        self.tree.pin(match)
        generation = self.tree.record(match, context, sampled_reply)
        self.tree.unpin(match)
        return Turn(text, generation, reply)

    def retrieve(self, *turns: Turn) -> None:
        for turn in turns:
            found = self.tree.recall(NS, turn.text)
            assert found is not None
            assert found.exact

    def alive(self, *turns: Turn) -> list[bool]:
        return [turn.generation.span.owner is turn.generation for turn in turns]

    def collect(self, max_tokens: int) -> None:
        """Down to so many tokens; what is left is in order."""
        self.tree.max_tokens = max_tokens
        assert self.tree.collect() is False
        recount(self.tree)


def kept(match: PrefixMatch) -> list[int]:
    """The recorded tokens that a request reuses."""
    return unpack_ids(chain_ids(match.cut.span, match.cut.take))


def recalled(found: Recall | None) -> list[int]:
    assert found is not None
    return unpack_ids(chain_ids(found.cut.span, found.cut.take))


def long_chain(talk: Talk, turns: int) -> str:
    """A conversation of so many turns, each of them continuing the one before. Returns its text."""
    before: Generation | None = None
    text = ""
    for _ in range(turns):
        span = None if before is None else before.span
        match = PrefixMatch(NS, text + " ", Cut(span, len(span) if span else 0, len(text)), before)
        turn = talk.answer(match, [SPACE], [A, B, EOS])
        before, text = turn.generation, turn.text
    return text


def bushy(talk: Talk) -> list[Turn]:
    """Something of everything: siblings, variants, continued ones, a fork in mid-reply, an empty reply."""
    first = talk.say("a b", [AB, EOS], "r1", version="1")
    second = talk.say("a b", [A, B, EOS], "r2", version="2")
    third = talk.say("a b", [A, BA, SPACE, EOT], "r3", version="2")
    fourth = talk.say(second.text + "<e>b", [AB, A], "r4", version="3")
    fifth = talk.say(third.text[:-2] + " a", [B, B, EOS], "r5", version="3")
    sixth = talk.say("b", [EOS], "r6", version="4")
    return [first, second, third, fourth, fifth, sixth]
