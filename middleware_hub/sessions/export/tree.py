"""A session as a tree: it holds what several branches share once, so that a trainer computes it once.

    flat     [ system user1 ][ reply1 ][ user2 ][ reply2 ]          tree    [ system user1 ][ reply1 ]--[ user2 ][ reply2 ]
             [ system user1 ][ reply1 ][ user3 ][ reply3 ]                                           `--[ user3 ][ reply3 ]

A node is a run of tokens that is all context, or all of one reply. Context is shared where the ids are equal. Sampled tokens
are shared only if they are of the same sample: two replies with equal ids are two samples, and two nodes. `tin` and `tout`
number the nodes in the order of the list: node `a` precedes, or is, node `b` in a sequence exactly if `tin[a] <= tin[b] <
tout[a]`.

An image is a run of one placeholder id, whatever it shows. So the ids of images are compared by digest as well: branches with
different images part where the images stand, even if these have as many tokens.

Per-token numbers of an engine (`routed_experts`) are rows of a node's tokens. A token that branches share has the row of the
first branch with a row for it. The last token of a branch has no row.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from middleware_hub.media.images_json import images_json
from middleware_hub.sessions.export.trajectories import BranchTrajectory
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.spans.per_token import MISSING
from middleware_hub.spans.trajectory import SampledTurn


class _Run(msgspec.Struct):
    """Tokens of one branch that are all context, or all of one reply; `start` is their place in the branch.

    `rows` have a row for each token, all `MISSING` for a token of which no reply has one. Tokens are equal if their `keys` are:
    the ids, or a negative number for each token of an image. `images`: all of its branch, as answers show them.
    """

    ids: NDArray[np.int32]
    keys: NDArray[np.int32]
    images: Sequence[Mapping[str, Any]]
    start: int
    turn: SampledTurn | None
    logprobs: NDArray[np.float64] | None
    versions: tuple[tuple[str, int, int], ...]
    rows: dict[str, NDArray[np.int32]]

    @property
    def span(self) -> TokenSpan | None:
        return None if self.turn is None else self.turn.span

    def cut(self, begin: int, end: int) -> _Run:
        logprobs = None if self.logprobs is None else self.logprobs[begin:end]
        rows = {name: array[begin:end] for name, array in self.rows.items()}
        ids, keys = self.ids[begin:end], self.keys[begin:end]
        return _Run(ids, keys, self.images, self.start + begin, self.turn, logprobs, self.versions, rows)

    def learn(self, other: _Run) -> None:
        """Fill in missing rows from another run with the same tokens."""
        for name, array in other.rows.items():
            mine = self.rows.setdefault(name, array)
            if mine.shape == array.shape:
                untold = (mine == MISSING).all(axis=1)
                if untold.any():
                    self.rows[name] = np.where(untold[:, None], array, mine)


class _Node(msgspec.Struct, eq=False):
    run: _Run
    children: list[_Node]


def tree(found: Sequence[BranchTrajectory], head: Mapping[str, Any]) -> bytes:
    """Return the JSON of a session's tree."""
    return msgspec.json.encode({**head, **tree_of(found)})


def tree_of(found: Sequence[BranchTrajectory]) -> dict[str, Any]:
    """Return `nodes`, parents before their children, and `leaves`, the ends of branches in the order of their commits."""
    none = np.zeros(0, np.int32)
    root = _Node(_Run(none, none, (), 0, None, None, (), {}), [])
    numbers_of = dict[str, int]()
    ends = [_insert(root, _runs(branch, numbers_of)) for branch in found]
    nodes, parents, touts = _numbered(root)
    numbers = {id(node): number for number, node in enumerate(nodes)}
    return {
        "nodes": [_described(node, number, parents[number], touts[number]) for number, node in enumerate(nodes)],
        "leaves": [_leaf(branch, numbers[id(end)]) for branch, end in zip(found, ends, strict=True)],
        "tokens": sum(len(node.run.ids) for node in nodes),
        "flat_tokens": sum(len(branch.prompt_ids) + len(branch.response_ids) for branch in found),
    }


