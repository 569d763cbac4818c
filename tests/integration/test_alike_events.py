"""Streams of `/generate` to a client that did not ask for logprobs: most of their events are cut, not decoded."""

from __future__ import annotations

import pytest

from tests.support.stack import events, stack


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_client_sees_every_event_but_the_logprobs(style: str, interval: int) -> None:
    """Each event has what the worker's has, and what the client asked for, to the last token."""
    with stack("qwen", styles=(style,)) as served:
        (worker,) = served.workers
        sampling = {"max_new_tokens": 40, "ignore_eos": True, "stream_interval": interval}
        body = {"text": "hi", "stream": True, "sampling_params": sampling}
        asked = events(served.post("/generate", {**body, "return_logprob": True}))
        found = events(served.post("/generate", body))
        for log, shown in ((worker.log[-2], asked), (worker.log[-1], found)):
            ids: list[int] = []
            text = ""
            for event in shown:
                ids = event["output_ids"] if style == "cumulative" else [*ids, *event["output_ids"]]
                text = event["text"] if style != "incremental" else text + event["text"]
                assert len(ids) == event["meta_info"]["completion_tokens"]
                assert ids == log.output_ids[: len(ids)]
            assert (ids, len(shown)) == (log.output_ids, 1 + -(-39 // interval))
            assert served.post("/retrieve_from_text", {"text": "hi" + text}).json()["exact"]
        assert all("output_token_logprobs" in event["meta_info"] for event in asked)
        assert not any("logprob" in name for event in found for name in event["meta_info"])
        assert [event["meta_info"].keys() - {"id"} for event in found] == [
            {name for name in event["meta_info"] if "logprob" not in name} - {"id"} for event in asked
        ]
