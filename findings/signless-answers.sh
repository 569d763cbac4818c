#!/usr/bin/env bash
# Guess: scorers that compare an answer with the right one after they tidied both tell 5 and -5 apart, and 12 and 1/2.
# Instead (inspect-ai 0.3.285, verl 0.9.1): they tidy as the evaluation of SQuAD does, which removes punctuation, and the sign of
# a number, its slash and its commas are punctuation. In inspect's `exact()` and `f1()` and in verl's score of Search-R1, -5 is 5,
# 1/2 is 12 and the list [1,2,5] is 125; in verl's 3.5 is 35 too. The right answer in a `\boxed{}` is wrong in all of them.
# Inspect's `match()` looks at the end of the text: 15 and -5 are right for 5.
# Hurts: questions with numbers in sets of questions with short answers: a change of +5% is paid for where -5% is right.
# Here: the product scores nothing; rewards come from the trainer's own code.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile inspect-ai==0.3.285
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps verl==0.9.1
"$tmp/venv/bin/python" - <<'PY'
import asyncio
import contextlib
import importlib.util
import sys
from importlib.metadata import distribution, version

from inspect_ai.model import ChatMessageUser, ModelOutput
from inspect_ai.scorer import Target, exact, f1, match
from inspect_ai.solver import TaskState

path = distribution("verl").locate_file("verl/utils/reward_score/search_r1_like_qa_em.py")  # without torch
spec = importlib.util.spec_from_file_location("search_r1", path)
search_r1 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(search_r1)

SCORERS = {"exact()": exact(), "f1()": f1(), "match()": match(), "match(numeric)": match(numeric=True)}
SEEN = {  # exact(), f1(), match(), match(numeric=True), verl's Search-R1
    ("5", "5"): "yes yes yes yes yes",
    ("6", "5"): "no no no no no",
    ("-5", "5"): "yes yes yes no yes",
    ("5", "-5"): "yes yes yes no yes",
    ("-5%", "5%"): "yes yes yes yes yes",
    ("1/2", "12"): "yes yes no no yes",
    ("3.5", "35"): "no no no no yes",
    ("15", "5"): "no no yes no no",
    ("[1,2,5]", "125"): "yes yes no yes yes",
    (r"\boxed{5}", "5"): "no no yes no no",
    ("(5)", "5"): "yes yes yes yes yes",
}


async def scores(answer, right):
    state = TaskState("policy", 1, 1, "", [ChatMessageUser(content="")], output=ModelOutput.from_content("policy", answer))
    values = [(await scorer(state, Target(right))).value in ("C", 1.0) for scorer in SCORERS.values()]
    with contextlib.redirect_stdout(None):  # it prints some of its answers
        values.append(search_r1.compute_score(f"<answer>{answer}</answer>", {"target": [right]}) == 1.0)
    return " ".join("yes" if value else "no" for value in values)


print(f"inspect-ai {version('inspect-ai')}, verl {version('verl')}")
print(f"{'answer':10} {'right':6}", *(f"{name:>15}" for name in (*SCORERS, "Search-R1")))
found = {(answer, right): asyncio.run(scores(answer, right)) for answer, right in SEEN}
for (answer, right), line in found.items():
    print(f"{answer:10} {right:6}", *(f"{one:>15}" for one in line.split()))
sys.exit("changed" if found != SEEN else 0)
PY
