"""What a session adds to its agent's requests: an adapter, sampling parameters that may be pinned, and other fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config import StoreConfig
from tests.support.agents import AgentSession, user
from tests.support.asking import calls
from tests.support.chat_models import chat_model
from tests.support.client import Answer
from tests.support.lives import Router
from tests.support.stack import Stack, stack
from worker.engine.records import GenerationRecord
from worker.worker import EmbeddedWorker

Json = dict[str, Any]

FORMS: dict[str, Json] = {
    "chat/completions": {"messages": [user("hi")]},
    "responses": {"input": "hi"},
    "messages": {"messages": [user("hi")], "max_tokens": 50},
}
"""The smallest request of each dialect, by its path."""
OPEN = ("chat/completions", "messages")
COLON = "s3://bucket/base:7b"
"""A served name with colons of its own."""


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_think", "gptoss", "glm4moe"])
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    folder = chat_model(request.param)
    with stack("qwen", styles=("incremental",), folder=folder, served_name="base", adapters=("a",)) as made:
        yield made
        assert made.idle()


@pytest.fixture(scope="module")
def one() -> Iterator[Stack]:
    """One template, for what does not depend on it."""
    with stack("qwen", styles=("incremental",), folder=chat_model("qwen3"), served_name=COLON) as made:
        yield made


@pytest.fixture(scope="module")
def vllm() -> Iterator[Stack]:
    folder = chat_model("qwen3")
    given: Json = {"interface": "vllm", "served_name": "base", "adapters": ("a",)}
    with stack("qwen", styles=("cumulative",), folder=folder, **given) as made:
        yield made


def post(stack: Stack, path: str, body: Json) -> tuple[Answer, GenerationRecord]:
    (worker,) = stack.workers
    worker.script(text="Yes.")
    answer = stack.post(path, body)
    assert answer.status == 200, answer.content
    return answer, worker.log[-1]


def made(stack: Stack, **fields: Any) -> str:
    answer = stack.post("/sessions", fields)
    assert answer.status == 201, answer.content
    assert "ignored" not in answer.json()
    return f"/sessions/{answer.json()['session_id']}"


def turn(stack: Stack, path: str, form: str, *, stream: bool = False, **fields: Any) -> GenerationRecord:
    body = {"model": "m", **FORMS[form], "stream": stream, **fields}
    return post(stack, f"{path}/v1/{form}", body)[1]


def refused(stack: Stack, **fields: Any) -> str:
    answer = stack.post("/sessions", fields)
    assert answer.status == 400, answer.content
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
class TestAdapters:
    def test_a_session_has_one_for_every_turn(self, served: Stack, form: str, stream: bool) -> None:
        for given in ({"lora_path": "a"}, {"model": "base:a"}, {"model": "base:a", "lora_path": "b"}, {"model": "a"}):
            path = made(served, **given)
            assert served.get(path).json()["lora_path"] == "a"
            assert turn(served, path, form, stream=stream).body["lora_path"] == "a", given

    def test_a_turn_may_choose_another(self, served: Stack, form: str, stream: bool) -> None:
        path = made(served, lora_path="a")
        for given, wanted in (
            ({"lora_path": "b"}, "b"),
            ({"model": "base:c"}, "c"),
            ({"model": "base:c", "lora_path": "b"}, "c"),
            ({"model": "base", "lora_path": "b"}, "b"),
            ({"lora_path": None}, "a"),
            ({"model": "base"}, "a"),
            ({"lora_path": ""}, None),
        ):
            assert turn(served, path, form, stream=stream, **given).body.get("lora_path") == wanted, given

    def test_it_is_the_name_that_vllm_lists(self, vllm: Stack, form: str, stream: bool) -> None:
        for session, given, wanted in (
            ({"model": "a"}, {}, "a"),
            ({"lora_path": "a"}, {}, "a"),
            ({}, {"model": "a"}, "a"),
            ({}, {"model": "base"}, None),
            ({}, {"model": "unknown:7b"}, None),  # vLLM has no such form
        ):
            record = turn(vllm, made(vllm, **session), form, stream=stream, **given)
            assert record.body.get("model") == wanted, (session, given)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", OPEN)
def test_without_a_session_model_names_it_too(served: Stack, vllm: Stack, form: str, stream: bool) -> None:
    assert turn(served, "", form, stream=stream, model="base:a").body["lora_path"] == "a"
    assert "lora_path" not in turn(served, "", form, stream=stream, model="base").body
    assert turn(vllm, "", form, stream=stream, model="a").body["model"] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_completions_take_it_from_model(served: Stack, vllm: Stack, stream: bool) -> None:
    body = {"prompt": "hi", "stream": stream, "max_tokens": 9}
    assert post(served, "/v1/completions", {**body, "model": "base:a"})[1].body["lora_path"] == "a"
    assert post(served, "/v1/completions", {**body, "model": "base:a", "lora_path": "b"})[1].body["lora_path"] == "a"
    assert "lora_path" not in post(served, "/v1/completions", {**body, "model": "base"})[1].body
    assert post(vllm, "/v1/completions", {**body, "model": "a"})[1].body["model"] == "a"


def test_a_served_name_with_colons_names_none(one: Stack) -> None:
    path = made(one)
    for model, wanted in ((COLON, None), (f"{COLON}:a", "a"), (f"{COLON}: a ", "a"), (f"{COLON}:", None)):
        assert turn(one, path, "chat/completions", model=model).body.get("lora_path") == wanted, model


def test_an_adapter_that_vllm_loads_later_is_found(vllm: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is asked again for a name that is not listed, but not for each request."""
    monkeypatch.setattr("middleware_hub.served_models._AGAIN_SECONDS", 0.0)
    (worker,) = vllm.workers
    path = made(vllm)
    assert turn(vllm, path, "chat/completions", model="late").body.get("model") is None
    worker.control.adapters.append("late")
    assert turn(vllm, path, "chat/completions", model="late").body["model"] == "late"


