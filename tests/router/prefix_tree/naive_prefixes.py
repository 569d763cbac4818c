"""An oracle for prefix trees that works the slow way, with whole keys and the times of their use.

Keys are texts; for a tree over ids each letter stands for a page of them. A *mark* is where the tree has a node: where a key
ended, or where two keys part.
"""

from __future__ import annotations

from collections.abc import Collection


def common(one: str, other: str) -> str:
    """Return the common prefix."""
    end = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    return one[: min(end, len(other))]


class NaivePrefixes:
    """Tenant -> the marks that it holds -> tick of the last access."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, int]] = {}
        self.ticks = 0

    def marks(self) -> set[str]:
        return {mark for marks in self.held.values() for mark in marks}

    def insert(self, key: str, tenant: str) -> None:
        if not key:
            return
        self.ticks += 1
        self.mark(key)
        mine = self.held.setdefault(tenant, {})
        mine[key] = self.ticks
        mine.update({mark: self.ticks for mark in self.marks() if key.startswith(mark)})

    def mark(self, key: str) -> None:
        """Add marks where this key parts from others. A tenant of a mark behind a new mark also holds the new mark."""
        for mark in self.marks() | {key}:
            fork = common(mark, key)
            behind = min((m for m in self.marks() if m.startswith(fork)), key=len, default=None)
            if fork and behind is not None:
                for marks in self.held.values():
                    if behind in marks:
                        marks[fork] = marks[behind]

    def holders(self, key: str) -> tuple[list[str], int]:
        """Return the holders of the longest known prefix, the last user last, and its length."""
        matched = max((len(common(mark, key)) for mark in self.marks()), default=0)
        if not matched:
            return [], 0
        behind = min((mark for mark in self.marks() if mark.startswith(key[:matched])), key=len)
        found = [(marks[behind], tenant) for tenant, marks in self.held.items() if behind in marks]
        return [tenant for _, tenant in sorted(found)], matched

    def lengths(self, key: str) -> dict[str, int]:
        """Return how much of this key each tenant holds."""
        return {tenant: max(len(common(mark, key)) for mark in marks) for tenant, marks in self.held.items()}

    def sizes(self) -> dict[str, int]:
        found = {}
        for tenant, marks in self.held.items():
            found[tenant] = len({mark[:end] for mark in marks for end in range(1, len(mark) + 1)})
        return found

    def leaves(self, tenant: str) -> list[tuple[int, str]]:
        """Return the marks that are no prefix of another mark of the tenant, least recently used first."""
        marks = self.held[tenant]
        return sorted(
            (tick, mark) for mark, tick in marks.items() if not any(m != mark and m.startswith(mark) for m in marks)
        )

    def drop(self, tenant: str, mark: str) -> None:
        del self.held[tenant][mark]
        if not self.held[tenant]:
            del self.held[tenant]

    def evict(self, tenants: Collection[str], max_letters: int, gone: Collection[tuple[str, str]]) -> bool:
        """Evict the least recently used leaves of these tenants. Return whether that can be exactly what a tree has evicted.

        Several evictions are possible if accesses of two replicas have the same tick.
        """
        if sum(self.sizes().get(tenant, 0) for tenant in tenants) <= max_letters:
            return not gone
        leaves = [(tick, t, mark) for t in tenants if t in self.held for tick, mark in self.leaves(t)]
        least = min(leaves)[0]
        for tick, tenant, mark in leaves:
            if tick == least and (tenant, mark) in gone:
                held = {t: dict(marks) for t, marks in self.held.items()}
                self.drop(tenant, mark)
                if self.evict(tenants, max_letters, [one for one in gone if one != (tenant, mark)]):
                    return True
                self.held = held
        return False

    def merge(self, other: NaivePrefixes) -> None:
        for mark in other.marks():
            self.mark(mark)
        merged = NaivePrefixes()
        merged.held = {tenant: dict(marks) for tenant, marks in other.held.items()}
        for mark in self.marks():
            merged.mark(mark)
        for tenant, marks in merged.held.items():
            mine = self.held.setdefault(tenant, {})
            for mark, tick in marks.items():
                mine[mark] = max(tick, mine.get(mark, 0))
        self.ticks = max(self.ticks, other.ticks)
