"""Balance first, then the longest cached prefix that tells workers apart.

A worker has cached the prompts that it got, so one tree of token ids and one of texts record them. A prompt then goes to the
worker with its longest known prefix. Alone, that rule fails in a run in which all prompts start alike: the first worker has the
system prompt, so it gets every request. Three rules prevent this:

- A prefix only counts for a worker if others lack it. What more than half of the fleet holds is common to all, and lengths and
  shares are measured from its end.
- A prompt that continues a conversation stays on its worker, whatever share of it is known (see `remembered_prompts`). Replies
  that pass through the router are remembered after their prompts, which tells samples of one prompt apart.
- A worker that recently got too much work gets no new conversations for its cache; if it also has too many requests in flight,
  it gets no further turns of its old conversations either.

For workers that publish KV cache events, the events count instead of the tree, which does not know evictions.

What is said of workers here holds for targets: each rank of a worker with several has a cache of its own.

A decision reveals nothing of other tenants' prompts: the trees hold each tenant's prompts after a salt of its own. Prompts with
different salts for the engines (`router/kv_cache/salts.py`), or of different adapters, are kept apart in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, AnyStr

import blake3
import msgspec

from router.config.flag import FACTOR, NOT_NEGATIVE, SHARE, flag, share
from router.kv_cache.index import KvIndex
from router.policies.base import PolicyParameters
from router.policies.homes import ConversationHomes, number_of
from router.prefix_tree.remembered_prompts import NEGLIGIBLE, Known, RememberedPrompts
from router.prefix_tree.snapshot import SnapshotError
from router.prefix_tree.tree import Descent, ExactTokenTree, Key, StringTree, pack_ids
from router.workers.policy import ENOUGH_CHARACTERS, ENOUGH_IDS, Decision, RouteQuery
from router.workers.worker import Target

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_MAX_WEIGHT = 1e100
_SLIP_IDS = 48
_SLIP_CHARACTERS = 160
"""Length of a prompt's end that the next turn may drop: a generation prompt, an open reasoning block. A match after the common
prefix that is longer than this is no coincidence."""

_SALT = 16
"""Units of salt in front of a tenant's prompts."""

_BOUND = 1.08
"""Times the mean of recent work: a worker above it has too much. The bound for a run is 1.15, and one request may be long."""

_SLACK = 4
"""Requests in flight that a worker may have more than the least loaded one, whatever its recent work."""

_FEW = 2
"""Prompts that a worker may have been given more than the mean, because a mean of a few requests says little."""

_MANY = 16
"""The same for turns of its own conversations: a group of samples that returns at once is no imbalance."""

_HALF_LIFE = 2048.0
"""Decisions after which recent work counts half."""

_UNITS_PER_STEP = 1 << 13
"""Units of a departed worker that one call forgets, so that no request waits for the rest."""

_NEAR = 3
"""A worker counts as least loaded if it has no more in flight than the idlest one, and a share of that: one in so many."""

_EQUALS = 8
"""How many of the least loaded workers are compared by their recent work."""


@dataclass(frozen=True)
class CacheAwareParameters(PolicyParameters):
    """Times are in seconds.

    The fleet is out of balance where the busiest worker has more than `balance_abs` requests in flight above the idlest,
    and more than `balance_rel` times as many. `max_tree_size` holds for characters and ids each.
    """

    TITLE = "the policy cache_aware"

    threshold: float = flag(
        "--cache-threshold", 0.3, "choose a worker that has more than this share of a prompt cached", limit=SHARE
    )
    balance_abs: int = flag(
        "--balance-abs-threshold", 64, "requests by which the busiest worker may exceed the idlest", limit=NOT_NEGATIVE
    )
    balance_rel: float = flag(
        "--balance-rel-threshold",
        1.5,
        "factor by which it may; above both, the least loaded worker is chosen",
        limit=FACTOR,
    )
    eviction_interval: float = flag("--eviction-interval-secs", 60.0, "time between two evictions")
    max_tree_size: int = flag("--max-tree-size", 1 << 26, "most characters, and most ids, of prompts to remember")
    snapshot: Path | None = flag(
        "--policy-snapshot",
        None,
        "file that keeps the remembered prompts across restarts, written at intervals and at the end",
    )
    snapshot_interval: float = flag("--policy-snapshot-interval-secs", 60.0, "time between two snapshots")
    kv_events: bool = flag(
        "--kv-events", False, "follow the cache events of workers that were started with --kv-events-config"
    )

    def of_process(self, number: int, count: int) -> CacheAwareParameters:
        size = share("--max-tree-size", self.max_tree_size, number, count)
        snapshot = self.snapshot
        if snapshot is not None and number > 1:  # the first process has the file that a single one would have
            snapshot = snapshot.with_name(f"{snapshot.name}.{number}")
        return replace(self, max_tree_size=size, snapshot=snapshot)


