"""The rules of exactness, one row for each sentence that can be pinned down, in all vocabularies where it matters."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.oracle import Speller, versions_of
from tests.support.stack import Reply, Stack, stack
from tests.support.usual import usual
from tests.support.vocabularies import NAMES, Name


@pytest.fixture(scope="module", params=usual(NAMES, "qwen", "mistral-v1"))
def served(request: pytest.FixtureRequest) -> Iterator[Stack]:
    name: Name = request.param
    with stack(name, styles=("cumulative",)) as started:
        yield started
        assert started.idle(), started.inflight()
        assert started.workers[0].out_of_range == []


@dataclass
class Talk:
    """A namespace of its own, and short words for what a test does in it."""

    served: Stack
    space: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def spelling(self) -> Speller:
        return self.served.spelling

    @property
    def eos(self) -> int:
        return self.id(self.eos_text)

    @property
    def eos_text(self) -> str:
        return "</s>" if self.spelling.bos else "<|im_end|>"

    @property
    def special_text(self) -> str:
        return {"qwen": "<|endoftext|>", "mistral-v1": "<unk>", "tekken": "[INST]"}[self.served.name]

    def id(self, token: str) -> int:
        found = self.spelling.start.token_to_id(token)
        assert found is not None, token
        return found

    def ids(self, *pieces: str) -> list[int]:
        """Each piece encoded by itself, as no encoder would encode them together."""
        return [number for piece in pieces for number in self.spelling.encode_tail(piece)]

    def start(self, text: str) -> list[int]:
        return self.spelling.encode_start(text)

    def say(
        self,
        text: str | None,
        ids: list[int],
        finish: str = "eos",
        *,
        input_ids: list[int] | None = None,
        parent: str | None = None,
        body: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Reply:
        script: dict[str, Any] = {"ids": ids, "finish": finish}
        headers = {"x-radix-namespace": self.space, "x-abort-policy": "return"}
        if parent:
            headers["x-radix-parent"] = parent
        prompt = {"text": text} if input_ids is None else {"input_ids": input_ids}
        params = {"custom_params": {"script": script}, **sampling}
        return self.served.generate({**prompt, "sampling_params": params, **(body or {})}, headers=headers)

    def sent(self, text: str, **options: Any) -> list[int]:
        """What a request with this text sends."""
        return self.say(text, self.ids("z"), **options).record.input_ids

    def retrieve(self, text: str | list[str], **options: Any) -> Any:
        return self.served.retrieve(text, namespace=self.space, **options)


@pytest.fixture
def talk(served: Stack) -> Talk:
    return Talk(served)


# -- rule 2: the worker receives tokens ----------------------------------------------------------------------------------


def test_text_is_taken_out_and_the_rest_is_left_alone(talk: Talk) -> None:
    record = talk.say(
        "Hello", talk.ids("a"), body={"unheard_of": {"x": [1.5, None]}, "return_hidden_states": False}
    ).record
    assert "text" not in record.body
    assert record.body["input_ids"] == talk.start("Hello")
    assert record.body["unheard_of"] == {"x": [1.5, None]}
    assert record.body["return_hidden_states"] is False
    assert record.body["return_logprob"] is True


def test_with_text_and_ids_the_ids_win(talk: Talk) -> None:
    ids = talk.ids("Hel", "lo")
    record = talk.say(None, talk.ids("a"), input_ids=ids, body={"text": "ignored"}).record
    assert record.input_ids == ids
    assert "text" not in record.body


# -- rule 3: the prefix property ----------------------------------------------------------------------------------------

SPLITS = [
    ("Hel", "lo"),
    ("H", "ello"),
    ("<", "think", ">"),
    ("sum", "mary"),
    (" ", " x"),
    ("\n", "\n"),
    ("é", "e"),
    ("你", "好"),
]


@pytest.mark.parametrize("pieces", SPLITS)
@pytest.mark.parametrize("more", ["\nand", "mary", " on", "é", "{eos}\nnext", "{special}"])
def test_the_next_turn_begins_with_the_last(talk: Talk, pieces: tuple[str, ...], more: str) -> None:
    """Bit for bit, though the text would be encoded otherwise; the EOS is there once, spelled or not."""
    first = talk.say("Write a ", talk.ids(*pieces)).record
    more = more.format(eos=talk.eos_text, special=talk.special_text)
    rest = more.removeprefix(talk.eos_text)
    ids = talk.sent("Write a " + first.text + more)
    assert ids == first.input_ids + first.output_ids + talk.ids(rest)


def test_a_whole_conversation_is_one_sample(talk: Talk) -> None:
    text, ids, sampled = "Question: ", talk.start("Question: "), 0
    for turn in range(4):
        record = talk.say(text, talk.ids("Hel", "lo", "sum", "mary")[: turn + 2]).record
        assert record.input_ids == ids
        ids = ids + record.output_ids
        sampled += len(record.output_ids)
        text += record.text
        found = talk.retrieve(text)
        assert found["tokens"] == ids
        assert found["loss_mask"].count(1) == sampled
        text += f"\nMore {turn}: "
        ids = ids + talk.ids(f"\nMore {turn}: ")


def test_the_newest_of_equal_texts_is_continued_or_the_named_parent(talk: Talk) -> None:
    replies = [talk.say("A:", talk.ids(*pieces)).record for pieces in (("Hel", "lo"), ("Hello",), ("H", "ello"))]
    assert talk.sent("A:Hello, ") == replies[2].input_ids + replies[2].output_ids + talk.ids(", ")
    for one in replies:
        assert talk.sent("A:Hello! ", parent=one.rid) == one.input_ids + one.output_ids + talk.ids("! ")


def test_the_longest_complete_one_wins(talk: Talk) -> None:
    """Not the newest, and not one that says more than the text."""
    long = talk.say("A:", talk.ids("Hel", "lo"), "length").record
    talk.say("A:", talk.ids("Hel"), "length")
    talk.say("A:", talk.ids("Hello", " there", " and", " more"), "length")
    assert talk.sent("A:Hello there") == long.input_ids + long.output_ids + talk.ids(" there")


def test_a_hallucinated_turn_swallows_no_real_one(talk: Talk) -> None:
    """A sample that goes on as its user, and one that does not: the complete one wins, and a parent can be named."""
    real = talk.say("A:", talk.ids("Hel", "lo")).record
    talk.say("A:", talk.ids("Hello", "\n", "B", ":", " yes", " and", " no"))
    asked = "A:Hello\nB: yes and "
    assert talk.sent(asked) == real.input_ids + real.output_ids + talk.ids("\nB: yes and ")
    assert talk.sent(asked + "?", parent=real.rid) == real.input_ids + real.output_ids + talk.ids("\nB: yes and ?")


def test_tokens_behind_a_chain_come_from_its_descendants_only(talk: Talk) -> None:
    """A request with other tokens for the same text does not hide what the chain's own descendants have sampled."""
    first = talk.say("Q:", talk.ids(" think"), "length").record
    second = talk.say("Q: think\nU:", talk.ids(" mary", " world"), "length").record
    talk.say("Q: think\nU: mary wo", talk.ids(" foo", " bar"), "length", parent="none")
    found = talk.retrieve("Q: think\nU: mary wo foo b")
    size = len(second.input_ids) + len(talk.ids(" mary"))
    assert found["tokens"][:size] == (second.input_ids + second.output_ids)[:size]
    sampled = found["loss_mask"][:size]
    assert sampled[len(first.input_ids)] == 1
    assert sampled[len(second.input_ids) :] == [1] * len(talk.ids(" mary"))


