"""Logprobs of a vLLM worker's reply: of the sampled tokens, of other candidates, and of the prompt's own tokens."""

from __future__ import annotations

import json

import msgspec
import pytest

from router.engines.engine import EngineAnswer
from router.engines.form.reply import read_reply
from tests.router.engines.vllm.test_generation import PROMPT, SAMPLE, broken, generation, replies_of, streamed
from tests.router.engines.vllm.worker_json import COMPLETIONS, ENDPOINTS, Piece, Sample, events, whole


def spoil(data: bytes, spoilt: str) -> tuple[bytes, list[float | None]]:
    """Return a reply of `SAMPLE` or an event of its stream with wrong logprobs, and what remains known of them."""
    body = json.loads(data)
    values: list[float | None] = []
    for choice in body["choices"]:
        found, count = choice["logprobs"], len(choice["token_ids"])
        listed = found.get("content", found.get("token_logprobs"))
        values += [one["logprob"] if isinstance(one, dict) else one for one in listed]
        match spoilt:
            case "none at all":
                choice["logprobs"] = None
            case "no lists":
                choice["logprobs"] = {}
            case "one too few":
                found["content" if "content" in found else "token_logprobs"] = listed[:-1]
        if spoilt == "null":
            values[-1] = None
            listed[-1] = {"token": "x", "logprob": None} if "content" in found else None
        else:
            values[-count:] = [None] * count
    return msgspec.json.encode(body), values


@pytest.mark.parametrize("spoilt", ["none at all", "no lists", "one too few", "null"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_logprobs_that_do_not_fit_become_null_and_the_tokens_stay(endpoint: str, spoilt: str) -> None:
    """Nobody knows which token lacks its logprob, so none of that reply, or of that event, has one. It is not exact."""
    body, expected = spoil(whole(endpoint, PROMPT, [SAMPLE]), spoilt)
    found = [(read_reply(generation(endpoint=endpoint).whole([EngineAnswer(200, body)]).body)[0], expected)]
    first, *more = [msgspec.json.encode(event) for event in events(endpoint, PROMPT, [SAMPLE])]
    first, expected = spoil(first, spoilt)
    payloads = b"".join(b"data: %b\n\n" % data for data in (first, *more, b"[DONE]"))
    for cumulative in (True, False):
        one = generation(endpoint=endpoint, stream=True, cumulative=cumulative)
        rest = SAMPLE.logprobs[len(expected) :]
        found.append((replies_of(streamed(one, [payloads]))[0], [*expected, *rest]))
    for reply, logprobs in found:
        assert (list(reply.ids), reply.text) == (SAMPLE.ids, SAMPLE.text)
        assert list(reply.logprobs or ()) == logprobs
        assert reply.fault(3, logprobs_asked=True) == "a logprob that is not a finite number"


@pytest.mark.parametrize("field", ["top_logprobs_num", "token_ids_logprob"])
def test_candidates_of_other_tokens_are_none(field: str) -> None:
    body = broken(COMPLETIONS)
    body["choices"][0]["logprobs"]["top_logprobs"].pop()
    one = generation(**{field: 1 if field == "top_logprobs_num" else [5]})
    meta = json.loads(one.whole([EngineAnswer(200, msgspec.json.encode(body))]).body)["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == SAMPLE.ids
    expected = [] if field == "top_logprobs_num" else [[None, 5, None]]
    assert meta["output_top_logprobs" if field == "top_logprobs_num" else "output_token_ids_logprobs"] == [expected] * 3


def test_a_logprob_that_the_worker_hid_is_not_made_up() -> None:
    """vLLM prints -9999.0 for what is infinite, or not a number. Such a reply is not exact."""
    hidden = Sample([Piece("ab", [5, 6], [-0.5, -9999.0])])
    for endpoint in ENDPOINTS:
        answer = generation(endpoint=endpoint).whole([EngineAnswer(200, whole(endpoint, PROMPT, [hidden]))])
        reply, _ = read_reply(answer.body)
        assert list(reply.logprobs or ()) == [-0.5, None]
        assert reply.fault(3, logprobs_asked=True) == "a logprob that is not a finite number"


def test_candidates_have_their_ids() -> None:
    body = broken(COMPLETIONS)
    tops = [{"token_id:5": -0.5, "token_id:9": -0.25, "token_id:8": -0.75}, {"token_id:6": -1.5, "token_id:2": -9.0}]
    body["choices"][0]["logprobs"]["top_logprobs"] = [*tops, {"token_id:7": -0.25, "token_id:1": -9999.0}]
    one = generation(top_logprobs_num=2)
    meta = json.loads(one.whole([EngineAnswer(200, msgspec.json.encode(body))]).body)["meta_info"]
    assert meta["output_top_logprobs"] == [
        [[-0.25, 9, None], [-0.75, 8, None]],  # the sampled token is none of the best two
        [[-1.5, 6, None], [-9.0, 2, None]],
        [[-0.25, 7, None], [None, 1, None]],
    ]


def test_the_prompts_own_logprobs() -> None:
    body = broken(COMPLETIONS)
    told = [None, {"2": {"logprob": -1.0, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}}, {"3": {"logprob": -9999.0}}]
    body["choices"][0]["prompt_logprobs"] = told
    for start, expected in (
        (0, [[None, 1, None], [-1.0, 2, None], [None, 3, None]]),
        (1, [[None, 2, None], [None, 3, None]]),
        (3, []),
    ):
        one = generation(logprob_start_len=start)
        meta = json.loads(one.whole([EngineAnswer(200, msgspec.json.encode(body))]).body)["meta_info"]
        assert meta["input_token_logprobs"] == expected


def test_a_reply_that_ended_before_its_prompt_was_read_has_no_logprobs_of_it() -> None:
    """Its worker was told to abort it. With any other end they are missing."""
    body = broken(COMPLETIONS)
    body["choices"][0]["prompt_logprobs"] = [None]
    body["choices"][0]["finish_reason"] = "abort"
    answers = [EngineAnswer(200, msgspec.json.encode(body))]
    meta = json.loads(generation(logprob_start_len=0).whole(answers).body)["meta_info"]
    assert meta["input_token_logprobs"] == []
    body["choices"][0]["finish_reason"] = "length"
    answers = [EngineAnswer(200, msgspec.json.encode(body))]
    meta = json.loads(generation(logprob_start_len=0, top_logprobs_num=1).whole(answers).body)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, token, None] for token in PROMPT]
    assert meta["input_top_logprobs"] == [None] * len(PROMPT)
