"""Salts: after an update no request reads what older weights have computed, unless its mode lets it.

The judge is the worker's own cache: `cached_tokens` of its replies. An update here leaves that cache as it is, as an update in
place does at engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import AbortConfig, StoreConfig
from router.generate import fleet
from router.peers.channel import FleetChannel
from router.peers.control_log import ControlLog
from tests.support.agents import user
from tests.support.asking import Asking, calls, settle, until
from tests.support.chat_models import chat_model
from tests.support.lives import Router
from tests.support.stack import Stack, stack
from worker.worker import EmbeddedWorker

Json = dict[str, Any]
MODES = ("off", "version", "rollout")


def sampled(tokens: int = 4) -> Json:
    return {"max_new_tokens": tokens, "temperature": 0}


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def started(request: pytest.FixtureRequest) -> Iterator[Stack]:
    given: Json = {"interface": request.param, "prefix_cache": True}
    with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3"), **given) as made:
        yield made


@pytest.fixture
def served(started: Stack) -> Iterator[Stack]:
    update(started, "1")
    assert started.post("/flush_cache", {}).status == 200
    yield started
    settle(started)
    assert not started.workers[0].out_of_range


def update(stack: Stack, version: str) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    assert stack.post("/update_weight_version", body).status == 200


def say(stack: Stack, text: str, mode: str | None, **more: Any) -> tuple[str, int, Json]:
    """Return the text with its reply, the tokens that the cache had, and the body that the worker got."""
    headers = {"x-kv-salt": mode} if mode else {}
    body = {"text": text, "sampling_params": sampled(), **more}
    reply = stack.generate(body, headers=headers)
    last = reply.body[-1] if more.get("stream") else reply.body
    return text + last["text"], last["meta_info"]["cached_tokens"], reply.records[-1].body


def salt_of(body: Json) -> str | None:
    """The salt that a worker was sent, in either engine's field."""
    found = body.get("extra_key") or body.get("cache_salt")
    assert found is None or isinstance(found, str)
    return found


