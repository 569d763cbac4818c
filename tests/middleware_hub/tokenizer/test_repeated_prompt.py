"""What a decoder like vLLM's leaves of a prompt in a reply's text is taken out, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from middleware_hub.spans.chain import SpanFlag, pack_ids
from middleware_hub.tokenizer.alignment import align_reply
from middleware_hub.tokenizer.repeated_prompt import RepeatedPrompt
from middleware_hub.tokenizer.vocabulary import REPLACEMENT
from tests.conftest import examples
from tests.middleware_hub.real import sampled_ids, texts, tokenizer
from tests.middleware_hub.toy import E_HEAD, E_TAIL, EOS, NOTHING, SPACE_A, A, B, toy_vocabulary
from tests.support.vocabularies import NAMES, Name, load

TOY = toy_vocabulary()
slow = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def body(text: Any, ids: Sequence[int], completed: int | None = None) -> bytes:
    meta = {"completion_tokens": len(ids) if completed is None else completed, "kept": 1.50}
    return json.dumps({"text": text, "output_ids": list(ids), "meta_info": meta}).encode()


def taken_out(prompt: Sequence[int], text: str, ids: Sequence[int], **more: Any) -> str:
    repeated = RepeatedPrompt(TOY, pack_ids(prompt), skips_special=more.pop("skips", True))
    found: str = json.loads(repeated.taken_out(body(text, ids), **more))["text"]
    return found


@pytest.mark.parametrize(
    ("prompt", "text", "ids", "own"),
    [
        ([A, E_HEAD], "aéb", [E_TAIL, B], "b"),
        ([A, E_HEAD], "aé", [E_TAIL], ""),
        ([A, E_HEAD], "a�b", [B], "b"),
        ([A, E_HEAD, EOS], "aéb", [E_TAIL, B, EOS], "b"),
        ([A, E_HEAD], "a�b", [B, A, B], "b"),  # a stop string cut it
        ([A, E_HEAD], "a", [E_TAIL, B], ""),  # the engine waits for the rest of a character
        ([SPACE_A, E_HEAD], "aéb", [E_TAIL, B], "b"),  # some decoders remove the first space
        # SGLang's, which are explained by what was sampled.
        ([A, E_HEAD], "b", [E_TAIL, B], "b"),
        ([A, E_HEAD], "", [E_TAIL], ""),
        ([A, E_HEAD], "aab", [A, A, B], "aab"),
        ([A, E_HEAD], "�ab", [E_TAIL, A, B], "�ab"),
        ([E_TAIL, A, E_HEAD], "�ab", [E_TAIL, A, B], "�ab"),
        ([A, E_HEAD], "ab�", [A, B, E_HEAD, E_TAIL], "ab�"),
        # Not of this prompt, or of one that is left out by the engine itself.
        ([A, E_HEAD], "bbb", [A], "bbb"),
        ([A, E_HEAD], "a�x", [A], "a�x"),
        ([A, B], "abb", [B], "abb"),
        ([E_HEAD], "�b", [B], "�b"),
        ([E_HEAD], "ab", [B], "ab"),
        ([NOTHING], "a", [A], "a"),
    ],
)
def test_only_the_prompt_is_taken_out(prompt: list[int], text: str, ids: list[int], own: str) -> None:
    assert taken_out(prompt, text, ids) == own


def test_few_prompts_are_looked_at() -> None:
    """A reply costs nothing more behind a prompt that ends with whole characters of any length."""
    made = tokenizer("qwen")
    for text in "Hello.\n", "é", "при":
        assert made.encode_tail(text)[-1] not in made.vocabulary.open_ends
    assert len(made.vocabulary.open_ends) < len(made.vocabulary) / 10


def test_an_event_of_a_stream_may_hold_only_what_is_new() -> None:
    """The first text of a stream then comes behind ids without text."""
    repeated = RepeatedPrompt(TOY, pack_ids([A, E_HEAD]), skips_special=True)
    event = repeated.taken_out(body("aéab", [B], completed=3), [E_TAIL, A])
    assert json.loads(event)["text"] == "ab"
    for whole in body("aéab", [E_TAIL, A, B]), body("aéab", [E_TAIL, A, B]).replace(b"completion_tokens", b"other"):
        assert json.loads(repeated.taken_out(whole, [E_TAIL, A]))["text"] == "ab", "of all ids"
    later = body("a", [A], completed=4)
    assert repeated.taken_out(later, [E_TAIL, A, B]) is later


def test_special_tokens_that_the_text_has_are_part_of_the_prompt() -> None:
    assert taken_out([EOS, A, E_HEAD], "<e>aéb", [E_TAIL, B], skips=False) == "b"
    assert taken_out([A, E_HEAD, EOS], "aéb", [E_TAIL, B], skips=False) == "aéb"


@pytest.mark.parametrize(
    "data",
    [b"[DONE]", b"{}", b'{"error": {}}', b"[1]", b'{"text": "a", "output_ids": 1, "meta_info": {}}', body(7, [A])],
)
def test_what_is_no_reply_stays_as_it_is(data: bytes) -> None:
    assert RepeatedPrompt(TOY, pack_ids([A, E_HEAD]), skips_special=True).taken_out(data) is data


def test_all_other_fields_stay_byte_for_byte() -> None:
    found = RepeatedPrompt(TOY, pack_ids([A, E_HEAD]), skips_special=True).taken_out(body("aéb", [E_TAIL, B]))
    assert b'"meta_info":{"completion_tokens": 2, "kept": 1.5}' in bytes(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_ends_at_every_byte_of_a_character(name: Name) -> None:
    """Where tokens are bytes, those of several characters are one broken run, which no half of it spells."""
    made, real = tokenizer(name), load(name)
    for text in ("So: x🧿", "So: xẛ", "So: xé🧿"):
        whole = made.encode_tail(text)
        for cut in range(1, len(whole)):
            prompt = whole[:cut]
            if not made.vocabulary.spell(prompt).endswith(REPLACEMENT):
                continue
            repeated = RepeatedPrompt(made.vocabulary, pack_ids(prompt), skips_special=True)
            for more in ("", "b", "bb", "🧿", "!"):
                ids = whole[cut:] + made.encode_tail(more)
                decoder = DecodeStream(ids=prompt, skip_special_tokens=True)
                found = "".join(decoder.step(real, one) or "" for one in ids)
                own = json.loads(repeated.taken_out(body(found, ids)))["text"]
                assert own == more


@pytest.mark.parametrize("name", ["qwen", "tekken"])
def test_whatever_vllm_repeats_is_taken_out(name: Name) -> None:
    """At every token, behind prompts that end anywhere: the ids explain what is left."""
    made, real = tokenizer(name), load(name)
    halves = [made.encode_tail(text)[:count] for text in ("\u1e9b\u0323", "🧿", "\u0f3a") for count in (1, 2)]

    @slow
    @given(texts(name), st.sampled_from([*halves, [], made.encode_tail(REPLACEMENT)]), sampled_ids(name), st.booleans())
    def check(before: str, last: list[int], ids: list[int], skips: bool) -> None:
        prompt = [*made.encode_tail(before), *last]
        if prompt and made.vocabulary.spell(prompt, skip_special=skips).endswith(REPLACEMENT):
            assert prompt[-1] in made.vocabulary.open_ends, "else no reply is looked at"
        decoder = DecodeStream(ids=prompt, skip_special_tokens=skips)
        repeated = RepeatedPrompt(made.vocabulary, pack_ids(prompt), skips_special=skips)
        text = ""
        for count, one in enumerate(ids, 1):
            text += decoder.step(real, one) or ""
            own = json.loads(repeated.taken_out(body(text, ids[:count])))["text"]
            alignment = align_reply(made.vocabulary, ids[:count], own, skips_special=skips, matched=None)
            assert not alignment.flags & SpanFlag.MISMATCH

    check()
