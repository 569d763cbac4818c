#!/usr/bin/env bash
# A real SGLang 0.5.23 on a machine without a GPU, with a tiny random Qwen3 and a tokenizer of its own.
#
# Usage: setup.sh [DIR]    makes DIR/venv and DIR/model (about 3.5 GB, some minutes); does nothing if both are complete.
# DIR: $TITO_SGLANG_DIR, or ~/.cache/tito-router/sglang-0.5.23. Linux, Python 3.11 (another one: TITO_SGLANG_PYTHON).
#
# Everything comes from PyPI. The compiled GPU kernels are not installed: sgl_kernel_stub.py stands in for them, and fails
# loudly if one is ever called (the CPU path calls none). An interrupted run is started over; of two at once, one waits.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-${TITO_SGLANG_DIR:-$HOME/.cache/tito-router/sglang-0.5.23}}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
cd "$dir"

say() { printf 'sglang-cpu: [%3ds] %s\n' "$SECONDS" "$*" >&2; }
complete() { [ -f venv/.complete ] && [ -f venv/.trl ] && [ -f model/config.json ]; }
pip() {
  venv/bin/python -m pip "$1" --quiet --disable-pip-version-check --no-input --retries 5 --timeout 60 "${@:2}" 9>&-
}

complete && exit 0

# The lock is a file beside what it protects; the kernel lets go of it when this process ends, however it ends.
exec 9>.setup.lock
flock -n 9 || { say "another set-up of $dir is running: waiting for it"; flock 9; }
complete && { say "it is complete"; exit 0; }

if [ ! -f venv/.complete ]; then
  python=${TITO_SGLANG_PYTHON:-$(command -v python3.11 || command -v python3)}
  say "into $dir with $("$python" --version 2>&1) (3.5 GB, some minutes)"
  rm -rf venv
  "$python" -m venv venv 9>&-
  say "torch"
  pip install "torch==2.13.0"
  say "what SGLang needs beside it"
  pip install -c "$here/constraints.txt" -r "$here/requirements.txt"
  pip install --no-deps torchvision==0.28.0 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 soundfile==0.13.1 timm==1.0.25
  say "SGLang"
  pip install --no-deps sglang==0.5.23
  site=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  cp "$here/sgl_kernel_stub.py" "$site/"
  echo "import sgl_kernel_stub" > "$site/sgl_kernel_stub.pth"
  # Where torch is a CPU build, torchvision's operators do not load: the two that its module needs are declared first then.
  ops="$site/torchvision/_meta_registrations.py"
  cat "$here/torchvision_ops.py" "$ops" > ops.tmp
  mv ops.tmp "$ops"
  touch venv/.complete
fi

if [ ! -f venv/.trl ]; then
  say "TRL, which trains on what SGLang samples"
  pip install --no-deps trl==1.16.0 accelerate==1.15.0
  touch venv/.trl
fi

if [ ! -f model/config.json ]; then
  say "the model"
  rm -rf model model.tmp
  venv/bin/python "$here/make_model.py" model.tmp 9>&- > model.log 2>&1 || { cat model.log >&2; exit 1; }
  rm -f model.log
  mv model.tmp model
fi
say "complete"