@pytest.mark.parametrize("context", ["A:HelHello", "A:HelHel", "A:HelHelp me"])
def test_context_of_another_chain_does_not_hide_what_was_sampled(talk: Talk, context: str) -> None:
    """The same text as another's mere context matches further, but the sampled token is what is reused."""
    first = talk.say("A:", talk.ids("Hel", "Hel")).record
    talk.say(context, talk.ids("x"), parent="none")
    second = talk.say("A:HelHe", talk.ids("z")).record
    assert second.input_ids == first.input_ids + first.output_ids[:1] + talk.ids("He")
    found = talk.retrieve("A:HelHez")
    assert found["loss_mask"][len(first.input_ids)] == 1
    assert found["rollout_logp"][len(first.input_ids)] == first.logprobs[0]


# -- rule 4: every generation is its own ---------------------------------------------------------------------------------


def test_equal_texts_are_told_apart(talk: Talk) -> None:
    """Other tokens, and equal tokens with other logprobs or versions; the newest answers, each by its id."""
    records = []
    for number, pieces in enumerate([("Hel", "lo"), ("Hello",), ("Hello",), ("Hel", "lo")]):
        talk.served.set_weight_version(str(number))
        records.append(talk.say("A:", talk.ids(*pieces)).record)
    found = talk.retrieve("A:Hello")
    assert found["variants"] == 4
    assert found["request_ids"] == [record.rid for record in reversed(records)]
    for record in [None, *records]:
        found = talk.retrieve("A:Hello", request_id=record.rid if record else None)
        expected = record or records[-1]
        assert found["tokens"] == expected.input_ids + expected.output_ids
        assert found["rollout_logp"][len(expected.input_ids) :] == expected.logprobs
        assert {version for _, version in versions_of(found["weight_versions"])} == set(expected.versions)


