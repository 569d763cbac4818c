"""The store: where what was recorded outlives this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.config.flag import Section, flag

Durability = Literal["process", "disk", "off"]


@dataclass(frozen=True)
class StoreConfig(Section):
    """The memory that outlives the process. With a `url` of None, everything is remembered by this process alone."""

    TITLE = "the store"

    url: str | None = flag(
        "--store",
        None,
        "where to keep what was recorded, for the next process and for others: sqlite:PATH, a folder or a file",
        metavar="URL",
        unset="nowhere: it ends with this process",
    )
    durability: Durability = flag(
        "--durability",
        "process",
        "what a reply waits for before its last byte leaves: a record that survives the death of this process, one that"
        " survives a power cut (disk), or nothing (off)",
    )
    max_bytes: int | None = flag(
        "--store-max-bytes",
        None,
        "most bytes in the store; beyond, whole conversations are forgotten, the least useful first",
        unset="the disk is the limit",
    )
