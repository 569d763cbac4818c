#!/usr/bin/env bash
# Guess: of a reply with two boxes math-verify, whose scores many trainers of reasoning take, reads the last one, or the first.
# Instead (math-verify 0.9.0): two boxes are one set if fewer than 10 characters stand between them, or fewer than 70 with a
# comma, a semicolon, `and` or `or` among them. `\boxed{4}. Wait, no. It is \boxed{5}.` is {4, 5}, which is right for 5 no more
# than for 4; without the comma it is 5. An intermediate result joins the answer too: `\boxed{9}, hence the side is \boxed{3}` is
# {3, 9}. Equal boxes are one answer.
# Hurts: whether a policy that corrects itself, or boxes a step, is paid depends on a comma. It learns not to do either.
# Here: the product scores nothing; rewards come from the trainer's own code.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile "math-verify[antlr4_13_2]==0.9.0" \
  latex2sympy2_extended==1.11.0 sympy==1.14.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version

from math_verify import parse, verify

SEEN = {  # the right answer, a reply: what is read, and whether it is right
    ("5", r"\boxed{5}"): ("5", True),
    ("5", r"\boxed{4} is wrong. The answer is \boxed{5}."): ("5", True),
    ("5", r"\boxed{4}. Wait. It is \boxed{5}."): ("5", True),
    ("5", r"\boxed{4}. Wait, no. It is \boxed{5}."): ("{4, 5}", False),
    ("5", r"\boxed{4}. No: \boxed{5}."): ("{4, 5}", False),
    ("5", r"\boxed{5}, so it is \boxed{5}."): ("5", True),
    ("3", r"The area is \boxed{9}, hence the side is \boxed{3}."): ("{3, 9}", False),
}


def shown(values):
    return "{" + ", ".join(sorted(map(shown, values.args))) + "}" if type(values).__name__ == "FiniteSet" else str(values)


print(f"math-verify {version('math-verify')}, latex2sympy2_extended {version('latex2sympy2_extended')}")
found = {}
for right, reply in SEEN:
    read = parse(reply)
    found[right, reply] = shown(read[0]), verify(parse(f"${right}$"), read)
    print(f"right {right} {reply:50} read {found[right, reply][0]:6} {'right' if found[right, reply][1] else 'wrong'}")
sys.exit("changed" if found != SEEN else 0)
PY
