"""Whether a worker has the router's tokenizer is asked at its `/tokenize`."""

from __future__ import annotations

import msgspec
import pytest

from middleware_hub.tokenizer.worker_check import TEXT, tokenizer_check
from router.workers.worker import WorkerCheck
from tests.middleware_hub.real import tokenizer
from tests.support.fleet import until
from tests.support.stack import stack
from tests.support.vocabularies import NAMES, vocabulary
from worker.options import Interface
from worker.vocabulary import load_vocabulary
from worker.worker import EmbeddedWorker


@pytest.fixture(scope="module", params=NAMES)
def checked(request: pytest.FixtureRequest) -> tuple[str, WorkerCheck]:
    return request.param, tokenizer_check(tokenizer(request.param), "the/path")


@pytest.mark.parametrize("theirs", NAMES)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_another_tokenizer_is_told(checked: tuple[str, WorkerCheck], theirs: str, add_special_tokens: bool) -> None:
    """Whether or not a version of an engine takes `add_special_tokens`."""
    ours, check = checked
    ids = load_vocabulary(vocabulary(theirs)).tokenized(TEXT, add_special_tokens)
    warning = check.judge(msgspec.json.encode({"tokens": ids, "count": len(ids)}))
    if ours == theirs:
        assert warning is None
    else:
        assert warning is not None
        assert "--tokenizer-path the/path" in warning


def test_the_text_is_asked_for_without_what_a_tokenizer_adds(checked: tuple[str, WorkerCheck]) -> None:
    """At its end, too: only a BOS is known to be added."""
    assert msgspec.json.decode(checked[1].call.body or b"") == {"prompt": TEXT, "add_special_tokens": False}


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"tokens":null}', b'{"tokens":[["a"]]}', b"<html>"])
def test_an_answer_that_has_no_ids_says_nothing(checked: tuple[str, WorkerCheck], answer: bytes) -> None:
    assert checked[1].judge(answer) is None


@pytest.mark.parametrize("interface", ["sglang", "vllm"])
def test_a_worker_with_another_tokenizer_is_routed_to_and_told(
    interface: Interface, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        stack("qwen", styles=("cumulative",), interface=interface) as made,
        EmbeddedWorker(vocabulary("mistral-v1"), interface=interface) as other,
    ):
        assert made.post("/add_worker", {"url": other.url}).status == 200

        def warnings() -> dict[str, str | None]:
            return {one["url"]: one["warning"] for one in made.get("/workers").json()["workers"]}

        until(lambda: warnings()[other.url], "the added worker has answered")
        (own,) = made.workers
        assert warnings()[own.url] is None
        assert all(one["is_healthy"] for one in made.get("/workers").json()["workers"])
    assert [other.url in one.message for one in caplog.records if "--tokenizer-path" in one.message] == [True]
