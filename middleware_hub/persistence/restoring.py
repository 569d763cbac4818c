"""Records of a store, put into the radix tree by the code that records."""

from __future__ import annotations

from collections.abc import Container

from middleware_hub.radix.node import StoredSpan
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.store.chains import span_of
from middleware_hub.store.protocol import Found


class Relied:
    """The records of a tree, as `Query.known`. Notes which of them a store leaves out because the tree has them.

    A store may ask several times while it reads. What it was told is true until `gone` is called: otherwise what builds on a
    record that the tree drops meanwhile would look damaged.
    """

    def __init__(self, stored: Container[bytes]) -> None:
        self._stored = stored
        self._relied: set[bytes] = set()

    def __contains__(self, record: object) -> bool:
        if record in self._relied:
            return True
        if not isinstance(record, bytes) or record not in self._stored:
            return False
        self._relied.add(record)
        return True

    def gone(self) -> set[bytes]:
        """Return the records left out that the tree has dropped since. They are no longer known."""
        gone = {record for record in self._relied if record not in self._stored}
        self._relied -= gone
        return gone


def restore(tree: RadixTree, found: Found) -> dict[bytes, bytes]:
    """Put what a look-up found into a tree.

    Returns the records that are needed but neither found nor in the tree, by id with their roots; what builds on them is left
    out.
    """
    lacking: dict[bytes, bytes] = {}
    contexts: list[TokenSpan] = []
    known = tree.stored
    for record in found.records:
        if record.id in known:
            continue
        lacks = [link for link in record.links if link not in known]
        if lacks:
            lacking.update(dict.fromkeys(lacks, record.root))
            continue
        span, mark = span_of(record, known), found.marks.get(record.root)
        tree.restore(
            StoredSpan(
                span,
                record.id,
                record.namespace,
                record.text,
                None if record.base is None else known[record.base],
                None if record.line is None else known[record.line],
                record.tail,
                record.serial,
                record.stamp if mark is None else mark.stamp,
                mark is not None and mark.retrieved,
            )
        )
        if not span.sampled:
            tree.hold(span)
            contexts.append(span)
    for span in contexts:
        tree.release(span)  # a span on which nothing builds is removed again
    return lacking