def _runs(branch: BranchTrajectory, numbers_of: dict[str, int]) -> Iterator[_Run]:
    """Yield the runs of a branch. `numbers_of`: the digests of images seen so far, each with its number."""
    ids = np.concatenate([branch.prompt_ids, branch.response_ids])
    keys = ids
    if branch.pictures:
        keys = ids.copy()
        for (start, length, digest), _, _ in branch.pictures:
            keys[start : start + length] = -1 - numbers_of.setdefault(digest, len(numbers_of))
    begin, at = len(branch.prompt_ids), 0
    versions = tuple((version, begin + low, begin + high) for version, low, high in branch.weight_versions)
    logprobs = None
    if branch.response_logprobs is not None:
        logprobs = np.concatenate([np.zeros(begin), branch.response_logprobs])
    rows = {
        name: np.concatenate([array.array(), np.full((1, array.width), MISSING, np.int32)])
        for name, array in branch.per_token.items()
        if array.rows == len(ids) - 1
    }
    whole = _Run(ids, keys, branch.images, 0, None, logprobs, versions, rows)
    for turn in branch.turns:
        if at < turn.start:
            yield whole.cut(at, turn.start)
        if turn.start < turn.end:
            sampled = whole.cut(turn.start, turn.end)
            sampled.turn = turn
            yield sampled
        at = turn.end
    if at < len(ids):
        yield whole.cut(at, len(ids))


def _insert(root: _Node, runs: Iterator[_Run]) -> _Node:
    """Add a branch; return the node at whose last token it ends."""
    at = root
    for run in runs:
        left = run
        while len(left.ids):
            child = next(
                (one for one in at.children if one.run.span is left.span and one.run.keys[0] == left.keys[0]), None
            )
            if child is None:
                child = _Node(left, [])
                at.children.append(child)
            shared = _in_common(child.run.keys, left.keys)
            if shared < len(child.run.ids):
                # The new node is the upper part: a branch may end at the existing node.
                upper = _Node(child.run.cut(0, shared), [child])
                at.children[at.children.index(child)] = upper
                child.run = child.run.cut(shared, len(child.run.ids))
                child = upper
            child.run.learn(left.cut(0, shared))
            left = left.cut(shared, len(left.ids))
            at = child
    return at


def _in_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _numbered(root: _Node) -> tuple[list[_Node], list[int | None], list[int]]:
    """Return all nodes but the root, depth first, the number of each one's parent, and its `tout`."""
    nodes: list[_Node] = []
    parents: list[int | None] = []
    touts: list[int] = []
    stack: list[tuple[_Node, int | None]] = [(child, None) for child in reversed(root.children)]
    while stack:
        node, parent = stack.pop()
        number = len(nodes)
        nodes.append(node)
        parents.append(parent)
        touts.append(number + 1)
        stack += [(child, number) for child in reversed(node.children)]
    for number in range(len(nodes) - 1, -1, -1):  # children come after their parents
        parent = parents[number]
        if parent is not None:
            touts[parent] = max(touts[parent], touts[number])
    return nodes, parents, touts


def _described(node: _Node, number: int, parent: int | None, tout: int) -> dict[str, Any]:
    run = node.run
    low, high = run.start, run.start + len(run.ids)
    turn = run.turn
    images = [one for one in run.images if low <= one["span"][0] < high]
    return {
        "node": number,
        "parent": parent,
        "tin": number,
        "tout": tout,
        "start": low,
        "token_ids": run.ids.tolist(),
        "mask": int(turn is not None),
        "logprobs": None if turn is None or run.logprobs is None else run.logprobs.tolist(),
        "weight_versions": [
            {"version": version, "start": max(begin, low) - low, "end": min(end, high) - low}
            for version, begin, end in run.versions
            if max(begin, low) < min(end, high)
        ],
        "generation_id": None if turn is None else turn.request_id,
        "finish": None if turn is None or turn.end != high else turn.span.finish,
        "kv_version": None if turn is None else turn.span.kv_version,
        **({"multi_modal_data": Raw(b"".join(images_json(images)))} if images else {}),
        **{name: _as_json(array) for name, array in run.rows.items() if (array != MISSING).any()},
    }


def _as_json(rows: NDArray[np.int32]) -> dict[str, Any]:
    numbers = b2a_base64(rows.astype("<i4").tobytes(), newline=False).decode()
    return {"dtype": "int32", "shape": list(rows.shape), "base64": numbers}


def _leaf(branch: BranchTrajectory, node: int) -> dict[str, Any]:
    return {
        "branch": branch.branch,
        "node": node,
        "root": branch.root,
        "system_digest": branch.system_digest,
        "tools_digest": branch.tools_digest,
        "side_request": branch.side_request,
        "lora_path": branch.lora,
        "reward_info": branch.reward_info,
        "finish_reason": branch.finish_reason,
        "exact": branch.exact,
        "reasons": branch.reasons,
        **({"missed_request_ids": branch.missed} if branch.missed else {}),
    }
