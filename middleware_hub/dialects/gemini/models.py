"""The models that workers serve, as Google's `GET v1beta/models` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from middleware_hub.dialects.gemini import COUNT, GENERATE, STREAM
from router.engines.json import JSON_ERRORS
from router.errors import NotFoundError, UpstreamError

_METHODS = [GENERATE, STREAM, COUNT]


class _Card(msgspec.Struct):
    """A model as SGLang and vLLM list it."""

    id: str
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_Card]


_decode = msgspec.json.Decoder(_Listing).decode


def google_models(listing: bytes, name: str) -> bytes:
    """Return all models of a worker's listing, or the one of this name, which is empty for all.

    Raises NotFoundError, and UpstreamError for what is no listing.
    """
    try:
        cards: Sequence[_Card] = _decode(listing).data
    except JSON_ERRORS as error:
        raise UpstreamError(f"the worker's list of models is none: {error}") from error
    if not name:
        return msgspec.json.encode({"models": [_model(card) for card in cards]})
    for card in cards:
        if card.id.strip("/") == name.strip("/"):  # a path, which may have lost its slashes
            return msgspec.json.encode(_model(card))
    known = ", ".join(card.id for card in cards) or "none"
    raise NotFoundError(f"there is no model {name[:200]!r}, but: {known}")


def _model(card: _Card) -> dict[str, Any]:
    model: dict[str, Any] = {"name": f"models/{card.id}", "displayName": card.id, "version": "1"}
    if card.max_model_len is not None:
        model |= {"inputTokenLimit": card.max_model_len, "outputTokenLimit": card.max_model_len}
    return {**model, "supportedGenerationMethods": _METHODS}
