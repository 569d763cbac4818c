"""The export of a trie, compared with an oracle that keeps a list of tokens for every turn.

A turn goes on from an earlier one, and may leave the end of it out: a stop token that the template has no place for, or what
the client never saw. So of one sampled turn two branches may hold different numbers of tokens.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from middleware_hub.sessions.controls import topology
from middleware_hub.sessions.export import formats
from middleware_hub.sessions.export.formats import as_json
from middleware_hub.sessions.export.trajectories import BranchTrajectory, branches
from middleware_hub.sessions.trie.nodes import Checkpoint, NewTurn
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import SpanFlag, TokenSpan, pack_ids, pack_logprobs

WIDTH = 2
"""Numbers in a row of `routed_experts`."""


@dataclass(frozen=True)
class Token:
    """One token of a chain; context has no turn."""

    id: int
    turn: str | None = None
    place: int = 0
    logprob: float | None = 0.0
    version: str = ""


@dataclass
class Turn:
    """One generation as the test knows it."""

    checkpoint: Checkpoint
    tokens: list[Token]
    parent: Turn | None
    kept: int
    """So many tokens of the parent's chain are in this one's."""


@dataclass
class Talk:
    """Makes turns in a trie, and remembers their tokens."""

    trie: MessageTrie = field(default_factory=MessageTrie)
    turns: list[Turn] = field(default_factory=list)
    reward: dict[str, Any] = field(default_factory=dict)
    """Of the session."""

    def say(
        self,
        parent: Turn | None = None,
        *,
        context: int = 2,
        sampled: int = 3,
        left_out: int = 0,
        version: str = "1",
        logprobs: bool = True,
        reasoning: str = "",
        flags: int = SpanFlag.NONE,
        extra: dict[str, Raw] | None = None,
        reasons: tuple[str, ...] = (),
        reward: dict[str, Any] | None = None,
    ) -> Turn:
        """One turn behind `parent`, of whose sampled tokens the last `left_out` are not in its prompt."""
        number = len(self.turns)
        name = f"g{number}"
        history = [] if parent is None else [msgspec.json.decode(one.message) for one in parent.checkpoint.node.path()]
        prepared = self.trie.prepare(
            b"",
            [*history, {"role": "user", "content": f"u{number}"}],
            parent=None if parent is None else parent.checkpoint.id,
        )
        handle = self.trie.open(prepared, name)
        above = None if parent is None else parent.checkpoint.span
        take = 0 if above is None else len(above) - left_out
        prompt = [Token(number * 1000 + place) for place in range(context)]
        reply = [
            Token(number * 1000 + 500 + place, name, place, -float(number) - place / 16 if logprobs else None, version)
            for place in range(sampled)
        ]
        before = TokenSpan(above, take, 0, pack_ids([one.id for one in prompt]), 0)
        span = TokenSpan(
            before,
            context,
            0,
            pack_ids([one.id for one in reply]),
            0,
            logprobs=pack_logprobs([one.logprob or 0.0 for one in reply]) if logprobs else None,
            versions=version,
            flags=flags,
            request_ids=(name,),
            finish="stop",
        )
        message = {"role": "assistant", "content": f"a{number}"}
        sampled = NewTurn(message, span, "stop", reasoning=reasoning, reasons=reasons, extra=extra or {})
        checkpoint = self.trie.commit(handle, sampled)
        checkpoint.reward = reward
        known = [] if parent is None else parent.tokens
        turn = Turn(checkpoint, [*known[: len(known) - left_out], *prompt, *reply], parent, len(known) - left_out)
        self.turns.append(turn)
        return turn

    def rewarded(self, turn: Turn) -> bool:
        """Return whether the session, or a turn on the path, has a reward."""
        walked: Turn | None = turn
        while walked is not None and not walked.checkpoint.reward:
            walked = walked.parent
        return bool(self.reward) or walked is not None

    def export(self, *, every_checkpoint: bool = False, **options: Any) -> list[BranchTrajectory]:
        return list(branches(self.trie.checkpoints(terminal=not every_checkpoint), self.reward, **options))

    def expected(self, *, every_checkpoint: bool, shared_turns: str) -> list[dict[str, Any]]:
        """What must come of it, token by token."""
        continued = {id(turn.parent) for turn in self.turns}
        ends = [turn for turn in self.turns if every_checkpoint or id(turn) not in continued]
        owners: dict[str, str] = {}
        found = []
        for turn in ends:
            begin = next(place for place, token in enumerate(turn.tokens) if token.turn is not None)
            response = turn.tokens[begin:]
            mask = []
            for token in response:
                holders = [one for one in ends if any(token is other for other in one.tokens)]
                owner = next((one for kind in (True, False) for one in holders if self.rewarded(one) is kind), None)
                mask.append(int(token.turn is not None and (shared_turns == "every" or owner is turn)))
            names = list(dict.fromkeys(token.turn for token in response if token.turn is not None))
            places = {name: [at for at, one in enumerate(response) if one.turn == name] for name in names}
            above: list[str] = []
            walked: Turn | None = turn
            while walked is not None:
                above.append(walked.checkpoint.id)
                walked = walked.parent
            found.append(
                {
                    "branch": turn.checkpoint.id,
                    "parent": next((owners[name] for name in above if name in owners), None),
                    "prompt": [token.id for token in turn.tokens[:begin]],
                    "response": [token.id for token in response],
                    "mask": mask,
                    "logprobs": None if any(one.logprob is None for one in response) else [t.logprob for t in response],
                    "versions": [token.version for token in response],
                    "turns": tuple((name, at[0], at[-1] + 1) for name, at in places.items()),
                }
            )
            for name in above:
                owners.setdefault(name, turn.checkpoint.id)
        return found


def seen(trajectory: BranchTrajectory) -> dict[str, Any]:
    """The same words for what was exported."""
    versions = [""] * len(trajectory.response_ids)
    for version, low, high in trajectory.weight_versions:
        assert low < high
        versions[low:high] = [version] * (high - low)
    return {
        "branch": trajectory.branch,
        "parent": trajectory.parent_branch,
        "prompt": trajectory.prompt_ids.tolist(),
        "response": trajectory.response_ids.tolist(),
        "mask": trajectory.response_mask.tolist(),
        "logprobs": None if trajectory.response_logprobs is None else trajectory.response_logprobs.tolist(),
        "versions": versions,
        "turns": places(trajectory),
    }


def places(trajectory: BranchTrajectory) -> tuple[tuple[str, int, int], ...]:
    """The turns with their offsets into the response."""
    begin = len(trajectory.prompt_ids)
    return tuple((turn.request_id, turn.start - begin, turn.end - begin) for turn in trajectory.turns)


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Up to eight turns, each behind any earlier one, of whose sampled tokens at least one stays."""
    talk = Talk()
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.sampled_from(talk.turns)) if number else None
        sampled = 0 if parent is None else len(parent.checkpoint.span)
        talk.say(
            parent,
            context=draw(st.integers(1, 3)),
            sampled=draw(st.integers(1, 4)),
            left_out=draw(st.integers(0, sampled - 1)) if sampled else 0,
            version=draw(st.sampled_from(("1", "2"))),
            logprobs=draw(st.integers(0, 9)) > 0,
            reward=draw(st.sampled_from((None, None, None, {"score": 0.0}))),
        )
    talk.reward = draw(st.sampled_from(({}, {}, {"score": 1.0})))
    return talk


