"""A key names a session: clients that can set nothing but an address and a key are recorded in it, and may do nothing else."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from router.config import StoreConfig
from tests.support.agents import AgentSession, ids_of, user
from tests.support.client import Answer
from tests.support.fleet import until
from tests.support.lives import Router
from tests.support.stack import Stack, stack
from tests.support.templates import folder
from worker.models.ngram import shipped_tokenizer
from worker.worker import EmbeddedWorker

CHAT, MESSAGES, RESPONSES, MODELS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/models"
TURN: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [user("Hello")]}
RESPONSE: dict[str, Any] = {"model": "m", "max_output_tokens": 8, "input": "Hello"}
OTHER = {"authorization": "Bearer key-of-b"}
ADMIN = {"authorization": "Bearer key-of-all"}
KEYS = {"api_keys": ("a:key-of-a", "b:key-of-b", "nameless"), "admin_keys": ("key-of-all",)}
HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")


def template() -> dict[str, Any]:
    return {"chat_template": str(folder() / "qwen2_5.jinja")}


@pytest.fixture(scope="module")
def free() -> Iterator[Stack]:
    """Without keys."""
    with stack("qwen", styles=("incremental",), sessions={**template(), "implicit": True}) as made:
        yield made


@pytest.fixture(scope="module")
def kept() -> Iterator[Stack]:
    """With tenants and an admin."""
    with stack("qwen", styles=("incremental",), sessions=template(), server=KEYS) as made:
        yield made


def opened(served: Stack, headers: dict[str, str] | None = None, **fields: Any) -> tuple[str, str]:
    """The id and the key of a new session."""
    answer = served.post("/sessions", {"as_key": True, **fields}, headers=headers)
    assert answer.status == 201, answer.content
    found = answer.json()
    return found["session_id"], found["session_key"]


def given(key: str, name: str = "authorization") -> dict[str, str]:
    return {name: f"Bearer {key}" if name == "authorization" else key}


def exported(served: Stack, name: str, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    answer = served.exchange("GET", f"/sessions/{name}/trajectories", headers=headers)
    assert answer.status == 200, answer.content
    found: list[dict[str, Any]] = answer.json()["trajectories"]
    return found


def asked(served: Stack, path: str, key: str, name: str = "authorization") -> Answer:
    return served.post(path, RESPONSE if path == RESPONSES else TURN, headers=given(key, name))


class TestTurns:
    def test_every_sdk_at_the_root_is_recorded_in_the_session_of_its_key(self, kept: Stack) -> None:
        """One conversation, through three APIs of two SDKs, is one trajectory with the ids of the worker."""
        name, key = opened(kept, OTHER)
        (worker,) = kept.workers
        begun = len(worker.log)
        for text in ("One.", "Two.", "Three."):
            worker.script(text=text)
        with openai.OpenAI(base_url=f"{kept.url}/v1", api_key=key) as client:
            messages: list[Any] = [user("Hello")]
            chat = client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": chat.choices[0].message.content}, user("And?")]
            response = client.responses.create(model="m", input=messages)
            messages += [{"role": "assistant", "content": response.output_text}, user("So?")]
            assert [one.id for one in client.models.list()]
        with anthropic.Anthropic(base_url=kept.url, api_key=key) as other:
            with other.messages.stream(model="m", max_tokens=20, messages=messages) as stream:
                assert stream.get_final_text() == "Three."
            assert other.messages.count_tokens(model="m", messages=messages).input_tokens > 10
        (trajectory,) = exported(kept, name, OTHER)
        assert trajectory["num_turns"] == 3
        assert trajectory["exact"], trajectory["reasons"]
        assert ids_of(trajectory) == [*worker.log[-1].input_ids, *worker.log[-1].output_ids]
        assert sum(trajectory["response_mask"]) == sum(len(one.output_ids) for one in worker.log[begun:])

    @pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
    @pytest.mark.parametrize("header", HEADERS)
    def test_no_worker_ever_sees_the_key(self, free: Stack, header: str, path: str) -> None:
        """Whatever header a library sends it in, also where the router has no keys and passes on those of workers."""
        name, key = opened(free)
        (worker,) = free.workers
        generated, called = len(worker.log), len(worker.calls)
        answer = asked(free, path, key, header)
        assert answer.status == 200, answer.content
        assert answer.headers["x-session-id"] == name
        listed = free.exchange("GET", MODELS, headers=given(key, header))
        assert listed.status == 200, listed.content
        assert len(worker.log) > generated
        seen = repr([one.headers for one in (*worker.log[generated:], *worker.calls[called:])])
        assert key not in seen
        assert key[8:51] not in seen
        assert len(exported(free, name)) == 1

    @pytest.mark.parametrize("below", ["", "/sessions/{name}"])
    def test_a_base_url_without_v1_is_recorded_too(self, kept: Stack, below: str) -> None:
        """Also by a library whose address is the session's own, and Google's that names no version of its API."""
        name, key = opened(kept, OTHER)
        (worker,) = kept.workers
        root = kept.url + below.format(name=name)
        worker.script(text="One.")
        worker.script(text="Two.")
        with openai.OpenAI(base_url=root, api_key=key) as client:
            messages: list[Any] = [user("Hello")]
            with client.chat.completions.create(model="m", messages=messages, stream=True) as stream:
                said = "".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices)
            messages += [{"role": "assistant", "content": said}, user("And?")]
            assert client.responses.create(model="m", input=messages).output_text == "Two."
            assert [one.id for one in client.models.list()]
        given_too = given(key, "x-api-key")
        begun = len(worker.log)
        for path in ("/messages", "/messages/count_tokens", "/models/m:generateContent"):
            body = {"contents": {"parts": [{"text": "Hi"}]}} if "models" in path else TURN
            asked = kept.post(f"{below.format(name=name)}{path}", body, headers=given_too)
            assert asked.status == 200, (path, asked.content)
        assert len(worker.log) == begun + 2
        found = exported(kept, name, OTHER)
        assert sorted(one["num_turns"] for one in found) == [1, 1, 2]
        assert all(one["exact"] for one in found)

    @pytest.mark.parametrize("below", ["", "/v1", "/sessions/{name}/v1"])
    def test_a_models_name_is_no_way_to_another_path_of_a_worker(self, kept: Stack, below: str) -> None:
        name, key = opened(kept, OTHER)
        (worker,) = kept.workers
        called = len(worker.calls)
        path = f"{below.format(name=name)}/models/../../server_info"
        assert kept.exchange("GET", path, headers=given(key)).status == 404
        assert len(worker.calls) == called

    @pytest.mark.parametrize("place", ["header", "query"])
    @pytest.mark.parametrize("root", ["/v1beta", "/v1alpha"])
    def test_googles_api_at_the_root(self, kept: Stack, place: str, root: str) -> None:
        name, key = opened(kept, OTHER)
        (worker,) = kept.workers
        generated = len(worker.log)
        body = {
            "contents": [{"role": "user", "parts": [{"text": "Hello"}]}],
            "generationConfig": {"maxOutputTokens": 4},
        }
        query, headers = (f"?key={key}", {}) if place == "query" else ("", given(key, "x-goog-api-key"))
        answer = kept.post(f"{root}/models/m:generateContent{query}", body, headers=headers)
        assert answer.status == 200, answer.content
        assert len(exported(kept, name, OTHER)) == 1
        assert key not in repr([(one.headers, one.body) for one in worker.log[generated:]])

    def test_a_library_may_have_the_session_in_its_address_too(self, kept: Stack) -> None:
        name, key = opened(kept, OTHER)
        assert asked(kept, f"/sessions/{name}/v1/chat/completions", key).status == 200
        (trajectory,) = exported(kept, name, OTHER)
        assert trajectory["num_turns"] == 1

    def test_the_key_decides_and_not_a_header_that_names_another_session(self, free: Stack) -> None:
        """Harnesses send names of their own in it."""
        name, key = opened(free)
        other = AgentSession.make(free).name
        assert free.post(CHAT, TURN, headers={**given(key), "x-session-id": other}).headers["x-session-id"] == name
        assert exported(free, other) == []

    def test_a_session_without_a_key_shows_none_and_is_opened_by_none(self, free: Stack) -> None:
        name, key = opened(free)
        plain = free.post("/sessions", {"as_key": False}).json()
        assert "session_key" not in plain
        assert key not in free.get(f"/sessions/{name}").content.decode()
        forged = key.rpartition(".")[0] + "." + plain["session_id"]
        assert asked(free, CHAT, forged).status == 401
        assert free.post("/sessions", {"as_key": "yes"}).status == 400

    def test_keys_are_not_equal(self, free: Stack) -> None:
        secrets = {opened(free)[1].removeprefix("sk-tito-").partition(".")[0] for _ in range(20)}
        assert len(secrets) == 20
        assert min(map(len, secrets)) == 43


class TestInvalidKeys:
    @pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
    def test_after_its_session_is_deleted(self, free: Stack, path: str) -> None:
        """401, in the dialect's shape, and nobody samples: it is not served as a chat without a session."""
        name, key = opened(free)
        assert asked(free, path, key).status == 200
        assert free.exchange("DELETE", f"/sessions/{name}").status == 200
        samples = len(free.workers[0].log)
        answer = asked(free, path, key, "x-api-key" if path == MESSAGES else "authorization")
        assert answer.status == 401, answer.content
        assert (answer.json().get("type") == "error") is (path == MESSAGES)
        assert answer.json()["error"]["message"].startswith("this router knows no session of this key")
        assert "www-authenticate" in answer.headers
        assert len(free.workers[0].log) == samples

    def test_nor_does_it_open_the_next_session_of_that_name(self, free: Stack) -> None:
        name, key = opened(free, session_id="again")
        assert free.exchange("DELETE", f"/sessions/{name}").status == 200
        _, new = opened(free, session_id="again")
        assert asked(free, CHAT, key).status == 401
        assert asked(free, CHAT, new).status == 200

    def test_a_finalized_session_takes_no_more_turns(self, free: Stack) -> None:
        name, key = opened(free)
        assert asked(free, CHAT, key).status == 200
        assert free.post(f"/sessions/{name}/finalize", {}).status == 200
        assert asked(free, CHAT, key).status == 409

    def test_after_its_time_to_live(self, free: Stack) -> None:
        _, key = opened(free, ttl_s=0.01)
        until(lambda: asked(free, "/v1/messages/count_tokens", key).status == 401, "the key is refused")

    @pytest.mark.parametrize("path", [CHAT, RESPONSES, "/generate", "/v1/embeddings", "/sessions", "/anything"])
    def test_what_only_looks_like_a_key(self, free: Stack, path: str) -> None:
        """Also at paths that go to a worker: a key must not reach it because it was cut."""
        _, key = opened(free)
        called = len(free.workers[0].calls) + len(free.workers[0].log)
        for wrong in ("sk-tito-", key[:-1], key[:20], key.replace(".", "", 1), f"sk-tito-{'A' * 43}.nobody", key + "é"):
            headers = {"authorization": b"Bearer " + wrong.encode("latin-1")}
            assert asked_raw(free, path, headers) in ((401,) if path.startswith("/v1/") else (401, 403)), wrong
        assert len(free.workers[0].calls) + len(free.workers[0].log) == called

    def test_two_keys_at_once(self, free: Stack) -> None:
        """Which is meant cannot be known. The same one twice is one."""
        _, key = opened(free)
        _, other = opened(free)
        assert free.post(CHAT, TURN, headers={**given(key), "x-api-key": other}).status == 401
        assert free.post(CHAT, TURN, headers={**given(key), "x-api-key": key}).status == 200


