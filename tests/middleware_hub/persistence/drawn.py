"""Requests that have something to do with each other, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.middleware_hub.persistence.lives import VOCABULARY, Ask
from tests.middleware_hub.toy import E_HEAD, E_TAIL, EOS, PIECES, A, B

NAMESPACES = [("", "", ""), ("", "", ""), ("", "", ""), ("other", "", "")]
LONG = "ab a" * 100
TEXT = st.text(alphabet="ab é", min_size=1, max_size=6)
SAMPLED = st.lists(st.sampled_from(list(PIECES)), min_size=1, max_size=6) | st.sampled_from(
    [[A, E_HEAD], [E_TAIL, EOS], [E_TAIL, B]]
)
PICK = st.integers(0, 20)
PARENT = st.none() | st.none() | st.none() | st.just("none") | st.just("unknown") | PICK
REQUEST = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["start", "continue", "continue", "again", "spell", "cut", "strip", "ids", "ids_cut"]),
        "namespace": st.integers(0, 3),
        "pick": PICK,
        "extra": TEXT | st.just("") | st.sampled_from(["<e>", "<t>", "<e><t>", "<e>a", "<"]),
        "cut": st.integers(1, 8),
        "long": st.booleans(),
        "parent": PARENT,
        "sampled": SAMPLED,
        "version": st.sampled_from(["1", "1", "2", "3", "new", "newer"]),
        "skips": st.sampled_from([True, True, True, False]),
    }
)


def request_of(
    how: dict[str, Any],
    said: list[tuple[int, str, str, list[int]]],
    number: int,
    namespaces: Sequence[tuple[str, ...]] = NAMESPACES,
) -> Ask | None:
    """A request that has something to do with what was said before: `(namespace, text, name, chain)` of each reply."""
    kind, extra = how["kind"], how["extra"]
    namespace, base, _, chain = said[how["pick"] % len(said)] if said else (how["namespace"], "a", "", [])
    ids = None
    if kind == "start" or not said:
        namespace, text = how["namespace"], (LONG if how["long"] else "") + (extra or "a")
    elif kind == "continue" or kind == "spell":
        text = base + extra
    elif kind == "again":
        text = base[: -how["cut"]] or "a"
    elif kind == "strip":
        text = base.strip() + extra
    elif kind == "cut":
        text = base[: -how["cut"]] + (LONG if how["long"] else "") + extra
    else:
        ids = (chain[: -how["cut"]] if kind == "ids_cut" else chain) + how["sampled"][: len(extra)]
        text = VOCABULARY.spell(ids)
    if not text or set(text) - set("ab é<et>" if ids is None else "ab é<et>\ufffd") or (ids is not None and not ids):
        return None
    parent = how["parent"]
    if isinstance(parent, int):
        parent = said[parent % len(said)][2] if said else None
    return Ask(
        namespaces[namespace], text, ids, parent, how["sampled"], f"r{number % 11}", how["version"], how["skips"]
    )
