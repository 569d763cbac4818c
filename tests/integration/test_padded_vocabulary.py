"""Ids of a model's padded vocabulary that a worker sampled come back in prompts, though the tokenizer does not know them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.config import StoreConfig
from tests.support.lives import Router, tokenizer_of
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedWorker]:
    """A model of more ids than the router's tokenizer has: special ones, which have no text."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(vocabulary("qwen"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|padding {number}|>" for number in range(9)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with EmbeddedWorker(folder, token_delay=0) as made:
        yield made


@pytest.fixture
def router(worker: EmbeddedWorker, tmp_path: Path) -> Iterator[Router]:
    tokenizer_of.cache_clear()  # what another test has learnt
    made = Router(worker, StoreConfig(url=f"sqlite:{tmp_path / 'store.sqlite3'}"), folder=vocabulary("qwen"))
    yield made
    made.stop()
    tokenizer_of.cache_clear()


def restart(router: Router) -> None:
    """A new process: with a tokenizer that has learnt nothing."""
    router.stop()
    tokenizer_of.cache_clear()
    router.start()


PROMPTS: dict[str, Any] = {
    "ids": lambda ids: ("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}),
    "a batch": lambda ids: ("/generate", {"input_ids": [ids, ids], "sampling_params": {"max_new_tokens": 1}}),
    "segments": lambda ids: (
        "/generate",
        {"prompt_segments": [{"ids": ids}, {"text": " so"}], "sampling_params": {"max_new_tokens": 1}},
    ),
    "a completion": lambda ids: ("/v1/completions", {"prompt": ids, "max_tokens": 1}),
}


@pytest.mark.parametrize("form", PROMPTS)
@pytest.mark.parametrize("restarted", [False, True])
def test_an_id_that_a_worker_sampled_is_taken_back(
    router: Router, worker: EmbeddedWorker, form: str, restarted: bool
) -> None:
    size = len(router.hub.tokenizer.vocabulary)
    assert worker.vocabulary.size > size + 2
    hello = router.hub.tokenizer.encode_start("Hello")
    sampled = [*router.hub.tokenizer.encode_tail(" one"), size + 1, *router.hub.tokenizer.encode_tail(" two")]

    def ask(ids: list[int]) -> Any:
        path, body = PROMPTS[form](ids)
        return router.stack.post(path, body)

    refused = ask([*hello, size + 1])
    assert refused.status == 400
    named = {"a completion": "prompt", "segments": "prompt_segments[0].ids"}.get(form, "input_ids")
    message = f"`{named}` has {size + 1} in it, and the vocabulary is 0 to {size - 1}"
    assert refused.json()["error"]["message"] == message
    script = {"ids": sampled, "finish": "length"}
    sampling = {"max_new_tokens": len(sampled), "ignore_eos": True, "custom_params": {"script": script}}
    answer = router.stack.post("/generate", {"input_ids": hello, "sampling_params": sampling})
    assert answer.headers["x-radix-recorded"] == "exact", answer.content
    assert worker.log[-1].output_ids == sampled
    if restarted:
        restart(router)
    for count in (len(sampled), 2):
        if count == 2 and restarted:
            restart(router)
        again = ask([*hello, *sampled[:count]])
        assert again.status == 200, again.content
        assert list(worker.log[-1].input_ids)[: len(hello) + count] == [*hello, *sampled[:count]]
    for wrong in (size + 2, -1, 2**31):
        assert ask([*hello, *sampled, wrong]).status == 400
    assert router.stack.get("/health").status == 200
