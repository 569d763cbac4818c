"""A rollout is exact if its trajectory has what was sampled, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.demo.support import ids, rollout


def test_what_was_sampled_is_exact() -> None:
    assert rollout().exact


def test_a_sampled_token_may_be_certain() -> None:
    """The logprob of a probability that rounds to 1 is 0.0."""
    assert rollout(rollout_logp=[0.0, -0.5, 0.0]).exact


@pytest.mark.parametrize(
    "changed",
    [
        {"exact": False},
        {"tokens": [1, 2, 3]},
        {"loss_mask": [0, 1, 0]},
        {"loss_mask": [1, 1, 1]},
        {"rollout_logp": [0.0, -0.5, 0.5]},
        {"rollout_logp": [0.0, -0.5, float("nan")]},
        {"weight_versions": [{"version": "1", "start": 1, "end": 2}]},
    ],
    ids=str,
)
def test_a_changed_trajectory_is_not_exact(changed: dict[str, Any]) -> None:
    assert not rollout(**changed).exact


def test_a_reply_that_stopped_at_once_is_not_in_the_trajectory() -> None:
    """The whole reply was the stop string, and the next turn went on from the prompt."""
    found = rollout()
    found.turns.insert(0, ("", ""))
    found.sampled.insert(0, ids("Observation", ":"))
    assert found.exact
    found.turns[0] = ("", "read")
    assert not found.exact


def test_a_last_reply_that_stopped_at_once_is_there_whole() -> None:
    """No later turn says how much of it was read, so the trajectory keeps all of it, stop string included."""
    found = rollout()
    found.turns[-1] = ("", "")
    assert found.exact
    found.sampled[-1] = ids(" se", "arch", "Observation")
    assert not found.exact
