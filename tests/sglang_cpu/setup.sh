#!/usr/bin/env bash
# A real SGLang 0.5.23 on a machine without a GPU, with a tiny random Qwen3 and a tokenizer of its own.
#
# Usage: setup.sh [DIR]    makes DIR/venv and DIR/model (about 3.5 GB, some minutes); does nothing if both are complete.
# DIR: $TITO_SGLANG_DIR, or ~/.cache/tito-router/sglang-0.5.23. Linux, Python 3.11 (another one: TITO_SGLANG_PYTHON).
#
# Everything comes from PyPI. The compiled GPU kernels are not installed: sgl_kernel_stub.py stands in for them, and fails
# loudly if one is ever called (the CPU path calls none).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=sglang-cpu
. "$here/../support/engine_setup.sh"

begin "${1:-${TITO_SGLANG_DIR:-$HOME/.cache/tito-router/sglang-0.5.23}}" venv/.complete venv/.trl model/config.json

if ! there venv/.complete; then
  new_venv "${TITO_SGLANG_PYTHON:-}" "3.5 GB, some minutes"
  say "torch"
  pip install "torch==2.13.0"
  say "what SGLang needs beside it"
  pip install -c "$here/constraints.txt" -r "$here/requirements.txt"
  pip install --no-deps torchvision==0.28.0 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 soundfile==0.13.1 timm==1.0.25
  say "SGLang"
  pip install --no-deps sglang==0.5.23
  site=$(site)
  cp "$here/sgl_kernel_stub.py" "$site/"
  echo "import sgl_kernel_stub" > "$site/sgl_kernel_stub.pth"
  # Where torch is a CPU build, torchvision's operators do not load: the two that its module needs are declared first then.
  ops="$site/torchvision/_meta_registrations.py"
  cat "$here/torchvision_ops.py" "$ops" > ops.tmp
  mv ops.tmp "$ops"
  touch venv/.complete
fi

if ! there venv/.trl; then
  say "TRL, which trains on what SGLang samples"
  pip install --no-deps trl==1.16.0 accelerate==1.15.0
  touch venv/.trl
fi

make_model
say "complete"
