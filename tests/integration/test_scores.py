"""A teacher and a reference score what was sampled: its own ids, each with the float that the scorer gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from middleware_hub.client import Client, InconsistentAnswerError, Scores, Session, image_part
from middleware_hub.client.scores import scores_of
from router.config import StoreConfig, WorkersConfig
from router.errors import BadRequestError
from router.generate import scorers
from tests.support import templates
from tests.support.agents import AgentSession, ids_of, user
from tests.support.asking import Asking, until
from tests.support.client import Answer
from tests.support.pictures import picture
from tests.support.serving import serve
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer
from worker.worker import EmbeddedWorker

PATH = "/trajectories/score"
KEYS = {"api_keys": ("a:key-of-a", "b:key-of-b"), "admin_keys": ("key-of-all",)}
A, B = {"authorization": "Bearer key-of-a"}, {"authorization": "Bearer key-of-b"}


class Scorer:
    """An engine that only scores, in SGLang's form. Each number tells of all ids up to its token, and of the scorer.

    Attributes:
        bodies: of the requests that it answered.
        failing: how many requests it refuses from now on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.bodies: list[dict[str, Any]] = []
        self.failing = 0
        self.url = ""

    def logprob(self, ids: list[int]) -> float:
        return -crc32(f"{self.name}{ids}".encode()) / 2**28

    def told(self, ids: list[int], start: int, top: int = 0) -> tuple[list[float], list[Any]]:
        """What it says of the tokens from `start` on: their logprobs, and its likeliest tokens."""
        ends = range(start + 1, len(ids) + 1)
        tops = [[[self.logprob([*ids[: end - 1], one]), one] for one in range(top)] for end in ends]
        return [self.logprob(ids[:end]) for end in ends], tops

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        content = b""
        while (message := await receive()).get("body") or message.get("more_body"):
            content += message["body"]
            if not message.get("more_body"):
                break
        status, answer = 503, {}
        self.failing -= 1
        if self.failing < 0:
            body = json.loads(content)
            assert scope["path"] == "/generate"
            assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 0.0}
            assert body["return_logprob"] is True
            self.bodies.append(body)
            ids, start, top = body["input_ids"], body["logprob_start_len"], body.get("top_logprobs_num", 0)
            logprobs, tops = self.told(ids, start, top)
            pairs = list(zip(logprobs, ids[start:], strict=True))
            meta: dict[str, Any] = {"input_token_logprobs": [[one, token, None] for one, token in pairs]}
            meta["input_token_logprobs"][0][0] = None  # as SGLang: nothing that it computed stands before it
            if top:
                meta["input_top_logprobs"] = [None, *([[*pair, None] for pair in one] for one in tops[1:])]
            status, answer = 200, {"text": "", "output_ids": [], "meta_info": meta}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@pytest.fixture(scope="module")
def teacher() -> Iterator[Scorer]:
    scorer = Scorer("teacher")
    with serve(scorer) as scorer.url:
        yield scorer


@pytest.fixture(scope="module")
def ref() -> Iterator[Scorer]:
    scorer = Scorer("ref")
    with serve(scorer) as scorer.url:
        yield scorer


@pytest.fixture(scope="module")
def served(teacher: Scorer, ref: Scorer) -> Iterator[Stack]:
    given = {"scorers": (f"ref={ref.url}", f"teacher={teacher.url}/")}
    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    with stack("qwen", styles=("cumulative",), workers=given, sessions=sessions) as made:
        yield made


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "PAUSE", 0.01)


def forked(served: Stack) -> AgentSession:
    agent = AgentSession.make(served)
    first = agent.must(user("a"), says="one and more")
    agent.must(user("a"), first.message, user("b"), says="two")
    agent.must(user("a"), first.message, user("c"), says="three")
    return agent


def scored(served: Stack, **body: Any) -> dict[str, Any]:
    answer = served.post(PATH, body)
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json()
    return found


