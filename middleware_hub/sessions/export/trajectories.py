"""Sessions as trajectories: one for each branch, with the ids that were sampled, and no sampled token trained twice.

    prompt_ids | response_ids                                          a branch
    [ context ]|[ sampled ][ context ][ sampled ][ context ][ sampled ]
    response_mask  1 1 1 1   0 0 0 0    1 1 1 1    0 0 0 0    1 1 1 1

Positions (`weight_versions`, `turns`) are offsets into `response_ids`, half-open. Branches come in the order of their commits.
A turn that several branches share has its mask in all of them (`every`), or in the first that has a reward (`once`; if none has
one, in the first): trainers leave out branches without a reward, and a turn would be left out with its branch. Further fields
of the workers' replies are grouped by turn; arrays with a row for each token are joined (see `per_token`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from middleware_hub.chat.keys import offers_tools, system_digest, tools_of
from middleware_hub.sessions.trie.nodes import Checkpoint, Root
from middleware_hub.spans.chain import INEXACT, STORE_UNREACHABLE, UNKNOWN_REPLY, TokenSpan, links
from middleware_hub.spans.media import MediaSpan
from middleware_hub.spans.per_token import ROW_FIELDS, PerTokenArray, TurnRows, joined
from middleware_hub.spans.sampling_sets import SET_FIELDS, TurnSets, joined_sets, reported_sets
from middleware_hub.spans.trajectory import SampledTurn, flatten_chain

ARRAYS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
"""The arrays of a trajectory with one entry for each token."""
SharedTurns = Literal["once", "every"]


class BranchTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One branch, ready for a trainer. Arrays are aligned with `response_ids`.

    Attributes:
        branch: the id of its last generation.
        parent_branch: the earlier branch with which it shares its first turns, if any.
        prompt_ids, response_ids: int32.
        response_mask: uint8; 1 where a token was sampled and is to be trained in this branch.
        response_logprobs: float64; None if a sampled token came without one.
        weight_versions: `(version, start, end)` over sampled tokens.
        turns: the sampled replies, with offsets into all ids, the prompt included.
        messages: the JSON of each message.
        extra: further fields of the workers' replies by name: `(generation id, raw value)`.
        per_token: the fields of `extra` that could be joined: a row for each token but the last, prompt and response.
        sets: the tokens that each sampled token was drawn from, as answers show them; None if no turn reported them.
        pictures: the media spans among all ids, each with its message and its part (None where that is not known).
        images: these, as answers show them.
        answers: by the ids of its sampled turns, the places of their messages. A turn that was edited since has none.
        missed: the replies that its prompts would have continued if the store could have been asked.
        root: the number of its root (see `trie.roots`).
        system_digest, tools_digest: equal for equal system messages and equal tools; None if there are none.
        side_request: whether its conversation is not the task's: it has no tools where the task has some, or another system
            prompt.
        lora: the adapter that sampled it; empty for the base model.
        scores: what scorers say of it, under the names of answers: a list with an entry for each id of the response.
    """

    branch: str
    parent_branch: str | None
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.uint8]
    response_logprobs: NDArray[np.float64] | None
    weight_versions: tuple[tuple[str, int, int], ...]
    turns: tuple[SampledTurn, ...]
    messages: tuple[bytes, ...]
    finish_reason: str
    reward_info: dict[str, Any]
    reasons: tuple[str, ...]
    extra: Mapping[str, list[tuple[str, Raw]]]
    per_token: Mapping[str, PerTokenArray]
    pictures: tuple[tuple[MediaSpan, int | None, int | None], ...] = ()
    images: Sequence[Mapping[str, Any]] = ()
    answers: Mapping[str, int] = {}
    missed: tuple[str, ...] = ()
    root: int = 0
    system_digest: str | None = None
    tools_digest: str | None = None
    side_request: bool = False
    lora: str = ""
    scores: Mapping[str, Sequence[Any]] = {}
    sets: Mapping[str, Any] | None = None

    @property
    def exact(self) -> bool:
        """Whether no reason contradicts these ids."""
        return INEXACT.isdisjoint(self.reasons)


