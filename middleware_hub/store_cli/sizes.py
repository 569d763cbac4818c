"""`tito-router store stats`, and how sizes are written."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

import msgspec

from middleware_hub.spans.versions import is_number
from middleware_hub.store.protocol import Store
from middleware_hub.store.redis.wire.address import shown
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.selection import last_version, named


async def stats(store: Store, args: argparse.Namespace) -> int:
    """Print how much is in a store, and return the exit status."""
    found = await store.stats()
    answer: dict[str, Any] = {
        "store": shown(args.store),
        "bytes": found.bytes,
        "conversations": found.roots,
        "records": found.records,
        "logs": found.logs,
    }
    if args.tokens:
        answer |= await _read_all(store, found.records)
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


async def _read_all(store: Store, records: int) -> dict[str, Any]:
    """Count tokens and characters, and the replies of each namespace and weight version. This reads everything."""
    replies: Counter[tuple[str, ...]] = Counter()
    sampled: Counter[tuple[str, ...]] = Counter()
    tokens = characters = 0
    with bar("reading", records) as advance:
        async for record in store.scan():
            advance(1)
            tokens += record.count
            characters += len(record.text)
            if record.sampled:
                key = (*named(record.namespace), last_version(record))
                replies[key] += 1
                sampled[key] += record.count
    fields = ("tenant", "lora_path", "namespace", "weight_version")
    return {
        "replies": replies.total(),
        "tokens": tokens,
        "sampled_tokens": sampled.total(),
        "characters": characters,
        "parts": [
            {**dict(zip(fields, key, strict=True)), "replies": count, "sampled_tokens": sampled[key]}
            for key, count in sorted(replies.items(), key=lambda part: (part[0][:3], _in_order(part[0][3])))
        ],
    }


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
    if name == "bytes":
        return f"{value:,} ({size(value)})"
    return f"{value:,}" if isinstance(value, int) else repr(value) if value == "" else str(value)
