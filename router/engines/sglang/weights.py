"""Weight updates: the version that a call brings."""

from __future__ import annotations

import msgspec

from router.engines.json import JSON_ERRORS
from router.engines.sglang.limits import LONGEST_NAME
from router.errors import BadRequestError


class _WeightUpdate(msgspec.Struct):
    new_version: str | None = None
    weight_version: str | None = None


def new_weight_version(body: bytes) -> str | None:
    """Return the version that a body of `/update_weight_version` or `/update_weights_from_*` brings; None if it brings none.

    Raises BadRequestError for a version that is longer than `LONGEST_NAME`.
    """
    try:
        update = msgspec.json.decode(body, type=_WeightUpdate)
    except JSON_ERRORS:
        return None
    version = update.new_version or update.weight_version
    if version is not None and len(version) > LONGEST_NAME:
        raise BadRequestError(f"the weight version is longer than {LONGEST_NAME} characters")
    return version
