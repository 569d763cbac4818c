"""Random histories of both kinds of prefix trees, compared with an oracle of whole keys."""

from __future__ import annotations

from array import array
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.prefix_tree.tree import Match, PrefixTree, StringTree, TokenTree
from tests.router.prefix_tree.naive_prefixes import NaivePrefixes
from tests.router.prefix_tree.recount import check, entries

LETTERS = "abé😀"
TENANTS = [f"http://w{number}:1" for number in range(5)]
keys = st.text(LETTERS, max_size=9)
tenants = st.sampled_from(TENANTS)


class Texts:
    """A letter is a character."""

    tree: ClassVar[type[PrefixTree[Any, Any]]] = StringTree
    unit = 1
    rest = 0

    @staticmethod
    def key(letters: str) -> str:
        return letters

    @staticmethod
    def letters(key: str) -> str:
        return key


class Ids:
    """A letter is a page of ids that differs from other pages in its last id; an incomplete page follows."""

    tree: ClassVar[type[PrefixTree[Any, Any]]] = TokenTree
    unit = 16
    rest = 7

    @staticmethod
    def key(letters: str) -> memoryview:
        pages = (15 * [70_000] + [LETTERS.index(letter)] for letter in letters)
        return memoryview(array("i", [token for page in pages for token in page] + Ids.rest * [70_000]))

    @staticmethod
    def letters(key: list[int]) -> str:
        assert len(key) % 16 == 0
        return "".join(LETTERS[token] for token in key[15::16])


class History(RuleBasedStateMachine):
    """Every operation of a tree, and after each step every query."""

    kind: type[Texts] | type[Ids] = Texts

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.naive = self.kind.tree(), NaivePrefixes()
        self.replica, self.naive_replica = self.kind.tree(), NaivePrefixes()

    def units(self, letters: int) -> int:
        return letters * self.kind.unit

    def held(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for key, accesses in entries(self.tree):
            for tenant, tick in accesses.items():
                found.setdefault(tenant, {})[self.kind.letters(key)] = tick
        return found

    def expect_evicted(self, among: list[str], max_letters: int, before: dict[str, dict[str, int]], lost: int) -> None:
        after = self.held()
        gone = {(t, mark) for t, marks in before.items() for mark in marks if mark not in after.get(t, {})}
        had = sum(self.naive.sizes().values())
        assert self.naive.evict(among, max_letters, gone)
        assert lost == self.units(had - sum(self.naive.sizes().values()))

    @rule(key=keys, tenant=tenants)
    def insert(self, key: str, tenant: str) -> None:
        self.tree.insert(self.kind.key(key), tenant)
        self.naive.insert(key, tenant)

    @rule(key=keys, tenant=tenants)
    def insert_again(self, key: str, tenant: str) -> None:
        """A repeated insertion changes no size."""
        self.insert(key, tenant)
        sizes, nodes = self.tree.tenant_sizes(), self.tree.nodes
        self.insert(key, tenant)
        assert (self.tree.tenant_sizes(), self.tree.nodes) == (sizes, nodes)

    @rule(key=keys, tenant=tenants, forget=st.booleans())
    def descend_and_follow(self, key: str, tenant: str, forget: bool) -> None:
        """Follow an earlier descent, after its longest holder may have been removed."""
        holders, matched = self.naive.holders(key)
        descent = self.tree.descend(self.kind.key(key))
        assert descent.matched == self.units(matched) * self.tree.width
        assert list(descent.path[-1].tenants if descent.path else ()) == holders
        if forget and holders:
            self.tree.remove_tenant(holders[0])
            del self.naive.held[holders[0]]
        self.tree.follow(descent, tenant)
        self.naive.insert(key, tenant)

    @rule(tenant=tenants, max_letters=st.integers(-1, 25))
    def evict(self, tenant: str, max_letters: int) -> None:
        before = self.held()
        self.expect_evicted([tenant], max(0, max_letters), before, self.tree.evict(tenant, self.units(max_letters)))

    @rule(max_letters=st.integers(-1, 60))
    def evict_all(self, max_letters: int) -> None:
        before = self.held()
        self.expect_evicted(TENANTS, max(0, max_letters), before, self.tree.evict_all(self.units(max_letters)))
        assert self.tree.size <= self.units(max(0, max_letters))

    @rule(tenant=tenants)
    def remove_tenant(self, tenant: str) -> None:
        size = self.naive.sizes().get(tenant, 0)
        assert self.tree.remove_tenant(tenant) == self.units(size)
        self.naive.held.pop(tenant, None)

    @rule()
    def evict_everything(self) -> None:
        self.tree.evict_all(0)
        self.naive.held = {}

    @rule(key=keys, tenant=tenants)
    def insert_elsewhere(self, key: str, tenant: str) -> None:
        self.replica.insert(self.kind.key(key), tenant)
        self.naive_replica.insert(key, tenant)

    @rule()
    def merge(self) -> None:
        self.tree.merge(self.replica.dump())
        self.naive.merge(self.naive_replica)

    @rule()
    def restart(self) -> None:
        """Replace the tree by one from its snapshot."""
        snapshot = self.tree.dump()
        self.tree = self.kind.tree.load(snapshot)
        assert self.tree.dump() == snapshot

    @rule(key=keys)
    def ask(self, key: str) -> None:
        """Queries change nothing."""
        before = self.tree.dump()
        asked = self.kind.key(key)
        given = self.units(len(key)) + self.kind.rest
        holders, matched = self.naive.holders(key)
        last = holders[-1] if holders else None
        match = self.tree.match(asked)
        assert match == Match(last, self.units(matched), given)
        assert self.tree.match(asked).tenant == last
        descent = self.tree.descend(asked)
        lengths = {
            tenant: min(node.end, descent.matched) // self.tree.width
            for node in descent.path
            for tenant in node.tenants
        }
        assert lengths == {t: self.units(length) for t, length in self.naive.lengths(key).items() if length}
        assert self.tree.dump() == before

    @invariant()
    def same(self) -> None:
        check(self.tree)
        assert self.held() == self.naive.held
        sizes = {tenant: self.units(size) for tenant, size in self.naive.sizes().items()}
        assert self.tree.tenant_sizes() == sizes
        assert all(self.tree.tenant_size(tenant) == sizes.get(tenant, 0) for tenant in TENANTS)
        assert (self.tree.size, self.tree.nodes) == (sum(sizes.values()), len(self.naive.marks()))
        assert self.tree.ticks == self.naive.ticks
        marks = [self.kind.letters(key) for key, _ in entries(self.tree)]
        if self.kind is Texts:
            assert marks == sorted(marks)


class IdHistory(History):
    kind = Ids


TestTexts = History.TestCase
TestIds = IdHistory.TestCase
TestTexts.settings = TestIds.settings = settings(stateful_step_count=30)
