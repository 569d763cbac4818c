"""Files of media beside the records: each is kept once for a tenant, whatever number of records name it.

A record names pictures by digest (`SpanRecord.media`), and its tenant by its namespace. Nothing else names a file:

    append    brings the files that its records name, as far as the caller has them. A file that is there already stays
    forget    what no record names any more goes with the last record that did
    media     returns files to a tenant that has them: to others, a file of somebody else's is one that nobody has

The key of a file is a hash of tenant and digest. So a tenant cannot ask about the files of another one, not even by the time
that an answer takes; a file that two tenants have sent is there twice.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec

KEY_SIZE: Final = 16


class MediaFile(msgspec.Struct, frozen=True, array_like=True):
    """The file of a picture, as a tenant sent it.

    Attributes:
        tenant: who sent it.
        digest: `sha256:` and the hash of `data`.
        mime, width, height, upright: as `Picture` has them.
        size: bytes of the file.
        data: the bytes; empty if only the rest was asked for.
        lengths: how many tokens engines made of it, by the settings of model and processor.
    """

    tenant: str
    digest: str
    mime: str
    width: int
    height: int
    upright: bool
    size: int
    data: bytes = b""
    lengths: dict[str, int] = {}

    @property
    def key(self) -> bytes:
        return media_key(self.tenant, self.digest)


@lru_cache(4096)
def media_key(tenant: str, digest: str) -> bytes:
    """Return the key of a tenant's file."""
    name = tenant.encode("utf-8", "surrogatepass")
    data = len(name).to_bytes(8, "big") + name + digest.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=KEY_SIZE, person=b"tito-media").digest()
