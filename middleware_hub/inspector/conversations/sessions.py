"""Conversations that are sessions: those in memory, and those that only the store has, as they were when they were last read.

A store lists only the names of its sessions. So each session is read once, in the background, and again when its log has grown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from middleware_hub.inspector.conversations.conversation import (
    MOST_BRANCHES,
    MOST_NODES,
    PICTURES_OF_NODE,
    PREVIEW,
    TITLE,
    Branch,
    ConversationView,
    Opened,
    cut_reply,
    name_branches,
)
from middleware_hub.media.part import IMAGE, image_parts
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.trie.nodes import Checkpoint, MessageNode
from middleware_hub.spans.chain import (
    INEXACT,
    STORE_UNREACHABLE,
    UNKNOWN_REPLY,
    TokenSpan,
    links,
    reasons_of,
    version_names,
)
from middleware_hub.store.errors import StoreUnreachableError
from router.errors import RouterError


class SessionConversation:
    """A session as a conversation."""

    opened = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self.id = f"session:{session.id}"
        self._moments: dict[TokenSpan, float] | None = None

    @property
    def updated(self) -> int:
        head = self._session.trie.newest
        return int(max(self._session.created_at, 0.0 if head is None else head.time) * 1e9)

    def summary(self) -> dict[str, Any]:
        session = self._session
        checkpoints = session.trie.checkpoints()
        seen: dict[TokenSpan, None] = {}
        reasons: dict[str, None] = {}
        versions: dict[str, None] = {}
        sampled = 0
        for one in checkpoints:
            sampled += one.span.count
            versions.update(dict.fromkeys(version_names(one.span.versions)))
            reasons.update(dict.fromkeys(session.trie.reasons_of(one)))
            if one.span.logprobs is None:
                reasons["no_logprobs"] = None
            for span in (one.span, one.span.parent):
                if span is not None:
                    reasons.update(dict.fromkeys(reasons_of(span.flags)))
            context = one.span.parent
            if context is not None and not context.sampled:
                seen[context] = None
        if session.stale:
            reasons[STORE_UNREACHABLE] = None
        if session.lost and any(one.terminal and one.has_unsampled() for one in checkpoints):
            reasons[UNKNOWN_REPLY] = None
        metadata = session.metadata or {}
        return {
            "id": self.id,
            "kind": "session",
            "namespace": _word(metadata.get("namespace")) or "",
            "adapter": session.defaults.lora_path or "",
            "title": self._title(),
            "turns": len(checkpoints),
            "tokens": sampled + sum(span.count for span in seen),
            "sampled": sampled,
            "images": sum(len(span.media) for span in seen),
            "branches": sum(one.terminal for one in checkpoints),
            "versions": list(versions),
            "reward": reward_of(session.reward_info),
            "group": _word(metadata.get("group_id")) or _word(metadata.get("group")),
            "exact": INEXACT.isdisjoint(reasons),
            "reasons": list(reasons),
            "created": session.created_at,
            "updated": self.updated / 1e9,
            "model": _word(metadata.get("model")),
            "phase": session.phase.value,
        }

    def _title(self) -> str:
        first = None
        for node in self._session.trie.each_node():
            if node.role == "user":
                return _content(node.message)[:TITLE]
            first = first or node
        return "" if first is None else _content(first.message)[:TITLE]

    def branches(self) -> Iterator[Branch]:
        return (self._branch(one) for one in reversed(self._session.trie.checkpoints(terminal=True)))

    def branch(self, name: str) -> Branch | None:
        found = self._session.trie.checkpoint(name)
        return None if found is None else self._branch(found)

    def _branch(self, checkpoint: Checkpoint) -> Branch:
        lineage = list(checkpoint.lineage())
        more: dict[str, None] = {}
        rewards = dict(self._session.reward_info)
        roles: dict[TokenSpan, str] = {}
        remarks: dict[TokenSpan, Sequence[str]] = {}
        for turn in reversed(lineage):
            remarks[turn.span] = self._session.trie.reasons_of(turn)
            more.update(dict.fromkeys(remarks[turn.span]))
            rewards.update(turn.reward or {})
            context, asked = turn.span.parent, turn.node.parent
            if turn is not lineage[-1] and context is not None and not context.sampled and asked is not None:
                roles[context] = asked.role or "context"
        if self._session.stale:
            more[STORE_UNREACHABLE] = None
        if self._session.lost and checkpoint.has_unsampled():
            more[UNKNOWN_REPLY] = None
        ended = checkpoint.time or self._session.created_at
        label = _content(checkpoint.node.message)[:PREVIEW] or checkpoint.id
        return Branch(checkpoint.id, checkpoint.span, ended, label, reward_of(rewards), tuple(more), roles, remarks)

    def named(self, name: str) -> bool:
        session = self._session
        return name in (self.id, session.id) or session.trie.checkpoint(name) is not None

    def moment(self, span: TokenSpan) -> float | None:
        if self._moments is None:
            self._moments = {one.span: one.time for one in self._session.trie.checkpoints()}
        return self._moments.get(span) or None

    def texts(self) -> None:
        return None

    def nodes(self) -> tuple[list[dict[str, Any]], bool]:
        nodes: dict[str, dict[str, Any]] = {}
        at: dict[int, str] = {}
        truncated = False
        for node in self._session.trie.each_node():
            if len(nodes) >= MOST_NODES:
                truncated = True
                break
            if not node.committed:
                continue
            above = None if node.parent is None else at.get(id(node.parent))
            if node.samples:
                for sample in node.samples:
                    nodes[sample.id] = _sample_node(sample, above)
                at[id(node)] = node.samples[-1].id
            else:
                at[id(node)] = name = f"message:{len(nodes)}"
                nodes[name] = _message_node(name, node, above)
        for name, node_ in nodes.items():
            checkpoint = self._session.trie.checkpoint(name) if node_["role"] == "assistant" else None
            context = None if checkpoint is None else checkpoint.span.parent
            asked = nodes.get(node_["parent"] or "")
            if context is not None and not context.sampled and asked is not None and not asked["sampled"]:
                asked["tokens"] = context.count
        ends = [(one.id, one.id) for one in reversed(self._session.trie.checkpoints(terminal=True))]
        name_branches(nodes, ends[:MOST_BRANCHES])
        return list(nodes.values()), truncated


def _sample_node(sample: Checkpoint, above: str | None) -> dict[str, Any]:
    span = sample.span
    before = next(((part, take) for part, take in links(span.parent, span.take) if part.sampled), None)
    return {
        "id": sample.id,
        "parent": above,
        "role": "assistant",
        "request_id": span.request_ids[0] if span.request_ids else sample.id,
        "tokens": span.count,
        "sampled": span.count,
        "images": 0,
        "pictures": [],
        "version": next(reversed(version_names(span.versions)), None),
        "preview": partial(_preview, sample.node.message),
        "finish": sample.finish,
        "cuts": None if before is None else cut_reply(*before),
        "branch_of": [],
    }


def _message_node(name: str, node: MessageNode, above: str | None) -> dict[str, Any]:
    digests = _digests(node.message)
    return {
        "id": name,
        "parent": above,
        "role": node.role,
        "request_id": None,
        "tokens": 0,
        "sampled": 0,
        "images": len(digests),
        "pictures": digests[:PICTURES_OF_NODE],
        "version": None,
        "preview": partial(_preview, node.message),
        "finish": None,
        "cuts": None,
        "branch_of": [],
    }


def _content(message: bytes) -> str:
    """Return the text of a message, with `[image]` for each image; for tool calls, their names and arguments."""
    fields = msgspec.json.decode(message) if message else {}
    content = fields.get("content")
    if isinstance(content, list):
        content = " ".join(
            "[image]" if part.get("type") == IMAGE else str(part.get("text", ""))
            for part in content
            if isinstance(part, dict)
        )
    if isinstance(content, str) and content:
        return content
    calls = fields.get("tool_calls")
    return msgspec.json.encode(calls).decode() if calls else ""


_PICTURE = b'"sha256:'
"""No message with an image lacks it."""


def _digests(message: bytes) -> list[str]:
    """Return the digests of the images of a message, in order."""
    if _PICTURE not in message:
        return []
    return [part["digest"] for part in image_parts(msgspec.json.decode(message))]


def _preview(message: bytes) -> str:
    return _content(message)[:PREVIEW]


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def reward_of(info: dict[str, Any]) -> float | None:
    """Return the number in a reward: under the usual names, or the only number in it."""
    numbers = {
        name: float(one)
        for name, one in info.items()
        if isinstance(one, float) or (isinstance(one, int) and abs(one) < 2**63)
    }
    for name in ("reward", "score", "value"):
        if name in numbers:
            return numbers[name]
    return next(iter(numbers.values())) if len(numbers) == 1 else None


logger = logging.getLogger(__name__)

MOST_STORED = 2_000
"""Sessions of a tenant that are read for the list, in the order of their names."""
AGAIN = 10.0
"""Seconds until a look at the list reads the store again."""
MOST_TENANTS = 32


class StoredSession:
    """A session as it was read. Its branches are read again when it is opened."""

    def __init__(self, conversation: ConversationView, events: int, opened: Callable[[], Opened]) -> None:
        self.opened = opened
        self.id = conversation.id
        self.events = events
        self.updated = conversation.updated
        self._summary = conversation.summary()
        self._names = frozenset(branch.id for branch in conversation.branches())

    def summary(self) -> dict[str, Any]:
        return {**self._summary, "stored": True}

    def branches(self) -> Iterator[Branch]:
        return iter(())

    def branch(self, name: str) -> Branch | None:
        return None

    def named(self, name: str) -> bool:
        return name in (self.id, self.id.removeprefix("session:")) or name in self._names

    def moment(self, span: TokenSpan) -> float | None:
        return None

    def texts(self) -> None:
        return None

    def nodes(self) -> tuple[list[dict[str, Any]], bool]:
        return [], False


class _Survey:
    """What is known of a tenant's sessions in the store."""

    def __init__(self) -> None:
        self.found: dict[str, StoredSession] = {}
        self.more = False
        self.over = -AGAIN
        self.task: asyncio.Task[None] | None = None


