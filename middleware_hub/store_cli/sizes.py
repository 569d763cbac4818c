"""`tito-router store stats`, and how sizes are written."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from middleware_hub.sessions.events import DELETED, PREFIX
from middleware_hub.spans.versions import is_number
from middleware_hub.store.protocol import Store
from middleware_hub.store.redis.address import shown
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.selection import last_version, named

_PAGE: Final = 1_000


async def stats(store: Store, args: argparse.Namespace) -> int:
    """Print how much is in a store, and return the exit status."""
    found = await store.stats()
    answer: dict[str, Any] = {
        "store": shown(args.store),
        "bytes": found.bytes,
        "conversations": found.roots,
    }
    if not args.quick:
        read = await _read_all(store, found.records)
        answer |= {**read.told, "sessions": await _sessions(store)}
    answer |= {"records": found.records, "logs": found.logs}
    if found.media:
        answer |= {"images": found.media, "image_bytes": found.media_bytes}
        if not args.quick:
            answer["unnamed_images"] = await store.media_unnamed()
    if args.tokens and not args.quick:
        answer |= {"characters": read.characters, "parts": read.parts}
    if args.json:
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        return 0
    for name, value in answer.items():
        if isinstance(value, list):
            sys.stdout.write(f"{name}\n")
            for row in value:
                sys.stdout.write("  " + ", ".join(f"{key} {_shown(key, one)}" for key, one in row.items()) + "\n")
        else:
            sys.stdout.write(f"{name.replace('_', ' '):16} {_shown(name, value)}\n")
    return 0


class _Read(NamedTuple):
    """Sums over all records of a store: `told` in any case, the rest on demand."""

    told: dict[str, Any]
    characters: int
    parts: list[dict[str, Any]]


async def _sessions(store: Store) -> int:
    """Return how many sessions have not ended."""
    count, after = 0, ""
    while logs := await store.logs(PREFIX, after=after, limit=_PAGE):
        count += sum(log.closed < DELETED for log in logs)
        after = logs[-1].log
    return count


async def _read_all(store: Store, records: int) -> _Read:
    """Count the turns and tokens of each namespace and weight version. This reads everything."""
    replies: Counter[tuple[str, ...]] = Counter()
    sampled: Counter[tuple[str, ...]] = Counter()
    tokens = characters = 0
    oldest = newest = 0
    with bar("reading", records) as advance:
        async for record in store.scan():
            advance(1)
            tokens += record.count
            characters += len(record.text)
            if record.sampled:
                key = (*named(record.namespace), last_version(record))
                replies[key] += 1
                sampled[key] += record.count
                oldest, newest = min(oldest or record.serial, record.serial), max(newest, record.serial)
    fields = ("tenant", "lora_path", "namespace", "weight_version")
    told = {
        "turns": replies.total(),
        "tokens": tokens,
        "sampled_tokens": sampled.total(),
        "namespaces": len({key[:3] for key in replies}),
        "oldest": _moment(oldest),
        "newest": _moment(newest),
    }
    parts = [
        {**dict(zip(fields, key, strict=True)), "turns": count, "sampled_tokens": sampled[key]}
        for key, count in sorted(replies.items(), key=lambda part: (part[0][:3], _in_order(part[0][3])))
    ]
    return _Read(told, characters, parts)


def _moment(serial: int) -> str | None:
    """Return when a record was made, in UTC, to the second; None for no record."""
    return datetime.fromtimestamp(serial // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if serial else None


def _in_order(version: str) -> tuple[bool, int, str]:
    """Return the place of a weight version: numbers by their value, then names."""
    return (False, int(version), "") if is_number(version) else (True, 0, version)


def size(count: int) -> str:
    """Return a number of bytes in a readable form."""
    number = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _shown(name: str, value: Any) -> str:
    if name.endswith("bytes"):
        return f"{value:,} ({size(value)})"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else repr(value) if value == "" else str(value)
