"""The drift study's own analysis: what counts as changed, how wide intervals are, what loops keep, what a cosine is of."""

from __future__ import annotations

import json
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from benchmarks.drift.counts import Change, changes, cut, pooled, wilson
from benchmarks.drift.gemma import mended
from benchmarks.drift.loops import LOOPS, Loop, printed_again, without_thoughts
from benchmarks.drift.prompts import FURTHER, PROMPTS, QUESTIONS
from benchmarks.drift.report import by_kind, by_length, gradients_table, kinds_table, loops_table
from benchmarks.drift.sampling import GROUP, Rollout
from middleware_hub.drift.cli import LoggedReply
from tests.support import sglang_server

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """`ab` is one token if a text is encoded; a model may sample `a` and `b`. `€` is three byte tokens."""
    pieces = ["a", "b", "ab", "c", " ", *(f"<0x{byte:02X}>" for byte in "€".encode()), "<eos>"]
    made = Tokenizer(
        models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[("a", "b")], byte_fallback=True)
    )
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<eos>"])
    return made


A, B, AB, C, SPACE, E1, E2, E3, EOS = range(9)


def reply(tokenizer: Tokenizer, ids: list[int], prompt: str = "c ") -> LoggedReply:
    return LoggedReply(0, "", prompt, tokenizer.decode(ids), ids)


def rollout(tokenizer: Tokenizer, ids: list[int], kind: str = "x", temperature: float = 1.0) -> Rollout:
    return {
        "kind": kind,
        "temperature": temperature,
        "prompt": "c ",
        "text": tokenizer.decode(ids),
        "finish": "stop",
        "prompt_ids": [C, SPACE],
        "ids": ids,
        "logprobs": [-1.0] * len(ids),
    }


def test_a_spelling_is_counted_and_a_token_without_text_is_not(tokenizer: Tokenizer) -> None:
    found = changes(
        [reply(tokenizer, [A, B, C, EOS]), reply(tokenizer, [AB, C]), reply(tokenizer, [E1, E2, E3])], tokenizer
    )
    assert [(one.sampled, one.alone, one.whole) for one in found] == [(3, 2, 2), (2, 0, 0), (3, 0, 0)]


def test_a_seam_counts_only_in_the_whole_text(tokenizer: Tokenizer) -> None:
    """The prompt's last letter and the reply's first are one token of the text."""
    (found,) = changes([reply(tokenizer, [B, C], prompt="ca")], tokenizer)
    assert (found.alone, found.whole) == (0, 1)


def test_a_rollout_is_cut_at_a_whole_character(tokenizer: Tokenizer) -> None:
    whole = reply(tokenizer, [C, E1, E2, E3, A])
    ids = {length: (one.ids if (one := cut(whole, length, tokenizer)) else None) for length in range(1, 7)}
    assert ids == {1: [C], 2: [C], 3: [C], 4: [C, E1, E2, E3], 5: [C, E1, E2, E3, A], 6: None}


@pytest.mark.parametrize(("part", "whole"), [(0, 10), (10, 10), (3, 17), (50, 1000)])
def test_wilson_solves_its_own_equation(part: int, whole: int) -> None:
    """At a bound p, the share lies 1.96 standard errors of p away."""
    found, z = wilson(part, whole), 1.959964
    assert 0 <= found.low <= found.value <= found.high <= 1
    for bound in (found.low, found.high):
        if 0 < bound < 1:
            assert abs(found.value - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / whole), rel=1e-6)
    assert (found.low == 0, found.high == 1) == (part == 0, part == whole)


def test_an_interval_of_rollouts_is_wider_than_one_of_tokens() -> None:
    """All changes lie in one of ten rollouts: tokens of a rollout are no independent trials."""
    clustered = pooled([(50, 100), *[(0, 100)] * 9])
    spread = pooled([(5, 100)] * 10)
    assert clustered.value == spread.value == 0.05
    assert (spread.low, spread.high) == (0.05, 0.05)
    assert clustered.low == 0.0
    assert clustered.high > wilson(50, 1000).high > 0.05
    assert pooled([(0, 10), (0, 20)]) == wilson(0, 30)
    assert math.isnan(pooled([]).value)


def test_intervals_hold_what_they_promise() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(60):
        rates = [0.05 + 0.1 * chance.random() for _ in range(30)]
        pairs = [(sum(chance.random() < rate for _ in range(40)), 40) for rate in rates]
        found = pooled(pairs)
        held += found.low <= 0.1 <= found.high
    assert 50 <= held < 60  # 57 of 60, give or take


