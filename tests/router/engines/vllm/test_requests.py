"""Bodies of `/generate`, and what a vLLM worker gets for them."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec
import pytest

from router.engines.engine import EngineAnswer, EngineCall, KnownWorker
from router.engines.vllm.engine import Vllm
from router.engines.vllm.images import NamedImages
from router.engines.vllm.requests import COMPLETIONS, GENERATE, SCALE_OUT, engine_ids, read
from router.errors import BadRequestError

WITH = frozenset({SCALE_OUT})
WITHOUT: frozenset[str] = frozenset()
Json = dict[str, Any]


def sent(body: Json, abilities: frozenset[str] = WITHOUT) -> list[tuple[str, Json]]:
    asked = read(msgspec.json.encode(body), abilities, NamedImages())
    return [(prompt.call.target, json.loads(prompt.call.body or b"")) for prompt in asked.prompts]


def test_a_worker_without_scale_out_completes() -> None:
    ((path, body),) = sent({"input_ids": [1, 2], "rid": "x", "return_logprob": True, "sampling_params": {"stop": "a"}})
    assert path == COMPLETIONS
    assert body == {
        **{"prompt": [1, 2], "request_id": "x", "logprobs": 0, "return_token_ids": True, "stop": "a"},
        **{"max_tokens": 128, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    }


def test_a_worker_with_scale_out_tells_versions_too() -> None:
    body = {
        "input_ids": [1, 2],
        "rid": "x",
        "return_logprob": True,
        "stream": True,
        "sampling_params": {"max_new_tokens": None},
    }
    ((path, found),) = sent(body, WITH)
    assert path == GENERATE
    assert found.pop("sampling_params") == {
        **{"logprobs": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    }
    assert found == {
        **{"token_ids": [1, 2], "request_id": "x", "output_mode": "text", "return_token_ids": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }


def test_a_structural_tag_holds_from_the_first_token_on() -> None:
    """A worker with `--reasoning-parser` waits else until reasoning ends: a call that is forced would not be forced."""
    for name, value, told in (("structural_tag", "{}", True), ("regex", "a+", None)):
        ((_, found),) = sent({"input_ids": [1, 2], "sampling_params": {name: value}}, WITH)
        assert found.get("reasoning_ended") is told
        assert found["sampling_params"]["structured_outputs"] == {name: value}


def test_as_many_as_there_is_room_for_is_the_context_to_a_worker_that_takes_null_for_16() -> None:
    asked = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": None}}
    for abilities, limit in ((frozenset({"context-2048"}), 2048), (WITHOUT, None)):
        ((path, body),) = sent(asked, abilities)
        assert (path, body["max_tokens"]) == (COMPLETIONS, limit)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"top_logprobs_num": 3}, {"logprobs": 3, "return_tokens_as_token_ids": True}),
        ({"token_ids_logprob": [5]}, {"logprobs": 1, "logprob_token_ids": [5], "return_tokens_as_token_ids": True}),
        ({"logprob_start_len": 0}, {"logprobs": 0, "prompt_logprobs": 0}),
        ({"return_text_in_logprobs": True}, {"logprobs": 0, "return_tokens_as_token_ids": False}),
    ],
    ids=str,
)
def test_ids_of_other_tokens_come_through_the_older_door(more: Json, expected: Json) -> None:
    ((path, body),) = sent({"input_ids": [1], "return_logprob": True, **more}, WITH)
    assert path == COMPLETIONS
    assert expected.items() <= body.items()


def test_a_text_goes_through_the_older_door() -> None:
    """Without a middleware that encodes it."""
    ((path, body),) = sent({"text": "Hello"}, WITH)
    assert (path, body["prompt"]) == (COMPLETIONS, "Hello")


def test_every_prompt_of_a_batch_gets_what_is_its_own() -> None:
    body = {
        "input_ids": [[1], [2, 3]],
        "rid": ["a", "b"],
        "sampling_params": [{"temperature": 0.5}, {"max_new_tokens": 1}],
        "lora_path": ["x", None],
        "return_logprob": [True, False],
        "top_logprobs_num": [1, 2],
        "token_ids_logprob": [None, [3]],
        "priority": 2,
    }
    (_, first), (_, second) = sent(body)
    assert (first["prompt"], second["prompt"]) == ([1], [2, 3])
    assert (first["request_id"], second["request_id"]) == ("a", "b")
    assert (first["temperature"], second["temperature"]) == (0.5, 1.0)
    assert (first["max_tokens"], second["max_tokens"]) == (128, 1)
    assert (first["model"], second.get("model")) == ("x", None)
    assert (first["logprobs"], second.get("logprobs")) == (1, None)
    assert first["priority"] == second["priority"] == -2


def test_vllms_own_fields_pass() -> None:
    own = {"cache_salt": "s", "session_id": "t", "kv_transfer_params": {"a": [1]}}
    for abilities in (WITH, WITHOUT):
        ((_, body),) = sent({"input_ids": [1], **own}, abilities)
        assert own.items() <= body.items()
    ((_, body),) = sent({"input_ids": [1], "sampling_params": {"vllm_xargs": {"a": 1}}}, WITH)
    assert body["sampling_params"]["extra_args"] == {"a": 1}


@pytest.mark.parametrize(("own", "salt"), [({}, "k"), ({"cache_salt": None}, "k"), ({"cache_salt": "s"}, "s")])
def test_a_salt_in_vllms_own_words_goes_before_one_in_sglangs(own: dict[str, Any], salt: str) -> None:
    asked = read(msgspec.json.encode({"input_ids": [1], "extra_key": "k", **own}), WITHOUT, NamedImages())
    assert msgspec.json.decode(asked.prompts[0].call.body)["cache_salt"] == salt


def test_samples_have_names_of_their_own() -> None:
    asked = read(
        msgspec.json.encode({"input_ids": [1], "rid": "x", "sampling_params": {"n": 3}}), WITHOUT, NamedImages()
    )
    assert len(set(asked.prompts[0].rids)) == 3
    assert asked.listed


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({}, "text"),
        ({"input_ids": [1], "image_data": ["x"]}, "image_data"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"input_ids": [1], "return_hidden_states": True}, "return_hidden_states"),
        ({"input_ids": [1], "return_routed_experts": True}, "return_routed_experts"),
        ({"input_ids": [1], "session_params": {"id": "x"}}, "session_params"),
        ({"input_ids": [1], "custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"input_ids": [[1], [2]], "custom_logit_processor": [None, "x"]}, "custom_logit_processor"),
        ({"input_ids": [1], "watermark": {"key": 1}}, "watermark"),
        ({"input_ids": [1], "require_reasoning": True}, "require_reasoning"),
        ({"input_ids": [1], "max_thinking_tokens": 100}, "max_thinking_tokens"),
        ({"input_ids": [1], "bootstrap_room": 5}, "bootstrap_room"),
        ({"input_ids": [1], "return_flat_raw_output_top_logprobs": True}, "return_flat_raw_output_top_logprobs"),
        ({"input_ids": [1], "stream": True, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        (
            {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [1]},
            "token_ids_logprob",
        ),
        (
            {"input_ids": [1], "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [1]},
            "token_ids_logprob",
        ),
        (
            {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True},
            "return_text_in_logprobs",
        ),
        ({"input_ids": [1], "rid": ["a", "b"]}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n"),
        ({"input_ids": [1], "sampling_params": {"n": 10**9}}, "n"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 10**9}]}, "n"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
        ({"input_ids": [1], "stream": "yes"}, "stream"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_named(body: Json, name: str) -> None:
    with pytest.raises(BadRequestError, match=f"`{name}`"):
        sent(body)


@pytest.mark.parametrize("nothing", [None, False, [], {}, "", [None, None], [[]], [False]], ids=str)
def test_asking_for_nothing_is_no_fault(nothing: Any) -> None:
    assert sent({"input_ids": [1], "return_hidden_states": nothing, "image_data": nothing, "session_params": nothing})


@pytest.mark.parametrize("field", ["image_data", "input_embeds", "custom_logit_processor"])
def test_lists_may_be_nested_as_deeply_as_json_is_read(field: str) -> None:
    """A client nests as it likes, so none of them is walked by recursion, which has a limit of its own."""
    depth = sys.getrecursionlimit() // 2
    nest = b"[" * depth + b"]" * depth
    asked = read(b'{"input_ids": [1], "%b": %b}' % (field.encode(), nest), WITHOUT, NamedImages())
    assert len(asked.prompts) == 1
    with pytest.raises(BadRequestError, match=f"`{field}`"):
        read(b'{"input_ids": [1], "%b": %b}' % (field.encode(), nest.replace(b"[]", b"[1]")), WITHOUT, NamedImages())


def test_an_abort_finds_a_generation_at_either_door() -> None:
    assert engine_ids("x") == ["cmpl-x-0", "generate-tokens-x"]


def test_a_refusal_is_the_answer() -> None:
    found = Vllm().exchange(EngineCall("POST", "/generate", b'{"input_ids":[1],"image_data":["x"]}'), KnownWorker())
    assert isinstance(found, EngineAnswer)
    assert found.status == 400
    assert "`image_data`" in json.loads(found.body)["error"]["message"]


def test_a_large_batch_is_read_in_linear_time() -> None:
    """It is read in the event loop, where others wait."""
    count = 8192
    body = {
        "input_ids": [[1]] * count,
        "sampling_params": [{"max_new_tokens": number} for number in range(count)],
        "rid": [f"r{number}" for number in range(count)],
        "return_logprob": [True] * count,
        "token_ids_logprob": [[number] for number in range(count)],
    }
    begun = time.process_time()
    found = sent(body)
    assert time.process_time() - begun < 5, "with a walk through each list for each prompt it takes 50 s"
    assert [one["max_tokens"] for _, one in found[1:]] == list(range(1, count))
    assert [one["request_id"] for _, one in found] == body["rid"]
    assert [one["logprob_token_ids"] for _, one in found] == body["token_ids_logprob"]
