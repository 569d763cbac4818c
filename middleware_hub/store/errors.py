"""The errors of a store, and how a reply tells that it was not saved."""

from __future__ import annotations

from typing import Final

from router.errors import RouterError

NOT_SAVED: Final = (b"x-radix-saved", b"no")
"""The header of a reply that was sent although the store did not take it."""
NOT_SAVED_COMMENT: Final = b": x-radix-saved: no\n\n"
"""The same in a stream, before its last event: a comment, which readers of server-sent events ignore.

https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""


VERIFY: Final = ": run `tito-router store verify`"
"""Ends messages about damage."""


class StoreError(RouterError):
    """A store did not do what was asked."""

    type = "store_error"


class StoreUnreachableError(StoreError):
    """The store cannot be read or written now: locked, read-only, a full disk, no such folder. Nothing was stored."""

    status = 503
    type = "store_unreachable"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=(("retry-after", "1"),))


class StoreMismatchError(StoreError):
    """The store belongs to another tokenizer, has a newer format, or is not a store."""

    type = "store_mismatch"


class DamagedRecordError(StoreError):
    """Bytes of the store are not those that were written."""

    type = "store_damaged"


class MissingRecordError(StoreError):
    """A record builds on others that the store does not have (any more): append them again, together with the record.

    Attributes:
        missing: the ids of the missing records.
    """

    type = "store_record_missing"

    def __init__(self, missing: tuple[bytes, ...]) -> None:
        super().__init__(f"{len(missing)} record(s) that others build on are not in the store: append them again, too")
        self.missing = missing


class ConflictingRecordError(StoreError):
    """A stored record has the same id and another content, or a record is not in the root of the records on which it builds."""

    type = "store_record_conflict"


class ClosedLogError(StoreError):
    """The log takes no more events."""

    status = 409
    type = "store_log_closed"


class LogMovedError(StoreError):
    """Another writer appended to the log first: read on from the last event that is known, and try again.

    Attributes:
        last: the number of the last event in the log.
    """

    status = 409
    type = "store_log_moved"

    def __init__(self, log: str, last: int) -> None:
        super().__init__(f"the log {log!r} has gone on to event {last}: read on and try again")
        self.last = last
