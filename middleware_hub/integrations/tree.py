"""Trees for attention: a session's branches in one sequence, each shared token once, and the mask that keeps branches apart.

    tree = session.tree()                                   # middleware_hub.client
    packed = pack([tree])
    logits = model(packed.input_ids, packed.position_ids, mask=packed.dense_mask())
    loss = -(packed.weights(advantages) * packed.logprobs_of(logits)).sum()

A token sees only the tokens of its own branch that precede it: the same tokens as in a separate sequence, at the same
positions. So loss and gradients are those of the branches one by one (`flat`), up to the order in which floats are added. For
FlexAttention, pass `packed.mask_mod()` to `create_block_mask`; nodes are in depth-first order, so most blocks are empty or
full.

It is a reference, written to be read. It needs torch, and no other module of this project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Shared = Literal["once", "every"]


@dataclass(frozen=True)
class PackedTree:
    """Trees in one sequence of `T` tokens. All tensors but the last have one entry for each token.

    Attributes:
        input_ids: the tokens.
        position_ids: the place of each token in its own branch.
        before: the index of the token before each, whose logits predict it; -1 where a branch begins.
        sampled: whether it was sampled. Only these are trained on.
        rollout_logprobs: the engine's; 0.0 for context, and nan where the engine gave none.
        tin, tout: of its node.
        leaves: (leaves, T): which tokens are in the branch of each leaf. Leaves are those of all trees, in order.
        flat_tokens: the number of tokens of the branches one by one.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    before: torch.Tensor
    sampled: torch.Tensor
    rollout_logprobs: torch.Tensor
    tin: torch.Tensor
    tout: torch.Tensor
    leaves: torch.Tensor
    flat_tokens: int

    @property
    def saved(self) -> float:
        """Return the share of tokens that need not be computed."""
        return 1 - len(self.input_ids) / self.flat_tokens

    def mask_mod(self) -> Callable[[Any, Any, Any, Any], torch.Tensor]:
        """Return the function that FlexAttention's `create_block_mask` takes."""
        tin, tout = self.tin, self.tout

        def sees(_batch: Any, _head: Any, query: Any, key: Any) -> torch.Tensor:
            inside: torch.Tensor = (tin[key] <= tin[query]) & (tin[query] < tout[key]) & (key <= query)
            return inside

        return sees

    def dense_mask(self) -> torch.Tensor:
        """Return (T, T): whether the token of a row sees the token of a column."""
        places = torch.arange(len(self.input_ids), device=self.input_ids.device)
        return self.mask_mod()(None, None, places[:, None], places[None, :])

    def logprobs_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logprob of each token under `logits` of shape (T, vocabulary); 0.0 if no token precedes it."""
        found = torch.log_softmax(logits, -1)[self.before.clamp(min=0), self.input_ids]
        return torch.where(self.before >= 0, found, torch.zeros_like(found))

    def weights(self, of_leaves: Sequence[float | None], shared: Shared = "once") -> torch.Tensor:
        """Return the factor of each token in a loss: 0.0 for context, and for turns that only leaves without a weight have.

        Args:
            of_leaves: the advantage, or another weight, of each leaf; None for a leaf that is left out, as without a reward.
            shared: a turn of several branches gets the weight of the first of them that has one (`once`), or the sum of all
                (`every`). For a loss that is not linear in the advantage, as with clipping, the sum is not that of the
                branches: use `once`.
        """
        numbers = [0.0 if one is None else one for one in of_leaves]
        given = torch.tensor(numbers, dtype=self.rollout_logprobs.dtype, device=self.input_ids.device)
        if len(given) != len(self.leaves):
            raise ValueError(f"{len(given)} weights for {len(self.leaves)} leaves")
        there = torch.tensor([one is not None for one in of_leaves], device=self.input_ids.device)
        weighed = self.leaves & there[:, None]
        member = weighed.to(given.dtype)
        found = given @ member if shared == "every" else given[member.argmax(0)]
        return torch.where(self.sampled & weighed.any(0), found, torch.zeros_like(found))


def pack(trees: Sequence[Mapping[str, Any]], device: Any = None, dtype: Any = torch.float32) -> PackedTree:
    """Pack trees, as `finalize` with `"format": "tree"` gives them, one after the other. No tree sees another.

    Raises ValueError for a tree with images: a model that sees counts positions by the sides of each image, and wants features.
    """
    ids: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("position", "before", "sampled", "logprob", "tin", "tout")}
    member: list[list[tuple[int, int]]] = []
    base = 0
    for tree in trees:
        nodes = tree["nodes"]
        ends: list[int] = []
        begins: list[int] = []
        for node in nodes:
            if node.get("multi_modal_data"):
                raise ValueError("a tree with images is not packed here: train on its branches one by one (`finalize`)")
            begin, tokens = len(ids), node["token_ids"]
            count = len(tokens)
            parent = -1 if node["parent"] is None else ends[node["parent"]] - 1
            ids += tokens
            columns["position"] += range(node["start"], node["start"] + count)
            columns["before"] += [parent, *range(begin, begin + count - 1)]
            columns["sampled"] += [bool(node["mask"])] * count
            columns["logprob"] += _logprobs(node)
            columns["tin"] += [base + node["tin"]] * count
            columns["tout"] += [base + node["tout"]] * count
            begins.append(begin)
            ends.append(len(ids))
        for leaf in tree["leaves"]:
            path: list[tuple[int, int]] = []
            at: int | None = leaf["node"]
            while at is not None:
                path.append((begins[at], ends[at]))
                at = nodes[at]["parent"]
            member.append(path)
        base += len(nodes)
    leaves = torch.zeros(len(member), len(ids), dtype=torch.bool)
    for number, path in enumerate(member):
        for low, high in path:
            leaves[number, low:high] = True
    return PackedTree(
        torch.tensor(ids, device=device),
        torch.tensor(columns["position"], device=device),
        torch.tensor(columns["before"], device=device),
        torch.tensor(columns["sampled"], device=device),
        torch.tensor(columns["logprob"], dtype=dtype, device=device),
        torch.tensor(columns["tin"], device=device),
        torch.tensor(columns["tout"], device=device),
        leaves.to(device) if device is not None else leaves,
        sum(tree["flat_tokens"] for tree in trees),
    )


def _logprobs(node: Mapping[str, Any]) -> list[float]:
    if not node["mask"]:
        return [0.0] * len(node["token_ids"])
    told: list[float] | None = node["logprobs"]
    return [float("nan")] * len(node["token_ids"]) if told is None else told


def flat(packed: PackedTree) -> list[torch.Tensor]:
    """Return the indices of each leaf's tokens, in order: `packed.input_ids[one]` is the branch by itself."""
    return [torch.nonzero(row).flatten() for row in packed.leaves]
