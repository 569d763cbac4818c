"""Prompts in segments: what the worker reads is the sum of their parts, and what was sampled stays what it was.

A transcript that is rendered again is the case that they are for: texts of a template with sampled ids in between.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from middleware_hub.hub import Hub
from router.app import create_app
from router.config import AbortConfig, RouterConfig, WorkersConfig
from tests.conftest import examples
from tests.support.asking import assert_kept, counted
from tests.support.client import Answer
from tests.support.oracle import Speller
from tests.support.serving import serve
from tests.support.stack import Reply, Stack, stack
from tests.support.usual import usual
from tests.support.vocabularies import NAMES, Name
from worker.engine.records import GenerationRecord

ALL: tuple[Name, ...] = (*NAMES, "mistral-v1-legacy")
Json = dict[str, Any]


@pytest.fixture(scope="module", params=usual(ALL, "qwen", "mistral-v1"))
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    name: Name = request.param
    with stack(name) as started:
        yield started
        assert started.idle(), started.inflight()
        assert [worker.out_of_range for worker in started.workers] == [[], [], []]


@pytest.fixture(scope="module")
def qwen() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as started:
        yield started
        assert started.idle(), started.inflight()
        assert started.workers[0].out_of_range == []


def names_of(spelling: Speller) -> dict[str, str]:
    """What a template of a test has in braces."""
    if not spelling.bos:
        chat = {"user": "<|im_start|>user\n", "then": "<|im_end|>\n<|im_start|>assistant\n"}
        return {"eos": "<|im_end|>", "special": "<|endoftext|>", "bos": "", **chat}
    return {"eos": "</s>", "special": "<unk>", "bos": "<s>", "user": "[INST] ", "then": " [/INST]"}


def ids_of(spelling: Speller, *pieces: str) -> list[int]:
    """Each piece encoded by itself, as no encoder would encode them together."""
    return [number for piece in pieces for number in spelling.encode_tail(piece.format(**names_of(spelling)))]


def expected(spelling: Speller, segments: Sequence[Json]) -> list[int]:
    """What a prompt has to be: a start, and continuations behind it."""
    found: list[int] = []
    for number, segment in enumerate(segments):
        encode = spelling.encode_tail if number else spelling.encode_start
        found += segment["ids"] if "ids" in segment else encode(segment["text"])
    return found


def say(
    served: Stack, space: str, segments: list[Json], ids: list[int], body: Json | None = None, **said: Any
) -> Reply:
    """One generation that samples these ids, and its EOS."""
    headers = {"x-radix-namespace": space, **said.pop("headers", {})}
    params = {"custom_params": {"script": {"ids": ids, **said}}}
    return served.generate({"prompt_segments": segments, "sampling_params": params, **(body or {})}, headers=headers)


def rendered(spelling: Speller, template: str) -> Json:
    return {"text": template.format(**names_of(spelling))}


# -- what a conversation is --------------------------------------------------------------------------------------------


def test_a_conversation_that_is_rendered_anew_is_one_chain(served: Stack, space: str) -> None:
    """Three turns, each sampled as no encoder would write it, and each between rendered texts in the next prompt."""
    spelling = served.spelling
    segments = [rendered(spelling, "{user}Write a summary{then}")]
    pieces = [("Hel", "lo", "sum"), ("H", "ello"), ("sum", "mary", "\n")]
    records: list[GenerationRecord] = []
    for number, reply in enumerate(pieces):
        before = records[-1] if records else None
        made = say(served, space, segments, ids_of(spelling, *reply))
        record = made.record
        assert record.input_ids == expected(spelling, segments)
        assert made.answer.headers["x-radix-recorded"] == "exact"
        known = 0 if before is None else len(before.input_ids) + len(before.output_ids)
        assert made.answer.headers["x-radix-reused-tokens"] == str(known)
        if before is not None:
            assert record.input_ids[:known] == before.input_ids + before.output_ids
        records.append(record)
        segments += [{"ids": record.output_ids}, rendered(spelling, f"\n{{user}}and turn {number}?{{then}}")]
    last = records[-1]
    found = served.retrieve(spelling.text_of_request(last.input_ids) + last.text, namespace=space, strict=True)
    assert_kept(found, last)
    mask, logprobs = [0] * len(found["tokens"]), [0.0] * len(found["tokens"])
    for record in records:
        begin, end = len(record.input_ids), len(record.input_ids) + len(record.output_ids)
        assert found["tokens"][begin:end] == record.output_ids
        mask[begin:end], logprobs[begin:end] = [1] * (end - begin), record.logprobs
    assert (found["loss_mask"], found["rollout_logp"]) == (mask, logprobs)


def test_versions_of_a_spliced_chain_are_those_under_which_it_was_sampled(served: Stack, space: str) -> None:
    spelling = served.spelling
    segments = [rendered(spelling, "{user}Hello{then}")]
    try:
        for version in ("1", "2", "3"):
            served.set_weight_version(version)
            record = say(served, space, segments, ids_of(spelling, "Hel", "lo")).record
            segments += [{"ids": record.output_ids}, {"text": f"\nmore {version}"}]
    finally:
        served.set_weight_version("default")
    found = served.retrieve(spelling.text_of_request(record.input_ids) + record.text, namespace=space)
    assert [span["version"] for span in found["weight_versions"]] == ["1", "2", "3"]


def test_ids_that_were_sampled_under_another_prefix_are_context(served: Stack, space: str) -> None:
    """Their ids stay; their logprobs would be those of another prompt."""
    spelling = served.spelling
    first = say(served, space, [{"text": "Question: "}], ids_of(spelling, "Hel", "lo")).record
    segments = [{"text": "Quite another one: "}, {"ids": first.output_ids}, {"text": "\nand"}]
    made = say(served, space, segments, ids_of(spelling, "sum"))
    assert made.answer.headers["x-radix-reused-tokens"] == "0"
    found = served.retrieve(spelling.text_of_request(made.record.input_ids) + made.record.text, namespace=space)
    assert_kept(found, made.record)
    assert found["tokens"][: len(made.record.input_ids)] == expected(spelling, segments)
    assert sum(found["loss_mask"]) == len(made.record.output_ids)
    assert not any(found["rollout_logp"][: len(made.record.input_ids)])


def test_the_same_turn_is_sampled_here_and_context_there(served: Stack, space: str) -> None:
    """Two turns with equal ids: the one that stands behind its own prefix is the sampled one."""
    spelling = served.spelling
    first = say(served, space, [{"text": "A: "}], ids_of(spelling, "Hel", "lo")).record
    other = [{"text": "B: "}, {"ids": first.output_ids}, {"text": "\nA: "}, {"ids": first.output_ids}, {"text": "!"}]
    own = [{"text": "A: "}, {"ids": first.output_ids}, {"text": "\nA: "}, {"ids": first.output_ids}, {"text": "!"}]
    sampled = []
    for segments in (other, own):
        record = say(served, space, segments, ids_of(spelling, "sum")).record
        found = served.retrieve(spelling.text_of_request(record.input_ids) + record.text, namespace=space)
        assert_kept(found, record)
        sampled.append([at for at, mask in enumerate(found["loss_mask"]) if mask and at < len(record.input_ids)])
    start = len(first.input_ids)
    assert sampled == [[], list(range(start, start + len(first.output_ids)))]


def test_a_reply_without_its_end_continues_what_there_is_of_it(served: Stack, space: str) -> None:
    """Without its hidden EOS it is the same reply; cut in the middle, its first tokens are still what was sampled."""
    spelling = served.spelling
    first = say(served, space, [{"text": "A: "}], ids_of(spelling, "Hel", "lo", "sum", "mary")).record
    for kept in (len(first.output_ids) - 1, 2):
        segments = [{"text": "A: "}, {"ids": first.output_ids[:kept]}, {"text": "\nB"}]
        made = say(served, space, segments, ids_of(spelling, "lo"))
        assert made.record.input_ids == expected(spelling, segments)
        assert made.answer.headers["x-radix-reused-tokens"] == str(len(first.input_ids) + kept)
        found = served.retrieve(spelling.text_of_request(made.record.input_ids) + made.record.text, namespace=space)
        assert_kept(found, made.record)
        assert found["rollout_logp"][len(first.input_ids) :][:kept] == first.logprobs[:kept]


def test_a_conversation_may_go_on_as_text_and_back(served: Stack, space: str) -> None:
    """What was recorded from segments is found by its text, and the other way round."""
    spelling = served.spelling
    headers = {"x-radix-namespace": space}
    script = {"custom_params": {"script": {"ids": ids_of(spelling, "Hel", "lo")}}}
    first = served.generate({"text": "A: ", "sampling_params": script}, headers=headers).record
    second = say(served, space, [{"text": "A: "}, {"ids": first.output_ids}, {"text": "\nB: "}], ids_of(spelling, "H"))
    chain = second.record.input_ids + second.record.output_ids
    assert chain[: len(first.input_ids) + len(first.output_ids)] == first.input_ids + first.output_ids
    text = spelling.text_of_request(second.record.input_ids) + second.record.text
    third = served.generate({"text": text + "\nA: ", "sampling_params": script}, headers=headers).record
    assert third.input_ids == chain + spelling.encode_tail("\nA: ")


def test_no_parent_makes_all_of_it_context(qwen: Stack, space: str) -> None:
    first = say(qwen, space, [{"text": "A: "}], ids_of(qwen.spelling, "Hel", "lo")).record
    segments = [{"text": "A: "}, {"ids": first.output_ids}, {"text": "!"}]
    made = say(qwen, space, segments, ids_of(qwen.spelling, "sum"), headers={"x-radix-parent": "none"})
    found = qwen.retrieve(qwen.spelling.text_of_request(made.record.input_ids) + made.record.text, namespace=space)
    assert_kept(found, made.record)
    assert sum(found["loss_mask"]) == len(made.record.output_ids)


def test_another_adapter_has_other_chains(qwen: Stack, space: str) -> None:
    segments, ids = [{"text": "A: "}], ids_of(qwen.spelling, "Hel", "lo")
    first = say(qwen, space, segments, ids, {"lora_path": "one"}).record
    again = [*segments, {"ids": first.output_ids}, {"text": "!"}]
    known = str(len(first.input_ids) + len(first.output_ids))
    for adapter, reused in (("other", "0"), ("one", known)):
        reply = say(qwen, space, again, ids, {"lora_path": adapter})
        assert reply.answer.headers["x-radix-reused-tokens"] == reused


# -- what is sent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces",
    [
        ("Hello",),
        (" Hello",),
        ("{bos}Hello", " there"),
        ("Hel", "lo"),
        ("sum", "mary", " of", " it"),
        ("Hello", "Hello"),
        ("Hello", " Hello", "  Hello"),
        ("{eos}", "Hello", "{eos}", " Hello"),
        ("e", "\u0301"),
        ("a", "\n", "\n"),
    ],
)
def test_each_text_is_a_chunk_as_it_is_written(served: Stack, space: str, pieces: tuple[str, ...]) -> None:
    """The first is a start, and gains what a start gains; those behind it gain nothing, and merge with nothing."""
    spelling = served.spelling
    segments = [rendered(spelling, piece) for piece in pieces]
    record = say(served, space, segments, ids_of(spelling, "x")).record
    assert record.input_ids == expected(spelling, segments)
    if len(segments) == 1:
        text = served.generate(
            {**segments[0], "sampling_params": {"max_new_tokens": 1}}, headers={"x-radix-namespace": space + "text"}
        )
        assert record.input_ids == text.record.input_ids


def test_ids_in_front_are_taken_as_they_are(served: Stack, space: str) -> None:
    """No BOS is put before them, and the text behind them is a continuation."""
    spelling = served.spelling
    ids = ids_of(spelling, "Hel", "lo")
    for head in (ids, [*ids_of(spelling, "{bos}"), *ids]):
        record = say(served, space, [{"ids": head}, {"text": "Hello"}], ids_of(spelling, "x")).record
        assert record.input_ids == [*head, *spelling.encode_tail("Hello")]


OPTIONS: list[Json] = [
    {},
    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True},
    {"logprob_start_len": 0, "top_logprobs_num": 2},
    {"stream": True},
    {"stream": True, "return_logprob": True, "sampling_params": {"max_new_tokens": 2, "n": 2}},
    {"sampling_params": {"max_new_tokens": 2, "n": 3}, "return_trajectory": True},
    {"lora_path": "adapter", "unheard_of": {"x": [1.5, None]}, "priority": 3},
    {"session_params": {}, "return_logprob": True},
    {"image_data": "data:image/png;base64,AAAA", "sampling_params": {"max_new_tokens": 1, "n": None}},
    {"text": None, "input_embeds": None, "stream": None},
]


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_a_worker_cannot_tell_them_from_ids(qwen: Stack, space: str, options: Json, batch: bool) -> None:
    """Whatever else is asked for: the same body, and the client the same kind of reply, as with `input_ids`."""
    spelling = qwen.spelling
    prompts = [
        [{"text": "Hello"}, {"ids": ids_of(spelling, "Hel", "lo")}, {"text": " there"}],
        [{"ids": ids_of(spelling, "sum")}, {"text": "mary"}],
    ]
    ids = [expected(spelling, prompt) for prompt in prompts]
    forms = [
        {"prompt_segments": prompts if batch else prompts[0]},
        {"input_ids": ids if batch else ids[0]},
    ]
    bodies, heads, shapes = [], [], []
    for number, form in enumerate(forms):
        body = {"sampling_params": {"max_new_tokens": 2}, **options, **form}
        made = qwen.generate(body, headers={"x-radix-namespace": f"{space}{number}"})
        bodies.append([{**record.body, "rid": None} for record in made.records])
        heads.append({k: v for k, v in made.answer.headers.items() if k.startswith("x-radix")})
        shapes.append(shape(made.body))
    assert bodies[0] == bodies[1]
    assert heads[0] == heads[1]
    assert shapes[0] == shapes[1]
    assert not {"prompt_segments", "text"} & bodies[0][0].keys()


def shape(value: Any) -> Any:
    """The keys of a JSON value, without what stands under them."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    return type(value).__name__ if not isinstance(value, list) else shape(value[0]) if value else []


