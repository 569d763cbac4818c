"""Bodies of requests, for docs/openapi.json: those that no struct of the code reads as a whole.

A body has the fields that docs/http-api/ names. All but those with `forbid_unknown_fields` may have others besides.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from middleware_hub.sessions.export.formats import FORMATS, STREAMED

Json = dict[str, Any]
Text = str | list[str]


class GenerateBody(Struct):
    """SGLang's request. Exactly one of `text`, `input_ids` and `prompt_segments`; other fields go to the worker."""

    text: Text | None = None
    input_ids: list[int | list[int]] | None = None
    prompt_segments: list[Json | list[Json]] | None = None
    image_data: str | list[Any] | None = None
    sampling_params: Json | list[Json] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    stream: bool = False
    rid: Text | None = None
    lora_path: Text | None = None
    return_trajectory: bool = False
    return_routed_experts: bool = False
    routed_dp_rank: int | None = None


class CompletionBody(Struct):
    """OpenAI's request for a text, with SGLang's `sampling_params` at its top level."""

    prompt: str | list[str | int | list[int]]
    model: str = ""
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: Json | None = None
    logprobs: int | None = None
    echo: bool = False
    temperature: float | None = None
    top_p: float | None = None
    stop: Text | None = None
    seed: int | None = None
    return_token_ids: bool = False


class ChatBody(Struct):
    """OpenAI's chat completion, with SGLang's `sampling_params` at its top level."""

    messages: list[Json]
    model: str = ""
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    max_completion_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: Json | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Text | None = None
    seed: int | None = None
    return_token_ids: bool = False


class ResponsesBody(Struct):
    """OpenAI's response."""

    input: str | list[Json]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False


class MessagesBody(Struct):
    """Anthropic's message."""

    messages: list[Json]
    max_tokens: int
    model: str = ""
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False


class CountTokensBody(Struct):
    """Anthropic's message whose prompt is counted."""

    messages: list[Json]
    model: str = ""
    system: str | list[Json] | None = None
    tools: list[Json] | None = None


class GenerateContentBody(Struct):
    """Google's request. Its fields may be spelled with underscores as well."""

    contents: list[Json]
    systemInstruction: Json | None = None
    tools: list[Json] | None = None
    toolConfig: Json | None = None
    generationConfig: Json | None = None


class SessionBody(Struct, forbid_unknown_fields=True):
    """A new session. Every field may be left out."""

    session_id: str | None = None
    metadata: Json | None = None
    ttl_s: float | None = None
    response_budget: int | None = None
    stream_interval: int | None = None
    as_key: bool | None = None
    sampling_params: Json | None = None
    pin: list[str] | None = None
    match: Literal["canonical", "strict", "calls"] | None = None
    model: str | None = None
    lora_path: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    chat_template_kwargs: Json | None = None


class RewardInfoBody(Struct):
    """What a session, or one of its branches, was worth."""

    reward_info: Json
    branch: str | None = None


class CompleteBody(Struct):
    """The agent is done."""

    reward_info: Json | None = None


SharedTurns = Literal["once", "every"]
Roots = Literal["all", "head"]
Form = Literal[tuple(sorted((*STREAMED, *FORMATS)))]  # type: ignore[valid-type]  # the names that there are


class ScorersBody(Struct):
    """Who scores: the names of scorers, by default all, and how many likeliest tokens they tell at each position."""

    workers: list[str] | None = None
    top_logprobs: int = 0


class FinalizeBody(Struct):
    """How the trajectories of a session are written. The query may have the same fields, except `score`."""

    export_all_checkpoints: bool | None = None
    shared_turns: SharedTurns | None = None
    roots: Roots | None = None
    format: Form | None = None
    media: Literal["ref", "inline"] | None = None
    expect_request_ids: list[str] | None = None
    score: ScorersBody | None = None


class ClaimIdBody(Struct):
    """A claim, by the `claim_id` of its answer."""

    claim_id: str


class RenewBody(Struct):
    """A claim whose lease begins again."""

    claim_id: str
    lease_seconds: float = 600.0


class RewardBody(Struct):
    """One reward, or several in `rewards`. It names a reply (`request_id`), or a rollout (`group_id` and `rollout_id`)."""

    request_id: str | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    reward: float | None = None
    reward_info: Json | None = None
    rewards: list[Json] | None = None


class DropBody(Struct):
    """A group whose samples are not wanted."""

    group_id: str


class ScoreBody(Struct):
    """What is scored: a session, or `sequences`."""

    session_id: str | None = None
    sequences: list[Json] | None = None
    workers: list[str] | None = None
    top_logprobs: int = 0
    roots: Roots = "all"


class WorkerBody(Struct):
    """A worker. The query may have the same fields."""

    url: str
    worker_type: Literal["regular", "prefill", "decode"] | None = None
    bootstrap_port: int | None = None


class AbortBody(Struct):
    """Generations that end."""

    rid: str | None = None
    abort_all: bool = False


class FleetBody(Struct):
    """A body for the workers, which the router passes on unchanged."""
