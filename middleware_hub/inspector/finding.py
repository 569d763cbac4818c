"""The list of conversations: merged, filtered and searched, newest first, in steps that delay no other request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from typing import Any

from middleware_hub.inspector.conversations.chain import Chain, matches
from middleware_hub.inspector.conversations.conversation import ConversationView
from middleware_hub.inspector.queries import MOST_TEXT, QueryParameters
from middleware_hub.spans.media import OPEN
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.errors import BadRequestError, NotFoundError
from router.http.offload import offload

STEP = 0.002
"""Seconds that the event loop is held at a time."""
SEARCH_SECONDS = 2.0
"""After this long a call answers with the conversations found so far, and a cursor for the rest."""
MOST_LISTED = 500
SORTED = 500
"""Sessions that are put in order in one step."""
FILTERS = ("kind", "group", "namespace", "version", "exact", "reason", "reward_min", "reward_max", "since", "until")
PARAMETERS = (*FILTERS, "limit", "cursor", "text", "id", "token_ids", "changed_since")

Key = tuple[int, str]
"""The time of a conversation's last record, in nanoseconds since 1970, and its id."""
Listed = Callable[[Key | None], Iterable[tuple[Key, ConversationView]]]
"""Returns conversations after a place in the list, newest first."""

_key = itemgetter(0)


class TimeSlices:
    """Divides a long call into steps of `STEP` seconds. Between two steps the event loop serves other requests."""

    def __init__(self) -> None:
        self._began = self._until = time.perf_counter()
        self._until += STEP

    async def pause(self) -> None:
        """Let the event loop serve other requests, if the step has taken long enough."""
        if time.perf_counter() > self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + STEP

    @property
    def over(self) -> bool:
        """Whether the whole call has taken long enough."""
        return time.perf_counter() - self._began > SEARCH_SECONDS


@dataclass(frozen=True)
class ConversationFilter:
    """Which conversations a call wants."""

    limit: int
    cursor: Key | None
    kind: str | None
    text: str | None
    name: str | None
    ids: list[int] | None
    tests: tuple[Callable[[dict[str, Any]], bool], ...]

    @classmethod
    def of(cls, query: QueryParameters) -> ConversationFilter:
        """Read a query. Raises BadRequestError."""
        return cls(
            query.number("limit", 50, 1, MOST_LISTED),
            _cursor(query.text("cursor")),
            query.choice("kind", ("session", "text")),
            query.text("text", MOST_TEXT),
            query.text("id"),
            query.ids("token_ids"),
            tuple(_tests(query)),
        )


def _cursor(given: str | None) -> Key | None:
    if given is None:
        return None
    moment, _, name = given.partition("~")
    if not (moment.isascii() and moment.isdigit()) or len(moment) > 20 or not name:
        raise BadRequestError("`cursor` must be the `next` of an earlier answer")
    return int(moment), name


def _tests(query: QueryParameters) -> Iterator[Callable[[dict[str, Any]], bool]]:
    namespace, version, reason = query.exactly("namespace"), query.text("version"), query.text("reason")
    group = query.text("group")
    exact = query.choice("exact", ("true", "false"))
    low, high, since, until = (query.real(name) for name in ("reward_min", "reward_max", "since", "until"))
    if namespace is not None:
        yield lambda one: one["namespace"] == namespace
    if group is not None:
        yield lambda one: one["group"] == group
    if version is not None:
        yield lambda one: version in one["versions"]
    if reason is not None:
        yield lambda one: reason in one["reasons"]
    if exact is not None:
        yield lambda one: one["exact"] is (exact == "true")
    if low is not None:
        yield lambda one: one["reward"] is not None and one["reward"] >= low
    if high is not None:
        yield lambda one: one["reward"] is not None and one["reward"] <= high
    if since is not None:
        yield lambda one: one["updated"] >= since
    if until is not None:
        yield lambda one: one["updated"] <= until


async def find(
    wanted: ConversationFilter, texts: Listed, sessions: Sequence[ConversationView], vocabulary: Vocabulary
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the summaries of the conversations that are wanted, newest first, and a cursor if there may be more."""
    found: list[dict[str, Any]] = []
    slices = TimeSlices()
    last: Key | None = None
    for key, conversation in await _newest_first(wanted, texts, sessions, slices):
        if len(found) == wanted.limit or (last is not None and slices.over):
            assert last is not None
            return found, f"{last[0]}~{last[1]}"
        last = key
        await slices.pause()
        if wanted.name is not None and not conversation.named(wanted.name):
            continue
        summary = conversation.summary()
        if all(test(summary) for test in wanted.tests) and await _holds(conversation, wanted, vocabulary, slices):
            found.append(summary)
    return found, None


async def _newest_first(
    wanted: ConversationFilter, texts: Listed, sessions: Sequence[ConversationView], slices: TimeSlices
) -> Iterator[tuple[Key, ConversationView]]:
    """Return the conversations after the cursor. What changes meanwhile is left out, or comes at its new place."""
    ways: list[Iterable[tuple[Key, ConversationView]]] = []
    if wanted.kind != "session":
        ways.append(texts(wanted.cursor))
    for start in range(0, len(sessions) if wanted.kind != "text" else 0, SORTED):
        listed = [((one.updated, one.id), one) for one in sessions[start : start + SORTED]]
        listed.sort(key=_key, reverse=True)
        ways.append([pair for pair in listed if wanted.cursor is None or pair[0] < wanted.cursor])
        await slices.pause()
    return merge(*ways, key=_key, reverse=True)


async def _holds(
    conversation: ConversationView, wanted: ConversationFilter, vocabulary: Vocabulary, slices: TimeSlices
) -> bool:
    """Return whether a conversation has the text and the ids of the search."""
    text, ids = wanted.text, wanted.ids
    if conversation.opened is not None and (text is not None or ids is not None):
        async with conversation.opened() as opened:
            return opened is not None and await _holds(opened, wanted, vocabulary, slices)
    whole = None if text is None else conversation.texts()
    if text is not None and whole is not None:
        marked = False
        for one in whole:
            await slices.pause()
            if OPEN in one:
                marked = (
                    True  # it has digests where a client writes placeholders: its tokens spell what a client writes
                )
            elif text in one:
                text = None
                break
        else:
            if not marked:
                return False
    if text is None and ids is None:
        return True
    for branch in conversation.branches():
        await slices.pause()
        try:
            chain = branch.chain()
        except NotFoundError:
            return False  # the session was deleted meanwhile
        if text is not None and not await offload(len(chain) > 1_000, _has, chain, vocabulary, text):
            continue
        if ids is None or _has(chain, vocabulary, ids):
            return True
    return False


def _has(chain: Chain, vocabulary: Vocabulary, needle: str | Sequence[int]) -> bool:
    if isinstance(needle, str) and needle.startswith("sha256:") and any(needle in one.digest for one in chain.media):
        return True
    return bool(matches(chain, vocabulary, needle, 0, 1)[0])
