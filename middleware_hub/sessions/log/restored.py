"""A session as its log says, made from the store alone."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from middleware_hub.chat.keys import KeyFunction, canonical
from middleware_hub.sessions.events import Created, SessionEnded, TurnCommitted, id_of, object_of, read, tenant_of
from middleware_hub.sessions.log import replay
from middleware_hub.sessions.log.span_book import SpanBook
from middleware_hub.sessions.request_defaults import RequestDefaults
from middleware_hub.sessions.session import Session
from middleware_hub.store.errors import VERIFY, DamagedRecordError
from middleware_hub.store.event_log import EventLog
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Event, Serials


def made_of(log: str, first: Event) -> Created:
    """Return the first event of a log. Raises DamagedRecordError if it is another one."""
    made = read(first)
    if not isinstance(made, Created):
        raise DamagedRecordError(f"the log {log!r} lacks its first event{VERIFY}")
    return made


def new_session(log: str, made: Created, key: KeyFunction) -> Session:
    """Return the session of a log as it was when it was made."""
    defaults = msgspec.json.decode(made.defaults, type=RequestDefaults)
    session = Session(
        id_of(log),
        tenant_of(log),
        key,
        ttl=made.ttl,
        defaults=replace(defaults, sampling_params=object_of(made.sampling)),
        metadata=object_of(made.metadata),
        response_budget=made.response_budget,
        key_digest=made.key,
    )
    session.created_at = made.time
    session.group = made.group
    return session


async def read_session(store: Store, log: str, key: KeyFunction = canonical) -> Session:
    """Return a session to look at, with all of its turns, also if it has expired. It is not connected with its log.

    Raises StoreUnreachableError, DamagedRecordError, and MissingRecordError if the store has forgotten it.
    """
    events = EventLog(store, log, whole=True)
    session: Session | None = None
    book = SpanBook(store, Serials(), tenant_of(log), log)
    while page := await events.next_page():
        if session is None:
            session = new_session(log, made_of(log, page[0]), key)
        found = [read(event) for event in page]
        records = await book.fetch([event for event in found if isinstance(event, TurnCommitted)])
        for event in found:
            if isinstance(event, TurnCommitted):
                try:
                    record, span = records[event.span], book.restore(event, records)
                    checkpoint = replay.commit(session.trie, event, span, record.tail, record.namespace[1])
                except KeyError as error:
                    raise DamagedRecordError(f"the log {log!r} lacks what turn {event.generation} continues") from error
                book.bare(checkpoint.id, record)
                session.committed(checkpoint)
            elif not isinstance(event, Created | SessionEnded):
                session.apply(event)
        events.take(page[-1])
    if session is None:
        raise DamagedRecordError(f"the log {log!r} is empty{VERIFY}")
    await book.fill(session.trie)
    return session