def test_the_clients_rid_is_the_request_id(talk: Talk) -> None:
    rid = uuid.uuid4().hex
    record = talk.say("A:", talk.ids("Hel", "lo"), body={"rid": rid}).record
    talk.say("A:", talk.ids("Hello"))
    found = talk.retrieve("A:Hello", request_id=rid)
    assert found["tokens"] == record.input_ids + record.output_ids


def test_samples_of_one_request_are_apart(talk: Talk) -> None:
    """n = 3: each retrievable, each with its own logprobs."""
    reply = talk.say("A:", talk.ids("Hello"), n=3)
    assert len(reply.body) == len(reply.records) == 3
    found = talk.retrieve("A:Hello")
    assert found["variants"] == 3
    assert sorted(found["request_ids"]) == sorted(record.rid for record in reply.records)
    for record in reply.records:
        one = talk.retrieve("A:Hello", request_id=record.rid)
        assert one["rollout_logp"][len(record.input_ids) :] == record.logprobs


def test_a_batch_is_so_many_requests(talk: Talk) -> None:
    body = {
        "text": ["A:", "B: long", "C"],
        "sampling_params": {"custom_params": {"script": {"ids": talk.ids("Hel", "lo")}}},
    }
    reply = talk.served.generate(body, headers={"x-radix-namespace": talk.space})
    assert [one["text"] for one in reply.body] == ["Hello"] * 3
    for text, record in zip(body["text"], reply.records, strict=True):
        assert record.input_ids == talk.start(text)
        found = talk.retrieve(text + "Hello")
        assert found["tokens"] == record.input_ids + record.output_ids
    many = talk.retrieve([text + "Hello" for text in body["text"]])
    assert [one["exact"] for one in many] == [True] * 3


# -- rule 5: what is reused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "kept"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (7, 2), (8, 3), (9, 3)])
def test_a_match_may_end_anywhere(talk: Talk, cut: int, kept: int) -> None:
    """`Hel|lo|sum|mary` cut after so many characters: whole tokens stay, a token that crosses the cut does not."""
    first = talk.say("A:", talk.ids("Hel", "lo", "sum", "mary")).record
    text = "A:" + first.text[:cut]
    ends = [len("Hel"), len("Hello"), len("Hellosum")]
    rest = first.text[ends[kept - 1] : cut] if kept else ""
    behind = talk.ids(rest + "!")
    expected = first.input_ids + first.output_ids[:kept] + behind if kept else talk.start(text + "!")
    assert talk.sent(text + "!") == expected


def test_tokens_of_one_character_go_together(talk: Talk) -> None:
    emoji = talk.ids("😀")
    if len(emoji) == 1:
        emoji = [talk.id(f"<0x{byte:02X}>") for byte in "😀".encode()] if talk.spelling.sentencepiece else emoji
    first = talk.say("A:", [*talk.ids("Hel"), *emoji, *talk.ids("lo")]).record
    assert first.text == "Hel😀lo"
    assert talk.sent("A:Hel😀X") == first.input_ids + first.output_ids[: 1 + len(emoji)] + talk.ids("X")
    assert talk.sent("A:HelX") == first.input_ids + first.output_ids[:1] + talk.ids("X")


