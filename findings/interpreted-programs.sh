#!/usr/bin/env bash
# Guess: smolagents' interpreter, in which an agent that acts by code runs its programs, runs a program as Python does, or raises
# an error that names what it cannot do.
# Instead (smolagents 1.26.0, LocalPythonExecutor): much raises such an error (`yield`, `global`, `:=`, `match`, `super()`), and much
# else has another meaning without one. The `else` of a loop never runs. A decorator that the program defines, `@property` and
# `@cache` are ignored. A default is computed anew at each call, and a keyword stands in `**others` as well. A function that is
# made in a comprehension keeps the value of its round. `a[i()] += 1` calls `i` twice. `print` ignores `end` and `sep`.
# Hurts: a policy that acts by code is punished for right programs, and its observations show results that Python does not give. It
# learns a dialect; run by Python, as in smolagents' remote executors, the same programs do something else.
# Here: the router passes a reply on as it was sampled, and runs no program.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check smolagents==1.26.0
"$tmp/venv/bin/python" - <<'PY'
import subprocess
import sys
from importlib.metadata import version

from smolagents import LocalPythonExecutor

PROGRAMS = {
    "plain": "print(sum(n * n for n in range(4)))",
    "for ... else": "for n in [4, 6]:\n    if n % 2:\n        break\nelse:\n    print('all are even')",
    "while ... else": "n = 2\nwhile n:\n    n -= 1\nelse:\n    print('done')",
    "decorator": "def twice(f):\n    return lambda n: 2 * f(n)\n@twice\ndef same(n):\n    return n\nprint(same(4))",
    "@property": "class Circle:\n    @property\n    def area(self):\n        return 3\nprint(Circle().area == 3)",
    "@cache": (
        "from functools import cache\nruns = []\n@cache\ndef f(n):\n    runs.append(n)\n    return n\n"
        "f(1)\nf(1)\nprint(len(runs))"
    ),
    "default": "def add(n, kept=[]):\n    kept.append(n)\n    return kept\nadd(1)\nprint(add(2))",
    "early default": "n = 1\ndef f(m=n):\n    return m\nn = 2\nprint(f())",
    "keyword and **": "def f(*, n=1, **others):\n    return n, others\nprint(f(n=2, m=3))",
    "late closure": "print([f() for f in [lambda: n for n in range(3)]])",
    "+= evaluates once": "runs = []\ndef i():\n    runs.append(0)\n    return 0\na = [5]\na[i()] += 1\nprint(len(runs))",
    "print(end=)": "for n in range(3):\n    print(n, end=' ')",
    "print(sep=)": "print(2026, 1, 5, sep='-')",
    "unbound": (
        "n = 1\ndef f():\n    m = n\n    n = 2\n    return m\n"
        "try:\n    print(f())\nexcept UnboundLocalError:\n    print('no value')"
    ),
    "yield": "def f():\n    yield 1\nprint(list(f()))",
    "global": "n = 0\ndef f():\n    global n\n    n += 1\nf()\nprint(n)",
}
SEEN = {
    "plain": "14",
    "for ... else": "",
    "while ... else": "",
    "decorator": "4",
    "@property": "False",
    "@cache": "2",
    "default": "[2]",
    "early default": "2",
    "keyword and **": "(2, {'n': 2, 'm': 3})",
    "late closure": "[0, 1, 2]",
    "+= evaluates once": "2",
    "print(end=)": "0\n1\n2",
    "print(sep=)": "2026 1 5",
    "unbound": "1",
    "yield": "(refused)",
    "global": "(refused)",
}


def interpreted(program):
    executor = LocalPythonExecutor(["functools"])
    executor.send_tools({})
    try:
        return executor(program).logs.strip()
    except Exception as error:
        assert "not supported" in str(error), error
        return "(refused)"


print("smolagents", version("smolagents"))
print(f"{'':20}{'Python':22}smolagents")
found = {}
for name, program in PROGRAMS.items():
    right = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    found[name] = interpreted(program)
    print(f"{name:20}{right!r:22}{found[name]!r}")
sys.exit("changed" if found != SEEN else 0)
PY
