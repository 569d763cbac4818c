"""Sessions of the client, compared with what the router answers over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from middleware_hub.client import Client, Session
from tests.support.stack import Stack, stack


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen") as made:
        yield made
        assert made.idle()


@pytest.fixture
def client(served: Stack) -> Iterator[Client]:
    with Client(served.url) as made:
        yield made


def test_the_names_of_a_branch_are_those_of_its_trajectory(served: Stack, client: Client) -> None:
    with Session(client, sampling_params={"max_tokens": 12}) as session:
        session.chat([{"role": "user", "content": "Hello"}])
        (told,) = served.get(f"/sessions/{session.id}/trajectories").json()["trajectories"]
        (found,) = session.trajectories()
        assert found.as_branch() == {name: told[name] for name in found.as_branch()}
        assert sum(found.as_branch()["response_mask"]) == 12
        assert found.reward_info == {}


def test_an_agent_is_done(served: Stack, client: Client) -> None:
    with Session(client, sampling_params={"max_tokens": 5}) as session:
        session.chat([{"role": "user", "content": "Hello"}])
        assert session.complete()
        assert session.complete({"score": 1.0})  # it may be said again
        shown = served.get(f"/sessions/{session.id}/complete?timeout_s=0").json()
        assert shown["completed"]
        assert shown["phase"] == "complete"
        (found,) = session.finalize().require_exact()
        assert found.reward_info == {"score": 1.0}


def test_a_text_has_no_reward_of_a_session(client: Client) -> None:
    reply = client.generate("Hello", {"max_new_tokens": 3})
    found = client.retrieve("Hello" + reply.text)
    assert found.reward_info == {}
    assert found.as_branch()["prompt_ids"] + found.as_branch()["response_ids"] == found.tokens