class TestSessions:
    def test_each_trajectory_has_what_the_scorers_say_of_its_own_ids(
        self, served: Stack, teacher: Scorer, ref: Scorer
    ) -> None:
        agent = forked(served)
        found = scored(served, session_id=agent.name, workers=["ref", "teacher"], top_logprobs=3)
        assert found["session_id"] == agent.name
        plain = agent.trajectories()
        assert len(found["trajectories"]) == len(plain) == 2
        for one, same in zip(found["trajectories"], plain, strict=True):
            begin = len(one["prompt_ids"])
            for name, worker in (("ref", ref), ("teacher", teacher)):
                logprobs, tops = worker.told(ids_of(one), begin, 3)
                assert one.pop(f"{name}_logprobs") == logprobs
                assert one.pop(f"{name}_top_logprobs") == tops
                assert len(logprobs) == len(tops) == len(one["response_ids"])
                assert {len(top) for top in tops} == {3}
            assert one == same

    def test_all_scorers_without_a_name_and_no_top_without_a_number(self, served: Stack) -> None:
        agent = forked(served)
        (one, _) = scored(served, session_id=agent.name)["trajectories"]
        assert {name for name in one if "_logprobs" in name} == {
            "response_logprobs",
            "ref_logprobs",
            "teacher_logprobs",
        }
        assert one["ref_logprobs"] != one["teacher_logprobs"]

    def test_it_changes_nothing_and_works_after_the_end(self, served: Stack, teacher: Scorer) -> None:
        agent = forked(served)
        before = agent.show()
        first = scored(served, session_id=agent.name, workers=["teacher"])
        assert agent.show() == before
        agent.finalize()
        again = scored(served, session_id=agent.name, workers=["teacher"])
        assert again == first
        assert served.get("/workers").json()["total"] == 1

    def test_the_task_alone(self, served: Stack) -> None:
        agent = AgentSession.make(served, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
        agent.must(user("a"), says="one")
        agent.must(user("b"), says="two", tools=[])
        assert len(scored(served, session_id=agent.name)["trajectories"]) == 2
        assert len(scored(served, session_id=agent.name, roots="head")["trajectories"]) == 1


class TestFinalize:
    def test_the_last_call_of_a_session_scores_it_too(self, served: Stack, teacher: Scorer) -> None:
        """It is what `finalize` gives, and the numbers behind it."""
        agent = forked(served)
        asked = {"workers": ["teacher"], "top_logprobs": 2}
        found = agent.finalize(score=asked, shared_turns="every")
        plain = agent.finalize(shared_turns="every")
        assert agent.show()["phase"] == "finalized"
        assert len(found) == 2
        for one, same in zip(found, plain, strict=True):
            told = teacher.told(ids_of(one), len(one["prompt_ids"]), 2)
            assert (one.pop("teacher_logprobs"), one.pop("teacher_top_logprobs")) == told
            assert one == same

    def test_without_fields_all_score(self, served: Stack, teacher: Scorer, ref: Scorer) -> None:
        for one in forked(served).finalize(score={}):
            begin = len(one["prompt_ids"])
            assert one["ref_logprobs"] == ref.told(ids_of(one), begin)[0]
            assert one["teacher_logprobs"] == teacher.told(ids_of(one), begin)[0]
            assert not any(name.endswith("_top_logprobs") for name in one)

    def test_it_may_be_sent_again_if_a_scorer_failed(self, served: Stack, teacher: Scorer, ref: Scorer) -> None:
        agent = forked(served)
        teacher.failing = 2 * scorers.ATTEMPTS
        path = f"{agent.path}/finalize"
        answer = served.post(path, {"score": {}})
        assert answer.status == 502, answer.content
        done = len(ref.bodies)
        again = served.post(path, {"score": {}})
        assert again.status == 200, again.content
        assert all("teacher_logprobs" in one for one in again.json()["trajectories"])
        assert len(ref.bodies) == done

    @pytest.mark.parametrize("form", ["json", "atif"])
    @pytest.mark.parametrize(
        ("score", "words"),
        [({"workers": ["pupil"]}, "ref, teacher"), (True, "score"), ({"top_logprobs": -1}, "top_logprobs"), (None, "")],
    )
    def test_a_session_goes_on_after_a_bad_request(self, served: Stack, form: str, score: Any, words: str) -> None:
        agent = forked(served)
        body = {"format": form, "score": score}
        answer = served.post(f"{agent.path}/finalize", body)
        if score is None:
            assert answer.status == 200, answer.content
            return
        assert answer.status == 400, answer.content
        assert (words if form == "json" or score is True else "json") in answer.json()["error"]["message"]
        assert agent.show()["phase"] == "active"

    def test_what_it_does_not_know_is_named(self, served: Stack) -> None:
        agent = forked(served)
        answer = served.post(f"{agent.path}/finalize?score=ref", {"score": {"worker": "ref"}})
        assert answer.json()["ignored"] == ["score", "score.worker"]


class TestImages:
    def test_a_session_with_one_is_refused_and_others_are_scored(self, teacher: Scorer) -> None:
        """Scorers are given ids, and a model computes with the picture, not with the ids in its place."""
        given = {"scorers": (f"teacher={teacher.url}",)}
        with stack("qwen", folder=shipped_image_tokenizer(), workers=given) as seeing:
            for content in ([image_part(picture(40, 30, 1)), {"type": "text", "text": "Where?"}], "Where?"):
                before = len(teacher.bodies)
                with Client(seeing.url) as client, Session(client) as session:
                    session.chat([{"role": "user", "content": content}], max_tokens=4)
                    answers = [seeing.post(PATH, {"session_id": session.id})]
                    answers.append(seeing.post(f"/sessions/{session.id}/finalize", {"score": {}}))
                    (found,) = session.finalize()
                    answers.append(seeing.post(PATH, {"sequences": [{"input_ids": found.tokens}]}))
                if isinstance(content, str):
                    assert [one.status for one in answers] == [200] * 3
                else:
                    codes = [(one.status, one.json()["error"]["code"]) for one in answers]
                    assert codes == [(400, "unsupported_content")] * 3
                    assert len(teacher.bodies) == before


class TestClients:
    def test_a_session(self, served: Stack, teacher: Scorer) -> None:
        with Client(served.url) as client, Session(client) as session:
            said = session.chat([user("a")], max_tokens=5)["choices"][0]["message"]
            session.chat([user("a"), said, user("b")], max_tokens=5)
            (now,) = session.score(workers=["teacher"], top_logprobs=2)
            (plain,) = session.trajectories()
            ended = session.finalize(score={"workers": ["teacher"]})
        assert replace(now, scores={}) == plain
        begin = now.prompt_length
        logprobs, tops = teacher.told(now.tokens, begin, 2)
        assert now.scores["teacher"] == Scores(begin, logprobs, [[(one, token) for one, token in top] for top in tops])
        assert ended.trajectories[0].scores == {"teacher": Scores(begin, logprobs)}

    def test_ids(self, served: Stack, teacher: Scorer, ref: Scorer) -> None:
        with Client(served.url) as client:
            several = np.array([[5, 6, 7], [6, 7, 8]])
            found = client.score(several, [2, 1])
            assert client.score([[5, 6]], workers=["ref"]) == [{"ref": Scores(1, ref.told([5, 6], 1)[0])}]
            with pytest.raises(ValueError, match="1 starts for 2"):
                client.score(several, [1])
            with pytest.raises(TypeError, match="did you mean 'workers'"):
                client.score(several, worker=["ref"])  # type: ignore[call-arg]
            with pytest.raises(TypeError, match="did you mean 'workers'"):
                Session(client).finalize(score={"worker": ["ref"]})  # type: ignore[typeddict-unknown-key]
        for told, ids, start in zip(found, several.tolist(), (2, 1), strict=True):
            assert told["teacher"] == Scores(start, teacher.told(ids, start)[0])
            assert told["ref"] == Scores(start, ref.told(ids, start)[0])

    def test_an_answer_that_does_not_fit_is_an_error(self) -> None:
        for found in ({"ref_logprobs": [-1.0]}, {"ref_logprobs": [-1.0, -2.0], "ref_top_logprobs": [[]]}):
            with pytest.raises(InconsistentAnswerError, match="'ref'"):
                scores_of(found, 1, 3)


class TestSequences:
    def test_ids_of_a_client(self, served: Stack, teacher: Scorer) -> None:
        ids = [10, 20, 30, 40, 50]
        several = [{"input_ids": ids, "start": 3}, {"input_ids": ids}, {"input_ids": [7, 8]}]
        found = scored(served, sequences=several, workers=["teacher"], top_logprobs=1)["sequences"]
        for one, start in zip(found, (3, 1, 1), strict=True):
            own = [7, 8] if len(one["teacher_logprobs"]) == 1 else ids
            assert (one["teacher_logprobs"], one["teacher_top_logprobs"]) == teacher.told(own, start, 1)

    def test_a_call_that_failed_goes_on_where_it_stopped(self, served: Stack, teacher: Scorer, ref: Scorer) -> None:
        """What was scored before is not asked for again, and the answer is that of a call that did not fail."""
        several = [{"input_ids": [one, one + 1, one + 2]} for one in range(100, 120)]
        teacher.failing = scorers.AT_ONCE * scorers.ATTEMPTS
        answer = served.post(PATH, {"sequences": several})
        assert answer.status == 502, answer.content
        assert "scorer 'teacher'" in answer.json()["error"]["message"]
        done = len(ref.bodies), len(teacher.bodies)
        found = scored(served, sequences=several)["sequences"]
        assert len(ref.bodies) == done[0]
        assert 0 < len(teacher.bodies) - done[1] < len(several)
        for one, given in zip(found, several, strict=True):
            assert one["teacher_logprobs"] == teacher.told(given["input_ids"], 1)[0]
        before = len(ref.bodies)
        scored(served, sequences=several, workers=["ref"])
        assert len(ref.bodies) == before + len(several)  # nothing is kept of a call that succeeded: weights may change

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ({"text": "", "meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 9, None]]}}, "not the 2"),
            (
                {"meta_info": {"input_token_logprobs": [[None, 1, None], [-2.0, 2, None], [-1.0, 9, None]]}},
                "other tokens",
            ),
            ({"meta_info": {"input_token_logprobs": [[None, 1, None], [None, 2, None], [-1.0, 3, None]]}}, "no finite"),
            ({"meta_info": {}}, "no logprobs of the prompt"),
            ({"meta_info": {"input_token_logprobs": [[None, 1, None], [-2.0, 2, None], [-1.0, 3, None]]}}, "likeliest"),
        ],
    )
    def test_what_does_not_fit_is_an_error_and_never_a_score(self, content: Any, why: str) -> None:
        with pytest.raises(scorers.UpstreamError, match=why):
            scorers._read("ref", json.dumps(content).encode(), [2, 3], 1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({}, "say what to score"),
            ({"session_id": "a", "sequences": []}, "say what to score"),
            ({"sequences": []}, "1 to"),
            ({"sequences": [{"input_ids": [1]}]}, "start"),
            ({"sequences": [{"input_ids": []}]}, "start"),
            ({"sequences": [{"input_ids": [1, 2], "start": 2}]}, "start"),
            ({"sequences": [{"input_ids": [1, 2], "start": 0}]}, "start"),
            ({"sequences": [{"input_ids": [1, -2]}]}, "input_ids"),
            (
                {"sequences": [{"input_ids": [1, 2]}, {"input_ids": [1, 500_000]}]},
                "`sequences[1].input_ids` has 500000",
            ),
            ({"sequences": [{"input_ids": [1, 2**31]}]}, "input_ids"),
            ({"sequences": [{"input_ids": ["a", 2]}]}, "sequences"),
            ({"sequences": [{"input_ids": [1, 2], "stat": 1}]}, "sequences"),
            ({"sequences": [{"input_ids": [1, 2]}], "workers": ["pupil"]}, "ref, teacher"),
            ({"sequences": [{"input_ids": [1, 2]}], "workers": []}, "ref, teacher"),
            ({"sequences": [{"input_ids": [1, 2]}], "workers": ["ref", "ref"]}, "each once"),
            ({"sequences": [{"input_ids": [1, 2]}], "top_logprobs": 1000}, "top_logprobs"),
            ({"sequences": [{"input_ids": [1, 2]}], "roots": "tail"}, "roots"),
        ],
    )
    def test_bad_input(self, served: Stack, teacher: Scorer, ref: Scorer, body: Any, words: str) -> None:
        """No scorer sees it: an id outside of the vocabulary, for one, would end it."""
        before = len(teacher.bodies) + len(ref.bodies)
        answer = served.post(PATH, body)
        assert answer.status == 400, answer.content
        assert words in answer.json()["error"]["message"]
        assert len(teacher.bodies) + len(ref.bodies) == before

    def test_an_unknown_session(self, served: Stack) -> None:
        assert served.post(PATH, {"session_id": "nobody"}).status == 404

    def test_a_router_without_scorers_says_how_to_have_one(self) -> None:
        with stack("qwen", styles=("cumulative",)) as bare:
            answer = bare.post(PATH, {"sequences": [{"input_ids": [1, 2]}]})
        assert answer.status == 400
        assert "--scorer" in answer.json()["error"]["message"]

    def test_a_tenant_scores_its_own_sessions(self, teacher: Scorer) -> None:
        given = {"scorers": (f"teacher={teacher.url}",)}
        with stack("qwen", styles=("cumulative",), workers=given, server=KEYS) as kept:
            assert kept.post("/sessions", {"session_id": "own"}, headers=A).status == 201
            assert kept.post(PATH, {"session_id": "own"}, headers=A).status == 200
            assert kept.post(PATH, {"session_id": "own"}, headers=B).status == 404
            assert kept.post(PATH, {"session_id": "own"}).status == 401


