"""How a reply ends, and which part of its end is text."""

from __future__ import annotations

from tests.worker.talk import generate
from worker.worker import EmbeddedWorker


def test_eos_is_in_the_ids_and_not_in_the_text(worker: EmbeddedWorker) -> None:
    worker.script(text="Hi there", finish="eos", times=2)
    reply = generate(worker)
    eos = worker.vocabulary.eos_id
    assert reply["text"] == "Hi there"
    assert reply["output_ids"][-1] == eos
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
    shown = generate(worker, sampling_params={"no_stop_trim": True, "skip_special_tokens": False})
    assert shown["text"] == "Hi there<|im_end|>"
    assert shown["output_ids"] == reply["output_ids"]


def test_eos_at_once_is_an_empty_text_with_one_token(worker: EmbeddedWorker) -> None:
    worker.script([], finish="eos")
    reply = generate(worker)
    assert (reply["text"], reply["output_ids"]) == ("", [worker.vocabulary.eos_id])


def test_a_stop_token_is_trimmed_unless_no_stop_trim(worker: EmbeddedWorker) -> None:
    ids = worker.vocabulary.encode("one two three")
    worker.script(ids, times=2)
    trimmed = generate(worker, sampling_params={"stop_token_ids": [ids[1]]})
    kept = generate(worker, sampling_params={"stop_token_ids": [ids[1]], "no_stop_trim": True})
    assert trimmed["output_ids"] == kept["output_ids"] == ids[:2]
    assert (trimmed["text"], kept["text"]) == ("one", "one two")
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[1]}


def test_ignore_eos_goes_on(worker: EmbeddedWorker) -> None:
    worker.script([], finish="eos")
    assert len(generate(worker, sampling_params={"ignore_eos": True, "max_new_tokens": 4})["output_ids"]) == 4


def test_a_stop_string_is_cut_before_its_first_match_and_the_ids_keep_all(worker: EmbeddedWorker) -> None:
    ids = worker.vocabulary.encode("one two three")
    worker.script(ids, times=2)
    cut = generate(worker, sampling_params={"stop": ["tw"]})
    kept = generate(worker, sampling_params={"stop": "tw", "no_stop_trim": True})
    assert cut["output_ids"] == ids[:2]
    assert (cut["text"], kept["text"]) == ("one ", "one tw")
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "tw"}


def test_a_stop_regex_is_not_trimmed(worker: EmbeddedWorker) -> None:
    worker.script(text="one two three")
    reply = generate(worker, sampling_params={"stop_regex": "t[vw]o"})
    assert reply["text"] == "one two"
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "t[vw]o"}


def test_a_length_stop_inside_a_character_ends_in_a_replacement_character(worker: EmbeddedWorker) -> None:
    pieces = [worker.vocabulary.tokenizer.token_to_id(byte) for byte in ("ä", "½")]  # E4 BD of 你 = E4 BD A0
    worker.script(pieces)
    reply = generate(worker, sampling_params={"max_new_tokens": 2})
    assert (reply["text"], reply["output_ids"]) == ("\ufffd", pieces)


def test_special_tokens_in_the_middle_vanish_from_the_text_only(worker: EmbeddedWorker) -> None:
    ids = worker.vocabulary.encode("a<|im_start|>b<think>c")
    worker.script(ids, finish="length")
    reply = generate(worker)
    assert (reply["text"], reply["output_ids"]) == ("ab<think>c", ids)


def test_max_new_tokens_0_samples_nothing(worker: EmbeddedWorker) -> None:
    reply = generate(worker, sampling_params={"max_new_tokens": 0})
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert reply["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]
