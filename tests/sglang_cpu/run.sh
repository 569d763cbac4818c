#!/usr/bin/env bash
# One GPU-less SGLang worker in the foreground; ready when /health answers 200, 20 to 40 s from now. Stop it by its pid.
# Usage: run.sh PORT [sglang flags]     DIR as for setup.sh: $TITO_SGLANG_DIR, or ~/.cache/tito-router/sglang-0.5.23
# Another model than DIR/model: TITO_MODEL=FOLDER.
set -euo pipefail

port=${1:?usage: run.sh PORT [sglang flags]}
shift
dir=${TITO_SGLANG_DIR:-$HOME/.cache/tito-router/sglang-0.5.23}
[ -f "$dir/venv/.complete" ] || { echo "no SGLang in $dir: run setup.sh first" >&2; exit 1; }

export SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND="${SGLANG_CPU_OMP_THREADS_BIND:-all}" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The features of images are kept by the hash of the file, and neither an update of the weights nor a flush forgets them.
export SGLANG_VLM_CACHE_SIZE_MB=${SGLANG_VLM_CACHE_SIZE_MB:-0}
exec "$dir/venv/bin/python" -m sglang.launch_server --model-path "${TITO_MODEL:-$dir/model}" --device cpu \
  --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --dtype float32 \
  --host 127.0.0.1 --port "$port" --max-total-tokens 20000 --max-running-requests 16 --mem-fraction-static 0.1 \
  --skip-server-warmup --sleep-on-idle "$@"
