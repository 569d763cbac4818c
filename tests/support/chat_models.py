"""Tokenizer folders for published chat templates: a small vocabulary with the special tokens that a template writes.

A model's own vocabulary comes with gigabytes, or not at all. What matters to a template is which of its markers are one token,
and which of those are special; that is what is added here, with the names that the models themselves have.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.support import templates
from tests.support.vocabularies import cache_folder
from worker.models.ngram import shipped_tokenizer

_FORMAT = 2  # raise it when what is built changes: the cache is keyed by it


@dataclass(frozen=True)
class Markers:
    """The added tokens of a model: `eos` and `special` vanish from texts, `plain` ones do not."""

    eos: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    bos: str | None = None


MODELS: dict[str, Markers] = {
    "qwen2_5": Markers("<|im_end|>"),
    "qwen3": Markers("<|im_end|>"),
    "qwen3_5_think": Markers("<|im_end|>"),
    "llama3_1": Markers(
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>"),
        bos="<|begin_of_text|>",
    ),
    "glm4moe": Markers(
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
    ),
    "deepseekv3": Markers(
        "<｜end▁of▁sentence｜>",
        (),
        (
            *(
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
            ),
            *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gptoss": Markers(
        "<|return|>", ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>")
    ),
    "gemma4": Markers(
        "<turn|>",
        (
            "<|turn>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            "<|channel>",
            "<channel|>",
            '<|"|>',
        ),
        bos="<bos>",
    ),
}

_MISTRAL = Markers(
    "</s>",
    (
        *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
    ),
    bos="<s>",
)
FAMILIES: dict[str, Markers] = {
    "kimi_k2": Markers(
        "<|im_end|>",
        (
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
            *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        ("<think>", "</think>"),
    ),
    "minimax_m2": Markers(
        "[e~[",
        ("]~!b[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>"),
        ("<think>", "</think>"),
    ),
    "mistral": _MISTRAL,
    "mistral_list": _MISTRAL,
    "deepseek_v32": Markers(
        "<｜end▁of▁sentence｜>",
        ("｜DSML｜",),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        bos="<｜begin▁of▁sentence｜>",
    ),
    "lfm2_v2": Markers(
        "<|im_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
        ("<|tool_list_start|>", "<|tool_list_end|>"),
        bos="<|startoftext|>",
    ),
    "seed_oss": Markers(
        "<seed:eos>",
        ("<seed:bos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
}
"""Those of the templates in `family_templates`, and of LFM2's own. Where it is not known whether a tag is special, it is."""


def markers_of(name: str) -> Markers:
    """The added tokens of a model; those of the templates that read are ChatML's."""
    return MODELS.get(name) or FAMILIES.get(name) or MODELS["qwen2_5"]


def chat_model(name: str) -> Path:
    """A tokenizer folder with this template: built if it is not there."""
    target = cache_folder() / "chat-models" / f"{name}-{_FORMAT}"
    if not (target / "tokenizer_config.json").is_file():
        _build(name, target)
    return target


def _build(name: str, target: Path) -> None:
    """Into a folder of our own, which is renamed: of several processes at once, the first one wins."""
    markers, base = markers_of(name), shipped_tokenizer()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
    try:
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        special = [marker for marker in (markers.bos, markers.eos, *markers.special) if marker]
        tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in special])
        tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers.plain])
        tokenizer.save(str(made / "tokenizer.json"))
        config = json.loads((base / "tokenizer_config.json").read_text())
        config |= {"eos_token": markers.eos, "chat_template": templates.source(name)}
        if markers.bos:
            config["bos_token"] = markers.bos
        (made / "tokenizer_config.json").write_text(json.dumps(config))
        try:
            os.rename(made, target)
        except OSError:
            if not (target / "tokenizer_config.json").is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
