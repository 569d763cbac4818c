"""Who a request comes from, as far as its key tells."""

from __future__ import annotations

import msgspec


class Caller(msgspec.Struct, frozen=True):
    """What a request may do, and for whom it is done.

    Attributes:
        tenant: whose texts are read and written.
        admin: may change the fleet, and what belongs to all.
        confined: knows no generations but those of its tenant. Else a request id means whoever has it.
    """

    tenant: str = ""
    admin: bool = True
    confined: bool = False


ANYBODY = Caller()
"""Where there are no keys, everybody may do everything."""
