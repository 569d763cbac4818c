"""A processor of images for tests of the trainers: as those of transformers, for the embedded worker's tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from tests.support.pictures import digest, picture
from tests.trainers import trainers
from worker.engine.prompt_images import length_of

PAD = "<|image_pad|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
CAT, DOG, SUN = (picture(56 + 28 * seed, 56, seed) for seed in range(3))
"""Their sides are multiples of 28 pixels, so that nobody scales them."""


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


class Eyes:
    """It makes as many tokens of a picture as the embedded worker, which decides by the file: it knows the files of the tests.

    The features of a picture are rows of its number in `pictures`, one for each token.

    Args:
        folder: the tokenizer's.
        pictures: the files.
        more: tokens more than the worker, by picture: then the two have other settings.
    """

    image_token = PAD
    tokenizer: Any = None

    def __init__(self, folder: Path, *pictures: bytes, more: dict[bytes, int] | None = None) -> None:
        self._backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.image_token_id = self._backend.token_to_id(PAD)
        self.calls = 0
        self._known = {
            opened(one).tobytes(): (number, length_of(digest(one)) + (more or {}).get(one, 0))
            for number, one in enumerate(pictures)
        }

    def __call__(self, text: Any, images: Sequence[Image.Image] | None = None, **_options: Any) -> Any:
        self.calls += 1
        seen = [self._known[one.tobytes()] for one in images or ()]
        ids = self._backend.encode(text if isinstance(text, str) else text[0], add_special_tokens=False).ids
        left = iter(seen)
        expanded = [one for number in ids for one in [number] * (next(left)[1] if number == self.image_token_id else 1)]
        made: dict[str, Any] = {
            "input_ids": np.array([expanded]),
            "attention_mask": np.ones((1, len(expanded)), int),
            "mm_token_type_ids": np.zeros((1, len(expanded)), int),
        }
        if seen:
            made["pixel_values"] = np.concatenate([np.full((length, 2), float(number)) for number, length in seen])
            made["image_grid_thw"] = np.array([[1, 2, 2 * length] for _, length in seen])
        if not trainers.REAL:
            return made
        import torch
        from transformers import BatchFeature

        return BatchFeature({name: torch.from_numpy(value) for name, value in made.items()})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def apply_chat_template(self, messages: Any, **_options: Any) -> str:
        return template(messages)


def template(messages: Any) -> str:
    """Messages as text, with a placeholder for each image."""
    text = ""
    for one in messages:
        parts = [{"type": "text", "text": one["content"]}] if isinstance(one["content"], str) else one["content"]
        text += f"{one['role']}: {''.join(IMAGE if part['type'] == 'image' else part['text'] for part in parts)}\n"
    return f"{text}assistant: "


def features(inputs: Any, *numbers: int, lengths: Sequence[int]) -> bool:
    """Whether these are the features of these pictures, in this order."""
    wanted = np.concatenate([np.full((length, 2), float(one)) for one, length in zip(numbers, lengths, strict=True)])
    return bool(np.array_equal(np.asarray(inputs["pixel_values"]), wanted))