@given(talks(), st.booleans(), st.sampled_from(("once", "every")))
def test_every_branch_is_its_tokens(talk: Talk, every_checkpoint: bool, shared: Literal["once", "every"]) -> None:
    """Ids, mask, logprobs, versions, the places of turns and the earlier branch, whatever a fork leaves out of a turn."""
    found = talk.export(every_checkpoint=every_checkpoint, shared_turns=shared)
    assert [seen(one) for one in found] == talk.expected(every_checkpoint=every_checkpoint, shared_turns=shared)


@pytest.mark.parametrize(
    ("rewards", "owner"),
    [
        ((None, None, None), 0),
        ((None, {"score": 0.0}, {"score": 1.0}), 1),
        ((None, None, {"success": False}), 2),
        (({"note": "words"}, None, {"score": 1}), 2),
        ((None, {"note": "words"}, None), 1),
        (({}, {"score": None}, {"reward": 2}), 2),
    ],
)
def test_a_shared_turn_belongs_to_the_first_branch_with_a_reward(
    rewards: tuple[dict[str, Any] | None, ...], owner: int
) -> None:
    talk = Talk()
    shared = talk.say()
    for reward in rewards:
        talk.say(shared, reward=reward)
    found = talk.export()
    assert [sum(one.response_mask.tolist()) for one in found] == [6 if at == owner else 3 for at in range(3)]
    talk.reward = {"score": 0.5}  # with one of the session all have one
    assert [sum(one.response_mask.tolist()) for one in talk.export()] == [6, 3, 3]


