"""The events of a session's log, and the log's key.

    created   turn   turn   reward   turn   completed   finalized   exported   ended
       1        2      3       4       5         6           7          8        9     numbers, given by the store

Any process that applies these events in order has the session. Tokens are not in the log: a turn names the records of its
spans, which are appended together with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

import msgspec

from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.radix.node import Generation
from middleware_hub.sessions.trie.nodes import BranchHandle, Checkpoint, IsEcho, NewTurn
from middleware_hub.store.records import Event

PREFIX: Final = "session/"
MOST_LIVES: Final = 10**8 - 1
DELETED: Final = 2
"""`Event.closes` of the last event of a log."""


class SessionEvent(msgspec.Struct, tag_field="kind", array_like=True, kw_only=True, frozen=True):
    """Anything that happens to a session.

    Attributes:
        time: when, in seconds since 1970.
    """

    time: float


class _Created(SessionEvent, frozen=True):
    root: bytes
    ttl: float
    sampling: bytes
    metadata: bytes
    response_budget: int | None
    group: tuple[str, str] | None = None


class Created(_Created, tag="created", kw_only=True, frozen=True):
    """The session was made; `root` is the record that all of its chains begin after. Objects are JSON.

    A field that is new stands here, so that it comes last: behind the fields of events that are in stores already.

    Attributes:
        group: its group's id, and the namespace of that.
        defaults: its `RequestDefaults`, but for `sampling`, the `sampling_params` of those.
        key: the digest of its key; empty without one.
    """

    defaults: bytes = b"{}"
    key: bytes = b""


class _TurnCommitted(SessionEvent, frozen=True):
    """See `TurnCommitted`.

    Attributes:
        generation: its id.
        setting: the key of the tools and options that render it.
        behind: a generation whose message is on its path; None for the path from the root.
        messages: the path after `behind`, up to the end of the prompt; each message as JSON.
        message: the assistant's, as JSON.
        in_place: whether it continued the last message of its prompt.
        parent: the generation that its prompt continues.
        span: the record of the sampled tokens.
        context: the record of the text encoded before them; None if there is none.
        shared: whether an earlier turn of the session has the same context.
        listed: whether equal requests may be given this context.
        flags: of the context; a check may have added one since it was first recorded.
    """

    generation: str
    setting: bytes
    behind: str | None
    messages: tuple[bytes, ...]
    message: bytes
    in_place: bool
    parent: str | None
    apart: bool
    edited: bool
    span: bytes
    context: bytes | None
    shared: bool
    listed: bool
    flags: int
    finish: str
    shown: str
    reasoning: str
    scaffold: str
    reasons: tuple[str, ...]


class TurnCommitted(_TurnCommitted, tag="turn", kw_only=True, frozen=True):
    """A turn was sampled. `Checkpoint` describes the other fields.

    A field that is new stands here, as in `Created`.
    """

    asked: bytes = b""


class BranchEnded(SessionEvent, tag="branch_ended", frozen=True):
    """The response budget of a branch was used up after this generation."""

    generation: str


class SessionRewarded(SessionEvent, tag="reward", frozen=True):
    """A reward was attached to the session or to a generation; `info` is JSON."""

    info: bytes
    branch: str | None


class Completed(SessionEvent, tag="completed", frozen=True):
    """The agent said that it is done."""


class Finalized(SessionEvent, tag="finalized", frozen=True):
    """The session takes no more turns."""


class Exported(SessionEvent, tag="exported", frozen=True):
    """The session was exported to a client when it had `samples` samples: all of them, or as many as the client wants."""

    samples: int


class Touched(SessionEvent, tag="touched", frozen=True):
    """A client asked for the session: its time to live begins again.

    Attributes:
        lost: the generation that was answered, if its tokens could not be kept. This is a field, and no event of its own, so
            that routers of an earlier version can read the log.
    """

    lost: str | None = None


class SessionEnded(SessionEvent, tag="ended", frozen=True):
    """The session is gone: `deleted`, `expired`, or `forgotten` (the store has no room for its tokens any more)."""

    why: str


AnyEvent = (
    Created | TurnCommitted | BranchEnded | SessionRewarded | Completed | Finalized | Exported | Touched | SessionEnded
)
ENDS = Completed | Finalized | SessionEnded
"""After one of these, other events are allowed than before."""


class SessionLog(Protocol):
    """The log to which a session's events are appended."""

    @property
    def settled(self) -> bool:
        """Whether everything that happened is in the store."""

    @property
    def unsaved(self) -> bool:
        """Whether something that the store did not take waits for it."""

    @property
    def stale(self) -> bool:
        """Whether the store was unreachable when it was asked for news."""

    async def read_on(self) -> None:
        """Apply the events of other routers. An unreachable store is no error: see `stale`."""

    async def append(self, event: AnyEvent) -> bool:
        """Append an event and apply it; return whether it is in the store (if not, it waits for the store).

        Raises SessionOverError and UnknownSessionError if the event is no longer allowed.
        """

    def touched(self) -> None:
        """Tell other routers, before long, that the session is used."""

    async def append_turn(self, handle: BranchHandle, turn: NewTurn, lora: str, commit: Callable[[], object]) -> bool:
        """Append a turn with its spans at the store's time, and commit it; return as `append` does.

        `handle` is that of its generation, still open. Raises TrieClosedError.
        """

    async def hand_over(self) -> None:
        """Write the waiting events, as far as the store takes them."""

    async def fill(self) -> None:
        """Fetch the data that an export needs besides the tokens. Raises StoreUnreachableError."""