def test_a_worker_scores_as_well() -> None:
    """The embedded one, which takes requests as SGLang does."""
    with EmbeddedWorker(shipped_tokenizer()) as worker:
        given = {"scorers": (f"teacher={worker.url}",)}
        with stack("qwen", styles=("cumulative",), workers=given) as made:
            body = {"sequences": [{"input_ids": [10, 20, 30], "start": 2}], "top_logprobs": 2}
            (found,) = scored(made, **body)["sequences"]
            refused = made.post(PATH, {"sequences": [{"input_ids": [10, 30_000]}]})
    assert len(found["teacher_logprobs"]) == len(found["teacher_top_logprobs"]) == 1
    assert worker.log[-1].input_ids == [10, 20, 30]
    assert worker.log[-1].output_ids == []
    assert refused.status == 400  # the scorer's vocabulary is smaller: it is no use to ask again
    message = refused.json()["error"]["message"]
    assert "scorer 'teacher' refuses a sequence" in message
    assert "vocabulary" in message


@pytest.mark.parametrize(
    "entry",
    [
        "teacher",
        "=http://a",
        "Teacher=http://a",
        "response=http://a",
        "ref_top=http://a",
        "a=ftp://b",
        "a=http://b/c",
        "a b=http://c",
    ],
)
def test_a_bad_scorer_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(BadRequestError, match="--scorer"):
        WorkersConfig(scorers=(entry,))
    with pytest.raises(BadRequestError, match="--scorer"):
        WorkersConfig(scorers=("a=http://b", "a=http://c"))


