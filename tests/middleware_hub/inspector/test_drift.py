"""Drift is found in segments, and is what it would be without them."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from middleware_hub.inspector.conversations.chain import Chain
from middleware_hub.inspector.reports import drift as module
from middleware_hub.inspector.reports.drift import Drifts
from middleware_hub.spans.chain import TokenSpan, pack_ids
from middleware_hub.tokenizer.tokenizer import Tokenizer
from tests.support.usual import usual
from tests.support.vocabularies import Name, vocabulary

WORDS = (" forty", "two", " naïve", "你好", "\n", " x = 1;", "🙂", " the", "  ")


@pytest.mark.parametrize("name", usual(["qwen", "tekken", "mistral-v1"], "qwen"))
def test_segments_change_nothing(name: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(str(vocabulary(name)))
    special = sorted(tokenizer.vocabulary.special_ids - set(tokenizer.bos))[:3]
    rng = random.Random(name)
    cut = drifted = 0
    for _ in range(30):
        ids = list(tokenizer.bos)
        for _ in range(rng.randrange(1, 40)):
            ids += tokenizer.encode_tail(rng.choice(WORDS))
            if rng.random() < 0.2:
                ids.append(rng.choice(special))
        span = TokenSpan(None, 0, 0, pack_ids(ids), 0, versions="7")
        chain = Chain([(span, span.count)])
        found = []
        for size in (3, 10**6):
            monkeypatch.setattr(module, "SEGMENT", size)
            found.append(asyncio.run(Drifts(tokenizer).of(chain)).found)
            cut += (
                size == 3
                and len(module.segments(tokenizer.vocabulary.boundaries(np.array(ids, np.int32)), len(ids))) > 1
            )
        assert found[0] == found[1]
        drifted += len(found[0])
    assert drifted
    assert cut
