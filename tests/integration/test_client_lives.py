"""The client, while real routers die: it goes on at the next one, or tells what was lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from middleware_hub.client import (
    AsyncClient,
    Client,
    Conversation,
    NotUsableError,
    Retries,
    Session,
    UnknownReplyError,
    UnreachableError,
)
from tests.support.programs import Program
from tests.support.serving import dead_url
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

FEW = {"max_new_tokens": 16}


@pytest.fixture
def worker() -> Iterator[EmbeddedWorker]:
    with EmbeddedWorker(seed=0) as found:
        yield found


def router(name: str, worker: EmbeddedWorker, folder: Path, *flags: str) -> Program:
    return Program(
        name, "--tokenizer-path", str(shipped_tokenizer()), "--worker-urls", worker.url, *flags, folder=folder
    )


@pytest.mark.slow
def test_a_conversation_goes_on_at_the_next_router(worker: EmbeddedWorker, tmp_path: Path) -> None:
    store = ("--store", f"sqlite:{tmp_path / 'store'}")
    with ExitStack() as entered:
        routers = [entered.enter_context(router(f"router{number}", worker, tmp_path, *store)) for number in range(2)]
        for one in routers:
            one.wait_until_up()
        client = entered.enter_context(Client([one.url for one in routers], retries=Retries(first=0.05)))
        talk = Conversation(client, "Question: How long is the Elbe?\n", FEW)
        talk.say()
        routers[0].kill()
        talk.append("\nAre you sure?\n")
        talk.say()
        found = talk.retrieve().require_exact()
        assert client.url == routers[1].url
        assert [turn.request_id for turn in found.turns] == talk.transcript.names
        last = worker.log[-1]
        assert found.tokens == last.input_ids + last.output_ids


def test_a_router_that_forgot_makes_the_conversation_unusable(worker: EmbeddedWorker, tmp_path: Path) -> None:
    with router("router", worker, tmp_path) as one, Client(one.url, retries=Retries(first=0.05)) as client:
        one.wait_until_up()
        talk = Conversation(client, "Question: How long is the Elbe?\n", FEW)
        talk.say()
        one.kill()
        one.start()
        one.wait_until_up()
        talk.append("\nAre you sure?\n")
        talk.say()
        with pytest.raises(NotUsableError, match="a restart without --store"):
            talk.retrieve().require_exact()


@pytest.mark.parametrize("resample", [False, True])
def test_a_generation_whose_router_dies(worker: EmbeddedWorker, tmp_path: Path, resample: bool) -> None:
    """It is asked for again only by a client that may leave a sample behind."""
    with router("router", worker, tmp_path) as one:
        one.wait_until_up()
        worker.hold(after=4)
        retries = Retries(attempts=60, first=0.05, longest=0.5, resample=resample)
        found: list[object] = []

        def ask() -> None:
            with Client(one.url, retries=retries) as client:
                try:
                    found.append(client.generate("Question: How long is the Elbe?\n", FEW))
                except UnreachableError as error:
                    found.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        worker.wait_for_arrivals(1)
        one.kill()
        one.start()
        one.wait_until_up()
        worker.release()
        asking.join(60)
        if resample:
            assert getattr(found[0], "recorded", None) == "exact", found
        else:
            assert "may have been sampled" in str(found[0])


def test_all_that_fails_at_once_goes_on_at_the_router_that_lives(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """Each request is sent twice at most: at the address where nobody listens, and at the other one."""
    with router("router", worker, tmp_path) as one:
        one.wait_until_up()

        async def ask() -> list[int]:
            async with AsyncClient([dead_url(), one.url], retries=Retries(attempts=2)) as client:
                asked = [client.generate(f"Question: How long are {number} Elbes?\n", FEW) for number in range(40)]
                replies = await asyncio.gather(*asked)
                assert client.url == one.url
                return [reply.completion_tokens for reply in replies]

        assert all(asyncio.run(ask()))


def test_a_session_that_is_gone_already_is_deleted(worker: EmbeddedWorker, tmp_path: Path) -> None:
    """A delete whose answer was lost is sent again, and a rollout must not fail for it at its very end."""
    with router("router", worker, tmp_path) as one, Client(one.url) as client:
        one.wait_until_up()
        with Session(client) as session:
            session.chat([{"role": "user", "content": "How long is the Elbe?"}], max_tokens=8)
            found = session.finalize()
            session.delete()
        assert found.require_exact()
        with pytest.raises(UnknownReplyError):
            session.finalize()
