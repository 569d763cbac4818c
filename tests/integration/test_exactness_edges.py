"""Rules of exactness where two of them meet: versions that leave holes, contexts of other chains, ids under another text."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.oracle import versions_of
from tests.support.stack import Reply, Stack, stack

SPECIAL = "<|endoftext|>"


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", styles=("cumulative",)) as started:
        yield started
        assert started.idle(), started.inflight()


@dataclass
class Talk:
    """A namespace of its own."""

    served: Stack
    space: str = field(default_factory=lambda: uuid.uuid4().hex)

    def ids(self, *pieces: str) -> list[int]:
        """Each piece encoded by itself."""
        return [number for piece in pieces for number in self.served.spelling.encode_tail(piece)]

    def say(self, prompt: str | list[int], ids: list[int], *, headers: Any = None, **more: Any) -> Reply:
        """One reply, which ends at its length unless `finish` says otherwise."""
        script = {"ids": ids, "finish": more.pop("finish", "length"), "extra_meta": more.pop("meta", {})}
        params = {"custom_params": {"script": script}, **more}
        body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": params}
        return self.served.generate(body, headers={"x-radix-namespace": self.space, **(headers or {})})

    def sent(self, text: str) -> list[int]:
        return self.say(text, self.ids("z")).record.input_ids

    def retrieve(self, text: str, **options: Any) -> Any:
        return self.served.retrieve(text, namespace=self.space, **options)


@pytest.fixture
def talk(served: Stack) -> Talk:
    return Talk(served)


class TestVersions:
    """`weight_versions` of a reply of four tokens, whose `weight_version` is 9."""

    @pytest.mark.parametrize(
        ("runs", "found"),
        [
            ([("7", 0, 1), ("8", 1, 4)], ["7", "8", "8", "8"]),
            ([("7", 0, 2), ("8", 2, 2), ("9", 2, 4)], ["7", "7", "9", "9"]),
            ([("8", 0, 4)], ["8"] * 4),
            ([("7", 0, 3)], None),
            ([("7", 0, 2), ("8", 2, 5)], None),
            ([("7", 1, 4)], None),
            ([("7", 0, 1), ("8", 2, 4)], None),
            ([("7", 0, 3), ("8", 2, 4)], None),
            ([("7", 0, 4), ("8", 4, 2)], None),
        ],
    )
    def test_runs_are_believed_if_each_token_is_in_one_of_them(
        self, talk: Talk, runs: list[tuple[str, int, int]], found: list[str] | None
    ) -> None:
        """Else all tokens are of the version at the end, and that is not certain."""
        spans = [{"version": version, "start": start, "end": end} for version, start, end in runs]
        meta = {"weight_version": "9", "weight_versions": spans}
        talk.say("A:", talk.ids("s", "u", "m", "mary"), meta=meta)
        answer = talk.retrieve("A:summary")
        versions = [version for _, version in versions_of(answer["weight_versions"])]
        assert versions == (found or ["9"] * 4)
        assert answer["reasons"] == ([] if found else ["version_uncertain"])
        assert answer["exact"]

    @pytest.mark.parametrize(("most", "stale"), [(0, 2), (1, 2), (2, 0), (3, 0)])
    def test_so_many_versions_old_is_not_older_than_that(self, talk: Talk, most: int, stale: int) -> None:
        """Two versions behind is stale at `max_staleness` 1, and not at 2."""
        talk.served.set_weight_version("5")
        talk.say("A:", talk.ids("sum", "mary"))
        talk.served.set_weight_version("7")
        talk.say("B:", talk.ids("x"))
        assert talk.retrieve("A:summary", max_staleness=most)["stale_tokens"] == stale
        body = {"text": "A:summary", "strict": True, "max_staleness": most}
        answer = talk.served.post("/retrieve_from_text", body, headers={"x-radix-namespace": talk.space})
        assert answer.status == (409 if stale else 200)


class TestRetrieval:
    def test_a_token_that_is_partly_visible_is_told_where_it_is_not_kept(self, talk: Talk) -> None:
        """`Hel|mary` stopped at `ary`: what stands behind the `m` is not what the model sampled there."""
        first = talk.say("A:", talk.ids("Hel", "mary"), stop=["ary"], finish="eos").record
        whole = talk.retrieve("A:Helm")
        assert (whole["exact"], whole["reasons"]) == (True, [])
        found = talk.retrieve("A:Helm!")
        assert (found["exact"], found["exact_chars"]) == (False, len("A:Hel"))
        assert found["reasons"] == ["cut_in_token", "retokenized"]
        assert found["tokens"] == first.input_ids + first.output_ids[:1] + talk.ids("m!")
        explained = talk.served.post("/inspect/api/explain", {"text": "A:Helm!", "namespace": talk.space}).json()
        assert (explained["exact"], explained["reasons"]) == (False, found["reasons"])

    def test_the_visible_part_of_the_only_token_is_told_too(self, talk: Talk) -> None:
        """As a request, as the same request again, and when it is retrieved."""
        first = talk.say("A:", talk.ids("mary"), stop=["ary"], finish="eos")
        assert (first.body["text"], len(first.record.output_ids)) == ("m", 1)
        for _ in range(2):
            again = talk.say("A:m!", talk.ids("z"))
            assert again.record.input_ids == talk.ids("A:m!")
            assert again.answer.headers["x-radix-reasons"] == "cut_in_token"
        found = talk.retrieve("A:m!z", expect_request_ids=[first.body["meta_info"]["id"]])
        assert (found["exact"], found["reasons"]) == (True, ["cut_in_token"])

    @pytest.mark.parametrize("given", [False, True], ids=["as text", "as ids"])
    def test_a_prompt_is_retrieved_with_the_chain_that_its_text_continues(self, talk: Talk, given: bool) -> None:
        """Two chains were sent the same text: behind the reply, and later as context. The reply is in the answer."""
        first = talk.say("A:", talk.ids("Hel", "lo")).record
        ids = [*first.input_ids, *first.output_ids, *talk.ids("\n", "B", ":")]
        second = talk.say(ids if given else "A:Hello\nB:", talk.ids("x")).record
        alone = talk.say("A:Hello\nB:", talk.ids("y"), headers={"x-radix-parent": "none"}).record
        assert alone.input_ids != second.input_ids
        found = talk.retrieve("A:Hello\nB:")
        assert found["tokens"] == second.input_ids
        assert sum(found["loss_mask"]) == len(first.output_ids)
        assert found["exact"]

    def test_each_prompt_of_a_batch_has_its_own_way_with_special_tokens(self, talk: Talk) -> None:
        """`skip_special_tokens` of the second one says nothing of the first one's text."""
        scripts = [{"ids": talk.ids("Hel", SPECIAL, "lo"), "finish": "length"} for _ in range(2)]
        params = [
            {"skip_special_tokens": skips, "custom_params": {"script": script}}
            for skips, script in zip((True, False), scripts, strict=True)
        ]
        body = {"text": ["A:", "B:"], "sampling_params": params}
        reply = talk.served.generate(body, headers={"x-radix-namespace": talk.space})
        assert [one["text"] for one in reply.body] == ["Hello", f"Hel{SPECIAL}lo"]
        assert reply.answer.headers["x-radix-recorded"] == "exact"
        for text, record in zip(("A:Hello", f"B:Hel{SPECIAL}lo"), reply.records, strict=True):
            found = talk.retrieve(text)
            assert (found["tokens"], found["exact"]) == ([*record.input_ids, *record.output_ids], True)


