"""The store: it keeps recorded replies beyond the end of this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.config.flag import Section, flag

Durability = Literal["process", "disk", "off"]
StoreFailure = Literal["spool", "refuse"]


@dataclass(frozen=True)
class StoreConfig(Section):
    """The memory that outlives the process. With a `url` of None, only this process remembers."""

    TITLE = "the store"

    url: str | None = flag(
        "--store",
        None,
        "where to keep recorded replies and sessions, across restarts and for other routers: sqlite:PATH (a folder or a file),"
        " redis://HOST:PORT/DB, rediss://, redis+sentinel://HOST:PORT,HOST:PORT/NAME/DB, redis+cluster://HOST:PORT;"
        " @FILE has it in a file, which the list of processes does not show",
        metavar="URL",
        unset="nowhere: it ends with this process",
    )
    prefix: str = flag(
        "--store-prefix",
        "tito:",
        "beginning of the keys of a store in Redis; stores with different prefixes are separate",
    )
    durability: Durability = flag(
        "--durability",
        "process",
        "what a reply waits for before its last byte leaves: a record that survives the death of this process, one that"
        " survives a power cut (disk), or nothing (off)",
    )
    failure: StoreFailure = flag(
        "--store-failure",
        "spool",
        "while the store does not answer: serve requests, and keep their records in a file until it does (spool), or answer 503"
        " before a worker is asked (refuse)",
    )
    spool: str | None = flag(
        "--store-spool",
        None,
        "folder for records that wait for the store, on a disk of this machine that outlives the process; the routers"
        " of one machine may share it",
        metavar="PATH",
        unset="below the user's cache",
    )
    spool_max_bytes: int = flag(
        "--store-spool-max-bytes",
        1 << 30,
        "most bytes that wait for the store; beyond, requests get 503 before a worker is asked",
    )
    max_bytes: int | None = flag(
        "--store-max-bytes",
        None,
        "most bytes in the store; beyond, whole conversations are forgotten, retrieved ones first",
        unset="the disk is the limit",
    )
