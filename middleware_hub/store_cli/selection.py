"""The records that the flags of a command select: by namespace, weight version and age."""

from __future__ import annotations

import argparse
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from middleware_hub.store.paths import Namespace
from middleware_hub.store.records import SpanRecord

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True)
class Places:
    """Part of a store: the records under these names; None matches any name."""

    tenant: str | None = None
    lora_path: str | None = None
    namespace: str | None = None

    def __contains__(self, namespace: Namespace) -> bool:
        wanted = (self.tenant, self.lora_path, self.namespace)
        return all(want is None or want == has for want, has in zip(wanted, named(namespace), strict=True))


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the flags from which `Places` are made."""
    parser.add_argument("--tenant", metavar="NAME", help="what this tenant recorded ('' for no keys)")
    parser.add_argument("--lora-path", metavar="PATH", help="what was sampled with this adapter ('' for none)")
    parser.add_argument("--namespace", metavar="NAME", help="what has this x-radix-namespace ('' for none)")


@dataclass(frozen=True)
class Selection:
    """Which replies end a row of an export.

    Attributes:
        versions: the weight versions of their last tokens; empty: any version.
        since: the earliest time of recording, in nanoseconds.
        without: the sessions whose replies are left out, given as the keys of their logs.
    """

    places: Places = Places()
    versions: frozenset[str] = frozenset()
    since: int = 0
    without: frozenset[str] = frozenset()

    def __contains__(self, record: SpanRecord) -> bool:
        return (
            record.sampled
            and record.namespace in self.places
            and record.serial >= self.since
            and (not self.versions or last_version(record) in self.versions)
            and (len(record.namespace) < 4 or record.namespace[3] not in self.without)
        )


def named(namespace: Namespace) -> tuple[str, str, str]:
    """Return (tenant, lora path, namespace). A namespace came in a header: if its bytes are UTF-8, they are read as that."""
    tenant, lora_path, rest = (*namespace, "", "", "")[:3]
    with suppress(UnicodeError):
        rest = rest.encode("latin-1").decode()
    return tenant, lora_path, rest


def session_of(namespace: Namespace) -> str:
    """Return the session to which records of this namespace belong; empty for records that are found by their text.

    A session's records have the key of its log as the last part of their namespace: `session/TENANT/ID/LIFE`.
    """
    return namespace[3].split("/")[-2] if len(namespace) > 3 else ""


def last_version(record: SpanRecord) -> str:
    """Return the weight version of a reply's last token."""
    versions = record.versions
    assert versions is not None, "a reply was sampled"
    return versions if isinstance(versions, str) else versions[-1][0]


def moment(text: str) -> int:
    """Return the time that a flag names, in nanoseconds: an age like 90m, 12h or 7d, or a date or time (UTC) as ISO 8601."""
    age = _AGE.fullmatch(text)
    if age is not None:
        return time.time_ns() - int(float(age[1]) * _SECONDS[age[2]] * 1e9)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither an age (90m, 12h, 7d) nor a date or time (2026-03-31, 2026-03-31T18:00)"
        ) from None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1e9)