def test_a_token_without_text_at_a_cut_is_left_out(talk: Talk) -> None:
    special = talk.id(talk.special_text)
    first = talk.say("A:", [*talk.ids("Hel"), special, *talk.ids("lo", "sum")]).record
    assert first.text == "Hellosum"
    assert talk.sent("A:HelX") == first.input_ids + first.output_ids[:1] + talk.ids("X")
    assert talk.sent("A:HelloX") == first.input_ids + first.output_ids[:3] + talk.ids("X")


@pytest.mark.parametrize(
    "prompts",
    [
        ("Write a summary of it", "Write a sum", "Write a summ", "Write a summarys"),
        ("Hello", "Hel", " Hello", "  Hello", "H"),
        ("😀😀", "😀", "😀é"),
        ("e\u0301te", "e", "e\u0301", "é", "été"),
        ("{eos}Hello", "{eos}", "{eos}Hel", "{eos} Hello"),
        ("a\n\nb", "a\n", "a\n\n", "a"),
    ],
)
def test_the_same_prompt_has_the_same_ids_whatever_is_remembered(talk: Talk, prompts: tuple[str, ...]) -> None:
    for prompt in (*prompts, *reversed(prompts)):
        text = prompt.format(eos=talk.eos_text)
        assert talk.say(text, talk.ids("§", "lo")).record.input_ids == talk.start(text)


def test_what_a_client_sent_as_ids_is_reused_only_with_a_sampled_token_behind(talk: Talk) -> None:
    ids = talk.ids("Hel", "lo", "sum")
    first = talk.say(None, talk.ids("mary", "!"), "length", input_ids=ids).record
    assert talk.sent("Hellosum") == talk.start("Hellosum")
    assert talk.sent("Hellosum, ") == talk.start("Hellosum, ")
    assert talk.sent("Hellosummary?") == ids + first.output_ids[: len(talk.ids("mary"))] + talk.ids("?")


def test_a_match_of_no_characters_is_none(talk: Talk) -> None:
    talk.say("Hello", talk.ids("x"))
    assert talk.sent("Quite other") == talk.start("Quite other")
    assert talk.retrieve("Yet other")["exact_chars"] == 0


# -- rule 6: the hidden tail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "kept", "rest"),
    [
        ("", False, ""),
        ("!", True, "!"),
        ("\n", True, "\n"),
        ("{eos}", True, ""),
        ("{eos}\n", True, "\n"),
        ("{eos}{eos}", True, "{eos}"),
        ("{special}", True, "{special}"),
    ],
)
def test_an_eos_stays_and_is_not_doubled(talk: Talk, more: str, kept: bool, rest: str) -> None:
    first = talk.say("A:", talk.ids("Hel", "lo")).record
    names = {"eos": talk.eos_text, "special": talk.special_text}
    visible = first.output_ids if kept else first.output_ids[:-1]
    assert talk.sent("A:Hello" + more.format(**names)) == first.input_ids + visible + talk.ids(rest.format(**names))
    whole = talk.retrieve("A:Hello", request_id=first.rid)
    assert whole["tokens"] == first.input_ids + first.output_ids


def test_an_eos_hidden_by_a_length_stop_is_one_too(talk: Talk) -> None:
    """Found by the text, not by the finish reason."""
    first = talk.say("A:", [*talk.ids("Hel"), talk.eos], "length", ignore_eos=True).record
    assert first.finish_reason is not None
    assert first.finish_reason["type"] == "length"
    assert talk.retrieve("A:Hel")["tokens"] == first.input_ids + first.output_ids
    assert talk.sent("A:Hel" + talk.eos_text + "x") == first.input_ids + first.output_ids + talk.ids("x")


@pytest.mark.parametrize("more", ["{special}{eos}x", "{eos}x", "x"])
def test_of_several_specials_the_text_may_spell_the_last(talk: Talk, more: str) -> None:
    first = talk.say("A:", [*talk.ids("Hel"), talk.id(talk.special_text)]).record
    assert len(first.output_ids) == 3
    more = more.format(eos=talk.eos_text, special=talk.special_text)
    assert talk.sent("A:Hel" + more) == first.input_ids + first.output_ids + talk.ids("x")


