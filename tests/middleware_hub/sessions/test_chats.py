"""Turns wait for what is begun when the server starts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from middleware_hub.chat.dialect import Dialect
from middleware_hub.chat.keys import canonical
from middleware_hub.served_models import ServedModels
from middleware_hub.sessions.anonymous import AnonymousSession
from middleware_hub.sessions.chats import Chats
from middleware_hub.sessions.prompt.composer import Composer
from router.errors import BadRequestError


class SlowComposer:
    """Is warm when `go` is set; then raises `error`, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.error = error

    def warm(self) -> None:
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error


class Unreadable:
    """A dialect that counts the requests it is given, and refuses all of them."""

    def __init__(self) -> None:
        self.read = 0

    def parse(self, *_: Any) -> None:
        self.read += 1
        raise BadRequestError("unreadable")


MODELS = ServedModels(cast(Any, None))


async def turn(chats: Chats, dialect: Unreadable) -> None:
    session = AnonymousSession("", canonical, max_tokens=1000)
    await chats.talk(cast(Dialect, dialect), session, b"{}", {"headers": []}, cast(Any, None), cast(Any, None))


@pytest.mark.parametrize("error", [None, RuntimeError("a library is broken")])
def test_turns_wait_until_the_composer_is_warm(error: Exception | None) -> None:
    """The event loop goes on meanwhile. What fails while it warms up fails in the turn that needs it, and only there."""

    async def scenario() -> None:
        composer, dialect = SlowComposer(error), Unreadable()
        chats = Chats(cast(Any, None), cast(Composer, composer), MODELS, cast(Any, None))
        chats.warm()
        turns = [asyncio.create_task(turn(chats, dialect)) for _ in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert dialect.read == 0
        turns.pop().cancel()  # a client that leaves takes nothing from the others
        composer.go.set()
        for each in turns:
            with pytest.raises(BadRequestError, match="unreadable"):
                await each
        with pytest.raises(BadRequestError, match="unreadable"):
            await turn(chats, dialect)
        assert dialect.read == 3

    asyncio.run(scenario())


def test_without_a_server_nothing_has_to_be_warm() -> None:
    dialect = Unreadable()
    with pytest.raises(BadRequestError, match="unreadable"):
        asyncio.run(turn(Chats(cast(Any, None), cast(Composer, SlowComposer()), MODELS, cast(Any, None)), dialect))
    assert dialect.read == 1
