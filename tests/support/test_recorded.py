"""The recordings hold what they say: an engine computed with the ids that were sent, each image as long as it is."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from tests.support.recorded import Exchange, exchanges
from tests.support.vision import FAMILIES, PLACEHOLDER, VISIONS


def compact(ids: list[int]) -> list[int]:
    return [one for number, run in groupby(ids) for one in ([number] if number == PLACEHOLDER else run)]


def replies(exchange: Exchange) -> list[Any]:
    return exchange.reply if isinstance(exchange.reply, list) else [exchange.reply]


@pytest.mark.parametrize("engine", list(VISIONS))
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_come_back_expanded(engine: str, family: str) -> None:
    checked = 0
    for exchange in exchanges(engine, family):
        sent = exchange.body["input_ids" if engine == "sglang" else "token_ids"]
        for number, reply in enumerate(replies(exchange)):
            if not reply.get("prompt_token_ids"):
                continue
            told = reply.get("meta_info") or {}
            batch = isinstance(sent[0], list)
            assert compact(reply["prompt_token_ids"]) == (sent[reply.get("index", number)] if batch else sent), (
                exchange.name
            )
            length = reply["prompt_token_ids"].count(PLACEHOLDER)
            spans = [one["length"] for one in (reply.get("mm_placeholders") or {}).get("image", [])]
            assert length == (told.get("image_tokens", 0) if told else sum(spans))
            checked += 1
    assert checked > 15
