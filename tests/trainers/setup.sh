#!/usr/bin/env bash
# The trainers themselves, as far as they install without a GPU: verl, TRL, SkyRL and AReaL from PyPI, slime and miles as checkouts.
#
# Usage: setup.sh    makes DIR/venv, DIR/slime and DIR/miles (2.5 GB, some minutes); does nothing if they are there.
# Where GitHub is out of reach, there is no slime and no miles, and their tests are skipped. To have them, tell git of a
# mirror: git config --global url.MIRROR.insteadOf https://github.com/THUDM/slime
# DIR: $TITO_TRAINERS_DIR, or ~/.cache/tito-router/trainers-1. Prints the Python, a space, and what TITO_TRAINERS has to be.
#
# Not here, because it needs a GPU or builds for an hour: SGLang's and vLLM's modules, Megatron, DeepSpeed, flash-attn. What
# imports them gets stubs (tests/trainers/trainers.py).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=trainers
. "$here/../support/engine_setup.sh"

VERL=0.9.1
TRL=1.16.0
# miles imports the first of these, verl the others. They are those of verl's extra `verl-core` that its agent loops need.
IMPORTED=(pybase64 cachetools fastapi TransferQueue==0.1.10)
SLIME=624b824a898ab0ec1fcb4d373004c7f3852bf515 # main, 21 August 2026
MILES=31f1ca961a94cb860cec3b2dea34ec332bfa8f76 # main, 21 August 2026

dir=${TITO_TRAINERS_DIR:-$HOME/.cache/tito-router/trainers-1}
mkdir -p "$dir"
cd "$dir"
lock

made="$VERL $TRL ${IMPORTED[*]}"
if [ "$(cat venv/.complete 2>/dev/null)" != "$made" ]; then
  new_venv "${TITO_TRAINERS_PYTHON:-}" "2.5 GB, some minutes"
  say "torch, verl $VERL, TRL $TRL"
  pip install "torch==2.13.0" "verl==$VERL" "trl==$TRL" "${IMPORTED[@]}"
  echo "$made" > venv/.complete
fi

# For images: the processors of Qwen-VL want torchvision, and the trainers read the images of prompts with qwen-vl-utils.
images="torchvision==0.28.0 qwen-vl-utils==0.0.14 av"
if [ "$(cat venv/.images 2>/dev/null)" != "$images" ]; then
  say "torchvision"
  pip install --no-deps $images
  # Where torch is a CPU build, torchvision's operators do not load: the two that its module needs are declared first then.
  module="$(site)/torchvision/_meta_registrations.py"
  grep -q predeclared "$module" || { cat "$here/../sglang_cpu/torchvision_ops.py" "$module" > ops.tmp && mv ops.tmp "$module"; }
  echo "$images" > venv/.images
fi

# TRL's asynchronous GRPO drives agents with it.
openenv="openenv==0.10.0"
if [ "$(cat venv/.openenv 2>/dev/null)" != "$openenv" ]; then
  say "OpenEnv"
  pip install "verl==$VERL" "trl==$TRL" "$openenv"
  echo "$openenv" > venv/.openenv
fi

# SkyRL asks for Python 3.12, and for more than this environment has: these are what its trainer imports. With a Python 3.11 one
# class of the standard library is replaced for it (tests/trainers/test_skyrl.py).
skyrl="skyrl==0.4.0 skyrl-gym==0.4.0 loguru==0.7.3 jaxtyping==0.3.11 wadler_lindig==0.1.8 cloudpathlib==0.26.0 func_timeout==4.3.5"
if [ "$(cat venv/.skyrl 2>/dev/null)" != "$skyrl" ]; then
  say "SkyRL"
  pip install --no-deps --ignore-requires-python $skyrl
  echo "$skyrl" > venv/.skyrl
fi

# AReaL requires another transformers, and agents that nothing here uses: these are what its executor imports.
areal="areal==1.0.4 aiofiles==25.1.0 blinker==1.9.0 colorlog==6.12.0 einops==0.8.2 flask==3.1.3 itsdangerous==2.2.0 lark==1.3.1"
areal+=" llvmlite==0.50.0 numba==0.68.1"
if [ "$(cat venv/.areal 2>/dev/null)" != "$areal" ]; then
  say "AReaL"
  pip install --no-deps $areal
  echo "$areal" > venv/.areal
fi

# This folder outlives a checkout, so what the router needs may have changed since.
router="$(realpath "$here/../..") $(sha256sum < "$here/../../pyproject.toml")"
if [ "$(cat venv/.router 2>/dev/null)" != "$router" ]; then
  say "the router with its tests"
  pip install "verl==$VERL" "trl==$TRL" --editable "$here/../..[test]"
  echo "$router" > venv/.router
fi

checkout() { # NAME URL COMMIT
  if [ "$(git -C "$1" rev-parse HEAD 2>/dev/null)" != "$3" ]; then
    say "$1 at $3"
    rm -rf "$1"
    git init --quiet "$1"
    if ! git -C "$1" fetch --quiet --depth 1 "$2" "$3"; then
      say "$2 is out of reach: the tests of $1 are skipped"
      return
    fi
    git -C "$1" checkout --quiet FETCH_HEAD
  fi
  folders+=("$dir/$1")
}
folders=()
checkout slime https://github.com/THUDM/slime "$SLIME"
checkout miles https://github.com/radixark/miles "$MILES"
echo "$dir/venv/bin/python $(IFS=: && echo "${folders[*]}")"
