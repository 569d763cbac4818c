"""Pictures in answers: `multi_modal_data`, and texts as a client wrote them, with placeholders in place of marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from middleware_hub.media.media import Media
from middleware_hub.media.picture import Picture
from middleware_hub.spans.chain import MEDIA_MISSING
from middleware_hub.spans.media import CLOSE, OPEN, MediaSpan, plain_length, plain_text
from router.errors import BadRequestError

_PART_OF_MARK = re.compile(f"{OPEN}[^{CLOSE}]*{CLOSE}?|^[^{OPEN}]*{CLOSE}")

Placed = tuple[MediaSpan, int | None, int | None]
"""A media span, with the message and the part of the picture; None where there are no messages."""


def asks_inline(media: str | None) -> bool:
    """Return whether the option `media` of an export asks for bytes; None is the default. Raises BadRequestError."""
    if media not in (None, "", "ref", "inline"):
        raise BadRequestError(f"`media` must be `ref` or `inline`, not {media!r}")
    return media == "inline"


class Viewer(NamedTuple):
    """Shows the pictures of sequences in answers, to one tenant.

    Attributes:
        inline: whether with their bytes.
        held: pictures that were brought for it, and must not go before it has shown them.
    """

    media: Media
    tenant: str
    inline: bool = False
    held: Sequence[Picture] = ()

    @classmethod
    async def look(cls, media: Media, tenant: str, digests: Iterable[str], *, inline: bool) -> Viewer:
        """Return what shows these pictures, after they, or what is known of them, were brought."""
        if inline:
            return cls(media, tenant, True, (await media.stock.bring(tenant, digests)).pictures)
        await media.stock.ask(tenant, [one for one in digests if media.shelf.find(tenant, one) is None])
        return cls(media, tenant)

    def plain(self, keyed: str) -> str:
        """Return a keyed text as the client wrote it."""
        return plain_text(keyed, self.media.family.placeholder)

    def plain_length(self, keyed: str, end: int) -> int:
        return plain_length(keyed, self.media.family.placeholder, end)

    def explained(self, keyed: str, told: dict[str, Any], *, other_image: bool) -> dict[str, Any]:
        """Return where a keyed text leaves the tree, as `Departure.explained` tells it, in the client's own text."""
        place = self.plain_length(keyed, told["matched_chars"])
        message = told["message"].replace(f"character {told['matched_chars']}", f"character {place}")
        if other_image:
            message = f"at character {place} the text has another image than the one that is recorded"
        beside = {
            name: {side: self._excerpt(part) for side, part in told[name].items()} for name in ("text", "recorded")
        }
        others = [self._excerpt(part) for part in told["other_recorded"]]
        length = len(self.plain(keyed))
        return {
            **told,
            **beside,
            "message": message.replace(repr(OPEN), "an image"),
            "matched_chars": place,
            "text_length": length,
            "other_recorded": others,
        }

    def _excerpt(self, part: str) -> str:
        """Return a piece of a keyed text, which may begin or end inside of a mark, with placeholders."""
        return _PART_OF_MARK.sub(self.media.family.placeholder, part)

    def shown(self, placed: Iterable[Placed]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the pictures of a sequence as answers show them, and the reasons why they are not as they should be.

        `bytes` is the file itself, which `images_json` writes in base64.
        """
        found, reasons = list[dict[str, Any]](), dict[str, None]()
        for (start, length, digest), message, part in placed:
            picture = self.media.shelf.find(self.tenant, digest)
            about = self.media.stock.about(self.tenant, digest)
            entry: dict[str, Any] = {"digest": digest, "mime": None, "width": None, "height": None}
            if about is not None:
                entry |= {"mime": about.mime, "width": about.width, "height": about.height}
                if not about.upright:
                    reasons["media_orientation"] = None
            entry |= {"span": [start, start + length], "message": message, "part": part, "bytes": None}
            if self.inline:
                if picture is None:
                    reasons[MEDIA_MISSING] = None
                else:
                    entry["bytes"] = picture.data
            found.append(entry)
        return found, list(reasons)
