"""Pictures for a vLLM worker: what it is sent, what a real one answered, and which pictures it is sent by their names alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.engine import EngineAnswer, EngineCall, EngineExchange, KnownWorker
from router.engines.events import event_data
from router.engines.form.reply import Reply, read_reply
from router.engines.form.stream import StreamedReply
from router.engines.known_names import KnownNames
from router.engines.vllm.engine import Vllm
from router.engines.vllm.requests import GENERATE, SCALE_OUT
from tests.router.engines.vllm.test_generation import replies_of, streamed
from tests.support.recorded import Exchange, exchanges

Json = dict[str, Any]
CAT, DOG = ("sha256:" + digit * 64 for digit in "ab")


@dataclass
class File:
    """A picture's file."""

    digest: str
    data_url: bytes


FILES = {CAT: File(CAT, b"data:image/png;base64,QQ=="), DOG: File(DOG, b"data:image/png;base64,Qg==")}
SPELLINGS = {
    "max_tokens": "max_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
MISS = b'{"error":{"message":"Cache miss for image at index 0 but data is not provided.","code":400}}'


def worker(*known: str, abilities: Sequence[str] = (SCALE_OUT,)) -> KnownWorker:
    names = KnownNames()
    names.note(known)
    return KnownWorker(frozenset(abilities), images=names)


def exchange(engine: Vllm, body: Json, at: KnownWorker) -> EngineExchange | EngineAnswer:
    found = engine.exchange(EngineCall("POST", "/generate", msgspec.json.encode(body)), at)
    assert found is not None
    return found


def sent(found: EngineExchange | EngineAnswer) -> list[Json]:
    assert not isinstance(found, EngineAnswer), found.body
    assert {call.target for call in found.calls} == {GENERATE}
    return [json.loads(call.body or b"") for call in found.calls]


def parts(found: EngineExchange | EngineAnswer) -> list[list[tuple[str, bool]]]:
    """The name of each picture, and whether its bytes are there."""
    return [[(part["uuid"], "url" in part) for part in body.get("content_parts", ())] for body in sent(found)]


def with_pictures(engine: Vllm, *prompts: Sequence[str], tenant: str = "", **body: Any) -> Json:
    """`/generate` as the hub writes it."""
    batch = len(prompts) > 1
    files = [[FILES[digest] for digest in each] for each in prompts]
    ids = [[7, *[9] * len(each)] for each in prompts]
    return {
        "input_ids": ids if batch else ids[0],
        "return_prompt_token_ids": True,
        **engine.image_fields(tenant, files, batch=batch),
        **body,
    }


_KEPT: list[File] = []


def recorded() -> Iterator[Any]:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        for one in exchanges("vllm", family):
            tells = one.status == 200 and one.body["output_mode"] == "text" and one.body["return_token_ids"]
            if tells and one.body.get("content_parts") and one.body["sampling_params"].get("logprobs", 0) == 0:
                yield pytest.param(one, id=f"{family}, {one.name}")


def asked_as(one: Exchange, engine: Vllm) -> tuple[Json, KnownWorker]:
    """A recorded request in the common form, and a worker that knows the pictures without bytes."""
    sampling = dict(one.body["sampling_params"])
    body: Json = {"input_ids": one.body["token_ids"], "stream": one.body.get("stream", False)}
    if sampling.pop("logprobs", None) is not None:
        body["return_logprob"] = True
    if sampling.pop("prompt_logprobs", None) is not None:
        body |= {"return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = {SPELLINGS.get(name, name): value for name, value in sampling.items()}
    shown = one.body["content_parts"]
    files = [File(part["uuid"], part.get("url", "data:image/png;base64,AAAA").encode()) for part in shown]
    _KEPT.extend(files)
    body |= {"return_prompt_token_ids": True, **engine.image_fields("", [files], batch=False)}
    return body, worker(*(part["uuid"] for part in shown if "url" not in part))


@pytest.mark.parametrize("one", list(recorded()))
def test_what_a_real_worker_answered(one: Exchange) -> None:
    """The request is the recorded one, and every id, text and place of the answer is there."""
    engine = Vllm()
    body, at = asked_as(one, engine)
    found = exchange(engine, body, at)
    (made,) = sent(found)
    assert not isinstance(found, EngineAnswer)
    assert (made["token_ids"], made["content_parts"]) == (one.body["token_ids"], one.body["content_parts"])
    assert {key: made["sampling_params"][key] for key in one.body["sampling_params"]} == one.body["sampling_params"]
    whole = one.reply
    if not one.body.get("stream"):
        answer = found.whole([EngineAnswer(200, json.dumps(one.reply).encode())])
        assert isinstance(answer, EngineAnswer)
        told = json.loads(answer.body)
        replies = [read_reply(msgspec.json.encode(each))[0] for each in (told if isinstance(told, list) else [told])]
        if "logprob_start_len" in body:
            entries = told["meta_info"]["input_token_logprobs"]
            assert [entry[1] for entry in entries] == whole["prompt_token_ids"]
            assert all(entry[0] is not None for entry in entries[1:])
    else:
        events = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in one.reply)
        out = streamed(found, [events + b"data: [DONE]\n\n"])  # type: ignore[arg-type] # it is the only kind
        replies = [reply for _, reply in sorted(replies_of(out).items())]
        whole = one.reply[0]
    for reply in replies:
        check(reply, whole)
    if not one.body.get("stream"):
        assert [list(reply.ids) for reply in replies] == [choice["token_ids"] for choice in whole["choices"]]
        assert [reply.text for reply in replies] == [choice["text"] for choice in whole["choices"]]
    assert all(part["uuid"] in at.images for part in one.body["content_parts"])


def check(reply: Reply, told: Json) -> None:
    assert json.loads(reply.prompt_ids) == told["prompt_token_ids"]
    assert reply.prompt_tokens == len(told["prompt_token_ids"])
    assert reply.places == [(one["offset"], one["length"]) for one in told["mm_placeholders"]["image"]]


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_stream_that_breaks_off_has_told_the_prompt(cumulative: bool) -> None:
    """Its client keeps a part, whose prompt is known by the first event."""
    one = next(one for one in exchanges("vllm", "qwen2_5_vl") if one.name == "a stream")
    engine = Vllm(cumulative=cumulative)
    found = exchange(engine, *asked_as(one, engine))
    assert not isinstance(found, EngineAnswer)
    reader = StreamedReply()
    for event in one.reply[:-1]:
        data = event_data(found.event(0, json.dumps(event).encode()))
        assert data is not None
        reader.feed(data)
    reply = reader.reply()
    assert reply is not None
    assert (len(one.reply), reply.finish_type) == (3, None)
    check(reply, one.reply[0])


def test_a_picture_is_sent_by_its_name_alone_once_the_worker_has_answered_with_it() -> None:
    engine, at = Vllm(), worker()
    for known in (False, False):  # nothing was answered between
        assert parts(exchange(engine, with_pictures(engine, [CAT]), at)) == [[(CAT, not known)]]
    found = exchange(engine, with_pictures(engine, [CAT, DOG]), at)
    assert not isinstance(found, EngineAnswer)
    found.whole([EngineAnswer(200, answer([7, 9, 9, 9], [(1, 2), (3, 1)]))])
    assert parts(exchange(engine, with_pictures(engine, [DOG, CAT, DOG]), at)) == [
        [(DOG, False), (CAT, False), (DOG, False)]
    ]
    assert parts(exchange(engine, with_pictures(engine, [CAT]), worker())) == [[(CAT, True)]]


def answer(ids: list[int], places: Sequence[tuple[int, int]]) -> bytes:
    choice = {"index": 0, "text": "a", "token_ids": [5], "finish_reason": "length", "weight_versions": None}
    told = {"prompt_token_ids": ids, "mm_placeholders": {"image": [{"offset": a, "length": b} for a, b in places]}}
    body = {"request_id": "x", "usage": None, "choices": [choice], **told}
    return json.dumps(body).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_that_the_worker_has_forgotten_is_sent_again_once(stream: bool) -> None:
    engine, at = Vllm(), worker(CAT, DOG)
    found = exchange(engine, with_pictures(engine, [CAT, DOG], stream=stream, rid="mine"), at)
    assert parts(found) == [[(CAT, False), (DOG, False)]]
    assert not isinstance(found, EngineAnswer)
    again = found.whole([EngineAnswer(400, MISS)])
    assert parts(again) == [[(CAT, True), (DOG, True)]]
    assert sent(again)[0]["request_id"] == "mine"
    assert not isinstance(again, EngineAnswer)
    assert again.stream is stream
    told = again.whole([EngineAnswer(400, MISS)])
    assert told == EngineAnswer(400, MISS), "it would go on for ever"


OTHER = b'{"error":{"message":"no"}}'


@pytest.mark.parametrize("status", [400, 500])
def test_other_errors_are_passed_on_if_the_bytes_do_not_help(status: int) -> None:
    engine, at = Vllm(), worker(CAT)
    body = with_pictures(engine, [CAT])
    found = exchange(engine, body, at)
    assert not isinstance(found, EngineAnswer)
    again = found.whole([EngineAnswer(status, OTHER)])
    assert parts(again) == [[(CAT, True)]]
    assert not isinstance(again, EngineAnswer)
    assert again.whole([EngineAnswer(status, OTHER)]) == EngineAnswer(status, OTHER)
    at.images.note([CAT])
    assert CAT in at.images, "the request was at fault, not the name"


@pytest.mark.parametrize("status", [429, 503])
def test_a_worker_that_is_busy_is_asked_once(status: int) -> None:
    engine, at = Vllm(), worker(CAT)
    found = exchange(engine, with_pictures(engine, [CAT]), at)
    assert not isinstance(found, EngineAnswer)
    assert found.whole([EngineAnswer(status, OTHER)]) == EngineAnswer(status, OTHER)
    assert CAT in at.images


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_without_a_cache_of_images_gets_the_bytes_always(stream: bool) -> None:
    """It fails at a name, and says nothing of a cache: twice in a row, for once may be an accident."""
    engine, at = Vllm(), worker()
    body, told = with_pictures(engine, [CAT], stream=stream), answer([7, 9, 9], [(1, 2)])

    def answered(found: EngineExchange | EngineAnswer) -> None:
        assert not isinstance(found, EngineAnswer)
        if not stream:
            found.whole([EngineAnswer(200, told)])
            return
        for data in (told, b"[DONE]"):
            found.event(0, data)

    def failed_at_names() -> None:
        found = exchange(engine, body, at)
        assert parts(found) == [[(CAT, False)]]
        assert not isinstance(found, EngineAnswer)
        answered(found.whole([EngineAnswer(500, OTHER)]))

    answered(exchange(engine, body, at))
    failed_at_names()
    answered(exchange(engine, body, at))  # an accident: here the name is enough
    failed_at_names()
    at.images.note([DOG])
    failed_at_names()
    for _ in range(3):
        found = exchange(engine, body, at)
        assert parts(found) == [[(CAT, True)]]
        answered(found)
    assert DOG not in at.images
    at.images.forget()  # it was started again
    answered(exchange(engine, body, at))
    assert parts(exchange(engine, body, at)) == [[(CAT, False)]]


def test_a_worker_that_forgets_often_is_sent_names_all_the_same() -> None:
    engine, at = Vllm(), worker(CAT)
    for _ in range(4):
        found = exchange(engine, with_pictures(engine, [CAT]), at)
        assert parts(found) == [[(CAT, False)]]
        assert not isinstance(found, EngineAnswer)
        again = found.whole([EngineAnswer(400, MISS)])
        assert not isinstance(again, EngineAnswer)
        again.whole([EngineAnswer(200, answer([7, 9, 9], [(1, 2)]))])


def test_each_tenant_has_names_of_its_own() -> None:
    engine = Vllm()
    names = {
        tenant: parts(exchange(engine, with_pictures(engine, [CAT], tenant=tenant), worker()))[0][0][0]
        for tenant in ("", "a", "b")
    }
    assert names[""] == CAT
    assert len(set(names.values())) == 3
    assert all(CAT not in name for tenant, name in names.items() if tenant)


def test_the_pictures_of_a_batch() -> None:
    engine, at = Vllm(), worker(DOG)
    body = with_pictures(engine, [CAT], [], [DOG, CAT])
    found = exchange(engine, body, at)
    assert not isinstance(found, EngineAnswer)
    shown = [
        [(part["uuid"], "url" in part) for part in json.loads(each.body or b"").get("content_parts", ())]
        for each in found.calls
    ]
    assert shown == [[(CAT, True)], [], [(DOG, False), (CAT, True)]]
    streamed_body = with_pictures(engine, [DOG], [DOG], stream=True)  # of which one may go out late
    assert parts(exchange(engine, streamed_body, at)) == [[(DOG, True)], [(DOG, True)]]


def refusal(found: EngineExchange | EngineAnswer) -> Json:
    assert isinstance(found, EngineAnswer)
    assert found.status == 400
    error: Json = json.loads(found.body)["error"]
    return error


def test_a_worker_without_scale_out_takes_none() -> None:
    engine = Vllm()
    told = refusal(exchange(engine, with_pictures(engine, [CAT]), worker(abilities=())))
    assert told["code"] == "multimodal_unsupported"
    assert "--enable-scale-out" in told["message"]


def test_only_the_hub_names_pictures() -> None:
    """A client that could say a name beside other bytes would give its picture to whoever sends that name next."""
    engine = Vllm()
    real = with_pictures(engine, [CAT])
    forged: list[Any] = [[DOG], ["data:image/png;base64,QQ=="], "data:image/png;base64,QQ==", {"a": 1}, [[CAT]], 7]
    for one in forged:
        told = refusal(exchange(engine, {**real, "image_data": one}, worker()))
        assert told["code"] == "multimodal_unsupported"
    assert refusal(exchange(Vllm(), real, worker()))["code"] == "multimodal_unsupported"


def test_a_picture_is_named_as_long_as_a_call_keeps_it() -> None:
    engine, file = Vllm(), File(DOG, b"data:image/png;base64,Qg==")
    body = {"input_ids": [9], **engine.image_fields("", [[file]], batch=False)}
    assert parts(exchange(engine, body, worker())) == [[(DOG, True)]]
    del file
    assert refusal(exchange(engine, body, worker()))


@pytest.mark.parametrize("more", [{"top_logprobs_num": 2}, {"token_ids_logprob": [5]}])
def test_candidates_without_ids_are_refused(more: Json) -> None:
    engine = Vllm()
    told = refusal(exchange(engine, with_pictures(engine, [CAT], return_logprob=True, **more), worker()))
    assert next(iter(more)) in told["message"]


@given(st.lists(st.tuples(st.sampled_from(["note", "forget", "all"]), st.lists(st.sampled_from("abcdef")))))
def test_known_names_are_the_latest(steps: list[tuple[str, list[str]]]) -> None:
    names, oracle = KnownNames(3), list[str]()
    for step, some in steps:
        if step == "note":
            names.note(some)
            for one in some:
                oracle = [*(other for other in oracle if other != one), one]
            oracle = oracle[-3:]
        elif step == "forget":
            names.forget(some)
            oracle = [one for one in oracle if one not in some]
        else:
            names.forget()
            oracle = []
        assert [one for one in "abcdef" if one in names] == sorted(oracle)
        assert len(names) == len(oracle)
