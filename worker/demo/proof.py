"""Compares trajectories with the workers' logs: ids, and every other promise about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

from worker.engine.records import GenerationRecord


@dataclass(frozen=True)
class Proof:
    """The result of one comparison."""

    ids: int  # of the trajectory
    same: int  # how many of them the worker has in the same place
    faults: list[str] = field(default_factory=list)  # everything that is not as it should be, in words

    @property
    def holds(self) -> bool:
        return self.same == self.ids and not self.faults


def ids_of(trajectory: Mapping[str, Any]) -> list[int]:
    return [*trajectory["prompt_ids"], *trajectory["response_ids"]]


def prove(trajectory: Mapping[str, Any], evidence: Mapping[str, GenerationRecord]) -> Proof:
    """Compare one trajectory: the whole with its last generation, and each turn with its own."""
    ids, begin = ids_of(trajectory), len(trajectory["prompt_ids"])
    last = evidence.get(trajectory["branch"])
    truth = [] if last is None else [*last.input_ids, *last.output_ids]
    faults = [] if len(ids) == len(truth) else [f"{len(ids)} ids, and the worker had {len(truth)}"]
    if not trajectory["exact"]:
        faults.append("the router calls it inexact: " + ", ".join(trajectory["reasons"]))
    versions = [""] * len(trajectory["response_ids"])
    for run in trajectory["weight_versions"]:
        versions[run["start"] : run["end"]] = [run["version"]] * (run["end"] - run["start"])
    images = [one["digest"] for one in (trajectory.get("multi_modal_data") or {}).get("images", ())]
    if last is not None and images != list(last.images):
        faults.append("its images are not those that the worker took")
    context = list(trajectory["response_mask"])
    for number, turn in enumerate(trajectory["extra_fields"]["turns"], start=1):
        start, end = turn["start"], turn["end"]
        if len(set(context[start:end])) > 1:
            faults.append(f"turn {number}: a part of it has another loss mask")
        context[start:end] = [0] * (end - start)
        own = evidence.get(turn["generation_id"])
        if own is None:
            faults.append(f"turn {number}: no worker knows of it")
            continue
        compared = {
            "what was read": (ids[: begin + start], own.input_ids),
            "what was sampled": (ids[begin + start : begin + end], own.output_ids),
            "the logprobs": (trajectory["response_logprobs"][start:end], own.logprobs),
            "the weight versions": (versions[start:end], own.versions),
        }
        wrong = [what for what, (mine, theirs) in compared.items() if mine != theirs]
        faults += [f"turn {number}: {what} is not what the worker has" for what in wrong]
    if any(context):
        faults.append("a token that was not sampled has loss mask 1")
    return Proof(len(ids), sum(map(eq, ids, truth)), faults)


def prove_together(trajectories: Sequence[Mapping[str, Any]], evidence: Mapping[str, GenerationRecord]) -> list[str]:
    """Return the faults of all of a session's trajectories together: a generation is lost, or trained twice."""
    trained: Counter[str] = Counter()
    for trajectory in trajectories:
        for turn in trajectory["extra_fields"]["turns"]:
            trained[turn["generation_id"]] += sum(trajectory["response_mask"][turn["start"] : turn["end"]])
    faults = [f"generation {name} is in no trajectory" for name in evidence if name not in trained]
    faults += [
        f"generation {name}: {trained[name]} tokens to train on, sampled {len(evidence[name].output_ids)}"
        for name in sorted(trained.keys() & evidence.keys())
        if trained[name] != len(evidence[name].output_ids)
    ]
    return faults
