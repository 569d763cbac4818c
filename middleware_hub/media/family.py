"""Families of models that see: their placeholder, and the rule by which the size of an image tells its number of tokens.

An engine computes with a run of placeholders for each image: one for each square of `factor` pixels, after it has resized the
image. The rule is Qwen's `smart_resize` (transformers, `models/qwen2_vl/image_processing_qwen2_vl.py`; with one more step
`models/glm4v/image_processing_glm4v.py`). Kimi-VL scales an image down to a number of patches, and fills up the last square of
a row and of a column (vLLM 0.32, `model_executor/models/kimi_vl.py`). Here the rule is an estimate: it bounds the context
before a worker has answered.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from middleware_hub.media.errors import MediaInvalidError

_LONGEST: Final = 200
"""How many times as long as the other a side of an image may be: processors refuse more."""

GLM: Final = frozenset({"glm4v", "glm4v_moe"})
"""Families that first scale an image up until each side has `factor` pixels."""
KIMI: Final = "kimi_vl"


class Family(msgspec.Struct, frozen=True):
    """A family of models, with the sizes of one of them.

    Attributes:
        model_type: as `config.json` names it.
        placeholder: the text that stands for an image in a prompt.
        placeholder_id: its token.
        other_ids: the tokens of other media.
        patch: the side of the patches that `max_pixels` is counted in; 1 for pixels.
        factor: the side of the square of pixels that becomes a token.
        min_pixels: a smaller image is scaled up.
        max_pixels: a larger image is scaled down.
        least: the fewest tokens of an image. A shorter run is no image; a placeholder whose image was left out has 1.
        settings: the fingerprint of the settings on which lengths depend.
    """

    model_type: str
    placeholder: str
    placeholder_id: int
    factor: int
    min_pixels: int
    max_pixels: int
    least: int
    settings: str
    other_ids: tuple[int, ...] = ()
    patch: int = 1

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The tokens that stand for media."""
        return self.placeholder_id, *self.other_ids

    def estimate(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of so many pixels, each at least 1.

        Raises:
            MediaInvalidError: its sides are so unequal that the processor of the model refuses it.
        """
        factor = self.factor
        if self.model_type == KIMI:
            patches = (width // self.patch) * (height // self.patch)
            if patches * self.patch**2 > self.max_pixels:
                scale = math.sqrt(self.max_pixels // self.patch**2 / patches)
                width, height = int(width * scale), int(height * scale)
            return math.ceil(width / factor) * math.ceil(height / factor)
        if self.model_type in GLM and min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) / min(width, height) > _LONGEST:
            raise MediaInvalidError(
                f"an image of {width} x {height} pixels cannot be used: one side is more than {_LONGEST} times the other"
            )
        # Rounded as Python rounds, half to even: the rule is written in Python.
        columns, rows = round(width / factor), round(height / factor)
        if columns * rows * factor**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            columns = max(1, math.floor(width / shrink / factor))
            rows = max(1, math.floor(height / shrink / factor))
        elif columns * rows * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            columns, rows = math.ceil(width * grow / factor), math.ceil(height * grow / factor)
        return columns * rows


class UnsupportedFamily(msgspec.Struct, frozen=True):
    """A model that sees, in a way that is not known here.

    Attributes:
        model_type: as `config.json` names it.
        reason: what is missing, for `multimodal_unsupported`.
    """

    model_type: str
    reason: str