def branches(
    checkpoints: Iterable[Checkpoint],
    reward_info: dict[str, Any],
    *,
    shared_turns: SharedTurns = "once",
    missing: Sequence[str] = (),
    unread: bool = False,
    passed_over: Callable[[Checkpoint], Iterable[Checkpoint]] | None = None,
    head: Root | None = None,
) -> Iterator[BranchTrajectory]:
    """Yield one trajectory for each checkpoint, as its branch is now: turns committed later are not in it.

    Args:
        checkpoints: the ends of the trajectories, in the order of their commits.
        reward_info: of the session; the reward of a turn overrides it.
        shared_turns: which trajectories have the mask of a turn that several contain.
        missing: replies that the caller received and that the session does not know. A trajectory with an assistant's message
            that was not sampled here may contain one of them: it is not exact (`unknown_reply`).
        unread: whether another router may have continued the session while the store is unreachable (`store_unreachable`).
        passed_over: `MessageTrie.passed_over`, for the turns that could not ask the store: now that all turns are known, this
            tells what those lack. None keeps their reason.
        head: the root of the session's task.
    """
    # Take all chains now: the session may be deleted while its export is sent.
    taken = [(one, _chain(one, None if unread else passed_over, head)) for one in checkpoints]
    return _laid_out(taken, reward_info, shared_turns, missing, (STORE_UNREACHABLE,) if unread else ())


def _laid_out(
    taken: list[tuple[Checkpoint, _Chain]],
    reward_info: dict[str, Any],
    shared_turns: SharedTurns,
    missing: Sequence[str],
    further: tuple[str, ...],
) -> Iterator[BranchTrajectory]:
    rewards = [_reward_of(chain, reward_info) for _, chain in taken]
    elsewhere = _trained_elsewhere([chain for _, chain in taken], rewards) if shared_turns == "once" else None
    first_with: dict[str, str] = {}
    for number, (checkpoint, chain) in enumerate(taken):
        made = _trajectory(
            checkpoint, chain, rewards[number], {} if elsewhere is None else elsewhere[number], first_with
        )
        doubts = (UNKNOWN_REPLY, *further) if missing and chain.unsampled else further
        reasons = dict.fromkeys((*made.reasons, *doubts))  # a turn after a lost one may already give this reason
        yield msgspec.structs.replace(made, reasons=tuple(reasons)) if doubts else made


def _reward_of(chain: _Chain, reward_info: dict[str, Any]) -> dict[str, Any]:
    found = dict(reward_info)
    for turn in chain.turns:
        found.update(turn.reward or {})
    return found


def _trained_elsewhere(chains: Sequence[_Chain], rewards: Sequence[dict[str, Any]]) -> list[dict[int, int]]:
    """Return how many of the first tokens of each turn other branches train, by the id of its span, for each branch.

    The first branch with a reward trains a turn: one with a number in its reward before one with other words only.
    """
    trained: dict[int, int] = {}
    found: list[dict[int, int]] = [{} for _ in chains]
    for number in sorted(range(len(chains)), key=lambda number: _unrewarded(rewards[number])):
        at = {id(turn.span) for turn in chains[number].turns}
        for span, count in chains[number].spans:
            if id(span) in at:
                found[number][id(span)] = done = trained.get(id(span), 0)
                trained[id(span)] = max(done, count)
    return found


def _unrewarded(reward: dict[str, Any]) -> int:
    if any(isinstance(value, int | float) for value in reward.values()):
        return 0
    return 1 if reward else 2


class _Chain(msgspec.Struct, frozen=True):
    """The parts of a checkpoint that an export needs: its spans, turns and messages. The trie may be gone by then.

    Attributes:
        answers: see `BranchTrajectory`.
        unsampled: whether one of the assistant's messages was not sampled here.
        missed: by the ids of the turns that could not ask the store, the replies that these would have continued.
        beginning: the values of the fields `root` to `lora`.
    """

    spans: list[tuple[TokenSpan, int]]
    turns: list[Checkpoint]
    messages: list[bytes]
    answers: dict[str, int]
    unsampled: bool
    missed: dict[str, list[str]]
    beginning: dict[str, Any]


def _chain(
    checkpoint: Checkpoint, passed_over: Callable[[Checkpoint], Iterable[Checkpoint]] | None, head: Root | None
) -> _Chain:
    spans = list(links(checkpoint.span, len(checkpoint.span)))
    turns = list(checkpoint.lineage())
    spans.reverse()
    turns.reverse()
    sampled = {id(turn.node): turn for turn in turns}
    messages, answers = [], dict[str, int]()
    path = checkpoint.node.path()
    for at, node in enumerate(path):
        turn = sampled.get(id(node))
        if turn is not None:
            answers[turn.id] = at
        messages.append(node.message if turn is None or not turn.reasoning else _with_reasoning(node.message, turn))
    missed = {}
    if passed_over is not None:
        doubtful = (turn for turn in turns if STORE_UNREACHABLE in turn.reasons)
        missed = {turn.id: [one.id for one in passed_over(turn)] for turn in doubtful}
    system = [msgspec.json.decode(node.message)["content"] for node in takewhile(attrgetter("is_system"), path)]
    setting = checkpoint.node.setting
    beginning = {
        "root": checkpoint.root.number,
        "system_digest": system_digest(system) if system else None,
        "tools_digest": tools_of(setting).hex() if offers_tools(setting) else None,
        "side_request": head is not None and checkpoint.root.beside(head),
        "lora": checkpoint.lora,
    }
    return _Chain(spans, turns, messages, answers, checkpoint.has_unsampled(), missed, beginning)


