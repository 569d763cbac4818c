"""Make a tiny random Gemma 3 in DIR, with the tokenizer of the model in FROM: half of its layers see a window of 64 tokens.

Usage: make_hybrid.py FROM DIR
"""

import sys

import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

WINDOW = 64


def main(source: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(out)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # vLLM's attention on CPUs has no kernel for heads of 16
        query_pre_attn_scalar=64,
        max_position_embeddings=4096,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=pad,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).float().save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