def test_an_empty_reply_is_no_chain_of_its_prompt(talk: Talk) -> None:
    first = talk.say("A:Hello", []).record
    assert first.text == ""
    assert first.output_ids == [talk.eos]
    assert talk.retrieve("A:Hello")["tokens"] == [*first.input_ids, talk.eos]
    assert talk.sent("A:Hello") == talk.start("A:Hello")
    assert talk.sent("A:Hello there") == talk.start("A:Hello there")
    spelled = talk.sent("A:Hello" + talk.eos_text + "x")
    assert spelled == [*first.input_ids, talk.eos, *talk.ids("x")]


def test_an_empty_reply_that_a_request_names_is_told_to_be_left_out(talk: Talk) -> None:
    """It is known, so nothing is missing; but the request has none of its tokens, and says so. Without a name nobody knows."""
    first = talk.say("A:Hello", [])
    name = first.body["meta_info"]["id"]
    named = talk.say("A:Hello there", talk.ids("z"), parent=name, body={"return_trajectory": True})
    assert named.record.input_ids == talk.start("A:Hello there")
    assert named.answer.headers["x-radix-reasons"] == "tail_left_out"
    assert named.body["meta_info"]["trajectory"]["exact"]
    by_ids = talk.say(None, talk.ids("z"), input_ids=talk.start("A:Hello there"), parent=name)
    assert by_ids.answer.headers["x-radix-reasons"] == "tail_left_out"
    spelled = talk.say(f"A:Hello{talk.eos_text}x", talk.ids("z"), parent=name)
    assert spelled.record.input_ids[: len(first.record.input_ids) + 1] == [*first.record.input_ids, talk.eos]
    assert "x-radix-reasons" not in spelled.answer.headers
    assert "x-radix-reasons" not in talk.say("A:Hello you", talk.ids("z")).answer.headers


STOPPED = [
    # sampled pieces, stop, later text, how many sampled tokens stay, what is encoded behind them
    pytest.param(("Hel", "ST", "OP"), "STOP", "", 1, "", id="at the end"),
    pytest.param(("Hel", "ST", "OP"), "STOP", "!", 1, "!", id="not spelled"),
    pytest.param(("Hel", "ST", "OP"), "STOP", "STOP", 3, "", id="spelled"),
    pytest.param(("Hel", "ST", "OP"), "STOP", "STOP!", 3, "!", id="spelled and more"),
    pytest.param(("Hel", "ST", "OP"), "STOP", "ST!", 2, "!", id="half of it spelled"),
    pytest.param(("Hel", "ST", "OP"), "STOP", "S!", 1, "S!", id="half a token spelled"),
    pytest.param(("Hel", "mary"), "ary", "!", 1, "m!", id="partly visible, not spelled"),
    pytest.param(("Hel", "mary"), "ary", "ary!", 2, "!", id="partly visible, spelled"),
    pytest.param(("Hel", "mary"), "ary", "ar!", 1, "mar!", id="partly visible, half spelled"),
    pytest.param(("Hel", "mary"), "ar", "ary", 2, "", id="sampled past the stop, spelled"),
    pytest.param(("Hel", "mary"), "ar", "ar", 1, "mar", id="sampled past the stop, the stop spelled"),
    pytest.param(("Hel", "mary"), "ary", "", 1, "m", id="partly visible, at the end"),
    pytest.param(("Hel", "mary", "OP"), "aryOP", "aryOP!", 3, "!", id="partly visible, spelled with what follows"),
    pytest.param(
        ("Hel", "\n\n", "User", ":"), "\nUser:", "\nUser:!", 4, "!", id="line breaks, spelled with what follows"
    ),
]


