# What the set-ups of real engines and trainers share. It is sourced, with NAME, which begins their messages, and offers
#
#   begin DIR FILE...      go to DIR, and end there if all files are in it; of two set-ups at once, one waits
#   lock                   of the folder: the second part of that
#   new_venv PYTHON WHAT   make DIR/venv by a Python, or the first 3.11 if none is named; `what` is how much that takes
#   pip COMMAND ...        of DIR/venv
#   site                   print its site-packages
#   make_model [SIZE]      make DIR/model, unless it is there: a tiny random Qwen3 with heads of this size
#
# A file that says that a part is complete is made last, so an interrupted set-up is started over.
set -euo pipefail

say() { printf '%s: [%3ds] %s\n' "$NAME" "$SECONDS" "$*" >&2; }

begin() {
  mkdir -p "$1"
  cd "$1"
  if there "${@:2}"; then exit 0; fi
  lock
  if there "${@:2}"; then
    say "it is complete"
    exit 0
  fi
}

there() {
  local file
  for file in "$@"; do [ -f "$file" ] || return 1; done
}

# The lock is a file beside what it protects; the kernel lets go of it when this process ends, however it ends. What is started
# from here does not inherit it.
lock() {
  exec 9>.setup.lock
  flock -n 9 || { say "another set-up of $PWD is running: waiting for it"; flock 9; }
}

new_venv() {
  local python=${1:-$(command -v python3.11 || command -v python3)}
  say "into $PWD with $("$python" --version 2>&1) ($2)"
  rm -rf venv
  "$python" -m venv venv 9>&-
}

pip() {
  venv/bin/python -m pip "$1" --quiet --disable-pip-version-check --no-input --retries 5 --timeout 60 "${@:2}" 9>&-
}

site() { venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

make_model() {
  if there model/config.json; then return; fi
  say "the model"
  rm -rf model model.tmp
  venv/bin/python "$here/../sglang_cpu/make_model.py" model.tmp "$@" 9>&- > model.log 2>&1 || {
    cat model.log >&2
    exit 1
  }
  rm -f model.log
  mv model.tmp model
}