class TurnNotes(Protocol):
    """Where chats without a session are kept; see `log.chat_notes`.

    Attributes:
        whole: whether the trie still has everything that this process noted or found.
    """

    whole: bool

    async def recall(
        self,
        request: ChatRequest,
        parent: str | None = None,
        is_echo: IsEcho | None = None,
        *,
        replies: bool = False,
    ) -> bool:
        """Fill the trie with the replies that other processes sampled for these messages; return whether that was possible.

        Args:
            parent: the generation that the request names.
            is_echo: as of `MessageTrie.prepare`.
            replies: whether their replies to just these messages are wanted, too.
        """
        ...

    def save(self, checkpoint: Checkpoint, lora: str, reply: Generation) -> Awaitable[bool]:
        """Begin to note a turn, on the reply that the layers inside recorded; the result tells whether the store has it."""
        ...


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
as_json = msgspec.json.Encoder().encode


def object_of(data: bytes) -> Any:
    """Return the object that `as_json` wrote."""
    return msgspec.json.decode(data)


def message_of(data: bytes) -> Message:
    found: Message = msgspec.json.decode(data)
    return found


def stored(log: str, events: Iterable[AnyEvent], after: int) -> list[Event]:
    """Return events as the store keeps them, to be appended right after number `after` or not at all."""
    return [
        Event(
            log,
            str(event.__struct_config__.tag),
            _encode(event),
            closes=DELETED if isinstance(event, SessionEnded) else 0,
            expected=number,
        )
        for number, event in enumerate(events, after)
    ]


def read(event: Event) -> AnyEvent:
    """Return the event that the store kept. Raises DamagedRecordError."""
    return event.decoded(_decoder)


def tenant_prefix(tenant: str) -> str:
    """Return the prefix of the keys of all sessions of a tenant."""
    return f"{PREFIX}{quote(tenant, safe='')}/"


def name_prefix(tenant: str, session_id: str) -> str:
    """Return the prefix of the keys of all logs of one session's name. The newest life has the first key."""
    return f"{tenant_prefix(tenant)}{session_id}/"


def log_key(tenant: str, session_id: str, life: int) -> str:
    """Return the key of a session's log. A name that is used again after its session has ended begins its next `life`."""
    return f"{name_prefix(tenant, session_id)}{MOST_LIVES - life:08d}"


def life_of(log: str) -> int:
    return MOST_LIVES - int(log.rpartition("/")[2])


def tenant_of(log: str) -> str:
    return unquote(log.split("/")[1])


def id_of(log: str) -> str:
    return log.split("/")[-2]
