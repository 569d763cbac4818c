#!/usr/bin/env bash
# Guess: math-verify, whose scores many trainers of reasoning take, tells numbers of any size apart, and reads `3e8` as 3 * 10^8.
# Instead (math-verify 0.9.0): two numbers with a decimal point are equal if they are equal to six places behind it. So all
# the charges, masses and constants of physics below 5 * 10^-7 are one: the charge of an electron is its mass, its own negative
# and 10^-100. `3e8` and `1.6e-19` in plain text are 3 and 1.6, and inside a formula Euler's number times the digits: `3e8` in a
# box is 24e. 0 is equal to none of the small numbers, and those without a decimal point are told apart.
# Hurts: tasks of physics and chemistry: any small number is rewarded as right, of the wrong sign too, a right answer in the
# notation of programming languages is wrong, and a wrong one right.
# Here: the product scores nothing; rewards come from the trainer's own code.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check "math-verify[antlr4_13_2]==0.9.0" latex2sympy2_extended==1.11.0 sympy==1.14.0
"$tmp/venv/bin/python" - <<'PY'
import sys
from importlib.metadata import version

from math_verify import parse, verify

CHARGE = r"$1.6 \times 10^{-19}$"
LIGHT = r"$3 \times 10^{8}$"
SEEN = {
    (CHARGE, CHARGE): True,
    (CHARGE, r"$9.1 \times 10^{-31}$"): True,
    (CHARGE, r"$-1.6 \times 10^{-19}$"): True,
    (CHARGE, "$10^{-100}$"): True,
    (CHARGE, "$0.0000004$"): True,
    (CHARGE, "$0$"): False,
    (CHARGE, "1.6e-19"): False,
    ("$1.6$", "1.6e-19"): True,
    (LIGHT, "3e8"): False,
    ("$3$", "3e8"): True,
    (LIGHT, r"$\boxed{3e8}$"): False,
    ("$24e$", r"$\boxed{3e8}$"): True,
    ("$10^{-9}$", "$10^{-12}$"): False,
    (r"$\frac{1}{3000000}$", r"$\frac{1}{4000000}$"): False,
}
print(f"math-verify {version('math-verify')}, latex2sympy2_extended {version('latex2sympy2_extended')}")
found = {(gold, answer): verify(parse(gold), parse(answer)) for gold, answer in SEEN}
for (gold, answer), equal in found.items():
    print(f"gold {gold:24} answer {answer:25} {'right' if equal else 'wrong'}")
sys.exit("changed" if found != SEEN else 0)
PY
