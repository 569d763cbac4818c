"""Every fault shows as it should."""

from __future__ import annotations

import http.client
import json
import math
from typing import Any

import pytest

from tests.worker.talk import generate, request
from worker.worker import EmbeddedWorker


def test_spoilt_replies(worker: EmbeddedWorker) -> None:
    def spoilt(fault: Any) -> dict[str, Any]:
        worker.fault(fault)
        return dict(generate(worker, return_logprob=True, sampling_params={"max_new_tokens": 3}))

    assert spoilt("wrong_completion_tokens")["meta_info"]["completion_tokens"] == 4
    assert spoilt("wrong_prompt_tokens")["meta_info"]["prompt_tokens"] == len(worker.log[1].input_ids) + 1
    assert spoilt("wrong_text")["text"] != worker.log[2].text
    assert len(spoilt("missing_logprob")["meta_info"]["output_token_logprobs"]) == 2
    assert math.isnan(spoilt("nan_logprob")["meta_info"]["output_token_logprobs"][-1][0])
    assert spoilt("null_logprob")["meta_info"]["output_token_logprobs"][-1][0] is None
    assert spoilt("wrong_logprob_ids")["meta_info"]["output_token_logprobs"][-1][1] != worker.log[6].output_ids[-1]
    assert not [key for key in spoilt("no_logprobs")["meta_info"] if "logprob" in key]
    assert len(spoilt("missing_last_logprob")["meta_info"]["output_token_logprobs"]) == 2
    assert generate(worker)["text"] == worker.log[-1].text


def test_replies_that_are_errors_or_broken(worker: EmbeddedWorker) -> None:
    def answer(fault: Any, **body: Any) -> tuple[int, bytes, str | None]:
        worker.fault(fault)
        return request(worker, "/generate", {"text": "a", **body})

    assert answer("http_503")[0] == 503
    assert answer("http_500")[0] == 500
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(answer("not_json")[1])
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        answer("dies")
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        answer("dies", stream=True)
    assert b"[DONE]" not in answer("no_done", stream=True)[1]
    assert b'"error"' in answer("error_event", stream=True)[1]
    assert b'"status_code":503' in answer("abort_503", stream=True)[1]
    assert request(worker, "/ping")[0] == 200


def test_no_answer_lasts_until_the_client_leaves(worker: EmbeddedWorker) -> None:
    worker.fault("no_answer")
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
    connection.request("POST", "/generate", json.dumps({"text": "Hi"}), {"content-type": "application/json"})
    worker.wait_for(lambda: worker.in_flight == 1)
    connection.close()
    worker.wait_until_idle()


def test_unknown_keys_can_be_added(worker: EmbeddedWorker) -> None:
    worker.script([5], extra={"new": 1}, extra_meta={"routed_experts": "AAAA"})
    reply = generate(worker)
    assert (reply["new"], reply["meta_info"]["routed_experts"]) == (1, "AAAA")
