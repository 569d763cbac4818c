"""The sender of a request, by its key."""

from __future__ import annotations

import msgspec


class Caller(msgspec.Struct, frozen=True):
    """The owner and the rights of a request.

    Attributes:
        tenant: whose texts are read and written.
        admin: may change the fleet, and what all tenants share.
        confined: sees only the generations of its tenant. Otherwise a request id means any generation of that id.
    """

    tenant: str = ""
    admin: bool = True
    confined: bool = False


ANYBODY = Caller()
"""The caller where there are no keys: it may do everything."""
