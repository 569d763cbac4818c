"""The comparison with the workers finds every change of a trajectory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.demo.agent.session import evidence, trajectories
from worker.demo.proof import Proof, prove, prove_together


def test_an_unchanged_session_holds() -> None:
    known = evidence()
    assert [prove(one, known) for one in trajectories()] == [Proof(9, 9), Proof(8, 8)]
    assert prove_together(trajectories(), known) == []


@given(st.data())
def test_a_changed_number_is_found(data: st.DataObject) -> None:
    given = trajectories()
    one = data.draw(st.sampled_from(given))
    key = data.draw(st.sampled_from(["prompt_ids", "response_ids", "response_mask", "response_logprobs"]))
    at = data.draw(st.integers(0, len(one[key]) - 1))
    one[key][at] = 1 - one[key][at] if key == "response_mask" else one[key][at] + 0.5
    context = key == "response_logprobs" and not any(
        turn["start"] <= at < turn["end"] for turn in one["extra_fields"]["turns"]
    )
    known = evidence()
    assert context == (all(prove(each, known).holds for each in given) and not prove_together(given, known))


@given(st.integers(0, 1), st.sampled_from(["prompt_ids", "response_ids"]), st.integers(0, 8), st.booleans())
def test_a_missing_or_added_id_is_found(which: int, key: str, at: int, more: bool) -> None:
    one = trajectories()[which]
    at = min(at, len(one[key]) - 1)
    one[key][at : at + 1] = [one[key][at]] * 2 if more else []
    assert not prove(one, evidence()).holds


@pytest.mark.parametrize(
    "changed",
    [
        {"exact": False, "reasons": ["template_mismatch"]},
        {"branch": "three"},
        {"branch": "nobody"},
        {"weight_versions": [{"version": "1", "start": 0, "end": 6}]},
        {"weight_versions": []},
    ],
    ids=str,
)
def test_a_changed_field_of_the_trajectory_is_found(changed: dict[str, Any]) -> None:
    proof = prove({**trajectories()[0], **changed}, evidence())
    assert not proof.holds
    assert proof.faults


def test_a_turn_that_no_worker_knows_of_is_a_fault() -> None:
    known = evidence()
    del known["one"]
    assert prove(trajectories()[0], known).faults == ["turn 1: no worker knows of it"]


def test_a_generation_that_is_lost_is_a_fault() -> None:
    assert prove_together(trajectories()[:1], evidence()) == ["generation three is in no trajectory"]


@pytest.mark.parametrize(("mask", "count"), [([1, 1], 4), ([0, 0], 2)])
def test_a_turn_is_trained_once(mask: list[int], count: int) -> None:
    given = trajectories()
    given[1]["response_mask"][:2] = mask
    faults = prove_together(given, evidence())
    assert faults == ([] if count == 2 else [f"generation one: {count} tokens to train on, sampled 2"])


def test_an_image_that_the_worker_did_not_take_is_a_fault() -> None:
    known, (one, _) = evidence(), trajectories()
    one["multi_modal_data"] = {"images": [{"digest": "sha256:1"}, {"digest": "sha256:2"}]}
    for taken in ((), ("sha256:2", "sha256:1"), ("sha256:1",)):
        known["two"].images = taken
        assert prove(one, known).faults == ["its images are not those that the worker took"]
    known["two"].images = ("sha256:1", "sha256:2")
    assert prove(one, known).holds
