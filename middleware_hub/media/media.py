"""From the pictures of a request to a keyed text, and to the fields of a worker: what text and messages share of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw

from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.media.errors import (
    MediaCountError,
    MediaError,
    MediaExpandedError,
    MediaFieldError,
    MediaInvalidError,
    MediaMissingError,
    MediaUnknownError,
    MultimodalUnsupportedError,
    PlaceholderInTextError,
    PlaceholderSampledError,
    ReservedCharacterError,
)
from middleware_hub.media.family import Family
from middleware_hub.media.fields import OF_GENERATE
from middleware_hub.media.part import ImagePart, image_parts
from middleware_hub.media.picture import Picture, is_digest, read_picture
from middleware_hub.media.stock import Brought, Stock
from middleware_hub.spans.chain import unpack_ids
from middleware_hub.spans.media import (
    UNKNOWN,
    MediaSpan,
    Pictures,
    collapsed,
    is_reserved,
    keyed_text,
    without_runs,
)
from middleware_hub.store.errors import StoreUnreachableError
from router.engines.engine import Engine
from router.engines.form import media as fields_of_media
from router.engines.form.reply import PLACES
from router.engines.sglang.engine import SGLANG

MEDIA_MISMATCH = "media_mismatch"
"""The reason if an engine computed with other ids than it was sent, with a run for each picture."""
MEDIA_ESTIMATED = "media_estimated"
"""The reason if no engine has told the length of a picture: it is the family's rule for its size."""
PROMPT_IDS = "prompt_token_ids"
"""The field of a reply with the ids that an engine computed with."""
ABOUT_PROMPT = (PROMPT_IDS, PLACES)
"""The fields of a reply that come with these ids."""
BAN = -100.0
"""The least bias that engines take."""
OURS = "return_prompt_token_ids"
"""Switched on while a length is unknown, and for every reply in one piece."""


class Shown(NamedTuple):
    """The pictures of one prompt: each as a worker gets it, in the order of the placeholders.

    Attributes:
        pictures: the files.
        runs: how many placeholders the client gave for each, where it gave expanded ids.
    """

    pictures: tuple[Picture, ...]
    runs: Sequence[int] = ()

    @property
    def digests(self) -> list[str]:
        return [one.digest for one in self.pictures]

    @property
    def size(self) -> int:
        """The bytes of the files."""
        return sum(len(one.data) for one in self.pictures)

    @property
    def reasons(self) -> tuple[str, ...]:
        """`media_orientation` if one of them is not stored upright: engines disagree on whether to turn it."""
        return () if all(one.upright for one in self.pictures) else ("media_orientation",)


