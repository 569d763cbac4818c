"""Detokenization, chunk by chunk."""

from __future__ import annotations

import pytest

from tests.support.vocabularies import NAMES, Name, vocabulary
from worker.engine.detokenizer import Detokenizer
from worker.engine.source import SamplingParams
from worker.vocabulary import load_vocabulary


@pytest.mark.parametrize("name", NAMES)
def test_incremental_text_is_the_text_of_the_ids(name: Name) -> None:
    """However the ids are cut into chunks, ordinary text stays whole: priming neither loses nor doubles a space."""
    known = load_vocabulary(str(vocabulary(name)))
    prompt, text = known.encode("A prompt: 你好 "), "Hello world, 你好世界 😀🚀 naïve — done.\n\n  And more"
    ids = known.tokenizer.encode(prompt_text := "x" + text, add_special_tokens=False).ids
    assert known.decode([*prompt, *ids], skip_special_tokens=True).endswith(prompt_text)
    for size in (1, 2, 3, 7, 50):
        detokenizer = Detokenizer(known, prompt, SamplingParams())
        out = ""
        for at in range(0, len(ids), size):
            last = at + size >= len(ids)
            out += detokenizer.push(ids[at : at + size], {"type": "length", "length": len(ids)} if last else None)
        assert out.lstrip() == prompt_text
