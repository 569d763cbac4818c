#!/usr/bin/env bash
# Guess: TRL's `accuracy_reward` reads a solution that is a piece of LaTeX, such as `\frac{1}{3}` in its own example, and pays 1
# for that answer in a box. Of a conversation with tools it reads the last reply.
# Instead (trl 1.16.0, math-verify 0.9.0): without dollars around it a solution is searched for a number, and the last one is
# taken. So `x^2 + 1` is 1, `3 \times 10` is 10 and `(5, 6)` is 6: these are paid for, the right answers are not. `2\sqrt{5}` and
# `2x + 3` are wrong for themselves. `sqrt(3)`, `x^2` and `A` have no number, and their samples are left out. With dollars all of
# them are read. `\boxed{\frac12}` is not read as a half. And the reward looks at the first message alone: in TRL's own tool loop
# that is the turn before the first tool ran, so a policy that calls one is never paid.
# Hurts: sets whose answers stand without dollars. Numbers and plain fractions, which one tries first, are right; the rest of the
# set trains the policy towards the last number of each solution.
# Here: the product scores nothing; rewards come from the trainer's own code, which gets the whole conversation.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile "math-verify[antlr4_13_2]==0.9.0" \
  latex2sympy2_extended==1.11.0 sympy==1.14.0 transformers==5.24.0
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps trl==1.16.0 accelerate==1.14.0
HF_HOME=$tmp/hf HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version

from trl.rewards import accuracy_reward

SEEN = {  # solution, answer in the box: the reward without dollars around the solution, and with them
    ("5", "5"): (1.0, 1.0),
    (r"\frac{1}{3}", r"\frac{1}{3}"): (1.0, 1.0),
    ("x^2 + 1", "x^2 + 1"): (0.0, 1.0),
    ("x^2 + 1", "1"): (1.0, 0.0),
    ("2x + 3", "2x + 3"): (0.0, 1.0),
    (r"3 \times 10", "30"): (0.0, 1.0),
    (r"3 \times 10", "10"): (1.0, 0.0),
    ("(5, 6)", "(5, 6)"): (0.0, 1.0),
    ("(5, 6)", "6"): (1.0, 0.0),
    (r"2\sqrt{5}", r"2\sqrt{5}"): (0.0, 1.0),
    ("x^2", "x^2"): (None, 1.0),
    ("A", "A"): (None, 1.0),
    (r"\frac{1}{2}", r"\frac12"): (0.0, 0.0),
}


def reply(answer):
    return {"role": "assistant", "content": rf"The answer is \boxed{{{answer}}}."}


def rewards(solutions, answer):
    return tuple(accuracy_reward([[reply(answer)]] * len(solutions), solutions))


print("trl", version("trl"), "math-verify", version("math-verify"))
found = {(solution, answer): rewards([solution, f"${solution}$"], answer) for solution, answer in SEEN}
for (solution, answer), (bare, dollars) in found.items():
    print(f"solution {solution:14} answer {answer:14} reward {bare}, with dollars {dollars}")
call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
result = {"role": "tool", "name": "add", "content": "5"}
tools = accuracy_reward([[reply(5)], [call, result, reply(5)]], ["5", "5"])
print(f"solution 5: without a tool {tools[0]}, with a call before the same reply {tools[1]}")
sys.exit(f"changed: {found}, {tools}" if found != SEEN or tools != [1.0, 0.0] else 0)
PY
