"""What chains spell, without a store: many short histories."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.spans.chain import chain_ids, unpack_ids
from middleware_hub.store.chains import Stored
from middleware_hub.store.paths import TextPath
from middleware_hub.store.records import Serials, new_id
from tests.conftest import examples
from tests.middleware_hub.persistence.drawn import NAMESPACES, REQUEST, request_of
from tests.middleware_hub.persistence.lives import CheckedSpelling, Life

T = TypeVar("T")


def done(work: Coroutine[Any, Any, T]) -> T:
    """Run what waits for nothing: a life without a store."""
    try:
        work.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    raise AssertionError("it waits")


@settings(max_examples=examples(2400), deadline=None)
@given(st.lists(st.tuples(REQUEST, st.booleans()), min_size=2, max_size=8))
def test_a_chain_is_spelled_from_the_last_place_that_is_known(steps: list[tuple[dict[str, Any], bool]]) -> None:
    """The answer is what the whole chain spells, see `CheckedSpelling`. A reply that came from a store knows less."""
    life, spelling = Life(None, Serials()), CheckedSpelling()
    said: list[tuple[int, str, str, list[int]]] = []
    for number, (how, from_store) in enumerate(steps):
        ask = request_of(how, said, number)
        if ask is None:
            continue
        ask.name = f"r{number}"
        text = str(done(life.ask(ask))["text"])
        reply = life.tree.reply(ask.namespace, ask.name)
        assert reply is not None
        span, line = reply.span, None if reply.continues is None else reply.continues.span
        path = TextPath(ask.namespace, text, None if line is None else line.stored.state)
        plain, spelled = spelling.apart(span, path, line)
        state = path.state(len(text))
        span.stored = Stored(
            *(new_id(), b"", number, plain, None if from_store else state), spelled=None if from_store else spelled
        )
        said.append((NAMESPACES.index(ask.namespace), text, ask.name, unpack_ids(chain_ids(span, span.count))))
