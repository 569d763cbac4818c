"""The pictures that this process can show: those on the shelf, and those of the store behind it, which is slower and larger.

    request with bytes ----> shelf ----> with the first record that names it ----> store
    request with a digest,
    retrieval, download <--- shelf <---- if it went from there (budget, restart, another router has it) ---- store

Code that decides reads only the shelf. So whoever serves a request first *brings* the pictures that it will need, and holds
them while it needs them: the budget may send them from the shelf meanwhile, but `Shelf.find` finds what somebody holds.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from middleware_hub.media.picture import Picture
from middleware_hub.media.shelf import Shelf
from middleware_hub.store.errors import StoreError
from middleware_hub.store.media import MediaFile
from middleware_hub.store.protocol import Batch, Store

logger = logging.getLogger(__name__)

_MOST_KNOWN: Final = 20_000
"""Pictures about which is known what the store says, without their bytes; 500 bytes each."""

_MOST_LENGTHS: Final = 100_000
"""Lengths to know of a tenant's pictures; 300 bytes each."""

Named = tuple[str, str]
"""A tenant, and a digest."""


class Brought(NamedTuple):
    """The pictures of a request that are here.

    Attributes:
        pictures: to be held while they are needed.
        unasked: the digests of others, about which the store could not be asked.
    """

    pictures: list[Picture]
    unasked: Collection[str] = ()


class Lengths:
    """How many tokens the pictures of a tenant become, learned from what workers answer.

    A length belongs to a picture and to the settings of model and processor (`Family.settings`). All workers of a fleet must
    agree: where one says another length than is known, its reply is not exact. Over the limit, the least recently used are
    forgotten. Tenants learn for themselves, because the head of a stream tells whether all lengths were known before: nobody
    shall learn there whether another has shown the same file.
    """

    def __init__(self, max_known: int = _MOST_LENGTHS) -> None:
        self._max_known = max_known
        self._known: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._doubted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._settings: set[str] = set()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, settings: str, digest: str) -> int | None:
        """Return the number of tokens of a picture; None if it is not known."""
        tokens = self._known.get((settings, digest))
        if tokens is not None:
            self._known.move_to_end((settings, digest))
        return tokens

    def of(self, digest: str) -> dict[str, int]:
        """Return the numbers of tokens of a picture, by settings."""
        return {settings: tokens for settings in self._settings if (tokens := self.get(settings, digest)) is not None}

    def recall(self, settings: str, digest: str, tokens: int) -> None:
        """Note the number of tokens that a store remembers, unless a worker has contradicted it here."""
        if (settings, digest) not in self._doubted:
            self.learn(settings, digest, tokens)

    def learn(self, settings: str, digest: str, tokens: int) -> bool:
        """Note the number of tokens of a picture. Return False, and keep what is known, if that is another number."""
        known = self.get(settings, digest)
        if known is not None:
            return known == tokens
        self._known[settings, digest] = tokens
        self._settings.add(settings)
        self._doubted.pop((settings, digest), None)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        return True

    def forget(self, settings: str, digest: str) -> None:
        """Forget a number, if it is known: a worker has answered with another one, and it is not known which is right."""
        if self._known.pop((settings, digest), None) is not None:
            self._doubted[settings, digest] = None
            if len(self._doubted) > self._max_known:
                self._doubted.popitem(last=False)


class Stock:
    """See the top of this file. It belongs to the event loop.

    Args:
        store: open while it is asked; None keeps pictures in memory only.

    Attributes:
        lengths: by tenant.
        brought: pictures that came out of the store.
        unsaved: pictures whose bytes were gone before the record that names them was saved: the store may lack them.
    """

    def __init__(self, shelf: Shelf, store: Store | None = None) -> None:
        self.shelf = shelf
        self.lengths: defaultdict[str, Lengths] = defaultdict(Lengths)
        self.brought = self.unsaved = 0
        self._store = store
        self._told: OrderedDict[Named, MediaFile | None] = OrderedDict()

    async def bring(self, tenant: str, digests: Iterable[str]) -> Brought:
        """Return these pictures, without those that a tenant does not have or that cannot be had now. They are on the shelf."""
        held, missing, unasked = list[Picture](), list[str](), set[str]()
        for digest in dict.fromkeys(digests):
            picture = self.shelf.find(tenant, digest)
            if picture is None:
                missing.append(digest)
            else:
                held.append(picture)
        for digest in missing if self._store is not None else ():  # one by one: each may have 20 MB
            files = await self._asked(tenant, [digest], data=True)
            if files is None:
                unasked.add(digest)
            for file in files or ():
                made = Picture(file.digest, file.mime, file.width, file.height, file.data, file.upright)
                held.append(self.shelf.put(tenant, made))
                self.brought += 1
        return Brought(held, unasked)

    async def ask(self, tenant: str, digests: Iterable[str]) -> None:
        """Ask the store about pictures that are not on the shelf, or whose length is not known, without their bytes.

        It is asked once about each that it has.
        """
        if self._store is None:
            return
        wanted = [one for one in dict.fromkeys(digests) if self._told.get((tenant, one)) is None]
        if wanted:
            await self._asked(tenant, wanted, data=False)

    def about(self, tenant: str, digest: str) -> Picture | MediaFile | None:
        """Return what is known of a picture's form: from the shelf, or from what the store was asked."""
        return self.shelf.find(tenant, digest) or self._told.get((tenant, digest))

    async def _asked(self, tenant: str, digests: Sequence[str], *, data: bool) -> list[MediaFile] | None:
        """Return what the store has of these; None if it cannot be asked now."""
        assert self._store is not None
        try:
            found = await self._store.media(tenant, digests, data=data)
        except StoreError as error:
            logger.warning("pictures cannot be read from the store: %s", error.message)
            return None
        for digest in digests:
            file = found.get(digest)
            self._note((tenant, digest), file)
            for settings, length in {} if file is None else file.lengths.items():
                self.lengths[tenant].recall(settings, digest, length)
        return list(found.values())

    def _note(self, named: Named, file: MediaFile | None) -> None:
        self._told[named] = None if file is None else replace(file, data=b"")
        self._told.move_to_end(named)
        if len(self._told) > _MOST_KNOWN:
            self._told.popitem(last=False)

    def beside(self, batch: Batch) -> Batch:
        """Return a batch with the files that its records name, as far as they are here. Files that it has already stay."""
        named = {
            (record.namespace[0], digest): None
            for record in batch.records
            if record.media
            for _, _, digest in record.media
        }
        there = {(file.tenant, file.digest) for file in batch.media}
        files = [file for one in named if one not in there and (file := self._file(one)) is not None]
        return replace(batch, media=[*batch.media, *files]) if files else batch

    def _file(self, named: Named) -> MediaFile | None:
        tenant, digest = named
        picture = self.shelf.find(tenant, digest)
        if picture is None:
            if self._told.get(named) is None:
                self.unsaved += 1
                logger.warning(
                    "the bytes of the image %s are gone before they were saved: raise --media-max-bytes", digest
                )
            return None
        lengths = self.lengths[tenant].of(digest)
        file = MediaFile(
            *(tenant, digest, picture.mime, picture.width, picture.height, picture.upright, len(picture.data)),
            picture.data,
            lengths,
        )
        self._note(named, file)
        return file
