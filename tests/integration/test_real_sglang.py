"""Text in, exact tokens out, against real workers: what is retrieved is what the worker itself says it read and said.

The judge is the worker: `return_prompt_token_ids` makes it tell which ids it was sent, `output_ids` and
`output_token_logprobs` which it sampled. A tiny random model is a hard case: nearly every reply has bytes that are no
characters, and nearly none is what re-encoding its text would give.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from middleware_hub.tokenizer.tokenizer import Tokenizer
from middleware_hub.tokenizer.worker_check import tokenizer_check
from tests.integration.conftest import RouterFor
from tests.support.client import call, stream
from tests.support.engine_server import EngineServer
from tests.support.engines import SGLANG, Engine
from worker.models.ngram import shipped_tokenizer
from worker.vocabulary import EngineVocabulary, load_vocabulary
from worker.worker import EmbeddedWorker

ENGINES = ("sglang", "vllm")

Json = dict[str, Any]
WANTED = {"return_logprob": True, "return_prompt_token_ids": True}


@pytest.fixture(scope="module")
def vocabulary(engine: Engine) -> EngineVocabulary:
    return load_vocabulary(str(engine.kit.model))


@dataclass
class Truth:
    """A token sequence as the worker told it, turn by turn."""

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Json] = field(default_factory=list)

    def after(self, reply: Json) -> Truth:
        """This sequence, continued by what a reply's request added and what was sampled. Asserts the prefix property."""
        sent, sampled, meta = reply["prompt_token_ids"], reply["output_ids"], reply["meta_info"]
        assert sent[: len(self.tokens)] == self.tokens
        added = len(sent) - len(self.tokens)
        spans = [
            {"version": span["version"], "start": span["start"] + len(sent), "end": span["end"] + len(sent)}
            for span in meta["weight_versions"]
            if span["end"] > span["start"]
        ]
        return Truth(
            sent + sampled,
            self.mask + [0] * added + [1] * len(sampled),
            self.logprobs + [0.0] * added + [entry[0] for entry in meta["output_token_logprobs"]],
            self.versions + spans,
        )

    def check(self, found: Json) -> None:
        """What `/retrieve_from_text` answered is this, id for id and float for float."""
        assert found["tokens"] == self.tokens
        assert found["loss_mask"] == self.mask
        assert found["rollout_logp"] == self.logprobs
        assert _per_token(found["weight_versions"]) == _per_token(self.versions)
        assert found["exact"] is True
        assert found["token_length"] == found["loss_mask_length"] == len(self.tokens)


def _per_token(spans: Sequence[Json]) -> dict[int, str]:
    return {at: span["version"] for span in spans for at in range(span["start"], span["end"])}


def generate(url: str, text: Any, **body: Any) -> Any:
    answer = call(f"{url}/generate", {"text": text, **WANTED, **body})
    assert answer.status == 200, answer.content
    return answer.json()


def at_once(url: str, texts: Sequence[str], **body: Any) -> list[Any]:
    """A request each, sixteen at a time; the replies in order."""
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(generate, url, text, **body) for text in texts]
        return [one.result() for one in waiting]


def retrieve(url: str, text: Any, **body: Any) -> Any:
    answer = call(f"{url}/retrieve_from_text", {"text": text, "return_logp": True, **body})
    assert answer.status == 200, answer.content
    return answer.json()


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def streamed(url: str, text: str, *, on_event: Any = None, **body: Any) -> Json:
    """A streamed reply put together, whichever of the two styles its worker speaks."""
    whole: Json = {"text": "", "output_ids": [], "meta_info": {}}
    logprobs: list[Any] = []
    for number, event in enumerate(stream(f"{url}/generate", {"text": text, "stream": True, **WANTED, **body})):
        meta, entries = event["meta_info"], event["meta_info"]["output_token_logprobs"]
        delta = len(event["output_ids"]) < meta["completion_tokens"]
        whole["output_ids"] = whole["output_ids"] + event["output_ids"] if delta else event["output_ids"]
        whole["text"] = whole["text"] + event["text"] if delta else event["text"]
        logprobs = logprobs + entries if delta else entries
        whole["meta_info"], whole["prompt_token_ids"] = meta, event["prompt_token_ids"]
        if on_event is not None:
            on_event(number)
    whole["meta_info"] = {**whole["meta_info"], "output_token_logprobs": logprobs}
    return whole