def _pictures(chain: _Chain) -> tuple[tuple[MediaSpan, int | None, int | None], ...]:
    """Return the media spans of a chain, with their places in its messages."""
    spans = [
        MediaSpan(span.offset + start, length, digest)
        for span, count in chain.spans
        for start, length, digest in span.media
        if start + length <= count
    ]
    if not spans:
        return ()
    places: list[tuple[int, int, str]] = []
    for number, raw in enumerate(chain.messages):
        content = msgspec.json.decode(raw).get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") == "image":
                places.append((number, at, part.get("digest")))
    if [one.digest for one in spans] != [digest for _, _, digest in places]:  # a splice may have left a message out
        return tuple([(one, None, None) for one in spans])
    return tuple([(one, number, at) for one, (number, at, _) in zip(spans, places, strict=True)])


def _with_reasoning(message: bytes, turn: Checkpoint) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(message), "reasoning_content": turn.reasoning})


def _trajectory(
    checkpoint: Checkpoint,
    chain: _Chain,
    rewards: dict[str, Any],
    elsewhere: Mapping[int, int],
    first_with: dict[str, str],
) -> BranchTrajectory:
    flat = flatten_chain(chain.spans)
    begin = len(flat.token_ids) - flat.response_length
    mask = flat.loss_mask[begin:].copy()
    at = {id(turn.span): turn for turn in chain.turns}
    rows: dict[str, list[TurnRows]] = {name: [] for name in ROW_FIELDS}
    sets: list[TurnSets] = []
    for span, count in chain.spans:
        turn = at.get(id(span))
        if turn is None:
            continue
        low = span.offset - begin
        for name in rows.keys() & turn.extra.keys():
            rows[name].append(TurnRows(turn.id, span.offset + span.count, span.offset + count, turn.extra[name]))
        if not turn.extra.keys().isdisjoint(SET_FIELDS) and (told := reported_sets(turn.extra, span.count)) is not None:
            sets.append(TurnSets(turn.id, span.offset, span.offset + count, *told))
        mask[low : low + min(elsewhere.get(id(span), 0), count)] = 0
    parent = next((first_with[turn.id] for turn in reversed(chain.turns) if turn.id in first_with), None)
    for turn in chain.turns:
        first_with.setdefault(turn.id, checkpoint.id)
    reasons = list(flat.reasons)
    extra: dict[str, list[tuple[str, Raw]]] = {}
    for turn in chain.turns:
        settled = not chain.missed.get(turn.id, True)
        reasons += [
            reason for reason in turn.reasons if reason not in reasons and not (settled and reason == STORE_UNREACHABLE)
        ]
        for name, value in turn.extra.items():
            extra.setdefault(name, []).append((turn.id, value))
    per_token = {}
    for name, reported in rows.items():
        array = joined(reported, len(flat.token_ids))
        if array is not None:
            per_token[name] = array
            del extra[name]
    return BranchTrajectory(
        branch=checkpoint.id,
        parent_branch=parent,
        prompt_ids=flat.token_ids[:begin],
        response_ids=flat.token_ids[begin:],
        response_mask=mask,
        response_logprobs=None if flat.logprobs is None else flat.logprobs[begin:],
        weight_versions=tuple((version, low - begin, high - begin) for version, low, high in flat.weight_versions),
        turns=flat.turns,
        messages=tuple(chain.messages),
        answers=chain.answers,
        pictures=_pictures(chain),
        finish_reason=checkpoint.finish,
        reward_info=rewards,
        reasons=tuple(reasons),
        extra=extra,
        per_token=per_token,
        sets=joined_sets(sets, len(flat.token_ids), "generation_id"),
        missed=tuple(dict.fromkeys(name for names in chain.missed.values() for name in names)),
        **chain.beginning,
    )
