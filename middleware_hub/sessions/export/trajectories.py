"""Sessions as trajectories: one for each branch, every id the one that was sampled, no sampled token trained twice.

    prompt_ids | response_ids                                          a branch
    [ context ]|[ sampled ][ context ][ sampled ][ context ][ sampled ]
    response_mask  1 1 1 1   0 0 0 0    1 1 1 1    0 0 0 0    1 1 1 1

Positions (`weight_versions`, `turns`) are offsets into `response_ids`, half-open. Branches come in the order of their commits.
Of turns that several branches share, the first branch has the mask (`once`), or all have it (`every`).
What workers said of turns is given by turn, but for arrays with a row for each token, which are joined (see `per_token`).

What is exported may be long: it is made into JSON piece by piece, so that an event loop can do other things in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from middleware_hub.sessions.export.per_token import ROW_FIELDS, PerTokenArray, TurnRows, joined
from middleware_hub.sessions.trie.nodes import Checkpoint
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import INEXACT, UNKNOWN_REPLY, TokenSpan, links
from middleware_hub.spans.trajectory import Turn, flatten_chain

ARRAYS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
"""What trajectories have one entry a token of."""
SharedTurns = Literal["once", "every"]
CHUNK = 8_192
"""Numbers that are made into JSON at once: about half a millisecond."""


class BranchTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One branch, ready for a trainer. Arrays are aligned with `response_ids`.

    Attributes:
        branch: the id of its last generation.
        parent_branch: the earlier branch that it shares its first turns with, if any.
        prompt_ids, response_ids: int32.
        response_mask: uint8; 1 where a token was sampled and is this branch's to be trained on.
        response_logprobs: float64; None if a sampled token came without.
        weight_versions: `(version, start, end)` over sampled tokens.
        turns: the sampled replies, with offsets into all ids, the prompt's too.
        messages: JSON of each.
        extra: what workers said of turns, by name: `(generation id, raw value)`.
        per_token: of this, what could be joined: a row for each token but the last, prompt and response.
    """

    branch: str
    parent_branch: str | None
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.uint8]
    response_logprobs: NDArray[np.float64] | None
    weight_versions: tuple[tuple[str, int, int], ...]
    turns: tuple[Turn, ...]
    messages: tuple[bytes, ...]
    finish_reason: str
    reward_info: dict[str, Any]
    reasons: tuple[str, ...]
    extra: Mapping[str, list[tuple[str, Raw]]]
    per_token: Mapping[str, PerTokenArray]

    @property
    def exact(self) -> bool:
        """Whether nothing speaks against these ids."""
        return INEXACT.isdisjoint(self.reasons)


def branches(
    trie: MessageTrie,
    reward_info: dict[str, Any],
    *,
    every_checkpoint: bool = False,
    shared_turns: SharedTurns = "once",
    missing: Sequence[str] = (),
) -> Iterator[BranchTrajectory]:
    """The trajectories of a session as it is now; what is committed later is not among them.

    Args:
        trie: the session's.
        reward_info: the session's own; what was attached to a turn goes over it.
        every_checkpoint: one for each sample, not only for those at the end of a branch.
        shared_turns: who has the mask of a turn that several trajectories contain.
        missing: replies that the caller got and that the session does not know. Where a trajectory has an assistant's message
            that was not sampled here, it may be one of them: such a trajectory is not exact (`unknown_reply`).
    """
    # All chains are taken down now: a session may be deleted while its export is on its way.
    taken = [(one, _chain(one)) for one in trie.checkpoints(terminal=not every_checkpoint)]
    return _laid_out(taken, reward_info, shared_turns, missing)


def _laid_out(
    taken: list[tuple[Checkpoint, _Chain]],
    reward_info: dict[str, Any],
    shared_turns: SharedTurns,
    missing: Sequence[str],
) -> Iterator[BranchTrajectory]:
    trained: dict[int, int] = {}
    first_with: dict[str, str] = {}
    for checkpoint, chain in taken:
        made = _trajectory(checkpoint, chain, reward_info, trained if shared_turns == "once" else None, first_with)
        if missing and chain.unsampled:
            made = msgspec.structs.replace(made, reasons=(*made.reasons, UNKNOWN_REPLY))
        yield made


class _Chain(msgspec.Struct, frozen=True):
    """What is needed of a checkpoint when the trie may be gone: its spans, its turns, its messages; first ones first.

    Attributes:
        unsampled: whether an assistant's message among them was not sampled here.
    """

    spans: list[tuple[TokenSpan, int]]
    turns: list[Checkpoint]
    messages: list[bytes]
    unsampled: bool


def _chain(checkpoint: Checkpoint) -> _Chain:
    spans = list(links(checkpoint.span, len(checkpoint.span)))
    turns = list(checkpoint.lineage())
    spans.reverse()
    turns.reverse()
    sampled = {id(turn.node): turn for turn in turns}
    messages = []
    path = checkpoint.node.path()
    for node in path:
        turn = sampled.get(id(node))
        messages.append(node.message if turn is None or not turn.reasoning else _with_reasoning(node.message, turn))
    unsampled = any(node.role == "assistant" and id(node) not in sampled for node in path)
    return _Chain(spans, turns, messages, unsampled)


def _with_reasoning(message: bytes, turn: Checkpoint) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(message), "reasoning_content": turn.reasoning})