@pytest.mark.parametrize(("pieces", "stop", "more", "kept", "behind"), STOPPED)
def test_a_stop_string_stays_as_far_as_it_is_spelled(
    talk: Talk, pieces: tuple[str, ...], stop: str, more: str, kept: int, behind: str
) -> None:
    ids = talk.ids(*pieces)
    if len(ids) != len(pieces):
        pytest.skip("these are no tokens here")
    first = talk.say("A:", ids, stop=[stop]).record
    assert first.finish_reason == {"type": "stop", "matched": stop}
    assert first.text == "".join(pieces)[: "".join(pieces).index(stop)]
    assert talk.retrieve("A:" + first.text)["tokens"] == first.input_ids + first.output_ids
    assert talk.sent("A:" + first.text + more) == first.input_ids + first.output_ids[:kept] + talk.ids(behind)


@pytest.mark.parametrize(
    ("pieces", "stop", "more"), [(("Hel", "<tool_call>"), "call>", "call>!"), (("Hel", "mary"), "ary", "ary!")]
)
def test_a_stop_string_in_a_token_of_a_second_turn_stays_if_it_is_spelled(
    talk: Talk, pieces: tuple[str, ...], stop: str, more: str
) -> None:
    """Also in an added token, as a blank line is for Gemma: the reply before is not continued instead, by context."""
    ids = talk.ids(*pieces)
    if len(ids) != len(pieces):
        pytest.skip("these are no tokens here")
    talk.say("A:", talk.ids("Hel"))
    second = talk.say("A:Hel!", ids, stop=[stop]).record
    third = talk.say("A:Hel!" + second.text + more, talk.ids("z"), body={"return_trajectory": True})
    sequence = third.body["meta_info"]["trajectory"]
    assert third.record.input_ids == second.input_ids + second.output_ids + talk.ids("!")
    places = range(len(second.input_ids), len(second.input_ids) + len(ids))
    assert [sequence["loss_mask"][place] for place in places] == [1] * len(ids)


@pytest.mark.parametrize(("more", "kept", "behind"), [("!", 1, "m!"), ("", 1, "m"), ("ary!", 3, "!")])
def test_a_special_before_a_cut_token_loses_no_text(talk: Talk, more: str, kept: int, behind: str) -> None:
    """`Hel|<special>|mary`, stopped at `ary`: the `m` is text that the reader saw, and the model must see it, too."""
    first = talk.say("A:", talk.ids("Hel", talk.special_text, "mary"), stop=["ary"]).record
    assert first.text == "Helm"
    assert talk.sent("A:Helm" + more) == first.input_ids + first.output_ids[:kept] + talk.ids(behind)


def test_specials_in_the_middle_stay_where_they_are(talk: Talk) -> None:
    special = talk.id(talk.special_text)
    first = talk.say("A:", [special, *talk.ids("Hel"), special, special, *talk.ids("lo")]).record
    assert first.text == "Hello"
    found = talk.retrieve("A:Hello")
    assert found["tokens"] == first.input_ids + first.output_ids
    assert found["loss_mask"] == [0] * len(first.input_ids) + [1] * len(first.output_ids)
    assert talk.sent("A:Hello!") == first.input_ids + first.output_ids + talk.ids("!")


# -- rule 7: continuing is not starting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["Hello", " Hello", "  Hello", "\nHello", "{bos}Hello", "{bos} Hello", "{eos}Hello", "é", "e\u0301"]
)
def test_a_start_is_what_the_worker_would_encode(talk: Talk, text: str) -> None:
    text = text.format(bos=talk.spelling.bos, eos=talk.eos_text)
    ids = talk.sent(text)
    own = talk.served.workers[0].vocabulary.encode(text)
    bos = [talk.id(talk.spelling.bos)] if talk.spelling.bos else []
    assert ids == (own[1:] if bos and own[:2] == bos * 2 else own)
    assert ids.count(bos[0]) == 1 if bos else True


@pytest.mark.parametrize(
    "more", ["Hello", " Hello", "=1", "\n\n", "  x", "{bos}Hello", "▁", "1", "{special}Hello", "{special} Hello"]
)
@pytest.mark.parametrize("finish", ["length", "eos"])
def test_a_tail_gains_nothing_that_a_start_gains(talk: Talk, more: str, finish: str) -> None:
    first = talk.say("A:", talk.ids("x", "="), finish).record
    more = more.format(bos=talk.spelling.bos, special=talk.special_text)
    assert talk.sent("A:x=" + more) == first.input_ids + first.output_ids + talk.ids(more)


