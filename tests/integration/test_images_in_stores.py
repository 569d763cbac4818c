"""Images in stores: their bytes come back after a restart, at another router, and after the budget sent them from memory.

Clients here send each picture once. Then they only name it.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.middleware_hub.store_cli.running import status
from tests.support.asking import until
from tests.support.pictures import data_url, digest, picture
from tests.support.redis_server import redis_server
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer

Json = dict[str, Any]
FOLDER = shipped_image_tokenizer()
CAT, DOG, SUN = (picture(40, 30, seed) for seed in (1, 2, 3))
SAMPLING = {"max_tokens": 6, "temperature": 0}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
NOWHERE = "sha256:" + "0" * 64
TENANTS = {"server": {"api_keys": ("a:key-of-a", "b:key-of-b"), "admin_keys": ("root",)}}
A, B = ({"authorization": f"Bearer key-of-{name}"} for name in "ab")


@contextlib.contextmanager
def store_at(kind: str, folder: Path) -> Iterator[StoreConfig]:
    spool = str(folder / "spool")
    if kind == "sqlite":
        yield StoreConfig(url=f"sqlite:{folder / 'store.sqlite3'}", spool=spool)
    else:
        with redis_server(folder) as server:
            yield StoreConfig(url=f"redis://127.0.0.1:{server.port}/0", spool=spool)


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreConfig]:
    with store_at(request.param, tmp_path) as config:
        yield config


@contextlib.contextmanager
def product(store: StoreConfig | None, **options: Any) -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",), folder=FOLDER, store=store, **options) as made:
        yield made
        assert made.workers[0].out_of_range == []


def ok(served: Stack, path: str, body: Json, **headers: str) -> Json:
    answer = served.exchange("POST", path, body, headers)
    assert answer.status in (200, 201), answer.content
    found: Json = answer.json()
    return found


def shown(one: bytes | str) -> Json:
    """The part of a message: with the bytes of a picture, or with its name."""
    return {"type": "image_url", "image_url": {"url": one if isinstance(one, str) else data_url(one)}}


def user(*parts: bytes | str, text: str = "Look") -> Json:
    return {"role": "user", "content": [{"type": "text", "text": text}, *map(shown, parts)]}


def turn(served: Stack, name: str, messages: list[Json], **headers: str) -> Json:
    body = {"messages": messages, **SAMPLING}
    said: Json = ok(served, f"/sessions/{name}/v1/chat/completions", body, **headers)["choices"][0]["message"]
    return said


def check(found: Json, pictures: list[bytes], *, inline: bool = True) -> None:
    """The pictures of a sequence are these, and said to be as they are."""
    assert found["exact"], found["reasons"]
    assert "media_missing" not in found["reasons"]
    for one, content in zip(found["multi_modal_data"]["images"], pictures, strict=True):
        assert one["digest"] == digest(content)
        assert (one["mime"], one["width"], one["height"]) == ("image/png", 40, 30)
        assert one["bytes"] == (base64.b64encode(content).decode() if inline else None)


def test_a_session_goes_on_by_names_after_a_restart(store: StoreConfig) -> None:
    with product(store) as first:
        name = str(ok(first, "/sessions", {})["session_id"])
        messages = [user(CAT)]
        said = turn(first, name, messages)
        record = first.workers[0].log[-1]
        known = [*record.input_ids, *record.output_ids]
    messages = [user(digest(CAT)), said, user(DOG)]
    with product(store) as second:
        messages.append(turn(second, name, messages))
        record = second.workers[0].log[-1]
        assert record.input_ids[: len(known)] == known
        assert list(record.images) == [digest(CAT), digest(DOG)]
        known = [*record.input_ids, *record.output_ids]
    with product(store) as third:
        check(third.get(f"/sessions/{name}/trajectories?media=ref").json()["trajectories"][0], [CAT, DOG], inline=False)
        for content in (CAT, DOG):
            answer = third.exchange("GET", f"/media/{digest(content)}")
            assert (answer.status, answer.content, answer.headers["content-type"]) == (200, content, "image/png")
        messages[2] = user(digest(DOG))
        messages += [{"role": "user", "content": "And?"}]
        turn(third, name, messages)
        assert third.workers[0].log[-1].input_ids[: len(known)] == known
    with product(store) as fourth:
        (found,) = ok(fourth, f"/sessions/{name}/finalize?media=inline", {})["trajectories"]
        check(found, [CAT, DOG])


def test_a_chat_without_a_session_goes_on_by_names_after_a_restart(store: StoreConfig) -> None:
    """A picture in the first message, in a later one, and both again."""
    messages, names, known = list[Json](), list[str](), list[int]()
    for number, content in enumerate((CAT, DOG, None, CAT)):
        pictures = [] if content is None else [digest(content) if digest(content) in names else content]
        messages.append(user(*pictures, text=f"Look {number}"))
        with product(store) as served:
            body = {"messages": messages, **SAMPLING}
            said = ok(served, "/v1/chat/completions", body)["choices"][0]["message"]
            record = served.workers[0].log[-1]
        assert record.input_ids[: len(known)] == known
        names += [] if content is None else [digest(content)]
        assert list(record.images) == names
        known = [*record.input_ids, *record.output_ids]
        messages[-1] = user(*names[len(names) - len(pictures) :], text=f"Look {number}")
        messages.append(said)


def test_a_text_goes_on_by_names_after_a_restart(store: StoreConfig) -> None:
    text, ids, names = f"Kept: {IMAGE}.", list[int](), list[str]()
    for pictures in ([CAT], [CAT, DOG], [CAT, DOG, CAT]):
        with product(store) as served:
            new = [data_url(pictures[-1])] if digest(pictures[-1]) not in names else [digest(pictures[-1])]
            body = {"text": text, "image_data": [*names, *new], "sampling_params": {"max_new_tokens": 5}}
            record = served.generate(body).record
            assert record.input_ids[: len(ids)] == ids
            names.append(digest(pictures[-1]))
            assert list(record.images) == names
            ids = [*record.input_ids, *record.output_ids]
            text += record.text
        with product(store) as other:
            found = ok(other, "/retrieve_from_text?media=inline", {"text": text, "image_data": names})
            assert found["tokens"] == ids
            check(found, pictures)
        text += f" {IMAGE}."


@pytest.mark.parametrize("max_bytes", [1, 3 * len(CAT)])
def test_what_the_budget_sent_away_comes_back(store: StoreConfig, max_bytes: int) -> None:
    """Also within one request: of its pictures only one fits into the memory."""
    with product(store, media={"max_bytes": max_bytes}) as served:
        name = str(ok(served, "/sessions", {})["session_id"])
        messages = [user(CAT, DOG, SUN)]
        messages.append(turn(served, name, messages))
        messages = [user(*map(digest, (CAT, DOG, SUN))), messages[1], user(digest(CAT), text="Again")]
        turn(served, name, messages)
        assert list(served.workers[0].log[-1].images) == [digest(one) for one in (CAT, DOG, SUN, CAT)]
        (found,) = ok(served, f"/sessions/{name}/finalize?media=inline", {})["trajectories"]
        check(found, [CAT, DOG, SUN, CAT])
        text = f"Two: {IMAGE}{IMAGE}"
        body = {"text": text, "image_data": [data_url(CAT), data_url(DOG)], "sampling_params": {"max_new_tokens": 5}}
        text += served.generate(body).record.text
        asked = {"text": text, "image_data": [digest(CAT), digest(DOG)]}
        check(ok(served, "/retrieve_from_text?media=inline", asked), [CAT, DOG])
        for content in (CAT, DOG, SUN):
            assert served.exchange("GET", f"/media/{digest(content)}").content == content


def test_two_routers_share_pictures(store: StoreConfig) -> None:
    with product(store) as one, product(store) as two:
        name = str(ok(one, "/sessions", {})["session_id"])
        messages = [user(CAT)]
        for number, served in enumerate((one, two, one, two)):
            messages.append(turn(served, name, messages))
            messages[0] = user(digest(CAT))
            messages.append({"role": "user", "content": f"And {number}?"})
            for asked in (one, two):
                check(asked.get(f"/sessions/{name}/trajectories?media=inline").json()["trajectories"][0], [CAT])


def test_a_tenant_never_learns_of_anothers_pictures(store: StoreConfig) -> None:
    """In the store, too: a name of another tenant's picture is answered as a name of none."""
    with product(store, **TENANTS) as served:
        body = {"text": f"Mine: {IMAGE}", "image_data": [data_url(CAT)], "sampling_params": {"max_new_tokens": 5}}
        record = served.generate(body, headers=A).record
    with product(store, **TENANTS) as served:
        assert served.exchange("GET", f"/media/{digest(CAT)}", None, B).status == 404
        theirs, nobodys = (served.exchange("GET", f"/media/{one}", None, B).content for one in (digest(CAT), NOWHERE))
        assert theirs == nobodys
        answers = [
            served.exchange("POST", "/generate", body | {"image_data": [one]}, B) for one in (digest(CAT), NOWHERE)
        ]
        assert [one.status for one in answers] == [400, 400]
        assert answers[0].content == answers[1].content.replace(NOWHERE.encode(), digest(CAT).encode())
        assert served.exchange("GET", f"/media/{digest(CAT)}", None, A).content == CAT
        asked = {"text": f"Mine: {IMAGE}{record.text}", "image_data": [digest(CAT)]}
        check(ok(served, "/retrieve_from_text?media=inline", asked, **A), [CAT])


