"""The scripts that run in the server. Each is named by its hash, and loaded into a server when a connection to it is made."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import Final, NamedTuple

from middleware_hub.store.redis.connection import Command


class LuaScript(NamedTuple):
    """A script; `of` makes the command that runs it."""

    text: bytes
    digest: str

    def of(self, keys: list[bytes], arguments: list[bytes | str | int]) -> Command:
        """Return the command that runs it."""
        return ("EVALSHA", self.digest, len(keys), *keys, *arguments)


def _script(name: str) -> LuaScript:
    text = files(__name__).joinpath(f"{name}.lua").read_bytes()
    return LuaScript(text, sha1(text, usedforsecurity=False).hexdigest())


APPEND: Final = _script("append")
READ_LOG: Final = _script("read_log")
LOG_END: Final = _script("log_end")
TRIM: Final = _script("trim")
FORGET: Final = _script("forget")
FORGET_LOG: Final = _script("forget_log")
LEAVE: Final = _script("leave")
HOLD_MEDIA: Final = _script("hold_media")
DROP_MEDIA: Final = _script("drop_media")
ANNOUNCE: Final = _script("announce")
ANNOUNCED: Final = _script("announced")
ALL: Final = (APPEND, READ_LOG, LOG_END, TRIM, FORGET, FORGET_LOG, LEAVE, HOLD_MEDIA, DROP_MEDIA, ANNOUNCE, ANNOUNCED)
