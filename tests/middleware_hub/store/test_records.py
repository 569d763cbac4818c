"""Records as bytes: what comes back, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.spans.chain import SpanFlag
from middleware_hub.store import records
from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.look_up import complete
from middleware_hub.store.records import Mark, Serials, SpanRecord, content_id, decode, encode, faults, new_id
from tests.middleware_hub.store.world import EOS, World


def reply(**changes: object) -> SpanRecord:
    made = World().turn(None, "user ", "grüße", names=("a", "b"), tail=(EOS,)).reply
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize(
    "record",
    [
        reply(),
        reply(versions=(("1", 2), ("2", 6)), ends=b"\0" * 24, logprobs=None, extras=("routed_experts",)),
        reply(text="", finish="abort", flags=SpanFlag.MISMATCH, visible=0),
        World().turn(None, "", "x").context,
    ],
)
def test_a_record_comes_back(record: SpanRecord) -> None:
    assert decode(encode(record)) == record


@settings(max_examples=300)
@given(st.data())
def test_a_flipped_bit_is_seen(data: st.DataObject) -> None:
    sealed = bytearray(encode(reply()))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedRecordError):
        decode(bytes(sealed))


@pytest.mark.parametrize("size", [0, 1, 8, 9, 60])
def test_a_cut_record_is_seen(size: int) -> None:
    with pytest.raises(DamagedRecordError):
        decode(encode(reply())[:size])


def test_a_newer_format_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as future:
        future.setattr(records, "FORMAT", records.FORMAT + 1)
        newer = encode(reply())
    with pytest.raises(StoreMismatchError, match="update the router"):
        decode(newer)


def test_what_is_whole_but_no_span_is_damage() -> None:
    with pytest.raises(DamagedRecordError, match="no span"):
        decode(records.seal(b"\x01"))


def test_a_later_field_is_no_damage() -> None:
    """A router that knows fewer fields of the same format reads what it knows."""
    fields = [*msgspec.to_builtins(reply(), builtin_types=(bytes,)), "later"]
    assert decode(records.seal(msgspec.msgpack.encode(fields))).text == reply().text


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        encode(reply(text="\ud800"))


def test_a_context_is_named_by_its_content() -> None:
    one, same, other = World().turn(None, "a", "x"), World().turn(None, "a", "y"), World().turn(None, "b", "x")
    assert one.context is not None
    assert same.context is not None
    assert other.context is not None
    assert one.context.id == same.context.id == content_id(one.context) == one.context.root
    assert one.context.serial != same.context.serial
    assert one.context.id != other.context.id
    there = World().turn(None, "a", "x", namespace=("t", "", "")).context
    assert there is not None
    assert there.id != one.context.id


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": ("t", "", "")},
        {"parent": b"p" * 16},
        {"take": 7},
        {"line": b"l" * 16},
        {"base": b"b" * 16},
        {"start": 7},
        {"width": 7},
        {"text": "an"},
        {"ids": b"\1\0\0\0"},
        {"flags": 7},
        {"ends": b"\1\0\0\0"},
        {"media": ((0, 4, "sha256:" + "0" * 64),)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_all_of_its_content_names_a_context(changes: dict[str, object]) -> None:
    """Two texts may have the same ids: a placeholder is spelled like any other, whatever picture it stands for."""
    context = World().turn(None, "a", "x").context
    assert context is not None
    changed = msgspec.structs.replace(context, **changes)
    assert changed != context
    assert content_id(changed)[8:] != content_id(context)[8:]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": b"\0"}, "logprobs"),
        ({"ids": b"\0\0\0"}, "int32"),
        ({"visible": 99}, "visible"),
        ({"versions": (("1", 1),)}, "versions"),
        ({"base": None}, "base"),
        ({"base": b"x" * 16}, "neither"),
        ({"text": "longer than all of it"}, "longer"),
        ({"id": b"short"}, "16 bytes"),
        ({"ends": b"\0"}, "ends"),
        ({"parent": None, "base": None, "text": "user grüße"}, "its own root"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], words: str) -> None:
    assert faults(reply()) == []
    assert any(words in fault for fault in faults(reply(**changes)))


def test_a_changed_context_is_named() -> None:
    context = World().turn(None, "a", "x").context
    assert context is not None
    assert faults(context, thorough=True) == []
    changed = msgspec.structs.replace(context, ids=b"abcd")
    assert faults(changed, thorough=True) == ["the id of a context is not that of its content"]


@pytest.mark.parametrize(
    ("changes", "continuable"),
    [
        ({}, True),
        ({"width": 0, "text": ""}, False),
        ({"visible": 0}, False),
        ({"flags": SpanFlag.MISMATCH}, False),
        ({"flags": SpanFlag.SPLIT}, True),
    ],
)
def test_which_replies_longer_texts_continue(changes: dict[str, object], continuable: bool) -> None:
    """None that nobody saw a token of, though a part of one may be seen, and none whose ids do not spell its text."""
    assert reply(**changes).continuable is continuable


def test_new_ids_follow_each_other() -> None:
    made = [new_id() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    assert made[0] < made[-1]


def test_serials_grow() -> None:
    serials = Serials()
    made = [serials.next() for _ in range(1_000)]
    assert made == sorted(set(made))


def test_marks_merge_into_the_latest() -> None:
    early, late = Mark(b"r", 1, "7", retrieved=True), Mark(b"r", 2, "8")
    assert early.merged(late) == late.merged(early) == Mark(b"r", 2, "8", retrieved=True)


def test_records_come_behind_what_they_build_on() -> None:
    world = World()
    first = world.turn(None, "a", "b")
    second = world.turn(first, "c", "d")
    assert first.context is not None
    every = [*second.records, *first.records]
    whole, left_out = complete(every, ())
    assert ([r.id for r in whole], left_out) == ([r.id for r in [*first.records, *second.records]], 0)
    whole, left_out = complete([*second.records, first.reply], ())
    assert (whole, left_out) == ([], 3)
    whole, left_out = complete([*second.records, first.reply], {first.context.id})
    assert ([r.id for r in whole], left_out) == ([first.reply.id, *(r.id for r in second.records)], 0)


def test_a_circle_is_left_out() -> None:
    one = reply(id=b"1" * 16, parent=b"2" * 16, line=None)
    two = reply(id=b"2" * 16, parent=b"1" * 16, line=None)
    assert complete([one, two], ()) == ([], 2)
