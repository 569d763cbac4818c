"""What was lost is told: replies that are listed, parents that are named, chains that cover a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from middleware_hub.client import Client, NotUsableError
from tests.support.asking import Asking, settle, until
from tests.support.stack import Reply, Stack, stack

PARAMS = {"max_new_tokens": 6, "ignore_eos": True}
RESTARTED = {"x-radix-namespace": "restarted"}
"""A router that was started again remembers nothing of what came before, as a namespace that nothing was sent to."""


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("tekken", styles=("cumulative",)) as started:
        yield started


@dataclass
class Said:
    """A turn: the text up to its end, its name, and what the worker did."""

    text: str
    name: str
    reply: Reply

    @property
    def prompt(self) -> list[int]:
        return self.reply.record.input_ids

    @property
    def chain(self) -> list[int]:
        return self.reply.record.input_ids + self.reply.record.output_ids


def say(served: Stack, text: str, *, finish: dict[str, Any] | None = None, **headers: str) -> Said:
    reply = served.generate(
        {"text": text, "sampling_params": finish or PARAMS},
        headers={k.replace("_", "-"): v for k, v in headers.items()},
    )
    return Said(text + reply.body["text"], reply.body["meta_info"]["id"], reply)


def ones(found: dict[str, Any]) -> list[int]:
    """The positions of sampled tokens."""
    return [at for at, one in enumerate(found["loss_mask"]) if one]


class TestTurns:
    def test_every_reply_of_a_sequence_is_listed_with_its_place_version_and_finish(self, served: Stack) -> None:
        first = say(served, "A question of places. ")
        second = say(served, first.text + " Go on. ")
        found = served.retrieve(second.text)
        begin, length = len(first.prompt), len(first.chain)
        known = {"version": "default", "finish": "length", "kv_version": None}
        assert found["turns"] == [
            {"request_id": first.name, "start": begin, "end": length, **known},
            {"request_id": second.name, "start": len(second.prompt), "end": len(second.chain), **known},
        ]
        assert ones(found) == [at for turn in found["turns"] for at in range(turn["start"], turn["end"])]

    def test_a_reply_that_ends_by_itself_is_a_stop(self, served: Stack) -> None:
        served.workers[0].script(text="Paris.", finish="eos")
        said = say(served, "The capital of France? ", finish={"max_new_tokens": 20})
        (turn,) = served.retrieve(said.text)["turns"]
        assert (turn["finish"], turn["end"] - turn["start"]) == ("stop", len(said.reply.record.output_ids))

    def test_the_version_is_the_one_of_the_last_token(self) -> None:
        with stack("tekken", styles=("cumulative",)) as served:
            served.set_weight_version("3")
            first = say(served, "Versions. ")
            served.set_weight_version("4")
            second = say(served, first.text + " And? ")
            assert [turn["version"] for turn in served.retrieve(second.text)["turns"]] == ["3", "4"]

    def test_the_version_of_a_reply_that_an_update_fell_into_is_its_last_tokens(self) -> None:
        with stack("tekken", styles=("cumulative",)) as served:
            (worker,) = served.workers
            served.set_weight_version("3")
            worker.hold(after=2)
            asking = Asking(served.url, {"text": "In between. ", "sampling_params": PARAMS})
            worker.wait_for_arrivals(1)
            served.set_weight_version("4")
            worker.release()
            text = "In between. " + asking.answer().json()["text"]
            found = served.retrieve(text)
            assert [run["version"] for run in found["weight_versions"]] == ["3", "4"]
            assert [turn["version"] for turn in found["turns"]] == ["4"]

    def test_a_stream_whose_client_left_has_aborted(self, served: Stack) -> None:
        """What it had got is recorded, and did not come to its end."""
        (worker,) = served.workers
        worker.hold(after=3)
        body = {"text": "I am leaving. ", "stream": True, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
        asking = Asking(served.url, body)
        worker.wait_for_arrivals(1)
        seen = ""
        while not seen:
            seen = (asking.event() or {})["text"]
        asking.leave()
        until(lambda: served.retrieve("I am leaving. " + seen)["turns"], "it is recorded")
        settle(served)
        (turn,) = served.retrieve("I am leaving. " + seen)["turns"]
        assert turn["finish"] == "abort"

    def test_a_text_that_was_never_sent_has_none(self, served: Stack) -> None:
        found = served.retrieve("Nobody ever sent this.")
        assert (found["turns"], found["exact"]) == ([], False)

    def test_a_reply_that_the_text_leaves_in_its_middle_is_listed_up_to_there(self, served: Stack) -> None:
        said = say(served, "Cut me off. ")
        half = said.text[: len("Cut me off. ") + (len(said.text) - len("Cut me off. ")) // 2]
        found = served.retrieve(half)
        turns = found["turns"]
        assert all(turn["request_id"] == said.name for turn in turns)
        assert ones(found) == [at for turn in turns for at in range(turn["start"], turn["end"])]

    def test_return_trajectory_has_them_too(self, served: Stack) -> None:
        first = say(served, "In one call. ")
        reply = served.generate({"text": first.text + " Go. ", "sampling_params": PARAMS, "return_trajectory": True})
        turns = reply.body["meta_info"]["trajectory"]["turns"]
        assert [turn["request_id"] for turn in turns] == [first.name, reply.body["meta_info"]["id"]]


class TestLostTurns:
    """Turn 1, the router is started again (or turn 2 goes to another one), turn 2."""

    def lost(self, served: Stack, prompt: str, **headers: str) -> tuple[Said, Said]:
        first = say(served, prompt)
        named = {key: first.name if value == "FIRST" else value for key, value in headers.items()}
        return first, say(served, first.text + " Go on. ", **{"x_radix_namespace": "restarted", **named})

    def test_a_parent_that_is_named_and_unknown_makes_the_sequence_inexact(self, served: Stack) -> None:
        _, second = self.lost(served, "Parents are named. ", x_radix_parent="FIRST")
        assert second.reply.answer.headers["x-radix-reasons"] == "unknown_parent"
        found = served.retrieve(second.text, namespace="restarted")
        assert (found["exact"], found["reasons"]) == (False, ["unknown_parent"])
        assert [turn["request_id"] for turn in found["turns"]] == [second.name]
        assert found["exact_chars"] == len(second.text), "what is there is covered by one chain"
        strict = served.post(
            "/retrieve_from_text",
            {"text": second.text, "strict": True, "request_id": second.name},
            headers=RESTARTED,
        )
        assert strict.status == 409
        assert "unknown_parent" in strict.json()["error"]["message"]

    def test_it_stays_so_for_all_that_goes_on_from_there(self, served: Stack) -> None:
        _, second = self.lost(served, "Parents stay unknown. ", x_radix_parent="FIRST")
        third = say(served, second.text + " More? ", x_radix_parent=second.name, x_radix_namespace="restarted")
        assert "x-radix-reasons" not in third.reply.answer.headers
        found = served.retrieve(third.text, namespace="restarted")
        assert (found["exact"], found["reasons"]) == (False, ["unknown_parent"])

    def test_the_prompt_alone_is_inexact_too(self, served: Stack) -> None:
        first, second = self.lost(served, "Prompts alone. ", x_radix_parent="FIRST")
        prompt = first.text + " Go on. "
        found = served.retrieve(prompt, namespace="restarted")
        assert (found["exact"], found["reasons"]) == (False, ["unknown_parent"])
        assert found["tokens"] == second.prompt

    def test_a_wrong_name_does_not_spoil_the_same_prompt_of_others(self, served: Stack) -> None:
        prompt = "Spoilt by nobody. "
        wrong = say(served, prompt, x_radix_parent="a typo")
        right = say(served, prompt)
        assert right.prompt == wrong.prompt
        assert not served.retrieve(wrong.text, request_id=wrong.name)["exact"]
        found = served.retrieve(right.text, request_id=right.name)
        assert (found["exact"], found["reasons"]) == (True, [])
        again = say(served, prompt, x_radix_parent="a typo")
        assert not served.retrieve(again.text, request_id=again.name)["exact"]

    def test_a_prompt_that_is_remembered_whole_may_lack_its_parent_too(self, served: Stack) -> None:
        """Nothing is encoded for it, and it is told all the same; also where the chain of another parent is all of it."""
        prompt = "Known by heart. "
        right = say(served, prompt)
        wrong = say(served, prompt, x_radix_parent="a typo")
        assert wrong.reply.answer.headers["x-radix-reused-tokens"] == str(len(right.prompt))
        assert not served.retrieve(wrong.text, request_id=wrong.name)["exact"]
        reply = served.generate(
            {"input_ids": right.chain, "sampling_params": PARAMS}, headers={"x-radix-parent": "a typo"}
        )
        assert reply.answer.headers["x-radix-reused-tokens"] == str(len(right.chain))
        found = served.retrieve(right.text + reply.body["text"], request_id=reply.body["meta_info"]["id"])
        assert (found["exact"], found["reasons"]) == (False, ["unknown_parent"])

    def test_a_reply_that_is_listed_and_missing_makes_the_sequence_inexact(self, served: Stack) -> None:
        first, second = self.lost(served, "Replies are listed. ")
        text, names = second.text, [first.name, second.name]
        plain = served.retrieve(text, namespace="restarted")
        assert (plain["exact"], [turn["request_id"] for turn in plain["turns"]]) == (True, [second.name])
        found = served.retrieve(text, namespace="restarted", expect_request_ids=names)
        assert (found["exact"], found["reasons"]) == (False, ["unknown_reply"])
        strict = served.post(
            "/retrieve_from_text", {"text": text, "strict": True, "expect_request_ids": names}, headers=RESTARTED
        )
        assert strict.status == 409
        assert first.name in strict.json()["error"]["message"]

    def test_replies_that_are_all_there_are_exact(self, served: Stack) -> None:
        first = say(served, "All of them. ")
        second = say(served, first.text + " Go on. ", x_radix_parent=first.name)
        found = served.retrieve(second.text, expect_request_ids=[first.name, second.name], strict=True)
        assert (found["exact"], found["reasons"]) == (True, [])

    @pytest.mark.parametrize("written", ["utf-8", "latin-1"])
    def test_a_name_of_any_letters_is_a_parent(self, served: Stack, written: str) -> None:
        """Clients write a header as UTF-8 or as latin-1; the `rid` in the body is the same name."""
        name = f"läufer 7, {written}"
        body = {"text": f"Letters as {written}. ", "rid": name, "sampling_params": PARAMS}
        first = served.generate(body)
        assert first.body["meta_info"]["id"] == name
        text = f"{body['text']}{first.body['text']} Go on. "
        second = say(served, text, x_radix_parent=name.encode(written).decode("latin-1"))
        assert "x-radix-reasons" not in second.reply.answer.headers
        found = served.retrieve(second.text, expect_request_ids=[name, second.name])
        assert (found["exact"], found["reasons"]) == (True, [])

    def test_ids_tell_an_unknown_parent_and_continue_what_is_known(self, served: Stack) -> None:
        first = say(served, "Ids name their parent. ")
        ids = [*first.chain, *served.spelling.encode_tail(" Go on.")]
        body = {"input_ids": ids, "sampling_params": PARAMS}
        reply = served.generate(body, headers={"x-radix-parent": "gone"})
        assert reply.answer.headers["x-radix-reasons"] == "unknown_parent"
        assert reply.answer.headers["x-radix-reused-tokens"] == str(len(first.chain))
        found = served.retrieve(
            served.spelling.text_of_request(ids) + reply.body["text"], request_id=reply.body["meta_info"]["id"]
        )
        assert (found["exact"], found["reasons"]) == (False, ["unknown_parent"])
        assert len(found["turns"]) == 2

    def test_several_texts_have_a_list_each(self, served: Stack) -> None:
        one, two = say(served, "The first of two. "), say(served, "The second of two. ")
        found = served.retrieve([one.text, two.text], expect_request_ids=[[one.name], [one.name]])
        assert [answer["exact"] for answer in found] == [True, False]
        assert found[1]["reasons"] == ["unknown_reply"]

    def test_a_batch_names_a_parent_for_each_prompt(self, served: Stack) -> None:
        """Of two samples with the same text each is continued by its own conversation."""
        served.workers[0].script(text="The same.", finish="eos", times=2)
        twins = [say(served, "Twins. ", finish={"max_new_tokens": 20}) for _ in range(2)]
        assert twins[0].text == twins[1].text
        texts = [f"{twin.text} Go on. " for twin in twins] + ["Alone. "]
        names = f"{twins[0].name}, {twins[1].name},"
        replies = served.generate({"text": texts, "sampling_params": PARAMS}, headers={"x-radix-parent": names})
        assert "x-radix-reasons" not in replies.answer.headers
        for twin, text, reply in zip(twins, texts, replies.body, strict=False):
            name = reply["meta_info"]["id"]
            found = served.retrieve(text + reply["text"], request_id=name, expect_request_ids=[twin.name, name])
            assert (found["exact"], found["reasons"]) == (True, [])

    def test_one_name_counts_for_all_prompts_of_a_batch(self, served: Stack) -> None:
        first = say(served, "One for all. ")
        texts = [first.text + " A. ", first.text + " B. ", "Not behind it. "]
        replies = served.generate({"text": texts, "sampling_params": PARAMS}, headers={"x-radix-parent": first.name})
        exact = [
            served.retrieve(text + reply["text"], request_id=reply["meta_info"]["id"])["exact"]
            for text, reply in zip(texts, replies.body, strict=True)
        ]
        assert exact == [True, True, False]

    def test_the_id_of_an_openai_completion_is_a_name(self, served: Stack) -> None:
        answer = served.post("/v1/completions", {"model": "m", "prompt": "OpenAI says: ", "max_tokens": 4})
        said = answer.json()
        text = "OpenAI says: " + said["choices"][0]["text"]
        assert said["id"].startswith("cmpl-")
        assert served.retrieve(text, expect_request_ids=[said["id"]], strict=True)["exact"]
        assert served.retrieve(text, request_id=said["id"])["exact"]
        more = say(served, text + " And ", x_radix_parent=said["id"])
        assert "x-radix-reasons" not in more.reply.answer.headers

    def test_a_reply_without_visible_tokens_was_left_out_and_not_lost(self, served: Stack) -> None:
        """All that was sampled is the end token: a text that goes on without it lacks nothing that it shows."""
        served.workers[0].script(finish="eos")
        empty = say(served, "Say nothing. ", finish={"max_new_tokens": 20})
        assert (empty.text, len(empty.reply.record.output_ids)) == ("Say nothing. ", 1)
        second = say(served, empty.text + "Go on. ", x_radix_parent=empty.name)
        assert "unknown_parent" not in second.reply.answer.headers.get("x-radix-reasons", "")
        found = served.retrieve(second.text, expect_request_ids=[empty.name, second.name])
        assert (found["exact"], found["reasons"]) == (True, [])
        covered = served.retrieve(second.text, cover=True, expect_request_ids=[empty.name, second.name])
        assert [one["tokens"] for one in covered["trajectories"]] == [second.chain, empty.chain]

    @pytest.mark.parametrize("later", ["", "</s>", "</s>Go on. "])
    def test_a_sample_of_the_same_text_is_no_substitute_for_a_reply_without_visible_tokens(
        self, served: Stack, later: str
    ) -> None:
        """Such a reply is part of a text that ends with it, or spells its end token: here another one has its place."""
        prompt, samples = f"Say nothing twice{later} ", []
        for _ in range(2):
            served.workers[0].script(finish="eos")
            samples.append(say(served, prompt, finish={"max_new_tokens": 20}))
        assert {sample.text for sample in samples} == {prompt}
        if later.endswith(" "):
            say(served, prompt + later)
        for sample, reasons in zip(samples, (["unknown_reply"], []), strict=True):
            found = served.retrieve(prompt + later, expect_request_ids=[sample.name])
            assert (found["exact"], found["reasons"]) == (not reasons, reasons)

    @pytest.mark.parametrize("options", [{}, {"stop": ["ary"]}], ids=["no visible token", "half a token"])
    def test_nor_is_a_sample_of_a_longer_text(self, served: Stack, options: dict[str, Any]) -> None:
        """A text that goes on with what another sample of the prompt said has none of the listed reply."""
        prompt, samples = f"Say it once or twice {sorted(options)}: ", []
        encode = served.spelling.encode_tail
        for ids in (encode("mary") if options else [], [*encode("m"), *encode("ore")]):
            served.workers[0].script(ids=ids, finish="eos")
            samples.append(say(served, prompt, finish={"max_new_tokens": 20, **options}))
        short, longer = samples
        assert (short.text, longer.text) == (prompt + "m" * len(options), prompt + "more")
        found = served.retrieve(longer.text, expect_request_ids=[short.name, longer.name])
        assert (found["exact"], found["reasons"]) == (False, ["unknown_reply"])


class TestEditedParents:
    def test_a_reply_that_was_stripped_is_told(self, served: Stack) -> None:
        """The parent is known, and a part of it is in the prompt: nothing is missing that the text still has."""
        served.workers[0].script(text="An answer.\n\n", finish="eos")
        first = say(served, "Strip this. ", finish={"max_new_tokens": 20})
        second = say(served, first.text.rstrip() + " Go on. ", x_radix_parent=first.name)
        assert "edited_turn" in second.reply.answer.headers["x-radix-reasons"]
        assert "unknown_parent" not in second.reply.answer.headers["x-radix-reasons"]
        assert int(second.reply.answer.headers["x-radix-reused-tokens"]) > len(first.prompt)
        assert served.retrieve(second.text)["exact"]

    def test_a_reply_that_is_cut_at_a_tag_does_not_break_the_special_token_behind_it(self, served: Stack) -> None:
        encode = served.spelling.encode_tail
        served.workers[0].script(ids=[*encode("I look. "), *encode("<"), *encode("search>it")], finish="eos")
        first = say(served, "Tags. ", finish={"max_new_tokens": 20})
        text = "Tags. I look. </s>Go on. "
        second = say(served, text)
        (end,) = encode("</s>")
        assert end in second.prompt[len(first.prompt) :]
        assert served.spelling.text_of_request(second.prompt) == text

    def test_a_listed_reply_of_which_a_part_is_left_is_told(self, served: Stack) -> None:
        served.workers[0].script(text="An answer that is long.", finish="eos")
        first = say(served, "A part. ", finish={"max_new_tokens": 40})
        second = say(served, first.text[:-6] + "so. ")
        assert served.retrieve(second.text)["reasons"] == []
        names = [first.name, second.name]
        found = served.retrieve(second.text, expect_request_ids=names)
        assert (found["exact"], found["reasons"]) == (False, ["edited_turn"])
        kept = next(one["end"] - one["start"] for one in found["turns"] if one["request_id"] == first.name)
        sampled = len(first.reply.record.output_ids) + len(second.reply.record.output_ids)
        assert found["missing_tokens"] == sampled - len(ones(found)) == len(first.reply.record.output_ids) - kept > 0
        refused = served.post("/retrieve_from_text", {"text": second.text, "expect_request_ids": names, "strict": True})
        assert refused.status == 409
        assert f"lacks {found['missing_tokens']} tokens" in refused.json()["error"]["message"]
        assert "cover" in refused.json()["error"]["message"]
        covered = served.retrieve(second.text, expect_request_ids=names, cover=True)
        assert all(one["exact"] for one in covered["trajectories"])
        about = served.get(f"/inspect/api/conversations/text%3A{first.name}").json()
        size = len(first.reply.record.output_ids)
        assert [node["cuts"] for node in about["tree"] if node["cuts"]] == [
            {"request_id": first.name, "kept": kept, "of": size - 1}  # the client never saw the last token
        ]
        whole = served.retrieve(second.text, expect_request_ids=[second.name])
        assert (whole["exact"], whole["missing_tokens"]) == (True, 0)
        with Client(served.url) as client, pytest.raises(NotUsableError) as told:
            client.retrieve(second.text, expect_request_ids=names).require_exact()
        assert f"lacks {found['missing_tokens']} sampled tokens" in str(told.value)
        assert "cover" in str(told.value)

    def test_fields_that_mean_nothing_are_named(self, served: Stack) -> None:
        said = say(served, "Misspelt. ")
        assert served.retrieve(said.text, expect_request_id=["x"])["ignored"] == ["expect_request_id"]
        assert "ignored" not in served.retrieve(said.text)


class TestCover:
    def test_the_fewest_chains_hold_every_reply_and_no_token_is_trained_twice(self, served: Stack) -> None:
        """Two attempts at a second turn, of which the text has one: two chains, the first turn's mask in one."""
        first = say(served, "Cover them. ")
        chosen = say(served, first.text + " Try. ", x_radix_parent=first.name)
        rejected = say(served, first.text + " Try differently. ", x_radix_parent=first.name)
        names = [first.name, chosen.name, rejected.name]
        found = served.retrieve(chosen.text, cover=True, expect_request_ids=names)
        assert found["missing"] == []
        one, other = found["trajectories"]
        assert (one["response"], other["response"]) == (chosen.text, rejected.text)
        assert (one["tokens"], other["tokens"]) == (chosen.chain, rejected.chain)
        assert ones(one) == [
            *range(len(first.prompt), len(first.chain)),
            *range(len(chosen.prompt), len(chosen.chain)),
        ]
        assert ones(other) == [*range(len(rejected.prompt), len(rejected.chain))]
        assert one["exact"]
        assert other["exact"]
        assert [turn["request_id"] for turn in other["turns"]] == [first.name, rejected.name]

    def test_one_chain_is_enough_for_a_conversation(self, served: Stack) -> None:
        first = say(served, "A line. ")
        second = say(served, first.text + " Go. ")
        third = say(served, second.text + " On. ")
        names = [third.name, first.name, second.name]
        found = served.retrieve(first.text, cover=True, expect_request_ids=names)
        assert [one["response"] for one in found["trajectories"]] == [first.text, third.text]
        found = served.retrieve(third.text, cover=True, expect_request_ids=names)
        assert [one["tokens"] for one in found["trajectories"]] == [third.chain]

    def test_a_reply_that_the_text_cut_is_given_whole_beside_it(self, served: Stack) -> None:
        served.workers[0].script(text="An answer that is long.\n\n", finish="eos")
        first = say(served, "Cut this. ", finish={"max_new_tokens": 40})
        second = say(served, first.text.rstrip() + " Go on. ")
        found = served.retrieve(second.text, cover=True, expect_request_ids=[first.name, second.name])
        one, other = found["trajectories"]
        assert ones(one) == [*range(len(second.prompt), len(second.chain))]
        assert other["tokens"] == first.chain
        assert ones(other) == [*range(len(first.prompt), len(first.chain))]

    def test_what_is_missing_is_listed_and_makes_all_of_it_inexact(self, served: Stack) -> None:
        said = say(served, "Something is missing. ")
        found = served.retrieve(said.text, cover=True, expect_request_ids=[said.name, "lost", "lost"])
        assert found["missing"] == ["lost"]
        assert [(one["exact"], one["reasons"]) for one in found["trajectories"]] == [(False, ["unknown_reply"])]

    def test_another_namespace_covers_nothing(self, served: Stack) -> None:
        said = say(served, "Namespaces are apart. ")
        found = served.retrieve(said.text, namespace="elsewhere", cover=True, expect_request_ids=[said.name])
        assert found["missing"] == [said.name]

    @pytest.mark.parametrize(
        "body",
        [
            {"text": "a", "cover": True},
            {"text": ["a"], "cover": True, "expect_request_ids": [["x"]]},
            {"text": "a", "expect_request_ids": "x"},
            {"text": "a", "expect_request_ids": [""]},
            {"text": "a", "expect_request_ids": [["x"]]},
            {"text": ["a", "b"], "expect_request_ids": ["x"]},
            {"text": ["a", "b"], "expect_request_ids": [["x"]]},
            {"text": "a", "expect_request_ids": [1]},
        ],
    )
    def test_what_does_not_fit_is_a_400(self, served: Stack, body: dict[str, Any]) -> None:
        answer = served.post("/retrieve_from_text", body)
        assert answer.status == 400
        message = answer.json()["error"]["message"]
        assert "expect_request_ids" in message or "cover" in message


