"""Files of media in the file: `media`, one row for each, with its bytes; `media_named`, the conversations that name it.

A conversation is forgotten as a whole, so its root is the name, however many of its records show the picture. Names and files
are written in the transaction of the records, so no kill parts them. When the row of a root is deleted, triggers delete its
names, and with the last name the file: also if a router deletes it that does not know of files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import apsw

from middleware_hub.store.errors import DamagedRecordError, StoreMismatchError
from middleware_hub.store.media import MediaFile, media_key
from middleware_hub.store.protocol import Finding
from middleware_hub.store.records import decode_file, encode_about
from middleware_hub.store.sqlite.rows import Row, insert
from middleware_hub.store.verifying import check_file

logger = logging.getLogger(__name__)

_NAMED: Final = "EXISTS (SELECT 1 FROM media_named n WHERE n.key = media.key)"
_SIZES: Final = "SELECT count(*), coalesce(sum(size), 0) FROM media INDEXED BY media_sizes"
_OWN: Final = """
SELECT coalesce(sum(size), 0) FROM media WHERE key IN (SELECT key FROM media_named WHERE root = ?1)
AND NOT EXISTS (SELECT 1 FROM media_named n WHERE n.key = media.key AND n.root != ?1)"""


def write_files(connection: apsw.Connection, names: Sequence[Row], files: Sequence[MediaFile]) -> None:
    """Write which conversations (by number) name which files (by key), and the files that are not there yet."""
    insert(connection, "media_named", names, verb="INSERT OR IGNORE")
    for file in files:
        key = file.key
        if connection.execute("SELECT 1 FROM media WHERE key = ?", (key,)).get is None:
            row = (key, file.size, encode_about(file), file.data)
            connection.execute("INSERT INTO media(key, size, about, data) VALUES (?, ?, ?, ?)", row)
        insert(
            connection,
            "media_lengths",
            [(key, settings, length) for settings, length in file.lengths.items()],
            verb="INSERT OR REPLACE",
        )


def read_files(connection: apsw.Connection, tenant: str, digests: Sequence[str], *, data: bool) -> dict[str, MediaFile]:
    """Return a tenant's files; a damaged file is left out."""
    found = {}
    for digest in dict.fromkeys(digests) if there(connection) else ():
        key = media_key(tenant, digest)
        column = "data" if data else "NULL"
        row = connection.execute(f"SELECT about, {column} FROM media WHERE key = ?", (key,)).get
        if row is None:
            continue
        lengths = dict(connection.execute("SELECT settings, length FROM media_lengths WHERE key = ?", (key,)))
        try:
            about, content = row
            found[digest] = decode_file(tenant, about, content, lengths)
        except (DamagedRecordError, StoreMismatchError) as error:
            logger.error("the file of a picture cannot be used: %s: run `tito-router store verify`", error.message)
    return found


def there(connection: apsw.Connection) -> bool:
    """Return whether a file has tables of media: one of an earlier version that is only read has none."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'media'").get is not None


def media_sizes(connection: apsw.Connection) -> tuple[int, int]:
    """Return how many files there are, and their bytes."""
    if not there(connection):
        return 0, 0
    count, size = connection.execute(_SIZES).get
    return int(count), int(size)


def unnamed(connection: apsw.Connection) -> int:
    """Return how many files no record names."""
    if not there(connection):
        return 0
    return int(connection.execute(f"SELECT count(*) FROM media WHERE NOT {_NAMED}").get)


def own_bytes(connection: apsw.Connection, root: int) -> int:
    """Return the bytes of the files that only one conversation names."""
    return int(connection.execute(_OWN, (root,)).get)


def remove_unnamed(connection: apsw.Connection) -> int:
    """Remove the files that no conversation names, and return how many."""
    before = media_sizes(connection)[0]
    connection.execute("DELETE FROM media_named WHERE root NOT IN (SELECT root FROM roots)")
    connection.execute(f"DELETE FROM media WHERE NOT {_NAMED}")
    return before - media_sizes(connection)[0]


def check_media(connection: apsw.Connection, after: int, limit: int) -> tuple[list[Finding], int | None]:
    """Check the next files; return what is wrong, and where to go on, or None at the end."""
    rows = connection.execute(
        f"SELECT rowid, key, about, data, {_NAMED} FROM media WHERE rowid > ? ORDER BY rowid LIMIT ?", (after, limit)
    )
    found, last = list[Finding](), None
    for number, key, about, data, named in rows:
        last = number
        found += check_file(key, about, data, named=bool(named))
    return found, last


def missing_media(connection: apsw.Connection) -> list[bytes]:
    """Return the ids of the roots of conversations that name a file that is not there."""
    sql = (
        "SELECT DISTINCT id FROM media_named m JOIN records ON n = m.root "
        "WHERE NOT EXISTS (SELECT 1 FROM media WHERE media.key = m.key)"
    )
    return [root for (root,) in connection.execute(sql)]
