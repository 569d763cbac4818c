"""Adapters at retrieval: each adapter answers with its own tokens, also where others said the same text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import Stack, stack

SPELLINGS: dict[str | None, tuple[str, ...]] = {
    None: ("sum", "m", "ary"),
    "x": ("s", "u", "m", "mary"),
    "y": ("sum", "mary"),
}
TEXT = "A:summary"


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as made:
        yield made


@pytest.fixture
def chains(served: Stack, space: str) -> dict[str | None, list[int]]:
    """The same prompt and reply under two adapters and without one, each in a spelling of its own."""
    found = {}
    for adapter, pieces in SPELLINGS.items():
        ids = [number for piece in pieces for number in served.spelling.encode_tail(piece)]
        body: dict[str, Any] = {
            "text": "A:",
            "rid": f"{space}-{adapter}",
            "sampling_params": {"custom_params": {"script": {"ids": ids}}},
            **fields(adapter),
        }
        reply = served.generate(body, headers={"x-radix-namespace": space})
        assert reply.record.body.get("lora_path") == adapter
        found[adapter] = [*reply.record.input_ids, *reply.record.output_ids]
    assert len({tuple(chain) for chain in found.values()}) == 3
    return found


def fields(adapter: str | None) -> dict[str, Any]:
    return {} if adapter is None else {"lora_path": adapter}


@pytest.mark.parametrize("adapter", SPELLINGS)
def test_each_has_its_own_tokens(
    served: Stack, space: str, chains: dict[str | None, list[int]], adapter: str | None
) -> None:
    for strict in (False, True):
        found = served.retrieve(TEXT, namespace=space, strict=strict, **fields(adapter))
        assert (found["tokens"], found["exact"], found["variants"]) == (chains[adapter], True, 1)
        assert found["request_ids"] == [f"{space}-{adapter}"]
    found = served.retrieve([TEXT, TEXT], namespace=space, **fields(adapter))
    assert [one["tokens"] for one in found] == [chains[adapter]] * 2


@pytest.mark.parametrize("adapter", SPELLINGS)
def test_what_another_one_said_is_not_found_by_its_id(
    served: Stack, space: str, chains: dict[str | None, list[int]], adapter: str | None
) -> None:
    for other in SPELLINGS:
        body = {"text": TEXT, "request_id": f"{space}-{other}", **fields(adapter)}
        answer = served.post("/retrieve_from_text", body, headers={"x-radix-namespace": space})
        assert answer.status == (200 if other == adapter else 404)


def test_an_adapter_that_said_nothing_has_nothing(
    served: Stack, space: str, chains: dict[str | None, list[int]]
) -> None:
    found = served.retrieve(TEXT, namespace=space, lora_path="z")
    assert (found["exact"], sum(found["loss_mask"]), found["variants"]) == (False, 0, 0)
    assert found["tokens"] == served.spelling.encode_start(TEXT)


def test_explaining_is_about_one_adapter(served: Stack, space: str, chains: dict[str | None, list[int]]) -> None:
    headers = {"x-radix-namespace": space}
    for adapter, replies in ((None, 1), ("x", 1), ("z", 0)):
        answer = served.post("/radix_tree/explain", {"text": TEXT, **fields(adapter)}, headers=headers).json()
        assert (answer["matched_chars"], answer["replies_matched"]) == (len(TEXT) * replies, replies)


def test_of_a_batch_each_prompt_has_its_own(served: Stack, space: str) -> None:
    """`lora_path` as a list: the second prompt's reply is not the first adapter's."""
    body = {"text": ["B:", "B:", "B:"], "lora_path": ["x", None, "y"], "sampling_params": {"max_new_tokens": 4}}
    reply = served.generate(body, headers={"x-radix-namespace": space})
    for adapter, said, record in zip(("x", None, "y"), reply.body, reply.records, strict=True):
        found = served.retrieve("B:" + said["text"], namespace=space, **fields(adapter))
        assert (found["tokens"], found["exact"]) == ([*record.input_ids, *record.output_ids], True)
        others = [one for one in ("x", None, "y") if one != adapter]
        assert not any(served.retrieve("B:" + said["text"], namespace=space, **fields(one))["exact"] for one in others)