class TestMismatchedReplies:
    """A reply whose ids do not spell its text: a wrong `--tokenizer-path`, or a worker's own fault."""

    def spoilt(self, served: Stack, prompt: str) -> Said:
        served.workers[0].script(text="Goodbye.", finish="eos", fault="wrong_text")
        said = say(served, prompt, finish={"max_new_tokens": 20})
        assert said.reply.answer.headers["x-radix-recorded"].startswith("inexact")
        return said

    def test_its_text_is_encoded_and_its_end_is_not_written_twice(self, served: Stack) -> None:
        first = self.spoilt(served, "Never continue me. ")
        text = first.text + "</s> Go on. "
        second = say(served, text)
        assert second.prompt == served.spelling.encode_start(text)
        assert second.reply.answer.headers["x-radix-reasons"] == "engine_mismatch"

    def test_what_goes_on_from_it_is_not_exact(self, served: Stack) -> None:
        """Its tokens were sampled, and read as context: that is known to be missing."""
        first = self.spoilt(served, "I am not exact. ")
        own = served.retrieve(first.text)
        assert (own["exact"], own["reasons"]) == (False, ["engine_mismatch"])
        second = say(served, first.text + " Go on. ")
        found = served.retrieve(second.text)
        assert (found["exact"], found["reasons"]) == (False, ["engine_mismatch"])
        assert [turn["request_id"] for turn in found["turns"]] == [second.name]

    def test_a_good_reply_with_the_same_text_is_continued(self, served: Stack) -> None:
        prompt = "Both of us. "
        served.workers[0].script(text="What these ids do not say. Goodbye.", finish="eos")
        good = say(served, prompt, finish={"max_new_tokens": 30})
        bad = self.spoilt(served, prompt)
        assert good.text == bad.text
        second = say(served, good.text + " Go on. ")
        assert second.prompt[: len(good.chain) - 1] == good.chain[:-1]
        assert served.retrieve(second.text)["exact"]

    def test_earlier_turns_keep_their_ids(self, served: Stack) -> None:
        first = say(served, "Before it all was well. ")
        second = self.spoilt(served, first.text + " Now? ")
        third = say(served, second.text + " Go on. ")
        assert third.prompt[: len(first.chain)] == first.chain
        assert not served.retrieve(third.text)["exact"]