@pytest.mark.parametrize("seed", range(3))
def test_ten_turns_are_one_sequence(router: str, vocabulary: EngineVocabulary, seed: int) -> None:
    """After every turn the text so far retrieves exactly, and the next turn's ids begin with it, EOS included."""
    text, truth = f"<|im_start|>system\nConversation {seed}.<|im_end|>\n", Truth()
    for turn in range(10):
        text += user(f"Turn {turn}: 你好 😀 naïve — go on.")
        params = {"max_new_tokens": 24, "logit_bias": {str(vocabulary.eos_id): 6.0 if turn % 2 else 0.0}}
        reply = generate(router, text, sampling_params=params)
        truth = truth.after(reply)
        text += reply["text"]
        truth.check(retrieve(router, text))
        text += "<|im_end|>\n"


@pytest.mark.parametrize("number", [0, 1], ids=["cumulative", "incremental"])
def test_streams_are_recorded_like_replies(router_for: RouterFor, number: int) -> None:
    url, text, truth = router_for(number), f"<|im_start|>system\nStream {number}.<|im_end|>\n", Truth()
    for turn in range(4):
        text += user(f"Turn {turn}")
        reply = streamed(url, text, sampling_params={"max_new_tokens": 40})
        truth = truth.after(reply)
        text += reply["text"]
        truth.check(retrieve(url, text))
        text += "<|im_end|>\n"


@pytest.mark.parametrize("how", ["n", "requests"])
def test_sixteen_samples_of_one_prompt_stay_apart(router: str, how: str) -> None:
    """One prompt, sixteen chains: by n, or by sixteen requests at once, each retrieved for its own text."""
    prompt = user(f"A group of sixteen by {how}.")
    if how == "n":
        replies = generate(router, prompt, sampling_params={"max_new_tokens": 16, "n": 16})
    else:
        replies = at_once(router, [prompt] * 16, sampling_params={"max_new_tokens": 16})
    assert len({tuple(reply["prompt_token_ids"]) for reply in replies}) == 1
    found = retrieve(router, [prompt + reply["text"] for reply in replies])
    for reply, one in zip(replies, found, strict=True):
        if one["variants"] == 1:
            Truth().after(reply).check(one)
        Truth().after(reply).check(retrieve(router, prompt + reply["text"], request_id=reply["meta_info"]["id"]))


def test_a_batch_is_recorded_item_by_item(router: str) -> None:
    prompts = [user(f"Item {number}") for number in range(5)]
    for prompt, reply in zip(prompts, generate(router, prompts, sampling_params={"max_new_tokens": 8}), strict=True):
        Truth().after(reply).check(retrieve(router, prompt + reply["text"]))


def ends_inside_a_character(vocabulary: EngineVocabulary, with_a_character: bool) -> list[int]:
    """The tokens whose bytes end inside a character: with a whole one before it, or without."""
    spelled = {id: vocabulary.decode([id], skip_special_tokens=False) for id in range(vocabulary.size)}
    half = {id: text for id, text in spelled.items() if text.endswith("\ufffd")}
    return [id for id, text in half.items() if bool(text.strip("\ufffd")) is with_a_character]


