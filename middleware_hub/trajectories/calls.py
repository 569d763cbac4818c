"""The calls about groups over HTTP (`middleware_hub/routes.py` has their paths).

A key sees the groups of its tenant, and of the namespace that `x-radix-namespace` names.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from middleware_hub import routes
from middleware_hub.chat.answer import check_one
from middleware_hub.media.viewer import asks_inline
from middleware_hub.persistence.memory import Memory
from middleware_hub.spans.versions import VersionClock
from middleware_hub.store.errors import NOT_SAVED, StoreUnreachableError
from middleware_hub.trajectories.claims import ClaimRequest, Claims, described, in_pieces, result
from middleware_hub.trajectories.groups import Groups
from middleware_hub.trajectories.journal import Journal
from middleware_hub.trajectories.ledger import STEP
from middleware_hub.trajectories.members import MOST_SIZE
from middleware_hub.trajectories.samples import Member, SampleGroup, SampleTrajectories
from middleware_hub.trajectories.settling import Settling, reward
from router.engines.form.fields import parse_object, typed
from router.errors import BadRequestError, NotFoundError
from router.http.bodies import read_json
from router.http.disconnect import ClientConnection
from router.http.handlers import by_method
from router.http.headers import header
from router.http.request_state import request_state
from router.http.responses import send_json

MOST_SECONDS: Final = 86_400.0
MOST_WAIT: Final = 600.0
MOST_REWARDS: Final = 8_192
_REWARD: Final = frozenset({"request_id", "group_id", "rollout_id", "reward", "reward_info"})


class TrajectoryCalls:
    """Serves the calls of `TRAJECTORIES`."""

    def __init__(
        self,
        groups: Groups,
        sequences: SampleTrajectories,
        clock: VersionClock,
        stopping: Callable[[], bool],
        memory: Memory | None,
        *,
        max_body_bytes: int,
    ) -> None:
        self._groups = groups
        self._sequences = sequences
        self._claims = Claims(sequences, clock, groups.counts, stopping, memory)
        self._settling = Settling(sequences, groups.counts)
        self._max_body_bytes = max_body_bytes
        calls = {
            "show": self._show,
            "claim": self._claim,
            "acknowledge": self._acknowledge,
            "release": self._release,
            "renew": self._renew,
            "reward": self._reward,
            "drop": self._drop,
        }
        self.routes = by_method(routes.bound(routes.TRAJECTORIES, calls))

    def _at(self, scope: Scope) -> tuple[str, Journal]:
        """Return the tenant of a request, and its journal."""
        tenant = request_state(scope).caller.tenant
        return tenant, self._groups.journal(tenant, header(scope, b"x-radix-namespace") or "")

    async def _fields(self, scope: Scope, receive: Receive) -> dict[str, Raw]:
        body = await read_json(scope, receive, self._max_body_bytes)
        return parse_object(body) if body.strip() else {}

    async def _claim(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        wanted, (tenant, journal) = wanted_of(fields, query.get("media", [None])[-1]), self._at(scope)
        async with ClientConnection(receive) as client:
            found = await self._claims.claim(tenant, journal, wanted)
            client.stop_watching()
        ignored = _ignored(fields, frozenset(ClaimRequest.__struct_fields__))
        await send_json(send, 200, await result(in_pieces({**found, **ignored})))

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        name = query.get("group", [""])[-1]
        if not name:
            raise BadRequestError("name the group: GET /trajectories?group=ID")
        tenant, journal = self._at(scope)
        await journal.read_on()
        group, live = _group(journal, name), await journal.live()
        samples = []
        for number, sample in enumerate(group.samples(), 1):
            if number % STEP == 0:
                await asyncio.sleep(0)
            found = await self._sequences.built(tenant, sample, {})
            state = "claimed" if not sample.open_to(live) else "complete" if sample.complete else "open"
            if found is not None:
                shown = {**described(sample, found), "state": state}
            else:
                shown = {"id": sample.id.hex(), "group_id": name, "state": "lost", "trajectories": []}
            samples.append(Raw(msgspec.json.encode(shown)))
        answer = {
            **{"group_id": name, "size": group.size, "acknowledged": group.acknowledged},
            "samples": samples,
        }
        await send_json(send, 200, await result(in_pieces(answer)))

    async def _acknowledge(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        tenant, journal = self._at(scope)
        name = _claim_id(fields)
        count = await self._settling.acknowledge(tenant, journal, name)
        await _answer(send, {"claim_id": name, "acknowledged": count}, fields, frozenset({"claim_id"}))

    async def _release(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        _, journal = self._at(scope)
        name = _claim_id(fields)
        count = await self._settling.release(journal, name)
        await _answer(send, {"claim_id": name, "released": count}, fields, frozenset({"claim_id"}))

    async def _renew(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        _, journal = self._at(scope)
        name, seconds = _claim_id(fields), _seconds(fields, "lease_seconds", 600.0, MOST_SECONDS, least=1e-3)
        count = await self._settling.renew(journal, name, seconds)
        answer = {"claim_id": name, "lease_seconds": seconds, "samples": count}
        await _answer(send, answer, fields, frozenset({"claim_id", "lease_seconds"}))

    async def _reward(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        several = typed(fields, "rewards", list[dict[str, Raw]], "a list of objects")
        if several is not None and fields.keys() & _REWARD:
            raise BadRequestError("give one reward, or `rewards`, not both")
        if several is not None and not 1 <= len(several) <= MOST_REWARDS:
            raise BadRequestError(f"`rewards` must have 1 to {MOST_REWARDS} entries, not {len(several)}")
        _, journal = self._at(scope)
        await journal.read_on()
        given = []
        for number, one in enumerate([fields] if several is None else several, 1):
            given.append(_rewarded(journal, one))
            if number % STEP == 0:
                await asyncio.sleep(0)
        saved = await reward(journal, [one for one in given if one is not None])
        more = [] if saved else [NOT_SAVED]
        ignored = _ignored(chain(fields, *(several or ())), _REWARD if several is None else _REWARD | {"rewards"})
        await send_json(send, 200, msgspec.json.encode({"rewarded": len(given), **ignored}), more)

    async def _drop(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await self._fields(scope, receive)
        name = _text(fields, "group_id")
        if name is None:
            raise BadRequestError("`group_id` is missing: the group whose samples are not wanted")
        _, journal = self._at(scope)
        await journal.read_on()
        count = await self._settling.drop(journal, _group(journal, name))
        await _answer(send, {"group_id": name, "dropped": count}, fields, frozenset({"group_id"}))


async def _answer(send: Send, answer: Mapping[str, Any], fields: Mapping[str, Raw], known: frozenset[str]) -> None:
    await send_json(send, 200, msgspec.json.encode({**answer, **_ignored(fields, known)}))


def _ignored(fields: Iterable[str], known: frozenset[str]) -> dict[str, list[str]]:
    """Return the part of an answer that lists unknown fields."""
    found = sorted(set(fields) - known)
    return {"ignored": found} if found else {}


def wanted_of(fields: dict[str, Raw], media: str | None = None) -> ClaimRequest:
    """Read the body of a claim, and `media` of its query. Raises BadRequestError with the field that is wrong."""
    size = _count(fields, "group_size", MOST_SIZE)
    limit = _count(fields, "limit", MOST_SIZE)
    if size is not None and limit is not None and limit < size:
        raise BadRequestError(f"`limit` {limit} is less than `group_size` {size}: no whole group would fit in")
    staleness = typed(fields, "max_staleness", int, "a number of weight versions")
    if staleness is not None and staleness < 0:
        raise BadRequestError(f"`max_staleness` must not be negative, not {staleness}")
    logp = typed(fields, "return_logp", bool, "true or false")
    if staleness is None and typed(fields, "kv_staleness", bool, "true or false"):
        raise BadRequestError("`kv_staleness` needs `max_staleness`: how many weight versions are too many")
    switches = (
        "allow_partial",
        "exact_only",
        "kv_staleness",
        "return_routed_experts",
        "return_indexer_topk",
        "return_top_p",
    )
    wanted = ClaimRequest(
        groups=_count(fields, "groups", MOST_SIZE) or (1 if limit is None else MOST_SIZE),
        limit=limit,
        group_size=size,
        lease_seconds=_seconds(fields, "lease_seconds", 600.0, MOST_SECONDS, least=1e-3),
        wait_seconds=_seconds(fields, "wait_seconds", 0.0, MOST_WAIT),
        partial_after_seconds=_seconds(fields, "partial_after_seconds", 0.0, math.inf),
        max_staleness=staleness,
        return_logp=True if logp is None else logp,
        media="inline" if asks_inline(_text(fields, "media") or media) else "ref",
        **{name: bool(typed(fields, name, bool, "true or false")) for name in switches},
    )
    if wanted.partial_after_seconds and not wanted.allow_partial:
        raise BadRequestError("`partial_after_seconds` needs `allow_partial`: true")
    return wanted


def _count(fields: dict[str, Raw], key: str, most: int) -> int | None:
    found: int | None = typed(fields, key, int, "a whole number")
    if found is not None and not 1 <= found <= most:
        raise BadRequestError(f"`{key}` must be 1 to {most}, not {found}")
    return found


def _seconds(fields: dict[str, Raw], key: str, default: float, most: float, *, least: float = 0.0) -> float:
    found: float | None = typed(fields, key, float, "a number of seconds")
    if found is not None and not least <= found <= most:
        raise BadRequestError(f"`{key}` must be {least:g} to {most:g} seconds, not {found:g}")
    return default if found is None else found


def _text(fields: dict[str, Raw], key: str) -> str | None:
    found: str | None = typed(fields, key, str, "a string")
    return found or None


def _claim_id(fields: dict[str, Raw]) -> str:
    found = _text(fields, "claim_id")
    if found is None:
        raise BadRequestError("`claim_id` is missing: the one that the claim was answered with")
    return found


def _group(journal: Journal, name: str) -> SampleGroup:
    found = journal.ledger.groups.get(name)
    if found is None:
        _check_not_behind(journal)
        raise NotFoundError(
            f"there is no group {name[:140]!r} of this key and namespace, or all of it was acknowledged or dropped"
        )
    return found


def _check_not_behind(journal: Journal) -> None:
    """Raise StoreUnreachableError if the spool may have events that the ledger lacks."""
    if journal.behind:
        raise StoreUnreachableError("what was recorded before is still waiting for the store: ask again")


def _rewarded(journal: Journal, fields: dict[str, Raw]) -> tuple[Member, float | None, bytes] | None:
    """Read one reward, and find its reply. Raises BadRequestError, NotFoundError.

    Returns None for a reply that was acknowledged with this reward: a client that lost the answer sends it again.
    """
    name, group, rollout = (_text(fields, key) for key in ("request_id", "group_id", "rollout_id"))
    reward: float | None = typed(fields, "reward", float, "a number, or null")
    info = typed(fields, "reward_info", dict[str, Any], "an object")
    if reward is not None and not math.isfinite(reward):
        raise BadRequestError(f"`reward` must be a finite number, not {reward}")
    if (name is None) is (rollout is None) or (rollout is not None and group is None):
        raise BadRequestError(
            "say what the reward is for: `request_id`, the last reply of a rollout; or `group_id` and `rollout_id`"
        )
    if fields.keys().isdisjoint(("reward", "reward_info")):  # it would complete the sample, without a reward
        raise BadRequestError("`reward` is missing: give a number, or null")
    if name is not None:
        check_one(name, "`request_id`")
        found = journal.ledger.reply(name, group)
    else:
        assert group is not None
        assert rollout is not None
        found = journal.ledger.rollout(group, rollout)
    if found is None and name is not None:
        settled = journal.ledger.standing(name)
        if settled is not None and settled[1] == reward and group in (None, settled[0]):
            return None
    if found is None:
        _check_not_behind(journal)
        what = f"reply {name[:140]!r}" if name is not None else f"rollout {(rollout or '')[:140]!r} of this group"
        raise NotFoundError(
            f"no {what} waits in a group of this key and namespace: its request needs the header x-group-id, and what was "
            "acknowledged is gone; the reward of a session goes to /sessions/{id}/reward_info"
        )
    return found, reward, b"" if info is None else msgspec.json.encode(info)
