"""Groups, rewards and claims over HTTP: what a trainer's buffer sees, without a store and with one."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.client import Client, Conversation, RefusedError, Session
from middleware_hub.store.sqlite.file import connect
from middleware_hub.trajectories import claims
from router.config import StoreConfig
from tests.support.asking import until
from tests.support.client import call
from tests.support.programs import Program
from tests.support.stack import Stack, stack
from tests.support.usual import usual
from tests.support.vocabularies import vocabulary

Json = dict[str, Any]


@pytest.fixture(scope="module", params=usual(["memory", "sqlite"], "sqlite"))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("store")
    store = StoreConfig(url=f"sqlite:{folder}/store.sqlite3") if request.param == "sqlite" else None
    with stack("qwen", store=store) as running:
        yield running


@dataclass
class Buffer:
    """One namespace, as workflows and trainers use it."""

    served: Stack
    space: str = field(default_factory=lambda: uuid.uuid4().hex)

    def call(self, path: str, body: Json, status: int = 200, **headers: str) -> Any:
        sent = {"x-radix-namespace": self.space, **{name.replace("_", "-"): value for name, value in headers.items()}}
        answer = self.served.post(path, body, headers=sent)
        assert answer.status == status, (answer.status, answer.content)
        return answer.json()

    def say(self, text: str | list[str], group: str, n: int = 1, **headers: str) -> Any:
        body = {"text": text, "sampling_params": {"max_new_tokens": 8, **({"n": n} if n > 1 else {})}}
        return self.call("/generate", {**body, "return_logprob": True}, x_group_id=group, **headers)

    def reward(self, reply: Json, reward: float | None = 1.0, status: int = 200, **more: Any) -> Any:
        return self.call("/trajectories/reward", {"request_id": name_of(reply), "reward": reward, **more}, status)

    def claim(self, status: int = 200, **fields: Any) -> Any:
        return self.call("/trajectories/claim", fields, status)

    def acknowledge(self, claim: Json, status: int = 200) -> Any:
        return self.call("/trajectories/ack", {"claim_id": claim["claim_id"]}, status)

    def release(self, claim: Json, status: int = 200) -> Any:
        return self.call("/trajectories/release", {"claim_id": claim["claim_id"]}, status)

    def group(self, name: str, status: int = 200) -> Any:
        answer = self.served.exchange("GET", f"/trajectories?group={name}", None, {"x-radix-namespace": self.space})
        assert answer.status == status, answer.content
        return answer.json()


@pytest.fixture
def buffer(served: Stack) -> Buffer:
    return Buffer(served)


def name_of(reply: Json) -> str:
    return str(reply["meta_info"]["id"])


def ids(found: Mapping[str, Any]) -> list[str]:
    return [one["id"] for one in found["samples"]]


def check(sample: Json, prompt: str, *replies: Json) -> None:
    """A sample is what `/retrieve_from_text` would give for its text, and its replies have mask 1."""
    (found,) = sample["trajectories"]
    logprobs = [pair[0] for reply in replies for pair in reply["meta_info"]["output_token_logprobs"]]
    sampled = [token for reply in replies for token in reply["output_ids"]]
    assert [token for token, one in zip(found["tokens"], found["loss_mask"], strict=True) if one] == sampled
    assert [p for p, one in zip(found["rollout_logp"], found["loss_mask"], strict=True) if one] == logprobs
    assert found["exact"] is sample["exact"] is True
    assert found["response"].startswith(prompt)
    assert [turn["request_id"] for turn in found["turns"]] == [name_of(reply) for reply in replies]


def test_a_group_is_handed_out_once(buffer: Buffer) -> None:
    replies = buffer.say("Question: why?", "g", n=3, x_group_size="3")
    assert buffer.claim()["samples"] == []
    for number, reply in enumerate(replies[:2]):
        buffer.reward(reply, number)
    assert buffer.claim()["claim_id"] is None
    buffer.reward(replies[2], 2, reward_info={"why": "right"})
    claim = buffer.claim()
    assert claim["groups"] == [
        {"group_id": "g", "size": 3, "samples": 3, "partial": False, "acknowledged_before": 0},
    ]
    for reply, sample in zip(replies, claim["samples"], strict=True):
        check(sample, "Question: why?", reply)
        assert sample["group_id"] == "g"
    assert [sample["reward"] for sample in claim["samples"]] == [0, 1, 2]
    assert claim["samples"][2]["reward_info"] == {"why": "right"}
    assert buffer.claim()["samples"] == []
    assert [one["state"] for one in buffer.group("g")["samples"]] == ["claimed"] * 3
    assert buffer.acknowledge(claim)["acknowledged"] == 3
    assert buffer.acknowledge(claim)["acknowledged"] == 3
    assert buffer.claim()["samples"] == []
    buffer.group("g", 404)
    assert buffer.release(claim, 409)["error"]["type"] == "claim_over"


@pytest.mark.parametrize("lost", ["an answer", "a sibling"])
def test_a_reply_that_its_client_does_not_have_takes_no_tokens_of_another_sample(buffer: Buffer, lost: str) -> None:
    """It was sampled, and its answer was lost; or one of two was not gone on with. It gets no reward, and no trainer."""
    for number in range(2):
        prompt = f"Question {number}: why?"
        first = buffer.say(prompt, "g", x_group_size="2")
        text = f"{prompt}{first['text']}\nAnd?"
        several = buffer.say(text, "g", n=2) if lost == "a sibling" else [buffer.say(text, "g") for _ in range(2)]
        last = buffer.say(f"{text}{several[1]['text']}\nSo?", "g", x_radix_parent=name_of(several[1]))
        buffer.reward(last)
    claim = buffer.claim()
    assert [len(sample["trajectories"]) for sample in claim["samples"]] == [1, 1]
    for sample in claim["samples"]:
        (found,) = sample["trajectories"]
        assert sample["exact"]
        assert sum(found["loss_mask"]) == 3 * 8
        assert len(found["turns"]) == 3


def counted(buffer: Buffer) -> dict[str, float]:
    """What the router says of groups, by the last word of each series."""
    lines = buffer.served.get("/metrics").content.decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith("tito_groups_")]
    return {name.removeprefix("tito_groups_").rstrip('"}').rpartition('"')[2]: float(value) for name, value in found}


def test_the_course_of_groups_is_counted(buffer: Buffer) -> None:
    before = counted(buffer)
    assert before["claimed"] >= 0, "the series are there from the start"
    replies = [*buffer.say("Question: why?", "g", n=2, x_group_size="2"), *buffer.say("And?", "left", n=3)]
    for reply in replies[:2]:
        buffer.reward(reply)
    buffer.release(buffer.claim())
    claim = buffer.claim(lease_seconds=0.001)
    again = buffer.claim(wait_seconds=20)
    assert ids(again) == ids(claim)
    held = counted(buffer)
    buffer.acknowledge(again)
    buffer.acknowledge(again)
    buffer.call("/trajectories/drop", {"group_id": "left"})
    now = counted(buffer)
    course = {
        "joined": 5,
        "claimed": 6,
        "released": 2,
        "expired": 2,
        "acknowledged": 2,
        "dropped": 3,
        "lost": 0,
        "evicted": 0,
    }
    assert {name: now[name] - before[name] for name in course} == course
    assert (held["waiting"] - before["waiting"], held["waiting_members"] - before["waiting_members"]) == (2, 5)
    assert (now["waiting"], now["waiting_members"]) == (before["waiting"], before["waiting_members"])


def test_the_trajectory_is_that_of_its_text(buffer: Buffer) -> None:
    reply = buffer.say("A text to look up", "g", x_group_size="1", x_rollout_end="true")
    (sample,) = buffer.claim()["samples"]
    found = buffer.call("/retrieve_from_text", {"text": "A text to look up" + reply["text"]})
    assert sample["trajectories"] == [found]
    assert sample["reward"] is None


def test_turns_that_continue_each_other_are_one_sample(buffer: Buffer) -> None:
    prompt = "Turn by turn: "
    first = buffer.say(prompt, "g", x_group_size="2")
    text = prompt + first["text"] + " and then "
    second, third = buffer.say(text, "g"), buffer.say(text + "again ", "g")
    buffer.reward(first, 0.5)
    assert buffer.claim()["samples"] == []  # the first reply was continued: its reward is not the rollout's
    buffer.reward(second, 1)
    buffer.reward(third, 2)
    one, two = buffer.claim()["samples"]
    check(one, prompt, first, second)
    assert (one["reward"], [each["reward"] for each in one["rewards"]]) == (1, [0.5, 1])
    (shared,) = two["trajectories"]
    assert [turn["request_id"] for turn in shared["turns"]] == [name_of(first), name_of(third)]
    assert sum(shared["loss_mask"]) == len(third["output_ids"])
    assert shared["reasons"] == []


def test_a_rollout_id_joins_what_a_loop_spread(buffer: Buffer) -> None:
    prompt = "A loop that strips: "
    first = buffer.say(prompt, "g", x_group_size="1", x_rollout_id="r")
    second = buffer.say(prompt + "something else ", "g", x_rollout_id="r")
    buffer.call("/trajectories/reward", {"group_id": "g", "rollout_id": "r", "reward": -1})
    (sample,) = buffer.claim()["samples"]
    assert (sample["rollout_id"], sample["reward"]) == ("r", -1)
    masked = [sum(one["loss_mask"]) for one in sample["trajectories"]]
    assert masked == [len(second["output_ids"]), len(first["output_ids"])]


def test_what_was_sampled_without_the_group_is_context(buffer: Buffer) -> None:
    body = {"text": "Before: ", "sampling_params": {"max_new_tokens": 8}}
    before = buffer.call("/generate", body)
    reply = buffer.say("Before: " + before["text"] + " now ", "g", x_group_size="1", x_rollout_end="1")
    (sample,) = buffer.claim()["samples"]
    (found,) = sample["trajectories"]
    assert sum(found["loss_mask"]) == len(reply["output_ids"])
    assert found["reasons"] == ["outside_group"]


def test_a_released_claim_is_handed_out_again(buffer: Buffer) -> None:
    buffer.say("Again ", "g", n=2, x_group_size="2", x_rollout_end="true")
    first = buffer.claim()
    assert buffer.release(first)["released"] == 2
    second = buffer.claim()
    assert ids(second) == ids(first)
    assert second["samples"] == first["samples"]
    assert buffer.acknowledge(first, 409)["error"]["type"] == "claim_over"
    assert buffer.acknowledge(second)["acknowledged"] == 2


def test_a_lease_that_is_over_is_handed_out_again(buffer: Buffer) -> None:
    buffer.say("Over ", "g", n=2, x_group_size="2", x_rollout_end="true")
    first = buffer.claim(lease_seconds=0.05)
    second = buffer.claim(wait_seconds=10)
    assert ids(second) == ids(first)
    error = buffer.acknowledge(first, 409)["error"]
    assert (error["type"], sorted(error["taken"]), error["acknowledged"]) == ("claim_over", sorted(ids(first)), 0)
    buffer.call("/trajectories/renew", {"claim_id": first["claim_id"]}, 409)
    assert buffer.acknowledge(second)["acknowledged"] == 2


def test_a_lease_that_is_over_may_be_acknowledged_as_long_as_nobody_has_it(buffer: Buffer) -> None:
    buffer.say("Late ", "g", x_group_size="1", x_rollout_end="true")
    claim = buffer.claim(lease_seconds=0.01)
    time.sleep(0.05)
    assert buffer.acknowledge(claim)["acknowledged"] == 1


def test_what_was_acknowledged_is_said_to_be(buffer: Buffer) -> None:
    buffer.reward(buffer.say("Mine: ", "mine", x_group_size="1"))
    claim = buffer.claim()
    buffer.acknowledge(claim)
    for what in "release", "renew":
        error = buffer.call(f"/trajectories/{what}", {"claim_id": claim["claim_id"]}, 409)["error"]
        assert (error["type"], error["acknowledged"]) == ("claim_over", 1)
        assert "was acknowledged" in error["message"]


def test_a_renewed_lease_goes_on(buffer: Buffer) -> None:
    buffer.say("Longer ", "g", x_group_size="1", x_rollout_end="true")
    claim = buffer.claim(lease_seconds=0.3)
    assert buffer.call("/trajectories/renew", {"claim_id": claim["claim_id"], "lease_seconds": 60})["samples"] == 1
    assert buffer.claim(wait_seconds=0.6)["samples"] == []
    assert buffer.acknowledge(claim)["acknowledged"] == 1


def test_partial_groups_are_said_to_be_partial(buffer: Buffer) -> None:
    first, second = buffer.say("Part ", "g", n=2, x_group_size="4")
    buffer.reward(first)
    assert buffer.claim()["waiting"] == {
        **{"groups": 1, "complete_samples": 1, "open_samples": 1, "claimed_samples": 0},
    }
    assert buffer.claim(allow_partial=True, partial_after_seconds=60)["samples"] == []
    claim = buffer.claim(allow_partial=True)
    assert (len(claim["samples"]), claim["groups"][0]["partial"]) == (1, True)
    buffer.acknowledge(claim)
    buffer.reward(second)
    rest = buffer.claim(allow_partial=True)
    assert (len(rest["samples"]), rest["groups"][0]["acknowledged_before"]) == (1, 1)


def test_a_claim_waits_for_news(buffer: Buffer, served: Stack) -> None:
    reply = buffer.say("Wait ", "g", x_group_size="1")
    later = threading.Timer(0.3, lambda: buffer.reward(reply))
    later.start()
    begun = time.monotonic()
    assert len(buffer.claim(wait_seconds=60)["samples"]) == 1
    assert time.monotonic() - begun < 30
    later.join()


def test_sizes_limits_and_several_groups(buffer: Buffer) -> None:
    groups = buffer.say(["One ", "Two ", "Three "], "a, b, c", n=2, x_rollout_end="true")
    assert len(groups) == 6
    assert buffer.claim()["samples"] == []  # nobody said how large a group is
    claim = buffer.claim(groups=2, group_size=2)
    assert [one["group_id"] for one in claim["groups"]] == ["a", "b"]
    assert [one["group_id"] for one in claim["samples"]] == ["a", "a", "b", "b"]
    rest = buffer.claim(limit=1, allow_partial=True)
    assert [one["group_id"] for one in rest["samples"]] == ["c"]


def test_filters_leave_out_and_say_so(buffer: Buffer, served: Stack) -> None:
    buffer.say("Stale ", "g", x_group_size="1", x_rollout_end="true", x_radix_parent="nobody")
    claim = buffer.claim(exact_only=True)
    assert (claim["samples"], claim["filtered"]) == ([], {"inexact": 1})
    (sample,) = buffer.claim()["samples"]
    assert sample["exact"] is False


def test_dropped_is_not_handed_out(buffer: Buffer) -> None:
    buffer.say("Drop ", "g", n=2, x_group_size="2", x_rollout_end="true")
    assert buffer.call("/trajectories/drop", {"group_id": "g"})["dropped"] == 2
    assert buffer.claim()["samples"] == []
    buffer.call("/trajectories/drop", {"group_id": "g"}, 404)


def test_what_was_dropped_when_the_lease_was_over_is_not_acknowledged(buffer: Buffer) -> None:
    """The trainer learns of it: it would train on what its run does not want."""
    for text in ("One", "Two"):
        buffer.say(text, "g", x_group_size="2", x_rollout_end="true")
    claim = buffer.claim(lease_seconds=0.05)
    until(lambda: {one["state"] for one in buffer.group("g")["samples"]} == {"complete"})
    assert buffer.call("/trajectories/drop", {"group_id": "g"})["dropped"] == 2
    details = buffer.acknowledge(claim, 409)["error"]
    assert (details["acknowledged"], sorted(details["taken"])) == (0, sorted(ids(claim)))


def test_a_chat_without_a_session_may_have_a_group(buffer: Buffer) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    reply = buffer.call("/v1/chat/completions", body, x_group_id="g", x_group_size="1")
    buffer.call("/trajectories/reward", {"request_id": reply["id"], "reward": 3})
    (sample,) = buffer.claim()["samples"]
    assert sample["reward"] == 3
    assert sum(sample["trajectories"][0]["loss_mask"]) == reply["usage"]["completion_tokens"]


def test_sessions_are_samples_of_their_group(buffer: Buffer) -> None:
    names = []
    for number in range(2):
        made = buffer.served.post(
            "/sessions", {}, headers={"x-group-id": "g", "x-group-size": "2", "x-radix-namespace": buffer.space}
        ).json()
        name = made["session_id"]
        names.append(name)
        chat = {"model": "m", "messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 8}
        buffer.call(f"/sessions/{name}/v1/chat/completions", chat)
    buffer.call(f"/sessions/{names[0]}/complete", {"reward_info": {"reward": 0.25}})
    assert buffer.claim()["samples"] == []
    buffer.call(f"/sessions/{names[1]}/reward_info", {"reward_info": {"score": 0.5}})
    exported = buffer.call(f"/sessions/{names[1]}/finalize", {})
    claim = buffer.claim()
    assert [(one["session_id"], one["reward"]) for one in claim["samples"]] == [(names[0], 0.25), (names[1], 0.5)]
    assert claim["samples"][1]["trajectories"] == exported["trajectories"]
    assert buffer.acknowledge(claim)["acknowledged"] == 2


def test_a_sample_that_is_a_session_says_which_adapter_sampled_it(buffer: Buffer) -> None:
    for number, adapters in enumerate((["x"], ["x", "x"], ["x", ""], [""])):
        headers = {"x-group-id": "g", "x-group-size": "4", "x-radix-namespace": buffer.space}
        name = buffer.served.post("/sessions", {"lora_path": "y"}, headers=headers).json()["session_id"]
        for turn, adapter in enumerate(adapters):
            asked = [{"role": "user", "content": f"Say {number}, {turn}"}]
            buffer.call(
                f"/sessions/{name}/v1/chat/completions", {"messages": asked, "max_tokens": 8, "lora_path": adapter}
            )
        buffer.call(f"/sessions/{name}/complete", {})
    samples = buffer.claim()["samples"]
    assert [one["lora_path"] for one in samples] == ["x", "x", None, ""]
    assert [one["lora_path"] for one in samples[2]["trajectories"]] == ["x", ""]


def test_a_deleted_session_is_not_handed_out(buffer: Buffer) -> None:
    headers = {"x-group-id": "g", "x-group-size": "1", "x-radix-namespace": buffer.space}
    name = buffer.served.post("/sessions", {}, headers=headers).json()["session_id"]
    buffer.call(f"/sessions/{name}/complete", {})
    assert buffer.served.exchange("DELETE", f"/sessions/{name}").status == 200
    assert buffer.claim()["samples"] == []


class Agent:
    """Sessions of given names in one group."""

    def __init__(self, buffer: Buffer, group: str, size: int) -> None:
        self._buffer = buffer
        self._headers = {"x-group-id": group, "x-group-size": str(size), "x-radix-namespace": buffer.space}

    def make(self, name: str, status: int = 201) -> None:
        answer = self._buffer.served.post("/sessions", {"session_id": name}, headers=self._headers)
        assert answer.status == status, answer.content

    def play(self, name: str) -> str:
        chat = {"model": "m", "messages": [{"role": "user", "content": f"Say {name}"}], "max_tokens": 8}
        said = self._buffer.call(f"/sessions/{name}/v1/chat/completions", chat)
        self._buffer.call(f"/sessions/{name}/complete", {})
        return str(said["choices"][0]["message"]["content"])

    def delete(self, name: str) -> None:
        assert self._buffer.served.exchange("DELETE", f"/sessions/{name}").status == 200


def test_a_session_made_again_under_its_name_is_a_sample(buffer: Buffer) -> None:
    first, second = (uuid.uuid4().hex for _ in range(2))
    agent = Agent(buffer, "g", 2)
    for name in (first, second, first):
        if name == first and buffer.served.get(f"/sessions/{first}").status == 200:
            agent.delete(first)
        agent.make(name)
        agent.play(name)
    assert {one["session_id"] for one in buffer.claim()["samples"]} == {first, second}


def test_a_session_made_again_is_not_that_which_a_trainer_has(buffer: Buffer) -> None:
    name, agent = uuid.uuid4().hex, Agent(buffer, "g", 1)
    agent.make(name)
    agent.play(name)
    before = buffer.claim()
    agent.delete(name)
    agent.make(name)
    agent.play(name)
    after = buffer.claim()
    assert ids(after) != ids(before)
    assert [one["session_id"] for one in after["samples"]] == [name]
    buffer.release(before)
    assert [one["id"] for one in buffer.claim()["lost"]] == ids(before), "its tokens went with the first session"
    assert buffer.acknowledge(after)["acknowledged"] == 1


def test_a_session_stays_in_its_group(buffer: Buffer) -> None:
    name, agent = uuid.uuid4().hex, Agent(buffer, "g", 1)
    agent.make(name)
    Agent(buffer, "other", 1).make(name, 409)
    agent.make(name, 409)
    agent.play(name)
    buffer.group("other", 404)
    assert [(one["group_id"], one["session_id"]) for one in buffer.claim(groups=9)["samples"]] == [("g", name)]


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("claim", {"groups": 0}, 400, "groups"),
        ("claim", {"groups": "two"}, 400, "groups"),
        ("claim", {"group_size": 4, "limit": 2}, 400, "limit"),
        ("claim", {"lease_seconds": 0}, 400, "lease_seconds"),
        ("claim", {"lease_seconds": 1e9}, 400, "lease_seconds"),
        ("claim", {"wait_seconds": -1}, 400, "wait_seconds"),
        ("claim", {"max_staleness": -1}, 400, "max_staleness"),
        ("claim", {"exact_only": "yes"}, 400, "exact_only"),
        ("claim", {"partial_after_seconds": 5}, 400, "allow_partial"),
        ("claim", [], 400, "object"),
        ("ack", {}, 400, "claim_id"),
        ("ack", {"claim_id": 7}, 400, "claim_id"),
        ("ack", {"claim_id": "nobody's"}, 404, "nobody's"),
        ("release", {"claim_id": "nobody's"}, 404, "nobody's"),
        ("renew", {"claim_id": "nobody's"}, 404, "nobody's"),
        ("renew", {"claim_id": "x", "lease_seconds": "long"}, 400, "lease_seconds"),
        ("reward", {}, 400, "request_id"),
        ("reward", {"request_id": "nobody's", "reward": 1}, 404, "x-group-id"),
        ("reward", {"rollout_id": "r", "reward": 1}, 400, "group_id"),
        ("reward", {"group_id": "g", "rollout_id": "r", "reward": 1}, 404, "rollout"),
        (
            "reward",
            {"request_id": "x", "score": 1},
            400,
            "`reward` is missing",
        ),  # it would be none, and complete the sample
        ("reward", {"request_id": "x", "reward": "good"}, 400, "reward"),
        ("reward", {"request_id": "x", "reward_info": 3}, 400, "reward_info"),
        ("reward", {"rewards": []}, 400, "rewards"),
        ("reward", {"rewards": [{"request_id": "x"}], "reward": 1}, 400, "not both"),
        ("drop", {}, 400, "group_id"),
        ("drop", {"group_id": "nobody's"}, 404, "nobody's"),
    ],
)
def test_bad_bodies_are_told_apart(buffer: Buffer, path: str, body: Any, status: int, word: str) -> None:
    assert word in buffer.call(f"/trajectories/{path}", body, status)["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x_group_size": "4"},
        {"x_group_id": "g", "x_group_size": "0"},
        {"x_group_id": "g", "x_group_size": "many"},
        {"x_group_id": "g" * 200},
        {"x_group_id": "a, b"},
        {"x_group_id": "g", "x_rollout_end": "perhaps"},
        {"x_rollout_id": "r"},
    ],
)
def test_bad_headers_are_a_400(buffer: Buffer, headers: dict[str, str]) -> None:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
    assert "x-" in buffer.call("/generate", body, 400, **headers)["error"]["message"]


def test_a_reward_behind_a_claim_is_refused(buffer: Buffer) -> None:
    reply = buffer.say("Reward ", "g", x_group_size="1", x_rollout_end="true")
    buffer.claim()
    assert buffer.reward(reply, status=409)["error"]["type"] == "handed_out"


def test_a_reward_that_is_sent_again_is_no_error(buffer: Buffer) -> None:
    """Its answer may have been lost, and a trainer may have claimed the sample in between."""
    reply = buffer.say("Sent twice: ", "again", x_group_size="1")
    buffer.reward(reply, 0.5, reward_info={"why": "right"})
    claim = buffer.claim()
    (sample,) = claim["samples"]
    assert buffer.reward(reply, 0.5, reward_info={"why": "right"}) == {"rewarded": 1}
    buffer.reward(reply, 0.75, status=409, reward_info={"why": "right"})
    buffer.reward(reply, 0.5, status=409)
    (found,) = buffer.group("again")["samples"]
    assert (sample["reward"], found["reward"], found["reward_info"]) == (0.5, 0.5, {"why": "right"})
    buffer.acknowledge(claim)
    assert buffer.reward(reply, 0.5, group_id="again") == {"rewarded": 1}
    buffer.reward(reply, 0.75, status=404)
    buffer.reward(reply, 0.5, status=404, group_id="another")


@pytest.mark.parametrize("how", ["released", "lease over"])
def test_what_no_trainer_has_any_more_takes_a_reward(buffer: Buffer, how: str) -> None:
    """The trainer whose lease is over does not know of the reward: the sample is not its own any more."""
    reply = buffer.say("Later ", "g", x_group_size="1", x_rollout_end="true")
    first = buffer.claim(lease_seconds=0.05 if how == "lease over" else 600)
    if how == "released":
        buffer.release(first)
    until(lambda: buffer.group("g")["samples"][0]["state"] == "complete")
    buffer.reward(reply, 0.5)
    buffer.reward(reply, 0.5)
    buffer.acknowledge(first, 409)
    second = buffer.claim()
    assert [(one["id"], one["reward"]) for one in second["samples"]] == [(*ids(first), 0.5)]
    buffer.reward(reply, 0.75, status=409)
    assert buffer.acknowledge(second)["acknowledged"] == 1


@pytest.mark.parametrize("left", [False, True], ids=["whole group", "part of a group"])
def test_a_reward_of_a_session_behind_a_claim_is_refused(buffer: Buffer, left: bool) -> None:
    """As that of a reply: also after the acknowledgement, unless the trainer has this very reward."""
    name, agent = uuid.uuid4().hex, Agent(buffer, "g", 1)
    agent.make(name)
    agent.play(name)
    given = {"reward_info": {"reward": 0.5}}
    buffer.call(f"/sessions/{name}/reward_info", given)
    claim = buffer.claim()
    if left:
        buffer.say("Another sample", "g")
    for acknowledge in (False, True):
        if acknowledge:
            buffer.acknowledge(claim)
        for path, body in (
            ("reward_info", {"reward_info": {"reward": 1.0}}),
            ("complete", {"reward_info": {"score": 2}}),
        ):
            answer = buffer.call(f"/sessions/{name}/{path}", body, 409)
            assert answer["error"]["type"] == "handed_out"
            assert name in answer["error"]["message"]
        assert buffer.call(f"/sessions/{name}/reward_info", given)["reward_info"] == {"reward": 0.5}
        buffer.call(f"/sessions/{name}/complete", {})
    assert [one["reward"] for one in claim["samples"]] == [0.5]


@pytest.mark.parametrize("how", ["released", "lease over"])
def test_a_session_that_no_trainer_has_any_more_takes_a_reward(buffer: Buffer, how: str) -> None:
    name, agent = uuid.uuid4().hex, Agent(buffer, "g", 1)
    agent.make(name)
    agent.play(name)
    first = buffer.claim(lease_seconds=0.05 if how == "lease over" else 600)
    if how == "released":
        buffer.release(first)
    until(lambda: buffer.group("g")["samples"][0]["state"] == "complete")
    buffer.call(f"/sessions/{name}/complete", {"reward_info": {"reward": 0.5}})
    buffer.acknowledge(first, 409)
    second = buffer.claim()
    assert [(one["session_id"], one["reward"]) for one in second["samples"]] == [(name, 0.5)]
    assert buffer.acknowledge(second)["acknowledged"] == 1


def test_a_reward_does_not_end_a_session(buffer: Buffer) -> None:
    """Nor does the end of its group: its own client may still export it."""
    name, agent = uuid.uuid4().hex, Agent(buffer, "g", 1)
    agent.make(name)
    buffer.call(f"/sessions/{name}/reward_info", {"reward_info": {"reward": 0.5}})
    assert buffer.claim()["samples"] == []
    assert buffer.call("/trajectories/drop", {"group_id": "g"})["dropped"] == 1
    assert buffer.call(f"/sessions/{name}/reward_info", {"reward_info": {"score": 1}})["reward_info"]["score"] == 1


def test_unknown_fields_are_named(buffer: Buffer) -> None:
    assert buffer.claim(leese_seconds=5)["ignored"] == ["leese_seconds"]


def test_the_client_claims_texts_and_sessions(served: Stack, buffer: Buffer) -> None:
    with Client(served.url, namespace=buffer.space) as client:
        talk = Conversation(client, "A talk: ", {"max_new_tokens": 6}, group_id="g", group_size=2)
        talk.say()
        talk.append(" and on ")
        last = talk.say()
        client.reward(last.id, 0.5, {"why": "so"})
        session = Session(client, sampling_params={"max_tokens": 6}, group_id="g")
        session.chat([{"role": "user", "content": "Hello"}])
        session.reward({"reward": 2})
        session.finalize()
        claim = client.claim(wait_seconds=5)
        assert [sample.reward for sample in claim] == [0.5, 2]
        (group,) = claim.groups
        assert (group.group_id, group.size, group.partial, len(group.samples)) == ("g", 2, False, 2)
        text, chat = claim
        assert text.trajectories == (talk.retrieve(),)
        assert chat.session_id == session.id
        assert sum(sum(one.loss_mask) for one in chat.trajectories) == sum(one.sampled for one in chat.trajectories)
        assert len(client.claim()) == 0
        client.renew(claim, 60)
        assert client.acknowledge(claim) == client.acknowledge(claim) == 2
        with pytest.raises(RefusedError, match="claim_over"):
            client.release(claim)
        with pytest.raises(ValueError, match="nothing to claim"):
            client.acknowledge(client.claim())


def test_a_tenant_sees_its_own_groups_only(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store.sqlite3")
    server = {"api_keys": ("a:key-a", "b:key-b")}
    with stack("qwen", store=store, server=server) as both:
        keys = {name: {"authorization": f"Bearer key-{name}"} for name in "ab"}
        headers = {"x-group-id": "g", "x-group-size": "1", "x-rollout-end": "true"}
        replies = {}
        for name, key in keys.items():
            body = {"text": f"Of {name}: ", "rid": "same", "sampling_params": {"max_new_tokens": 6}}
            replies[name] = both.generate(body, headers={**key, **headers}).body
        claims = {}
        for name, key in keys.items():
            claims[name] = both.post("/trajectories/claim", {"groups": 9}, headers=key).json()
            (sample,) = claims[name]["samples"]
            assert sample["trajectories"][0]["response"] == f"Of {name}: " + replies[name]["text"]
        theirs = {"claim_id": claims["a"]["claim_id"]}
        for call in ("ack", "release", "renew"):
            assert both.post(f"/trajectories/{call}", theirs, headers=keys["b"]).status == 404
        assert both.post("/trajectories/claim", {}).status == 401
        assert both.post("/trajectories/drop", {"group_id": "g"}, headers=keys["b"]).json()["dropped"] == 0
        assert both.post("/trajectories/ack", theirs, headers=keys["a"]).json()["acknowledged"] == 1
        shown = both.exchange("GET", "/trajectories?group=g", None, keys["b"]).json()
        assert [one["state"] for one in shown["samples"]] == ["claimed"]


def test_what_was_evicted_is_said_to_be_lost() -> None:
    with stack("qwen", styles=("cumulative",), radix={"max_tokens": 60}) as served:
        buffer = Buffer(served)
        for number in range(12):
            buffer.say(
                f"Number {number} of a long list of things: ", f"g{number}", x_group_size="1", x_rollout_end="true"
            )
        claim = buffer.claim(groups=20)
        assert claim["lost"]
        assert len(claim["lost"]) + len(claim["samples"]) == 12
        assert buffer.claim(groups=20)["lost"] == []


DAMAGE = {
    "its tokens": "UPDATE records SET body = substr(body, 1, 20) WHERE n = (SELECT max(n) FROM records)",
    "its log": "UPDATE events SET body = substr(body, 1, 20) WHERE number = 2 AND log = "
    "(SELECT log FROM logs WHERE name LIKE 'session/%')",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_session_keeps_no_others_from_their_trainer(tmp_path: Path, what: str) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store.sqlite3")
    with stack("qwen", styles=("cumulative",), store=store) as served:
        buffer = Buffer(served, "space")
        buffer.say("Whole: ", "whole", x_group_size="1", x_rollout_end="true")
        client = Client(served.url, namespace="space")
        session = Session(client, group_id="damaged", group_size=1)
        session.chat([{"role": "user", "content": "Hello"}], max_tokens=4)
        session.finalize()
        client.close()
    with connect(tmp_path / "store.sqlite3") as file:
        file.execute(DAMAGE[what])
        assert file.changes() == 1
    file.close()
    with stack("qwen", styles=("cumulative",), store=store) as served:
        buffer = Buffer(served, "space")
        assert [one["state"] for one in buffer.group("damaged")["samples"]] == ["lost"]
        claim = buffer.claim(groups=2)
        assert [one["group_id"] for one in claim["samples"]] == ["whole"]
        assert [one["group_id"] for one in claim["lost"]] == ["damaged"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_router_that_starts_again_has_the_groups_of_its_store(tmp_path: Path, kind: str) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store.sqlite3") if kind == "sqlite" else None
    space = uuid.uuid4().hex
    with stack("qwen", store=store) as served:
        buffer = Buffer(served, space)
        first, _ = buffer.say("Before ", "g", n=2, x_group_size="2")
        buffer.reward(first, 0.5)
        held = buffer.say("Held ", "h", x_group_size="1", x_rollout_end="true")
        claim = buffer.claim()
        assert [one["group_id"] for one in claim["samples"]] == ["h"]
    with stack("qwen", store=store) as served:
        buffer = Buffer(served, space)
        if store is None:
            buffer.group("g", 404)
            return
        partial = buffer.claim(allow_partial=True)
        assert [(one["group_id"], one["reward"]) for one in partial["samples"]] == [("g", 0.5)]
        check(partial["samples"][0], "Before ", first)
        assert partial["groups"][0]["partial"] is True
        assert buffer.acknowledge(claim)["acknowledged"] == 1, "the lease outlived the router"
        assert buffer.claim(allow_partial=True)["samples"] == []
        assert held["text"] in claim["samples"][0]["trajectories"][0]["response"]


def test_a_claim_gives_up_what_waits_too_long(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer.say("Nobody rewards this ", "left", x_group_size="1")
    for number in range(4):
        buffer.say(f"Number {number} ", f"g{number}", x_group_size="1", x_rollout_end="true")
    monkeypatch.setattr(claims, "MOST_EVENTS", 3)
    claim = buffer.claim(groups=9)
    assert (len(claim["samples"]), claim["evicted"]) == (4, 1)
    buffer.group("left", 404)


@pytest.mark.slow
def test_a_router_that_stops_lets_nobody_wait(tmp_path: Path) -> None:
    """Else a trainer that always waits for the next group would hold up each restart."""
    folder = str(vocabulary("qwen"))
    with ThreadPoolExecutor(2) as pool, Program("router", "--tokenizer-path", folder, folder=tmp_path) as router:
        router.wait_until_up()
        assert call(f"{router.url}/sessions", {"session_id": "waiting"}).status == 201
        claim = pool.submit(call, f"{router.url}/trajectories/claim", {"wait_seconds": 600})
        complete = pool.submit(call, f"{router.url}/sessions/waiting/complete?timeout_s=3600")
        until(lambda: call(f"{router.url}/debug/requests").json()["total"] == 2, seconds=60)
        router.terminate()
        assert router.exit_code() == 0
        assert claim.result().json()["claim_id"] is None
        assert complete.result().json()["completed"] is False