class TestEnds:
    def test_eos_at_once(self, router: str, vocabulary: EngineVocabulary) -> None:
        """An empty reply is one sampled token, and its prompt alone still encodes as a prompt."""
        prompt, eos = user("Say nothing."), vocabulary.eos_id
        reply = generate(router, prompt, sampling_params={"logit_bias": {str(eos): 100.0}})
        assert (reply["text"], reply["output_ids"]) == ("", [eos])
        Truth().after(reply).check(retrieve(router, prompt, request_id=reply["meta_info"]["id"]))
        again = generate(router, prompt, sampling_params={"max_new_tokens": 4})
        assert again["prompt_token_ids"] == reply["prompt_token_ids"]
        spelled = generate(router, f"{prompt}<|im_end|>\n{user('Now speak.')}", sampling_params={"max_new_tokens": 4})
        assert spelled["prompt_token_ids"][: len(reply["prompt_token_ids"]) + 1] == [*reply["prompt_token_ids"], eos]

    @pytest.mark.parametrize("spelled", [True, False])
    def test_eos_stays_whether_the_next_turn_spells_it_or_not(
        self, router: str, vocabulary: EngineVocabulary, spelled: bool
    ) -> None:
        text, truth, ended = user(f"Spelled: {spelled}"), Truth(), 0
        # At least two tokens: a reply without text is not continued by a text that does not spell its end.
        params = {"max_new_tokens": 60, "min_new_tokens": 2, "logit_bias": {str(vocabulary.eos_id): 8.0}}
        for turn in range(40):
            reply = generate(router, text, sampling_params=params)
            truth = truth.after(reply)
            text += reply["text"]
            truth.check(retrieve(router, text, request_id=reply["meta_info"]["id"]))
            ended += reply["output_ids"][-1] == vocabulary.eos_id
            text += ("<|im_end|>\n" if spelled else "\n") + user(f"Turn {turn}")
            if turn >= 5 and ended >= 2:  # it is for the engine to say when it has said enough
                break
        assert ended >= 2

    def test_a_stop_string(self, router: str) -> None:
        """The ids keep what the text was cut at. A later text that spells the stop goes on behind it."""
        stopped = 0
        for number in range(12):
            prompt = user(f"Stop {number}")
            reply = generate(router, prompt, sampling_params={"max_new_tokens": 60, "stop": ["e", "a"]})
            truth = Truth().after(reply)
            truth.check(retrieve(router, prompt + reply["text"]))
            stopped += reply["meta_info"]["finish_reason"]["type"] == "stop"
        assert stopped > 3

    def test_a_stop_token(self, router: str, vocabulary: EngineVocabulary) -> None:
        stop = vocabulary.encode(" the")[0]
        params = {"max_new_tokens": 60, "stop_token_ids": [stop], "logit_bias": {str(stop): 6.0}}
        for number in range(4):
            prompt = user(f"Stop token {number}")
            reply = generate(router, prompt, sampling_params=params)
            Truth().after(reply).check(retrieve(router, prompt + reply["text"]))

    @pytest.mark.parametrize("with_a_character", [False, True], ids=["bytes alone", "behind a character"])
    def test_inside_a_character(self, router: str, vocabulary: EngineVocabulary, with_a_character: bool) -> None:
        """Replies that end, and begin, with bytes that are half a character, by themselves or in a token with a whole one."""
        half = ends_inside_a_character(vocabulary, with_a_character)
        bias = dict.fromkeys(map(str, half), 20.0 if with_a_character else 8.0)
        params = {"max_new_tokens": 3, "temperature": 2.0, "logit_bias": bias}
        prompts = [f"{text}{number} " for number in range(12) for text in ("😀🚀", "你好世", "ё—“", "émigré")]
        cut = 0
        for prompt, reply in zip(prompts, at_once(router, prompts, sampling_params=params), strict=True):
            found = retrieve(router, prompt + reply["text"], request_id=reply["meta_info"]["id"])
            Truth().after(reply).check(found)
            cut += reply["output_ids"][-1] in half
        assert cut > 10

    def test_behind_half_of_a_character(self, router: str, vocabulary: EngineVocabulary) -> None:
        """What continues a reply that was cut there, by its ids, has a text without the prompt's."""
        for number, half in enumerate(ends_inside_a_character(vocabulary, with_a_character=False)[:12]):
            ids = [*vocabulary.encode(user(f"Half {number}")), half]
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8}, **WANTED}
            reply = call(f"{router}/generate", body).json()
            assert "Half" not in reply["text"]
            text = vocabulary.decode(ids, skip_special_tokens=False) + reply["text"]
            Truth().after(reply).check(retrieve(router, text, request_id=reply["meta_info"]["id"]))

    @pytest.mark.parametrize("with_a_character", [False, True], ids=["bytes alone", "behind a character"])
    def test_turns_that_end_inside_a_character_are_one_sequence(
        self, router: str, vocabulary: EngineVocabulary, with_a_character: bool
    ) -> None:
        """What no text spells stays in the ids, whether the engine shows U+FFFD, the character before it, or neither."""
        half, plain = ends_inside_a_character(vocabulary, with_a_character), vocabulary.encode(" the")[0]
        text, truth, cut = "<|im_start|>system\nEnds inside.<|im_end|>\n" + user("你好"), Truth(), 0
        wanted, turn = 94.0, 0
        while turn < 60 or (turn < 120 and cut <= 5):  # now and then chance cuts few of the first ones
            turn += 1
            bias = dict.fromkeys(map(str, half), wanted) | {str(plain): 94.0}  # nothing else is sampled
            params = {"max_new_tokens": 2 + turn % 3, "temperature": 2.0, "logit_bias": bias}
            reply = generate(router, text, sampling_params=params)
            truth.after(reply).check(retrieve(router, text + reply["text"], request_id=reply["meta_info"]["id"]))
            ends_inside = reply["output_ids"][-1] in half
            if not reply["text"]:  # only a text that spells its tail continues it, and no text spells half a character
                wanted -= 1.5
                continue
            wanted = min(wanted if ends_inside else wanted + 1.0, 100.0)  # more is no bias that an engine takes
            truth, text = truth.after(reply), text + reply["text"] + "<|im_end|>\n" + user(f"Turn {turn}: 你好")
            cut += ends_inside
        assert cut > 5


