"""Salts on real engines: what a session of thirty turns over two updates reads of its cache, by its own `cached_tokens`.

`python -m benchmarks.serving.salts --engine sglang` prints the same as the table of docs/trainers.md.
"""

from __future__ import annotations

import pytest

from tests.integration.conftest import RouterFor
from tests.support import templates
from tests.support.client import call
from tests.support.engines import Engine
from tests.support.talk import Talk, over_updates

ENGINES = ("sglang", "vllm")
TURNS, EVERY = 30, 10


@pytest.fixture
def router(router_for: RouterFor) -> str:
    """In front of one worker: its cache is the witness."""
    return router_for(0, flags=("--chat-template", str(templates.folder() / "qwen2_5.jinja")))


@pytest.mark.parametrize("mode", ["off", "version", "rollout"])
def test_a_session_over_updates(engine: Engine, router: str, mode: str) -> None:
    assert call(f"{router}/flush_cache", {}).status == 200
    found = over_updates(router, mode, engine.cached, turns=TURNS, every=EVERY)
    talk, first, old = found.talk, found.first, found.old
    steady = [again for at, again in enumerate(talk.again) if at not in first]
    assert sum(steady) == 0, "between updates the whole last turn is in the cache"
    versions = talk.kv_versions()
    if mode == "version":
        assert sum(old) == 0
        assert [talk.cached[at] for at in first] == [0, 0], "nothing of an older version is read"
        assert versions == ["1"] * EVERY + ["2"] * EVERY + ["3"] * EVERY
        return
    assert sum(talk.again) == 0
    assert all(old[EVERY:]), "it goes on with its cache"
    assert versions == [None if mode == "off" else "1"] * TURNS
    other = Talk(router, mode, engine.cached)
    other.turn()
    assert (other.cached[0] > 0) == (mode == "off" and engine.cached(other.known) > 0), "a new one reads none of it"
