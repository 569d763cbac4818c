"""The files of a model that say how it sees: `config.json`, and the settings of its image processor.

The settings stand in `processor_config.json` under `image_processor` (transformers 5 writes them there), else in
`preprocessor_config.json`: the order in which transformers looks for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_hexdigest

from middleware_hub.media.family import GLM, KIMI, Family, UnsupportedFamily
from router.errors import BadRequestError

_QWEN: Final = "<|image_pad|>"
PLACEHOLDERS: Final = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(GLM, "<|image|>"),
    KIMI: "<|media_pad|>",
    "tito_demo_vl": _QWEN,  # of the embedded worker
}
"""The checked families, with the text of their placeholder. Engines keep all other ids of their prompts as they were sent."""

SIGHT: Final = (
    "Images are read if --tokenizer-path is the folder, or the hub id, of a model that sees, with its config.json and the"
    " settings of its image processor, and of a family that is known here (docs/http-api/images.md)"
)
"""What to do about a router that reads no images."""

_SEES: Final = frozenset(
    "vision_config image_token_id image_token_index media_placeholder_token_id vision_tower mm_vision_tower img_processor"
    " visual vision_feature_layer thinker_config".split()
)
"""Fields of the `config.json` of a model that takes images."""

_LEAST: Final = 2, 4
"""The fewest tokens of an image, as far as the settings allow so many."""


def load_family(path: str) -> Family | UnsupportedFamily | None:
    """Return the family of the model in a folder, or of a hub id; None for a model that takes only text.

    Raises:
        BadRequestError: a file is no JSON object, or cannot be read.
    """
    config = _read(path, "config.json")
    if config is None or not _SEES & config.keys():
        return None
    model_type = str(config.get("model_type"))
    if model_type not in PLACEHOLDERS:
        return UnsupportedFamily(model_type, f"engines are not known to keep the ids of {model_type} with images")
    nested = _read(path, "processor_config.json") or {}
    images = nested.get("image_processor") or _read(path, "preprocessor_config.json") or {}
    try:
        return (_kimi if model_type == KIMI else _family)(model_type, config, images)
    except (msgspec.ValidationError, ValueError) as error:
        return UnsupportedFamily(model_type, f"the files of this {model_type} do not say how it sees: {error}")


class _Size(msgspec.Struct):
    shortest_edge: int | None = None
    longest_edge: int | None = None


class _Config(msgspec.Struct):
    """Of `config.json`."""

    image_token_id: int
    video_token_id: int | None = None


class _Images(msgspec.Struct):
    """The settings of an image processor. `min_pixels` and `max_pixels` are older names of the sizes, and win."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int = 2
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: _Size | None = None


def _family(model_type: str, config: dict[str, Any], images: dict[str, Any]) -> Family:
    """Return a checked family. Raises ValueError, or msgspec.ValidationError, if a number is missing, or is none."""
    ids = msgspec.convert(config, _Config)
    found = msgspec.convert(images, _Images)
    size = found.size or _Size()
    least_pixels = size.shortest_edge if found.min_pixels is None else found.min_pixels
    most_pixels = size.longest_edge if found.max_pixels is None else found.max_pixels
    factor = found.patch_size * found.merge_size
    if least_pixels is None or most_pixels is None:
        raise ValueError("the least and the most pixels of an image are missing")
    if factor < 1 or found.temporal_patch_size < 1 or not 0 < least_pixels <= most_pixels:
        raise ValueError("the sizes of its image processor are none")
    if model_type in GLM:  # it counts the pixels of an image once for each frame that it repeats it for
        least_pixels, most_pixels = (pixels // found.temporal_patch_size for pixels in (least_pixels, most_pixels))
    return Family(
        model_type=model_type,
        placeholder=PLACEHOLDERS[model_type],
        placeholder_id=ids.image_token_id,
        other_ids=() if ids.video_token_id is None else (ids.video_token_id,),
        factor=factor,
        min_pixels=least_pixels,
        max_pixels=most_pixels,
        least=max(_LEAST[0], min(_LEAST[1], least_pixels // factor**2)),
        settings=_settings(model_type, config, images),
    )


class _KimiConfig(msgspec.Struct):
    media_placeholder_token_id: int


class _KimiImages(msgspec.Struct):
    patch_size: int
    merge_kernel_size: tuple[int, int]
    in_token_limit: int


def _kimi(model_type: str, config: dict[str, Any], images: dict[str, Any]) -> Family:
    """Do the same as `_family` for Kimi-VL, whose files have names of their own."""
    found = msgspec.convert(images, _KimiImages)
    if (
        min(found.patch_size, *found.merge_kernel_size, found.in_token_limit) < 1
        or len(set(found.merge_kernel_size)) > 1
    ):
        raise ValueError("the sizes of its image processor are none")
    return Family(
        model_type=model_type,
        placeholder=PLACEHOLDERS[model_type],
        placeholder_id=msgspec.convert(config, _KimiConfig).media_placeholder_token_id,
        factor=found.patch_size * found.merge_kernel_size[0],
        min_pixels=1,
        max_pixels=found.in_token_limit * found.patch_size**2,
        least=_LEAST[0],
        settings=_settings(model_type, config, images),
        patch=found.patch_size,
    )


def _settings(model_type: str, config: dict[str, Any], images: dict[str, Any]) -> str:
    """Return the fingerprint of what lengths depend on. `config.json` has other fields, which change with each save."""
    return xxh3_64_hexdigest(msgspec.json.encode([model_type, config.get("vision_config"), images], order="sorted"))


def _read(path: str, name: str) -> dict[str, Any] | None:
    """Return a file as JSON; None if there is none. Raises BadRequestError."""
    try:
        file = Path(path, name) if Path(path).is_dir() else _of_hub(path, name)
        content = None if file is None else file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRequestError(f"--tokenizer-path {path}: {name} cannot be read: {error.strerror or error}") from error
    if content is None:
        return None
    try:
        found: dict[str, Any] = msgspec.json.decode(content, type=dict)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"--tokenizer-path {path}: {name} is no JSON object: {error}") from error
    return found


def _of_hub(repository: str, name: str) -> Path | None:
    """Return a file of a hub id, which transformers has loaded the tokenizer from; None if it has no such file."""
    from huggingface_hub import hf_hub_download  # half a second: only for a hub id
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        return Path(hf_hub_download(repository, name))
    except (EntryNotFoundError, HFValidationError):
        return None  # without a network it may be there, but was not asked for before
