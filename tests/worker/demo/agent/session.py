"""A small session as the router and its workers report it: two turns, the second one sampled twice."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from worker.demo.agent.clients import AgentCall, AgentTurn
from worker.engine.records import GenerationRecord

ROOT = [{"role": "system", "content": "You lead."}, {"role": "user", "content": "How high?"}]
CALLING = {"role": "assistant", "content": "Hm."}
RESULT = {"role": "tool", "content": "3,776 m"}


def turns() -> dict[str, AgentTurn]:
    def turn(name: str, number: int, text: str, *calls: AgentCall) -> AgentTurn:
        return AgentTurn("lead", "openai", name, 2, text, calls, None, number)

    return {
        "one": turn("one", 0, "Hm.", AgentCall("c", "search", {"query": "Fuji"})),
        "two": turn("two", 1, "High."),
        "three": turn("three", 2, "Higher."),
    }


def record(read: list[int], sampled: list[int], logprobs: list[float], versions: list[str]) -> GenerationRecord:
    return GenerationRecord("", {}, b"", {}, 0, read, False, sampled, logprobs, versions)


def evidence() -> dict[str, GenerationRecord]:
    return {
        "one": record([1, 2, 3], [10, 11], [-0.5, -0.25], ["1", "1"]),
        "two": record([1, 2, 3, 10, 11, 4], [20, 21, 22], [-1.0, -2.0, -3.0], ["1", "2", "2"]),
        "three": record([1, 2, 3, 10, 11, 4], [30, 31], [-0.1, -0.2], ["2", "2"]),
    }


def trajectories() -> list[dict[str, Any]]:
    def trajectory(branch: str, ids: list[int], mask: list[int], logprobs: list[float], runs: Any) -> dict[str, Any]:
        return {
            "branch": branch,
            "prompt_ids": [1, 2, 3],
            "response_ids": ids,
            "response_mask": mask,
            "response_logprobs": logprobs,
            "weight_versions": [{"version": v, "start": low, "end": high} for v, low, high in runs],
            "messages": [*ROOT, CALLING, RESULT, {"role": "assistant", "content": branch}],
            "exact": True,
            "reasons": [],
            "extra_fields": {
                "turns": [
                    {"generation_id": "one", "start": 0, "end": 2},
                    {"generation_id": branch, "start": 3, "end": len(ids)},
                ]
            },
        }

    return deepcopy(
        [
            trajectory(
                "two",
                [10, 11, 4, 20, 21, 22],
                [1, 1, 0, 1, 1, 1],
                [-0.5, -0.25, 0.0, -1.0, -2.0, -3.0],
                [("1", 0, 2), ("1", 3, 4), ("2", 4, 6)],
            ),
            trajectory(
                "three",
                [10, 11, 4, 30, 31],
                [0, 0, 0, 1, 1],
                [-0.5, -0.25, 0.0, -0.1, -0.2],
                [("1", 0, 2), ("2", 3, 5)],
            ),
        ]
    )
