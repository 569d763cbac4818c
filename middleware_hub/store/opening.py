"""Which store `--store` names. A store's module is imported when it is asked for, so its library need not be installed else."""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast, get_args

from middleware_hub.store.protocol import Durability, Store
from router.errors import BadRequestError

_STORES: Final = {
    "sqlite": "middleware_hub.store.sqlite.store:SqliteStore",
    "memory": "middleware_hub.store.dictionary:DictionaryStore",
}
"""By scheme the class, which is made with what stands behind the colon, and the durability."""


def open_store(address: str, *, durability: Durability = "process") -> Store:
    """Return the store of an address, `sqlite:PATH` (a file, or a folder for one); it still has to be opened.

    `memory:` is a store that ends with its process, for tests. Raises BadRequestError.
    """
    scheme, _, rest = address.partition(":")
    if scheme not in _STORES or (scheme == "sqlite" and not rest):
        raise BadRequestError(f"--store {address}: write sqlite:PATH")
    if durability not in get_args(Durability):
        raise BadRequestError(f"--durability {durability}: one of {', '.join(get_args(Durability))}")
    module, _, name = _STORES[scheme].partition(":")
    return cast(Store, getattr(import_module(module), name)(rest, durability))
