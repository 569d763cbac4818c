"""The salt of the engines' caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.config.flag import Section, flag

SaltMode = Literal["off", "version", "rollout"]


@dataclass(frozen=True)
class KvSaltConfig(Section):
    """With which requests a request shares what an engine has cached (`router/kv_cache/salts.py`)."""

    TITLE = "the engines' caches"

    mode: SaltMode = flag(
        "--kv-salt",
        "off",
        "which requests share an engine's prefix cache: those of one weight version, or also each conversation with its own"
        " past (rollout); x-kv-salt overrules it for one request",
    )
    tenants: bool = flag(
        "--kv-salt-tenants",
        False,
        "tenants (of --api-key) never share an engine's prefix cache, whatever --kv-salt says",
    )
