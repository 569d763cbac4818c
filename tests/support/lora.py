"""Random adapters in PEFT's format, for the tiny models of the real engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter of a model's attention into a new folder. It is large enough to change what is sampled at once."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, shared = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = dict(zip(MODULES, ((hidden, heads), (hidden, shared), (hidden, shared), (heads, hidden)), strict=True))
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (before, behind) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for matrix, shape in (("lora_A", (RANK, before)), ("lora_B", (behind, RANK))):
                tensors[f"{name}.{matrix}.weight"] = draw.standard_normal(shape, dtype=np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none", "target_modules": MODULES}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