def test_a_batch_is_so_many_prompts(served: Stack, space: str) -> None:
    spelling = served.spelling
    prompts = [[{"text": "A: "}], [{"text": "B"}, {"ids": ids_of(spelling, "Hel")}], [{"ids": ids_of(spelling, "lo")}]]
    script = {"custom_params": {"script": {"ids": ids_of(spelling, "Hel", "lo")}}}
    body = {"prompt_segments": prompts, "sampling_params": script, "rid": ["a" + space, "b" + space, "c" + space]}
    made = served.generate(body, headers={"x-radix-namespace": space})
    assert made.answer.headers["x-radix-prompt-tokens"] == str(sum(len(one.input_ids) for one in made.records))
    for prompt, record, name in zip(prompts, made.records, body["rid"], strict=True):
        assert record.input_ids == expected(spelling, prompt)
        text = spelling.text_of_request(record.input_ids) + record.text
        assert_kept(served.retrieve(text, namespace=space, request_id=name), record)


@pytest.mark.parametrize("stream", [False, True])
def test_the_trajectory_tells_the_text_under_which_it_is_found(served: Stack, space: str, stream: bool) -> None:
    spelling = served.spelling
    segments = [
        rendered(spelling, "{user}e\u0301te{then}"),
        {"ids": ids_of(spelling, "Hel", "{special}")},
        {"text": "x"},
    ]
    made = say(served, space, segments, ids_of(spelling, "Hel", "lo"), {"return_trajectory": True, "stream": stream})
    reply = made.body[-1] if stream else made.body
    told = reply["meta_info"]["trajectory"]
    assert told["response"] == spelling.text_of_request(made.record.input_ids) + made.record.text
    assert_kept(told, made.record)
    assert served.retrieve(told["response"], namespace=space) == told