def test_the_length_of_a_picture_is_remembered(store: StoreConfig) -> None:
    """Another conversation with a picture of an earlier life need not ask the worker for its ids."""
    body = {"text": f"One: {IMAGE}", "image_data": [data_url(CAT)], "sampling_params": {"max_new_tokens": 5}}
    with product(store) as served:
        known = served.generate(body).record
    with product(store) as served:
        other = body | {"text": f"Another: {IMAGE}", "stream": True}
        reply = served.generate(other)
        assert "media_count_checked" in reply.answer.headers["x-radix-reasons"]
        assert reply.record.input_ids.count(4097) == known.input_ids.count(4097)


def test_without_a_store_a_picture_ends_with_the_process(tmp_path: Path) -> None:
    with product(None) as served:
        turn(served, str(ok(served, "/sessions", {})["session_id"]), [user(CAT)])
    with product(None) as served:
        assert served.exchange("GET", f"/media/{digest(CAT)}").status == 404
        name = str(ok(served, "/sessions", {})["session_id"])
        body = {"messages": [user(digest(CAT))], **SAMPLING}
        answer = served.exchange("POST", f"/sessions/{name}/v1/chat/completions", body)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "media_unknown")


def test_forks_at_pictures_of_one_length_stay_apart(store: StoreConfig) -> None:
    """Their contexts differ in nothing but the digest."""
    with product(store) as served:
        name = str(ok(served, "/sessions", {})["session_id"])
        first = user(text="Begin")
        said = turn(served, name, [first])
        lengths = dict[int, list[bytes]]()
        for seed in range(60):
            content = picture(40, 30, seed)
            turn(served, name, [first, said, user(content)])
            record = served.workers[0].log[-1]
            lengths.setdefault(record.input_ids.count(4097), []).append(content)
        every = {digest(one) for some in lengths.values() for one in some}
        assert max(map(len, lengths.values())) > 1, "no two pictures have the same length"
    with product(store) as served:
        found = served.get(f"/sessions/{name}/trajectories?media=inline").json()["trajectories"]
        images = [one["multi_modal_data"]["images"][0] for one in found]
        assert {one["digest"] for one in images} == every