class Media:
    """What the hub knows of pictures: the model's family, their bytes, and the lengths that engines made of them.

    Args:
        family: of the model behind the workers.
        stock: the pictures that clients have sent, and how many ids an engine makes of each.
        max_image_bytes: of one picture's file.
        max_request_bytes: of the files of one request.
        ban_placeholders: whether the model is kept from sampling placeholders.

    Attributes:
        engine: returns the engine that the workers run.
        spell: returns the text of ids.
        bias: what is added to `logit_bias` of each request: `--ban-placeholders`.
        decoding: whether a worker makes a text of the ids of a prompt with pictures, in which it looks for the placeholders.
    """

    def __init__(
        self,
        family: Family,
        stock: Stock,
        *,
        max_image_bytes: int,
        max_request_bytes: int,
        ban_placeholders: bool = False,
    ) -> None:
        self.family = family
        self.stock = stock
        self.shelf = stock.shelf
        self._max_image = max_image_bytes
        self._max_request = max_request_bytes
        self.engine: Callable[[], Engine] = lambda: SGLANG
        self.spell: Callable[[Sequence[int]], str] = lambda _: ""
        self.decoding = False
        self.bias = {str(number): BAN for number in family.placeholder_ids} if ban_placeholders else {}

    def check_fields(self, fields: Mapping[str, Raw]) -> None:
        """Refuse the fields of media that the router builds by itself, or cannot record. Raises BadRequestError."""
        for name in sorted(OF_GENERATE & fields.keys()):
            if fields_of_media.asks(fields, name) and bytes(fields[name]) != b"false":
                raise MediaFieldError(f"`{name}` is built by the router from the images: leave it out", param=name)
        for name in fields_of_media.OTHERS:
            if fields_of_media.asks(fields, name):
                raise MultimodalUnsupportedError(f"`{name}`: of media only images are supported here")

    def shown(
        self, tenant: str, given: Sequence[str], pictures: Mapping[str, Picture], unasked: Collection[str] = ()
    ) -> Shown:
        """Return the pictures that a request gave for one prompt, and keep their bytes.

        Args:
            tenant: of the request.
            given: digests, and files that were left in the body.
            pictures: those that came with the request, by digest.
            unasked: see `Brought`.

        Raises BadRequestError, and StoreUnreachableError for a picture that the store may have.
        """
        digests, found = self.named(tenant, given, pictures, unasked)
        here = {one.digest: one for one in found}
        for digest in digests:
            if digest not in here:
                raise self._absent(tenant, digest, unasked)
        return Shown(tuple([here[digest] for digest in digests]))

    def named(
        self, tenant: str, given: Sequence[str], pictures: Mapping[str, Picture], unasked: Collection[str] = ()
    ) -> tuple[list[str], list[Picture]]:
        """Return the digests of the pictures that a request gave, and those pictures whose bytes are here, which are kept.

        For what needs no bytes: a picture that the tenant has sent may be gone. Arguments and errors are those of `shown`.
        """
        digests, found = list[str](), list[Picture]()
        for one in given:
            if not is_digest(one):  # a short one, which was left in the body
                found.append(self.shelf.put(tenant, read_picture(one, self._max_image)))
                digests.append(found[-1].digest)
                continue
            digests.append(one)
            if (sent := pictures.get(one)) is not None:
                found.append(self.shelf.put(tenant, sent))
            elif (known := self.shelf.find(tenant, one)) is not None:
                found.append(known)
            elif not self.shelf.gone(tenant, one):
                raise self._absent(tenant, one, unasked)
        self._check_size(found)
        return digests, found

    def _absent(
        self,
        tenant: str,
        digest: str,
        unasked: Collection[str] = (),
        place: str | None = None,
        *,
        sent: bool = False,
    ) -> MediaError | StoreUnreachableError:
        """Return the error for a picture whose bytes are not here. `sent`: the tenant has sent it, whatever the shelf knows."""
        if sent or self.shelf.gone(tenant, digest):
            return MediaMissingError(
                f"the bytes of the image {digest} are not here any more: send them again", param=place
            )
        if digest in unasked:
            return StoreUnreachableError(
                f"the store does not answer, and may have the image {digest}: try again, or send its bytes"
            )
        return MediaUnknownError(f"no image {digest} is known here: send its bytes", param=place)

    async def bring(self, tenant: str, named: Iterable[str], sent: Container[str]) -> Brought:
        """Bring the pictures that a request names without having sent them, and what is known of the lengths of all.

        What is no digest is passed over.
        """
        digests = [one for one in dict.fromkeys(named) if is_digest(one)]
        found = await self.stock.bring(tenant, [one for one in digests if one not in sent])
        lengths = self.stock.lengths[tenant]
        unknown = [one for one in digests if lengths.get(self.family.settings, one) is None]
        if unknown:
            await self.stock.ask(tenant, unknown)
        return found

    def _check_size(self, pictures: Iterable[Picture]) -> None:
        if sum(len(one.data) for one in pictures) > self._max_request:
            raise MediaInvalidError(
                f"the images of this request have more than {self._max_request} bytes (--media-max-request-bytes)"
            )

    def key(self, text: str, digests: Sequence[str]) -> str:
        """Return the keyed text of a text with placeholders, one for each picture. Raises BadRequestError."""
        self.check_text(text)
        count = text.count(self.family.placeholder)
        if count != len(digests):
            raise self._miscounted("text", count, digests)
        return keyed_text(text, self.family.placeholder, digests) if digests else text

    def _miscounted(self, what: str, count: int, digests: Sequence[str]) -> MediaCountError:
        return MediaCountError(
            f"placeholders ({self.family.placeholder}) in the {what}: {count}, images in `image_data`: {len(digests)}. Put "
            "one placeholder where each image stands, and send all images of the conversation, in order"
        )

    def has_run(self, ids: Sequence[int]) -> bool:
        """Return whether the ids have a run of placeholders that is long enough for a picture."""
        wanted, least = self.family.placeholder_id, self.family.least
        return ids.count(wanted) >= least and _longest_run(ids, wanted) >= least

    def check_ids(self, ids: Sequence[int], digests: Sequence[str] | None) -> None:
        """Refuse compact ids with another number of placeholders than pictures. Raises BadRequestError.

        Without pictures (None) a placeholder is one that the model sampled, as long as its run is too short for a picture.
        """
        count = ids.count(self.family.placeholder_id)
        if digests is None:
            if not self.has_run(ids):
                return
            digests = ()
        if count > len(digests) and _longest_run(ids, self.family.placeholder_id) > 1:
            raise MediaExpandedError(
                f"`input_ids` have a run of {self.family.placeholder}, longer than their images: give one id an image, or "
                "say `x-radix-media: expanded`"
            )
        if count != len(digests):
            raise self._miscounted("ids", count, digests)

    def collapsed(self, ids: Sequence[int], shown: Shown, lengths: Mapping[str, int]) -> tuple[list[int], Shown]:
        """Return the compact ids of a client's expanded ones, and the pictures with their runs, for `check_runs`."""
        compact, runs = without_runs(ids, self.family.placeholder_id, shown.digests, lengths)
        for run, digest in zip(runs, shown.digests, strict=False):
            if run not in (1, lengths.get(digest, run)):
                raise MediaExpandedError(
                    f"`input_ids` have {run} ids for the image {digest}, and it has {lengths[digest]}"
                )
        return compact, shown._replace(runs=runs)

    def check_runs(self, shown: Shown, media: Sequence[MediaSpan], unknown: Container[str]) -> None:
        """Refuse expanded ids with a run of another length than an engine has told, now that the recorded chain tells more.

        Args:
            shown: the pictures. One with a run of one id was given in its compact form.
            media: their media spans in the prompt.
            unknown: the digests of those whose length no engine has told.

        Raises MediaExpandedError.
        """
        for run, picture, one in zip(shown.runs, shown.pictures, media, strict=bool(shown.runs)):
            if run == 1 or (run == one.length and one.digest not in unknown):
                continue
            told = f"it has {one.length}"
            if one.digest in unknown:
                estimate = self.family.estimate(picture.width, picture.height)
                told = f"no worker has told yet how many it has ({estimate} by its size): give one id, once"
            raise MediaExpandedError(f"`input_ids` have {run} ids for the image {one.digest}, and {told}")

    @staticmethod
    def check_text(text: str) -> None:
        """Refuse a text with a character that stands for pictures in keys. Raises ReservedCharacterError."""
        if is_reserved(text):
            raise ReservedCharacterError("the text has U+FDD0 or U+FDD1, which stand for images here")

    def lengths(self, tenant: str, digests: Iterable[str]) -> dict[str, int]:
        """Return the lengths of pictures, as far as engines have told them for this tenant."""
        told = self.stock.lengths[tenant]
        found = {digest: told.get(self.family.settings, digest) for digest in digests}
        return {digest: length for digest, length in found.items() if length is not None}

    def pictures(self, tenant: str, digests: Sequence[str]) -> Pictures:
        """Return what a prompt needs to know of its pictures."""
        return Pictures(self.family.placeholder, digests, self.lengths(tenant, digests))

    def check_prompt(self, packed: bytes, media: Sequence[MediaSpan]) -> None:
        """Refuse a prompt with pictures in which its engine would take something else for one.

        Raises PlaceholderSampledError, and PlaceholderInTextError.
        """
        ids = np.frombuffer(packed, dtype=np.int32)
        if self.engine().keeps_strays:
            ids = ids[: media[-1].start + media[-1].length if media else 0]
        if np.count_nonzero(ids == self.family.placeholder_id) != sum(one.length for one in media):
            raise PlaceholderSampledError(
                f"the model has sampled {self.family.placeholder} in this conversation: an engine would take it for an image"
            )

        if self.decoding:
            text = self.spell(unpack_ids(collapsed(packed, media)))
            if text.count(self.family.placeholder) != len(media):
                raise PlaceholderInTextError(
                    f"the conversation spells {self.family.placeholder}, which a worker without --mm-preprocess-cache-size-mb"
                    " takes for an image"
                )
            self.check_words((text,))

    def check_words(self, texts: Iterable[str]) -> None:
        """Refuse texts beside pictures with what the engine takes for one. Raises PlaceholderInTextError."""
        for word in self.engine().image_words:
            if any(word in text for text in texts):
                raise PlaceholderInTextError(f"a text spells {word}, which a worker takes for an image: leave it out")

    def asks_ids(self, *, unknown: bool, stream: bool) -> bool:
        """Return whether to ask a worker what ids it computes with: always, unless each event of a stream would tell them."""
        return unknown or not stream or self.engine().tells_ids_once

    def worker_fields(self, tenant: str, shown: Sequence[Shown], *, batch: bool, asks_ids: bool) -> dict[str, Raw]:
        """Return the fields by which a worker gets the pictures. The caller holds these until its reply is there."""
        found = dict(self.engine().image_fields(tenant, [each.pictures for each in shown], batch=batch))
        if asks_ids:
            found[OURS] = Raw(b"true")
        return found

    def chat_fields(self, tenant: str, digests: Sequence[str], *, named: bool, asks_ids: bool) -> dict[str, Raw]:
        """Return the fields of a turn's request: with the files, or `named` for a layer inside that adds them.

        Raises MediaMissingError if the bytes of a picture are gone.
        """
        if named:
            return {fields_of_media.IMAGES: Raw(msgspec.json.encode(digests)), OURS: Raw(b"true")}
        found = [self.shelf.find(tenant, one) for one in digests]
        held = tuple([one for one in found if one is not None])
        if len(held) < len(found):
            gone = next(digest for digest, one in zip(digests, found, strict=True) if one is None)
            raise self._absent(tenant, gone, sent=True)
        return self.worker_fields(tenant, [Shown(held)], batch=False, asks_ids=asks_ids)

    def shelve(
        self,
        tenant: str,
        messages: Sequence[Message],
        sent: Mapping[str, Picture],
        unasked: Collection[str] = (),
    ) -> list[Picture]:
        """Keep the pictures of a conversation, and return them. `sent`: those that came with the request.

        Raises BadRequestError for what is no picture, or stands where none can, and StoreUnreachableError for a picture that
        the store may have, if it is among the `unasked` (see `Brought`).
        """
        placeholder, found, told = self.family.placeholder, list[Picture](), list[str]()
        for message in messages:
            content = message.get("content")
            texts = [value for value in message.values() if type(value) is str]
            if type(content) is list:
                texts += [part["text"] for part in content if type(part.get("text")) is str]
            for text in texts if message["role"] != "assistant" else ():
                if placeholder in text:
                    raise PlaceholderInTextError(
                        f"a message spells {placeholder}, which stands for an image: leave it out"
                    )
                self.check_text(text)
                told.append(text)
            for part in image_parts(message):
                found.append(self._shelve(tenant, message["role"], part, sent, unasked))
        if found:
            self.check_words(told)
            self._check_size(found)
        return found

    def check_beside(self, request: ChatRequest) -> None:
        """Refuse what a template writes beside the messages, tools and its variables, as `shelve` refuses a message.

        Raises PlaceholderInTextError, and ReservedCharacterError.
        """
        if not request.tools and not request.template:
            return
        text = msgspec.json.encode((request.tools, request.template)).decode()
        if self.family.placeholder in text:
            raise PlaceholderInTextError(
                f"a tool, or a variable of the template, spells {self.family.placeholder}, which stands for an image: "
                "leave it out"
            )
        self.check_text(text)
        if request.pictures:
            self.check_words((text,))

    def _shelve(
        self,
        tenant: str,
        role: str,
        part: dict[str, Any],
        sent: Mapping[str, Picture],
        unasked: Collection[str],
    ) -> Picture:
        picture = sent.get(part["digest"])
        if isinstance(part, ImagePart):
            if part.fault is not None:
                raise part.fault
            picture = picture or part.picture
            if role not in ("user", "tool"):
                raise MultimodalUnsupportedError(
                    f"`{part.place}`: images in a message of the role {role} are not supported"
                )
            part.picture = None  # the message may be remembered; the shelf has the bytes
        if picture is None:
            picture = self.shelf.find(tenant, part["digest"])
            if picture is None:
                # What is no `ImagePart` comes out of a session, which the tenant has made.
                named = isinstance(part, ImagePart)
                raise self._absent(tenant, part["digest"], unasked, getattr(part, "place", None), sent=not named)
            return picture
        if len(picture.data) > self._max_image:
            raise MediaInvalidError(f"an image is larger than {self._max_image} bytes (--media-max-image-bytes)")
        return self.shelf.put(tenant, picture)

    def forget(self, tenant: str, digests: Iterable[str]) -> None:
        """Forget lengths that an engine contradicts."""
        for digest in digests:
            self.stock.lengths[tenant].forget(self.family.settings, digest)

    def length(self, tenant: str, digest: str) -> tuple[int, bool]:
        """Return the length of a picture, and whether an engine told it: else it is the family's rule, or 1."""
        known = self.stock.lengths[tenant].get(self.family.settings, digest)
        if known is not None:
            return known, True
        about = self.stock.about(tenant, digest)
        return (1 if about is None else self.family.estimate(about.width, about.height)), False

    def still_unknown(self, tenant: str, media: Iterable[MediaSpan]) -> int:
        """Return how many tokens pictures will have beside their one id, by the family's rule, as long as no engine told it."""
        return sum(self.length(tenant, one.digest)[0] - 1 for one in media if one.length == UNKNOWN)

    def learn(self, tenant: str, lengths: Mapping[str, int]) -> None:
        """Remember the lengths that an engine told."""
        for digest, length in lengths.items():
            self.stock.lengths[tenant].learn(self.family.settings, digest, length)


def _longest_run(ids: Sequence[int], wanted: int) -> int:
    return max((sum(1 for _ in run) for one, run in groupby(ids) if one == wanted), default=0)
