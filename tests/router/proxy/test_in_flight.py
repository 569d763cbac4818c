"""Generations in flight are found by their names as a search through all of them would find them."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.proxy import in_flight as module
from router.proxy.in_flight import RID_LENGTH, GenerationsInFlight, InFlight
from router.workers.worker import Worker

# Short ones collide and are prefixes of each other, long ones look like UUIDs.
RIDS = st.text(alphabet="ab", min_size=1, max_size=3) | st.text(alphabet="ab", min_size=1, max_size=2).map(
    lambda end: "0" * RID_LENGTH + end
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.lists(RIDS, max_size=3), st.integers(0, 3)),
        st.tuples(st.just("over"), st.integers(0, 20), st.just(0)),
    ),
    max_size=20,
)


@given(steps=STEPS, rid=RIDS, number=st.integers(0, 1), tenant=st.sampled_from((None, "a", "b")))
def test_names_and_prefixes_are_found(
    steps: list[tuple[str, object, int]], rid: str, number: int, tenant: str | None
) -> None:
    """Of all, or of a tenant's only; and what shares a worker is found whosever it is."""
    workers = [Worker("http://a:1"), Worker("http://b:1")]
    in_flight, there = GenerationsInFlight(), list[InFlight]()
    for what, value, at in steps:
        if what == "begin":
            request = InFlight(value, tenant="ab"[at // 2])  # type: ignore[arg-type]
            request.worker = workers[at % 2]
            in_flight.begin(request)
            there.append(request)
        elif there:
            in_flight.over(there.pop(int(value) % len(there)))  # type: ignore[call-overload]
    assert len(in_flight) == len(there)

    everything = [(request, position, name) for request in there for position, name in enumerate(request.names)]
    its_own = [one for one in everything if tenant is None or one[0].tenant == tenant]
    exact = {(request, position) for request, position, name in its_own if name == rid}
    begun = {(request, position) for request, position, name in its_own if name.startswith(rid)}
    found = in_flight.named(rid, tenant)
    assert len(found) == len(set(found))
    assert set(found) == (exact or begun)

    mine = [request for request in there if request.worker is workers[number]]
    longer = any(name != rid and name.startswith(rid) for request in mine for name in request.names)
    unnamed = len(rid) < RID_LENGTH and any(not request.names for request in mine)
    assert in_flight.shares_prefix(rid, workers[number]) is (longer or unnamed)


def test_a_later_attempt_of_the_same_name_shares_its_beginning() -> None:
    """Two requests under one id: the end of the one would end the other, which is at its second attempt at that worker."""
    name, worker = "0" * RID_LENGTH, Worker("http://a:1")
    in_flight, first, second = GenerationsInFlight(), InFlight([name]), InFlight([name])
    for request in (first, second):
        request.worker = worker
        in_flight.begin(request)
    assert not in_flight.shares_prefix(name, worker)
    second.rids = {}
    assert not in_flight.shares_prefix(name, worker), "no worker has it now"
    second.rids = {0: f"{name}-1"}
    assert in_flight.shares_prefix(name, worker)
    assert not in_flight.shares_prefix(f"{name}-1", worker)
    assert not in_flight.shares_prefix(name, Worker("http://b:1"))


def test_what_begins_while_everything_ends_is_to_end_too() -> None:
    in_flight = GenerationsInFlight()
    before, during, after = InFlight(["a"]), InFlight(["b"]), InFlight(["c"])
    in_flight.begin(before)
    with in_flight.ending():
        in_flight.begin(during)
    in_flight.begin(after)
    assert [request.unwanted for request in (before, during, after)] == [True, True, False]


def test_a_batch_is_unwanted_when_all_of_it_is() -> None:
    """While one of its generations is still wanted, another worker is asked for it."""
    request = InFlight(("a", "b"))
    assert not request.unwanted
    request.end((1,))
    assert not request.unwanted
    request.end((0,))
    assert request.unwanted
    nameless = InFlight(())
    assert not nameless.unwanted
    nameless.end()
    assert nameless.unwanted


def test_a_longer_name_at_another_worker_shares_nothing() -> None:
    """So a client that leaves has its generation aborted, whatever other workers have."""
    one, other = Worker("http://a:1"), Worker("http://b:1")
    name = "0" * RID_LENGTH
    in_flight, long, mine = GenerationsInFlight(), InFlight((name + "1",)), InFlight((name,))
    for request, worker in ((long, one), (mine, other)):
        request.worker = worker
        in_flight.begin(request)
    assert not in_flight.shares_prefix(name, other)
    assert in_flight.shares_prefix(name, one)


@given(
    st.lists(st.tuples(st.sampled_from([0, 1]), st.text("ab", max_size=3), st.booleans(), st.booleans()), max_size=6),
    st.lists(st.text("ab", max_size=3), max_size=4),
)
def test_ids_that_are_alone_are_those_that_share_no_prefix(
    made: list[tuple[int, str, bool, bool]], asked: list[str]
) -> None:
    """One at a time or thousands at once, short ids and long ones."""
    in_flight, workers = GenerationsInFlight(), [Worker("http://a:1"), Worker("http://b:1")]
    for number, rid, is_long, is_named in made:
        name = rid + "0" * RID_LENGTH if is_long else rid
        request = InFlight((name,) if is_named else ())
        request.worker, request.rids = workers[number], {0: name}
        in_flight.begin(request)
    rids = [*asked, *(rid + "0" * RID_LENGTH for rid in asked), *(rid for _, rid, _, _ in made)]
    expected = [rid for rid in rids if not in_flight.shares_prefix(rid, workers[0])]
    assert sorted(in_flight.alone(rids, workers[0])) == sorted(expected)


@given(there=st.lists(st.lists(RIDS, max_size=3), max_size=6), names=st.lists(RIDS, max_size=4))
def test_names_overlap_where_one_begins_another(there: list[list[str]], names: list[str]) -> None:
    in_flight = GenerationsInFlight()
    for held in there:
        in_flight.begin(InFlight(held))
    others = {*names, *(name for held in there for name in held)}
    overlap = any(
        one != other and (one.startswith(other) or other.startswith(one)) for one in names for other in others
    )
    assert in_flight.overlap(names) is overlap


def test_names_that_share_their_beginnings_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand characters each, every one of which leads to another name in flight: a name took 30 ms, a batch minutes."""
    searched = 0

    def counted(names: list[str], *where: Any) -> int:
        nonlocal searched
        searched += 1
        return bisect_right(names, *where)

    in_flight = GenerationsInFlight()
    held = [InFlight(["a" * shared + "A"]) for shared in range(1023)]
    for one in held:
        in_flight.begin(one)
    names = ["a" * 1020 + f"{number:04}" for number in range(1000)]
    monkeypatch.setattr(module, "bisect_right", counted)
    for name in names:
        in_flight.overlap([name])
    assert searched <= 2 * len(names)
    for one in held[10:]:
        in_flight.over(one)
    assert not in_flight.overlap(names), "it is told exactly again"
    assert in_flight.overlap([*names, "aaAb"])


class Looked(InFlight):
    """Counts how often somebody asks which worker has it."""

    asked = 0

    @property
    def worker(self) -> Worker | None:  # type: ignore[override]
        Looked.asked += 1
        return self._worker

    @worker.setter
    def worker(self, worker: Worker | None) -> None:
        self._worker = worker


def test_clients_that_leave_all_at_once_hold_nobody_up_for_long() -> None:
    """With ids of their own, which are short: what each leaves was compared with a sorted list of all, made anew."""
    in_flight, worker = GenerationsInFlight(), Worker("http://a:1")
    for number in range(4000):
        request = Looked([f"run7-{number:04}"])
        request.worker = worker
        in_flight.begin(request)
    Looked.asked = 0
    for number in range(500):
        assert in_flight.alone([f"run7-{number:04}"], worker)
    assert Looked.asked <= 10 * 500
