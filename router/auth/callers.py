"""Who a request comes from, as far as its key tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

TENANT = "tenant"
"""Key in `scope["state"]` under which everybody finds the name of the tenant; there is none where there are no keys."""

CALLER = "caller"
"""Key in `scope["state"]` under which the guard leaves a `Caller`."""


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


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Who sent this request."""
    found: Caller = (scope.get("state") or {}).get(CALLER, ANYBODY)
    return found