def test_rows_are_of_kinds_and_lengths(tokenizer: Tokenizer) -> None:
    rollouts = [
        rollout(tokenizer, [A, B] * 20, "x", 1.0),
        rollout(tokenizer, [AB] * 16 + [A, B], "y", 1.0),
        rollout(tokenizer, [AB, C], "x", 0.7),
    ]
    rows = {(row["kind"], row["temperature"]): row for row in by_kind(rollouts, tokenizer)}
    assert set(rows) == {("x", 1.0), ("y", 1.0), ("all", 1.0), ("x", 0.7), ("all", 0.7)}
    assert (rows["x", 1.0]["tokens"]["part"], rows["x", 1.0]["tokens"]["whole"]) == (40, 40)
    assert (rows["all", 1.0]["tokens"]["part"], rows["all", 1.0]["tokens"]["whole"]) == (42, 58)
    assert (rows["all", 1.0]["changed"]["part"], rows["all", 1.0]["changed"]["whole"]) == (2, 2)
    seam = rollout(tokenizer, [B, C])
    seam["prompt"] = "ca"
    (row, _) = by_kind([seam], tokenizer)
    assert (row["tokens"]["part"], row["tokens_whole"]["part"], row["tokens_whole"]["whole"]) == (0, 1, 2)
    lengths = {row["length"]: row for row in by_length(rollouts, tokenizer) if row["temperature"] == 1.0}
    assert set(lengths) == {16, 32}  # no rollout has 64 tokens
    assert (lengths[16]["changed"]["part"], lengths[16]["changed"]["whole"]) == (1, 2)
    assert (lengths[32]["tokens"]["part"], lengths[32]["tokens"]["whole"]) == (32, 32)
    assert "| x |" in kinds_table({"trained": list(rows.values())})


def loop(name: str) -> Loop:
    (found,) = [one for one in LOOPS if one.name == name]
    return found


def test_loops_edit_what_they_say() -> None:
    call = ' {"a":1,"b":"é"}'
    assert printed_again(call) == ' {"a": 1, "b": "é"}'
    assert printed_again(' {"a":') == ' {"a":'
    assert without_thoughts("Q\n<think>", "So.</think>\nAssistant: 4.") == "Q\nAssistant: 4."
    assert without_thoughts("Q\n<think>", "on and on") == "Q\non and on"
    search = loop("search, cut at the tag by the workflow").follow
    assert search("p", "<search>x</search> made up", 0).startswith("p<search>x</search>\n\n<information>")
    assert loop("ReAct by hand, `reply.rstrip()`").follow("p", " t \n", 0).startswith("p t\nObservation:")
    assert loop("chat, ConversationChain").follow("p:", " t", 0).startswith("p:  t\nUser:")
    assert loop("chat, the application keeps `answer.strip()`").follow("p:", " t\n", 0).startswith("p: t\nUser:")
    paper = loop("ReAct, the paper's notebooks").follow
    assert paper("p:", "  t\nAction:  Search[x] ", 0).startswith("p: t\nAction:  Search[x]\nObservation:")


@pytest.mark.parametrize("one", LOOPS, ids=lambda one: one.name)
def test_a_loop_that_only_appends_is_verbatim(one: Loop) -> None:
    """Each loop that says so keeps any reply; each other one changes at least one of these."""
    replies = [" Yes. ", "\nno", ' {"a":1}', "x</search> y</think>\nz", "  two\n\n"]
    appends = [one.follow("text <think>", reply, 0).startswith(f"text <think>{reply}") for reply in replies]
    verbatim = {"search, `stop` at the tag, not trimmed", "thinking kept", "tool calls, as they are"}
    verbatim |= {"ReAct by hand, the reply as it is", "chat, the reply as it is"}
    assert all(appends) == (one.name in verbatim)


def test_prompts_are_what_groups_need() -> None:
    assert all(len(set(prompts)) == GROUP for prompts in PROMPTS.values())
    for one in LOOPS:
        assert len({one.prompt.format(question) for question in QUESTIONS}) == len(QUESTIONS)
    assert len(set(FURTHER)) == len(FURTHER)


def test_tables_show_shares_with_intervals() -> None:
    share = {"part": 1, "whole": 4, "low": 0.1, "high": 0.6}
    row: dict[str, Any] = {"loop": "l", "verbatim": 3, "next_requests": 4, "last": share, "sequences": 1.5}
    row |= {"covered": {**share, "part": 4}, "again": share}
    assert loops_table([row]).splitlines()[-1] == "| l | 3 of 4 | 25% (10-60) | 1.5 | 100% | 25.00% (10.00-60.00) |"
    step = {"kind": "k", "sampled": 100, "wrong": 0, "rollouts": 8, "rollouts_changed": 0, "mean_difference": 0.0}
    step |= {"mean_drifted": None, "drifted": None, "cosine": 1.0, "cosine_changed": None}
    last = gradients_table({"trained": [step]}).splitlines()[-1]
    assert last == "| trained | k | 100 | 0.0% | 0 of 8 | 0.000000 | - | 1.000 | - |"
    assert Change(1, 0, 0).example == ("", "")