class CacheAware:
    """Chooses by balance, then by the longest cached prefix that tells workers apart, then the least loaded worker.

    Attributes:
        parameters: the flags.
        index: the workers' own reports of their caches; None if they are not asked.
        texts: the tree of prompts that came as text.
        ids: the tree of prompts whose ids are known.
        homes: the workers of conversations whose earlier turns another process may have routed; None if there is no other.
    """

    PARAMETERS = CacheAwareParameters
    reads_prompts = True

    def __init__(self, parameters: CacheAwareParameters | None = None, index: KvIndex | None = None) -> None:
        """`index`: by default, a new one if the parameters ask for KV events."""
        self.parameters = parameters or CacheAwareParameters()
        self.index = index or (KvIndex() if self.parameters.kv_events else None)
        self.texts = StringTree()
        self.ids = ExactTokenTree()
        self._texts = RememberedPrompts(self.texts, _SLIP_CHARACTERS)
        self._ids = RememberedPrompts(self.ids, _SLIP_IDS)
        self._recent = RecentWork(_HALF_LIFE)
        self._leaving: set[str] = set()
        self._next = 0
        self._offered: Sequence[Target] = ()
        self._by_name: dict[str, Target] = {}
        self.homes: ConversationHomes | None = None
        self._by_number: dict[int, Target] = {}

    def select(self, targets: Sequence[Target], query: RouteQuery) -> Decision:
        """Return a target with the reason.

        `continued`: it has what this prompt continues. `cached`: it has enough of this prompt. `spilled`: the worker that has
        it was given too much. `imbalance`: the fleet is out of balance. `least_loaded`: no particular worker has it.
        `no_prompt`: the prompt is unknown.
        """
        if query.token_ids is not None:
            ids = pack_ids(query.token_ids)
            salt = _id_salt(query.tenant, query.salt, query.adapter)
            descent = self.ids.descend(salt + ids)
            known = self._ids.known(descent, len(salt) // 4, len(targets))
            if self.index is not None:
                known = _corrected(known, self.index, memoryview(ids).cast("I"), targets, query)
            return self._decide(targets, query, self._ids, descent, known, len(ids) // 4, _SLIP_IDS)
        if query.text is not None:
            before = _text_salt(query.tenant, query.salt, query.adapter)
            text_descent = self.texts.descend(before + query.text)
            known = self._texts.known(text_descent, len(before), len(targets))
            return self._decide(targets, query, self._texts, text_descent, known, len(query.text), _SLIP_CHARACTERS)
        return Decision(self._least(targets, [target.inflight for target in targets]), "no_prompt")

    def replied(self, target: Target, query: RouteQuery, beginning: str | Sequence[int]) -> None:
        """Remember the start of a reply after its prompt."""
        if target.name in self._leaving or not beginning:
            return
        if isinstance(beginning, str):
            if query.text is not None and query.token_ids is None:
                text = query.text + beginning[:ENOUGH_CHARACTERS]
                self._texts.replied(_text_salt(query.tenant, query.salt, query.adapter) + text, target.name)
        elif query.token_ids is not None:
            key = pack_ids(query.token_ids) + pack_ids(beginning[:ENOUGH_IDS])
            self._ids.replied(_id_salt(query.tenant, query.salt, query.adapter) + key, target.name)

    def forget(self, target: Target) -> None:
        """Forget a target's cache. A large one goes bit by bit with the decisions that follow."""
        self._leaving.add(target.name)
        self._sweep(target.name)
        self._recent.forget(target.name)
        if self.index is not None:
            self.index.forget_target(target.name)
        self._offered, self._by_name = (), {}

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily  # slow to import: not for --help

        remembered = GaugeMetricFamily(
            "tito_router_policy_remembered",
            "Prompts that cache_aware remembers, in characters and in ids; a prompt that several workers have counts for each.",
            labels=("unit",),
        )
        remembered.add_metric(("characters",), self.texts.size)
        remembered.add_metric(("ids",), self.ids.size)
        yield remembered

    def dump(self) -> bytes:
        """Return a snapshot of the remembered prompts, for a restart."""
        copy = self.copy()
        while copy.step(self.texts.nodes + self.ids.nodes + 1):
            pass
        return copy.encode()

    def copy(self) -> PolicyCopy:
        """Start a snapshot that is taken in steps."""
        return PolicyCopy(self)

    @property
    def ticks(self) -> int:
        """A number that grows whenever a prompt is remembered."""
        return self.texts.ticks + self.ids.ticks

    def load(self, snapshot: bytes) -> None:
        """Add the prompts of a snapshot. Raise SnapshotError, and change nothing, if it cannot be read."""
        try:
            texts, ids = msgspec.msgpack.decode(snapshot, type=tuple[bytes, bytes])
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"this is no snapshot of a policy: {error}") from None
        decoded_texts, decoded_ids = self.texts.decode(texts), self.ids.decode(ids)
        self.texts.merge_decoded(*decoded_texts)
        self.ids.merge_decoded(*decoded_ids)

    def trim(self, most: int) -> bool:
        """Forget about `most` units beyond the configured size, least recently used first. Return whether there is more."""
        limit = self.parameters.max_tree_size
        for tree in (self.texts, self.ids):
            if tree.size > limit:
                tree.evict_all(max(limit, tree.size - most))
        return self.texts.size > limit or self.ids.size > limit

    def _decide(
        self,
        targets: Sequence[Target],
        query: RouteQuery,
        prompts: RememberedPrompts[Key, AnyStr],
        descent: Descent[AnyStr],
        known: Known,
        length: int,
        slip: int,
    ) -> Decision:
        homes, conversation, home = self.homes, 0, None
        if homes is not None and query.conversation is not None:
            conversation = number_of(query.tenant.encode("utf-8", "surrogatepass"), query.conversation())
            if query.continues:
                home = homes.get(conversation)
        chosen = self._choose(targets, known, home, length, slip)
        if self._leaving:
            self._sweep(next(iter(self._leaving)))
            if chosen.target.name in self._leaving:  # it has come back already, with an empty cache
                self._leaving.discard(chosen.target.name)
                self.texts.remove_tenant(chosen.target.name)
                self.ids.remove_tenant(chosen.target.name)
        prompts.learn(descent, chosen.target.name, known)
        self._recent.add(chosen.target.name, length)
        if homes is not None and conversation:
            homes.put(conversation, number_of(chosen.target.name.encode()))
        return chosen

    def _choose(self, targets: Sequence[Target], known: Known, home: int | None, length: int, slip: int) -> Decision:
        """`home`: the number of the worker that had the last turn of the conversation, in any process."""
        loads = [target.inflight for target in targets]
        few = set(loads)  # distinct numbers, however many targets
        least, most, config = min(few), max(few), self.parameters
        if most - least > config.balance_abs and most > config.balance_rel * least:
            return Decision(self._least(targets, loads), "imbalance")
        holder = self._holder(targets, known.holders) if known.continued else None
        if holder is None and home is not None:
            self._see(targets)
            holder = self._by_number.get(home)
        stays = holder is not None
        if holder is None and _is_enough(known, length, slip, config.threshold):
            holder = self._holder(targets, known.holders)
        if holder is None:
            return Decision(self._least(targets, loads), "least_loaded")
        if self._has_too_much(holder, least, self._recent.total / len(targets), length, stays=stays):
            return Decision(self._least(targets, loads), "spilled")
        return Decision(holder, "continued" if stays else "cached")

    def _sweep(self, name: str) -> None:
        """Forget some of a departed worker's prompts."""
        for tree in (self.texts, self.ids):
            tree.evict(name, max(0, tree.tenant_size(name) - _UNITS_PER_STEP))
        if not self.texts.tenant_size(name) and not self.ids.tenant_size(name):
            self._leaving.discard(name)

    def _has_too_much(self, target: Target, least: int, mean: float, length: int, *, stays: bool) -> bool:
        """Return whether a worker has more than its share of recent work, by some prompts, and of the requests in flight.

        A prompt that continues no conversation is refused for its recent work alone.
        """
        excess = self._recent.given(target.name) - mean
        if excess <= (_BOUND - 1) * mean:
            return False
        busy = target.inflight > least + _SLACK
        return busy and excess > _MANY * self._recent.mean if stays else busy or excess > _FEW * length

    def _holder(self, targets: Sequence[Target], holders: Collection[str]) -> Target | None:
        """Return the least loaded offered holder; None if there is none, or if more than half of the fleet are holders."""
        if 2 * len(holders) > len(targets) > 1:
            return None
        self._see(targets)
        if self._leaving:
            holders = [name for name in holders if name not in self._leaving]
        there = [target for name in holders if (target := self._by_name.get(name)) is not None]
        if len(there) <= 1:
            return there[0] if there else None
        return min(there, key=self._burden)

    def _see(self, targets: Sequence[Target]) -> None:
        """Index the offered targets, which seldom change."""
        if targets is self._offered and isinstance(targets, tuple):
            return
        self._offered, self._by_name = targets, {target.name: target for target in targets}
        if self.homes is not None:
            self._by_number = {number_of(name.encode()): target for name, target in self._by_name.items()}

    def _least(self, targets: Sequence[Target], loads: list[int]) -> Target:
        """Return the one with the least recent work among a few of the least loaded targets, which are taken in turn.

        `loads`: what each target has in flight. Work shows what will come back to a target: the next turns of conversations
        whose clients are thinking. So a target with slightly more in flight may be the better one.
        """
        few = sorted(set(loads))
        most = few[0] + few[0] // _NEAR
        found: list[Target] = []
        at = self._next % len(targets)
        for load in few[: bisect_right(few, most)]:
            for begin, end in ((at, len(targets)), (0, at)):
                while len(found) < _EQUALS:
                    try:
                        begin = loads.index(load, begin, end) + 1
                    except ValueError:
                        break
                    found.append(targets[begin - 1])
                    self._next = begin
        return min(found, key=self._work)

    def _work(self, target: Target) -> tuple[float, int]:
        return self._recent.given(target.name), target.inflight

    def _burden(self, target: Target) -> tuple[int, float]:
        return target.inflight, self._recent.given(target.name)


class PolicyCopy:
    """A copy of the prompts that a policy remembers, taken in steps while the policy goes on."""

    def __init__(self, policy: CacheAware) -> None:
        self._policy = policy
        self._texts, self._ids = policy.texts.copy(), policy.ids.copy()
        self._ticks = (0, 0)

    def step(self, most: int) -> bool:
        """Copy at most this many nodes. Return whether there are more."""
        more = self._texts.step(most) or self._ids.step(most)
        self._ticks = self._policy.texts.ticks, self._policy.ids.ticks
        return more

    def encode(self) -> bytes:
        """Return the snapshot, after the last step. Safe in any thread."""
        texts = self._texts.encode(StringTree.kind, self._ticks[0])
        return msgspec.msgpack.encode((texts, self._ids.encode(ExactTokenTree.kind, self._ticks[1])))


def _is_enough(known: Known, length: int, slip: int, threshold: float) -> bool:
    """Return whether more than the threshold is known, and what follows the common prefix is no coincidence: long, or all."""
    own = known.matched - known.shared
    return known.matched > threshold * length and (own > min(slip, length // NEGLIGIBLE) or known.matched == length)


@lru_cache(maxsize=1024)
def _text_salt(*owner: str) -> str:
    """Return the start of prompts in the tree of texts. Its length is fixed, so that no text can imitate it."""
    return blake3.blake3(_spelled(*owner)).hexdigest(_SALT // 2) if any(owner) else ""


@lru_cache(maxsize=1024)
def _id_salt(*owner: str) -> bytes:
    return blake3.blake3(_spelled(*owner)).digest(4 * _SALT) if any(owner) else b""


def _spelled(tenant: str, *names: str) -> bytes:
    """Return who shares prompts: a tenant, or those of its requests that have this salt and this adapter."""
    owner = "".join(f"{len(name)}:{name}" for name in (tenant, *names)) if any(names) else tenant
    return owner.encode("utf-8", "surrogatepass")


def _corrected(known: Known, index: KvIndex, ids: memoryview, targets: Sequence[Target], query: RouteQuery) -> Known:
    """Return the known prefixes of a prompt, corrected by the workers' reports of their caches.

    For workers that report nothing, the tree holds. For a tenant nothing counts beyond what the tree knows, because the rest
    of a cache may be another tenant's.
    """
    length = len(ids)
    overlaps = index.overlaps(ids, query.adapter, query.salt)
    reported = {name: blocks * (index.block_size(name) or 0) for name, blocks in overlaps.items()}
    if query.tenant:
        reported = {name: min(count, known.matched) for name, count in reported.items()}
    silent = [name for name in known.holders if name not in reported and not index.tracked(name)]
    counts = {**reported, **dict.fromkeys(silent, known.matched)}
    most = max(counts.values(), default=0)
    if not most:
        return Known()
    # The length that more than half of the fleet has. For workers that report nothing, the tree knows it.
    half = len(targets) // 2
    shared = sorted(counts.values(), reverse=True)[half] if len(counts) > half and len(targets) > 1 else 0
    if silent:
        shared = max(shared, known.shared)
    sure = max(shared + 1, most - max(0, length - shared) // NEGLIGIBLE)
    holders = [name for name, count in counts.items() if count >= sure]
    return known._replace(holders=holders, matched=most, shared=shared)


class RecentWork:
    """The work that each target got recently: sums that fade. After `half_life` decisions, work counts half.

    Requests in flight show which targets are busy now. They do not show which of them have conversations whose clients are
    thinking, or long requests; recently routed tokens do. Time is counted in decisions: every decision makes all earlier work
    weigh a little less. Instead of shrinking every sum, the weight of new work grows, so a decision costs the same for any
    fleet size.
    """

    def __init__(self, half_life: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        self._sums: dict[str, float] = {}
        self._total = 0.0
        self._requests = 0.0

    def add(self, target: str, units: int) -> None:
        """Count a request of this many units for a target, by its name."""
        self._weight *= self._growth
        if self._weight > _MAX_WEIGHT:
            self._rescale()
        weighted = units * self._weight
        self._sums[target] = self._sums.get(target, 0.0) + weighted
        self._total += weighted
        self._requests += self._weight

    def given(self, target: str) -> float:
        """Return the units that a target was given lately."""
        return self._sums.get(target, 0.0) / self._weight

    @property
    def total(self) -> float:
        """The units that all targets were given lately."""
        return max(0.0, self._total / self._weight)

    @property
    def mean(self) -> float:
        """The mean units of a recent request."""
        return self._total / self._requests if self._requests else 0.0

    def forget(self, target: str) -> None:
        """Drop a target and its work."""
        share = self._sums.pop(target, 0.0)
        self._requests *= 1 - share / self._total if self._total else 0.0
        self._total -= share
        if not self._sums:
            self._total = self._requests = 0.0

    def _rescale(self) -> None:
        self._sums = {target: weighted / self._weight for target, weighted in self._sums.items()}
        self._total = sum(self._sums.values())
        self._requests /= self._weight
        self._weight = 1.0

    def __len__(self) -> int:
        return len(self._sums)