def test_what_was_aborted_is_sent_again_with_the_same_ids(space: str) -> None:
    with stack("qwen", styles=("cumulative",), abort=AbortConfig(attempts=3, wait=0)) as served:
        ids = ids_of(served.spelling, "Hel", "lo")
        segments = [{"text": "A: "}, {"ids": ids}, {"text": "!"}]
        worker = served.workers[0]
        worker.script(ids[:1], finish="abort")
        worker.script(ids)
        body = {"prompt_segments": segments, "sampling_params": {"max_new_tokens": 8}}
        aborted, record = served.generate(body, headers={"x-radix-namespace": space}).records
        assert aborted.input_ids == record.input_ids == expected(served.spelling, segments)
        text = served.spelling.text_of_request(record.input_ids) + record.text
        assert_kept(served.retrieve(text, namespace=space, strict=True), record)


def test_tokens_are_counted_as_reused_or_as_encoded(qwen: Stack, space: str) -> None:
    """Ids that a client gave are neither, and what a chain has was not encoded for it, whatever it took to find it."""

    def count(kind: str) -> int:
        return counted(qwen, "tito_radix_tokens_total").get(f'{{kind="{kind}"}}', 0)

    before = count("reused"), count("encoded")
    first = say(qwen, space, [{"text": "A: "}, {"ids": [5, 6]}], ids_of(qwen.spelling, "Hel")).record
    head = [{"text": "A: "}, {"ids": [5, 6]}, {"ids": first.output_ids}]
    say(qwen, space, [*head, {"text": "\nmore"}], ids_of(qwen.spelling, "lo"))
    assert count("reused") - before[0] == len(first.input_ids) + len(first.output_ids)
    assert count("encoded") - before[1] == len(qwen.spelling.encode_tail("A: ")) + len(
        qwen.spelling.encode_tail("\nmore")
    )


