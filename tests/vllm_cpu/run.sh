#!/usr/bin/env bash
# One GPU-less vLLM worker in the foreground; ready when /health answers 200, 30 to 60 s from now. Stop it by its pid.
# Usage: run.sh PORT [vllm flags]     DIR as for setup.sh: $TITO_VLLM_DIR, or ~/.cache/tito-router/vllm-0.32.0
# Another model than DIR/model: TITO_MODEL=FOLDER.
set -euo pipefail

port=${1:?usage: run.sh PORT [vllm flags]}
shift
dir=${TITO_VLLM_DIR:-$HOME/.cache/tito-router/vllm-0.32.0}
[ -f "$dir/venv/.complete" ] || { echo "no vLLM in $dir: run setup.sh first" >&2; exit 1; }

# Development mode has the calls to all workers: pause, abort, weights, the cache (docs/engines.md).
export VLLM_SERVER_DEV_MODE=${VLLM_SERVER_DEV_MODE-1}
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind # else all workers share the first core
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONDONTWRITEBYTECODE= # three processes would each compile thousands of modules, at every start
exec "$dir/venv/bin/vllm" serve "${TITO_MODEL:-$dir/model}" --host 127.0.0.1 --port "$port" --max-model-len 4096 --dtype float32 \
  --enforce-eager --enable-scale-out --enable-prompt-tokens-details "$@"
