"""ATIF 1.7 as Harbor 0.26 reads it (`harbor.models.trajectories`): which fields its models have, and the rules between them.

`tests/trainers/test_atif.py` compares `MODELS` with Harbor's own models, and gives these what the router exports.
"""

from __future__ import annotations

from typing import Any

MODELS: dict[str, tuple[str, str]] = {
    "Trajectory": (
        "agent steps",
        "schema_version session_id trajectory_id notes final_metrics continued_trajectory_ref extra subagent_trajectories",
    ),
    "Agent": ("name version", "model_name tool_definitions extra"),
    "Step": (
        "step_id source message",
        "timestamp model_name reasoning_effort reasoning_content tool_calls observation metrics is_copied_context"
        " llm_call_count extra",
    ),
    "Metrics": (
        "",
        "prompt_tokens completion_tokens cached_tokens cost_usd prompt_token_ids completion_token_ids logprobs extra",
    ),
    "FinalMetrics": (
        "",
        "total_prompt_tokens total_completion_tokens total_cached_tokens total_cost_usd total_steps extra",
    ),
    "ToolCall": ("tool_call_id function_name arguments", "extra"),
    "Observation": ("results", ""),
    "ObservationResult": ("", "source_call_id content subagent_trajectory_ref extra"),
    "ContentPart": ("type", "text source"),
    "ImageSource": ("media_type path", ""),
}
"""Required and other fields of each model. None takes a field beside these."""
OF_AGENTS = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
"""Fields that only a step of the agent may have."""
MIMES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def assert_valid(document: dict[str, Any]) -> None:
    """Check what Harbor's models check of a document without subagents and audio."""
    _fields("Trajectory", document)
    assert document["schema_version"] == "ATIF-v1.7"
    assert isinstance(document["session_id"], str)
    assert isinstance(document["trajectory_id"], str)
    _fields("Agent", document["agent"])
    assert all(isinstance(value, str) for value in document["agent"].values())
    _fields("FinalMetrics", document["final_metrics"])
    assert document["steps"]
    for number, step in enumerate(document["steps"], 1):
        assert step["step_id"] == number
        _check_step(step)


def _check_step(step: dict[str, Any]) -> None:
    _fields("Step", step)
    assert step["source"] in ("system", "user", "agent")
    assert step["source"] == "agent" or not {*OF_AGENTS} & step.keys()
    assert step["message"] is not None
    _check_content(step["message"])
    for call in step.get("tool_calls", ()):
        _fields("ToolCall", call)
        assert isinstance(call["arguments"], dict)
    if "observation" in step:
        _fields("Observation", step["observation"])
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for result in step["observation"]["results"]:
            _fields("ObservationResult", result)
            assert result.get("source_call_id") in {None, *calls}
            _check_content(result.get("content"))
    if "metrics" in step:
        metrics = step["metrics"]
        _fields("Metrics", metrics)
        assert all(isinstance(one, int) for one in (*metrics["prompt_token_ids"], *metrics["completion_token_ids"]))
        assert all(isinstance(one, float) for one in metrics.get("logprobs", ()))


def _check_content(content: Any) -> None:
    if not isinstance(content, list):
        assert isinstance(content, str | None)
        return
    for part in content:
        _fields("ContentPart", part)
        if part["type"] == "text":
            assert isinstance(part["text"], str)
            assert "source" not in part
        else:
            assert part["type"] == "image"
            assert "text" not in part
            _fields("ImageSource", part["source"])
            assert part["source"]["media_type"] in MIMES
            assert isinstance(part["source"]["path"], str)


def _fields(model: str, found: dict[str, Any]) -> None:
    required, others = (names.split() for names in MODELS[model])
    assert {*required} <= found.keys(), f"{model} lacks {sorted({*required} - found.keys())}"
    assert found.keys() <= {*required, *others}, f"{model} has no {sorted(found.keys() - {*required, *others})}"