@given(talks())
def test_no_token_is_trained_twice_and_none_is_lost(talk: Talk) -> None:
    """With `once`, each sampled token that a branch holds has the mask in exactly one of them."""
    trained: dict[int, int] = {}
    for one in talk.export():
        for token, mask in zip(one.response_ids.tolist(), one.response_mask.tolist(), strict=True):
            trained[token] = trained.get(token, 0) + mask
    sampled = [token for token in trained if token % 1000 >= 500]
    assert {trained[token] for token in sampled} <= {1}
    assert not any(trained[token] for token in trained if token % 1000 < 500)


class TestWhatAForkLeavesOut:
    """Turn one is `500 501 502`. One branch goes on behind all of it, the other behind its first two tokens."""

    def test_the_later_branch_trains_the_rest_of_a_turn(self) -> None:
        talk = Talk()
        first = talk.say(sampled=3)
        talk.say(first, left_out=1)
        talk.say(first)
        short, long = talk.export()
        assert short.response_mask.tolist() == [1, 1, 0, 0, 1, 1, 1]
        assert long.response_mask.tolist() == [0, 0, 1, 0, 0, 1, 1, 1]
        assert (places(short)[0], places(long)[0]) == (("g0", 0, 2), ("g0", 0, 3))

    def test_the_earlier_branch_leaves_nothing_to_train(self) -> None:
        talk = Talk()
        first = talk.say(sampled=3)
        talk.say(first)
        talk.say(first, left_out=1)
        _, short = talk.export()
        assert short.response_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
        assert short.parent_branch == "g1"

    def test_a_third_branch_trains_nothing_that_the_first_one_did(self) -> None:
        """A shorter branch between the two does not make the end of the turn untrained again."""
        talk = Talk()
        first = talk.say(sampled=3)
        talk.say(first)
        talk.say(first, left_out=1)
        talk.say(first)
        masks = [one.response_mask.tolist() for one in talk.export()]
        assert masks == [[1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]]

    def test_versions_end_where_the_turn_was_left(self) -> None:
        talk = Talk()
        first = talk.say(sampled=3, version="7")
        talk.say(first, left_out=1, version="8")
        (only,) = talk.export()
        assert only.weight_versions == (("7", 0, 2), ("8", 4, 7))

    def test_no_row_of_the_worker_is_kept_of_it(self) -> None:
        """The left-out token was read by nobody in this branch; the row at its place is the later turn's."""
        talk = Talk()
        first = talk.say(context=2, sampled=3, extra={"routed_experts": rows(range(100, 104))})
        talk.say(first, left_out=1, context=2, sampled=2, extra={"routed_experts": rows(range(200, 207))})
        (only,) = talk.export()
        array = only.per_token["routed_experts"]
        assert array.array()[:, 0].tolist() == [100, 101, 102, 103, 204, 205, 206]
        assert "routed_experts" not in only.extra

    def test_a_row_at_the_place_of_a_token_left_out_comes_from_the_next_turn(self) -> None:
        talk = Talk()
        first = talk.say(context=1, sampled=3, extra={"routed_experts": rows(range(100, 103))})
        talk.say(first, left_out=2, context=2, sampled=2, extra={"routed_experts": rows(range(200, 205))})
        (only,) = talk.export()
        told = only.per_token["routed_experts"].described()["told"]
        assert told == [{"generation_id": "g0", "start": 0, "end": 2}, {"generation_id": "g1", "start": 2, "end": 5}]

    def test_no_set_of_a_token_left_out_is_kept_of_it(self) -> None:
        def sets(*several: list[int]) -> dict[str, Raw]:
            return {"output_token_sampling_mask": Raw(json.dumps(several).encode())}

        talk = Talk()
        first = talk.say(context=1, sampled=3, extra=sets([1], [2, 3], [4, 5, 6]))
        talk.say(first, left_out=1, context=2, sampled=2, extra=sets([7], [8, 9]))
        (only,) = talk.export()
        assert only.sets is not None
        joined = {
            key: np.frombuffer(base64.b64decode(bytes(only.sets[key])), "<i4") for key in ("token_ids", "offsets")
        }
        assert joined["token_ids"].tolist() == [1, 2, 3, 7, 8, 9]
        assert joined["offsets"].tolist() == [0, 0, 1, 3, 3, 3, 4, 6]


