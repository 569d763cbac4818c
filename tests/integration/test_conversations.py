"""Random conversations through the router, its middleware and embedded engines, judged by an oracle that keeps everything.

Each example has namespaces of its own, so one application per vocabulary serves them all. TITO_EXAMPLES=20 runs twenty
times as many of them.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.support.oracle import Chain, Oracle, Plan, Speller, Token, versions_of
from tests.support.stack import Reply, Stack, stack
from tests.support.usual import usual
from tests.support.vocabularies import NAMES, Name
from worker.worker import EmbeddedWorker

PHASES = [phase for phase in Phase if phase is not Phase.shrink or "TITO_NO_SHRINKING" not in os.environ]
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def drawn(count: int) -> settings:
    return settings(max_examples=examples(count), deadline=None, suppress_health_check=CHECKS, phases=PHASES)


@pytest.fixture(scope="module", params=usual(NAMES, "qwen"))
def running(request: pytest.FixtureRequest) -> Iterator[Stack]:
    name: Name = request.param
    with stack(name) as started:
        yield started
        assert started.idle(), started.inflight()
        assert [worker.out_of_range for worker in started.workers] == [[], [], []]


@pytest.fixture(scope="module", params=usual(NAMES, "qwen"))
def forgetful(request: pytest.FixtureRequest) -> Iterator[Stack]:
    name: Name = request.param
    with stack(name, radix={"max_tokens": 60}) as started:
        yield started
        assert started.idle(), started.inflight()


# -- what a conversation is made of ---------------------------------------------------------------------------------

PROMPTS = [
    "Write a sum",
    "Write a summary of it",
    "Hello",
    " Hello",
    "Hel",
    "😀 hi",
    "e\u0301te\u0301",
    "{chat}",
    "{bos}Hello",
]
OBSERVED = ["", "\nUser: go on", " tool says 7", "mary", "{chat}", "é你", "\u0301x", "llo", "  \n", "<think>", "{bos}x"]
GLUE = ["", "{eos}", "{special}", "{special}{eos}", "\n", "STOP", "ST", "llo", "l", "OP", "{eos}\n"]
PIECES = ["Hel", "lo", "Hello", " world", "<think>", "<", "think", ">", "sum", "mary", "summary", "ST", "OP", "STOP"]
PIECES += ["\n", "  ", "é", "你", "😀", "{half}", "{rest}", "{special}", "e", "\u0301"]
STOPS = ["STOP", "llo", "mary", "lo", "TOP", "o", "\n", "你", "um"]
ENDS = [
    "eos",
    "length",
    "abort",
    "stop",
    "stop_no_trim",
    "stop_id",
    "two",
    "hidden_length",
    "no_skip",
    "no_trim_no_skip",
]
KINDS = ["fresh", "continue", "repeat", "exact", "strip", "edit", "prefill", "ids", "ids_continue"]

small = st.integers(0, 11)


@dataclass(frozen=True)
class Turn:
    """One request, in terms of those before it."""

    kind: str
    ref: int
    glue: str
    observed: str
    cut: int
    reply: tuple[str, ...]
    end: str
    stop: str
    stream: bool
    parent: str
    space: int
    rid: bool
    update: int | None  # new weights: 0 before it, k after its k-th token
    look: int


turns = st.builds(
    Turn,
    kind=st.sampled_from(KINDS),
    ref=st.integers(0, 5),
    glue=st.sampled_from(GLUE),
    observed=st.sampled_from(OBSERVED),
    cut=small,
    reply=st.lists(st.sampled_from(PIECES), max_size=5).map(tuple),
    end=st.sampled_from(ENDS),
    stop=st.sampled_from(STOPS),
    stream=st.booleans(),
    parent=st.sampled_from(["", "", "", "id", "none"]),
    space=st.sampled_from([0, 0, 0, 1]),
    rid=st.booleans(),
    update=st.sampled_from([None, None, None, 0, 1, 2]),
    look=small,
)
conversations = st.lists(turns, min_size=2, max_size=8)


@dataclass
class Words:
    """The pieces in one vocabulary."""

    spelling: Speller
    eos: str = ""
    special: str = ""
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        qwen = not self.spelling.bos
        tekken = not qwen and not self.spelling.sentencepiece
        self.eos = "<|im_end|>" if qwen else "</s>"
        self.special = "<|endoftext|>" if qwen else "[INST]" if tekken else "<unk>"
        chat = "<|im_start|>user\nhi<|im_end|>\n" if qwen else "[INST] hi [/INST]"
        self.names = {"eos": self.eos, "special": self.special, "chat": chat, "bos": self.spelling.bos}

    def text(self, template: str) -> str:
        return template.format(**self.names) if "{" in template else template

    def ids(self, piece: str) -> list[int]:
        emoji = self.spelling.encode_tail("😀")
        if self.spelling.sentencepiece and len(emoji) == 1:
            emoji = [self.token(f"<0x{byte:02X}>") for byte in "😀".encode()]
        if piece == "{half}":
            return emoji[: len(emoji) // 2]
        if piece == "{rest}":
            return emoji[len(emoji) // 2 :]
        return self.spelling.encode_tail(self.text(piece))

    @property
    def bos(self) -> int | None:
        return self.token(self.spelling.bos) if self.spelling.bos else None

    def token(self, token: str) -> int:
        found = self.spelling.start.token_to_id(token)
        assert found is not None
        return found


# -- playing one ----------------------------------------------------------------------------------------------------


class Play:
    """One example: its namespaces, what the oracle knows of each, and the checks after every reply."""

    def __init__(self, running: Stack, *, forgetful: bool = False) -> None:
        self.running = running
        self.words = Words(running.spelling)
        self.forgetful = forgetful
        self.oracles = [Oracle(running.spelling), Oracle(running.spelling)]
        self.spaces = [uuid.uuid4().hex, uuid.uuid4().hex]
        self.version = 0
        self.given_up = False
        running.set_weight_version("0")

    def turn(self, turn: Turn) -> None:
        oracle, space = self.oracles[turn.space], self.spaces[turn.space]
        body, options, headers = self._request(turn, oracle)
        headers |= {"x-radix-namespace": space, "x-abort-policy": "return"}
        note(f"{body} {headers}")
        if not any(plan.ids for _, plan in options):
            return  # a BOS alone can be nothing at all: test_bad_input
        reply = self._send(body, headers, turn.update)
        record = reply.record
        note(f"  -> {record.input_ids} + {record.output_ids} {record.text!r} {record.finish_reason}")
        assert not record.from_text
        assert "text" not in record.body
        assert record.input_ids in [plan.ids for _, plan in options], [plan.ids for _, plan in options]
        self._check_client(body, reply)
        chains = self._record(oracle, options, reply, body["sampling_params"])
        if not self.given_up:
            self._check_retrieval(oracle, space, chains)
            self._look_around(oracle, space, turn)

    def _request(self, turn: Turn, oracle: Oracle) -> tuple[dict[str, Any], list[tuple[str, Plan]], dict[str, str]]:
        words, headers = self.words, dict[str, str]()
        body: dict[str, Any] = {"sampling_params": self._sampling(turn)}
        if turn.stream:
            body["stream"] = True
        if turn.rid:
            body["rid"] = uuid.uuid4().hex
        chain = oracle.chains[turn.ref % len(oracle.chains)] if oracle.chains else None
        if turn.kind == "ids" or (turn.kind == "ids_continue" and not chain):
            bos = [words.token(words.spelling.bos)] if words.spelling.bos and turn.cut % 2 else []
            ids = bos + [number for piece in (*turn.reply, "Hel", "lo") for number in words.ids(piece)]
            return body | {"input_ids": ids}, oracle.plan_of_ids(ids), headers
        if turn.kind == "ids_continue" and chain:
            ids = chain.ids + words.spelling.encode_tail(words.text(turn.observed))
            return body | {"input_ids": ids}, oracle.plan_of_ids(ids, forgetful=self.forgetful), headers
        text = self._text(turn, chain) or "x"
        body["text"] = text
        if turn.parent == "none":
            headers["x-radix-parent"] = "none"
            return body, [(text, oracle.none(text))], headers
        parent = None
        if turn.parent == "id" and chain and chain.reply and text.startswith(chain.text):
            headers["x-radix-parent"], parent = chain.request_id, chain
        plans = oracle.plans(text, parent, forgetful=self.forgetful)
        return body, [(text, plan) for plan in plans], headers

    def _text(self, turn: Turn, chain: Chain | None) -> str:
        words = self.words
        if chain is None or turn.kind == "fresh":
            return words.text(PROMPTS[turn.cut % len(PROMPTS)])
        prompt = chain.text[: len(chain.text) - len(chain.reply)]
        more = words.text(turn.glue) + words.text(turn.observed)
        match turn.kind:
            case "continue":
                return chain.text + more
            case "repeat":
                return prompt
            case "strip":
                return chain.text[: max(1, len(chain.text) - 1 - turn.cut % 4)] + more
            case "prefill":
                return prompt + chain.reply[: turn.cut]
            case "edit":
                at = len(chain.text) * turn.cut // 12
                return chain.text[:at] + "Q" + chain.text[at + 1 :] + more
        return chain.text

    def _sampling(self, turn: Turn) -> dict[str, Any]:
        words = self.words
        ids = [number for piece in turn.reply for number in words.ids(piece)]
        script: dict[str, Any] = {"ids": ids, "finish": "eos"}
        params: dict[str, Any] = {"custom_params": {"script": script}}
        match turn.end:
            case "length" | "abort":
                script["finish"] = turn.end
            case "stop" | "stop_no_trim":
                params["stop"] = [turn.stop]
                params["no_stop_trim"] = turn.end == "stop_no_trim"
            case "stop_id":
                params["stop_token_ids"] = [words.ids("\n")[-1]]
                ids += words.ids("\n")
            case "two":
                params["ignore_eos"] = True
                ids += [words.token(words.special), words.token(words.eos)]
                script["finish"] = "length"
            case "hidden_length":
                ids += [words.token(words.special)]
                script["finish"] = "length"
            case "no_skip":
                params["skip_special_tokens"] = False
            case "no_trim_no_skip":
                params["skip_special_tokens"] = False
                params["no_stop_trim"] = True
        if not ids and script["finish"] != "eos":
            script["finish"] = "eos"  # the engine samples at least one token
        return params

    def _send(self, body: dict[str, Any], headers: dict[str, str], update: int | None) -> Reply:
        if update is None:
            return self.running.generate(body, headers=headers)
        self.version += 1
        count = len(body["sampling_params"]["custom_params"]["script"]["ids"])
        if not update or update > count or "stop" in body["sampling_params"]:
            self.running.set_weight_version(str(self.version))
            return self.running.generate(body, headers=headers)
        workers = self.running.workers
        before = [len(worker.log) for worker in workers]
        for worker in workers:
            worker.hold(after=update)
        found: list[Reply] = []
        thread = threading.Thread(target=lambda: found.append(self.running.generate(body, headers=headers)))
        thread.start()
        try:
            self._wait_for_the_gate(before)
            self.running.set_weight_version(str(self.version))
        finally:
            for worker in workers:
                worker.release()
            thread.join()
        event("updated in the middle")
        return found[0]

    def _wait_for_the_gate(self, before: list[int]) -> None:
        while all(len(one.log) == count for one, count in zip(self.running.workers, before, strict=True)):
            self.running.get("/liveness")  # round trips until the request has reached one of them
        for worker, count in zip(self.running.workers, before, strict=True):
            if len(worker.log) > count:
                worker.wait_for(partial(_at_the_gate, worker))

    def _check_client(self, body: dict[str, Any], reply: Reply) -> None:
        """The client has what the worker said, and no logprobs, for which it did not ask."""
        record, bodies = reply.record, reply.body if body.get("stream") else [reply.body]
        for one in bodies:
            assert not [key for key in one["meta_info"] if "logprobs" in key], one
        last = bodies[-1]
        assert last["meta_info"]["finish_reason"] == record.finish_reason
        assert last["meta_info"]["completion_tokens"] == len(record.output_ids)
        assert last["meta_info"]["prompt_tokens"] == len(record.input_ids)
        assert last["meta_info"]["id"] == record.rid
        if "rid" in body:
            assert record.rid == body["rid"]
        if not body.get("stream"):
            assert last["text"] == record.text
            assert last["output_ids"] == record.output_ids

    def _record(
        self, oracle: Oracle, options: list[tuple[str, Plan]], reply: Reply, params: dict[str, Any]
    ) -> list[Chain]:
        """Every chain that this reply may now be; one of them is kept once the retrieval has shown which."""
        record, chains = reply.record, []
        for text, plan in options:
            if plan.ids == record.input_ids:
                output = zip(record.output_ids, record.logprobs, record.versions, strict=True)
                skip = params.get("skip_special_tokens", True)
                chains.append(oracle.record(plan, text, output, record.text, request_id=record.rid, skip_special=skip))
                oracle.chains.pop()
        if chains[0].opaque or chains[0].maybe_opaque:
            event("ids and text differ at an edge")
        said = reply.answer.headers["x-radix-recorded"]
        if chains[0].opaque and said not in ("exact", "pending"):
            self.given_up = True
            event(f"opaque and {said}")
        elif not reply.answer.headers["content-type"].startswith("text/event-stream"):
            assert said == "exact", (said, record)
        return chains

    def _check_retrieval(self, oracle: Oracle, space: str, chains: list[Chain]) -> None:
        text = chains[0].text
        found = self.running.retrieve(text, namespace=space)
        note(f"  retrieved {found}")
        if self.forgetful and not found["exact"]:
            assert found["reasons"]
            oracle.chains.append(chains[0])
            return
        fits = [chain for chain in chains if all(shown(found, chain.tokens))]
        assert fits, [[(token.id, token.mask, token.logprob) for token in chain.tokens] for chain in chains]
        oracle.chains.append(fits[0])
        check_whole(found, fits[0])
        check_turns(found, oracle)
        if not self.forgetful:
            same = oracle.ending_at(text)
            assert found["request_ids"] == [chain.request_id for chain in same]
            assert found["variants"] == len(same)
            if len(same) > 1:
                event("variants")
                oldest = self.running.retrieve(text, namespace=space, request_id=same[-1].request_id)
                check_whole(oldest, same[-1])

    def _look_around(self, oracle: Oracle, space: str, turn: Turn) -> None:
        """Lookups that must leave no trace, and must say what a request with the same text would send."""
        chain = oracle.chains[turn.look % len(oracle.chains)]
        whole = self.words.text(chain.text + turn.glue if turn.look % 2 else chain.text)
        text = whole[: len(whole) - turn.look // 3] or "x"
        explained = self.running.post("/radix_tree/explain", {"text": text}, headers={"x-radix-namespace": space})
        assert explained.status == 200
        found = self.running.retrieve(text, namespace=space)
        check_shape(found, text)
        check_turns(found, oracle)
        if self.forgetful:
            if found["exact"]:
                assert any(found["tokens"] == one.ids[: found["token_length"]] for one in oracle.chains)
            return
        if same := oracle.ending_at(text):
            check_whole(found, same[0])
            return
        note(f"  looked for {text!r}: {found}")
        if found["exact"]:
            # One recorded chain covers it all, be it by its prompt alone.
            covering = [chain.tokens[: found["token_length"]] for chain in oracle.chains]
            assert any(all(shown(found, tokens)) for tokens in covering)
            return
        plans = oracle.plans(text)
        fits = [plan for plan in plans if all(shown(found, plan.all_tokens))]
        assert fits, [[(token.id, token.mask, token.logprob) for token in plan.all_tokens] for plan in plans]
        assert found["reasons"]
        assert found["exact_chars"] >= min(fits[0].position, len(text) - 1)


def check_turns(found: dict[str, Any], oracle: Oracle) -> None:
    """The sampled tokens are those of the listed replies, each where it was sampled, and as far as the sequence goes."""
    at = [place for turn in found["turns"] for place in range(turn["start"], turn["end"])]
    assert at == [place for place, one in enumerate(found["loss_mask"]) if one]
    named = {chain.request_id: chain for chain in oracle.chains}
    for turn in found["turns"]:
        chain = named[turn["request_id"]]
        assert chain.ids[: turn["end"]] == found["tokens"][: turn["end"]]
        assert turn["start"] == chain.begins


def shown(found: dict[str, Any], tokens: list[Token]) -> Iterator[bool]:
    """Are these the tokens of a retrieval, with all that belongs to them?"""
    yield found["tokens"] == [token.id for token in tokens]
    yield found["loss_mask"] == [token.mask for token in tokens]
    yield found["rollout_logp"] == [token.logprob for token in tokens]
    versions = [(at, token.version) for at, token in enumerate(tokens) if token.mask]
    yield list(versions_of(found["weight_versions"])) == versions


def _at_the_gate(worker: EmbeddedWorker) -> bool:
    jobs = list(worker.jobs.values())
    return not jobs or any(job.waiting for job in jobs)


def check_shape(found: dict[str, Any], text: str) -> None:
    """What holds for every answer, exact or not."""
    size = len(found["tokens"])
    assert found["response"] == text
    assert found["token_length"] == found["loss_mask_length"] == size == len(found["loss_mask"])
    assert len(found["rollout_logp"]) == size
    assert 0 <= found["exact_chars"] <= len(text)
    first = found["loss_mask"].index(1) if 1 in found["loss_mask"] else size
    assert found["response_length"] == size - first
    assert [at for at, _ in versions_of(found["weight_versions"])] == [
        at for at, mask in enumerate(found["loss_mask"]) if mask
    ]
    if found["exact"]:
        assert found["exact_chars"] == len(text)


def check_whole(found: dict[str, Any], chain: Chain) -> None:
    """One chain, to the last float."""
    check_shape(found, chain.text)
    assert all(shown(found, chain.tokens)), [(token.id, token.mask, token.logprob) for token in chain.tokens]
    assert found["exact"] is True


# -- the tests ------------------------------------------------------------------------------------------------------


@drawn(60)
@given(turns=conversations)
def test_a_conversation_is_what_the_workers_saw(running: Stack, turns: list[Turn]) -> None:
    """After every reply: what was sent, what is retrieved, what the client has; lookups change nothing."""
    play = Play(running)
    for turn in turns:
        if not play.given_up:
            play.turn(turn)


@drawn(15)
@given(turns=conversations)
def test_what_is_forgotten_is_never_made_up(forgetful: Stack, turns: list[Turn]) -> None:
    """With room for sixty tokens: less is reused, and nothing wrong is."""
    play = Play(forgetful, forgetful=True)
    for turn in turns:
        if not play.given_up:
            play.turn(turn)


FRAGMENTS = [
    "sum",
    "mary",
    " sum",
    "Hel",
    "lo",
    "你",
    "é",
    "e\u0301",
    "😀",
    " ",
    "\n",
    "7",
    "<think>",
    "{eos}",
    "{bos}",
]
prompt_texts = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=6).map("".join)


@drawn(25)
@given(prompts=st.lists(prompt_texts, min_size=2, max_size=8), stream=st.booleans())
def test_the_same_prompt_has_the_same_ids_whatever_is_remembered(
    running: Stack, prompts: list[str], stream: bool
) -> None:
    """Prompts that share no sampled token with what is remembered: every reply begins with what no prompt has."""
    words, space = Words(running.spelling), uuid.uuid4().hex
    script = {"ids": words.ids("§") + words.ids("lo")}
    for template in [*prompts, *reversed(prompts)]:
        text = words.text(template)
        expected = words.spelling.encode_start(text)
        if all(number == words.bos for number in expected):
            continue  # nothing but a BOS: test_bad_input
        body = {"text": text, "stream": stream, "sampling_params": {"custom_params": {"script": script}}}
        reply = running.generate(body, headers={"x-radix-namespace": space})
        assert reply.record.input_ids == expected
