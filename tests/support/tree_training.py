"""A tiny model, trained on trees and on their branches one by one. A program: trees as JSON lines in, what differed out.

It runs where torch is, which need not be where the tests run. It imports nothing but torch and the packer.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from torch import nn

from middleware_hub.integrations.tree import PackedTree, flat, pack

WIDTH, HEADS, LAYERS = 32, 4, 3


class Tiny(nn.Module):
    """A decoder with learned embeddings, rotary positions and an explicit mask."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "qkv": nn.Linear(WIDTH, 3 * WIDTH),
                    "out": nn.Linear(WIDTH, WIDTH),
                    "norm2": nn.LayerNorm(WIDTH),
                    "mlp": nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
                }
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, *, flex: bool = False) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](hidden)).view(len(ids), 3, HEADS, -1).permute(1, 2, 0, 3)
            q, k = rotated(q, positions), rotated(k, positions)
            if flex:
                from torch.nn.attention.flex_attention import flex_attention

                seen = flex_attention(q[None], k[None], v[None], block_mask=mask)[0]
            else:
                scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
                seen = torch.softmax(scores, -1) @ v
            hidden = hidden + layer["out"](seen.permute(1, 0, 2).reshape(len(ids), WIDTH))
            hidden = hidden + layer["mlp"](layer["norm2"](hidden))
        logits: torch.Tensor = self.norm(hidden) @ self.embed.weight.T
        return logits


def rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    angles = positions[:, None].to(heads.dtype) / 100.0 ** (torch.arange(half, dtype=heads.dtype) / half)
    one, other = heads[..., :half], heads[..., half:]
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


def by_branches(model: Tiny, packed: PackedTree, weights: list[float | None], shared: str) -> torch.Tensor:
    """The loss of the branches, each as a sequence of its own. With `once` a turn counts in the first branch that has it.

    A branch without a weight is left out.
    """
    loss = torch.zeros((), dtype=torch.float64)
    trained = torch.zeros(len(packed.input_ids), dtype=torch.bool)
    for weight, one in zip(weights, flat(packed), strict=True):
        if weight is None:
            continue
        ids = packed.input_ids[one]
        logits = model(ids, torch.arange(len(ids)), torch.ones(len(ids), len(ids), dtype=torch.bool).tril())
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        counts = packed.sampled[one] & ~(trained[one] if shared == "once" else torch.zeros_like(trained[one]))
        loss = loss - weight * (logprobs * counts[1:]).sum()
        trained[one] = True
    return loss


def by_tree(model: Tiny, packed: PackedTree, weights: list[float | None], shared: Any, mask: Any, *, flex: bool) -> Any:
    logits = model(packed.input_ids, packed.position_ids, mask, flex=flex)
    return -(packed.weights(weights, shared) * packed.logprobs_of(logits)).sum()


def gradients(model: Tiny, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def main() -> None:
    torch.manual_seed(0)
    trees = [json.loads(line) for line in sys.stdin]
    # Only the ids that occur: a softmax over a whole vocabulary would take most of the time.
    names: dict[int, int] = {}
    for node in (node for tree in trees for node in tree["nodes"]):
        node["token_ids"] = [names.setdefault(token, len(names)) for token in node["token_ids"]]
    packed = pack(trees, dtype=torch.float64)
    assert packed.rollout_logprobs.dtype == torch.float64
    model = Tiny(len(names)).double()
    weights: list[float | None] = [1.5 - 0.75 * number for number in range(len(packed.leaves))]
    some: list[float | None] = [None if number % 3 == 0 else weight for number, weight in enumerate(weights)]
    found: dict[str, Any] = {"tokens": len(packed.input_ids), "flat": packed.flat_tokens, "saved": packed.saved}
    for given, shared, name in (
        (weights, "once", "once"),
        (weights, "every", "every"),
        (some, "once", "some_once"),
        (some, "every", "some_every"),
    ):
        loss = by_branches(model, packed, given, shared)
        grad = gradients(model, loss)
        tree_loss = by_tree(model, packed, given, shared, packed.dense_mask(), flex=False)
        tree_grad = gradients(model, tree_loss)
        found[f"loss_{name}"] = abs(float(tree_loss - loss)) / abs(float(loss))
        found[f"gradient_{name}"] = float((tree_grad - grad).abs().max() / grad.abs().max())
    try:
        from torch.nn.attention.flex_attention import create_block_mask
    except ImportError:
        pass
    else:
        size = len(packed.input_ids)
        block = create_block_mask(packed.mask_mod(), None, None, size, size, device="cpu", BLOCK_SIZE=16)
        with torch.no_grad():
            dense = by_tree(model, packed, weights, "once", packed.dense_mask(), flex=False)
            flexed = by_tree(model, packed, weights, "once", block, flex=True)
        found["flex"] = abs(float(flexed - dense)) / abs(float(dense))
    # A mask that lets branches see each other must be found out.
    wrong = torch.ones(len(packed.input_ids), len(packed.input_ids), dtype=torch.bool).tril()
    with torch.no_grad():
        loss = by_branches(model, packed, weights, "once")
        found["without_mask"] = abs(float(by_tree(model, packed, weights, "once", wrong, flex=False) - loss)) / abs(
            float(loss)
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
