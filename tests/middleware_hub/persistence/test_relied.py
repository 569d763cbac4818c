"""What a tree drops while a store reads for it."""

from __future__ import annotations

from middleware_hub.persistence.memory import KnownRecords
from middleware_hub.store.look_up import complete
from middleware_hub.store.records import SpanRecord


def record(name: bytes, parent: bytes | None) -> SpanRecord:
    return SpanRecord(name, b"a", ("", "", ""), 1, "1", 0, 0, "", b"", parent)


def test_a_reply_whose_prompt_was_dropped_meanwhile_is_not_damaged() -> None:
    """The store left the prompt out, because it was known. It is read afterwards."""
    tree = {b"a": object()}
    known = KnownRecords(tree)
    assert b"a" in known
    del tree[b"a"]
    reply = record(b"b", b"a")
    assert complete([reply], known) == ([reply], 0)
    assert known.gone() == {b"a"}
    assert b"a" not in known
    assert complete([reply], known) == ([], 1)
