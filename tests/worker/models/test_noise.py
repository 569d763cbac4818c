"""Noise is spelled as no encoder would, and is the same in every run."""

from __future__ import annotations

import pytest

from tests.support.usual import usual
from tests.support.vocabularies import Name, vocabulary
from tests.worker.talk import generate
from worker.worker import EmbeddedWorker

WHOLE: tuple[Name, ...] = ("qwen-whole", "mistral-v1", "tekken-whole")


@pytest.mark.parametrize("name", usual(WHOLE, "mistral-v1"))
def test_random_replies_are_mostly_not_what_re_encoding_gives(name: Name) -> None:
    """Otherwise a router that encodes again would pass every test."""
    with EmbeddedWorker(vocabulary(name)) as worker:
        for _ in range(20):
            generate(worker, "Hello", sampling_params={"max_new_tokens": 20})
        encode = worker.vocabulary.tokenizer.encode
        same = [encode(record.text, add_special_tokens=False).ids == record.output_ids for record in worker.log]
    assert sum(same) <= 4


def test_the_same_seed_samples_the_same_ids() -> None:
    runs = []
    for _ in range(2):
        with EmbeddedWorker(vocabulary("qwen"), seed=7) as worker:
            runs.append([generate(worker)["output_ids"] for _ in range(3)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
