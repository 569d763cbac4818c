#!/usr/bin/env bash
# Guess: in SymPy, by which graders of mathematics compare answers, both ways to read a text read the same: `2^3` is 8 for `sympify`
# and for `parse_expr`. And 2.0 is 2, 0.5 is 1/2, as in Python.
# Instead (sympy 1.14.0): `parse_expr` takes `^` between numbers for exclusive or, without an error: 2^3 is 1, 10^2 is 8, and 10^-2
# is -12. `sympify` takes it for a power. And a number with a point equals none without one: neither 2.0 and 2, nor 0.5 and 1/2,
# nor pairs, sets, matrices and formulas with them, nor Python's own 2.0 and SymPy's 2. `simplify` makes 0 of the difference of
# numbers, but not of x^2.0 - x^2.
# Hurts: a reward that compares with `==` refuses 2.0 for 2, and (0.5, 2) for (1/2, 2). One with `parse_expr` pays 8 for 10^2 and
# refuses 100. It is a part of the answers of a data set, so the mean reward goes up all the same.
# Here: the product scores nothing; rewards come from the trainer's own code.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile sympy==1.14.0 mpmath==1.3.0
"$tmp/venv/bin/python" - <<'PY'
import sys

import sympy
from sympy import simplify, sympify
from sympy.parsing.sympy_parser import parse_expr

print("sympy", sympy.__version__)
READ = {  # by sympify, by parse_expr
    "2**3": "8 8",
    "2^3": "8 1",
    "10^2": "100 8",
    "10^-2": "1/100 -12",
    "2^3^2": "512 3",
    "5^0": "1 5",
    "2*10^3": "2000 23",
}
EQUAL = {  # by ==, by the simplified difference
    ("2", "2"): (True, True),
    ("2.0", "2"): (False, True),
    ("0.5", "1/2"): (False, True),
    ("x + 1.0", "x + 1"): (False, True),
    ("2.0*x", "2*x"): (False, True),
    ("x**2.0", "x**2"): (False, False),
    ("(0.5, 2)", "(1/2, 2)"): (False, None),
    ("{1.0}", "{1}"): (False, False),
    ("Interval(0.0, 1)", "Interval(0, 1)"): (False, False),
    ("Matrix([1.0])", "Matrix([1])"): (False, False),
}
read = {}
for text in READ:
    read[text] = f"{sympify(text)} {parse_expr(text)}"
    print(f"{text:10} sympify {sympify(text)!s:8} parse_expr {parse_expr(text)}")
equal = {}
for pair in EQUAL:
    one, other = map(sympify, pair)
    try:
        zero = bool(simplify(one - other) == 0)
    except TypeError:
        zero = None
    equal[pair] = (bool(one == other), zero)
    print(f"{pair[0]:18} {pair[1]:16} == {equal[pair][0]!s:6} difference is 0: {zero}")
python = [2.0 == sympify("2"), sympify("2") == 2.0, sympify("2").equals(2.0)]
print("2.0 == sympify('2'), sympify('2') == 2.0, sympify('2').equals(2.0):", *python)
sys.exit("changed" if (read, equal, python) != (READ, EQUAL, [False, False, True]) else 0)
PY
