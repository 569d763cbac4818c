"""Large and many: what one client sends is refused or served, told in one line, and not another client's trouble."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stack import Stack, stack

SHORT = {"max_new_tokens": 1}
REFUSED = (
    ("/generate", {"text": "a", "sampling_params": SHORT}),
    ("/generate", {"text": "a", "sampling_params": SHORT, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), server={"max_batch": 100}, radix={"max_text_tokens": 1000}) as started:
        yield started


@pytest.mark.parametrize("text", [" word" * 2000, "a" * 8001], ids=["by its tokens", "by its characters"])
def test_a_long_text_is_refused_on_every_route(served: Stack, text: str) -> None:
    """And no worker has heard of it."""
    before = len(served.workers[0].log)
    opened = served.post("/sessions", {}).json()["session_id"]
    for path, body in (
        ("/generate", {"text": text, "sampling_params": SHORT}),
        ("/generate", {"text": ["a", text], "sampling_params": SHORT}),
        ("/generate", {"prompt_segments": [{"ids": [1]}, {"text": text}], "sampling_params": SHORT}),
        ("/generate", {"prompt_segments": [{"text": "a"}, {"ids": [1] * 1001}], "sampling_params": SHORT}),
        ("/retrieve_from_text", {"text": text}),
        ("/retrieve_from_text", {"text": ["a", text]}),
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        (f"/sessions/{opened}/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
    ):
        answer = served.post(path, body)
        assert answer.status == 413, (path, answer.content)
        assert b"--max-text-tokens" in answer.content
    assert len(served.workers[0].log) == before


@pytest.mark.parametrize("other", [{"text": " word" * 600}, {"ids": [100] * 600}], ids=["a text", "ids"])
def test_segments_that_are_too_long_together_are_refused(served: Stack, other: dict[str, object]) -> None:
    """As the same prompt is in one piece."""
    before = len(served.workers[0].log)
    short = {"text": " word" * 300}
    for segments, status in (([short, {"text": " word" * 600}], 200), ([short, short, other, short], 413)):
        answer = served.post("/generate", {"prompt_segments": segments, "sampling_params": SHORT})
        assert answer.status == status, answer.content
    assert b"--max-text-tokens" in answer.content
    assert len(served.workers[0].log) == before + 1


def test_a_batch_over_the_limit_is_refused_on_every_route(served: Stack) -> None:
    before = len(served.workers[0].log)
    for path, body in (
        ("/generate", {"text": ["a"] * 101, "sampling_params": SHORT}),
        ("/generate", {"input_ids": [[1]] * 101, "sampling_params": SHORT}),
        ("/generate", {"text": ["a"] * 51, "sampling_params": {**SHORT, "n": 2}}),
        ("/retrieve_from_text", {"text": ["a"] * 101}),
        ("/v1/completions", {"prompt": ["a"] * 101, "max_tokens": 1}),
    ):
        answer = served.post(path, body)
        assert answer.status == 400, (path, answer.content)
        assert b"--max-batch" in answer.content
    assert len(served.workers[0].log) == before


ROUTES = (
    "/generate /retrieve_from_text /radix_tree/explain /v1/completions /v1/chat/completions /sessions /abort_request"
)


@pytest.mark.parametrize("path", [*ROUTES.split(), "/update_weight_version"])
def test_a_million_small_things_are_refused_unread_on_every_route_that_reads(served: Stack, path: str) -> None:
    """Reading them would hold up everybody for seconds."""
    answer = served.post(path, None, raw=b'{"text": "a", "x": [' + b"[]," * 1_000_000 + b"[]]}")
    assert answer.status == 413, answer.content
    assert b"too many values" in answer.content


def test_a_large_batch_that_is_not_recorded_is_one_line(served: Stack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        served.post("/generate", {"text": ["a b"] * 100, "sampling_params": {**SHORT, "temperature": -1}})
    lines = [record.getMessage() for record in caplog.records if "recorded as exact" in record.getMessage()]
    assert len(lines) == 1, lines
    assert "100 of 100 replies" in lines[0]


def test_a_router_without_workers_does_not_fill_its_log(caplog: pytest.LogCaptureFixture) -> None:
    """Clients repeat what is refused, thousands of times in a minute."""
    with stack("qwen", styles=("cumulative",)) as served:
        served.post("/remove_worker", {"url": served.workers[0].url})
        with caplog.at_level(logging.INFO):
            refused = [served.post(path, body) for path, body in REFUSED for _ in range(3)]
    assert [one.status for one in refused] == [503] * len(refused)
    assert not [record.getMessage() for record in caplog.records if "recorded as exact" in record.getMessage()]


def test_no_two_metrics_share_a_name(served: Stack) -> None:
    """A counter is called by its name with and without `_total`, by one exposition format and the other."""
    families = text_string_to_metric_families(served.get("/metrics").content.decode())
    names = Counter(family.name.removesuffix("_total") for family in families)
    assert [name for name, count in names.items() if count > 1] == []