@pytest.mark.parametrize("number", [0, 1], ids=["cumulative", "incremental"])
def test_an_update_in_mid_generation_is_seen_token_by_token(
    router_for: RouterFor, engine: Engine, workers: list[EngineServer], number: int
) -> None:
    """`weight_version` names the last one only; each token keeps the version it was sampled under."""
    url, worker = router_for(number), workers[number]
    versions: list[str] = []
    # An engine may have said all of it before it hears of the update.
    for attempt, length in enumerate((300, 900, *[2700] * 6)):
        before, after = engine.version(worker), f"update-{number}-{attempt}"

        def update(event: int, after: str = after) -> None:
            if event == 5:
                engine.set_version(worker, after)

        prompt = user(f"An answer of {length} tokens.")
        params: Json = {"max_new_tokens": length, "ignore_eos": True}
        reply = streamed(url, prompt, on_event=update, sampling_params=params)
        Truth().after(reply).check(retrieve(url, prompt + reply["text"]))
        versions = [span["version"] for span in reply["meta_info"]["weight_versions"]]
        if len(versions) > 1:
            break
    assert versions == [before, after]


def test_a_text_client_sees_what_it_would_have_seen_without_the_router(router: str) -> None:
    answer = call(f"{router}/generate", {"text": user("Plain."), "sampling_params": {"max_new_tokens": 4}})
    assert answer.status == 200
    assert not [key for key in answer.json()["meta_info"] if "logprob" in key]
    assert "prompt_token_ids" not in answer.json()


def test_the_whole_vocabulary_is_a_valid_prompt(router: str, vocabulary: EngineVocabulary) -> None:
    """What is outside of it is refused before: `test_bad_input.py` counts what reaches a worker."""
    body: Json = {"input_ids": [0, vocabulary.size - 1], "sampling_params": {"max_new_tokens": 4}}
    assert call(f"{router}/generate", body).status == 200


def test_the_workers_say_that_they_have_the_routers_tokenizer(
    engine: Engine, workers: list[EngineServer], router: str
) -> None:
    own, other = (
        tokenizer_check(Tokenizer.load(str(path)), str(path)) for path in (engine.kit.model, shipped_tokenizer())
    )
    for worker in workers:
        answer = call(worker.url + own.call.target, json.loads(own.call.body or b""))
        assert answer.status == 200, answer.content
        assert own.judge(answer.content) is None
        assert other.judge(answer.content) is not None
    assert [one["warning"] for one in call(f"{router}/workers").json()["workers"]] == [None, None]


CASES: list[Json] = [
    {"max_new_tokens": 60},
    {"max_new_tokens": 60, "skip_special_tokens": False},
    {"max_new_tokens": 120, "logit_bias_eos": 5.0},
    {"max_new_tokens": 120, "logit_bias_eos": 5.0, "skip_special_tokens": False, "no_stop_trim": True},
    {"max_new_tokens": 60, "stop": ["e"]},
    {"max_new_tokens": 60, "stop": [" t", "in", "(s"], "no_stop_trim": True},
    {"max_new_tokens": 60, "stop_regex": "[a-f][g-z]"},
    {"max_new_tokens": 3},
    {"max_new_tokens": 0},
]


@pytest.mark.parametrize("number", [0, 1], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("streaming", [False, True], ids=["reply", "stream"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_embedded_engine_says_the_same_about_the_same_ids(
    workers: list[EngineServer], vocabulary: EngineVocabulary, case: Json, streaming: bool, number: int
) -> None:
    """All other tests rest on it: given the ids a real worker sampled, its text and its end are the real ones."""
    params = {key: value for key, value in case.items() if key != "logit_bias_eos"}
    if "logit_bias_eos" in case:
        params["logit_bias"] = {str(vocabulary.eos_id): case["logit_bias_eos"]}
    style: Any = ("cumulative", "incremental")[number]
    ask = streamed if streaming else generate
    with EmbeddedWorker(SGLANG.kit.model, stream_style=style) as embedded:
        for prompt in ("Hello", "你好世界 😀", "def f(x):\n", user("Hi")):
            real = ask(workers[number].url, prompt, sampling_params=params)
            script = tuple(entry[0] for entry in real["meta_info"]["output_token_logprobs"])
            embedded.script(real["output_ids"], finish=None, logprobs=script)
            copy = ask(embedded.url, prompt, sampling_params=params)
            for key in ("text", "output_ids", "prompt_token_ids"):
                assert copy[key] == real[key], (key, real)
            for key in ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs"):
                assert copy["meta_info"][key] == real["meta_info"][key], (key, real)
            assert set(copy) == set(real)
            # In the first event of a stream only, and which event is the last one depends on how the engine joined them.
            sometimes = {"response_sent_to_client_ts"}
            assert set(copy["meta_info"]) - sometimes == set(real["meta_info"]) - sometimes