# -- random ones ---------------------------------------------------------------------------------------------------------

TEXTS = ["Hello", " Hello", "Hel", "lo", "mary", " ", "\n", "  \n", "é", "e\u0301", "\u0301", "😀", "你", "<think>"]
TEXTS += ["{eos}", "{bos}", "{bos}Hello", "{special}", "{user}hi{then}", "{eos}\n", "\u2581", "7"]
PIECES = ["Hel", "lo", " world", "<", "think", ">", "sum", "mary", "\n", "é", "😀", "{special}", "{eos}", "e", "\u0301"]

HALVES = ("{half}", "{rest}")

parts = st.one_of(
    st.tuples(st.just("text"), st.tuples(st.sampled_from(TEXTS))),
    st.tuples(st.just("ids"), st.lists(st.sampled_from([*PIECES, *HALVES, "{bos}"]), min_size=1, max_size=3)),
)
turns = st.tuples(
    st.sampled_from([0, 1, 1, 1, 2, 3]),  # the turn before, whose prompt and reply this one begins with; 0: none
    st.booleans(),  # whether the EOS of that reply is kept
    st.lists(parts, min_size=1, max_size=4),
    st.integers(0, 3),  # a turn whose reply stands in the middle of it, wherever it was sampled
    st.lists(st.sampled_from(PIECES), max_size=4),
    st.booleans(),
)
FEWER = [phase for phase in Phase if phase is not Phase.explain]


