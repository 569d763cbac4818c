"""A turn that is sampled in several pieces parses like one that is sampled at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.chat.messages import Reasoning, Text
from middleware_hub.parsers.think import Think
from middleware_hub.sessions.turn.reply_parsers import ResumedParser

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "hm", "well", "<", "ok\n\n"]), max_size=12)


def read(parser: Think | ResumedParser, text: str) -> list[Text | Reasoning]:
    return [*(piece for character in text for piece in parser.feed(character)), *parser.finish()]


def told(pieces: Sequence[Text | Reasoning]) -> tuple[str, str]:
    """Thought and speech, without white space: how much of it a tag takes away depends on what is behind a cut."""
    joined = ("".join(piece.text for piece in pieces if isinstance(piece, kind)) for kind in (Reasoning, Text))
    thought, said = ("".join(text.split()) for text in joined)
    return thought, said


@given(pieces=PIECES, inside=st.booleans(), data=st.data())
def test_a_cut_between_tags_changes_nothing(pieces: list[str], inside: bool, data: st.DataObject) -> None:
    """However often: nothing is lost, nothing is told twice, and no thought becomes speech."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(pieces)), max_size=3), label="cuts"))
    whole = told(read(Think(starts_inside=inside), "".join(pieces)))
    found: list[Text | Reasoning] = []
    before = ""
    for begin, end in zip([0, *cuts], [*cuts, len(pieces)], strict=True):
        parser: Think | ResumedParser = Think(starts_inside=inside)
        if before:
            parser = ResumedParser(parser, Think(starts_inside=inside), before)
        text = "".join(pieces[begin:end])
        found += read(parser, text)
        before += text
    assert told(found) == whole


def test_half_a_tag_is_sent_once() -> None:
    for rest, expected in (("nk>Yes", [Text("Yes")]), ("ng", [Reasoning("ng")])):
        first = Think(starts_inside=True)
        assert told(read(first, "hm</thi")) == ("hm</thi", "")
        resumed = ResumedParser(Think(starts_inside=True), Think(starts_inside=True), "hm</thi")
        assert told(read(resumed, rest)) == told(expected)


def test_newlines_in_reasoning_are_sent_once() -> None:
    resumed = ResumedParser(Think(starts_inside=True), Think(starts_inside=True), "one\n")
    assert "".join(piece.text for piece in read(resumed, "\ntwo\n")) == "\ntwo\n"
