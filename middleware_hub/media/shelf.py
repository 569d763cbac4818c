"""The shelf: pictures in memory, each once, found by digest, within a budget of bytes.

A picture is *named* by the requests in flight and the chains that need it. Over the budget go, first, pictures that nobody
names, the least recently used first, and then the least recently used of the named ones: a chain keeps its ids and spans, and
only says that the bytes are missing. The names of a picture outlive its bytes, for they may come back.

    put, get                 the picture becomes the most recently used one
    use, free                count names; a picture changes between the two queues of what may go, as the most recently used one

A picture that went from the shelf is still found (`find`) while anybody holds it, as a request does that needs its bytes.

All of it takes constant time; that of an eviction grows with the tenants of the picture. A picture is found by its base64 as
well (`alike`): agents send all of their pictures again at every turn, and to compare one with what is held takes a fiftieth of
the time to decode it and to hash it. A tenant sees only pictures that it has put itself; the bytes are held once all the same.
Of those that the budget sent away the shelf still knows who had put them (`gone`), up to a limit.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final
from weakref import WeakValueDictionary

from middleware_hub.media.picture import Base64Sample, Picture

_MOST_GONE: Final = 100_000
"""Names of pictures that went to know; 300 bytes each."""


class _Held:
    """A picture on the shelf, and the tenants that may see it."""

    __slots__ = ("picture", "tenants")

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.tenants: set[str] = set()


class Shelf:
    """See the top of this file. Not safe for threads: it belongs to the event loop.

    Attributes:
        max_bytes: the budget, for files and their data URLs.
        bytes: what the pictures take; more than `max_bytes` never, except that one picture alone may be larger.
        evicted: pictures that went because of the budget.
        evicted_named: those of them that somebody named.
    """

    def __init__(self, max_bytes: int, max_gone: int = _MOST_GONE) -> None:
        self.max_bytes = max_bytes
        self._max_gone = max_gone
        self._gone: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.bytes = 0
        self.evicted = 0
        self.evicted_named = 0
        self._names: dict[str, int] = {}
        self._samples: dict[Base64Sample, str] = {}
        # The least recently used first.
        self._alive: WeakValueDictionary[tuple[str, str], Picture] = WeakValueDictionary()
        self._unnamed: OrderedDict[str, _Held] = OrderedDict()
        self._named: OrderedDict[str, _Held] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Shelf: {self.count} pictures, {self.bytes} of {self.max_bytes} bytes>"

    @property
    def count(self) -> int:
        """The number of pictures."""
        return len(self._unnamed) + len(self._named)

    def put(self, tenant: str, picture: Picture) -> Picture:
        """Note that a tenant has sent a picture, and return the one that is held, which has the same digest.

        Others may have to go. The picture itself stays, even if it is larger than the budget: the next one sends it away.
        """
        held = self._touched(picture.digest)
        if held is None:
            held = _Held(picture)
            self._queue(picture.digest)[picture.digest] = held
            self.bytes += picture.held_bytes
            while self.bytes > self.max_bytes and self.count > 1:
                self._evict(keeping=picture.digest)
        if (sample := held.picture.sample) is not None:
            self._samples[sample] = picture.digest
        held.tenants.add(tenant)
        self._gone.pop((tenant, picture.digest), None)
        self._alive[tenant, picture.digest] = held.picture
        return held.picture

    def get(self, tenant: str, digest: str) -> Picture | None:
        """Return a picture; None if it is not held, or only other tenants have sent it. The second changes nothing."""
        held = self._queue(digest).get(digest)
        if held is None or tenant not in held.tenants:
            return None
        self._touched(digest)
        return held.picture

    def find(self, tenant: str, digest: str) -> Picture | None:
        """Return a picture as `get` does, or one that went from the shelf and that somebody still holds."""
        return self.get(tenant, digest) or self._alive.get((tenant, digest))

    def gone(self, tenant: str, digest: str) -> bool:
        """Return whether a tenant has put a picture that went because of the budget. The last `max_gone` are known."""
        return (tenant, digest) in self._gone

    def alike(self, tenant: str, sample: Base64Sample) -> Picture | None:
        """Return a picture of the tenant whose base64 has this sample; the whole of it may still be another one."""
        digest = self._samples.get(sample)
        return None if digest is None else self.get(tenant, digest)

    def use(self, digest: str) -> None:
        """Count one more name of a picture, which need not be held."""
        if digest not in self._names and (held := self._unnamed.pop(digest, None)) is not None:
            self._named[digest] = held
        else:
            self._touched(digest)
        self._names[digest] = self._names.get(digest, 0) + 1

    def free(self, digest: str) -> None:
        """Take back one `use`."""
        left = self._names[digest] - 1
        if left:
            self._names[digest] = left
            self._touched(digest)
            return
        del self._names[digest]
        if (held := self._named.pop(digest, None)) is not None:
            self._unnamed[digest] = held

    def _queue(self, digest: str) -> OrderedDict[str, _Held]:
        return self._named if digest in self._names else self._unnamed

    def _touched(self, digest: str) -> _Held | None:
        """Return what is held of a digest, now the most recently used; None if it is not held."""
        queue = self._queue(digest)
        held = queue.get(digest)
        if held is not None:
            queue.move_to_end(digest)
        return held

    def _evict(self, keeping: str) -> None:
        """Let the next picture go that is not the one to keep, which is the most recently used of its queue."""
        named = not self._unnamed or next(iter(self._unnamed)) == keeping
        _, held = (self._named if named else self._unnamed).popitem(last=False)
        self.bytes -= held.picture.held_bytes
        sample = held.picture.sample
        if sample is not None and self._samples.get(sample) == held.picture.digest:
            del self._samples[sample]
        self.evicted += 1
        self.evicted_named += named
        for tenant in held.tenants:
            self._gone[tenant, held.picture.digest] = None
            if len(self._gone) > self._max_gone:
                self._gone.popitem(last=False)
