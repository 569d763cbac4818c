#!/usr/bin/env bash
# Guess: installing a trainer adds the trainer's own package, and a project's `python -m tests.NAME` runs what it ran before.
# Instead (verl 0.9.1): the wheel installs a package called `tests`, too, of 77 files. It has an `__init__.py`, so it wins against a
# project's `tests` folder that has none, although the project's folder comes first.
# Hurts: a program that a test starts with `-m` is not found any more, once the tests run in the trainer's environment. pytest itself,
# with `--import-mode=importlib`, does not notice.
# Here: the tests of trainers start programs by their path.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3}" -m venv "$tmp/venv"
mkdir -p "$tmp/project/tests"
echo 'print("the one of the project")' >"$tmp/project/tests/own.py"
run() { (cd "$tmp/project" && "$tmp/venv/bin/python" -m tests.own 2>&1) || true; }
before=$(run)
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps verl==0.9.1
after=$(run)
files=$(find "$tmp"/venv/lib/python3.*/site-packages/tests -name '*.py' | wc -l)
printf 'verl==0.9.1\n  before: %s\n  after:  %s\n  files of its package `tests`: %s\n' "$before" "${after##*: }" "$files"
[ "$before" = "the one of the project" ]
[ "${after##*: }" = "No module named tests.own" ]
