"""The shelf against an oracle that keeps one list of everything, and searches it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.media.picture import Picture
from middleware_hub.media.shelf import Shelf
from tests.conftest import examples


def picture(number: int, size: int) -> Picture:
    return Picture(f"sha256:{number:064x}", "image/png", 1, 1, bytes(size), True)


PICTURES = [picture(number, size) for number, size in enumerate((10, 20, 30, 100, 250, 500))]
BUDGET = 600


class Oracle:
    """Pictures in the order of their last use, each with its tenants."""

    def __init__(self) -> None:
        self.held: list[tuple[Picture, set[str]]] = []
        self.names: list[str] = []
        self.gone = set[tuple[str, str]]()

    def touch(self, digest: str) -> set[str] | None:
        for at, (picture, tenants) in enumerate(self.held):
            if picture.digest == digest:
                self.held.append(self.held.pop(at))
                return tenants
        return None

    def put(self, tenant: str, picture: Picture) -> None:
        tenants = self.touch(picture.digest)
        if tenants is None:
            tenants = set()
            self.held.append((picture, tenants))
            while sum(one.held_bytes for one, _ in self.held) > BUDGET and len(self.held) > 1:
                others = [one for one, _ in self.held[:-1]]
                unnamed = [one for one in others if one.digest not in self.names]
                goes = (unnamed or others)[0]
                self.gone |= {(who, goes.digest) for one, having in self.held if one is goes for who in having}
                self.held = [pair for pair in self.held if pair[0] is not goes]
        tenants.add(tenant)
        self.gone.discard((tenant, picture.digest))

    def get(self, tenant: str, digest: str) -> Picture | None:
        for picture, tenants in self.held:
            if picture.digest == digest and tenant in tenants:
                self.touch(digest)
                return picture
        return None


STEPS = st.lists(
    st.tuples(st.sampled_from(("put", "put", "get", "use", "free")), st.sampled_from("ab"), st.integers(0, 5)),
    min_size=20,
    max_size=60,
)


@settings(max_examples=examples(6000))
@given(STEPS)
def test_random_steps_agree_with_the_oracle(steps: list[tuple[str, str, int]]) -> None:
    shelf, oracle = Shelf(BUDGET), Oracle()
    for step, tenant, number in steps:
        one = PICTURES[number]
        if step == "put":
            shelf.put(tenant, one)
            oracle.put(tenant, one)
        elif step == "get":
            assert shelf.get(tenant, one.digest) is oracle.get(tenant, one.digest)
        elif step == "use":
            shelf.use(one.digest)
            oracle.names.append(one.digest)
            oracle.touch(one.digest)
        elif one.digest in oracle.names:
            shelf.free(one.digest)
            oracle.names.remove(one.digest)
            oracle.touch(one.digest)
        assert shelf.count == len(oracle.held)
        assert shelf.bytes == sum(held.held_bytes for held, _ in oracle.held)
        assert shelf.bytes <= BUDGET or shelf.count == 1
    for one in PICTURES:
        for tenant in "ab":
            assert shelf.get(tenant, one.digest) is oracle.get(tenant, one.digest)
            assert shelf.gone(tenant, one.digest) == ((tenant, one.digest) in oracle.gone)


def test_only_the_last_that_went_are_known() -> None:
    shelf = Shelf(1, max_gone=2)
    for one in PICTURES[:4]:
        shelf.put("a", one)
    assert [shelf.gone("a", one.digest) for one in PICTURES[:4]] == [False, True, True, False]
    assert not shelf.gone("b", PICTURES[2].digest)


def test_the_same_bytes_are_held_once_for_all_tenants() -> None:
    shelf, again = Shelf(BUDGET), picture(1, 20)
    first = shelf.put("a", PICTURES[1])
    assert shelf.get("b", first.digest) is None
    assert shelf.put("b", again) is first
    assert shelf.get("b", first.digest) is first
    assert (shelf.count, shelf.bytes) == (1, first.held_bytes)


def test_unnamed_pictures_go_before_named_ones() -> None:
    shelf = Shelf(BUDGET)
    for one in PICTURES[:4]:
        shelf.put("", one)
    shelf.use(PICTURES[0].digest)
    shelf.use(PICTURES[0].digest)
    shelf.free(PICTURES[0].digest)
    shelf.get("", PICTURES[1].digest)
    shelf.put("", PICTURES[4])  # more than all the others leave room for
    assert [shelf.get("", one.digest) is not None for one in PICTURES[:5]] == [False, False, False, False, True]
    assert (shelf.evicted, shelf.evicted_named) == (4, 1)


def test_names_outlive_the_bytes() -> None:
    shelf = Shelf(PICTURES[1].held_bytes + PICTURES[2].held_bytes)
    shelf.use(PICTURES[1].digest)
    shelf.put("", PICTURES[1])
    shelf.put("", PICTURES[3])  # nothing else is there to go
    assert shelf.get("", PICTURES[1].digest) is None
    shelf.put("", PICTURES[1])
    shelf.put("", PICTURES[2])
    shelf.put("", PICTURES[0])  # the named one is older, and stays
    assert shelf.get("", PICTURES[1].digest) is PICTURES[1]
    assert shelf.get("", PICTURES[2].digest) is None


def test_a_picture_that_is_named_no_more_goes_as_the_others() -> None:
    shelf = Shelf(PICTURES[1].held_bytes + PICTURES[2].held_bytes)
    shelf.put("", PICTURES[1])
    shelf.use(PICTURES[1].digest)
    shelf.free(PICTURES[1].digest)
    assert shelf.get("", PICTURES[1].digest) is PICTURES[1]
    shelf.put("", PICTURES[2])
    shelf.put("", PICTURES[0])
    assert shelf.get("", PICTURES[1].digest) is None
    assert shelf.evicted_named == 0


def test_a_look_keeps_a_picture() -> None:
    shelf = Shelf(PICTURES[1].held_bytes + PICTURES[2].held_bytes)
    shelf.put("", PICTURES[1])
    shelf.put("", PICTURES[2])
    shelf.get("", PICTURES[1].digest)
    shelf.put("", PICTURES[0])
    assert [shelf.get("", one.digest) is not None for one in PICTURES[:3]] == [True, True, False]


def test_another_tenants_look_does_not_keep_a_picture() -> None:
    shelf = Shelf(PICTURES[1].held_bytes + PICTURES[2].held_bytes)
    shelf.put("a", PICTURES[1])
    shelf.put("a", PICTURES[2])
    assert shelf.get("b", PICTURES[1].digest) is None
    shelf.put("a", PICTURES[0])
    assert shelf.get("a", PICTURES[1].digest) is None
    assert shelf.get("a", PICTURES[2].digest) is not None


def test_a_picture_that_went_is_found_while_somebody_holds_it() -> None:
    """A request needs its pictures until it is answered, whatever others send meanwhile; and only its own tenant finds them."""
    shelf = Shelf(PICTURES[1].held_bytes)
    held = shelf.put("a", picture(1, 20))
    shelf.put("a", PICTURES[2])
    assert shelf.get("a", held.digest) is None
    assert shelf.find("a", held.digest) is held
    assert shelf.find("b", held.digest) is None
    digest = held.digest
    del held
    assert shelf.find("a", digest) is None