@dataclasses.dataclass
class Known:
    """A reply, by what the worker did, and the mask and the logprobs of its whole chain as they were retrieved."""

    segments: list[Json]
    record: GenerationRecord
    mask: list[int]
    logprobs: list[float]

    @property
    def ids(self) -> list[int]:
        return self.record.input_ids + self.record.output_ids


def half_of(spelling: Speller, piece: str) -> list[int]:
    """Bytes of a character that has several tokens."""
    emoji = ids_of(spelling, "😀")
    if spelling.sentencepiece and len(emoji) == 1:
        emoji = [spelling.start.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "😀".encode()]
    middle = len(emoji) // 2
    return emoji[:middle] if piece == "{half}" else emoji[middle:]


def segment_of(spelling: Speller, part: tuple[str, Sequence[str]]) -> Json | None:
    """The segment of a part; None if it is empty in this vocabulary."""
    kind, pieces = part
    if kind == "text":
        made = rendered(spelling, pieces[0])
        return made if made["text"] else None
    ids: list[int] = []
    for piece in pieces:
        ids += half_of(spelling, piece) if piece in HALVES else ids_of(spelling, piece)
    return {"ids": ids} if ids else None


def assert_explained(found: Json, record: GenerationRecord, known: list[Known], reused: int) -> None:
    """Sampled is what a recorded chain with the same beginning sampled, with its logprobs; and all of the longest one is."""
    size = len(record.input_ids)
    begun = [one for one in known if record.input_ids[: len(one.ids)] == one.ids]
    longest = max((len(one.ids) for one in begun), default=0)
    assert longest <= reused <= size
    prompt = list(zip(found["loss_mask"], found["rollout_logp"], strict=True))[:size]
    if longest:
        candidates = [one for one in begun if len(one.ids) == longest]
        assert prompt[:longest] in [list(zip(one.mask, one.logprobs, strict=True)) for one in candidates]
    for at, (mask, logprob) in enumerate(prompt):
        same = [one for one in known if one.ids[: at + 1] == record.input_ids[: at + 1]]
        sampled = [one.logprobs[at] for one in same if at < len(one.mask) and one.mask[at]]
        assert logprob in sampled if mask else logprob == 0.0
        assert not mask or at < reused
    event("continued" if longest else "partly" if reused else "fresh")