def test_an_adapter_that_is_loaded_through_the_router_is_found_at_once(vllm: Stack) -> None:
    (worker,) = vllm.workers
    path = made(vllm)
    for number in range(3):  # a name that is not known has just been asked for
        assert turn(vllm, path, "chat/completions", model=f"fresh {number}").body.get("model") is None
        worker.control.adapters.append(f"fresh {number}")
        vllm.post("/load_lora_adapter", {"lora_name": f"fresh {number}", "lora_path": "somewhere"})
        assert turn(vllm, path, "chat/completions", model=f"fresh {number}").body["model"] == f"fresh {number}"


def test_an_adapter_that_sglang_loads_later_is_found_by_its_name_alone(one: Stack) -> None:
    """As one that it had when it came. `BASE:ADAPTER` needs no list, and nobody asks for it."""
    (worker,) = one.workers
    path = made(one)
    for number in range(2):
        name = f"fresh {number}"
        assert "lora_path" not in turn(one, path, "chat/completions", model=name).body
        worker.control.adapters.append(name)
        one.post("/load_lora_adapter", {"lora_name": name, "lora_path": "somewhere"})
        before = len(calls(worker, "/v1/models"))
        assert turn(one, path, "chat/completions", model=f"{COLON}:{name}").body["lora_path"] == name
        assert len(calls(worker, "/v1/models")) == before
        assert turn(one, path, "chat/completions", model=name).body["lora_path"] == name


@pytest.mark.parametrize("form", [*OPEN, "completions"])
def test_an_adapter_that_was_loaded_elsewhere_is_found_though_others_were_asked_for(vllm: Stack, form: str) -> None:
    """By a call to another router, or to a worker. Agents send any `model`, so a worker has always just been asked for one."""
    (worker,) = vllm.workers
    forms = {**FORMS, "completions": {"prompt": "hi"}}
    for number in range(3):
        name = f"{form} step {number}"
        for model in ("gpt-4", "default", f"{form} other {number}"):
            body = {**forms[form], "model": model}
            assert post(vllm, f"/v1/{form}", body)[1].body.get("model") is None
        worker.control.adapters.append(name)
        assert post(vllm, f"/v1/{form}", {**forms[form], "model": name})[1].body["model"] == name
        path = made(vllm, model=name)
        assert vllm.get(path).json()["lora_path"] == name


def test_names_that_are_not_listed_are_asked_for_once_in_a_while(vllm: Stack) -> None:
    (worker,) = vllm.workers
    path = made(vllm)

    def asked(model: str) -> int:
        before = len(calls(worker, "/v1/models"))
        turn(vllm, path, "chat/completions", model=model)
        return len(calls(worker, "/v1/models")) - before

    assert [asked(model) for model in ("never", "never", "nowhere", "never", "nowhere", "a", "base")] == [
        1,
        0,
        1,
        0,
        0,
        0,
        0,
    ]


def test_an_adapter_that_nobody_knew_when_the_session_was_made_is_found(vllm: Stack) -> None:
    """No worker had it yet. It is not sampled from the base model for ever."""
    (worker,) = vllm.workers
    path = made(vllm, model="later")
    assert "lora_path" not in vllm.get(path).json()
    worker.control.adapters.append("later")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("middleware_hub.served_models._AGAIN_SECONDS", 0.0)
        assert turn(vllm, path, "chat/completions").body["model"] == "later"
    assert turn(vllm, path, "chat/completions", lora_path="a").body["model"] == "a"