def test_the_text_of_ids_is_their_spelling(talk: Talk) -> None:
    """Less a leading BOS and the dummy space behind it: as if the same had been asked with text."""
    ids = talk.start("Hello you")
    first = talk.say(None, talk.ids("sum", "mary"), "length", input_ids=ids).record
    assert talk.retrieve("Hello yousummary")["tokens"] == ids + first.output_ids
    assert talk.sent("Hello yousummary!") == ids + first.output_ids + talk.ids("!")


def test_ids_that_begin_with_a_chain_continue_it(talk: Talk) -> None:
    """Masks, logprobs and versions of what was sampled before stay."""
    first = talk.say("A:", talk.ids("Hel", "lo")).record
    ids = first.input_ids + first.output_ids + talk.ids("\nB:")
    second = talk.say(None, talk.ids("sum"), input_ids=ids).record
    found = talk.retrieve("A:Hello" + talk.eos_text + "\nB:sum")
    assert found["tokens"] == ids + second.output_ids
    context = [0] * len(talk.ids("\nB:"))
    assert found["loss_mask"] == [0] * len(first.input_ids) + [1] * len(first.output_ids) + context + [1] * 2
    assert found["rollout_logp"][len(first.input_ids) :][: len(first.output_ids)] == first.logprobs


def test_ids_that_begin_with_an_empty_reply_continue_it(talk: Talk) -> None:
    """Their text spells its hidden tail: the sampled EOS stays a sampled one."""
    first = talk.say("A:Hello", []).record
    ids = first.input_ids + first.output_ids + talk.ids("\nB:")
    talk.say(None, talk.ids("sum"), input_ids=ids)
    found = talk.retrieve("A:Hello" + talk.eos_text + "\nB:sum")
    assert found["loss_mask"][len(first.input_ids)] == 1
    assert found["rollout_logp"][len(first.input_ids)] == first.logprobs[0]


@pytest.mark.parametrize("pieces", [("{special}", "Hel", "lo"), ("Hel", "{special}", "lo")])
def test_ids_that_begin_with_a_chain_with_vanished_specials_continue_it(talk: Talk, pieces: tuple[str, ...]) -> None:
    """The ids are the chain's, bit for bit, though their spelling has a special token that the reply's text has not."""
    first = talk.say("A:", talk.ids(*(piece.format(special=talk.special_text) for piece in pieces))).record
    assert first.text == "Hello"
    ids = first.input_ids + first.output_ids + talk.ids("\nB:")
    talk.say(None, talk.ids("sum"), input_ids=ids)
    text = "A:" + "".join(pieces).format(special=talk.special_text) + talk.eos_text + "\nB:sum"
    found = talk.retrieve(text)
    assert found["tokens"][: len(ids)] == ids
    assert found["loss_mask"][len(first.input_ids) :][: len(first.output_ids)] == [1] * len(first.output_ids)


# -- rule 8: retrieval ---------------------------------------------------------------------------------------------------


def test_a_lookup_leaves_no_trace(talk: Talk) -> None:
    first = talk.say("A:", talk.ids("Hel", "lo", "sum")).record
    before = talk.retrieve("A:Hellosum")
    stats = talk.served.get("/radix_tree/stats").json()
    for text in ["A", "A:", "A:H", "A:He", "A:Hel", "A:Hello!", "A:Hellosum and more", "quite other", "A:Hellosum"]:
        talk.retrieve(text)
        assert (
            talk.served.post("/radix_tree/explain", {"text": text}, headers={"x-radix-namespace": talk.space}).status
            == 200
        )
    after = talk.served.get("/radix_tree/stats").json()
    assert {key: after[key] for key in ("nodes", "tokens", "generations")} == {
        key: stats[key] for key in ("nodes", "tokens", "generations")
    }
    assert talk.retrieve("A:Hellosum") == before
    assert talk.sent("A:Hellosum!") == first.input_ids + first.output_ids + talk.ids("!")