def asked_raw(served: Stack, path: str, headers: dict[str, bytes]) -> int:
    """The status of a request whose headers are bytes."""
    parts = urlsplit(served.url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)) as connection:
        connection.request("POST", path, b"{}", {"content-type": "application/json", **headers})  # type: ignore[dict-item]
        return connection.getresponse().status


class TestRights:
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/sessions"),
            ("POST", "/sessions"),
            ("GET", "/sessions/{own}"),
            ("DELETE", "/sessions/{own}"),
            ("POST", "/sessions/{own}/finalize"),
            ("POST", "/sessions/{own}/reward_info"),
            ("GET", "/sessions/{own}/trajectories"),
            ("POST", "/sessions/{other}/v1/chat/completions"),
            ("GET", "/sessions/{other}"),
            ("POST", "/generate"),
            ("POST", "/retrieve_from_text"),
            ("POST", "/trajectories/claim"),
            ("GET", "/workers"),
            ("GET", "/metrics"),
            ("POST", "/add_worker"),
            ("POST", "/abort_request"),
            ("POST", "/flush_cache"),
            ("GET", "/debug/requests"),
            ("GET", "/inspect/api/conversations"),
            ("POST", "/v1/../finalize"),
            ("POST", "/sessions/{own}/v1/../finalize"),
            ("DELETE", "/v1/"),
            ("POST", "/finalize"),
            ("POST", "/complete"),
            ("POST", "/reward_info"),
            ("GET", "/trajectories"),
            ("POST", "/completions"),
            ("POST", "/sessions/{other}/messages"),
            ("POST", "/sessions/{own}/messages/../finalize"),
        ],
    )
    @pytest.mark.parametrize("keyed", [False, True])
    def test_it_is_good_for_the_turns_of_its_session_alone(
        self, free: Stack, kept: Stack, method: str, path: str, keyed: bool
    ) -> None:
        served, owner = (kept, OTHER) if keyed else (free, None)
        own, key = opened(served, owner)
        other, _ = opened(served, owner)
        body = {} if method == "POST" else None
        answer = served.exchange(method, path.format(own=own, other=other), body, headers=given(key))
        assert answer.status in (403, 404, 405), answer.content
        assert answer.status == 403 or "/v1" in path or ".." in path
        for one in (own, other):
            shown = served.exchange("GET", f"/sessions/{one}", headers=owner).json()
            assert (shown["phase"], shown["num_generations"]) == ("active", 0)

    def test_it_does_not_act_as_a_tenant(self, kept: Stack) -> None:
        _, key = opened(kept, OTHER)
        answer = kept.post(CHAT, TURN, headers={**given(key), "x-tenant": "a"})
        assert answer.status == 403, answer.content

    @pytest.mark.parametrize("owner", ["key-of-a", "key-of-b", "nameless", "key-of-all"])
    def test_the_session_is_found_whosever_it_is(self, kept: Stack, owner: str) -> None:
        """Of one name there may be one for each tenant; the secret says which."""
        owners = ("key-of-a", "key-of-b", "nameless", "key-of-all")
        name = f"shared-{owner}"
        keys = {one: opened(kept, given(one), session_id=name)[1] for one in owners}
        assert asked(kept, CHAT, keys[owner]).status == 200
        for one in owners:
            assert len(exported(kept, name, given(one))) == (one == owner)

    def test_nothing_of_a_tenants_key_is_in_it(self, kept: Stack) -> None:
        """Who has it must not be able to try keys against it."""
        _, key = opened(kept, given("nameless"), session_id="told")
        assert key.rpartition(".")[2] == "told"
        assert len(key) == len("sk-tito-") + 43 + len(".told")

    def test_pages_of_other_sites_need_no_more(self, free: Stack) -> None:
        """Whoever has the key may use it."""
        _, key = opened(free)
        page = {"sec-fetch-site": "cross-site"}
        assert free.post(CHAT, TURN, headers={**given(key), **page}).status == 200
        assert free.post(CHAT, TURN, headers=page).status == 403