class StoredSessions:
    """Reads the sessions of a store for the list. `describe` makes a conversation of a session."""

    def __init__(
        self,
        registry: SessionRegistry,
        describe: Callable[[Session], ConversationView] = SessionConversation,
    ) -> None:
        self._registry = registry
        self._describe = describe
        self._surveys: dict[str, _Survey] = {}

    async def of(self, tenant: str) -> tuple[list[StoredSession], bool]:
        """Return the sessions read so far, without the sessions in memory, and whether the store has more."""
        if self._registry.archive is None:
            return [], False
        survey = self._surveys.pop(tenant, None) or _Survey()
        self._surveys[tenant] = survey
        if len(self._surveys) > MOST_TENANTS:
            oldest = self._surveys.pop(next(iter(self._surveys)))
            if oldest.task is not None:
                oldest.task.cancel()
        if survey.task is None and time.monotonic() - survey.over > AGAIN:
            survey.task = asyncio.create_task(self._look(tenant, survey))
        if survey.task is not None:
            await asyncio.wait([survey.task], timeout=0.1)
        held = self._registry.find
        return [one for name, one in survey.found.items() if held(tenant, name) is None], survey.more

    async def _look(self, tenant: str, survey: _Survey) -> None:
        seen: dict[str, StoredSession] = {}
        survey.more = True
        try:
            archive = self._registry.archive
            assert archive is not None
            async for name, events in archive.listed(tenant):
                if len(seen) == MOST_STORED:
                    return
                known = survey.found.get(name)
                if known is None or known.events != events:
                    try:
                        known = await self._read(tenant, name, events)
                    except StoreUnreachableError:
                        raise
                    except RouterError as error:
                        known = None
                        logger.warning("the session %s in the store cannot be read, and is not listed: %s", name, error)
                if known is not None:
                    seen[name] = survey.found[name] = known
                await asyncio.sleep(0)
            survey.more = False
        except RouterError as error:
            logger.warning("the sessions in the store are not listed: %s", error)
        finally:
            survey.found = seen
            survey.over = time.monotonic()
            survey.task = None

    async def _read(self, tenant: str, name: str, events: int) -> StoredSession | None:
        if self._registry.find(tenant, name) is not None:
            return None
        async with self._opened(tenant, name) as found:
            return None if found is None else StoredSession(found, events, lambda: self._opened(tenant, name))

    @asynccontextmanager
    async def _opened(self, tenant: str, name: str) -> AsyncIterator[ConversationView | None]:
        registry = self._registry
        held = registry.find(tenant, name)
        assert registry.archive is not None
        session = held or await registry.archive.find(tenant, name)
        try:
            yield None if session is None else self._describe(session)
        finally:
            if session is not None and held is None and registry.find(tenant, name) is not session:
                registry.tokens -= session.tokens  # they were counted when it was read
                await session.abort()