@settings(
    max_examples=examples(40),
    deadline=None,
    phases=FEWER,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
@given(conversation=st.lists(turns, min_size=1, max_size=5))
def test_any_segments_are_the_sum_of_their_parts(served: Stack, conversation: list[Any]) -> None:
    spelling, space = served.spelling, uuid.uuid4().hex
    known: list[Known] = []
    for back, ends, drawn, spliced, reply, stream in conversation:
        segments: list[Json] = []
        if 0 < back <= len(known):
            before = known[-back]
            ids = before.record.output_ids
            segments += [*before.segments, {"ids": ids if ends or len(ids) < 2 else ids[:-1]}]
        middle = [{"ids": known[-spliced].record.output_ids}] if 0 < spliced <= len(known) else []
        segments += [one for part in drawn[:1] if (one := segment_of(spelling, part))]
        segments += middle
        segments += [one for part in drawn[1:] if (one := segment_of(spelling, part))]
        broken = any(piece in HALVES for _, pieces in drawn for piece in pieces)
        if broken or not spelling.text_of_request(expected(spelling, segments)):
            # A reply that an engine begins inside of a character is no text by itself; and by no text nothing is found.
            segments.append({"text": "A:"})
        body = {"stream": stream, "return_trajectory": True}
        made = say(served, space, segments, ids_of(spelling, *reply), body)
        record = made.record
        assert record.input_ids == expected(spelling, segments)
        at = 0
        for number, segment in enumerate(segments):
            if "ids" in segment:
                assert record.input_ids[at : at + len(segment["ids"])] == segment["ids"]
            at += len(expected(spelling, [segment] if not number else [{"ids": []}, segment]))
        assert not record.from_text
        assert "prompt_segments" not in record.body
        text = spelling.text_of_request(record.input_ids) + record.text
        found = served.retrieve(text, namespace=space, request_id=record.rid)
        assert found["response"] == text
        assert_kept(found, record)
        assert_explained(found, record, known, int(made.answer.headers["x-radix-reused-tokens"]))
        assert served.retrieve(text, namespace=space)["exact"]
        last = made.body[-1] if stream else made.body
        assert last["meta_info"]["trajectory"] == found
        known.append(Known(segments, record, found["loss_mask"], found["rollout_logp"]))


# -- what is refused -----------------------------------------------------------------------------------------------------

A: Json = {"text": "a"}
REFUSED: list[tuple[str, Json, str]] = [
    ("no segments", {"prompt_segments": []}, "empty"),
    ("a batch of none", {"prompt_segments": [[]]}, "empty"),
    ("an empty text", {"prompt_segments": [A, {"text": ""}]}, "`prompt_segments[1].text`"),
    ("no ids", {"prompt_segments": [A, {"ids": []}]}, "`prompt_segments[1].ids`"),
    ("an unknown key", {"prompt_segments": [{"text": "a", "mask": 1}]}, "mask"),
    ("a text and ids", {"prompt_segments": [{"text": "a", "ids": [1]}]}, "`prompt_segments[0]`"),
    ("neither", {"prompt_segments": [{}]}, "`prompt_segments[0]`"),
    ("a boolean", {"prompt_segments": [{"ids": [True]}]}, "bool"),
    ("a text beside", {"prompt_segments": [A], "text": "a"}, "exactly one"),
    ("ids beside", {"prompt_segments": [A], "input_ids": [1]}, "exactly one"),
    ("embeddings beside", {"prompt_segments": [A], "input_embeds": [[0.5]]}, "exactly one"),
    ("an id past the vocabulary", {"prompt_segments": [A, A, {"ids": [5, 151650]}]}, "`prompt_segments[2].ids` has 151650"),
    ("a negative id", {"prompt_segments": [{"ids": [-1]}]}, "`prompt_segments[0].ids` has -1"),
    ("an id that fits nowhere", {"prompt_segments": [{"ids": [10**30]}]}, "`prompt_segments[0].ids` has 1000"),
    ("one of a batch", {"prompt_segments": [[A], [A, {"ids": [10**9]}]]}, "`prompt_segments[1][1].ids`"),
    ("one where nothing is recorded", {"prompt_segments": [{"ids": [-1]}], "session_params": {}}, "has -1"),
    ("a stop id", {"prompt_segments": [A], "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [-1]}}, "stop_token"),
]  # fmt: skip


def problem(answer: Answer) -> Json:
    """An error of the router's own, and not a worker's."""
    assert answer.status == 400, answer.content
    assert "x-router-worker" not in answer.headers
    error: Json = json.loads(answer.content)["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "says"), [pytest.param(*row[1:], id=row[0]) for row in REFUSED])
def test_what_is_no_prompt_is_refused_here(qwen: Stack, body: Json, says: str, stream: bool) -> None:
    logged, held = len(qwen.workers[0].log), qwen.get("/radix_tree/stats").json()
    assert says in problem(qwen.post("/generate", {**body, "stream": stream}))["message"]
    assert len(qwen.workers[0].log) == logged
    assert qwen.get("/radix_tree/stats").json() == held


def test_half_a_surrogate_is_refused(qwen: Stack) -> None:
    answer = qwen.post("/generate", None, raw=b'{"prompt_segments": [{"text": "a\\ud800b"}]}')
    assert problem(answer)


def test_a_prompt_that_is_too_long_is_refused_before_a_worker_is_asked(space: str) -> None:
    """Counted in what would be sent: ids as they are, texts as they are encoded."""
    with stack("qwen", styles=("cumulative",), sessions={"max_context": 16}) as small:
        ids = ids_of(small.spelling, "Hel", "lo")
        assert len(ids) == 2
        for fits, segments in [
            (True, [{"ids": ids * 7}, {"text": "a"}]),
            (False, [{"ids": ids * 7}, {"text": "a"}, {"text": "b"}]),
            (False, [{"ids": ids * 8}]),
            (False, [{"text": "word " * 100}]),
        ]:
            for sent in (segments, [[A], segments]):
                answer = small.post("/generate", {"prompt_segments": sent, "sampling_params": {"max_new_tokens": 1}})
                if fits:
                    assert answer.status == 200, answer.content
                else:
                    error = problem(answer)
                    assert error["code"] == "context_length_exceeded"
                    assert "maximum context length is 16 tokens" in error["message"]
        # A worker knows its own limit, and says so of texts and ids.
        assert small.post("/generate", {"input_ids": ids * 8, "sampling_params": {"max_new_tokens": 1}}).status == 200


def test_without_the_memory_they_are_the_workers_to_refuse(qwen: Stack) -> None:
    """A router without a tokenizer passes bodies on as they are: no worker takes a prompt that it does not see."""
    config = RouterConfig(workers=WorkersConfig(urls=(qwen.workers[0].url,)), middlewares=())
    with serve(create_app(config, shared={Hub: None})) as url:
        answer = dataclasses.replace(qwen, url=url).post("/generate", {"prompt_segments": [A]})
    assert answer.status == 400
    assert "x-router-worker" in answer.headers
    assert b"text, input_ids or input_embeds" in answer.content