def test_a_converted_tokenizer_is_mended() -> None:
    """It begins with `<bos>`, spells a run of spaces by the longest pieces first, and keeps `<unused0>` in the text."""
    pieces = ["<eos>", "<bos>", "<unused0>", "a", "b", "ab", "▁", "▁▁", "▁▁▁"]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made = Tokenizer(
        models.BPE(
            vocab={piece: n for n, piece in enumerate(pieces)},
            merges=[("a", "b"), ("▁", "▁"), ("▁▁", "▁"), ("▁", "▁▁")],
        )
    )
    converted = json.loads(made.to_str())
    converted["added_tokens"] = [{"id": n, "content": pieces[n], **plain, "special": True} for n in range(3)]
    found = Tokenizer.from_str(json.dumps(mended(converted)))
    spelled = [found.id_to_token(one) or "" for one in found.encode("ab<unused0>▁▁▁▁▁▁▁").ids]
    assert spelled == ["<bos>", "ab", "<unused0>", "▁▁▁", "▁▁▁", "▁"]
    assert found.decode(found.encode("ab<unused0><eos>").ids).split() == ["ab", "<unused0>"]
    before = Tokenizer.from_str(json.dumps(converted))
    assert [before.id_to_token(one) for one in before.encode("▁▁▁▁▁▁▁").ids] == ["▁▁", "▁▁", "▁▁▁"]


NAIVELY = """
import math, torch
from types import SimpleNamespace
from benchmarks.drift.gradient import Sample, advantages, step, steps_of

torch.manual_seed(0)


class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.say = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, ids):
        return SimpleNamespace(logits=self.say(torch.tanh(self.read(ids).cumsum(1))))


def naive(model, samples, again):
    total = 0.0
    for one in samples:
        tokens, begin = (one.again, one.begin_again) if again else (one.tokens, one.begin)
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
        for place in range(begin, len(tokens)):
            total = total - one.advantage * logprobs[place - 1, tokens[place]]
    used = [model.read.weight, model.say.weight, model.say.bias]
    return torch.cat([one.flatten() for one in torch.autograd.grad(total, used)])


model = Toy()
same = Sample([1, 2, 3], 1, [1, 2, 3], 1, [-2.0, -2.0], 0.5)
longer = Sample([1, 4, 5, 6], 2, [1, 4, 3, 2, 6], 2, [-1.0, -3.0], -1.5)
shorter = Sample([2, 4, 5, 6], 1, [2, 6], 1, [-1.0, -3.0, -2.0], 1.0)
found = step(model, [same, longer, shorter])
def similarity(samples):
    return torch.cosine_similarity(naive(model, samples, False), naive(model, samples, True), dim=0)


expected, alone = similarity([same, longer, shorter]), similarity([longer, shorter])
assert math.isclose(found["cosine"], expected.item(), abs_tol=1e-5), (found, expected)
assert math.isclose(found["cosine_changed"], alone.item(), abs_tol=1e-5), (found, alone)
assert abs(found["cosine"]) < 0.99
assert (found["rollouts"], found["rollouts_changed"], found["sampled"], found["wrong"]) == (3, 2, 7, 3)
with torch.no_grad():
    own = torch.log_softmax(model(torch.tensor([longer.again])).logits[0], -1)[3, 6].item()
    short = torch.log_softmax(model(torch.tensor([shorter.again])).logits[0], -1)[0, 6].item()
assert math.isclose(found["mean_drifted"], (abs(own + 3) + abs(short + 2)) / 2, abs_tol=1e-5), found
unchanged = step(model, [same])
assert (unchanged["cosine"], unchanged["cosine_changed"], unchanged["drifted"]) == (1.0, None, None)
assert [round(one, 2) for one in advantages(["ab", "a1", "12", "a1"])] == [1.22, 0.0, -1.22, 0.0]
counted = [("x", 1.0, "p", 5), ("x", 1.0, "q", 2), ("x", 0.7, "r", 6), ("y", 1.0, "p", 1), ("y", 1.0, "q", 3)]
counted.append(("z", 1.0, "p", 1))
rollouts = [{"kind": k, "temperature": t, "prompt": p} for k, t, p, n in counted for _ in range(n)]
found = steps_of(rollouts, ["x + z", "y + x"])
steps = [(name, [[one["prompt"] for one in group] for group in groups]) for name, groups in found]
assert steps == [("y + x", [["q"] * 3, ["p"] * 4])]
"""


@pytest.mark.sglang
@pytest.mark.slow
def test_the_cosine_is_that_of_whole_gradients() -> None:
    """Against a naive computation with a toy model. An engine's Python has torch, the tests' own has none."""
    python = sglang_server.python_with("torch")
    if python is None:
        pytest.skip("no torch: tests/sglang_cpu/setup.sh brings it")
    done = subprocess.run([python, "-c", NAIVELY], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
