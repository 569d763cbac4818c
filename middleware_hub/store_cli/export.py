"""`tito-router store export`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Raw

from middleware_hub.sessions import events as session_events
from middleware_hub.sessions.events import DELETED, PREFIX, SessionEnded, read
from middleware_hub.sessions.export.atif import atif_json
from middleware_hub.sessions.export.trajectories import BranchTrajectory, branches
from middleware_hub.sessions.export.tree import tree_of
from middleware_hub.sessions.log.restored import read_session
from middleware_hub.spans.media import MediaSpan
from middleware_hub.spans.per_token import ROW_FIELDS, PerTokenArray, TurnRows, joined, written
from middleware_hub.store.errors import DamagedRecordError, MissingRecordError
from middleware_hub.store.event_log import readable
from middleware_hub.store.media import MediaFile
from middleware_hub.store.protocol import Store
from middleware_hub.store.records import Event, Mark
from middleware_hub.store_cli.progress import bar
from middleware_hub.store_cli.rows import Ends, Row, read_rows
from middleware_hub.store_cli.selection import Places, Selection, named, session_of
from middleware_hub.store_cli.tables import ATIF, LINES, STDOUT, TREE, MediaWriter, RowWriter, format_of, opened
from middleware_hub.trajectories import events as group_events
from middleware_hub.trajectories import journal
from router.errors import BadRequestError

_PAGE: Final = 1_000


async def export(store: Store, args: argparse.Namespace) -> int:
    """Write trajectories to a file or to standard output, and return the exit status."""
    kind = format_of(args.out, args.format)
    media_kind = None if args.media is None else format_of(args.media, None)
    if media_kind in LINES or args.media == STDOUT:
        raise BadRequestError(f"--media {args.media}: name a file that ends in .parquet, .arrow or .arrows")
    selection = Selection(
        Places(args.tenant, args.lora_path, args.namespace),
        frozenset(args.version or ()),
        args.since or 0,
        await deleted_sessions(store),
    )
    if args.per_token and kind != TREE:
        raise BadRequestError(f"--per-token is for --format {TREE}: tables have no column for it")
    with opened(args.out) as sink:
        ends, images = Ends(every=args.rows == "replies"), False
        with bar("reading", (await store.stats()).records) as advance:
            async for record in store.scan():
                ends.add(record, record in selection)
                images = images or bool(record.media)
                advance(1)
        roots = ends.roots
        rows, marks, named_media = 0, dict[bytes, Mark](), dict[tuple[str, str], None]()
        if kind == ATIF:
            written = _documents(store, roots, sink)
        else:
            written = _trees(store, roots, sink, args) if kind == TREE else _tables(store, roots, sink, kind, images)
        with bar("writing", len(roots)) as advance:
            async for some in written:
                rows += len(some)
                advance(len(some))
                marks |= _exported(some)
                named_media.update(
                    ((named(row.record.namespace)[0], one.digest), None) for row in some for one in row.media
                )
    if media_kind is not None:
        await _write_media(store, list(named_media), args.media, media_kind)
    # Only now is the file complete. The store forgets first what was exported, so an export that failed must not count.
    if not args.keep_marks:
        store.note(list(marks.values()))
    left_out = len(roots) - rows
    what = "branches" if kind in LINES else "rows"
    why = "could not be read or were forgotten" + (
        ", or have no messages: they are no sessions" if kind == ATIF else ""
    )
    sys.stderr.write(f"{rows} {what}{f', {left_out} {why}' if left_out else ''}\n")
    return 1 if left_out and (await store.stats()).damaged else 0


async def _write_media(store: Store, wanted: list[tuple[str, str]], path: str, kind: str) -> None:
    """Write the files of images, each once for a tenant, some megabytes at a time."""
    written = 0
    with opened(path) as sink, MediaWriter(sink, kind) as writer, bar("images", len(wanted)) as advance:
        for tenant, digest in wanted:
            found = await store.media(tenant, [digest])
            if found:
                writer.add(list(found.values()))
                written += 1
            advance(1)
    missing = len(wanted) - written
    sys.stderr.write(f"{written} images{f', {missing} are not in the store' if missing else ''}\n")


async def _tables(
    store: Store, roots: Mapping[bytes, bytes], sink: BinaryIO, kind: str, images: bool
) -> AsyncIterator[list[Row]]:
    with RowWriter(sink, kind, images=images) as writer:
        async for some in read_rows(store, roots):
            writer.add(some)
            yield some


async def _trees(
    store: Store, roots: Mapping[bytes, bytes], sink: BinaryIO, args: argparse.Namespace
) -> AsyncIterator[list[Row]]:
    async for some, line in read_trees(store, roots, per_token=args.per_token):
        sink.write(line)
        yield some


async def _documents(store: Store, roots: Mapping[bytes, bytes], sink: BinaryIO) -> AsyncIterator[list[Row]]:
    """Write the trajectories of sessions as `finalize` in this format gives them. Texts lack messages, and have none."""
    conversations: dict[bytes, dict[bytes, bytes]] = {}
    for record, root in roots.items():
        conversations.setdefault(root, {})[record] = root
    for some in conversations.values():
        async for rows in read_rows(store, some, at_once=len(some)):
            if not rows or not session_of(rows[0].record.namespace):
                continue
            try:
                session = await read_session(store, rows[0].record.namespace[3])
            except (DamagedRecordError, MissingRecordError):  # it counts as left out
                continue
            wanted = {row.record.id: row for row in rows}
            trie = session.trie
            ends = [one for one in trie.checkpoints() if one.span.stored.id in wanted]
            images = {one.digest for row in rows for one in row.media}
            files = await store.media(session.tenant, list(images), data=False) if images else {}
            head = {"session_id": session.id, "metadata": session.metadata}
            for found in branches(ends, session.reward_info, passed_over=trie.passed_over, head=trie.head_root):
                shown = [_image(one, files.get(one.digest)) for one, _, _ in found.pictures]
                sink.writelines(atif_json(msgspec.structs.replace(found, images=shown), head))
                sink.write(b"\n")
            yield [wanted[one.span.stored.id] for one in ends]


async def deleted_sessions(store: Store) -> frozenset[str]:
    """Return the logs of sessions that a client has deleted: their tokens stay in the store until they are forgotten."""
    found, after = set[str](), ""
    while page := await store.logs(PREFIX, after=after, limit=_PAGE):
        after = page[-1].log
        for info in page:
            if info.closed >= DELETED:
                try:
                    last = [read(event) for event in await store.read(info.log, after=info.last - 1)]
                except DamagedRecordError:  # it may have been deleted
                    found.add(info.log)
                    continue
                found |= {info.log for event in last if isinstance(event, SessionEnded) and event.why == "deleted"}
    return frozenset(found)


def _exported(rows: list[Row]) -> dict[bytes, Mark]:
    """Return the marks that note the retrieval, by root. The time and version of the last hits stay unchanged."""
    marks = [row.mark for row in rows if row.mark is not None]
    return {mark.root: Mark(mark.root, mark.tick, mark.stamp, retrieved=True) for mark in marks}


# An export as trees: a line of JSON for each conversation, which has what its branches share once. A line is what `finalize`
# with `"format": "tree"` gives for a session, made by the same code. Texts have trees too: everything that grew from one first
# prompt.


class Rewards:
    """The rewards in a store: of replies, by the ids of their records, and of sessions, by the keys of their logs."""

    def __init__(self) -> None:
        self._replies: dict[bytes, dict[str, Any]] = {}
        self._sessions: dict[str, dict[str, Any]] = {}
        self._turns: dict[tuple[str, str], bytes] = {}

    @classmethod
    async def of(cls, store: Store) -> Rewards:
        """Read the logs of sessions and of groups."""
        found = cls()
        async for event in _events(store, session_events.PREFIX):
            found._hear(event)
        async for event in _events(store, journal.PREFIX):
            heard = journal.read(event)
            if isinstance(heard, group_events.Rewarded):
                for one in heard.rewards:
                    info = msgspec.json.decode(one.info or b"{}")
                    number = {} if one.reward is None else {"reward": one.reward}
                    found._replies.setdefault(one.key, {}).update({**info, **number})
        return found

    def _hear(self, event: Event) -> None:
        heard = session_events.read(event)
        if isinstance(heard, session_events.TurnCommitted):
            self._turns[event.log, heard.generation] = heard.span
        elif isinstance(heard, session_events.SessionRewarded):
            info = session_events.object_of(heard.info)
            if heard.branch is None:
                self._sessions.setdefault(event.log, {}).update(info)
            elif (event.log, heard.branch) in self._turns:
                self._replies.setdefault(self._turns[event.log, heard.branch], {}).update(info)

    def of_row(self, row: Row) -> dict[str, Any]:
        """Return the rewards of a sequence: that of its session, overridden by those of its replies, in order."""
        namespace = row.record.namespace
        found = dict(self._sessions.get(namespace[3], {})) if len(namespace) > 3 else {}
        for turn in row.flat.turns:
            found.update(self._replies.get(turn.span.stored.id, {}))
        return found


async def _events(store: Store, prefix: str) -> AsyncIterator[Event]:
    after = ""
    while logs := await store.logs(prefix, after=after, limit=_PAGE):
        for info in logs:
            async for event in readable(store, info.log, partial(_left_out, info.log)):
                yield event
        after = logs[-1].log


def _left_out(log: str, number: int) -> None:
    sys.stderr.write(f"event {number} of the log {log!r} is damaged: if it was a reward, that is left out\n")


async def read_trees(
    store: Store, roots: Mapping[bytes, bytes], *, per_token: bool
) -> AsyncIterator[tuple[list[Row], bytes]]:
    """Yield the rows of each conversation and its tree as a line of JSON.

    Args:
        roots: those of the replies that end a branch.
        per_token: whether nodes have the per-token data of engines.
    """
    rewards = await Rewards.of(store)
    conversations: dict[bytes, dict[bytes, bytes]] = {}
    for record, root in roots.items():
        conversations.setdefault(root, {})[record] = root
    for some in conversations.values():
        async for rows in read_rows(store, some, at_once=len(some)):
            if rows:
                branches = [await _branch(store, row, rewards, per_token=per_token) for row in rows]
                yield rows, msgspec.json.encode({**_head(rows[0]), **tree_of(branches)}) + b"\n"


def _head(row: Row) -> dict[str, Any]:
    tenant, lora, namespace = named(row.record.namespace)
    return {
        "tenant": tenant,
        "lora_path": lora,
        "namespace": namespace,
        "session_id": session_of(row.record.namespace) or None,
        "conversation": row.record.root.hex(),
    }


async def _branch(store: Store, row: Row, rewards: Rewards, *, per_token: bool) -> BranchTrajectory:
    flat, begin = row.flat, len(row.flat.token_ids) - row.flat.response_length
    digests = list({one.digest for one in row.media})
    files = await store.media(named(row.record.namespace)[0], digests, data=False) if digests else {}
    return BranchTrajectory(
        branch=row.record.request_ids[0] if row.record.request_ids else row.record.id.hex(),
        parent_branch=None,
        prompt_ids=flat.token_ids[:begin],
        response_ids=flat.token_ids[begin:],
        response_mask=flat.loss_mask[begin:],
        response_logprobs=None if flat.logprobs is None else flat.logprobs[begin:],
        weight_versions=tuple((version, low - begin, high - begin) for version, low, high in flat.weight_versions),
        turns=flat.turns,
        messages=(),
        finish_reason=row.record.finish,
        reward_info=rewards.of_row(row),
        reasons=flat.reasons,
        extra={},
        per_token=await _per_token(store, row) if per_token else {},
        pictures=tuple((one, None, None) for one in row.media),
        images=[_image(one, files.get(one.digest)) for one in row.media],
    )


def _image(media: MediaSpan, file: MediaFile | None) -> dict[str, Any]:
    """Return an image as `finalize` shows it. A record does not know the messages."""
    about = {name: None if file is None else getattr(file, name) for name in ("mime", "width", "height")}
    span = [media.start, media.start + media.length]
    return {"digest": media.digest, **about, "span": span, "message": None, "part": None, "bytes": None}


async def _per_token(store: Store, row: Row) -> dict[str, PerTokenArray]:
    """Return the engine's per-token data of a sequence, joined from its replies as for a session."""
    told: dict[str, list[TurnRows]] = {}
    widths: dict[str, set[int | None]] = {}
    for turn in row.flat.turns:
        span = turn.span
        for blob in await store.blobs(span.stored.id, ROW_FIELDS, root=span.stored.root):
            if blob.dtype == "int32":
                rows = TurnRows(turn.request_id, span.offset + span.count, turn.end, Raw(written(blob.data)))
                told.setdefault(blob.name, []).append(rows)
                widths.setdefault(blob.name, set()).add(blob.shape[1] if len(blob.shape) == 2 else None)
    found = {}
    for name, turns in told.items():
        if len(widths[name]) == 1:
            array = joined(turns, len(row.flat.token_ids), widths[name].pop())
            if array is not None:
                found[name] = array
    return found
