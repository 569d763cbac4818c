"""The cache of a prompt goes from one vLLM worker to another one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.worker.talk import request
from worker.worker import EmbeddedWorker

KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def sent(worker: EmbeddedWorker, transfer: dict[str, Any] | None, **body: Any) -> tuple[int, Any]:
    asked = {"prompt": "Once", "max_tokens": 4, "return_token_ids": True, "kv_transfer_params": transfer, **body}
    status, content, _ = request(worker, "/v1/completions", asked)
    return status, json.loads(content)


def test_a_kept_cache_is_read_once() -> None:
    with (
        EmbeddedWorker(interface="vllm", kv_connector=True) as prefill,
        EmbeddedWorker(interface="vllm", kv_connector=True) as decode,
        EmbeddedWorker(interface="vllm") as plain,
    ):
        status, kept = sent(prefill, KEEP, max_tokens=1)
        assert status == 200
        assert len(prefill.kept_caches) == 1
        status, reply = sent(decode, kept["kv_transfer_params"])
        assert status == 200
        assert reply["kv_transfer_params"] is None
        assert len(prefill.kept_caches) == 0
        assert reply["choices"][0]["token_ids"] == sent(plain, None)[1]["choices"][0]["token_ids"]
        assert sent(decode, kept["kv_transfer_params"])[0] == 500


@pytest.mark.parametrize("connector", [True, False])
def test_only_a_worker_with_a_connector_keeps_any(connector: bool) -> None:
    with EmbeddedWorker(interface="vllm", kv_connector=connector) as worker:
        _, reply = sent(worker, KEEP, max_tokens=1)
        assert (reply["kv_transfer_params"] is not None) is connector
        assert len(worker.kept_caches) == connector
        assert sent(worker, None)[1]["kv_transfer_params"] is None


def test_a_lease_ends() -> None:
    with EmbeddedWorker(interface="vllm", kv_connector=True, kv_lease=0.0) as worker:
        _, reply = sent(worker, KEEP, max_tokens=1)
        assert sent(worker, reply["kv_transfer_params"])[0] == 500
