#!/usr/bin/env bash
# Guess: verl's judge of programs, prime_code, which scores tasks from APPS, TACO, CodeContests and Codeforces, pays a program whose
# output in Python is the expected one, up to white space, and no other.
# Instead (verl 0.9.1): it moves the program into a function, with a tab before each line, behind star imports of 18 modules. So
# `global count` is `itertools.count`, a text of several lines has tabs in it, `globals()` lacks the program's names, and an import
# from `__future__` is an error. `exit` is None, `sys.stdin` has no `buffer`, and `open(0)` is empty. All of these get 0. And a file
# of numbers, one a line, is compared to within 0.001 % unless all of them are digits only: with a negative number or a fraction in
# it, 1000001 is 1000000. Blank lines do not count.
# Hurts: a policy unlearns fast input, `exit()` and `global`, which are right programs, and is paid for near misses where one of
# the expected numbers is negative or a fraction.
# Here: the product scores nothing; rewards come from the trainer's own code.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile numpy==2.4.6
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps verl==0.9.1
cat > "$tmp/judge.py" <<'PY'
import contextlib
import importlib.util
import io
import subprocess
import sys
from importlib.metadata import distribution, version

path = distribution("verl").locate_file("verl/utils/reward_score/prime_code/__init__.py")  # verl itself imports torch
spec = importlib.util.spec_from_file_location("prime_code", path, submodule_search_locations=[str(path.parent)])
prime_code = sys.modules["prime_code"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prime_code)

SUM = "sum(map(int, {}.split()))"
PROGRAMS = {  # the program, its input, the right output
    "input()": (f"print({SUM.format('input()')})", "1 2\n", "3\n"),
    "a wrong sum": ("print(4)", "1 2\n", "3\n"),
    "sys.stdin.read()": (f"import sys\nprint({SUM.format('sys.stdin.read()')})", "1 2\n", "3\n"),
    "sys.stdin.buffer": (f"import sys\nprint({SUM.format('sys.stdin.buffer.read()')})", "1 2\n", "3\n"),
    "open(0)": (f"print({SUM.format('open(0).read()')})", "1 2\n", "3\n"),
    "sys.exit()": ("import sys\nprint(3)\nsys.exit()", "", "3\n"),
    "exit()": ("print(3)\nexit()", "", "3\n"),
    "global": ("count = 0\ndef step():\n    global count\n    count += 1\nstep()\nprint(count)", "", "1\n"),
    "a text of two lines": ('print(len("""a\nb"""))', "", "3\n"),
    "from __future__": ("from __future__ import annotations\nprint(3)", "", "3\n"),
    "globals()": ("n = 3\nprint(globals()['n'])", "", "3\n"),
    "1000001 for 1000000": ("print(1000001)", "", "1000000\n"),
    "-1000001 for -1000000": ("print(-1000001)", "", "-1000000\n"),
    "1000001 and -1": ("print(1000001)\nprint(-1)", "", "1000000\n-1\n"),
    "1000001 and 0.5": ("print(1000001)\nprint(0.5)", "", "1000000\n0.5\n"),
    "0 for 0.00000001": ("print(0)", "", "0.00000001\n"),
    "a blank line": ("print(1)\nprint()\nprint(2)", "", "1\n2\n"),
}
SEEN = {  # for Python, for verl
    "input()": "right right",
    "a wrong sum": "wrong wrong",
    "sys.stdin.read()": "right right",
    "sys.stdin.buffer": "right wrong",
    "open(0)": "right wrong",
    "sys.exit()": "right right",
    "exit()": "right wrong",
    "global": "right wrong",
    "a text of two lines": "right wrong",
    "from __future__": "right wrong",
    "globals()": "right wrong",
    "1000001 for 1000000": "wrong wrong",
    "-1000001 for -1000000": "wrong right",
    "1000001 and -1": "wrong right",
    "1000001 and 0.5": "wrong right",
    "0 for 0.00000001": "wrong right",
    "a blank line": "wrong right",
}


def judged(program, given, expected):
    python = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, text=True, check=True)
    with contextlib.redirect_stdout(io.StringIO()):
        score, _ = prime_code.compute_score(f"```python\n{program}\n```", {"inputs": [given], "outputs": [expected]}, continuous=True)
    return " ".join("right" if paid else "wrong" for paid in (python.stdout.strip() == expected.strip(), score))


if __name__ == "__main__":
    print("verl", version("verl"))
    print(f"{'':25}Python verl")
    found = {name: judged(*task) for name, task in PROGRAMS.items()}
    for name, line in found.items():
        print(f"{name:25}{line}")
    sys.exit("changed" if found != SEEN else 0)
PY
"$tmp/venv/bin/python" "$tmp/judge.py"