def test_adapters_share_no_tokens(served: Stack) -> None:
    """In one session, the adapter is part of the setting; what an adapter said is none of another's context."""
    agent = AgentSession.make(served)
    first = agent.must(user("hi"), says="One.", model="base:a")
    other = agent.must(user("hi"), first.message, user("b"), says="Two.", model="base:b")
    assert other.answer.headers["x-radix-reused-tokens"] == "0"
    same = agent.must(user("hi"), first.message, user("b"), says="Three.", lora_path="a")
    count = len(first.chain) - 1  # some templates end a turn with another token than the sampled one
    assert same.sent[:count] == first.chain[:count]
    chat = {"messages": [user("in the open")]}
    said = post(served, "/v1/chat/completions", {**chat, "model": "base:a"})[0].json()["choices"][0]["message"]
    further = [user("in the open"), said, user("b")]
    for model, reused in (("base:b", False), ("base", False), ("base:a", True)):
        answer, _ = post(served, "/v1/chat/completions", {"messages": further, "model": model})
        assert (answer.headers["x-radix-reused-tokens"] != "0") == reused, model


def test_tokens_are_counted_with_the_sessions_own_template_options(served: Stack) -> None:
    """`count_tokens` counts the prompt that a turn would have."""
    path = made(served, chat_template_kwargs={"enable_thinking": False})
    counted = served.post(f"{path}/v1/messages/count_tokens", {"model": "m", **FORMS["messages"]}).json()
    assert counted["input_tokens"] == len(turn(served, path, "messages").input_ids)


@pytest.mark.parametrize("form", FORMS)
class TestDefaults:
    def test_a_turns_own_values_win(self, one: Stack, form: str) -> None:
        given = {"temperature": 0.5, "top_p": 0.9, "stop": ["END"]}
        path = made(one, sampling_params=given, extra_key="salt", priority=3)
        plain = turn(one, path, form)
        assert {**plain.body["sampling_params"], **given} == plain.body["sampling_params"]
        assert (plain.body["extra_key"], plain.body["priority"]) == ("salt", 3)
        own = turn(one, path, form, temperature=1.0, extra_key="own", priority=4)
        assert (own.body["sampling_params"]["temperature"], own.body["sampling_params"]["top_p"]) == (1.0, 0.9)
        assert (own.body["extra_key"], own.body["priority"]) == ("own", 4)

    def test_what_is_pinned_wins_over_the_client(self, one: Stack, form: str) -> None:
        given = {"temperature": 0.5, "max_new_tokens": 20, "top_p": 0.9, "seed": 5}
        path = made(one, sampling_params=given, pin=["temperature", "max_new_tokens", "seed"])
        limit = {"responses": "max_output_tokens"}.get(form, "max_tokens")
        sent = turn(one, path, form, temperature=1.0, top_p=0.5, seed=6, min_tokens=30, **{limit: 40}).body
        wanted = {"temperature": 0.5, "max_new_tokens": 20, "top_p": 0.5, "sampling_seed": 5, "min_new_tokens": 20}
        assert {name: sent["sampling_params"].get(name) for name in wanted} == wanted
        assert one.get(path).json()["pin"] == ["temperature", "max_new_tokens", "sampling_seed"]

    def test_top_k_0_is_all(self, one: Stack, vllm: Stack, form: str) -> None:
        for stream in (False, True):
            path = made(one, sampling_params={"top_k": 0})
            assert turn(one, path, form, stream=stream).body["sampling_params"].get("top_k", -1) == -1
            assert turn(one, path, form, stream=stream, top_k=5).body["sampling_params"]["top_k"] == 5
            path = made(one, sampling_params={"top_k": 0}, pin=["top_k"])
            assert turn(one, path, form, stream=stream, top_k=5).body["sampling_params"].get("top_k", -1) == -1
            assert turn(one, made(one), form, stream=stream, top_k=0).body["sampling_params"].get("top_k", -1) == -1
            assert turn(vllm, made(vllm, sampling_params={"top_k": 0}), form, stream=stream)

    def test_of_two_grammars_the_stronger_one_holds(self, one: Stack, form: str) -> None:
        def grammars(record: GenerationRecord) -> Json:
            params = record.body["sampling_params"]
            return {name: params[name] for name in ("regex", "ebnf") if name in params}

        path = made(one, sampling_params={"regex": "a+"})
        assert grammars(turn(one, path, form)) == {"regex": "a+"}
        assert grammars(turn(one, path, form, ebnf='root ::= "b"')) == {"ebnf": 'root ::= "b"'}
        path = made(one, sampling_params={"regex": "a+"}, pin=["regex"])
        assert grammars(turn(one, path, form, ebnf='root ::= "b"')) == {"regex": "a+"}

    def test_template_options_are_joined_by_name(self, served: Stack, form: str) -> None:
        """The prompt is that of a turn that says all of it itself."""
        path = made(served, chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "low"})
        plain = turn(served, path, form).input_ids
        both = {"enable_thinking": False, "reasoning_effort": "low"}
        assert plain == turn(served, made(served), form, chat_template_kwargs=both).input_ids
        other = {"reasoning_effort": "high"}
        own = turn(served, path, form, chat_template_kwargs=other).input_ids
        assert own == turn(served, made(served), form, chat_template_kwargs={**both, **other}).input_ids


