"""The embedded engine answers requests with images in the shapes in which real engines did when they were recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_both_engines import kinds
from tests.support.asking import Asking
from tests.support.recorded import Exchange, exchanges
from tests.support.vision import PLACEHOLDER
from tests.support.vocabularies import vocabulary
from worker.options import Interface
from worker.worker import EmbeddedWorker

pytestmark = pytest.mark.slow  # a whole vocabulary, whose ids the requests have

LACKING = {("vllm", "logprobs of the prompt")}
"""What the embedded engine does not have."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for file in vocabulary("qwen-vl-whole").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps({"image_token_id": PLACEHOLDER}))
    return folder


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def worker(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[str, EmbeddedWorker]]:
    interface: Interface = request.param
    with EmbeddedWorker(model, interface=interface, context_length=4096) as running:
        yield request.param, running


def test_shapes_are_those_of_the_engine(worker: tuple[str, EmbeddedWorker]) -> None:
    engine, running = worker
    for recorded in exchanges(engine, "qwen2_5_vl"):
        if recorded.aborted or (engine, recorded.name) in LACKING:
            continue
        asking = Asking(running.url, recorded.body, path=recorded.path)
        status = asking.response.status
        streams = status == 200 and recorded.body.get("stream")
        reply: Any = asking.events() if streams else asking.answer().json()
        asking.close()
        own = Exchange(recorded.name, recorded.path, recorded.body, False, status, reply)
        assert status == recorded.status, recorded.name
        assert kinds(own.ends) == kinds(recorded.ends), recorded.name
    assert running.out_of_range == []
