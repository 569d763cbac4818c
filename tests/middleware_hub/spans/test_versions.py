"""The order of weight versions, and what happens to stamps when versions fall back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.spans.versions import FALL_AFTER, Stamp, VersionClock, WorkerVersions

NAMES = st.sampled_from(["default", "0", "1", "2", "3", "7", "10", "007", "step-a", "step-b", "-1", "1.5", "²", "٣"])


def clock(*observed: str) -> VersionClock:
    made = VersionClock()
    for version in observed:
        made.observe(version)
    return made


def test_integers_compare_as_integers() -> None:
    made = clock("9")
    assert made.order("9") < made.order("10") < made.order("100")
    assert made.order("7") < made.order("9")


def test_default_is_older_than_any_integer() -> None:
    made = clock("default", "0")
    assert made.order("default") < made.order("0")
    assert made.current == "0"


def test_other_strings_count_in_the_order_of_their_first_appearance() -> None:
    made = clock("zebra", "ant", "7-b")
    assert made.known == ["default", "zebra", "ant", "7-b"]
    assert made.current == "7-b"


def test_another_string_is_one_newer_than_everything_known() -> None:
    made = clock("41", "final")
    assert made.order("final") == 42


def test_an_integer_behind_other_strings_keeps_its_own_place() -> None:
    made = clock("41", "final", "43")
    assert made.current == "43"
    assert made.order("43") == 43


def test_digits_of_other_scripts_are_not_integers() -> None:
    """`"²".isdigit()` is true, and `int("²")` is an error."""
    made = clock("5", "²", "٣")
    assert made.order("²") == 6
    assert made.order("٣") == 7


def test_nothing_is_known_before_the_first_reply() -> None:
    made = VersionClock()
    assert made.current is None
    assert made.known == []
    assert made.age(made.now) == 0


def test_the_first_reply_tells_the_current_version_whatever_it_is() -> None:
    assert clock("default").current == "default"
    assert clock("17").current == "17"


def test_stragglers_of_an_older_version_change_nothing() -> None:
    made = clock("5", *["4"] * (FALL_AFTER - 1))
    assert made.current == "5"


def test_three_replies_in_a_row_below_make_theirs_the_current_one() -> None:
    assert clock("5", "2", "2", "2").current == "2"
    assert clock("5", "2", "3", "1").current == "1"


def test_a_reply_of_the_current_version_breaks_the_row() -> None:
    assert clock("5", "2", "2", "5", "2", "2").current == "5"


def test_a_reply_of_a_newer_version_breaks_the_row() -> None:
    assert clock("5", "2", "2", "6", "2", "2").current == "6"


def test_a_version_that_is_set_is_current_at_once_also_when_it_is_lower() -> None:
    made = clock("9")
    made.set("3")
    assert made.current == "3"
    made.set("4")
    assert made.current == "4"


def test_age_counts_versions() -> None:
    made = clock("3")
    stamp = made.now
    made.observe("8")
    assert made.age(stamp) == 5
    assert made.age(made.now) == 0


def test_what_was_hit_before_a_fall_counts_as_hit_at_the_fall() -> None:
    """Else the versions of what was left over from the other run would lie ahead, and it would outlive everything."""
    made = clock("100")
    old = made.now
    made.set("10")
    assert made.age(old) == 0
    made.observe("15")
    assert made.age(old) == 5


def test_a_fall_by_three_replies_stamps_again_too() -> None:
    made = clock("100")
    old = made.now
    for _ in range(FALL_AFTER):
        made.observe("10")
    made.observe("12")
    assert made.age(old) == 2


def test_a_second_fall_stamps_both_earlier_eras_again() -> None:
    made = clock("100")
    first = made.now
    made.set("10")
    second = made.now
    made.set("5")
    made.set("7")
    assert made.age(first) == made.age(second) == 2


def test_a_fall_makes_nothing_younger() -> None:
    """One worker without the last update makes the version fall and rise all the time: what is old must stay old."""
    made = clock("3")
    old = made.now
    made.observe("9")
    for _ in range(1_000):
        made.observe("8")
        made.observe("8")
        made.observe("8")
        made.observe("9")
        assert made.age(old) == 6
    assert made.now.era == 1_000
    assert len(made._falls) == 1


@given(st.lists(st.tuples(st.sampled_from(["observe", "set"]), NAMES), max_size=40))
def test_ages_are_those_of_stamps_that_each_fall_lowers(steps: list[tuple[str, str]]) -> None:
    made = VersionClock()
    stamps: list[Stamp] = []
    lowered: list[int] = []
    for what, version in steps:
        before = made.now.era
        getattr(made, what)(version)
        if made.now.era != before:
            lowered = [min(one, made.now.order) for one in lowered]
        stamps.append(made.now)
        lowered.append(made.now.order)
        assert [made.age(stamp) for stamp in stamps] == [made.now.order - one for one in lowered]


def test_setting_the_version_that_is_current_is_no_fall() -> None:
    made = clock("5")
    made.set("5")
    assert made.now == Stamp(0, 5)


def test_distance_tells_versions_apart_whenever_they_were_hit() -> None:
    made = clock("5", "8")
    assert made.distance("5") == 3
    assert made.distance("9") == -1
    assert made.distance("default") == 9


@given(st.lists(st.tuples(st.sampled_from(["observe", "set", "fall"]), NAMES), min_size=1, max_size=30))
def test_no_stamp_is_ever_from_the_future_and_stamps_age_in_the_order_they_were_made(
    steps: list[tuple[str, str]],
) -> None:
    """Of two hits the later one is never the older one, and no hit has an age below zero: the least recently hit goes first."""
    made = VersionClock()
    stamps: list[Stamp] = []
    for what, version in steps:
        if what == "fall":  # at another router, or in a snapshot
            made.repeat(what, version)
        else:
            getattr(made, what)(version)
        stamps.append(made.now)
        ages = [made.age(stamp) for stamp in stamps]
        assert ages[-1] == 0
        assert ages == sorted(ages, reverse=True)
        assert made.current in made.known
        assert made.known == sorted(made.known, key=made.order)


@given(st.lists(NAMES, min_size=1, max_size=20), st.lists(NAMES, max_size=5))
def test_asking_for_a_distance_does_not_move_the_clock(observed: list[str], asked: list[str]) -> None:
    made = clock(*observed)
    before = made.current, made.now
    for version in asked:
        made.distance(version)
    assert (made.current, made.now) == before


def test_asking_for_a_distance_does_not_make_a_version_newer_than_what_comes_later() -> None:
    """A lookup stamps no version: a string counts from its first appearance in a reply, not from a question about it."""
    asked, silent = clock("a"), clock("a")
    asked.distance("b")
    for made in (asked, silent):
        made.observe("c")
        made.observe("b")
    assert asked.known == silent.known


def test_a_very_long_integer_is_a_name() -> None:
    """Python refuses to read one of 5,000 digits, and nobody counts that far."""
    made = clock("7")
    made.set("9" * 5_000)
    assert made.current == "9" * 5_000
    assert made.order("8") == 8


def test_staleness_is_that_of_the_oldest_token() -> None:
    made = clock("3", "5", "6")
    assert made.staleness("6") == 0
    assert made.staleness("3") == 3
    assert made.staleness((("5", 2), ("3", 4), ("6", 9))) == 3


def test_what_is_newer_than_the_current_version_is_not_stale() -> None:
    made = clock("3")
    assert made.staleness("7") == 0
    assert made.staleness((("7", 2), ("3", 4))) == 0
    assert made.staleness("never-seen") == 0
    assert made.known == ["default", "3"], "asking makes nothing known"


def test_the_first_version_heard_of_a_worker_is_no_change() -> None:
    """Of the requests that a new router sent before the first reply, none is uncertain for that reply's sake."""
    workers = WorkerVersions()
    first, second = workers.moment(), workers.moment()
    assert not workers.changed_since("a", "7", first)
    workers.observe("a", "7")
    assert not workers.changed_since("a", "7", second)
    assert workers.changed_since("a", "8", second)
    workers.observe("a", "8")
    assert workers.changed_since("a", "8", second)
    assert not workers.changed_since("a", "8", workers.moment())


def test_a_version_set_everywhere_is_a_change_of_workers_that_nobody_heard_of() -> None:
    workers = WorkerVersions()
    before = workers.moment()
    workers.set_everywhere("7")
    workers.observe("a", "7")
    assert workers.changed_since("a", "7", before)
    assert not workers.changed_since("a", "7", workers.moment())
