"""Commands as they are sent: as the client library packs them, but without copies of what is long."""

from __future__ import annotations

import hiredis
import pytest

from middleware_hub.store.redis.wire.connection import Command, packed

SHORT: Command = ("HGETALL", b"p:\0\r\n")
MANY: Command = ("EVALSHA", "0" * 40, 3, *(b"%d" % at for at in range(30)), -1, "ä", b"")
LONG: Command = (*MANY, b"x" * 5_000, 7, b"y" * 6_000, b"z" * 7_000, "end")


@pytest.mark.parametrize(
    "commands",
    [[SHORT], [MANY], [LONG], [("SET", b"key", b"v" * 9_000)], [SHORT, LONG, SHORT, MANY, SHORT], [LONG, LONG]],
    ids=["short", "many", "long", "few arguments", "all", "twice"],
)
def test_commands_are_packed_as_the_client_library_packs_them(commands: list[Command]) -> None:
    assert b"".join(packed(commands)) == b"".join(map(hiredis.pack_command, commands))  # type: ignore[arg-type]


def test_what_is_long_is_not_copied_and_what_is_short_goes_together() -> None:
    pieces = packed([SHORT, LONG, SHORT])
    bodies = [one for one in LONG if len(str(one)) > 1_000]
    assert [piece for piece in pieces if any(piece is body for body in bodies)] == bodies
    assert len(pieces) == 2 * len(bodies) + 1