# Away --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [None, 1])
@pytest.mark.parametrize("how", ["router", "command"])
def test_what_waits_for_the_store_has_its_pictures(
    tmp_path: Path, max_bytes: int | None, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store is away, the router dies with what it has in its spool, and the next one, or the command, hands it over."""
    spool = str(tmp_path / "spool")
    with redis_server(tmp_path, ("appendfsync", "always")) as server:
        address = f"redis://127.0.0.1:{server.port}/0"
        store = StoreConfig(url=address, spool=spool)
        with product(store, media={"max_bytes": max_bytes}) as served:
            name = str(ok(served, "/sessions", {})["session_id"])
            messages = [user(CAT)]
            messages.append(turn(served, name, messages))
            server.kill()
            messages.append(user(DOG, SUN))
            body = {"messages": messages, **SAMPLING}
            answer = served.exchange("POST", f"/sessions/{name}/v1/chat/completions", body)
            assert answer.status == 200, answer.content
            assert answer.headers["x-radix-saved"] == "no"
            messages.append(answer.json()["choices"][0]["message"])
            record = served.workers[0].log[-1]
            known = [*record.input_ids, *record.output_ids]
        server.start()
        if how == "command":
            assert status("handover", "--store", address, "--spool", spool) == 0
            assert ", 2 images" in capsys.readouterr().out
            assert status("verify", "--store", address, "--spool", spool) == 0
        with product(store) as served:
            for content in (CAT, DOG, SUN):
                assert served.exchange("GET", f"/media/{digest(content)}").content == content
            messages = [user(digest(CAT)), messages[1], user(digest(DOG), digest(SUN)), messages[3], user(text="And?")]
            turn(served, name, messages)
            record = served.workers[0].log[-1]
            assert record.input_ids[: len(known)] == known
            (found,) = served.get(f"/sessions/{name}/trajectories?media=inline").json()["trajectories"]
            check(found, [CAT, DOG, SUN])


def test_while_the_store_is_away_what_is_only_there_is_missing(tmp_path: Path) -> None:
    """It is no 500, and no picture of another: the client sends the bytes, and goes on."""
    with redis_server(tmp_path, ("appendfsync", "always")) as server:
        store = StoreConfig(url=f"redis://127.0.0.1:{server.port}/0", spool=str(tmp_path / "spool"))
        with product(store, media={"max_bytes": 1}) as served:
            name = str(ok(served, "/sessions", {})["session_id"])
            messages = [user(CAT, DOG)]
            messages.append(turn(served, name, messages))
            server.kill()
            assert served.exchange("GET", f"/media/{digest(CAT)}").status == 503
            path = f"/sessions/{name}/v1/chat/completions"
            named = [user(digest(CAT), digest(DOG)), messages[1], user(text="And?")]
            answer = served.exchange("POST", path, {"messages": named, **SAMPLING})
            assert (answer.status, answer.json()["error"]["code"]) == (400, "media_missing")
            turn(served, name, [*messages, user(text="And?")])
            server.start()


def test_a_picture_that_the_store_may_have_is_not_said_to_be_unknown(tmp_path: Path) -> None:
    """At a router that never saw it, while the store is away: clients repeat a 503, and no 400."""
    with redis_server(tmp_path, ("appendfsync", "always")) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        stores = [StoreConfig(url=url, spool=str(tmp_path / name)) for name in ("one", "two")]
        with product(stores[0]) as one, product(stores[1]) as two:
            name = str(ok(one, "/sessions", {})["session_id"])
            messages = [user(CAT)]
            messages.append(turn(one, name, messages))
            texts = {"text": f"Look: {IMAGE}", "image_data": [digest(CAT)]}
            chat = {"messages": [user(digest(CAT))], **SAMPLING}
            asked: list[tuple[str, Json]] = [
                ("/generate", {**texts, "sampling_params": {"max_new_tokens": 2}}),
                ("/retrieve_from_text", texts),
                ("/v1/chat/completions", chat),
            ]
            server.kill()
            for path, body in asked:
                answer = two.exchange("POST", path, body)
                assert (answer.status, answer.headers["retry-after"]) == (503, "1"), (path, answer.content)
                assert "may have the image" in answer.content.decode()
            answer = two.exchange("POST", "/v1/chat/completions", {"messages": [user(DOG)], **SAMPLING})
            assert answer.status == 200, answer.content
            assert two.exchange("GET", f"/media/{digest(SUN)}").status == 503
            server.start()
            until(lambda: two.exchange("POST", *asked[0]).status == 200, "the store is back")
            for path, body in asked:
                answer = two.exchange("POST", path, body)
                assert answer.status == 200, (path, answer.content)
            assert two.exchange("GET", f"/media/{digest(SUN)}").status == 404


def test_what_the_store_has_forgotten_is_written_again_with_its_pictures(store: StoreConfig) -> None:
    """The conversations go on at a router that still has them: a session, and a text."""
    assert store.url is not None
    with product(store) as served:
        name = str(ok(served, "/sessions", {})["session_id"])
        messages = [user(CAT)]
        messages.append(turn(served, name, messages))
        text = f"Text: {IMAGE}"
        body: Json = {"image_data": [data_url(DOG)], "sampling_params": {"max_new_tokens": 5}}
        text += served.generate(body | {"text": text}).record.text
        assert status("prune", "--store", store.url, "--unused-for", "2100-01-01", "--unretrieved") == 0
        assert status("stats", "--store", store.url) == 0
        turn(served, name, [*messages, user(SUN)])
        text += " more"
        text += served.generate(body | {"text": text}).record.text
    with product(store) as served:
        for content in (CAT, DOG, SUN):
            assert served.exchange("GET", f"/media/{digest(content)}").content == content
        (found,) = served.get(f"/sessions/{name}/trajectories?media=inline").json()["trajectories"]
        check(found, [CAT, SUN])
        check(ok(served, "/retrieve_from_text?media=inline", {"text": text, "image_data": [digest(DOG)]}), [DOG])
    assert status("verify", "--store", store.url) == 0


def test_what_redis_has_lost_is_written_again_with_its_pictures(tmp_path: Path) -> None:
    """It was emptied under a router that still has everything."""
    with redis_server(tmp_path) as server:
        store = StoreConfig(url=f"redis://127.0.0.1:{server.port}/0", spool=str(tmp_path / "spool"))
        with product(store) as served:
            name = str(ok(served, "/sessions", {})["session_id"])
            messages = [user(CAT)]
            messages.append(turn(served, name, messages))
            text = f"Text: {IMAGE}"
            body: Json = {"image_data": [data_url(DOG)], "sampling_params": {"max_new_tokens": 5}}
            text += served.generate(body | {"text": text}).record.text
            server.say("FLUSHALL")
            turn(served, name, [*messages, user(SUN)])
            # A router that ends before has lost with the server what is of its tree alone.
            waiting = ("tito_store_away 0", "tito_store_waiting 0")
            until(lambda: all(one in served.get("/metrics").content.decode() for one in waiting), "written again")
        with product(store) as served:
            for content in (CAT, DOG, SUN):
                assert served.exchange("GET", f"/media/{digest(content)}").content == content
            (found,) = served.get(f"/sessions/{name}/trajectories?media=inline").json()["trajectories"]
            check(found, [CAT, SUN])