def test_another_router_of_the_store_scores_the_same(tmp_path: Path, teacher: Scorer) -> None:
    """After a restart."""
    store = StoreConfig(url=f"sqlite:{tmp_path}")
    given = {"scorers": (f"teacher={teacher.url}",)}
    answers: list[Answer] = []
    for life in range(2):
        with stack("qwen", styles=("cumulative",), workers=given, store=store) as made:
            agent = AgentSession(made, "kept") if life else AgentSession.make(made, session_id="kept")
            if not life:
                agent.must(user("a"), says="one")
            answers.append(made.post(PATH, {"session_id": "kept", "top_logprobs": 2}))
    assert answers[0].status == 200
    assert answers[0].json() == answers[1].json()


def test_a_client_that_left_is_not_scored_for_again(served: Stack, ref: Scorer, teacher: Scorer) -> None:
    """What was scored while it waited is kept for its next call."""
    several = [{"input_ids": [one, one + 1]} for one in range(300, 340)]
    teacher.failing = 10**6
    before = len(ref.bodies)
    asking = Asking(served.url, {"sequences": several}, path=PATH)
    until(lambda: len(ref.bodies) == before + len(several), "the reference has answered")
    asking.leave()
    teacher.failing = 0
    until(lambda: served.get("/debug/requests").json()["total"] == 0, "the router has seen that its client left")
    assert len(scored(served, sequences=several)["sequences"]) == len(several)
    assert len(ref.bodies) == before + len(several)


def test_calls_that_fail_at_the_same_time_keep_their_numbers_once(
    served: Stack, ref: Scorer, teacher: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the memory counts as full, and what the next calls were told is forgotten."""
    monkeypatch.setattr(scorers, "PAUSE", 0.5)
    monkeypatch.setattr(scorers, "MOST_KEPT", 12)
    several = [{"input_ids": [one, one + 1]} for one in range(400, 410)]
    teacher.failing = 10**6
    before = len(ref.bodies)
    calls = [Asking(served.url, {"sequences": several}, path=PATH) for _ in range(4)]
    until(lambda: len(ref.bodies) == before + 4 * len(several), "the reference has answered all calls")
    assert [call.answer().status for call in calls] == [502] * 4
    teacher.failing = 0
    assert len(scored(served, sequences=several)["sequences"]) == len(several)
    assert len(ref.bodies) == before + 4 * len(several)
