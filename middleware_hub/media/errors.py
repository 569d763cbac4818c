"""The errors of requests with images. Each class is one word, which clients find as `error.code` in every dialect."""

from __future__ import annotations

from typing import ClassVar

from router.errors import BadRequestError


class MediaError(BadRequestError):
    """A request with images is refused before a worker sees it.

    Attributes:
        code: the word of this class.
    """

    code: ClassVar[str]

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """`param` is the field that is at fault, if the caller knows it."""
        super().__init__(message, code=self.code)
        if param is not None:
            self.details["param"] = param


class MediaCountError(MediaError):
    """There are more, or fewer, placeholders than images."""

    code = "media_count"


class MediaInvalidError(MediaError):
    """An image is no base64, no image, too large, or has a size that no model takes."""

    code = "media_invalid"


class MediaUrlError(MediaError):
    """An image is named by an address or a path, which tells nothing about its bytes."""

    code = "media_url"


class MediaUnknownError(MediaError):
    """No image of this digest is held for this tenant."""

    code = "media_unknown"


class MediaExpandedError(MediaError):
    """The ids of a client hold a longer run of placeholders than there are images."""

    code = "media_expanded"


class MediaFieldError(MediaError):
    """A request has a field about images that only the router may write."""

    code = "media_field"


class PlaceholderInTextError(MediaError):
    """A text spells the placeholder of an image."""

    code = "placeholder_in_text"


class PlaceholderSampledError(MediaError):
    """The model sampled a placeholder, and the conversation cannot go on behind it."""

    code = "placeholder_sampled"


class MultimodalUnsupportedError(MediaError):
    """The model, the engine or the route takes no such media."""

    code = "multimodal_unsupported"


class ReservedCharacterError(MediaError):
    """A text holds a character that stands for an image here."""

    code = "reserved_character"


class MediaMissingError(MediaError):
    """The bytes of an image are needed, and no longer held."""

    code = "media_missing"
