#!/usr/bin/env bash
# What comes from PyPI into an environment of its own, as their dependencies do not agree: Harbor, verifiers, Agent Lightning.
#
# Usage: hubs.sh    makes DIR/harbor, DIR/verifiers and DIR/agentlightning (1 GB, two minutes); does nothing if they are there.
# DIR: $TITO_HUBS_DIR, or ~/.cache/tito-router/hubs-1. Prints it: TITO_HUBS. Harbor needs Python 3.12: without one on the PATH
# or in pyenv it says so, prints nothing, and the tests of the hubs are skipped.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NAME=hubs
. "$here/../support/engine_setup.sh"

HARBOR=0.26.0
VERIFIERS=0.4.0
AGENT_LIGHTNING=1.0.2
# What the modules of the router import there, beside aiohttp, which both have.
IMPORTED=(msgspec)

python=
for one in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
  if "$one" -c "" 2>/dev/null; then python=$one; fi # a shim of pyenv may stand for no Python at all
done
if [ -z "$python" ]; then
  say "no python3.12 on the PATH or in pyenv: the tests of Harbor, verifiers and Agent Lightning are skipped"
  exit 0
fi

dir=${TITO_HUBS_DIR:-$HOME/.cache/tito-router/hubs-1}
mkdir -p "$dir"
cd "$dir"
lock

hub() { # NAME REQUIREMENT
  if [ "$(cat "$1/.complete" 2>/dev/null)" = "$2 ${IMPORTED[*]}" ]; then return; fi
  say "$2, with $("$python" --version)"
  rm -rf "$1"
  "$python" -m venv "$1" 9>&-
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$2" "${IMPORTED[@]}" >&2 9>&-
  echo "$2 ${IMPORTED[*]}" > "$1/.complete"
}
hub harbor "harbor==$HARBOR"
hub verifiers "verifiers==$VERIFIERS"
hub agentlightning "agentlightning==$AGENT_LIGHTNING"
echo "$dir"
