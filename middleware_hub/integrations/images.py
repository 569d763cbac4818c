"""The images of a sequence as trainers take them: opened, run through the trainer's own processor, and counted.

A sequence has expanded ids: a run of placeholders for each image, as long as the engine made it. A trainer's model puts the
features of its own processor there. If that makes another number of tokens of an image, the features of one image would stand
at the tokens of the next: so each image is counted before it is trained on.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from middleware_hub.client.trajectory import Trajectory
from middleware_hub.integrations.response import NOTHING

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

MISSING: Final = "media_missing"
MISMATCH: Final = "media_grid_mismatch"
TRANSPARENT: Final = "media_transparent"
_OF_THE_TEXT: Final = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""What a processor makes of the text: here that is only placeholders, and the trainer has the ids of the sequence."""

_PAINTED: Final = (
    "images with transparent parts: %s. Engines paint these parts white or in the colour that is stored there, and the trainer "
    "gets the latter: send images without transparency"
)


@dataclass(frozen=True)
class Seen:
    """A sequence, and its images.

    Attributes:
        trajectory: the sequence; `NOTHING` in its place if its images cannot be trained on, with `media_missing` or
            `media_grid_mismatch` among its reasons. Its placeholders would have no features, or those of other images.
            With `media_transparent` among them it is the sequence, and the engine may have seen other colours.
        images: in the order of their spans.
        inputs: what the processor makes of them: `pixel_values`, `image_grid_thw`, ... None without images.
        faults: for each image at fault its digest and what is wrong, in words.
    """

    trajectory: Trajectory
    images: Sequence[Image] = ()
    inputs: Mapping[str, Any] | None = None
    faults: tuple[str, ...] = field(default=())


def seen(found: Trajectory, processor: Any, options: Mapping[str, Any] | None = None) -> Seen:
    """Return a sequence that was asked for with `media="inline"`, with its images.

    Args:
        found: the sequence.
        processor: the trainer's, of transformers; None if its model does not see.
        options: further arguments of the processor.

    Raises:
        ValueError: the sequence has images, and the processor takes none.
    """
    shown = found.multi_modal_data.images
    if not shown:
        return Seen(found)
    files = [one.data for one in shown if one.data is not None]
    if len(files) < len(shown):
        lost = [f"image {one.digest}: the router does not hold its file any more" for one in shown if one.data is None]
        return _left_out(found, MISSING, lost)
    opened = [_opened(data) for data in files]
    images = [image for image, _ in opened]
    counts, inputs = processed(processor, images, options)
    wrong = [
        f"image {one.digest} ({one.width} x {one.height}): the engine made {one.tokens} tokens of it, and the trainer's "
        f"processor makes {count}"
        for one, count in zip(shown, counts, strict=True)
        if one.tokens != count
    ]
    if wrong:
        return _left_out(found, MISMATCH, wrong)
    transparent = [one.digest for one, (_, is_transparent) in zip(shown, opened, strict=True) if is_transparent]
    if transparent:
        logger.warning(_PAINTED, ", ".join(transparent))
        found = replace(found, reasons=tuple(dict.fromkeys((*found.reasons, TRANSPARENT))))
    return Seen(found, images, inputs)


async def seen_of(found: Sequence[Trajectory], processor: Any, options: Mapping[str, Any] | None = None) -> list[Seen]:
    """Return `seen` of each sequence. Those with images are made in a thread: a processor takes milliseconds for each."""
    return [
        await asyncio.to_thread(seen, one, processor, options) if one.multi_modal_data.images else Seen(one)
        for one in found
    ]


def processed(
    processor: Any, images: Sequence[Image], options: Mapping[str, Any] | None = None
) -> tuple[list[int], dict[str, Any]]:
    """Return how many tokens a processor makes of each image, and its tensors of all of them.

    Raises ValueError if it is no processor of text with images, as those of transformers are.
    """
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str):
        raise ValueError(
            f"the sequences have images, and the trainer's processor ({type(processor).__name__}) has no `image_token`: "
            "its model must be one that sees, and its folder must have the processor's files"
        )
    number = getattr(processor, "image_token_id", None)
    if number is None:
        number = processor.tokenizer.convert_tokens_to_ids(token)
    # Between two placeholders stands a line break, so that the run of each image can be told.
    text = "\n".join([token] * len(images))
    made = processor(text=[text], images=list(images), **{"return_tensors": "pt", **(options or {})})
    counts = [sum(1 for _ in run) for one, run in groupby(made["input_ids"][0].tolist()) if one == number]
    if len(counts) != len(images):
        raise ValueError(f"the trainer's processor makes {len(counts)} runs of {token} of {len(images)} images")
    return counts, {name: value for name, value in made.items() if name not in _OF_THE_TEXT}


def _left_out(found: Trajectory, reason: str, faults: list[str]) -> Seen:
    for fault in faults:
        logger.error("a sequence is not trained on: %s", fault)
    reasons = (*(one for one in found.reasons if one != reason), reason)
    return Seen(replace(NOTHING, reasons=reasons, details=found.details), faults=tuple(faults))


def _opened(data: bytes) -> tuple[Image, bool]:
    """Return the image of a file in RGB, and whether parts of it are transparent."""
    from PIL import Image

    found = Image.open(io.BytesIO(data))
    is_transparent = found.has_transparency_data and found.convert("RGBA").getchannel("A").getextrema() != (255, 255)
    return found.convert("RGB"), is_transparent
