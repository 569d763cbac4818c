"""`/retrieve_from_text`: takes a text and returns the tokens that were consumed and sampled for it.

With `cover` the answer contains each reply of a list whole, in the fewest chains, and trains no sampled token twice. A chain is
a path up the forest that spans make, so two replies are on one chain only if one of them precedes the other. So the answer
needs those listed replies that neither the first sequence nor another listed reply's chain contains whole:

    first     [context][reply 1][context][half of reply 2][context][reply 3]
    added     [context][reply 1][context][reply 2, whole]                     mask 1 for reply 2 only
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from middleware_hub.media.images_json import has_files, images_json
from middleware_hub.media.media import MEDIA_ESTIMATED
from middleware_hub.media.viewer import Viewer
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.node import Generation
from middleware_hub.radix.records import Namespace, Recall
from middleware_hub.radix.tree import RadixTree
from middleware_hub.retrieval.retrieval_request import RetrievalRequest
from middleware_hub.spans.answer_json import Lists, in_pieces
from middleware_hub.spans.chain import INEXACT, STORE_UNREACHABLE, UNKNOWN_REPLY, TokenSpan, links, names_of, pack_ids
from middleware_hub.spans.extras import TOP_P_IDS, TOP_P_OFFSETS, Extra, Extras
from middleware_hub.spans.media import MediaSpan, chain_media, digests_in, outside_mark
from middleware_hub.spans.per_token import ROW_FIELDS, TOP_P, TurnRows, joined, written
from middleware_hub.spans.sampling_sets import TurnSets, joined_sets
from middleware_hub.spans.trajectory import SampledTurn, SharedMask, TokenTrajectory, flatten, version_runs
from middleware_hub.spans.versions import VersionClock
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.errors import NotExactError, NotFoundError
from router.http.offload import offload

RETOKENIZED = "retokenized"
EDITED_TURN = "edited_turn"
MANY_TOKENS = 50_000
"""Answers of more tokens than this are built in a thread, off the event loop."""
_AT_ONCE = 32  # texts that the store is asked for
UNLIKE_ROWS: Final = "unlike_rows"
"""The reason if replies of one sequence have rows of different widths: they are not joined."""
Fetch = Callable[[TokenSpan, Sequence[str]], Awaitable[Mapping[str, Extra] | None]]
_Found = Sequence[tuple[SampledTurn, Mapping[str, Extra]]]


class Answered(NamedTuple):
    """An answer as pieces of JSON, and of each of its sequences whether it is exact, and its reasons."""

    pieces: list[bytes]
    sequences: list[tuple[bool, list[str]]]


async def retrieve(
    tree: RadixTree,
    tokenizer: Tokenizer,
    namespace: Namespace,
    text: str,
    request: RetrievalRequest,
    expected: Sequence[str] = (),
    memory: Memory | None = None,
    lists: Lists | None = None,
    viewer: Viewer | None = None,
) -> Answered:
    """Return the answer for one text; `expected` are its listed replies; `memory` fills the tree; a request has one `lists`.

    `viewer` shows the pictures of a keyed text.

    Raises:
        NotFoundError: no recorded reply that this text begins with is called `request_id`.
        NotExactError: `strict`, and something would have to be encoded, or is older than `max_staleness`.
    """
    asked = memory is None or await memory.cover(namespace, text, expected, parent=request.request_id)
    recall, unasked = tree.recall(namespace, text, request_id=request.request_id), [] if asked else [STORE_UNREACHABLE]
    if recall is None and not asked:  # the store may have the named reply
        recall, unasked = tree.recall(namespace, text), [STORE_UNREACHABLE, UNKNOWN_REPLY]
    if memory is not None:
        memory.retrieved(recall)
    if recall is None:
        raise NotFoundError(
            f"this text does not begin with a recorded reply of request_id {request.request_id!r}: with n > 1 workers give "
            "ids of their own (meta_info.id); it may be of another namespace, or evicted; see POST /radix_tree/explain"
        )
    cut = recall.cut
    missed = await memory.asked_late(namespace, cut) if memory is not None and asked else ()
    if cut.start < len(text) and request.strict:
        raise NotExactError(
            f"only the first {cut.start} of {len(text)} characters are recorded: see POST /radix_tree/explain",
            exact_chars=cut.start if viewer is None else viewer.plain_length(text, cut.start),
            reasons=[RETOKENIZED, *unasked],
        )
    start, tail, ahead = cut.span is None, b"", list[MediaSpan]()
    if cut.start < len(text):
        # The chain cannot change meanwhile: spans are immutable, and `cut` holds them.
        rest = text[cut.start :]
        if viewer is None or not (digests := digests_in(rest)):
            tail = pack_ids(await tokenizer.encode(rest, start=start))
        else:
            sizes = {one: viewer.media.length(viewer.tenant, one) for one in digests}
            encoded = await tokenizer.encode_keyed(rest, viewer.media.family.placeholder, start=start)
            tail, _, media = encoded.expanded({one: length for one, (length, _) in sizes.items()})
            ahead = [one._replace(start=one.start + cut.tokens) for one in media]
            if not all(told for _, told in sizes.values()):
                unasked = [*unasked, MEDIA_ESTIMATED]
    heavy = cut.tokens + len(tail) // 4 > MANY_TOKENS
    flat = (await offload(heavy, flatten, cut.span, cut.take, tail)).because(*unasked)
    if memory is not None and expected:
        await memory.cover(namespace, text, expected)  # some replies may have been collected meanwhile
    if request.cover:
        return await _cover(tree, namespace, text, recall, flat, request, expected, memory, missed, viewer, ahead)
    missing = [name for name in _missing(expected, flat) if not tree.left_out(namespace, text, name, cut)]
    cut_off = _cut_off(flat, expected)
    flat, extras = await with_extras(tree, memory, flat.because(EDITED_TURN) if cut_off else flat, request)
    if expected:
        lost = (reply.span.count for name in missing if (reply := tree.reply(namespace, name)) is not None)
        extras["missing_tokens"] = cut_off + sum(lost)
    answer = partial(answer_of, tree, text, recall, flat, request, missing, cut_off, missed, viewer, ahead)
    body, told = await _written(heavy, answer, extras, lists)
    return Answered(body, [told])


async def _written(
    heavy: bool, answer: Callable[[], dict[str, Any]], extras: dict[str, Any], lists: Lists | None
) -> tuple[list[bytes], tuple[bool, list[str]]]:
    made = {**await offload(heavy, answer), **extras}
    return await json_pieces(heavy, made, lists), (made["exact"], made["reasons"])


async def json_pieces(heavy: bool, answer: dict[str, Any], lists: Lists | None = None) -> list[bytes]:
    """Return what `answer_of` returns as pieces of JSON. They are made in a thread if it is `heavy`, or has files of images."""
    if "multi_modal_data" not in answer:
        return await offload(heavy, in_pieces, answer, lists)
    images = answer["multi_modal_data"]["images"]
    rest = {name: value for name, value in answer.items() if name != "multi_modal_data"}
    return await offload(
        heavy or has_files(images),
        lambda: in_pieces(rest, lists, [b',"multi_modal_data":', *images_json(images)]),
    )


async def with_extras(
    tree: RadixTree, memory: Memory | None, flat: TokenTrajectory, request: RetrievalRequest
) -> tuple[TokenTrajectory, dict[str, Any]]:
    """Return the further fields that a request wants, and the sequence with the reasons for which they may be incomplete."""
    if not request.wanted:
        return flat, {}
    stored = None if memory is None else memory.extras
    fields, reasons = await per_token_fields(tree.extras, stored, flat, request.wanted)
    return replace(flat, reasons=tuple(dict.fromkeys((*flat.reasons, *reasons)))), fields


async def _cover(
    tree: RadixTree,
    namespace: Namespace,
    text: str,
    recall: Recall,
    first: TokenTrajectory,
    request: RetrievalRequest,
    expected: Sequence[str],
    memory: Memory | None,
    missed: Sequence[str],
    viewer: Viewer | None,
    ahead: Sequence[MediaSpan],
) -> Answered:
    """Answer with the chain of the text, and the fewest others that hold the rest of the replies whole."""
    others = replies_to_add(tree, namespace, first, expected)
    masks, lists = SharedMask(first, [one.span for one in others]), Lists()
    missing = [name for name in dict.fromkeys(_missing(expected, first)) if tree.reply(namespace, name) is None]
    for one in others:
        tree.hold(one.span)  # so that the answers contain what would be evicted while they are built
    try:
        masks.apply(0, first)
        heavy = len(first.token_ids) > MANY_TOKENS
        first = first.because(EDITED_TURN) if _cut_off(first, expected) else first
        first, extras = await with_extras(tree, memory, first, request)
        answer = partial(answer_of, tree, text, recall, first, request, missing, 0, missed, viewer, ahead)
        written = [await _written(heavy, answer, extras, lists)]
        # Each is written before the next is made: thousands of long ones are much as JSON, and several times that as numbers.
        unasked = list[str]()
        for number, one in enumerate(others):
            if number % _AT_ONCE == 0:
                texts = [tree.text_of(one) for one in others[number : number + _AT_ONCE]]
                if memory is not None and not unasked:  # for the other samples that these texts have
                    answered = await asyncio.gather(*(memory.cover(namespace, whole) for whole in texts))
                    unasked = [] if all(answered) else [STORE_UNREACHABLE]
            await asyncio.sleep(0)
            whole, other = texts[number % _AT_ONCE], tree.recall_generation(one)
            if memory is not None:
                memory.retrieved(other)
                missed = () if unasked else await memory.asked_late(namespace, other.cut)
            heavy = other.cut.tokens > MANY_TOKENS
            flat = (await offload(heavy, flatten, other.cut.span, other.cut.take)).because(*unasked)
            masks.apply(number + 1, flat)
            flat, extras = await with_extras(tree, memory, flat, request)
            answer = partial(answer_of, tree, whole, other, flat, request, missing, 0, missed, viewer)
            written.append(await _written(heavy, answer, extras, lists))
    finally:
        for one in others:
            tree.release(one.span)
    pieces = [piece for body, _ in written for piece in (b",", *body)]
    end = b'],"missing":%b}' % msgspec.json.encode(missing)
    return Answered([b'{"trajectories":[', *pieces[1:], end], [told for _, told in written])


def replies_to_add(
    tree: RadixTree, namespace: Namespace, first: TokenTrajectory, expected: Sequence[str]
) -> list[Generation]:
    """Return the replies whose chains, with `first`, hold all expected replies whole, in the order of their recording.

    Args:
        first: the sequence that is answered in any case.
        expected: request ids. Unknown names are left out.
    """
    held = [turn.span for turn in first.turns if turn.end - turn.start == len(turn.span)]
    found = (tree.reply(namespace, name) for name in _not_among(expected, held))
    return chains_to_add(first, [one for one in found if one is not None])


def chains_to_add(first: TokenTrajectory, replies: Iterable[Generation]) -> list[Generation]:
    """Return those replies whose chains, with `first`, hold all of the replies whole, in the order of their recording."""
    held = {turn.span for turn in first.turns if turn.end - turn.start == len(turn.span)}
    listed = {one.span: one for one in replies if one.span not in held}
    inside: set[TokenSpan] = set()
    for span in listed:
        inside.update(part for part, take in links(span.parent, span.take) if take == part.count)
    return sorted((one for span, one in listed.items() if span not in inside), key=lambda one: one.serial)


def _cut_off(found: TokenTrajectory, expected: Iterable[str]) -> int:
    """Return how many tokens of listed replies a sequence lacks that leaves them in their middle.

    A reply of which it lacks only the hidden tail is whole.
    """
    cut = [(turn.span, turn.end - turn.start) for turn in found.turns if turn.end - turn.start < turn.span.visible]
    wanted = {name for listed in expected for name in names_of(listed)} if cut else set()
    return sum(span.count - kept for span, kept in cut if not wanted.isdisjoint(span.request_ids))


def _missing(expected: Iterable[str], found: TokenTrajectory) -> list[str]:
    """Return the listed replies of which a sequence has no token."""
    return _not_among(expected, [turn.span for turn in found.turns])


def _not_among(expected: Iterable[str], spans: Iterable[TokenSpan]) -> list[str]:
    """Return the listed names that none of these replies has. Both may be thousands."""
    there = {name for span in spans for name in span.request_ids}
    return [name for name in expected if there.isdisjoint(names_of(name))]


def trajectory(
    tree: RadixTree, generation: Generation, text: str, memory: Memory | None = None, viewer: Viewer | None = None
) -> dict[str, Any]:
    """Return the answer for the text of a reply that was just recorded, for `return_trajectory`."""
    recall = tree.recall_generation(generation)
    if memory is not None:
        memory.retrieved(recall)
    return answer_of(tree, text, recall, flatten(*recall.cut[:2]), RetrievalRequest(text), [], viewer=viewer)


def answer_of(
    tree: RadixTree,
    text: str,
    recall: Recall,
    flat: TokenTrajectory,
    request: RetrievalRequest,
    missing: Sequence[str],
    cut_off: int = 0,
    missed: Sequence[str] = (),
    viewer: Viewer | None = None,
    ahead: Sequence[MediaSpan] = (),
) -> dict[str, Any]:
    """Return what is known of a text, in the fields of docs/http-api/retrieve.md.

    Args:
        missing: listed replies that are not in the sequence.
        cut_off: how many tokens are missing of listed replies that are in it.
        missed: replies that a prompt would have continued if the store could have been asked.
        viewer: shows the pictures.
        ahead: the media spans behind the chain.

    Raises:
        NotExactError: `strict` forbids the answer.
    """
    cut, reasons = recall.cut, list(flat.reasons)
    if cut.recut and "cut_in_token" not in reasons:
        reasons.append("cut_in_token")
    if cut.start < len(text):
        reasons.append(RETOKENIZED)
    if missing and UNKNOWN_REPLY not in reasons:
        reasons.append(UNKNOWN_REPLY)
    shown: list[dict[str, Any]] = []
    exact_chars = cut.start
    if viewer is not None:
        shown, wrong = viewer.shown([(one, None, None) for one in (*chain_media(cut.span, cut.take), *ahead)])
        reasons += wrong
        text, exact_chars = viewer.plain(text), viewer.plain_length(text, cut.start)
    exact = recall.exact and not cut_off and INEXACT.isdisjoint(reasons)
    answer: dict[str, Any] = {
        "tokens": flat.token_ids.tolist(),
        "response": text,
        "loss_mask": flat.loss_mask.tolist(),
        "token_length": len(flat.token_ids),
        "loss_mask_length": len(flat.loss_mask),
        "rollout_logp": flat.logprobs.tolist() if request.return_logp and flat.logprobs is not None else None,
        "exact": exact,
        "exact_chars": exact_chars,
        "reasons": reasons,
        "response_length": flat.response_length,
        "weight_versions": [{"version": v, "start": begin, "end": end} for v, begin, end in flat.weight_versions],
        "variants": len(recall.request_ids),
        "request_ids": list(recall.request_ids),
        "turns": [turn.described() for turn in flat.turns],
    }
    if shown:
        answer["multi_modal_data"] = {"images": shown}
    if missed:
        answer["missed_request_ids"] = list(missed)
    if request.ignored:
        answer["ignored"] = list(request.ignored)
    if request.max_staleness is not None:
        stale = list(_stale(tree.clock, flat, request.max_staleness, caches=request.kv_staleness))
        answer["stale_tokens"] = sum(count for _, count in stale)
        if stale and request.strict:
            raise NotExactError(
                f"{answer['stale_tokens']} sampled tokens are more than {request.max_staleness} weight versions old "
                f"(of {', '.join(sorted({v for v, _ in stale}))}; the current one is {tree.clock.current})",
                exact_chars=exact_chars,
                stale_tokens=answer["stale_tokens"],
            )
    if request.strict and not exact:
        lost = f"; of the replies that you list these are not in it: {', '.join(missing[:10])}" if missing else ""
        if cut_off:
            lost += (
                f"; it lacks {cut_off} tokens of replies that you list, because the text changes them: ask with `cover`"
            )
        raise NotExactError(
            f"the recorded reply is not exact: {', '.join(reasons)}{lost}", exact_chars=exact_chars, reasons=reasons
        )
    return answer


def _stale(clock: VersionClock, flat: TokenTrajectory, most: int, *, caches: bool) -> Iterator[tuple[str, int]]:
    """Yield versions that are too old, each with how many tokens have it.

    With `caches`, all tokens of a turn have its `kv_version` if that is too old: they were sampled behind what it computed.
    """
    for turn in flat.turns:
        span, count = turn.span, turn.end - turn.start
        if caches and span.kv_version is not None and clock.distance(span.kv_version) > most:
            yield span.kv_version, count
            continue
        assert span.versions is not None, "a turn was sampled"
        for version, begin, end in version_runs(span.versions, count):
            if clock.distance(version) > most:
                yield version, end - begin


# The per-token data of engines, fetched only for a request that asks for it: from this process, or from the store.


def explained(
    tree: RadixTree, namespace: Namespace, text: str, viewer: Viewer | None, *, stored: bool, asked: bool
) -> dict[str, Any]:
    """Return where a text leaves the tree, as `/radix_tree/explain` answers it. With a `viewer` the text is keyed.

    `stored`: whether there is a store. `asked`: whether it could be asked.
    """
    told = _explained(tree, namespace, text, viewer, stored=stored and asked)
    if not asked:
        told["message"] += ". The store does not answer, and may know more: ask again once it does"
    return told


def _explained(
    tree: RadixTree, namespace: Namespace, text: str, viewer: Viewer | None, *, stored: bool
) -> dict[str, Any]:
    departure = tree.departure(namespace, text)
    if viewer is None:
        return departure.explained(text, stored=stored)
    # The digests of two pictures may begin alike: the text leaves the tree at the picture, not inside of its mark.
    place = outside_mark(text, departure.matched)
    other_image = place < departure.matched
    if other_image:
        departure = tree.departure(namespace, text[:place])
    return viewer.explained(text, departure.explained(text, stored=stored), other_image=other_image)


async def per_token_fields(
    here: Extras, fetch: Fetch | None, flat: TokenTrajectory, wanted: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the wanted fields of an answer, and the reasons for which they may be incomplete.

    A field is null if no reply of the sequence has it.

    Args:
        here: the data in this process. `fetch` returns the data in a store, and None if the store cannot be read.
        wanted: some of `ROW_FIELDS` and `TOP_P`.
    """
    names = [name for one in wanted for name in ((TOP_P_IDS, TOP_P_OFFSETS) if one == TOP_P else (one,))]
    found, reasons = [], []
    for turn in flat.turns:
        extras = here.of(turn.span)
        if not extras and fetch is not None:
            fetched = await fetch(turn.span, names)
            if fetched is None:
                reasons = [STORE_UNREACHABLE]
            extras = fetched or {}
        found.append((turn, extras))
    if not any(extras for _, extras in found):
        return dict.fromkeys(wanted), reasons
    fields = await offload(True, _fields, found, len(flat.token_ids), wanted)
    unlike = [name for name in wanted if fields[name] is None and any(name in extras for _, extras in found)]
    return fields, [*reasons, UNLIKE_ROWS] if unlike else reasons


def _fields(found: _Found, tokens: int, wanted: Sequence[str]) -> dict[str, Any]:
    return {name: _top_p(found, tokens) if name == TOP_P else _rows(found, tokens, name) for name in wanted}


def _rows(found: _Found, tokens: int, name: str) -> dict[str, Any] | None:
    assert name in ROW_FIELDS
    having = [(turn, extras[name]) for turn, extras in found if name in extras]
    widths = {extra.shape[1] for _, extra in having}
    if len(widths) != 1:
        return None
    array = joined(
        [
            TurnRows(turn.request_id, turn.span.offset + turn.span.count, turn.end, Raw(written(extra.data)))
            for turn, extra in having
        ],
        tokens,
        widths.pop(),
    )
    if array is None:
        return None
    return {**array.described("request_id"), "base64": Raw(b'"%b"' % b"".join(array.as_base64()))}


def _top_p(found: _Found, tokens: int) -> dict[str, Any] | None:
    sets = [
        TurnSets(turn.request_id, turn.start, turn.end, extras[TOP_P_IDS].data, extras[TOP_P_OFFSETS].data)
        for turn, extras in found
        if TOP_P_OFFSETS in extras
    ]
    return joined_sets(sets, tokens)
