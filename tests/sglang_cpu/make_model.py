"""Make a tiny random Qwen3 (2 layers, hidden 64) with a byte-level BPE tokenizer of its own in DIR.

The tokenizer is trained on the standard library's sources and has Qwen's special tokens and a
plain ChatML template. Usage: make_model.py DIR [HEAD_DIM [EXPERTS]]: with experts, a Qwen3-MoE that asks two of them for
each token.
"""

import pathlib
import sys
import sysconfig

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPLIT = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
OTHER = [
    "你好，世界。今天天气很好。",
    "émigré café — “quotes” …",
    "😀😃🚀🔥 emoji",
    "Привет, мир!",
    "こんにちは世界",
] * 30


def corpus():
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]:
        yield path.read_text(errors="ignore")
    yield from OTHER


def main(out, head_dim=16, experts=0):
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=4000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    bpe.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    bpe.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    sparse = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if experts else {}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        **sparse,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=pad,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(config).float()
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.5)
    model.generation_config.eos_token_id = [eos, pad]
    model.generation_config.pad_token_id = pad
    model.save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