class TestIdsUnderAnotherText:
    """Ids that begin with a chain continue it, though their own text spells what its text left out."""

    @pytest.mark.parametrize("more", ["<|end", "<|endoftext|>", "<|endoftext|>l", "lo!", "lo", "<", ""])
    def test_a_text_that_leaves_it_in_the_middle_is_sent_as_itself(self, talk: Talk, more: str) -> None:
        """`Hel|<special>|lo` reads `Hello`; sent back as ids it reads `Hel<special>lo`. Its places mean nothing there."""
        first = talk.say("A:", talk.ids("Hel", SPECIAL, "lo")).record
        chain = [*first.input_ids, *first.output_ids]
        second = talk.say(chain, talk.ids("sum", "mary")).record
        assert second.input_ids == chain
        text = f"A:Hel{more}"
        sent = talk.sent(text)
        if sent[: len(chain)] == chain:
            # The whole reply stays, with the special token that its text does not show.
            assert text.startswith("A:Hello")
        else:
            assert talk.served.spelling.spell(sent, skip_special=False).text == text

    def test_an_encoding_that_a_client_chose_is_nobody_elses(self, talk: Talk) -> None:
        """Also behind a special token, where any tokenizer's own encoding could be cut."""
        odd = [*talk.ids("s", "um", "mary"), *talk.ids(SPECIAL), *talk.ids("x")]
        talk.say(odd, talk.ids("hello"))
        for text in (f"summary{SPECIAL}y", f"summary{SPECIAL}", f"summary{SPECIAL}xy"):
            assert talk.sent(text) == talk.served.spelling.encode_start(text)
