#!/usr/bin/env bash
# Images for the engines of tests/sglang_cpu and tests/vllm_cpu, and tiny random Qwen2.5-VL and Qwen3-VL to send them to.
#
# Usage: setup.sh [DIR]    makes DIR/qwen2_5_vl and DIR/qwen3_vl, and adds to both engines; does nothing where all is there.
# DIR: $TITO_VLM_DIR, or ~/.cache/tito-router/vlm-1. The engines are set up first, if they are not: see there.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-${TITO_VLM_DIR:-$HOME/.cache/tito-router/vlm-1}}
sglang=${TITO_SGLANG_DIR:-$HOME/.cache/tito-router/sglang-0.5.23}
vllm=${TITO_VLLM_DIR:-$HOME/.cache/tito-router/vllm-0.32.0}
NAME=vlm-cpu
. "$here/../support/engine_setup.sh"

"$here/../sglang_cpu/setup.sh" "$sglang"
"$here/../vllm_cpu/setup.sh" "$vllm"

# Each in a process of its own, which ends where everything is there.
(
  begin "$sglang" venv/.vision
  # SGLang looks for the processors of images in all of its models, and passes over those that it cannot import.
  module="$(site)/sglang/srt/models/qwen3_5.py"
  grep -q predeclared "$module" || { cat "$here/vision_ops.py" "$module" > ops.tmp && mv ops.tmp "$module"; }
  touch venv/.vision
)
(
  begin "$vllm" venv/.vision
  say "torchvision"
  pip install --no-compile --no-deps torchvision==0.28.0
  module="$(site)/torchvision/_meta_registrations.py"
  grep -q predeclared "$module" || { cat "$here/../sglang_cpu/torchvision_ops.py" "$module" > ops.tmp && mv ops.tmp "$module"; }
  touch venv/.vision
)
for family in qwen2_5_vl qwen3_vl; do
  (
    begin "$dir" "$family/config.json"
    say "$family"
    rm -rf "$family" model.tmp
    PYTHONPATH="$here/../.." "$vllm/venv/bin/python" "$here/make_vlm.py" "$family" model.tmp 9>&- > model.log 2>&1 || {
      cat model.log >&2
      exit 1
    }
    rm -f model.log
    mv model.tmp "$family"
  )
done
