"""The fields about media that only the router writes: where a client writes one, its request is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from middleware_hub.media.errors import MediaFieldError, MediaInvalidError

FIELDS: Final = frozenset(
    # SGLang 0.5.23: `GenerateReqInput`, chats, encoders
    "mm_hashes mm_content_hashes mm_processor_kwargs images_config video_config use_audio_in_video max_dynamic_patch "
    "min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch need_wait_for_mm_inputs num_items_assigned "
    "encoder_urls embedding_ports positional_embed_overrides "
    # vLLM 0.32.0
    "uuid features content_parts multi_modal_data multi_modal_uuids media_io_kwargs "
    "pixel_values image_embeds video_embeds audio_embeds precomputed_features".split()
)
"""Of the top level of a request."""
OF_GENERATE: Final = FIELDS | {"modalities"}
"""Of a `/generate`. In a chat, `modalities` are those of its reply."""
OF_PARTS: Final = FIELDS | {"max_pixels", "min_pixels"}
"""Of a part that is a picture. With another number of pixels it would have another length."""


def check_part(part: Mapping[str, Any]) -> None:
    """Refuse a picture's part with a field of the router's, or an unreadable `detail`, in it or in what names the picture.

    Raises MediaFieldError, MediaInvalidError.
    """
    for place in (part, part.get("image_url"), part.get("source")):
        if not isinstance(place, Mapping):
            continue
        for name in sorted(OF_PARTS & place.keys()):
            raise MediaFieldError(f"`{name}` is built by the router: leave it out")
        if not isinstance(place.get("detail"), str | None):
            raise MediaInvalidError("`detail` must be a string")
