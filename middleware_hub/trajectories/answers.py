"""Samples as answers show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any

import msgspec
from msgspec import Raw

from middleware_hub.trajectories.choosing import Steps, groups_in_steps
from middleware_hub.trajectories.ledger import STEP, Ledger
from middleware_hub.trajectories.samples import Built, GroupSample
from router.http.responses import SEND_BYTES


def _rewards(sample: GroupSample, of_session: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the reward of a sample, and those of its replies."""
    if of_session is not None:
        number = next((of_session[key] for key in ("reward", "score") if _is_number(of_session.get(key))), None)
        return {"reward": number, "reward_info": of_session, "rewards": []}
    last = sample.rewarded
    each = [
        {"request_id": next(iter(one.names), ""), "reward": one.reward, "reward_info": Raw(one.info or b"{}")}
        for one in sample.members
        if one.rewarded
    ]
    return {
        "reward": None if last is None else last.reward,
        "reward_info": Raw((None if last is None else last.info) or b"{}"),
        "rewards": each,
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def described(sample: GroupSample, built: Built) -> dict[str, Any]:
    """Return a sample as answers show it."""
    first = sample.members[0]
    return {
        "id": sample.id.hex(),
        "group_id": sample.group.id,
        "rollout_id": first.rollout,
        "session_id": first.session,
        "lora_path": first.lora,
        "complete": sample.complete,
        **_rewards(sample, built.rewards),
        "exact": built.exact,
        "trajectories": built.trajectories,
    }


def in_pieces(answer: Mapping[str, Any]) -> Steps[list[bytes]]:
    """Return the JSON of an answer whose `samples` are written already: they may be large, and each is copied once."""
    before, key, behind = msgspec.json.encode({**answer, "samples": []}).partition(b'"samples":[]')
    pieces, few, size = [before + key[:-1]], list[Raw](), 0
    for number, sample in enumerate(answer["samples"], 1):
        few.append(sample)
        size += len(sample)
        if size > SEND_BYTES or number == len(answer["samples"]):
            pieces.append(b",".join(few))
            if number < len(answer["samples"]):
                pieces.append(b",")
            few, size = [], 0
            yield
    return [*pieces, b"]" + behind]


def waiting(ledger: Ledger) -> Steps[dict[str, int]]:
    """Count the samples that were not given out."""
    found = Counter(groups=0, complete_samples=0, open_samples=0, claimed_samples=0)
    looked = count(1)
    for few in groups_in_steps(ledger):
        for group in few:
            found["groups"] += 1
            for sample in group.samples():
                if next(looked) % STEP == 0:
                    yield
                found["complete_samples"] += sample.complete and not sample.held
                found["open_samples"] += not sample.complete
                found["claimed_samples"] += sample.held
        yield
    return dict(found)