def test_what_was_never_sent_is_encoded_as_context(talk: Talk) -> None:
    first = talk.say("A:", talk.ids("Hel", "lo")).record
    found = talk.retrieve("A:Hello\nAn observation")
    more = talk.ids("\nAn observation")
    assert found["tokens"] == first.input_ids + first.output_ids + more
    assert found["loss_mask"] == [0] * len(first.input_ids) + [1] * len(first.output_ids) + [0] * len(more)
    assert found["rollout_logp"][-len(more) :] == [0.0] * len(more)
    assert not found["exact"]
    assert found["exact_chars"] == len("A:Hello")
    assert found["reasons"]


def test_other_keys_of_the_tree_do_not_answer(talk: Talk) -> None:
    """Neither another namespace nor an adapter."""
    talk.say("A:", talk.ids("Hel", "lo"))
    assert not talk.served.retrieve("A:Hello", namespace="another")["exact"]
    assert not talk.served.retrieve("A:Hello")["exact"]
    adapter = talk.say("A:", talk.ids("H", "ello"), body={"lora_path": "adapter"}).record
    assert talk.retrieve("A:Hello")["tokens"] != adapter.input_ids + adapter.output_ids
    assert talk.sent("A:Hello!", body={"lora_path": "adapter"}) == adapter.input_ids + adapter.output_ids + talk.ids(
        "!"
    )


# -- rules 9 and 10: versions and logprobs -------------------------------------------------------------------------------


def test_logprobs_are_the_same_floats(talk: Talk) -> None:
    odd = [-0.0, -1e-45, -3.4028234663852886e38, -0.1, -17.328125, -5e-324]
    script = {"ids": talk.ids("a") * 6, "finish": "length", "logprobs": odd}
    body = {"text": "A:", "sampling_params": {"custom_params": {"script": script}}}
    talk.served.generate(body, headers={"x-radix-namespace": talk.space})
    found = talk.retrieve("A:aaaaaa")["rollout_logp"][-6:]
    assert [value.hex() for value in found] == [value.hex() for value in odd]


def test_earlier_turns_keep_their_version(talk: Talk) -> None:
    talk.served.set_weight_version("7")
    first = talk.say("A:", talk.ids("Hel", "lo")).record
    talk.served.set_weight_version("8")
    second = talk.say("A:Hello\nB:", talk.ids("sum")).record
    found = talk.retrieve("A:Hello\nB:sum")
    versions = [version for _, version in versions_of(found["weight_versions"])]
    assert versions == ["7"] * len(first.output_ids) + ["8"] * len(second.output_ids)
    assert talk.retrieve("A:Hello", max_staleness=0)["stale_tokens"] == len(first.output_ids)


def test_a_prefill_counts_as_the_reply_it_begins_and_none_makes_it_context(talk: Talk) -> None:
    first = talk.say("A:", talk.ids("Hel", "lo", "sum")).record
    assert talk.sent("A:Hello") == first.input_ids + first.output_ids[:2]
    assert talk.sent("A:Hello", parent="none") == talk.start("A:Hello")
    assert talk.retrieve("A:Helloz")["loss_mask"].count(1) == 2


# -- characters that are cut in two ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["있?", "있습?", "있습니?", "있습니까?", "있습니"])
def test_tokens_that_share_a_character_go_together(talk: Talk, more: str) -> None:
    """The second one finishes a character and goes on with whole ones: none of the two is inside of what was cut."""
    ids = talk.ids("있습니다")
    pieces = [talk.spelling.spell([number], skip_special=False).text for number in ids]
    if talk.spelling.sentencepiece or "\ufffd" not in "".join(pieces):
        pytest.skip("every token is whole characters here")
    first = talk.say("Q:", ids).record
    assert first.text == "있습니다"
    sent = talk.sent("Q:" + more)
    assert talk.spelling.spell(sent, skip_special=False).text.removeprefix(talk.spelling.bos or "") == "Q:" + more
    found = talk.retrieve("Q:" + more)
    assert talk.spelling.spell(found["tokens"], skip_special=False).text.endswith("Q:" + more)


def test_a_stop_inside_tokens_that_share_a_character(talk: Talk) -> None:
    first = talk.say("Q:", talk.ids("있습니다"), stop=["니"]).record
    assert first.text == "있습"
    sent = talk.sent("Q:있습니까?")
    assert talk.spelling.spell(sent, skip_special=False).text.endswith("Q:있습니까?")