def rows(first_column: range) -> Raw:
    """`routed_experts` as a worker writes them: each row is known by its first number."""
    numbers = np.array([[number, -number] for number in first_column], "<i4")
    assert numbers.shape[1] == WIDTH
    return Raw(json.dumps(base64.b64encode(numbers.tobytes()).decode()).encode())


class TestLogprobs:
    @pytest.mark.parametrize("without", [0, 1, 2])
    def test_one_turn_without_them_makes_them_unknown(self, without: int) -> None:
        """Zeros would be taken for probabilities of one. It says so, and a branch beside it keeps its own."""
        talk = Talk()
        turn = None
        for number in range(3):
            turn = talk.say(turn, logprobs=number != without)
        talk.say()
        broken, whole = talk.export()
        assert broken.response_logprobs is None
        assert broken.reasons == ("no_logprobs",)
        assert broken.exact, "the ids are what they are"
        assert whole.response_logprobs is not None
        assert whole.reasons == ()


class TestReasons:
    """Why a branch is not exact: the chain's own reasons, and those of each of its turns."""

    def test_a_mismatch_in_any_turn_makes_all_of_it_inexact(self) -> None:
        talk = Talk()
        first = talk.say(flags=SpanFlag.MISMATCH)
        talk.say(first)
        (only,) = talk.export()
        assert (only.exact, only.reasons) == (False, ("engine_mismatch",))

    def test_a_reason_of_a_turn_stands_once_and_only_in_its_branch(self) -> None:
        talk = Talk()
        first = talk.say()
        second = talk.say(first, reasons=("spliced", "template_mismatch"))
        talk.say(second, reasons=("spliced",))
        talk.say(first)
        spoilt, clean = talk.export()
        assert (spoilt.exact, spoilt.reasons) == (False, ("spliced", "template_mismatch"))
        assert (clean.exact, clean.reasons) == (True, ())


class TestMessages:
    def test_reasoning_stays_with_its_sample(self) -> None:
        """Two samples of one message differ in their reasoning, which is no part of the message."""
        talk = Talk()
        first = talk.say(reasoning="because")
        talk.say(first)
        (only,) = talk.export()
        contents = [(m.get("content"), m.get("reasoning_content")) for m in map(msgspec.json.decode, only.messages)]
        assert contents == [("u0", None), ("a0", "because"), ("u1", None), ("a1", None)]

    def test_rewards_of_later_turns_go_over_those_of_earlier_ones_and_the_session(self) -> None:
        talk = Talk()
        first = talk.say()
        second = talk.say(first)
        other = talk.say(first)
        first.checkpoint.reward = {"score": 1, "step": 1}
        second.checkpoint.reward = {"score": 2}
        found = list(branches(talk.trie.checkpoints(terminal=True), {"score": 0, "task": "x"}))
        assert [one.reward_info for one in found] == [
            {"score": 2, "step": 1, "task": "x"},
            {"score": 1, "step": 1, "task": "x"},
        ]
        assert other.checkpoint.reward is None


