#!/usr/bin/env bash
# Guess: NumPy sums an array of half precision in a wider type, or at least in pairs: 1000 ones are 1000, and their mean is 1.
# Instead (numpy 2.4.6, ml_dtypes 0.6.0): in bfloat16, the type that `np.asarray` gives for a bfloat16 array of JAX, a sum that
# has come to 256 stays there, for 256 + 1 is rounded to 256. The mean of 1000 ones is 0.256, and of 500 rewards of 1 among 1000
# 0.256 too. float16 is right along the last axis, and stays at 2048 along the first; its mean is right along both. No warning.
# Hurts: sums of log-probabilities, of a mask's tokens and of rewards, advantages and losses that are divided by such a mean.
# A sequence of 4000 tokens of -0.5 each has -128 instead of -2000. Short tests are right.
# Here: log-probabilities are Python floats from the engine's JSON to the trainer, and are never summed in half precision.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
"$tmp/venv/bin/python" - <<'PY'
import sys
import warnings

import ml_dtypes
import numpy as np

warnings.simplefilter("error")
ONES = np.ones(1000)
HALF = np.array([1, 0] * 500)
LOGPROBS = np.full(4000, -0.5)
ROWS = np.ones((5000, 2))
SEEN = {  # bfloat16, float16, float32
    "sum of 1000 ones": [256, 1000, 1000],
    "mean of 1000 ones": [0.255859375, 1, 1],
    "mean of 500 ones, 500 zeros": [0.255859375, 0.5, 0.5],
    "last of cumsum": [256, 1000, 1000],
    "standard deviation of ones": [0.50390625, 0, 0],
    "4000 log-probs of -0.5": [-128, -2000, -2000],
    "5000 rows, sum(axis=0)": [256, 2048, 5000],
    "5000 columns, sum(axis=1)": [256, 5000, 5000],
    "5000 rows, mean(axis=0)": [0.05126953125, 1, 1],
    "sum(dtype=np.float32)": [1000, 1000, 1000],
}
print("numpy", np.__version__, "ml_dtypes", ml_dtypes.__version__)
print(f"{'':30}{'bfloat16':>16}{'float16':>12}{'float32':>12}")
found = {name: [] for name in SEEN}
for kind in (ml_dtypes.bfloat16, np.float16, np.float32):
    ones, half, logprobs, rows = (array.astype(kind) for array in (ONES, HALF, LOGPROBS, ROWS))
    results = (
        ones.sum(),
        ones.mean(),
        half.mean(),
        ones.cumsum()[-1],
        ones.std(),
        logprobs.sum(),
        rows.sum(axis=0)[0],
        rows.T.copy().sum(axis=1)[0],
        rows.mean(axis=0)[0],
        ones.sum(dtype=np.float32),
    )
    for name, result in zip(SEEN, results, strict=True):
        found[name].append(float(result))
for name, (bfloat, half, single) in found.items():
    print(f"{name:30}{bfloat:16}{half:12}{single:12}")
sys.exit("changed" if found != SEEN else 0)
PY
