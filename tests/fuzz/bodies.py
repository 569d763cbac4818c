"""Good bodies of every route, in all the forms that it takes: where a mutation begins."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_FEW: Json = {"max_new_tokens": 4}
_LOGPROBS: Json = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 7]}
_SAMPLING: Json = {
    "max_new_tokens": 3,
    "min_new_tokens": 1,
    "stop": ["\n", "END"],
    "stop_token_ids": [7],
    "stop_regex": "a[bc]",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "n": 1,
    "ignore_eos": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": True,
    "stream_interval": 1,
    "logit_bias": {"5": 1.5},
    "sampling_seed": 7,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": {"a": 1},
}
GENERATE: list[Json] = [
    {"text": "Hello"},
    {"text": "Question: What is 6 times 7?\n", "sampling_params": _FEW, "stream": True},
    {"text": "Hello there, ", "sampling_params": _SAMPLING, "rid": "r1", **_LOGPROBS},
    {"input_ids": [5, 6, 7, 8], "sampling_params": _FEW},
    {
        "input_ids": [[5, 6], [7]],
        "sampling_params": [_FEW, _SAMPLING],
        "rid": ["r1", "r2"],
        "return_logprob": [True, False],
    },
    {"text": ["one", "two"], "sampling_params": _FEW, "stream": True, "rid": "r"},
    {"text": "samples", "sampling_params": {**_FEW, "n": 2}},
    {"text": ["x"], "sampling_params": {**_FEW, "n": 2}, "stream": True, "return_logprob": True},
    {"text": "a", "input_ids": [5], "sampling_params": {"max_new_tokens": 0}},
    {
        "text": "Thought: ",
        "sampling_params": _FEW,
        "return_trajectory": True,
        "return_text_in_logprobs": True,
        **_LOGPROBS,
    },
    {"text": ["a", "b"], "lora_path": [None, "adapter"], "top_logprobs_num": [1, 2], "return_logprob": True},
    {
        **{"text": "everything", "sampling_params": None, "lora_path": "adapter", "priority": 1, "bootstrap_room": 3},
        **{"return_prompt_token_ids": True, "return_hidden_states": False, "return_routed_experts": False},
        **{"session_params": None, "image_data": None, "video_data": None, "audio_data": None, "input_embeds": None},
    },
    {"prompt_segments": [{"text": "Hello"}, {"ids": [5, 6]}, {"text": " there"}], "sampling_params": _FEW, **_LOGPROBS},
    {"prompt_segments": [{"ids": [5, 6, 7]}], "text": None, "stream": True, "return_trajectory": True, "rid": "r1"},
    {
        "prompt_segments": [[{"text": "one"}], [{"ids": [5]}, {"text": "\n"}, {"text": "two", "ids": None}]],
        "sampling_params": [_FEW, _SAMPLING],
        "rid": ["r1", "r2"],
    },
    {"prompt_segments": [{"text": "a"}], "session_params": {"id": "s"}, "sampling_params": {**_FEW, "n": None}},
    {"text": "a picture", "image_data": ["data:image/png;base64,AAAA"], "sampling_params": _FEW},
    {"text": "a session", "session_params": {"id": "s", "rid": None, "offset": -1}, "sampling_params": _FEW},
    {"input_embeds": [[0.5, 0.25]], "sampling_params": _FEW},
    {
        "text": "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        "sampling_params": {"skip_special_tokens": False},
    },
]

_WEIGHTS: Json = {"weight_version": "7", "abort_all_requests": False, "flush_cache": True}
_CHAT: Json = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": False}

_SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
_TOOLS: list[Json] = [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}]
_CALLS: list[Json] = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
TURNS: list[Json] = [
    {**_CHAT, "temperature": 0.5, "seed": 3, "stop": ["\n"], "logprobs": True, "top_logprobs": 2},
    {**_CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "tools": _TOOLS},
    {
        **_CHAT,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Hello", "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": _CALLS, "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        **{"tools": _TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "max_completion_tokens": 3},
        **{"chat_template_kwargs": {"enable_thinking": False}, "response_format": {"type": "text"}, "lora_path": None},
        **{"return_trajectory": True, "return_meta_info": True},
    },
    {
        **_CHAT,
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well, "}],
        "continue_final_message": True,
    },
]
_MESSAGES: Json = {
    "model": "default",
    "max_tokens": 3,
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["END"],
}

_CALLS_OF_GOOGLE = ("generateContent", "streamGenerateContent", "countTokens")
_GENERATE: Json = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Hello"}]},
        {
            "role": "model",
            "parts": [{"text": "hm", "thought": True}, {"functionCall": {"name": "f", "args": {"a": 1}}}],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "2"}}}, {"text": "And?"}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}, {"googleSearch": {}}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {
        **{"temperature": 0.5, "topK": 40.0, "maxOutputTokens": 3, "stopSequences": ["END"], "candidateCount": 2},
        **{"responseLogprobs": True, "logprobs": 1, "thinkingConfig": {"includeThoughts": True}},
    },
    "safetySettings": [],
}

_COMPLETION: Json = {"model": "default", "prompt": "Hello", "max_tokens": 3}
COMPLETIONS: list[Json] = [
    {**_COMPLETION, "logprobs": 1},
    {**_COMPLETION, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0, "stop": ["\n", "END"]},
    {**_COMPLETION, "prompt": ["one", "two"], "n": 2, "best_of": 2, "echo": True, "suffix": "", "user": "me"},
    {**_COMPLETION, "prompt": [5, 6, 7], "stream": True, "echo": True, "n": 2, "stop": "END", "rid": "r1"},
    {
        **{
            **_COMPLETION,
            "prompt": [[5, 6], [7]],
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "logit_bias": {"5": 1.5},
        },
        **{"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "top_k": 5, "min_p": 0.01},
        **{"min_tokens": 1, "stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False, "regex": None},
        **{"json_schema": None, "ebnf": None, "lora_path": None, "return_trajectory": True},
    },
]

_RESPONSE: Json = {"model": "default", "input": "Hello", "max_output_tokens": 3}
RESPONSES: list[Json] = [
    {
        **_RESPONSE,
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "store": False,
        "metadata": {"a": "b"},
    },
    {
        **_RESPONSE,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        **{"tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}], "tool_choice": "auto", "stream": True},
        **{"parallel_tool_calls": True, "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
    },
]

BODIES: dict[str, list[Any]] = {
    "/generate": GENERATE,
    "/retrieve_from_text": [
        {"text": "Hello"},
        {"text": ["Hello", "Question: What is 6 times 7?\n"], "return_logp": True},
        {"text": "Hello there, ", "strict": True, "request_id": "r1", "max_staleness": 1, "lora_path": None},
    ],
    "/radix_tree/explain": [{"text": "Hello, and"}, {"text": "one", "lora_path": "adapter", "strict": False}],
    "/add_worker": [
        {"url": "http://127.0.0.1:30001"},
        {"worker_url": "http://127.0.0.1:30001", "worker_type": "regular"},
    ],
    "/remove_worker": [{"url": "http://127.0.0.1:30001"}],
    "/workers": [
        {"url": "http://127.0.0.1:30001", "worker_type": "regular", "model_id": "x", "priority": 1, "api_key": None}
    ],
    "/abort_request": [
        {"rid": "r1"},
        {"rid": "r"},
        {"abort_all": True},
        {"rid": "", "abort_all": False, "abort_message": "x"},
    ],
    "/pause_generation": [{"mode": "abort"}, {"mode": "retract"}, {"mode": "in_place"}, {}],
    "/continue_generation": [{}],
    "/update_weight_version": [
        {"new_version": "7", "abort_all_requests": True},
        {"new_version": "8", "abort_all_requests": False},
    ],
    "/update_weights_from_disk": [{**_WEIGHTS, "model_path": "/x", "load_format": "auto"}],
    "/update_weights_from_tensor": [{**_WEIGHTS, "serialized_named_tensors": ["AAAA"], "load_format": None}],
    "/update_weights_from_distributed": [
        {**_WEIGHTS, "names": ["a"], "dtypes": ["float32"], "shapes": [[1, 2]], "group_name": "g"}
    ],
    "/update_weights_from_ipc": [{**_WEIGHTS, "zmq_handles": {"a": "ipc://x"}}],
    "/v1/chat/completions": [_CHAT, {**_CHAT, "stream": True}, *TURNS],
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": [{"model": "default", "input": ["a", "b"]}],
    "/sessions": [
        {"session_id": "t", "metadata": {"a": 1}, "ttl_s": 60.0, "response_budget": 50},
        {"sampling_params": {"temperature": 0.5, "max_tokens": 3, "n": 1}},
    ],
    "/sessions/s/v1/chat/completions": TURNS,
    "/sessions/s/v1/messages": [
        _MESSAGES,
        {**_MESSAGES, "stream": True, "system": [{"type": "text", "text": "Be brief."}]},
    ],
    "/sessions/s/v1/messages/count_tokens": [_MESSAGES],
    "/v1/messages": [_MESSAGES, {**_MESSAGES, "stream": True}],
    "/v1/messages/count_tokens": [_MESSAGES],
    **{f"{place}/v1beta/models/m:{call}": [_GENERATE] for place in ("", "/sessions/s") for call in _CALLS_OF_GOOGLE},
    "/sessions/s/v1/responses": RESPONSES,
    "/v1/responses": RESPONSES,
    "/sessions/s/reward_info": [{"reward_info": {"score": 1.0}}, {"reward_info": {}, "branch": "x"}],
    "/sessions/s/complete": [{"reward_info": {"score": 0}}, {}],
    "/sessions/s/trajectories": [{}],
    "/sessions/s/finalize": [{"export_all_checkpoints": True, "shared_turns": "every", "format": "json"}],
    "/sessions/s": [{}],
    "/trajectories/claim": [
        {"groups": 2, "group_size": 1, "lease_seconds": 60, "allow_partial": True, "partial_after_seconds": 0},
        {"limit": 3, "exact_only": True, "max_staleness": 1, "return_logp": False, "return_routed_experts": False},
    ],
    "/trajectories/ack": [{"claim_id": "x"}],
    "/trajectories/release": [{"claim_id": "x"}],
    "/trajectories/renew": [{"claim_id": "x", "lease_seconds": 1}],
    "/trajectories/drop": [{"group_id": "g"}],
    "/trajectories/reward": [
        {"request_id": "r1", "reward": 0.5, "reward_info": {"a": 1}, "group_id": "g"},
        {"rewards": [{"group_id": "g", "rollout_id": "o", "reward": None}, {"request_id": "r2", "reward": 1}]},
    ],
    "/inspect/api/explain": [{"text": "Hello, and", "namespace": "", "adapter": ""}],
    "/echo": [{"anything": [1, 2, {"a": None}]}],
}
"""By path. A route that is not here is sent something all the same: `ANY`."""

_CONVERSATION = "/inspect/api/conversations/session%3As"
_SHAPES = (
    "export_all_checkpoints=true&shared_turns=every&format=json",
    "format=safetensors",
    "format=arrow",
    "format=tree",
)
ASKED: dict[str, tuple[str, ...]] = {
    "/trajectories": ("group=g",),
    "/sessions": ("", "limit=2"),
    "/sessions/s/trajectories": ("", *_SHAPES),
    "/sessions/s/finalize": ("", *_SHAPES),
    "/inspect/api/conversations": (
        "",
        "limit=2&kind=session&exact=true&reward_min=0&reward_max=1&since=0&until=9e9&version=default",
        "kind=text&text=Hello&id=r1&token_ids=5,6&group=g&namespace=&reason=edited_turn&cursor=0&changed_since=1",
    ),
    _CONVERSATION: ("",),
    "/inspect/api/conversations/text%3Ar1": ("",),
    "/inspect/api/conversations/text%3Ar1/branches/r1": ("",),
    "/inspect/api/conversations/text%3Ar1/branches/r1/tokens": ("start=0&end=5",),
    "/inspect/api/conversations/text%3Ar1/branches/r1/find": ("text=e&from=0&limit=3", "token_ids=5,6&from=1"),
    "/inspect/api/conversations/text%3Ar1/branches/r1/drift": ("from=0",),
    "/inspect/api/conversations/text%3Ar1/branches/r1/download": ("format=json", "format=parquet", "format=html"),
    "/inspect/api/compare": ("a=text%3Ar1&a_branch=r1&b=text%3Ar1&b_branch=r1", "a=session%3As&b=text%3Ar1"),
    "/inspect/api/run": ("",),
}
"""Queries of paths that are asked with GET: where a mutation of a query begins."""

ANY: list[Any] = [{}, {"a": 1, "abort_all_requests": True}, {"tags": ["kv_cache"], "lora_name": "a", "lora_path": "/a"}]


def words() -> list[str]:
    """All keys that stand in a body, wherever."""
    found: dict[str, None] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            found.update(dict.fromkeys(value))
            value = list(value.values())
        if isinstance(value, list):
            for one in value:
                collect(one)

    collect([*BODIES.values(), ANY])
    return [*found, "", "Text", "max_tokens", "unknown", "__proto__", "index", "meta_info"]