def _trajectory(
    checkpoint: Checkpoint,
    chain: _Chain,
    reward_info: dict[str, Any],
    trained: dict[int, int] | None,
    first_with: dict[str, str],
) -> BranchTrajectory:
    flat = flatten_chain(chain.spans)
    begin = len(flat.token_ids) - flat.response_length
    mask = flat.loss_mask[begin:].copy()
    at = {id(turn.span): turn for turn in chain.turns}
    told: dict[str, list[TurnRows]] = {name: [] for name in ROW_FIELDS}
    for span, count in chain.spans:
        turn = at.get(id(span))
        if turn is None:
            continue
        low = span.offset - begin
        for name in told.keys() & turn.extra.keys():
            told[name].append(TurnRows(turn.id, span.offset + len(span), span.offset + count, turn.extra[name]))
        if trained is not None:
            done = trained.get(id(span), 0)
            mask[low : low + min(done, count)] = 0
            trained[id(span)] = max(done, count)
    parent = next((first_with[turn.id] for turn in reversed(chain.turns) if turn.id in first_with), None)
    for turn in chain.turns:
        first_with.setdefault(turn.id, checkpoint.id)
    rewards: dict[str, Any] = dict(reward_info)
    reasons = list(flat.reasons)
    extra: dict[str, list[tuple[str, Raw]]] = {}
    for turn in chain.turns:
        rewards.update(turn.reward or {})
        reasons += [reason for reason in turn.reasons if reason not in reasons]
        for name, value in turn.extra.items():
            extra.setdefault(name, []).append((turn.id, value))
    per_token = {}
    for name, rows in told.items():
        array = joined(rows, len(flat.token_ids))
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
        finish_reason=checkpoint.finish,
        reward_info=rewards,
        reasons=tuple(reasons),
        extra=extra,
        per_token=per_token,
    )


# JSON ------------------------------------------------------------------------------------------------------------------


def as_json(found: Iterable[BranchTrajectory], head: Mapping[str, Any]) -> Iterator[bytes]:
    """`{...head, "trajectories": [...]}`, piece by piece, each of them quickly made."""
    opening = msgspec.json.encode(head)[:-1]
    yield opening + (b"," if head else b"") + b'"trajectories":['
    for number, trajectory in enumerate(found):
        if number:
            yield b","
        yield from _one(trajectory)
    yield b"]}"


def _one(trajectory: BranchTrajectory) -> Iterator[bytes]:
    fields = described(trajectory)
    for name in trajectory.per_token:
        del fields["extra_fields"][name]
    # `extra_fields` is the last of these and never empty: both objects stay open for what is long.
    yield msgspec.json.encode(fields)[:-2]
    for name, joint in trajectory.per_token.items():
        yield b',"%b":%b,"base64":"' % (name.encode(), msgspec.json.encode(joint.described())[:-1])
        yield from joint.as_base64()
        yield b'"}'
    yield b"}"
    for name in ARRAYS:
        array = getattr(trajectory, name)
        yield b',"%b":' % name.encode()
        if array is None:
            yield b"null"
        else:
            yield from _numbers(array)
    yield b"}"


def described(trajectory: BranchTrajectory) -> dict[str, Any]:
    """All of a trajectory but its arrays, ready to be printed as JSON."""
    begin = len(trajectory.prompt_ids)
    return {
        "branch": trajectory.branch,
        "parent_branch": trajectory.parent_branch,
        "messages": [Raw(message) for message in trajectory.messages],
        "weight_versions": [{"version": v, "start": low, "end": high} for v, low, high in trajectory.weight_versions],
        "num_turns": len(trajectory.turns),
        "turns": [turn.described(begin) for turn in trajectory.turns],
        "finish_reason": trajectory.finish_reason,
        "reward_info": trajectory.reward_info,
        "multi_modal_data": None,
        "exact": trajectory.exact,
        "reasons": trajectory.reasons,
        "extra_fields": {
            "turns": [
                {"generation_id": turn.request_id, "start": turn.start - begin, "end": turn.end - begin}
                for turn in trajectory.turns
            ],
            **{
                name: [{"generation_id": i, "value": value} for i, value in values]
                for name, values in trajectory.extra.items()
            },
            **{name: array.described() for name, array in trajectory.per_token.items()},
        },
    }


def _numbers(array: NDArray[Any]) -> Iterator[bytes]:
    yield b"["
    for begin in range(0, len(array), CHUNK):
        inner = msgspec.json.encode(array[begin : begin + CHUNK].tolist())[1:-1]
        yield b"," + inner if begin else inner
    yield b"]"


# Sight -----------------------------------------------------------------------------------------------------------------


def topology(trie: MessageTrie) -> list[dict[str, Any]]:
    """Every message with what is known of it, parents before children."""
    nodes = list(trie.each_node())
    numbers = {id(node): number for number, node in enumerate(nodes)}
    return [
        {
            "node": number,
            "parent": numbers.get(id(node.parent)),
            "depth": node.depth,
            "role": node.role,
            "pending": not node.committed,
            "in_flight": node.handles,
            "excerpt": _excerpt(node.message),
            "samples": [
                {
                    "generation_id": sample.id,
                    "parent_generation": None if sample.parent is None else sample.parent.id,
                    "finish_reason": sample.finish,
                    "tokens": len(sample.span),
                    "terminal": sample.terminal,
                }
                for sample in node.samples or ()
            ],
        }
        for number, node in enumerate(nodes)
    ]


def _excerpt(message: bytes, characters: int = 80) -> str:
    said = msgspec.json.decode(message)
    content = said.get("content") or ""
    calls = [call["function"]["name"] for call in said.get("tool_calls") or ()]
    text = content if isinstance(content, str) else str(content)
    return (text + "".join(f" [{name}]" for name in calls))[:characters]