def kv_versions(stack: Stack, text: str) -> list[str | None]:
    return [turn["kv_version"] for turn in stack.retrieve(text)["turns"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_over_an_update_reads_what_its_mode_lets_it(served: Stack, mode: str, stream: bool) -> None:
    begin = f"Once upon a time in {mode} {stream}: a long beginning of a conversation, of some tokens."
    first, cached, _ = say(served, begin, mode, stream=stream)
    second, again, _ = say(served, f"{first} And then?", mode, stream=stream)
    assert cached == 0 < again
    update(served, "2")
    third, after, _ = say(served, f"{second} And then?", mode, stream=stream)
    assert (after > 0) == (mode != "version")
    _, new, _ = say(served, begin, mode, stream=stream)
    if mode != "version":  # there the new weights have computed it by now
        assert (new > 0) == (mode == "off"), "a new conversation reads nothing that older weights have computed"
    fourth, last, _ = say(served, f"{third} And then?", mode, stream=stream)
    assert last > again
    told = {"off": [None] * 4, "version": ["1", "1", "2", "2"], "rollout": ["1"] * 4}
    assert kv_versions(served, fourth) == told[mode]
    assert [turn["version"] for turn in served.retrieve(fourth)["turns"]] == ["1", "1", "2", "2"]


def test_a_conversation_may_change_its_mode(served: Stack) -> None:
    first, _, _ = say(served, "A conversation that begins without a salt, as most do.", "off")
    update(served, "2")
    second, _, _ = say(served, first + " b", "version")
    update(served, "3")
    third, _, _ = say(served, second + " c", "rollout")
    assert kv_versions(served, third) == [None, "2", "1"], "it began under 1"


def test_staleness_counts_what_was_sampled_behind_an_old_cache(served: Stack) -> None:
    first, _, _ = say(served, "A conversation over three versions of the weights, of some tokens.", "rollout")
    update(served, "2")
    second, _, _ = say(served, first + " b", "rollout")
    update(served, "3")
    third, _, _ = say(served, second + " c", "rollout")

    def stale(most: int, **more: bool) -> int:
        found: int = served.retrieve(third, max_staleness=most, **more)["stale_tokens"]
        return found

    assert [stale(most) for most in (0, 1, 2)] == [8, 4, 0]
    assert [stale(most, kv_staleness=True) for most in (0, 1, 2)] == [12, 12, 0]
    strict = served.post(
        "/retrieve_from_text", {"text": third, "max_staleness": 1, "kv_staleness": True, "strict": True}
    )
    assert (strict.status, strict.json()["error"]["stale_tokens"]) == (409, 12)
    assert served.post("/retrieve_from_text", {"text": third, "kv_staleness": True}).status == 400


def test_forks_keep_the_version_with_which_their_conversation_began(served: Stack) -> None:
    first, _, _ = say(served, "The trunk of a conversation that is to fork after its first turn.", "rollout")
    update(served, "2")
    left, _, _ = say(served, first + " left", "rollout")
    right, _, _ = say(served, first + " right", "rollout")
    assert kv_versions(served, left) == kv_versions(served, right) == ["1", "1"]


def test_a_batch_has_a_salt_for_each_conversation(served: Stack) -> None:
    old, _, _ = say(served, "One of two, which began early.", "rollout")
    update(served, "2")
    (worker,) = served.workers
    before = len(worker.log)
    asked = {"text": [old + " x", "The other, which begins now."], "sampling_params": {**sampled(), "temperature": 1.0}}
    answer = served.post("/generate", asked | {"sampling_params": {"max_new_tokens": 4, "n": 2}}, headers=rollout())
    assert answer.status == 200, answer.content
    records = worker.log[before:]
    texts = asked["text"]
    for number, (text, told) in enumerate(((texts[0], "1"), (texts[1], "2"))):
        for sample in range(2):
            whole = text + answer.json()[2 * number + sample]["text"]
            assert kv_versions(served, whole)[-1] == told
    assert len(records) == 4
    if isinstance(records[0].body.get("extra_key"), list):
        assert len(set(records[0].body["extra_key"])) == 2
    else:
        assert len({record.body["cache_salt"] for record in records}) == 2


def rollout() -> dict[str, str]:
    return {"x-kv-salt": "rollout"}


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_a_clients_own_key_is_kept_and_combined(served: Stack, field: str) -> None:
    text = f"A prompt that two clients with {field} of their own send, of several tokens."
    salts = set()
    for own in ({}, {field: "mine"}, {field: "yours"}):
        _, cached, body = say(served, text, "version", **own)
        assert cached == 0, own
        shown = str(body.get("extra_key")) + str(body.get("cache_salt"))
        assert all(value in shown for value in own.values())
        salts.add(shown)
    assert len(salts) == 3
    assert say(served, text, "version", **{field: "mine"})[1] > 0
    assert say(served, text, "off", **{field: "mine"})[2][field if "extra_key" in body else "cache_salt"] == "mine"


@pytest.mark.parametrize("own", ["a/b", "x" * 500, "ä@\\\0"])
def test_no_salt_is_one_that_an_engine_refuses(served: Stack, own: str) -> None:
    text = "The same prompt for clients with strange keys of their own, of several tokens."
    assert say(served, text, "version", extra_key=own)[1] == 0
    assert say(served, text, "version", extra_key=own)[1] > 0
    assert say(served, text, "version", extra_key=own + "!")[1] == 0


def test_parts_of_a_salt_are_never_taken_for_others(served: Stack) -> None:
    """The client's key looks like what the router writes."""
    salts = set()
    for version, own in (("1", "v1:2"), ("1;k4:v1:2", ""), ("1", ""), ("1", "k")):
        update(served, version)
        salts.add(salt_of(say(served, "Some prompt.", "version", extra_key=own)[2]))
    assert len(salts) == 4


@pytest.mark.parametrize("value", ["", "Version", "on", "version,rollout", "1"])
def test_another_word_is_refused(served: Stack, value: str) -> None:
    body = {"text": "hi", "sampling_params": sampled()}
    chat = {"model": "m", "messages": [user("hi")]}
    for path, asked in (("/generate", body), ("/v1/chat/completions", chat)):
        answer = served.post(path, asked, headers={"x-kv-salt": value})
        assert (answer.status, "x-kv-salt" in answer.content.decode()) == (400, True)
        assert answer.json()["error"]["code"] == "kv_salt_invalid"


@pytest.mark.parametrize("own", [5, ["a"], {"a": 1}])
def test_a_key_with_which_nothing_can_be_combined_is_refused(served: Stack, own: Any) -> None:
    body = {"text": "hi", "sampling_params": sampled(), "extra_key": own}
    answer = served.post("/generate", body, headers={"x-kv-salt": "version"})
    assert answer.status == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("kv_salt_invalid", "extra_key")


def chat(stack: Stack, path: str, messages: list[Json], mode: str, **more: Any) -> tuple[Json, int, Json]:
    (worker,) = stack.workers
    body = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, **more}
    answer = stack.post(f"{path}/v1/chat/completions", body, headers={"x-kv-salt": mode})
    assert answer.status == 200, answer.content
    usage = answer.json()["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer.json()["choices"][0]["message"], cached, worker.log[-1].body


@pytest.mark.parametrize("mode", MODES)
def test_a_session_over_an_update(served: Stack, mode: str) -> None:
    made = served.post("/sessions", {}).json()["session_id"]
    path = f"/sessions/{made}"
    messages = [user(f"Tell me of {mode}, and take your time, for this is a long question.")]
    salts = []
    for version in ("1", "1", "2", "2", "3"):
        update(served, version)
        said, _, body = chat(served, path, messages, mode)
        salts.append(salt_of(body))
        messages += [said, user("go on")]
    told: Json = {"off": [None] * 5, "version": ["1", "1", "2", "2", "3"], "rollout": ["1"] * 5}
    answer = served.post(f"{path}/finalize", {"reward": 1.0})
    assert answer.status == 200, answer.content
    (trajectory,) = answer.json()["trajectories"]
    assert [turn["kv_version"] for turn in trajectory["turns"]] == told[mode]
    assert len(set(salts)) == len(set(told[mode]))
    assert (None in salts) == (mode == "off")


def test_a_new_conversation_in_a_session_is_of_the_session(served: Stack) -> None:
    made = served.post("/sessions", {}).json()["session_id"]
    _, _, first = chat(served, f"/sessions/{made}", [user("the task")], "rollout")
    update(served, "2")
    _, _, other = chat(served, f"/sessions/{made}", [user("what a helper is asked")], "rollout")
    assert salt_of(first) == salt_of(other)


def test_a_chat_without_a_session_keeps_its_version(served: Stack) -> None:
    messages = [user("a chat in the open, over an update of the weights")]
    said, _, first = chat(served, "", messages, "rollout")
    update(served, "2")
    _, _, second = chat(served, "", [*messages, said, user("b")], "rollout")
    _, _, new = chat(served, "", [user("another chat")], "rollout")
    assert salt_of(first) == salt_of(second) != salt_of(new)


def test_completions_have_a_salt(served: Stack) -> None:
    body = {"prompt": "hi", "max_tokens": 4}
    assert served.post("/v1/completions", body, headers={"x-kv-salt": "version"}).status == 200
    assert salt_of(served.workers[0].log[-1].body) is not None


@pytest.mark.parametrize("mode", ["version", "rollout"])
@pytest.mark.parametrize(
    "version", ["default", "007", "", " ", "a b", "x" * 1024, "\N{GRINNING FACE}\n\0", "null", "1e3", "9" * 20]
)
def test_any_string_is_a_version(served: Stack, version: str, mode: str) -> None:
    text = f"A conversation that begins under the version {version[:9]!r}, and goes on."
    say(served, text, mode)
    update(served, version)
    first, cached, _ = say(served, text, mode)
    assert cached == 0, "it begins anew: another version has computed what is cached"
    second, more, _ = say(served, f"{first} On.", mode)
    assert more > 0
    update(served, "2")
    third, _, _ = say(served, f"{second} On.", mode)
    assert [turn["version"] for turn in served.retrieve(third)["turns"]] == [version, version, "2"]
    assert kv_versions(served, third) == [version, version, "2" if mode == "version" else version]


# -- while no version is that of all ------------------------------------------------------------------------------------


def test_in_a_pause_a_request_shares_its_cache_with_nobody(served: Stack) -> None:
    """It runs after the pause, perhaps with other weights."""
    text = "A prompt that is sent before, in, and after a pause, of several tokens."
    whole, _, _ = say(served, text, "version")
    assert served.post("/pause_generation", {"mode": "retract"}).status == 200
    asked = {"text": text, "sampling_params": sampled()}
    asking = Asking(served.url, asked, headers={"x-kv-salt": "version"})
    until(lambda: served.workers[0].in_flight)
    update(served, "2")
    assert served.post("/continue_generation", {}).status == 200
    reply = asking.answer().json()
    assert reply["meta_info"]["cached_tokens"] == 0
    assert kv_versions(served, text + reply["text"]) == ["2"], "its own weights computed its prompt"
    assert say(served, text, "version")[1] == 0, "nobody knows what weights computed what it left"
    assert say(served, text, "version")[1] > 0
    assert whole


@pytest.mark.parametrize(
    ("begins", "ends"), [("/pause?mode=keep&clear_cache=false", "/resume"), ("/sleep?level=0", "/wake_up")]
)
def test_in_a_pause_by_vllms_own_calls_too(begins: str, ends: str) -> None:
    """With `clear_cache=false`, and asleep at level 0, the worker keeps what older weights have computed."""
    given: Json = {"interface": "vllm", "prefix_cache": True, "kv_salt": {"mode": "version"}}
    with stack("qwen", styles=("cumulative",), **given) as served:
        update(served, "1")
        text = "A prompt that is sent before, in, and after a pause, of several tokens."
        say(served, text, None)
        assert say(served, text, None)[1] > 0
        assert served.post(begins, {}).status == 200
        asking = Asking(served.url, {"text": text, "sampling_params": sampled()})
        until(lambda: served.workers[0].in_flight)
        update(served, "2")
        assert served.post(ends, {}).status == 200
        reply = asking.answer().json()
        assert reply["meta_info"]["cached_tokens"] == 0
        assert kv_versions(served, text + reply["text"]) == ["2"], "its own weights computed its prompt"
        assert [say(served, text, None)[1] > 0 for _ in range(2)] == [False, True]
        settle(served)


SLEEPS = [
    ("/sleep?level=1", {}, "/wake_up?tags={tag}", lambda _: {}),
    ("/release_memory_occupation", {}, "/resume_memory_occupation", lambda tag: {"tags": [tag]}),
]


@pytest.mark.parametrize(("begins", "given", "ends", "part"), SLEEPS)
def test_a_worker_that_is_awake_in_part_is_paused(
    begins: str, given: Json, ends: str, part: Callable[[str], Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's take their weights back, get new ones, and then take their cache back. All routers of a store know it.

    They know it when a call is answered, also where they hear of it late.
    """

    async def late(log: ControlLog, channel: FleetChannel, seconds: float) -> None:
        await wait(log, channel, seconds)
        await asyncio.sleep(0.1)

    wait = ControlLog.wait
    monkeypatch.setattr(ControlLog, "wait", late)
    monkeypatch.setattr(fleet, "MOMENT", 30.0)
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
    with (
        EmbeddedWorker(chat_model("qwen3"), interface="vllm", prefix_cache=True) as worker,
        running(worker, store, chat_model("qwen3")) as one,
        running(worker, store, chat_model("qwen3")) as other,
    ):
        update(one, "1")
        text = "A prompt that is sent before, in, and after a sleep, of several tokens."
        say(one, text, "version")
        assert say(other, text, "version")[1] > 0
        assert one.post(begins, given).status == 200
        assert one.post(ends.format(tag="weights"), part("weights")).status == 200
        asked = {"text": text, "sampling_params": sampled()}
        asking = [Asking(router.url, asked, headers={"x-kv-salt": "version"}) for router in (one, other)]
        until(lambda: worker.in_flight == 2)
        update(one, "2")
        assert worker.in_flight == 2
        assert one.post(ends.format(tag="kv_cache"), part("kv_cache")).status == 200
        for router, asks in zip((one, other), asking, strict=True):
            reply = asks.answer().json()
            assert reply["meta_info"]["cached_tokens"] == 0
            assert kv_versions(router, text + reply["text"]) == ["2"], "its own weights computed its prompt"
        assert [say(router, text, "version")[1] > 0 for router in (one, other)] == [False, True]


def test_while_an_update_is_on_its_way_a_request_shares_its_cache_with_nobody() -> None:
    """The worker may have the new weights already, or not yet."""
    with stack("qwen", styles=("cumulative",), prefix_cache=True, kv_salt={"mode": "version"}) as served:
        (worker,) = served.workers
        update(served, "1")
        text = "A prompt that is sent before and during an update, of several tokens."
        say(served, text, None)
        assert say(served, text, None)[1] > 0
        worker.hold(2)
        held = Asking(served.url, {"text": "This one holds the update up.", "sampling_params": sampled()})
        until(lambda: worker.in_flight)
        body = {"model_path": "x", "weight_version": "2", "flush_cache": False}
        updating = Asking(served.url, body, path="/update_weights_from_disk")
        until(lambda: calls(worker, "/update_weights_from_disk"))
        asking = Asking(served.url, {"text": text, "sampling_params": sampled()})
        until(lambda: worker.in_flight == 2)
        worker.release()
        assert updating.answer().status == held.answer().status == 200
        assert asking.answer().json()["meta_info"]["cached_tokens"] == 0
        assert say(served, text, None)[1] == 0, "what it left is nobody's"
        assert say(served, text, None)[1] > 0
        settle(served)


def test_a_pause_that_somebody_else_ended_is_over(served: Stack) -> None:
    assert served.post("/pause_generation", {"mode": "retract"}).status == 200
    served.workers[0]._engine_call(served.workers[0]._engine.resume)
    text = "A prompt after a pause that no router ended, of several tokens."
    assert say(served, text, "version")[1] == 0
    assert say(served, text, "version")[1] == 0
    assert say(served, text, "version")[1] > 0


@pytest.fixture(scope="module")
def two() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",) * 2, prefix_cache=True, kv_salt={"mode": "version"}) as made:
        yield made


def test_workers_of_different_versions_share_nothing(two: Stack) -> None:
    """One of them did not take the update: what it computes must not be read as that of the new weights."""
    one, other = two.workers
    update(two, "1")
    for _ in range(2):
        say(two, "Both reply, and show that they have the first version.", None)
    other.kill()
    answer = two.post("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
    assert answer.status == 207
    other.restart()
    until(lambda: len([w for w in two.get("/workers").json()["workers"] if w["state"] == "healthy"]) == 2)
    other.set_weight_version("1")
    until(lambda: {w["weight_version"] for w in two.get("/workers").json()["workers"]} == {"1", "2"})
    text = "A prompt for a divided fleet, of several tokens, sent to both."
    for _ in range(4):
        assert say(two, text, None)[1] == 0
    update(two, "3")
    assert [say(two, text, None)[1] > 0 for _ in range(4)] == [False, False, True, True]
    assert one.weight_version == other.weight_version == "3"
    counted = two.get("/metrics").content.decode()
    assert 'tito_router_kv_salts_total{salt="own"} 4.0' in counted


def test_workers_that_are_updated_past_the_router_are_of_one_version_again(two: Stack) -> None:
    """As soon as each has replied. Until then nobody knows which of them have the new weights."""
    update(two, "7")
    text = "A prompt for a fleet whose trainer talks to each worker, of several tokens."
    assert [say(two, text, None)[1] > 0 for _ in range(4)] == [False, False, True, True]
    for worker in two.workers:
        worker.set_weight_version("8")
    found = [say(two, text, None) for _ in range(6)]
    assert [cached > 0 for _, cached, _ in found[2:]] == [False, False, True, True]
    assert "o32:" not in str(found[-1][2])
    update(two, "9")
    assert [say(two, text, None)[1] > 0 for _ in range(4)] == [False, False, True, True]


def test_an_aborted_generation_is_sent_again_with_the_salt_of_then() -> None:
    abort = AbortConfig(attempts=5, wait=0.01)
    given: Json = {"prefix_cache": True, "kv_salt": {"mode": "version"}}
    with stack("qwen", styles=("cumulative",), abort=abort, **given) as served:
        (worker,) = served.workers
        update(served, "1")
        text = "A prompt whose generation its worker aborts after an update, of several tokens."
        say(served, text, None)
        worker.hold(2)
        asking = Asking(served.url, {"text": text, "sampling_params": sampled()})
        until(lambda: worker.in_flight)
        worker.wait_for_arrivals(1)
        update(served, "2")
        abort_all = Asking(worker.url, {"abort_all": True}, path="/abort_request")
        assert abort_all.answer().status == 200
        worker.release()
        reply = asking.answer().json()
        salts = [record.body["extra_key"] for record in worker.log]
        assert reply["meta_info"]["finish_reason"]["type"] != "abort"
        assert reply["meta_info"]["cached_tokens"] == 0
        assert len(salts) == 3
        assert salts[0] == salts[1] != salts[2]
        settle(served)


# -- who else -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "rollout"])
def test_tenants_share_nothing_where_they_are_not_to(mode: str) -> None:
    given: Json = {"prefix_cache": True, "kv_salt": {"mode": mode, "tenants": True}}
    keys = ("ada:one", "bob:two")
    with stack("qwen", styles=("cumulative",), server={"api_keys": keys}, **given) as served:
        text = "What both tenants ask, of several tokens."
        found = []
        for key in ("one", "two", "one", "two"):
            headers = {"authorization": f"Bearer {key}", "x-kv-salt": "off"}
            answer = served.post("/generate", {"text": text, "sampling_params": sampled()}, headers=headers)
            assert answer.status == 200, answer.content
            found.append(answer.json()["meta_info"]["cached_tokens"] > 0)
        assert found == [False, False, True, True]


@contextlib.contextmanager
def running(worker: EmbeddedWorker, store: StoreConfig, folder: Path) -> Iterator[Stack]:
    router = Router(worker, store, folder=folder)
    try:
        yield router.stack
    finally:
        router.stop()


def test_another_router_goes_on_with_the_version_and_so_does_the_same_after_a_restart(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path / 'store'}")
    folder = chat_model("qwen3")
    text = "A conversation that two routers have, over an update."
    with EmbeddedWorker(folder, prefix_cache=True) as worker:
        worker.set_weight_version("1")
        path, messages = "", [user("a session at two routers")]
        for number, version in enumerate(("1", "2", "3")):
            worker.set_weight_version(version)
            with running(worker, store, folder) as router:
                assert router.post("/update_weight_version", {"new_version": version}).status == 200
                body = {"text": text, "sampling_params": sampled()}
                answer = router.post("/generate", body, headers=rollout())
                assert answer.status == 200, answer.content
                assert (answer.json()["meta_info"]["cached_tokens"] > 0) == (number > 0)
                text += answer.json()["text"] + " more"
                path = path or f"/sessions/{router.post('/sessions', {}).json()['session_id']}"
                asked = {"model": "m", "messages": messages, "max_tokens": 4}
                said = router.post(f"{path}/v1/chat/completions", asked, headers=rollout())
                assert said.status == 200, said.content
                messages += [said.json()["choices"][0]["message"], user("on")]
                assert kv_versions(router, text) == ["1"] * (number + 1)
                (trajectory,) = router.get(f"{path}/trajectories").json()["trajectories"]
                assert [turn["kv_version"] for turn in trajectory["turns"]] == ["1"] * (number + 1)
        assert len({record.body["extra_key"] for record in worker.log}) == 1


def test_both_legs_of_a_request_have_the_same_salt() -> None:
    given: Json = {"prefix_cache": True, "kv_salt": {"mode": "version"}}
    with stack("qwen", styles=("cumulative",), apart=True, **given) as served:
        update(served, "1")
        for body in ({"sampling_params": sampled()}, {"sampling_params": {"max_new_tokens": 4, "n": 2}}):
            asked = {"text": "A prompt that one worker prefills and another one goes on with.", **body}
            assert served.post("/generate", asked).status == 200
        legs = [[record.body["extra_key"] for record in one.log] for one in (*served.prefills, *served.workers)]
        assert legs[0] == legs[1]
        assert len(set(legs[0])) == 1
        settle(served)


def test_claims_leave_out_what_was_sampled_behind_an_old_cache(served: Stack) -> None:
    """It waited at its worker over two updates: its tokens are new, what it read of the cache may be old."""
    (worker,) = served.workers
    space = {"x-radix-namespace": "claims"}
    worker.hold(0)
    body = {"text": "A prompt that waits at its worker.", "sampling_params": sampled()}
    headers = {**space, "x-group-id": "kept", "x-rollout-id": "one", "x-rollout-end": "true", "x-kv-salt": "version"}
    asking = Asking(served.url, body, headers=headers)
    until(lambda: worker.in_flight)
    update(served, "2")
    update(served, "3")
    worker.release()
    assert asking.answer().status == 200

    def claimed(**more: Any) -> int:
        answer = served.post("/trajectories/claim", {"allow_partial": True, **more}, headers=space)
        assert answer.status == 200, answer.content
        found = answer.json()
        for sample in found["samples"]:
            (trajectory,) = sample["trajectories"]
            assert [(turn["version"], turn["kv_version"]) for turn in trajectory["turns"]] == [("3", "1")]
            done = {"claim_id": found["claim_id"]}
            assert served.post("/trajectories/release", done, headers=space).status == 200
        return len(found["samples"])

    assert claimed(max_staleness=0) == 1
    assert [claimed(max_staleness=most, kv_staleness=True) for most in (0, 1, 2)] == [0, 0, 1]
    assert served.post("/trajectories/claim", {"kv_staleness": True}).status == 400
