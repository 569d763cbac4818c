"""Make a tiny random vision-language model in DIR: Qwen's vocabulary, chat template and image processor, random weights.

Usage: PYTHONPATH=ROOT python make_vlm.py FAMILY DIR, with an engine's Python, which has torch; ROOT is the checkout's.
FAMILY: qwen2_5_vl or qwen3_vl.

What counts images' tokens is as published: sizes of patches, merging, the least and most pixels. Layers and heads are few.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.support import templates
from tests.support.vocabularies import vocabulary

HIDDEN = 128
TEXT = {
    "vocab_size": 151_936,  # more than the tokenizer has, as published
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 1,
    "out_hidden_size": HIDDEN,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "merge_size": 2,
    "temporal_patch_size": 2,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
}


def qwen2_5_vl():
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    windows = {"window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**VISION, "patch_size": 14, **windows},
        tie_word_embeddings=False,
    )
    images = {
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16_384 * 28 * 28},  # pixels, whatever their names say
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return Qwen2_5_VLForConditionalGeneration(config), images, {"video_processor_type": "Qwen2VLVideoProcessor"}


def qwen3_vl():
    rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True, "rope_theta": 5e6}
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 64, "rope_parameters": rope},
        vision_config={**VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    )
    images = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2, "min_frames": 4, "max_frames": 768}
    videos["size"] = {"shortest_edge": 4_096, "longest_edge": 25_165_824}
    return Qwen3VLForConditionalGeneration(config), images, videos


FAMILIES = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}


def main(family, out):
    tokenizer = AutoTokenizer.from_pretrained(str(vocabulary("qwen-vl-whole")))
    tokenizer.chat_template = templates.source(family)
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])

    torch.manual_seed(0)
    model, images, videos = FAMILIES[family]()
    model = model.float()
    with torch.no_grad():
        model.lm_head.weight.normal_(
            0, 0.5
        )  # else all tokens are equally likely, and greedy replies a matter of rounding
    for config in (model.config.text_config, model.generation_config):
        config.eos_token_id, config.bos_token_id, config.pad_token_id = end, pad, pad
    model.generation_config.eos_token_id = [end, pad]
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        field = f"{name.removesuffix('_pad')}_token_id"
        setattr(model.config, field, tokenizer.convert_tokens_to_ids(f"<|{name}|>"))

    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    folder = Path(out)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES | images, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(IMAGES | images | videos, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