REFUSED: list[tuple[Json, str]] = [
    ({"lora_pth": "a"}, "do you mean `lora_path`"),
    ({"tools": []}, "no field `tools`"),
    ({"lora_path": 7}, "`lora_path` must be a string"),
    ({"lora_path": ["a"]}, "`lora_path` must be a string"),
    ({"model": 7}, "`model` must be a string"),
    ({"extra_key": 1}, "`extra_key` must be"),
    ({"priority": "high"}, "`priority` must be an integer"),
    ({"chat_template_kwargs": "no"}, "`chat_template_kwargs` must be an object"),
    ({"chat_template_kwargs": {"messages": []}}, "cannot be set"),
    ({"pin": "temperature"}, "`pin` must be a list"),
    ({"pin": ["temperature"]}, "not among the `sampling_params`"),
    ({"pin": ["top_p"], "sampling_params": {"temperature": 1}}, "not among the `sampling_params`"),
    ({"sampling_params": {"temprature": 1}}, "do you mean `temperature`"),
    ({"sampling_params": {"temperature": "hot"}}, "`temperature` must be a number"),
    ({"sampling_params": {"temperature": -1}}, "`temperature` must be at least 0"),
    ({"sampling_params": {"top_p": 2}}, "`top_p` must be above 0"),
    ({"sampling_params": {"max_tokens": 0}}, "`max_tokens` must be an integer from 1"),
    ({"sampling_params": {"max_new_tokens": 5, "min_new_tokens": 6}}, "at most 5 tokens"),
    ({"sampling_params": {"n": 2}}, "ask for more in a request"),
    ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "only one of"),
    ({"sampling_params": {"stop_regex": "("}}, "no regular expression"),
    ({"sampling_params": {"logit_bias": {"99999999": 1}}}, "the vocabulary is 0 to"),
    ({"sampling_params": {"stop_token_ids": [99999999], "min_new_tokens": 1}}, "the vocabulary is 0 to"),
    ({"sampling_params": {"lora_path": "a"}}, "beside `sampling_params`"),
    ({"sampling_params": {"extra_key": "a"}}, "beside `sampling_params`"),
    ({"sampling_params": [1]}, "`sampling_params` must be an object"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_no_turn_could_use_is_refused_when_the_session_is_made(one: Stack, fields: Json, says: str) -> None:
    assert says in refused(one, session_id="refused", **fields)
    assert one.get("/sessions/refused").status == 404


GIVEN: Json = {
    "model": "base:a",
    "sampling_params": {"temperature": 0.5, "max_new_tokens": 20},
    "pin": ["temperature"],
    "extra_key": "salt",
    "priority": 3,
    "chat_template_kwargs": {"enable_thinking": False},
}


def test_a_session_keeps_them_at_other_routers_and_after_a_restart(tmp_path: Path) -> None:
    store = StoreConfig(url=f"sqlite:{tmp_path}/store.db")
    with EmbeddedWorker(chat_model("qwen3")) as worker:
        first, second = (Router(worker, store, folder=chat_model("qwen3")) for _ in range(2))
        try:
            path = made(first.stack, **GIVEN)
            shown = first.stack.get(path).json()
            assert {name: shown[name] for name in GIVEN} == GIVEN
            assert shown["lora_path"] == "a"
            routers = (first, second)
            sent = [turn(one.stack, path, "chat/completions", temperature=1.0) for one in routers]
            first.restart()
            sent.append(turn(first.stack, path, "chat/completions", temperature=1.0))
            for router in (first, second):
                again = router.stack.get(path).json()
                assert {name: again.get(name) for name in shown} == {**shown, **_moved(again)}
            for record in sent:
                body = record.body
                assert (body["lora_path"], body["extra_key"], body["priority"]) == ("a", "salt", 3)
                assert body["sampling_params"]["temperature"] == 0.5
                assert record.input_ids == sent[0].input_ids
        finally:
            for router in (first, second):
                router.stop()


def _moved(summary: Json) -> Json:
    """What turns change."""
    names = ("current_head", "num_branches", "num_generations", "nodes", "tokens", "num_inflight_generations")
    return {name: summary[name] for name in names}