class TestWhen:
    def test_what_is_committed_or_cleared_meanwhile_changes_nothing(self) -> None:
        talk = Talk()
        talk.say()
        talk.say()
        made = branches(talk.trie.checkpoints(terminal=True), {})
        head = next(made)
        talk.say()
        talk.trie.clear()
        rest = list(made)
        assert [head.branch, *(one.branch for one in rest)] == ["g0", "g1"]
        assert rest[0].response_ids.tolist() == [1500, 1501, 1502]


class TestJson:
    @given(talks())
    def test_it_is_the_same_in_json(self, talk: Talk) -> None:
        found = json.loads(b"".join(as_json(talk.export(), {"session_id": "s"})))
        assert found["session_id"] == "s"
        for written, one in zip(found["trajectories"], talk.export(), strict=True):
            assert written["prompt_ids"] == one.prompt_ids.tolist()
            assert written["response_ids"] == one.response_ids.tolist()
            assert written["response_mask"] == one.response_mask.tolist()
            logprobs = one.response_logprobs
            assert written["response_logprobs"] == (None if logprobs is None else logprobs.tolist())
            assert written["num_turns"] == len(one.turns)
            assert [tuple(turn.values()) for turn in written["extra_fields"]["turns"]] == list(places(one))
            listed = [(turn["request_id"], turn["start"], turn["end"]) for turn in written["turns"]]
            assert listed == list(places(one))
            assert all(turn["version"] and turn["finish"] == "stop" for turn in written["turns"])
            assert [tuple(run.values()) for run in written["weight_versions"]] == list(one.weight_versions)
            assert (written["exact"], written["reasons"]) == (one.exact, list(one.reasons))

    def test_long_arrays_come_in_pieces_and_are_whole(self) -> None:
        """More numbers than are written at once."""
        talk = Talk()
        talk.say(sampled=400, context=100)
        for _ in range(50):
            talk.say(talk.turns[-1], sampled=400, context=100)
        pieces = list(as_json(talk.export(), {}))
        (only,) = json.loads(b"".join(pieces))["trajectories"]
        tokens = [token.id for token in talk.turns[-1].tokens]
        assert [*only["prompt_ids"], *only["response_ids"]] == tokens
        assert len(only["response_logprobs"]) == len(only["response_ids"]) == 25_400
        assert max(map(len, pieces)) < 200_000

    def test_files_of_images_come_in_pieces_and_are_whole(self) -> None:
        talk = Talk()
        talk.say()
        image = {"digest": "sha256:0", "span": [0, 2], "bytes": bytes(1_000_000)}
        found = [msgspec.structs.replace(one, images=[image]) for one in talk.export()]
        pieces = list(as_json(found, {}))
        (only,) = json.loads(b"".join(pieces))["trajectories"]
        (shown,) = only["multi_modal_data"]["images"]
        assert shown == {**image, "bytes": base64.b64encode(image["bytes"]).decode()}
        assert max(map(len, pieces)) < 300_000


def test_the_topology_names_parents_and_samples() -> None:
    talk = Talk()
    first = talk.say()
    talk.say(first)
    nodes = topology(talk.trie)
    assert [node["parent"] for node in nodes] == [None, 0, 1, 2]
    assert [node["excerpt"] for node in nodes] == ["u0", "a0", "u1", "a1"]
    samples = [sample for node in nodes for sample in node["samples"]]
    assert [(one["generation_id"], one["parent_generation"], one["terminal"]) for one in samples] == [
        ("g0", None, False),
        ("g1", "g0", True),
    ]


@pytest.mark.parametrize("chunk", [1, 4, 8192])
def test_scores_are_written_in_pieces_as_they_are(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Of the likeliest tokens a piece has fewer entries, as each is several numbers."""
    monkeypatch.setattr(formats, "CHUNK", chunk)
    talk = Talk()
    talk.say(sampled=9)
    (only,) = talk.export()
    count = len(only.response_ids)
    scores = {
        "ref_logprobs": [-0.5 * one for one in range(count)],
        "ref_top_logprobs": [[[-0.1, 7], [-0.2, 8]]] * count,
    }
    scored = msgspec.structs.replace(only, scores=scores)
    found = json.loads(b"".join(formats.trajectory_json(scored)))
    assert found == {**json.loads(b"".join(formats.trajectory_json(only))), **scores}