class TestLives:
    @pytest.mark.parametrize("how", ["restarted", "another"])
    def test_it_is_known_after_a_restart_and_at_another_router(self, tmp_path: Path, how: str) -> None:
        store = StoreConfig(url=f"sqlite:{tmp_path}")
        with EmbeddedWorker(shipped_tokenizer()) as worker, contextlib.ExitStack() as ends:
            first = Router(worker, store)
            ends.callback(first.stop)
            name, key = opened(first.stack)
            gone, lost = opened(first.stack)
            assert asked(first.stack, CHAT, key).status == 200
            if how == "restarted":
                first.restart()
                second = first
            else:
                second = Router(worker, store)
                ends.callback(second.stop)
            assert asked(second.stack, CHAT, key).status == 200
            assert asked(second.stack, CHAT, key[:20] + "0000" + key[24:]).status == 401
            assert len(exported(first.stack, name)) == 2
            assert asked(first.stack, "/v1/messages/count_tokens", lost).status == 200
            assert second.stack.exchange("DELETE", f"/sessions/{gone}").status == 200
            for one in (first, second):
                assert asked(one.stack, CHAT, lost).status == 401
        secret = key.removeprefix("sk-tito-").partition(".")[0].encode()
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or secret not in file.read_bytes()

    def test_it_is_not_in_the_log(self, free: Stack, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        name, key = opened(free)
        asked(free, CHAT, key)
        free.exchange("DELETE", f"/sessions/{name}")
        asked(free, CHAT, key)
        asked(free, "/generate", key)
        assert caplog.records
        assert key.removeprefix("sk-tito-").partition(".")[0] not in caplog.text


class TestResponsesAtTheRoot:
    def test_a_named_session_records_them(self, free: Stack) -> None:
        """With implicit sessions on its first use."""
        answer = free.post(RESPONSES, RESPONSE, headers={"x-session-id": "responds"})
        assert answer.status == 200, answer.content
        first = answer.json()
        more = {**RESPONSE, "input": "And?", "previous_response_id": first["id"]}
        assert free.post(RESPONSES, more, headers={"x-session-id": "responds"}).status == 200
        (trajectory,) = exported(free, "responds")
        assert (trajectory["num_turns"], trajectory["exact"]) == (2, True)

    def test_a_session_that_there_is_records_them_in_any_case(self, kept: Stack) -> None:
        name, _ = opened(kept, OTHER)
        headers = {**OTHER, "x-session-id": name}
        assert kept.post(RESPONSES, RESPONSE, headers=headers).status == 200
        assert len(exported(kept, name, OTHER)) == 1

    @pytest.mark.parametrize("headers", [{}, {"x-session-id": "nobody"}])
    def test_others_go_to_a_worker_as_they_are(self, kept: Stack, headers: dict[str, str]) -> None:
        (worker,) = kept.workers
        before = len(worker.calls)
        kept.post(RESPONSES, RESPONSE, headers={**OTHER, **headers})
        assert [call.path for call in worker.calls[before:]] == [RESPONSES]
        assert kept.exchange("GET", "/sessions/nobody", headers=OTHER).status == 404
